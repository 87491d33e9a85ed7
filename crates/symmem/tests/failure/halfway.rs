//! Collectives that fail halfway: what each rank is told, what is left of its memory, and how it goes on.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use symmem::{Algorithm, Error, Group, GroupOptions, ReduceOp, Symmetric, World};
use symmem_testing::{Ranks, assert_nothing_is_held, die, test_name};

use super::{lost_in, ms};

/// Too long for any way but that in which ranks write each other's parts.
const LEN: usize = 100_000;

/// All ranks, of which rank 0 has little patience.
fn hasty(world: &World) -> Group {
    let timeout = Some(ms(if world.rank() == 0 { 1500 } else { 60_000 }));
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_with(&all, GroupOptions { timeout, ..Default::default() }).unwrap();
    world.barrier().unwrap(); // all have made it, so that the shortest patience is enough
    group.ready().unwrap();
    group
}

fn memory(group: &Group) -> Symmetric<u64> {
    let mut x = group.alloc::<u64>(LEN).unwrap().rendezvous(group).unwrap();
    x.local_mut().fill(group.rank() as u64 + 1);
    x
}

fn two_shot(x: &mut Symmetric<u64>) -> symmem::Result<()> {
    x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot)
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

/// Memory whose collective failed at its end on all ranks, and other memory of the same group.
///
/// Rank 0 gives up before the others come, and then calls something else: they find it in the first barrier, do the
/// work, and find it elsewhere in the second.
fn fail_late(world: &World, group: &Group) -> (Symmetric<u64>, Symmetric<u64>) {
    let (mut x, y) = (memory(group), memory(group));
    world.barrier().unwrap();
    if group.rank() == 0 {
        let e = two_shot(&mut x).unwrap_err();
        assert!(matches!(e, Error::Timeout { op: "all_reduce", .. }), "{e}");
        assert!(x.local().iter().all(|v| *v == 1), "nobody came to the work");
        world.barrier().unwrap();
        let failed = y.share().err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { op: "share", rank: 1, .. }), "{failed}");
        (x, failed.kept.give_up().ok().unwrap())
    } else {
        world.barrier().unwrap();
        let e = two_shot(&mut x).unwrap_err();
        assert!(matches!(e, Error::Mismatch { op: "all_reduce", rank: 0, .. }), "{e}");
        // What the others have worked on is summed up by now, and rank 0's share is not.
        assert!(x.local().iter().all(|v| *v == 6 || *v == group.rank() as u64 + 1));
        assert!(x.local().contains(&6) && x.local()[0] != 6);
        (x, y)
    }
}

#[test]
fn a_mismatch_at_the_end_of_a_collective_is_told_to_all_and_memory_works_again() {
    Ranks::new(3).run(test_name!(), |world| {
        let group = hasty(&world);
        let (mut x, y) = fail_late(&world, &group);
        let e = two_shot(&mut x).unwrap_err().to_string();
        assert!(e.contains("rendezvous it again"), "{e}");
        x.local_mut().fill(9); // a copy: nobody else has it
        works(x.rendezvous(&group).unwrap());
        works(y);
        drop((group, world));
        assert_nothing_is_held();
    });
}

/// It is refused before anybody is told of it, so that peers who do something else stay in step.
#[test]
fn memory_that_a_failed_collective_left_is_not_shared() {
    Ranks::new(3).run(test_name!(), |world| {
        let group = hasty(&world);
        let (mut x, y) = fail_late(&world, &group);
        let x = if group.rank() == 0 {
            let failed = x.share().err().unwrap();
            assert!(matches!(failed.error, Error::Usage { op: "share", .. }), "{failed}");
            assert!(failed.to_string().contains("rendezvous it again"), "{failed}");
            let failed = failed.kept.resume().err().unwrap();
            assert!(matches!(failed.error, Error::Usage { op: "share", .. }), "{failed}");
            x = failed.kept.give_up().ok().unwrap();
            assert!(x.local().iter().all(|v| *v == 1));
            // Nor is it a phase that others could be in: what is kept meets the others' copies.
            x.share().err().unwrap().kept.rendezvous(&group).unwrap()
        } else {
            x.rendezvous(&group).unwrap()
        };
        works(x);
        works(y);
    });
}

/// As much address space as is used now, and a little.
fn little_address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096 + (16 << 20)
}

/// Rank 1 has no memory for a copy and says so at every call; the others' copies meet what it allocates anew.
#[test]
fn a_survivor_without_memory_for_a_copy_goes_on_with_new_memory() {
    const LARGE: usize = (64 << 20) / size_of::<u64>();
    Ranks::new(4).dying(&[2]).run(test_name!(), |world| {
        let mut x = world.alloc::<u64>(LARGE).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(world.rank() as u64);
        let before = getrlimit(Resource::As);
        if world.rank() == 1 {
            let limit = Rlimit { current: Some(little_address_space()), ..before };
            setrlimit(Resource::As, limit).unwrap();
        }
        world.barrier().unwrap();
        if world.rank() == 2 {
            std::thread::sleep(ms(50));
            die();
        }
        assert_eq!(lost_in(|| two_shot(&mut x)), 2);
        if world.rank() == 1 {
            let given_up = |e: &Error| e.to_string().contains("memory that was given up in a");
            assert!(x.is_empty() && x.local().is_empty() && x.local_mut().is_empty());
            assert!(given_up(&two_shot(&mut x).unwrap_err()));
            let failed = x.share().err().unwrap();
            assert!(given_up(&failed.error), "{failed}");
            let x = failed.kept.give_up().ok().unwrap();
            setrlimit(Resource::As, before).unwrap();
            let survivors = world.shrink().unwrap();
            let failed = x.rendezvous(&survivors).err().unwrap();
            assert!(given_up(&failed.error), "{failed}");
            assert!(failed.kept.is_empty());
            works(world.alloc::<u64>(LARGE).unwrap().rendezvous(&survivors).unwrap());
        } else {
            assert_eq!(x.len(), LARGE);
            assert!(x.local().iter().all(|v| *v == world.rank() as u64), "nobody came to the work");
            works(x.rendezvous(&world.shrink().unwrap()).unwrap());
        }
        drop(world);
        assert_nothing_is_held();
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
