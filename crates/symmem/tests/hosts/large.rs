//! Large messages, whose bytes are received where they belong, and what becomes of them when their call does not end well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use symmem::{Error, Group, ReduceOp, World};
use symmem_testing::{Random, Ranks, die_after, stop_until, test_name};

use super::{ms, rank, set, store_barrier, works};

/// Several pieces.
const LEN: usize = 100_001;

fn number(name: &str) -> u64 {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Each rank alone on a host.
fn join_alone() -> symmem::Result<World> {
    set("SYMMEM_HOST", &format!("h{}", rank()));
    World::from_env()
}

/// Large calls with the right results until one fails: its error, and its data.
fn until_it_fails(group: &Group) -> (Error, Vec<u64>) {
    loop {
        let mut data: Vec<u64> = (0..LEN).map(|i| (i * (rank() + 1)) as u64).collect();
        if let Err(e) = group.all_reduce(&mut data, ReduceOp::Sum) {
            return (e, data);
        }
        let times: usize = (1..=group.size()).sum();
        assert!(data.iter().enumerate().all(|(i, sum)| *sum == (i * times) as u64));
    }
}

#[test]
fn a_rank_that_dies_in_the_middle_of_a_large_message_is_named() {
    let mut random = Random::unseeded();
    for (ranks, victim) in [(2, 0), (2, 1), (3, 1)] {
        let delay = random.below(60_000);
        println!("rank {victim} of {ranks} dies after {delay} µs");
        let job = Ranks::new(ranks).dying(&[victim]).may_leave_files();
        let job = job.env("VICTIM", victim).env("DELAY", delay).env("SYMMEM_TIMEOUT", 20);
        job.start(test_name!(), || {
            let world = join_alone().unwrap();
            works(&world);
            store_barrier(&world, "working");
            if rank() == number("VICTIM") as usize {
                die_after(Duration::from_micros(number("DELAY")));
            }
            let (e, _) = until_it_fails(&world);
            let Error::PeerLost { rank: lost, .. } = e else { panic!("{e}") };
            assert_eq!(lost, number("VICTIM") as usize, "{e}");
        });
    }
}

/// The other rank stops in the middle of a message, and sends the rest of it when this one has its data back.
#[test]
fn what_comes_after_a_call_was_given_up_changes_nothing_of_its_owner() {
    let mut random = Random::unseeded();
    for _ in 0..3 {
        let delay = random.below(20_000);
        println!("rank 1 stops after {delay} µs");
        let job = Ranks::new(2).env("DELAY", delay).env("SYMMEM_TIMEOUT", 20);
        job.start(test_name!(), || {
            let world = join_alone().unwrap();
            works(&world);
            store_barrier(&world, "working");
            let is_over = Arc::new(AtomicBool::new(false));
            let stopping = (rank() == 1).then(|| {
                let is_over = Arc::clone(&is_over);
                std::thread::spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_micros(number("DELAY")));
                        stop_until(ms(1500));
                    }
                })
            });
            if rank() == 0 {
                world.set_timeout(ms(300));
            }
            let (e, mut data) = until_it_fails(&world);
            is_over.store(true, Ordering::Relaxed);
            if rank() == 0 {
                assert!(
                    matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [1]),
                    "{e}"
                );
                data.fill(77);
                let begin = Instant::now();
                while begin.elapsed() < ms(2000) {
                    assert!(data.iter().all(|value| *value == 77));
                    std::thread::sleep(ms(1));
                }
            } else {
                assert!(matches!(e, Error::OutOfStep { rank: 0, .. }), "{e}");
            }
            world.set_timeout(ms(20_000));
            world.resync().unwrap();
            works(&world);
            let mut sum = vec![rank() as u32 + 1; LEN];
            world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|sum| *sum == 3));
            if let Some(thread) = stopping {
                thread.join().unwrap();
            }
        });
    }
}

/// A put is stored element by element: whoever reads meanwhile finds the old value of each or the new one.
#[test]
fn no_element_of_a_large_put_is_seen_half_written() {
    Ranks::new(2).env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        let world = join_alone().unwrap();
        let x = world.alloc::<u64>(LEN).unwrap().rendezvous(&world).unwrap().open().unwrap();
        for round in 1..=20_u64 {
            let value = round * 0x0101_0101_0101_0101;
            if rank() == 0 {
                x.put_signal(1, 0, &vec![value; LEN], 0, ms(20_000)).unwrap();
                world.wait_signal(1, 1, ms(20_000)).unwrap();
                continue;
            }
            let (mut got, mut is_there) = (vec![0; LEN], false);
            while !is_there {
                is_there = x.wait_signal(0, 0, ms(0)).is_ok();
                x.get(1, 0, &mut got).unwrap();
                let old = value - 0x0101_0101_0101_0101;
                assert!(got.iter().all(|seen| [old, value].contains(seen)));
            }
            assert!(got.iter().all(|seen| *seen == value));
            world.put_signal(0, 1, ms(20_000)).unwrap();
        }
    });
}
