//! What the phases of symmetric memory promise.

use std::time::Duration;

use symmem::{Error, World};

use super::{SOON, part_of};

/// Everyone reads what everyone wrote, phase after phase.
pub fn phases_show_every_rank_what_every_rank_wrote(world: World) {
    let mut x = world.alloc::<u64>(1000).unwrap().rendezvous(&world).unwrap();
    for round in 0..50 {
        let value = |rank: usize, i: usize| (round * 1_000_000 + rank * 1000 + i) as u64;
        let own = world.rank();
        x.local_mut().iter_mut().enumerate().for_each(|(i, v)| *v = value(own, i));
        let shared = x.share().unwrap();
        for rank in 0..world.size() {
            let part = part_of(&shared, rank);
            assert!(
                part.iter().enumerate().all(|(i, v)| *v == value(rank, i)),
                "round {round} of {rank}"
            );
        }
        x = shared.release().unwrap();
    }
}

/// Different calls at the same time are an error on every rank, and leave the group in step.
pub fn different_calls_are_told_to_every_rank(world: World) {
    let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
    let y = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
    let (x, y) = if world.rank() == 0 {
        let failed = x.share().err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "memory", rank: 1, .. }));
        (failed.kept.give_up().ok().unwrap(), y)
    } else {
        let failed = y.share().err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "memory", rank: 0, .. }));
        (x, failed.kept.give_up().ok().unwrap())
    };
    x.share().unwrap().release().unwrap();
    y.share().unwrap().release().unwrap();
}

/// A phase that was given up at its deadline holds nobody back once the others have come.
pub fn an_abandoned_share_does_not_block_the_group(world: World) {
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup(&all).unwrap();
    group.ready().unwrap();
    let x = world.alloc::<u8>(1).unwrap().rendezvous(&group).unwrap();
    let y = world.alloc::<u8>(1).unwrap().rendezvous(&group).unwrap();
    world.barrier().unwrap();
    if world.rank() == 0 {
        group.set_timeout(Duration::from_millis(50));
        assert!(matches!(x.share().err().unwrap().error, Error::Timeout { .. }));
        group.set_timeout(Duration::from_secs(30));
        world.barrier().unwrap();
    } else {
        world.barrier().unwrap();
        drop(x.share().unwrap());
    }
    world.barrier().unwrap();
    y.share().unwrap().release().unwrap();
}

/// Dropping in any order is safe while peers still read.
pub fn memory_lives_as_long_as_anyone_reads_it(world: World) {
    let mut x = world.alloc::<u64>(1 << 16).unwrap().rendezvous(&world).unwrap();
    x.local_mut().fill(world.rank() as u64 + 1);
    let shared = x.share().unwrap();
    if world.rank() == 0 {
        drop(shared);
        let other = world.alloc::<u64>(1 << 16).unwrap();
        drop(other);
        world.put_signal(1, 5, SOON).unwrap();
    } else {
        if world.rank() == 1 {
            world.wait_signal(0, 5, SOON).unwrap();
        }
        assert!(shared.peer(0).unwrap().iter().all(|v| *v == 1));
        let handle_only = shared.peer(1).unwrap()[0];
        assert_eq!(handle_only, 2);
    }
    world.barrier().unwrap();
}
