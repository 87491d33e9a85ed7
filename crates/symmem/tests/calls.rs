//! Calls that do not pair up, give up, are interrupted or are left alone: what each rank is told, and what works afterwards.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests stop at the first surprise too"
)]

mod calls {
    mod blame;
    mod corners;
    mod kept;
}

use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use symmem::{Error, Group, Pool, ReduceOp, World, interruptible};

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(30);
/// Held by tests that count descriptors.
static DESCRIPTORS: Mutex<()> = Mutex::new(());

fn group_with(world: &World, timeout: Duration) -> Group {
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    world.barrier().unwrap(); // all have made it, so that the shortest patience is enough
    group.ready().unwrap();
    group
}

fn threads(ranks: usize, body: impl Fn(World) + Sync) {
    World::threads(ranks, body).unwrap();
}

fn out_of_step(result: symmem::Result<()>) {
    assert!(matches!(result, Err(Error::OutOfStep { rank: 0, .. })), "{result:?}");
}

/// One rank gives up its first call; the others make theirs when it is in its second, with other data.
#[test]
fn a_sum_is_never_that_of_another_call() {
    threads(3, |world| {
        let group = group_with(&world, SHORT);
        for len in [1, 6, 1000, 40_000, 300_000] {
            let mut data = vec![100 + world.rank() as u32; len];
            if world.rank() == 0 {
                let late = group.all_reduce(&mut data, ReduceOp::Sum);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
            }
            world.barrier().unwrap();
            data.fill(200);
            out_of_step(group.all_reduce(&mut data, ReduceOp::Sum));
            out_of_step(group.broadcast(&mut data, 0));
            assert!(data.iter().all(|v| *v == 200));
            group.resync_by(LONG).unwrap();
            group.set_timeout(LONG);
            data.fill(world.rank() as u32);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|v| *v == 3), "{len}");
            group.set_timeout(SHORT);
            world.barrier().unwrap();
        }
    });
}

/// Rank 0 gives up a call while that still waits for an earlier one, and then makes one that looks the same.
#[test]
fn a_call_that_was_never_reached_is_not_replaced_by_the_next() {
    threads(2, |world| {
        let group = group_with(&world, SHORT);
        let sum = |value: u32| {
            let mut data = [value; 5];
            group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[0])
        };
        if world.rank() == 0 {
            assert!(matches!(group.barrier(), Err(Error::Timeout { .. })));
            assert!(matches!(sum(10), Err(Error::Timeout { .. })));
        }
        world.barrier().unwrap();
        let calls = if world.rank() == 0 { 1 } else { 2 };
        for call in 0..calls {
            let told =
                if call == 0 && world.rank() == 1 { group.barrier() } else { sum(1).map(drop) };
            assert!(matches!(&told, Err(Error::OutOfStep { rank: 0, .. })), "{told:?}");
        }
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        assert_eq!(sum(3).unwrap(), 6);
    });
}

/// The same where a rank has yet to come to calls that differ.
#[test]
fn a_call_behind_calls_that_differ_is_not_replaced_by_the_next() {
    threads(3, |world| {
        let group = group_with(&world, SHORT);
        let mut data = [1_u32; 5];
        match world.rank() {
            0 => {
                group.set_timeout(LONG);
                assert!(matches!(group.broadcast(&mut data, 0), Err(Error::Mismatch { .. })));
                group.set_timeout(SHORT);
                let e = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
                assert!(
                    matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [2]),
                    "{e}"
                );
            }
            1 => {
                group.set_timeout(LONG);
                assert!(matches!(group.broadcast(&mut data, 1), Err(Error::Mismatch { .. })));
            }
            _ => {}
        }
        world.barrier().unwrap();
        out_of_step(group.all_reduce(&mut data, ReduceOp::Sum));
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3; 5]);
    });
}

