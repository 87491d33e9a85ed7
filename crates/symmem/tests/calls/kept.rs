//! What is kept of worlds, memory and groups, and what is given back.

use super::super::*;

#[test]
fn a_world_is_left_only_when_nothing_of_it_is_alive() {
    threads(2, |world| {
        let x = world.alloc::<u8>(10).unwrap().rendezvous(&world).unwrap().share().unwrap();
        let held = x.peer(1 - world.rank()).unwrap();
        let failed = world.leave().err().unwrap();
        assert!(matches!(failed.error, Error::Usage { op: "leave", .. }), "{failed}");
        assert_eq!(held, [0; 10]);
        let world = failed.kept;
        drop(x);
        let group = world.subgroup(&[0, 1]).unwrap();
        group.barrier().unwrap();
        let world = world.leave().err().unwrap().kept;
        drop(group);
        world.barrier().unwrap();
        world.leave().unwrap();
    });
}

/// Peers may have mapped it although the rendezvous failed here.
#[test]
fn memory_of_a_pool_that_was_offered_to_peers_keeps_its_shape() {
    threads(2, |world| {
        let pool = Pool::new(&world, 1 << 20);
        let x = pool.alloc::<u8>(100 + world.rank()).unwrap();
        let offset = x.offset();
        let failed = x.rendezvous(&world).err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "size", .. }), "{failed}");
        drop(failed);
        assert_ne!(pool.alloc::<u8>(5000).unwrap().offset(), offset);
        assert_eq!(pool.alloc::<u8>(100 + world.rank()).unwrap().offset(), offset);
    });
}

/// What came for a group or a rendezvous that will never be is given back.
#[test]
fn what_peers_offered_in_vain_is_not_kept() {
    let _alone = DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let options = World::builder().backend("host");
    let rounds = Barrier::new(2);
    options
        .threads(2, |world| {
            let group = group_with(&world, Duration::from_millis(2));
            rounds.wait();
            let before = descriptors();
            rounds.wait();
            for _ in 0..100 {
                if world.rank() == 0 {
                    drop(world.subgroup(&[0, 1]).unwrap());
                    let failed = group.alloc::<u8>(10).unwrap().rendezvous(&group).err().unwrap();
                    assert!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
                }
            }
            rounds.wait();
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
            rounds.wait();
            // Rank 0 gives up, rank 1 comes and sends its memory, and both go back in step instead of calling again.
            for _ in 0..40 {
                group.set_timeout(if world.rank() == 0 { Duration::from_millis(2) } else { SHORT });
                if world.rank() == 1 {
                    rounds.wait();
                }
                let offered = group.alloc::<u8>(10).unwrap().rendezvous(&group);
                assert!(offered.is_err());
                drop(offered);
                if world.rank() == 0 {
                    rounds.wait();
                }
                rounds.wait();
                group.resync_by(LONG).unwrap();
            }
            rounds.wait();
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
            rounds.wait();
        })
        .unwrap();
}

/// Rank 0 gives up a rendezvous, rank 1 comes, sends its memory and goes; rank 0 keeps the groups that it shrinks.
#[test]
fn what_a_rank_offered_before_it_went_is_not_kept() {
    const GROUPS: usize = 40;
    let _alone = DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let options = World::builder().backend("host");
    let rounds = Barrier::new(2);
    options
        .threads(2, |world| {
            let short = Duration::from_millis(2);
            let groups: Vec<Group> = (0..GROUPS).map(|_| group_with(&world, short)).collect();
            rounds.wait();
            let before = descriptors();
            rounds.wait();
            for group in &groups {
                if world.rank() == 1 {
                    rounds.wait();
                }
                assert!(group.alloc::<u8>(10).unwrap().rendezvous(group).is_err());
                if world.rank() == 0 {
                    rounds.wait();
                }
            }
            rounds.wait();
            if world.rank() == 1 {
                return;
            }
            world.set_timeout(LONG);
            assert!(matches!(world.barrier(), Err(Error::PeerLost { rank: 1, .. })));
            let offered = descriptors().saturating_sub(before);
            assert!(offered > GROUPS / 2, "the test itself: only {offered} were sent"); // other tests have some, too
            let smaller: Vec<Group> = groups.iter().map(|g| g.shrink_by(LONG).unwrap()).collect();
            assert!(smaller.iter().all(|group| group.size() == 1));
            let kept = descriptors().saturating_sub(before);
            assert!(kept < 20, "{kept} descriptors are left");
        })
        .unwrap();
}
