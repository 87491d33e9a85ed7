//! Collectives that fail halfway: what each rank is told, what is left of its memory, and how it goes on.

use symmem::{Algorithm, Error, Group, ReduceOp, Symmetric, World};
use symmem_testing::{Ranks, assert_nothing_is_held, die, stop_until, test_name};

use super::{lost_in, ms};

/// So long that a rank which is stopped soon after its call is in the middle of the work.
const LEN: usize = if cfg!(debug_assertions) { 2 << 20 } else { 16 << 20 };

/// All ranks, of which rank 1 has much patience.
fn hasty(world: &World) -> Group {
    let timeout = ms(if world.rank() == 1 { 60_000 } else { 1000 });
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    world.barrier().unwrap(); // all have made it, so that the shortest patience is enough
    group.ready().unwrap();
    group
}

fn memory(group: &Group) -> Symmetric<u64> {
    group.set_timeout(ms(60_000)); // for memory that takes its time to be there
    let mut x = group.alloc::<u64>(LEN).unwrap().rendezvous(group).unwrap();
    x.local_mut().fill(group.rank() as u64 + 1);
    group.barrier().unwrap();
    group.set_timeout(ms(if group.rank() == 1 { 60_000 } else { 1000 }));
    x
}

fn two_shot(x: &mut Symmetric<u64>) -> symmem::Result<()> {
    x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot)
}

/// Calls `two_shot`, in whose midst rank 1 does `halt`.
fn halted(x: &mut Symmetric<u64>, halt: impl FnOnce() + Send + 'static) -> symmem::Result<()> {
    let halter = (x.group().rank() == 1).then(|| {
        std::thread::spawn(move || {
            std::thread::sleep(ms(4));
            halt();
        })
    });
    let done = two_shot(x);
    halter.into_iter().for_each(|halter| halter.join().unwrap());
    done
}

/// Works like memory that nothing happened to.
fn works(mut x: Symmetric<u64>) {
    let (ranks, rank) = (x.group().size() as u64, x.group().rank() as u64);
    x.local_mut().fill(rank + 1);
    two_shot(&mut x).unwrap();
    assert!(x.local().iter().all(|v| *v == ranks * (ranks + 1) / 2));
    let shared = x.share().unwrap();
    assert!(shared.peer(0).unwrap().iter().all(|v| *v == ranks * (ranks + 1) / 2));
    shared.release().unwrap();
}

#[test]
fn memory_in_which_a_rank_stopped_is_suspended_until_all_are_in_step_again() {
    Ranks::new(3).run(test_name!(), |world| {
        let group = hasty(&world);
        let mut x = memory(&group);
        let done = halted(&mut x, || stop_until(ms(3000)));
        if world.rank() != 1 {
            let e = done.unwrap_err();
            let told = match &e {
                Error::Timeout { op: "all_reduce", waiting_for, .. } => *waiting_for == [1],
                // A rank that gave up second blames the first.
                Error::OutOfStep { rank, .. } => *rank != 1,
                _ => false,
            };
            assert!(told, "{e}");
            assert!(x.local().is_empty() && x.local_mut().is_empty(), "rank 1 may be writing it");
            let e = two_shot(&mut x).unwrap_err();
            assert!(matches!(e, Error::OutOfStep { rank: 0 | 2, .. }), "{e}");
            let failed = x.share().err().unwrap();
            assert!(matches!(failed.error, Error::OutOfStep { .. }), "{failed}");
            x = failed.kept.give_up().ok().unwrap();
            assert!(x.local().is_empty());
        }
        group.resync_by(ms(60_000)).unwrap();
        assert_eq!(x.local().len(), LEN);
        group.set_timeout(ms(60_000));
        works(x);
        drop((group, world));
        assert_nothing_is_held();
    });
}

#[test]
fn memory_in_which_a_rank_died_goes_on_with_the_survivors() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let mut x = memory(&world);
        world.set_timeout(ms(60_000));
        assert_eq!(lost_in(|| halted(&mut x, || die())), 1);
        assert!(x.local().is_empty(), "the other survivor may be writing it");
        let survivors = world.shrink().unwrap();
        let x = x.rendezvous(&survivors).unwrap();
        assert_eq!(x.local().len(), LEN);
        works(x);
        drop((survivors, world));
        assert_nothing_is_held();
    });
}

/// The others may be at work on it still: only a group of all of them proves that they are not.
#[test]
fn suspended_memory_does_not_go_to_a_group_without_a_living_peer() {
    Ranks::new(3).run(test_name!(), |world| {
        let group = hasty(&world);
        let mut x = memory(&group);
        let done = halted(&mut x, || stop_until(ms(3000)));
        if world.rank() != 1 {
            done.unwrap_err();
            let pair = world.subgroup(&[0, 2]).unwrap();
            let failed = x.rendezvous(&pair).err().unwrap();
            assert!(failed.to_string().contains("all living ranks"), "{failed}");
            x = failed.kept;
        }
        group.resync_by(ms(60_000)).unwrap();
        group.set_timeout(ms(60_000));
        works(x);
    });
}

/// Where nobody touches a peer's part, nobody needs a copy: the memory itself comes along.
#[test]
fn a_death_in_a_small_collective_leaves_the_memory_itself() {
    Ranks::new(4).dying(&[1]).run(test_name!(), |world| {
        let mut x = world.alloc::<u64>(40).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(world.rank() as u64 + 10);
        let address = x.local().as_ptr();
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(ms(20));
            die();
        }
        assert_eq!(lost_in(|| x.all_reduce_with(ReduceOp::Sum, Algorithm::Staged)), 1);
        assert_eq!(x.local().as_ptr(), address);
        assert!(x.local().iter().all(|v| *v == world.rank() as u64 + 10));
        let x = x.rendezvous(&world.shrink().unwrap()).unwrap();
        assert_eq!(x.local().as_ptr(), address, "no copy");
        works(x);
        drop(world);
        assert_nothing_is_held();
    });
}