/// A barrier or change of phase that gave up so is made again, or nothing else is.
#[test]
fn a_call_that_was_put_off_comes_first() {
    for again in [true, false] {
        threads(2, |world| {
            let group = group_with(&world, LONG);
            let x = world.alloc::<u8>(10).unwrap().rendezvous(&group).unwrap();
            if world.rank() == 0 {
                let late = group.barrier_on(0, SHORT);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                group.set_timeout(SHORT);
                let failed = x.share().err().unwrap();
                assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
                group.set_timeout(LONG);
                world.barrier().unwrap();
                if again {
                    drop(failed.kept.resume().unwrap());
                    return;
                }
                let x = failed.kept.give_up().unwrap_or_else(|_| panic!("nobody can read it"));
                out_of_step(group.barrier());
                assert_eq!(x.local(), [0; 10]);
            } else {
                world.barrier().unwrap();
                if again {
                    group.barrier().unwrap();
                    drop(x.share().unwrap());
                    return;
                }
                let told = group.barrier();
                if told.is_ok() {
                    out_of_step(x.share().map(drop).map_err(Error::from));
                } else {
                    out_of_step(told);
                }
            }
            group.resync_by(LONG).unwrap();
            group.barrier().unwrap();
        });
    }
}

/// Rank 0 has given up the first call, which turns out to be another than rank 1's. Their second calls still pair up.
#[test]
fn a_disagreement_on_a_call_given_up_does_not_shift_the_next() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let late = group.barrier_on(0, SHORT);
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        }
        world.barrier().unwrap();
        if world.rank() == 1 {
            let e = group.broadcast(&mut [1], 0).unwrap_err();
            assert!(matches!(e, Error::Mismatch { rank: 0, .. }), "{e}");
        }
        let mut data = [1 + world.rank() as u64];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3]);
        group.barrier().unwrap();
    });
}

/// Lengths, memory and types whose short hashes are equal.
#[test]
fn no_two_calls_are_taken_for_one() {
    threads(2, |world| {
        let mut short = world.alloc::<u8>(1025).unwrap().rendezvous(&world).unwrap();
        let mut long = world.alloc::<u8>(167_545).unwrap().rendezvous(&world).unwrap();
        for _ in 0..3 {
            // The first time in full, later by their numbers.
            short.all_reduce(ReduceOp::Sum).unwrap();
            long.all_reduce(ReduceOp::Sum).unwrap();
            let x = if world.rank() == 0 { &mut short } else { &mut long };
            x.local_mut().fill(7);
            let e = x.all_reduce(ReduceOp::Sum).unwrap_err();
            let lengths = ["1025 elements", "167545 elements"];
            let [ours, other] = [lengths[world.rank()], lengths[1 - world.rank()]];
            let Error::Mismatch { what: "length", ours: o, theirs: t, .. } = &e else {
                panic!("{e}")
            };
            assert_eq!([o.as_str(), t.as_str()], [ours, other]);
            assert!(x.local().iter().all(|v| *v == 7));
        }
        short.all_reduce(ReduceOp::Sum).unwrap();
    });
}

/// More calls than are known by numbers, in an order in which they take each other's places.
#[test]
fn any_number_of_calls_pair_up() {
    threads(2, |world| {
        for round in 0..3 {
            for len in (0..700).chain((0..700).rev()) {
                let mut data = vec![1_u8; len];
                world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|v| *v == 2), "{round} {len}");
            }
            let mut data = vec![1_u8; 100 + world.rank()];
            let e = world.all_reduce(&mut data, ReduceOp::Sum).unwrap_err().to_string();
            assert!(e.contains("on the length: here 10") && e.ends_with("elements"), "{e}");
        }
    });
}

/// A thread that waits for its turn behind another one's call gives up at its own deadline.
#[test]
fn a_call_behind_that_of_another_thread_keeps_its_deadline() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let late = Duration::from_secs(3);
            group.set_timeout(late);
            std::thread::scope(|scope| {
                let first = scope.spawn(|| group.all_reduce(&mut [1.0; 9], ReduceOp::Sum));
                std::thread::sleep(SHORT);
                group.set_timeout(SHORT);
                let begin = Instant::now();
                let calls: [&dyn Fn() -> symmem::Result<()>; 3] = [
                    &|| group.barrier(),
                    &|| Ok(group.alloc::<u8>(1)?.rendezvous(&group).map(drop)?),
                    &|| group.all_reduce(&mut [1.0; 9], ReduceOp::Sum),
                ];
                for call in calls {
                    let e = call().unwrap_err();
                    assert!(
                        matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [0]),
                        "{e}"
                    );
                }
                assert!(begin.elapsed() < late / 2, "{:?}", begin.elapsed());
                out_of_step(first.join().unwrap()); // as all calls, once one with data was given up
            });
        }
        world.barrier().unwrap();
        group.resync_by(LONG).unwrap();
        group.set_timeout(LONG);
        group.barrier().unwrap();
    });
}

