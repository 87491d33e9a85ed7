//! Which ranks are blamed for calls that are not completed, and which are not.

use std::sync::atomic::{AtomicBool, Ordering};

use super::super::*;

#[test]
fn different_calls_fail_at_once_though_a_rank_has_not_come() {
    threads(3, |world| {
        let group = group_with(&world, LONG);
        let begin = Instant::now();
        match world.rank() {
            0 => {
                let e = group.barrier().unwrap_err();
                assert!(matches!(e, Error::Mismatch { rank: 1, .. }), "{e}");
                assert!(e.to_string().contains("all_reduce of 10 f32, sum, memory: slices"), "{e}");
            }
            1 => {
                let e = group.all_reduce(&mut [1_f32; 10], ReduceOp::Sum).unwrap_err();
                assert!(matches!(e, Error::Mismatch { rank: 0, .. }), "{e}");
            }
            _ => {
                world.wait_signal(0, 0, LONG).unwrap();
                world.wait_signal(1, 0, LONG).unwrap();
                assert!(matches!(group.barrier(), Err(Error::Mismatch { rank: 1, .. })));
            }
        }
        assert!(begin.elapsed() < LONG / 2);
        if world.rank() < 2 {
            world.put_signal(2, 0, LONG).unwrap();
        }
        group.barrier().unwrap();
        let x = world.alloc::<f32>(10).unwrap().rendezvous(&group).unwrap();
        let e = match world.rank() {
            0 => x.open().map(drop).unwrap_err().error,
            _ => group.barrier().unwrap_err(),
        };
        assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
        let e = match world.rank() {
            0 => world.alloc::<f32>(10).unwrap().rendezvous(&group).map(drop).unwrap_err().error,
            _ => group.barrier().unwrap_err(),
        };
        assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_refuses_a_call_is_not_waited_for() {
    threads(3, |world| {
        let group = group_with(&world, LONG);
        let begin = Instant::now();
        let mut data = [1_u16; 61];
        if world.rank() == 1 {
            group.refuse().unwrap();
        } else {
            let e = group.all_reduce(&mut data, ReduceOp::Xor).unwrap_err();
            let Error::Mismatch { what: "operation", rank: 1, theirs, .. } = &e else {
                panic!("{e}")
            };
            assert_eq!(theirs, "refuse");
        }
        assert!(begin.elapsed() < LONG / 2);
        group.refuse().unwrap(); // by all
        group.all_reduce(&mut data, ReduceOp::Xor).unwrap();
        assert_eq!(data, [1; 61]);
    });
}

#[test]
fn a_timeout_says_where_the_missing_ranks_are() {
    let is_told = AtomicBool::new(false);
    threads(3, |world| {
        let group = group_with(&world, LONG);
        group.all_reduce(&mut [1_u16; 9], ReduceOp::Max).unwrap();
        match world.rank() {
            0 => {
                std::thread::sleep(SHORT);
                let e = group.barrier_on(0, 4 * SHORT).unwrap_err();
                let Error::Timeout { waiting_for, doing, .. } = &e else { panic!("{e}") };
                assert_eq!(*waiting_for, [1, 2]);
                assert!(doing[0].starts_with("rank 1 is in wait_signal on channel "), "{doing:?}");
                assert!(doing[0].contains("waiting for rank 0"), "{doing:?}");
                assert!(doing[1].starts_with("rank 2 is outside of the library"), "{doing:?}");
                assert!(doing.iter().all(|d| d.contains("all_reduce of 9 u16, max")), "{doing:?}");
                is_told.store(true, Ordering::Relaxed);
                world.put_signal(1, 3, LONG).unwrap();
                world.put_signal(2, 3, LONG).unwrap();
            }
            1 => world.wait_signal(0, 3, LONG).unwrap(),
            _ => {
                let begin = Instant::now();
                while !is_told.load(Ordering::Relaxed) && begin.elapsed() < LONG {
                    std::thread::sleep(SHORT);
                }
                world.wait_signal(0, 3, LONG).unwrap();
            }
        }
        group.barrier().unwrap();
    });
}

/// Rank 0 has come to the barrier and left the job since; rank 2 is late. Nobody blames rank 0.
#[test]
fn a_rank_that_has_arrived_is_not_missed_when_it_leaves() {
    threads(3, |world| match world.rank() {
        0 => {
            let e = world.barrier_on(0, SHORT).unwrap_err();
            assert!(matches!(e, Error::Timeout { waiting_for, .. } if waiting_for == [2]));
        }
        1 => {
            let e = world.barrier_on(0, 4 * SHORT).unwrap_err();
            assert!(matches!(&e, Error::Timeout { waiting_for, .. } if *waiting_for == [2]), "{e}");
            world.put_signal(2, 0, LONG).unwrap();
            world.barrier().unwrap();
        }
        _ => {
            world.wait_signal(1, 0, LONG).unwrap();
            world.barrier().unwrap();
            let e = world.barrier().unwrap_err();
            let told = matches!(&e, Error::PeerLost { rank: 0 | 1, how, .. } if how == "it left");
            assert!(told, "{e}");
        }
    });
}

/// A rank that leaves after the last barrier must not be taken for lost by those that are still in it. `SYMMEM_JOBS` sets how
/// many jobs there are; a long trial is 40,000 of them while another process keeps one core busy.
#[test]
fn jobs_that_end_in_order_lose_nobody() {
    let set = std::env::var("SYMMEM_JOBS").ok();
    for _ in 0..set.map_or(1000, |jobs| jobs.parse().expect("a number of jobs")) {
        World::threads(8, |world| world.barrier().unwrap()).unwrap();
    }
}
