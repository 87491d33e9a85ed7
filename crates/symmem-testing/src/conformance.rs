//! What every backend must do, as functions of one rank. Each is run by several ranks at once.

use std::time::Duration;

use symmem::{Deadline, Element, Error, GroupOptions, Handle, Pool, World};

const SOON: Deadline = Deadline::within(Duration::from_secs(30));
const SHORT: Deadline = Deadline::within(Duration::from_millis(50));

fn next(world: &World) -> usize {
    (world.rank() + 1) % world.size()
}

fn previous(world: &World) -> usize {
    (world.rank() + world.size() - 1) % world.size()
}

/// Everyone reads what everyone wrote, phase after phase.
pub fn phases_show_every_rank_what_every_rank_wrote(world: World) {
    let mut x = world.alloc::<u64>(1000).unwrap().rendezvous(&world).unwrap();
    for round in 0..50 {
        let value = |rank: usize, i: usize| (round * 1_000_000 + rank * 1000 + i) as u64;
        let own = world.rank();
        x.local_mut().iter_mut().enumerate().for_each(|(i, v)| *v = value(own, i));
        let shared = x.share().unwrap();
        for rank in 0..world.size() {
            let part = shared.peer(rank).unwrap();
            assert!(
                part.iter().enumerate().all(|(i, v)| *v == value(rank, i)),
                "round {round} of {rank}"
            );
        }
        x = shared.release().unwrap();
    }
}

/// A signal carries all that was written before it.
pub fn signals_order_data(world: World) {
    let x = world.alloc::<u64>(512).unwrap().rendezvous(&world).unwrap();
    let to = x.peer_ptr(next(&world)).unwrap();
    for round in 1..200_u64 {
        for i in 0..512 {
            // SAFETY: the receiver does not look before our signal, nor we write again before its answer.
            unsafe { to.wrapping_add(i).write_volatile(round) };
        }
        world.put_signal(next(&world), 3, SOON).unwrap();
        world.wait_signal(previous(&world), 3, SOON).unwrap();
        assert!(x.local().iter().all(|v| *v == round));
        world.put_signal(previous(&world), 4, SOON).unwrap();
        world.wait_signal(next(&world), 4, SOON).unwrap();
    }
}

/// Signals to oneself, on the first and the last channel.
pub fn signals_reach_oneself_on_every_channel(world: World) {
    for channel in [0, world.channels() - 1] {
        world.put_signal(world.rank(), channel, SOON).unwrap();
        world.wait_signal(world.rank(), channel, SOON).unwrap();
    }
}

/// A second signal waits until the first is consumed.
pub fn a_full_slot_holds_the_sender_back(world: World) {
    let (to, from) = (next(&world), previous(&world));
    world.put_signal(to, 0, SOON).unwrap();
    world.barrier().unwrap();
    let e = world.put_signal(to, 0, SHORT).unwrap_err();
    let Error::Timeout { op, channel, waiting_for, .. } = e else { panic!("{e}") };
    assert_eq!((op, channel, waiting_for), ("put_signal", Some(0), vec![to]));
    world.barrier().unwrap();
    world.wait_signal(from, 0, SOON).unwrap();
    world.put_signal(to, 0, SOON).unwrap();
    world.wait_signal(from, 0, SOON).unwrap();
}

/// Bad arguments are refused with rank, operation, expectation and value; the next call works.
pub fn bad_ranks_and_channels_are_named(world: World) {
    let n = world.size();
    let channels = world.channels();
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    let own = world.rank();
    assert_eq!(
        text(world.put_signal(n, 0, SOON)),
        format!("rank {own}: put_signal: expected a rank in [0, {n}), got {n}")
    );
    assert!(text(world.wait_signal(usize::MAX, 0, SOON)).contains("a rank in [0"));
    assert!(text(world.barrier_on(channels, SOON)).contains("maximum supported channel"));
    assert!(text(world.put_signal(0, channels, SOON)).contains("maximum supported channel"));
    world.barrier_on(channels - 1, SOON).unwrap();
}

