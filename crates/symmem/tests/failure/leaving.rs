//! Ranks that go in order, or in a panic.

use symmem::{Error, ReduceOp, World};
use symmem_testing::{Ranks, assert_nothing_is_held, test_name};

use super::{lost_in, ms};

#[test]
fn a_rank_that_leaves_is_named_by_those_who_wait_for_it() {
    Ranks::new(3).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            drop(world);
            assert_nothing_is_held();
            return;
        }
        let told = world.barrier();
        let Err(Error::PeerLost { rank: 1, how, .. }) = told else { panic!("{told:?}") };
        assert_eq!(how, "it left");
        // Ranks that do not need it are not affected.
        let pair = world.subgroup(&[0, 2]).unwrap();
        pair.barrier().unwrap();
        let other = 2 - world.rank();
        world.put_signal(other, 0, ms(10_000)).unwrap();
        world.wait_signal(other, 0, ms(10_000)).unwrap();
        assert_eq!(world.shrink().unwrap().world_ranks(), [0, 2]);
    });
}

#[test]
fn a_rank_may_exit_right_after_the_last_barrier() {
    for _ in 0..20 {
        Ranks::new(4).run(test_name!(), |world| {
            (0..10).for_each(|_| world.barrier().unwrap());
            std::process::exit(0); // without a goodbye
        });
    }
}

#[test]
fn a_rank_may_leave_right_after_the_last_release() {
    for _ in 0..5 {
        Ranks::new(4).run(test_name!(), |world| {
            let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
            let x = x.share().unwrap().release().unwrap();
            drop((x, world));
            assert_nothing_is_held();
        });
    }
}

#[test]
fn a_panic_of_a_thread_is_told_to_the_others() {
    let ranks = |world: World| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _mine = world;
                panic!("on purpose");
            }));
            assert!(caught.is_err());
            return 1;
        }
        let e = world.barrier().unwrap_err();
        assert!(e.to_string().ends_with("it panicked"), "{e}");
        lost_in(|| world.barrier())
    };
    for backend in ["process", "host"] {
        let options = World::builder().backend(backend);
        assert_eq!(options.threads(3, ranks).unwrap(), [1, 1, 1]);
    }
}

/// The panic of rank 2 is a consequence: rank 0 is told the cause, however late it looks.
#[test]
fn the_cause_is_told_also_by_those_who_panic_because_of_it() {
    let options = || Ranks::new(4).dying(&[3]);
    options().start(test_name!(), || {
        let world = World::from_env().unwrap();
        world.barrier().unwrap();
        match world.rank() {
            3 => symmem_testing::die(),
            0 => std::thread::sleep(ms(300)),
            _ => {
                let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                    world.barrier().unwrap();
                }));
                assert!(caught.is_err());
                return;
            }
        }
        assert_eq!(lost_in(|| world.alloc::<u8>(1).unwrap().rendezvous(&world)), 3);
        assert_eq!(lost_in(|| world.barrier()), 3);
    });
}

#[test]
fn ranks_of_different_backends_are_told_so() {
    let store: symmem::store::SharedStore = std::sync::Arc::new(symmem::store::MemoryStore::new());
    std::thread::scope(|scope| {
        for (rank, backend) in ["host", "process", "host"].into_iter().enumerate() {
            let store = store.clone();
            scope.spawn(move || {
                let options = World::builder().backend(backend);
                let world = options.join(rank, 3, store).unwrap();
                let e = world.alloc::<u8>(1).unwrap().rendezvous(&world).err().unwrap().error;
                let Error::Mismatch { what, rank: other, .. } = e else { panic!("{e}") };
                assert_eq!((what, other), ("backend", if rank == 1 { 0 } else { 1 }));
                world.barrier().unwrap();
            });
        }
    });
}

/// A rank that fails to make a call, because another has left, does not make the next one in its place: all ranks name the one
/// that left, and none is told that the others disagree.
#[test]
fn calls_after_a_rank_has_left_are_not_taken_for_each_other() {
    let step = std::sync::Barrier::new(3);
    let outcomes = World::threads(4, |world| {
        world.barrier().unwrap();
        let rank = world.rank();
        if rank == 1 {
            return Ok(()); // and drops the world
        }
        let names_rank_1 = |outcome: symmem::Result<()>| match outcome {
            Err(Error::PeerLost { rank: 1, .. }) => Ok(()),
            other => Err(format!("rank {rank}: {other:?}")),
        };
        let mut one = [1_u32];
        let mut all = [0; 4];
        let mut result = Ok(());
        if rank != 2 {
            result = result.and(names_rank_1(world.all_reduce(&mut one, ReduceOp::Sum)));
        }
        if rank == 3 {
            result = result.and(names_rank_1(world.broadcast(&mut one, 0)));
        }
        step.wait();
        if rank == 2 {
            // No panic here: the others would wait for the next step.
            result = match world.all_gather(&one, &mut all) {
                Err(Error::PeerLost { rank: 1, .. } | Error::Mismatch { .. }) => Ok(()),
                other => Err(format!("rank 2: {other:?}")),
            };
        }
        step.wait();
        if rank == 0 {
            result = result.and(names_rank_1(world.broadcast(&mut one, 0)));
        }
        step.wait();
        result = result.and(names_rank_1(world.all_to_all(&[1_u32; 4], &mut all)));
        step.wait(); // nobody else leaves before all have been told
        result
    });
    for outcome in outcomes.unwrap() {
        outcome.unwrap();
    }
}
