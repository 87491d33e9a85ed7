//! Ways in which safe code might come to write what a peer still reads: each must fail.
#![allow(clippy::unwrap_used, reason = "helpers of tests stop at the first surprise too")]

use std::sync::Arc;
use std::time::Duration;

use symmem::store::MemoryStore;
use symmem::{DType, Error, Group, ReduceOp, World};

/// Two ranks as threads over host memory, so that each has its own mapping.
fn two(body: impl Fn(World) + Sync) {
    let timeout = Duration::from_secs(20);
    let options = World::builder().backend("host").timeout(timeout);
    options.threads(2, body).unwrap();
}

fn group(world: &World, timeout: Duration) -> Group {
    let group = world.subgroup_builder(&[0, 1]).timeout(timeout).build().unwrap();
    world.barrier().unwrap(); // all have created it, so that the shortest timeout is enough
    group.ready().unwrap();
    group
}

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(10);

#[test]
fn a_share_that_was_overtaken_does_not_come_back_as_owned() {
    two(|world| {
        let group = group(&world, LONG);
        let x = world.alloc::<u64>(8).unwrap().rendezvous(&group).unwrap();
        let y = world.alloc::<u64>(8).unwrap().rendezvous(&group).unwrap();
        world.barrier().unwrap();
        let (x, y) = if world.rank() == 0 {
            group.set_timeout(SHORT);
            let paused = x.share().err().unwrap().kept;
            world.barrier().unwrap();
            group.set_timeout(LONG);
            let y = y.share().unwrap();
            world.barrier().unwrap();
            // Rank 1 reads x by now. The share is done on all ranks, so there is nothing left to wait for.
            let paused = paused.give_up().expect_err("rank 1 still reads");
            (paused.resume().unwrap(), y)
        } else {
            world.barrier().unwrap();
            let x = x.share().unwrap();
            let y = y.share().unwrap();
            world.barrier().unwrap();
            assert_eq!(x.peer(0).unwrap(), [0; 8]);
            (x, y)
        };
        x.release().unwrap();
        y.release().unwrap();
    });
}

/// Rank 0 gives up a share and then does something else with data, which gives up as well. After that all are brought
/// back in step, and the share counts as done on rank 0 if and only if all had come to it.
#[test]
fn a_paused_share_has_a_way_on_after_any_other_call() {
    for completed in [false, true] {
        two(|world| {
            let group = group(&world, LONG);
            let mut x = world.alloc::<u64>(8).unwrap().rendezvous(&group).unwrap();
            x.local_mut().fill(world.rank() as u64 + 1);
            world.barrier().unwrap();
            let x = if world.rank() == 0 {
                group.set_timeout(SHORT);
                let paused = x.share().err().unwrap().kept;
                world.barrier().unwrap();
                world.barrier().unwrap();
                let e = group.all_reduce(&mut [1.0], ReduceOp::Sum).unwrap_err();
                // Rank 1 does not come, or calls resync already.
                assert!(matches!(e, Error::Timeout { .. } | Error::OutOfStep { .. }), "{e}");
                group.resync_by(LONG).unwrap();
                group.set_timeout(LONG);
                let kept = paused.give_up();
                assert_eq!(kept.is_err(), completed, "rank 1 reads");
                match kept {
                    Ok(owned) => owned.share().unwrap(),
                    Err(paused) => paused.resume().unwrap(),
                }
            } else {
                world.barrier().unwrap();
                let x = if completed { Ok(x.share().unwrap()) } else { Err(x) };
                world.barrier().unwrap();
                group.resync_by(LONG).unwrap();
                match x {
                    Ok(shared) => shared,
                    Err(owned) => owned.share().unwrap(),
                }
            };
            assert_eq!(x.peer(0).unwrap(), [1; 8]);
            assert_eq!(x.peer(1).unwrap(), [2; 8]);
            let mut x = x.release().unwrap();
            x.local_mut().fill(9);
        });
    }
}

#[test]
fn an_address_is_no_proof_that_nobody_reads() {
    two(|world| {
        let other = group(&world, LONG);
        let x = world.alloc::<f32>(8).unwrap().rendezvous(&world).unwrap();
        let shared = x.share().unwrap();
        if world.rank() == 0 {
            assert!(shared.rendezvous(&other).is_err(), "rank 1 still reads");
        } else {
            let address = shared.local().as_ptr() as usize;
            let e = other.rendezvous_at(address, DType::F32).unwrap_err();
            assert!(e.to_string().contains("the counterpart of the memory"), "{e}");
            assert_eq!(shared.peer(0).unwrap(), [0.0; 8]);
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_group_of_another_world_does_not_make_memory_owned() {
    let store = Arc::new(MemoryStore::new());
    two(|world| {
        let shared = world.alloc::<u8>(8).unwrap().rendezvous(&world).unwrap().share().unwrap();
        let options = World::builder().timeout(LONG);
        let second = options.join(world.rank(), 2, store.clone()).unwrap();
        let e = shared.rendezvous(&second).err().unwrap().error.to_string();
        assert!(e.contains("one of another world"), "{e}");
        world.barrier().unwrap();
    });
}