/// A barrier that times out names the missing and is finished by a later call.
pub fn a_barrier_that_timed_out_is_resumed(world: World) {
    if world.rank() == 0 {
        let e = world.barrier_on(1, SHORT).unwrap_err();
        let Error::Timeout { op, channel, waiting_for, .. } = e else { panic!("{e}") };
        assert_eq!((op, channel), ("barrier", Some(1)));
        assert_eq!(waiting_for, (1..world.size()).collect::<Vec<_>>());
    }
    world.barrier().unwrap();
    for _ in 0..3 {
        world.barrier_on(1, SOON).unwrap();
    }
}

/// Ranks that disagree all learn it, and the next rendezvous works.
pub fn mismatches_are_told_to_every_rank(world: World) {
    let odd = world.rank() == 1;
    let what = |e: Error| match e {
        Error::Mismatch { op: "rendezvous", what, rank, .. } => {
            assert_eq!(rank, if odd { 0 } else { 1 });
            what
        }
        other => panic!("{other}"),
    };
    let sizes = world.alloc::<f32>(if odd { 2000 } else { 1000 }).unwrap().rendezvous(&world);
    let failed = sizes.err().unwrap();
    assert_eq!(failed.kept.len(), if odd { 2000 } else { 1000 }, "the buffer comes back");
    assert_eq!(what(failed.error), "size");
    let types = if odd {
        world.alloc::<i32>(1000).unwrap().rendezvous(&world).err().unwrap().error
    } else {
        world.alloc::<f32>(1000).unwrap().rendezvous(&world).err().unwrap().error
    };
    assert_eq!(what(types), "element type");
    let x = world.alloc::<f32>(1000).unwrap().rendezvous(&world).unwrap();
    x.share().unwrap().release().unwrap();
}

/// Different calls at the same time are an error on every rank, and leave the group in step.
pub fn different_calls_are_told_to_every_rank(world: World) {
    let x = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
    let y = world.alloc::<u8>(1).unwrap().rendezvous(&world).unwrap();
    let (x, y) = if world.rank() == 0 {
        let failed = x.share().err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "operation", rank: 1, .. }));
        (failed.kept.give_up().ok().unwrap(), y)
    } else {
        let failed = y.share().err().unwrap();
        assert!(matches!(failed.error, Error::Mismatch { what: "operation", rank: 0, .. }));
        (x, failed.kept.give_up().ok().unwrap())
    };
    x.share().unwrap().release().unwrap();
    y.share().unwrap().release().unwrap();
}

/// A phase that was given up at its deadline holds nobody back once the others have come.
pub fn an_abandoned_share_does_not_block_the_group(world: World) {
    let short = GroupOptions { timeout: Some(Duration::from_millis(50)), ..Default::default() };
    let all: Vec<usize> = (0..world.size()).collect();
    let group = world.subgroup_with(&all, short).unwrap();
    group.ready().unwrap();
    let x = world.alloc::<u8>(1).unwrap().rendezvous(&group).unwrap();
    let y = world.alloc::<u8>(1).unwrap().rendezvous(&group).unwrap();
    world.barrier().unwrap();
    if world.rank() == 0 {
        assert!(matches!(x.share().err().unwrap().error, Error::Timeout { .. }));
        world.barrier().unwrap();
    } else {
        world.barrier().unwrap();
        drop(x.share().unwrap());
    }
    world.barrier().unwrap();
    y.share().unwrap().release().unwrap();
}

/// All sizes work, also none and one that is no multiple of anything.
pub fn any_length_works(world: World) {
    fn check<T: Element + PartialEq>(world: &World, len: usize, value: T) {
        let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
        x.local_mut().fill(value);
        let shared = x.share().unwrap();
        let last = shared.peer(next(world)).unwrap();
        assert_eq!(last.len(), len);
        assert!(last.iter().all(|v| *v == value));
        shared.release().unwrap();
    }
    for len in [0, 1, 3, 127, 4097, 1 << 20] {
        check::<u8>(&world, len, 7);
        check::<f64>(&world, len, 0.5);
    }
}

/// A new allocation is zeroed, data and pad.
pub fn memory_starts_as_zero(world: World) {
    let x = world.alloc::<u32>(5000).unwrap();
    assert!(x.local().iter().all(|v| *v == 0));
    let x = x.rendezvous(&world).unwrap();
    for rank in 0..world.size() {
        let words = x.handle().signal_pad().words(rank).unwrap();
        assert!(words.iter().all(|w| w.load(symmem::sync::Ordering::Relaxed) == 0));
    }
    world.barrier().unwrap();
}

