//! Ranks that are lost while the survivors of an earlier loss come together.

use std::time::Duration;

use symmem::{Error, Group, World};
use symmem_testing::{
    Random, Ranks, assert_nothing_is_held, die, die_after, stop_until, test_name,
};

use super::{lost_in, ms, timed_out_in};

/// Shrinks until all members of the group answer.
fn survivors(world: &World, lost: usize) -> Group {
    assert_eq!(lost_in(|| world.barrier()), lost);
    let mut group = world.shrink().unwrap();
    while let Err(e) = group.barrier() {
        assert!(matches!(e, Error::PeerLost { .. }), "{e}");
        group = group.shrink().unwrap();
    }
    group
}

#[test]
fn a_death_before_deciding_is_left_out() {
    Ranks::new(4).dying(&[1, 2]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        if world.rank() == 2 {
            assert_eq!(lost_in(|| world.barrier()), 1);
            std::thread::sleep(ms(200)); // the others wait for it
            die();
        }
        let group = survivors(&world, 1);
        assert_eq!(group.world_ranks(), [0, 3]);
        drop((group, world));
        assert_nothing_is_held();
    });
}

/// At every moment: while the survivors agree, while they form the group, after.
#[test]
fn a_death_while_shrinking_is_left_out() {
    let mut random = Random::unseeded();
    for _ in 0..20 {
        let delay = random.below(2000);
        Ranks::new(5).dying(&[1, 2]).env("DELAY", delay).run(test_name!(), |world| {
            world.barrier().unwrap();
            if world.rank() == 1 {
                die();
            }
            let delay = std::env::var("DELAY").unwrap().parse().unwrap();
            if world.rank() == 2 {
                let _ = world.barrier();
                die_after(Duration::from_micros(delay));
            }
            let mut group = survivors(&world, 1);
            while group.world_ranks().contains(&2) {
                let Err(Error::PeerLost { rank, .. }) = group.barrier() else { continue };
                assert_eq!(group.world_ranks()[rank], 2);
                group = group.shrink().unwrap();
            }
            assert_eq!(group.world_ranks(), [0, 3, 4]);
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_survivor_that_is_stopped_is_named_and_waited_for() {
    Ranks::new(4).dying(&[1]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        assert_eq!(lost_in(|| world.barrier()), 1);
        if world.rank() == 2 {
            stop_until(ms(3000));
        } else {
            for _ in 0..2 {
                // Rank 2 of the world is rank 1 of the survivors.
                assert_eq!(timed_out_in(ms(700), || world.shrink_by(ms(700))), [1]);
            }
        }
        let group = world.shrink().unwrap();
        assert_eq!(group.world_ranks(), [0, 2, 3]);
        group.barrier().unwrap();
        drop((group, world));
        assert_nothing_is_held();
    });
}

#[test]
fn a_survivor_that_leaves_instead_of_shrinking_is_left_out() {
    Ranks::new(4).dying(&[1]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        if world.rank() == 3 {
            assert_eq!(lost_in(|| world.barrier()), 1);
            std::thread::sleep(ms(100));
            return;
        }
        assert_eq!(survivors(&world, 1).world_ranks(), [0, 2]);
    });
}

/// The ranks learn of a loss at different points of their work; memory of every phase comes to the new group.
#[test]
fn memory_of_any_phase_comes_along() {
    Ranks::new(5).dying(&[4]).run(test_name!(), |world| {
        let own = world.rank() as u32;
        let mut x = world.alloc::<u32>(100).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(own);
        let y = world.alloc::<u32>(100).unwrap();
        world.barrier().unwrap();
        if own == 4 {
            die();
        }
        while world.check().is_ok() {
            std::thread::yield_now();
        }
        let group = world.shrink().unwrap();
        // Two have begun to share, two have not; and of another buffer none has seen a rendezvous.
        let x = if own < 2 {
            x.share().err().unwrap().kept.rendezvous(&group).unwrap()
        } else {
            x.rendezvous(&group).unwrap()
        };
        let shared = x.share().unwrap();
        for (rank, &from) in group.world_ranks().iter().enumerate() {
            assert!(shared.peer(rank).unwrap().iter().all(|v| *v == from as u32));
        }
        shared.release().unwrap();
        let y = y.rendezvous(&group).unwrap();
        y.share().unwrap().release().unwrap();
    });
}

/// A rank that may still read the memory must bring it: otherwise its owner could write while it reads.
#[test]
fn memory_that_others_may_read_is_not_given_back_by_another_rendezvous() {
    Ranks::new(3).dying(&[2]).run(test_name!(), |world| {
        let x = world.alloc::<u32>(100).unwrap().rendezvous(&world).unwrap();
        let other = world.alloc::<u32>(100).unwrap();
        let shared = x.share().unwrap();
        if world.rank() == 2 {
            die();
        }
        while world.check().is_ok() {
            std::thread::yield_now();
        }
        let group = world.shrink().unwrap();
        let kept = if world.rank() == 0 {
            let failed = shared.rendezvous(&group).err().unwrap();
            assert!(matches!(failed.error, Error::PeerFailed { rank: 1, .. }), "{}", failed.error);
            failed.kept
        } else {
            let e = other.rendezvous(&group).err().unwrap().error;
            assert!(e.to_string().contains("the counterpart of the memory of rank 0"), "{e}");
            shared.release().err().unwrap().kept
        };
        kept.rendezvous(&group).unwrap().share().unwrap().release().unwrap();
    });
}
