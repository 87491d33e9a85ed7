//! Mistakes of the caller and of what it relies on: different calls that look alike, alignments that overflow, a store that
//! falls silent or answers late.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use symmem::ReduceOp;
use symmem::store::{MemoryStore, Store, TcpStore};
use symmem::{Algorithm, Deadline, Error, Result, World, WorldBuilder};

/// No test waits as long unless something hangs.
const LONG: Duration = Duration::from_secs(60);

fn within(timeout: Duration) -> WorldBuilder {
    World::builder().timeout(timeout)
}

/// Lengths whose short hashes are the same, and of which each rank reduces its share: by a hash alone, one rank would get the
/// sum of another call.
#[test]
fn lengths_that_look_alike_are_different_calls() {
    World::threads(2, |world| {
        let mut short = world.alloc::<u8>(1025).unwrap().rendezvous(&world).unwrap();
        let mut long = world.alloc::<u8>(167_545).unwrap().rendezvous(&world).unwrap();
        let x = if world.rank() == 0 { &mut short } else { &mut long };
        x.local_mut().fill(7);
        let e = x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot).unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "length", .. }), "{e}");
        assert!(x.local().iter().all(|v| *v == 7), "nothing was reduced");
        world.barrier().unwrap();
    })
    .unwrap();
}

/// Rank 2 has come to a barrier, given it up, and not looked again when all have passed it. Nobody may be two calls ahead of it
/// by then, though the next one fails on the others without it: they would overwrite what it has yet to read.
#[test]
fn a_call_that_turned_out_to_differ_waits_for_late_ranks_before_the_next() {
    let step = std::sync::Barrier::new(3);
    let told = World::threads(3, |world| {
        let (rank, short) = (world.rank(), Duration::from_millis(50));
        // Nothing panics before the last step: the others would wait for it.
        let text = |outcome: Result<()>| match outcome {
            Ok(()) => "ok".to_owned(),
            Err(Error::Timeout { waiting_for, .. }) => format!("timeout of {waiting_for:?}"),
            Err(Error::Mismatch { rank, .. }) => format!("mismatch with {rank}"),
            Err(other) => other.to_string(),
        };
        let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
        world.barrier().unwrap();
        let mut told = Vec::new();
        if rank == 2 {
            world.set_timeout(short);
            told.push(text(world.barrier()));
        }
        step.wait();
        if rank < 2 {
            told.push(text(world.barrier()));
        }
        step.wait();
        if rank == 0 {
            world.set_timeout(short);
            told.push(text(x.share().map(drop).map_err(Error::from)));
        }
        step.wait();
        if rank == 1 {
            told.push(text(world.all_reduce(&mut [1_u32], ReduceOp::Sum)));
        }
        step.wait();
        if rank == 0 {
            told.push(text(world.barrier()));
        }
        step.wait();
        if rank == 2 {
            told.push(text(world.barrier()));
        }
        step.wait();
        told
    })
    .unwrap();
    assert_eq!(told[0], ["ok", "timeout of [1, 2]", "timeout of [2]"]);
    assert_eq!(told[1], ["ok", "mismatch with 0"]);
    assert_eq!(told[2], ["timeout of [0, 1]", "ok"]);
}

/// Nothing lies behind the offset that overflows, and it would be told all the same.
#[test]
fn an_alignment_that_overflows_is_refused_where_no_rows_follow() {
    World::threads(2, |world| {
        let mut x = world.alloc::<f32>(8).unwrap().rendezvous(&world).unwrap();
        let mut splits = world.alloc::<i64>(4).unwrap().rendezvous(&world).unwrap();
        for align in [usize::MAX, usize::MAX / 2 + 2] {
            splits.local_mut().copy_from_slice(&[1, 0, 1, 0]);
            let mut received = [0; 8];
            let outcome = x.all_to_all_v_2d(2, &mut splits, align, &mut [0.0; 8], &mut received);
            let Err(Error::Usage { op: "all_to_all_v_2d", .. }) = outcome else {
                panic!("{outcome:?} {received:?}")
            };
        }
        world.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn a_name_with_different_members_is_a_mismatch_on_every_rank() {
    World::threads(3, |world| {
        let members: &[usize] = if world.rank() == 0 { &[0, 1] } else { &[0, 1, 2] };
        let e = world.subgroup_builder(members).name("x").build().unwrap().ready().unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "members", .. }), "{e}");
        world.barrier().unwrap();
    })
    .unwrap();
}

/// It greets its client and says nothing more.
#[test]
fn a_store_that_falls_silent_is_given_up_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut greeting = [0; 10];
            stream.read_exact(&mut greeting).unwrap();
            stream.write_all(&greeting[6..]).unwrap();
            held.push(stream);
        }
    });
    let store = TcpStore::connect(&address, Deadline::within(LONG)).unwrap();
    let (told, outcome) = channel();
    std::thread::spawn(move || {
        let joined = within(Duration::from_millis(500)).join(0, 2, Arc::new(store));
        told.send(joined.map(drop)).unwrap();
    });
    let e = outcome.recv_timeout(LONG).expect("it still waits").unwrap_err();
    assert!(matches!(e, Error::Timeout { .. } | Error::Unavailable { .. }), "{e}");
}

/// A store whose `check` is slow: what the last rank writes meanwhile is there when it looks.
struct SlowCheck(Arc<MemoryStore>);

impl Store for SlowCheck {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }
    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.0.add(key, amount)
    }
    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.0.wait(keys, deadline)
    }
    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>> {
        self.0.compare_set(key, expected, new)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        std::thread::sleep(Duration::from_millis(400));
        self.0.check(keys)
    }
    fn delete(&self, key: &str) -> Result<bool> {
        self.0.delete(key)
    }
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.append(key, value)
    }
    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.0.multi_get(keys, deadline)
    }
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        self.0.multi_set(entries)
    }
    fn num_keys(&self) -> Result<i64> {
        self.0.num_keys()
    }
}

#[test]
fn a_rank_that_comes_just_after_the_deadline_is_named() {
    let memory = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        let late = Arc::clone(&memory);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(650));
            let _ = within(Duration::from_millis(500)).join(1, 2, late);
        });
        let store = Arc::new(SlowCheck(memory));
        let e = within(Duration::from_millis(500)).join(0, 2, store).unwrap_err();
        assert!(e.to_string().contains("rank 1"), "{e}");
    });
}