fn check_handle(world: &World, handle: &Handle) {
    assert_eq!((handle.rank(), handle.world_size()), (world.rank(), world.size()));
    assert_eq!(handle.group().name(), "world");
    assert_eq!(handle.buffer_size(), 400);
    assert_eq!(handle.signal_pad_size(), symmem::signal_pad_size());
    assert_eq!(handle.device().to_string(), "host");
    assert_eq!(handle.multicast_ptr(), None);
    assert_eq!(handle.buffer_ptrs().len(), world.size());
    assert_eq!(handle.signal_pad_ptrs().len(), world.size());
}

/// The handle tells all that PyTorch's does, and checks bounds.
pub fn a_handle_tells_sizes_and_addresses(world: World) {
    let x = world.alloc::<f32>(100).unwrap().rendezvous(&world).unwrap();
    let handle = x.handle();
    check_handle(&world, handle);
    assert_eq!(handle.offset(), 0);
    assert_eq!(handle.buffer_ptrs()[world.rank()], x.local().as_ptr() as usize);
    assert_eq!(handle.signal_pad_ptrs()[0] % 128, 0);
    assert_eq!(handle.view::<f32>(0, 0, 100).unwrap().as_ptr() as usize, handle.buffer_ptrs()[0]);
    assert!(handle.view::<u8>(0, 399, 1).is_ok());
    let beyond = handle.view::<f32>(0, 99, 2).unwrap_err().to_string();
    assert!(beyond.contains("within the 400 bytes of rank 0"), "{beyond}");
    assert!(handle.view::<f32>(0, usize::MAX, 1).is_err());
    assert!(handle.view::<f64>(0, usize::MAX / 8, 1).is_err());
    assert!(
        handle.view::<f32>(world.size(), 0, 1).unwrap_err().to_string().contains("a rank in [0")
    );
    let pad = handle.signal_pad();
    assert!(pad.words(world.size()).is_err());
    assert!(pad.put(0, pad.channels(), SOON).is_err());
}

/// Rendezvous is collective once: afterwards it is known, and one rank may ask alone.
pub fn rendezvous_is_remembered(world: World) {
    let mut x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    let addresses = x.handle().buffer_ptrs();
    if world.rank() == 0 {
        for _ in 0..3 {
            x = x.rendezvous(&world).unwrap();
            let again = world.rendezvous_at(x.local().as_ptr() as usize, symmem::DType::U32);
            assert_eq!(again.unwrap().unwrap().buffer_ptrs(), addresses);
        }
    }
    assert_eq!(x.handle().buffer_ptrs(), addresses);
}

/// An address inside an allocation finds it, with the offset applied everywhere.
pub fn interior_addresses_resolve_with_their_offset(world: World) {
    let x = world.alloc::<u32>(100).unwrap().rendezvous(&world).unwrap();
    let at = x.local().as_ptr() as usize;
    let handle = world.rendezvous_at(at + 40, symmem::DType::U32).unwrap().unwrap();
    assert_eq!((handle.offset(), handle.buffer_size()), (40, 360));
    assert_eq!(handle.buffer_ptrs()[world.rank()], at + 40);
    assert_eq!(handle.view::<u32>(world.rank(), 5, 1).unwrap().as_ptr() as usize, at + 60);
    assert!(handle.view::<u32>(0, 90, 1).is_err());
    assert!(world.is_symmetric(at + 399) && !world.is_symmetric(at + 400));
    let elsewhere = 0_u32;
    let address = &raw const elsewhere as usize;
    assert!(!world.is_symmetric(address));
    assert!(world.rendezvous_at(address, symmem::DType::U32).unwrap().is_none());
    world.barrier().unwrap();
    drop((x, handle));
    assert!(!world.is_symmetric(at));
}

