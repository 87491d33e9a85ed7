//! What groups promise.

use symmem::{Error, World};

use super::{SHORT, SOON, part_of};

/// Strict subsets, overlapping groups, different orders on different ranks, and one allocation in several groups.
pub fn groups_may_overlap_and_come_in_any_order(world: World) {
    let rank = world.rank();
    let low: Vec<usize> = (0..world.size() - 1).collect();
    let high: Vec<usize> = (1..world.size()).collect();
    // No rank waits in here, so the orders need not fit together.
    let of = |ranks: &[usize]| ranks.contains(&rank).then(|| world.subgroup(ranks).unwrap());
    let (low, high) = if rank == 1 {
        let high = of(&high);
        (of(&low), high)
    } else {
        (of(&low), of(&high))
    };
    let mut x = world.alloc::<u64>(1).unwrap().rendezvous(&world).unwrap();
    x.local_mut()[0] = rank as u64;
    for group in [low.as_ref(), high.as_ref()].into_iter().flatten() {
        x = x.rendezvous(group).unwrap();
        assert_eq!(x.group().name(), group.name());
        let shared = x.share().unwrap();
        for (r, &w) in group.world_ranks().iter().enumerate() {
            assert_eq!(part_of(&shared, r)[0], w as u64);
        }
        x = shared.release().unwrap();
    }
    let x = x.rendezvous(&world).unwrap();
    x.share().unwrap().release().unwrap();
}

/// Signals of two groups over one allocation, on one channel, are kept apart.
pub fn groups_do_not_share_signals(world: World) {
    let pair = (world.rank() < 2).then(|| world.subgroup(&[0, 1]).unwrap());
    let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
    let x = match &pair {
        Some(pair) => x.rendezvous(pair).unwrap(),
        None => x,
    };
    if let (0, Some(pair)) = (world.rank(), &pair) {
        world.put_signal(1, 0, SOON).unwrap();
        pair.put_signal(1, 0, SOON).unwrap();
    }
    if let (1, Some(pair)) = (world.rank(), &pair) {
        pair.wait_signal(0, 0, SOON).unwrap();
        world.wait_signal(0, 0, SOON).unwrap();
        assert!(pair.wait_signal(0, 0, SHORT).is_err());
    }
    world.barrier().unwrap();
    drop(x);
}

/// A group name is free again once its group is gone, for any members.
pub fn group_names_can_be_used_again(world: World) {
    let named = |ranks: &[usize]| world.subgroup_builder(ranks).name("tp").build();
    for round in 0..5 {
        let ranks = [round % 2, round % 2 + 1];
        if ranks.contains(&world.rank()) {
            let group = named(&ranks).unwrap();
            assert_eq!(group.name(), "tp");
            assert!(named(&ranks).unwrap_err().to_string().contains("no living group"));
            group.barrier().unwrap();
        }
    }
    world.barrier().unwrap();
}

/// Ranks that give one name to groups of different members all learn it; the next attempt works.
pub fn a_name_with_different_members_is_a_mismatch(world: World) {
    let all: Vec<usize> = (0..world.size()).collect();
    let ours: Vec<usize> = if world.rank() == 0 { vec![0, 1] } else { all.clone() };
    // Ranks from 2 on are in no group of rank 0's, and are told by rank 1.
    let group = world.subgroup_builder(&ours).name("x").build().unwrap();
    for _ in 0..2 {
        let e = group.ready().unwrap_err();
        let Error::Mismatch { what: "members", rank, .. } = e else { panic!("{e}") };
        assert_eq!(rank, usize::from(world.rank() == 0));
    }
    world.barrier().unwrap();
    drop(group);
    world.barrier().unwrap();
    world.subgroup_builder(&all).name("x").build().unwrap().barrier().unwrap();
    if world.rank() < 2 {
        world.subgroup_builder(&[0, 1]).name("x").build().unwrap().barrier().unwrap();
    }
    world.barrier().unwrap();
}

/// Pad sizes: settable per group with the channels they give, refused when invalid, reported when they differ.
pub fn pad_sizes_are_checked_and_agreed(world: World) {
    let n = world.size();
    let all: Vec<usize> = (0..n).collect();
    let with = |bytes| world.subgroup_builder(&all).signal_pad_size(bytes).build();
    for bad in [0, 4 * n - 4, 4 * n + 1, usize::MAX] {
        assert!(with(bad).unwrap_err().to_string().contains("a signal pad size in"));
    }
    let one = with(4 * n).unwrap();
    assert_eq!((one.channels(), one.signal_pad_size()), (1, 4 * n));
    one.barrier().unwrap();
    let e = with(9216 + 4096 * world.rank()).unwrap().ready().unwrap_err();
    assert!(matches!(e, Error::Mismatch { what: "signal pad size", .. }), "{e}");
    let two = with(2 * 9216).unwrap();
    assert_eq!(two.channels(), 2 * 9216 / 4 / n);
    two.barrier().unwrap();
}

/// Invalid lists of ranks are refused, and the next one works.
pub fn senseless_groups_are_refused(world: World) {
    let n = world.size();
    let others: Vec<usize> = (0..n).filter(|&r| r != world.rank()).collect();
    for bad in [&[][..], &[world.rank(), world.rank()], &[world.rank(), n], &others] {
        let e = world.subgroup(bad).unwrap_err().to_string();
        assert!(e.contains("different ranks in [0"), "{e}");
    }
    let own = world.subgroup(&[world.rank()]).unwrap();
    own.barrier().unwrap();
    let x = own.alloc::<u8>(3).unwrap().rendezvous(&own).unwrap();
    x.share().unwrap().release().unwrap();
}

/// Ranks of a colour form a group in the order of their keys; those without one are in none.
pub fn a_split_groups_by_color_and_orders_by_key(world: World) {
    let (n, own) = (world.size(), world.rank());
    for round in 0..3 {
        let color = (own + 1 != n).then_some((own % 2) as u64);
        let group = world.split(color, -(own as i64)).unwrap();
        let Some(group) = group else {
            assert_eq!(own + 1, n);
            continue;
        };
        let mut members: Vec<usize> = (0..n - 1).filter(|r| r % 2 == own % 2).collect();
        members.reverse();
        assert_eq!(group.world_ranks(), members);
        assert_eq!(group.world_ranks()[group.rank()], own);
        let mut all = vec![0; members.len()];
        group.all_gather(&[own + round], &mut all).unwrap();
        assert_eq!(all, members.iter().map(|rank| rank + round).collect::<Vec<_>>());
        let mut x = group.alloc::<usize>(3).unwrap().rendezvous(&group).unwrap();
        x.local_mut().fill(own);
        let shared = x.share().unwrap();
        let read = |rank| part_of(&shared, rank)[2];
        assert!((0..group.size()).all(|rank| read(rank) == members[rank]));
        let inner = group.split(Some(u64::MAX), 0).unwrap().unwrap(); // equal keys keep the order
        assert_eq!(inner.world_ranks(), members);
        shared.release().unwrap();
    }
    let e = if own == 0 { world.barrier() } else { world.split(None, 0).map(drop) };
    assert!(n == 1 || matches!(e, Err(Error::Mismatch { what: "operation", .. })), "{e:?}");
    world.barrier().unwrap();
}