/// Rank 0 gives up its second call while another thread is in the first; its third is not taken for the second.
#[test]
fn a_call_that_gave_up_behind_another_thread_is_not_replaced_by_the_next() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        let sum = |value: u32| {
            let mut data = [value];
            group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[0])
        };
        if world.rank() == 0 {
            std::thread::scope(|scope| {
                let first = scope.spawn(|| group.barrier());
                std::thread::sleep(SHORT);
                group.set_timeout(SHORT);
                let late = sum(200);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                group.set_timeout(LONG);
                world.barrier().unwrap();
                out_of_step(first.join().unwrap());
            });
            out_of_step(sum(300).map(drop));
        } else {
            world.barrier().unwrap();
            out_of_step(group.barrier());
            out_of_step(sum(200).map(drop));
        }
        group.resync().unwrap();
        assert_eq!(sum(1).unwrap(), 2);
    });
}

#[test]
fn an_interruption_is_an_error_of_its_own() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        if world.rank() == 0 {
            let e = interruptible(|| true, || group.barrier()).unwrap_err();
            assert!(
                matches!(&e, Error::Interrupted { op: "barrier", waiting_for, .. } if *waiting_for == [1]),
                "{e}"
            );
            let e = interruptible(|| true, || world.wait_signal(1, 0, LONG)).unwrap_err();
            let is_named =
                matches!(e, Error::Interrupted { op: "wait_signal", channel: Some(0), .. });
            assert!(is_named, "{e}");
            let e =
                interruptible(|| true, || world.subgroup(&[0, 1]).unwrap().ready()).unwrap_err();
            assert!(matches!(e, Error::Interrupted { op: "subgroup", .. }), "{e}");
        }
        world.barrier().unwrap();
        group.barrier().unwrap();
        if world.rank() == 0 {
            let e =
                interruptible(|| true, || group.all_reduce(&mut [1], ReduceOp::Sum)).unwrap_err();
            assert!(matches!(e, Error::Interrupted { op: "all_reduce", .. }), "{e}");
        }
        world.barrier().unwrap();
        group.resync().unwrap();
        group.all_reduce(&mut [1], ReduceOp::Sum).unwrap();
    });
}

/// Rank 0 gives up its first call before rank 1 has created the group; its second is not taken for the first.
#[test]
fn a_call_that_gave_up_before_its_group_was_formed_is_not_replaced_by_the_next() {
    threads(2, |world| {
        if world.rank() == 0 {
            let group = world.subgroup_builder(&[0, 1]).timeout(SHORT).build().unwrap();
            let e = group.all_reduce(&mut [1], ReduceOp::Sum).unwrap_err();
            assert!(matches!(e, Error::Timeout { op: "subgroup", .. }), "{e}");
            world.barrier().unwrap();
            group.set_timeout(LONG);
            out_of_step(group.all_reduce(&mut [2], ReduceOp::Sum));
            group.resync().unwrap();
            let mut data = [3];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3 + 30]);
        } else {
            world.barrier().unwrap();
            let group = world.subgroup_builder(&[0, 1]).timeout(SHORT).build().unwrap();
            group.set_timeout(LONG);
            out_of_step(group.all_reduce(&mut [10], ReduceOp::Sum));
            group.resync().unwrap();
            let mut data = [30];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3 + 30]);
        }
    });
}

/// Rank 1 waits for rank 0's part of a rendezvous that rank 0 has given up; the resync of rank 0 ends that.
#[test]
fn a_resync_ends_a_rendezvous_that_only_some_are_in() {
    threads(2, |world| {
        let group = group_with(&world, LONG);
        let x = group.alloc::<u8>(10).unwrap();
        let begin = Instant::now();
        if world.rank() == 0 {
            group.set_timeout(SHORT);
            let failed = x.rendezvous(&group).err().unwrap();
            assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
            world.barrier().unwrap();
            std::thread::sleep(SHORT); // rank 1 is in it by now
            group.resync_by(LONG).unwrap();
        } else {
            world.barrier().unwrap();
            let failed = x.rendezvous(&group).err().unwrap();
            assert!(matches!(failed.error, Error::OutOfStep { rank: 0, .. }), "{failed}");
            group.resync_by(LONG).unwrap();
        }
        assert!(begin.elapsed() < LONG / 2);
        group.set_timeout(LONG);
        group
            .alloc::<u8>(10)
            .unwrap()
            .rendezvous(&group)
            .unwrap()
            .share()
            .unwrap()
            .release()
            .unwrap();
    });
}