/// The user's pad is the user's: built-in synchronisation leaves it alone, and its protocol works.
pub fn the_allocations_pad_belongs_to_the_user(world: World) {
    use symmem::sync::Ordering::Relaxed;
    let x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    let y = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    let own = x.handle().signal_pad().words(world.rank()).unwrap();
    own.iter().for_each(|w| w.store(1, Relaxed));
    world.barrier().unwrap();
    world.put_signal(next(&world), 1, SOON).unwrap();
    world.wait_signal(previous(&world), 1, SOON).unwrap();
    let x = x.share().unwrap().release().unwrap();
    let own = x.handle().signal_pad().words(world.rank()).unwrap();
    assert!(own.iter().all(|w| w.load(Relaxed) == 1));
    let pad = y.handle().signal_pad();
    let last = pad.channels() - 1;
    for _ in 0..20 {
        pad.put(next(&world), last, SOON).unwrap();
        let layout = world.size() * last + previous(&world);
        pad.wait(previous(&world), last, SOON).unwrap();
        assert!(layout < pad.words(0).unwrap().len());
    }
    world.barrier().unwrap();
    assert!(pad.words(world.rank()).unwrap().iter().all(|w| w.load(Relaxed) == 0), "zero at rest");
    world.barrier().unwrap();
}

/// Word `ws · channel + source`, as PyTorch's kernels have it.
pub fn the_pads_layout_is_pytorchs(world: World) {
    use symmem::sync::Ordering::{Acquire, Relaxed};
    let x = world.alloc::<u32>(1).unwrap().rendezvous(&world).unwrap();
    let pad = x.handle().signal_pad();
    let n = world.size();
    pad.words(next(&world)).unwrap()[n * 3 + world.rank()].store(1, Relaxed);
    world.barrier().unwrap();
    let own = pad.words(world.rank()).unwrap();
    let set: Vec<usize> = (0..own.len()).filter(|&i| own[i].load(Acquire) == 1).collect();
    assert_eq!(set, [n * 3 + previous(&world)]);
    pad.wait(previous(&world), 3, SOON).unwrap();
    assert_eq!(own[n * 3 + previous(&world)].load(Relaxed), 0);
    world.barrier().unwrap();
}

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
    let mut x = world.alloc::<usize2>(1).unwrap().rendezvous(&world).unwrap();
    x.local_mut()[0] = rank as usize2;
    for group in [low.as_ref(), high.as_ref()].into_iter().flatten() {
        x = x.rendezvous(group).unwrap();
        assert_eq!(x.group().name(), group.name());
        let shared = x.share().unwrap();
        for (r, &w) in group.world_ranks().iter().enumerate() {
            assert_eq!(shared.peer(r).unwrap()[0], w as usize2);
        }
        x = shared.release().unwrap();
    }
    let x = x.rendezvous(&world).unwrap();
    x.share().unwrap().release().unwrap();
}

#[allow(non_camel_case_types, reason = "a rank as an element")]
type usize2 = u64;

/// Signals of two groups over one allocation, on one channel, do not meet.
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
    let named = |ranks: &[usize]| {
        let options = GroupOptions { name: Some("tp".into()), ..Default::default() };
        world.subgroup_with(ranks, options)
    };
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
    let options = || GroupOptions { name: Some("x".into()), ..Default::default() };
    let all: Vec<usize> = (0..world.size()).collect();
    let ours: Vec<usize> = if world.rank() == 0 { vec![0, 1] } else { all.clone() };
    if world.rank() < 2 {
        let e = world.subgroup_with(&ours, options()).unwrap().ready().unwrap_err();
        let Error::Mismatch { what: "members", rank, .. } = e else { panic!("{e}") };
        assert_eq!(rank, 1 - world.rank());
    }
    world.barrier().unwrap();
    if world.rank() < 2 {
        world.subgroup_with(&[0, 1], options()).unwrap().barrier().unwrap();
    }
    world.barrier().unwrap();
}

