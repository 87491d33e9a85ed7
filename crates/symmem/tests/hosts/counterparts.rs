//! Several ranks on each host: an arrival goes to one rank of another host, which its host takes it from.

use symmem::{Error, ReduceOp, Result, World};
use symmem_testing::{Random, Ranks, stop_until, test_name};

use super::{ms, rank, set, store_barrier, works};

/// The host of each rank.
const PLACEMENTS: [&str; 5] = ["aabb", "abab", "aaab", "abbcca", "abbb"];

fn on(placement: &str) -> Ranks<'static> {
    Ranks::new(placement.len()).env("PLACEMENT", placement).env("SYMMEM_TIMEOUT", 30)
}

fn join() -> Result<World> {
    let placement = std::env::var("PLACEMENT").unwrap();
    set("SYMMEM_HOST", &placement[rank()..=rank()]);
    World::from_env()
}

fn number(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

#[test]
fn what_was_put_to_any_rank_is_there_after_a_barrier() {
    for placement in PLACEMENTS {
        on(placement).start(test_name!(), || {
            let world = join().unwrap();
            let (n, own) = (world.size(), world.rank());
            let (mut random, len) = (Random(7), 3000);
            let open = world.alloc::<u64>(n * len).unwrap().rendezvous(&world).unwrap();
            let open = open.open().unwrap();
            let mut got = vec![0; len];
            for round in 1..200_u64 {
                // All ranks draw alike: who puts, to whom, and how much; often nobody does.
                let puts: Vec<Option<(usize, usize)>> = (0..n)
                    .map(|_| (random.below(n), 1 + random.below(len), random.below(3)))
                    .map(|(to, much, chance)| (chance == 0).then_some((to, much)))
                    .collect();
                if let Some((to, much)) = puts[own] {
                    open.put(to, own * len, &vec![round; much]).unwrap();
                }
                world.barrier().unwrap();
                for (from, put) in puts.iter().enumerate() {
                    let Some((_, much)) = put.filter(|(to, _)| *to == own) else { continue };
                    open.get(own, from * len, &mut got[..much]).unwrap();
                    assert!(got[..much].iter().all(|value| *value == round), "of rank {from}");
                }
                world.barrier().unwrap();
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_alone_by_all() {
    for (placement, late) in [("aabb", 0), ("aabb", 3), ("aaab", 0), ("aaab", 1), ("abbcca", 5)] {
        on(placement).env("LATE", late).start(test_name!(), || {
            let (world, late) = (join().unwrap(), number("LATE"));
            world.barrier().unwrap();
            if rank() != late {
                let error = world.barrier_on(0, ms(500)).unwrap_err();
                let Error::Timeout { waiting_for, .. } = &error else { panic!("{error}") };
                assert_eq!(*waiting_for, [late], "{error}");
            }
            store_barrier(&world, "given up");
            world.barrier().unwrap(); // the same one
            works(&world);
        });
    }
}

/// It has arrived and takes nothing in, so its neighbours hear from it nothing of the ranks of other hosts.
#[test]
fn a_counterpart_that_is_stopped_makes_nobody_name_ranks_that_have_come() {
    for (placement, stopped) in [("aabb", 2), ("aabb", 0), ("abab", 1), ("aaab", 0)] {
        on(placement).env("STOPPED", stopped).start(test_name!(), || {
            let (world, stopped) = (join().unwrap(), number("STOPPED"));
            // It comes last, so that the stopped rank has come before.
            let last = (0..world.size()).rev().find(|rank| *rank != stopped).unwrap();
            world.barrier().unwrap();
            if rank() == stopped {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(ms(200));
                        stop_until(ms(3000));
                    });
                    world.barrier().unwrap();
                });
            } else {
                if rank() == last {
                    std::thread::sleep(ms(600));
                }
                world.barrier_on(0, ms(1500)).unwrap();
                let error = world.barrier_on(0, ms(300)).unwrap_err();
                let Error::Timeout { waiting_for, .. } = &error else { panic!("{error}") };
                assert_eq!(*waiting_for, [stopped], "{error}");
            }
            world.barrier().unwrap();
            works(&world);
        });
    }
}

#[test]
fn a_call_that_differs_is_told_to_all_whoever_makes_it() {
    for placement in ["aabb", "aaab", "abbcca"] {
        on(placement).start(test_name!(), || {
            let world = join().unwrap();
            for other in 0..world.size() {
                let len = if rank() == other { 5 } else { 3000 };
                let mut data = vec![rank() as u32; len];
                let error = world.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
                let Error::Mismatch { rank: named, .. } = &error else { panic!("{error}") };
                assert_eq!(*named == other, rank() != other, "{error}");
                assert!(data.iter().all(|value| *value == rank() as u32), "something was written");
                works(&world);
            }
        });
    }
}

/// Its goodbye does not overtake its arrival, which takes another way.
#[test]
fn a_rank_that_leaves_after_a_barrier_ends_it_for_nobody() {
    for round in 0..12 {
        on(PLACEMENTS[round % PLACEMENTS.len()]).start(test_name!(), || {
            let world = join().unwrap();
            let here = world.subgroup(&(0..world.size()).collect::<Vec<_>>()).unwrap();
            here.barrier().unwrap();
            world.barrier().unwrap();
            here.barrier().unwrap();
            drop(here);
            world.barrier().unwrap();
        });
    }
}

#[test]
fn a_call_given_up_on_some_ranks_is_over_on_all_after_a_resync() {
    for placement in PLACEMENTS {
        on(placement).start(test_name!(), || {
            let world = join().unwrap();
            for late in 0..world.size() {
                works(&world);
                if rank() != late {
                    world.set_timeout(ms(100));
                    let error = world.all_reduce(&mut [1_u64; 100], ReduceOp::Sum).unwrap_err();
                    assert!(
                        matches!(error, Error::Timeout { .. } | Error::OutOfStep { .. }),
                        "{error}"
                    );
                    world.set_timeout(ms(30_000));
                }
                world.resync().unwrap();
            }
            works(&world);
        });
    }
}
