//! A rank that runs out of descriptors or memory: it says what, the others are told who, and the next attempt works.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use symmem::{Error, Group, World};
use symmem_testing::{Ranks, test_name};

use super::ms;

/// Runs `call` with a lowered limit in rank 1; checks what each rank is told; then runs it without.
fn fails_in_rank_1(
    world: &World,
    resource: Resource,
    limit: impl Fn() -> u64,
    call: impl Fn(&World) -> symmem::Result<()>,
) {
    world.barrier().unwrap();
    let before = getrlimit(resource);
    if world.rank() == 1 {
        setrlimit(resource, Rlimit { current: Some(limit()), ..before }).unwrap();
    }
    // Nothing is under way while the limit is set.
    world.barrier().unwrap();
    if world.rank() == 1 {
        let failed = call(world);
        setrlimit(resource, before).unwrap();
        match failed.unwrap_err() {
            Error::Unavailable { .. } | Error::System { .. } => {}
            other => panic!("{other}"),
        }
    } else {
        match call(world).unwrap_err() {
            Error::PeerFailed { rank: 1, .. } | Error::PeerLost { rank: 1, .. } => {}
            other => panic!("{other}"),
        }
    }
    world.barrier_on(1, ms(30_000)).unwrap();
    call(world).unwrap();
    world.barrier().unwrap();
}

/// No more descriptors than are open now, and `spare` of them.
fn descriptors(spare: u64) -> u64 {
    let is_open = |fd: &u64| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
    // The lowest number such that only `spare` below it are free.
    (0..).filter(|fd| !is_open(fd)).nth(spare as usize).unwrap()
}

fn share_something(world: &World) -> symmem::Result<()> {
    let x = world.alloc::<u8>(5000)?;
    let x = x.rendezvous(world)?;
    x.share()?.release()?;
    Ok(())
}

#[test]
fn a_rendezvous_without_descriptors_fails_for_all() {
    Ranks::new(4).run(test_name!(), |world| {
        // Not enough for what travels to the three others.
        for spare in [0, 1, 2] {
            let x = std::cell::RefCell::new(Some(world.alloc::<u8>(5000).unwrap()));
            fails_in_rank_1(
                &world,
                Resource::Nofile,
                || descriptors(spare),
                |world: &World| match x.take().unwrap().rendezvous(world) {
                    Ok(_) => Ok(()),
                    Err(failed) => {
                        *x.borrow_mut() = Some(failed.kept);
                        Err(failed.error)
                    }
                },
            );
        }
        share_something(&world).unwrap();
    });
}

#[test]
fn a_group_without_descriptors_fails_for_all() {
    Ranks::new(4).run(test_name!(), |world| {
        for spare in [0, 1, 2] {
            let form = |world: &World| {
                let group: Group = world.subgroup(&[0, 1, 2, 3])?;
                group.barrier_on(0, ms(30_000))
            };
            fails_in_rank_1(&world, Resource::Nofile, || descriptors(spare), form);
        }
        share_something(&world).unwrap();
    });
}

#[test]
fn connecting_without_descriptors_is_told_by_its_name() {
    Ranks::new(4).env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        let rank = std::env::var("RANK").unwrap();
        let before = getrlimit(Resource::Nofile);
        for spare in [2, 3, 4] {
            if rank == "1" {
                let limit = Rlimit { current: Some(descriptors(spare)), ..before };
                setrlimit(Resource::Nofile, limit).unwrap();
            }
            let begin = std::time::Instant::now();
            let e = World::from_env().and_then(|w| w.barrier()).unwrap_err();
            setrlimit(Resource::Nofile, before).unwrap();
            assert!(begin.elapsed() < super::SOON, "{spare} spare, {:?}: {e}", begin.elapsed());
            match e {
                Error::Unavailable { .. } | Error::System { .. } if rank == "1" => {}
                Error::PeerLost { rank: 1, .. } | Error::PeerFailed { rank: 1, .. } => {
                    assert_ne!(rank, "1");
                }
                other => panic!("{spare} spare: {other}"),
            }
        }
        World::from_env().unwrap().barrier().unwrap();
    });
}

#[test]
fn mapping_without_address_space_fails_for_all() {
    Ranks::new(3).run(test_name!(), |world| {
        let used = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
        };
        const BYTES: usize = 64 << 20;
        let x = std::cell::RefCell::new(Some(world.alloc::<u8>(BYTES).unwrap()));
        fails_in_rank_1(
            &world,
            Resource::As,
            || used() + (80 << 20),
            |world: &World| match x.take().unwrap().rendezvous(world) {
                Ok(_) => Ok(()),
                Err(failed) => {
                    *x.borrow_mut() = Some(failed.kept);
                    Err(failed.error)
                }
            },
        );
    });
}

#[test]
fn more_memory_than_there_is_is_unavailable() {
    Ranks::new(2).run(test_name!(), |world| {
        let e = world.alloc::<u8>(1 << 45).err().unwrap();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        share_something(&world).unwrap();
    });
}