/// Pad sizes: settable per group with the channels they give, refused when senseless, told when they differ.
pub fn pad_sizes_are_checked_and_agreed(world: World) {
    let n = world.size();
    let all: Vec<usize> = (0..n).collect();
    let with = |bytes| {
        let options = GroupOptions { signal_pad_size: Some(bytes), ..Default::default() };
        world.subgroup_with(&all, options)
    };
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

/// Persistent allocations: one user at a time, the same memory, the same rendezvous.
pub fn an_id_gives_the_same_memory_again(world: World) {
    let mut x = world.alloc_persistent::<u32>(7, 100).unwrap();
    x.local_mut()[99] = 42;
    let address = x.local().as_ptr() as usize;
    assert!(
        world.alloc_persistent::<u32>(7, 100).err().unwrap().to_string().contains("still active")
    );
    let x = x.rendezvous(&world).unwrap();
    assert!(world.alloc_persistent::<u32>(7, 100).is_err());
    drop(x);
    assert!(world.alloc_persistent::<u32>(7, 101).err().unwrap().to_string().contains("400 bytes"));
    assert!(
        world.alloc_persistent::<f32>(7, 100).err().unwrap().to_string().contains("element type")
    );
    let x = world.alloc_persistent::<u32>(7, 100).unwrap();
    assert_eq!((x.local().as_ptr() as usize, x.local()[99]), (address, 42));
    let x = x.rendezvous(&world).unwrap();
    let shared = x.share().unwrap();
    assert_eq!(shared.peer(next(&world)).unwrap()[99], 42);
    // Dropped without release: a peer may still be reading, so the id gets new memory.
    drop(shared);
    let x = world.alloc_persistent::<u32>(7, 100).unwrap();
    assert_eq!(x.local()[99], 0);
    world.barrier().unwrap();
}

/// Buffers of a pool are symmetric, may lie at different offsets, and are used again.
pub fn a_pools_buffers_are_symmetric(world: World) {
    let pool = Pool::new(&world, 1 << 20);
    // Ranks that cut differently still find each other's buffers.
    let _shift = (world.rank() % 2 == 1).then(|| pool.alloc::<u8>(300).unwrap());
    let mut x = pool.alloc::<u64>(100).unwrap();
    x.local_mut().fill(world.rank() as u64);
    let (offset, address) = (x.offset(), x.local().as_ptr() as usize);
    let x = x.rendezvous(&world).unwrap();
    let shared = x.share().unwrap();
    for rank in 0..world.size() {
        assert!(shared.peer(rank).unwrap().iter().all(|v| *v == rank as u64));
    }
    let x = shared.release().unwrap();
    x.handle().signal_pad().put(next(&world), 0, SOON).unwrap();
    world.barrier().unwrap();
    drop(x);
    let again = pool.alloc::<u64>(100).unwrap();
    assert_eq!((again.offset(), again.local().as_ptr() as usize), (offset, address));
    let again = again.rendezvous(&world).unwrap();
    let pad = again.handle().signal_pad();
    assert!(
        pad.words(world.rank())
            .unwrap()
            .iter()
            .all(|w| w.load(symmem::sync::Ordering::Relaxed) == 0)
    );
    world.barrier().unwrap();
    pad.put(next(&world), 0, SOON).unwrap();
    pad.wait(previous(&world), 0, SOON).unwrap();
    let shared = again.share().unwrap();
    drop(shared);
    // Dropped without release: not used again while a peer may read.
    assert_ne!(pool.alloc::<u64>(100).unwrap().local().as_ptr() as usize, address);
    let large = pool.alloc::<u8>(3 << 20).unwrap().rendezvous(&world).unwrap();
    assert_eq!(large.len(), 3 << 20);
    world.barrier().unwrap();
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

/// A handle keeps the memory alive after the typed value is gone.
pub fn a_handle_keeps_the_memory(world: World) {
    let mut x = world.alloc::<u64>(64).unwrap().rendezvous(&world).unwrap();
    x.local_mut().fill(9);
    let handle = x.handle().clone();
    drop(x);
    world.barrier().unwrap();
    let first = handle.view::<u64>(next(&world), 0, 64).unwrap();
    // SAFETY: the handle keeps the mapping, and nobody writes after the barrier.
    assert_eq!(unsafe { first.as_ptr().read_volatile() }, 9);
    world.barrier().unwrap();
}

/// Many groups and buffers come and go without leaving descriptors or mappings behind.
pub fn nothing_is_left_of_what_is_dropped(world: World) {
    let all: Vec<usize> = (0..world.size()).collect();
    let count = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let cycle = || {
        let group = world.subgroup(&all).unwrap();
        let x = world.alloc::<u8>(10_000).unwrap().rendezvous(&group).unwrap();
        x.share().unwrap().release().unwrap();
    };
    (0..3).for_each(|_| cycle());
    world.barrier().unwrap();
    let before = count();
    (0..20).for_each(|_| cycle());
    world.barrier().unwrap();
    // Ranks that are threads see each other's; a handful may be on their way.
    assert!(count() <= before + 4 * world.size(), "{before} descriptors, then {}", count());
    world.barrier().unwrap();
}

/// Senseless lists of ranks are refused, and the next one works.
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
