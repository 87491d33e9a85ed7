//! What allocation, rendezvous and handles promise.

use std::time::{Duration, Instant};

use symmem::{Error, Handle, Number, Pool, World};

use super::{SOON, next, previous};

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

/// All sizes work, also none and one that is no multiple of anything.
pub fn any_length_works(world: World) {
    fn check<T: Number + PartialEq>(world: &World, len: usize, value: T) {
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
        assert!(words.iter().all(|w| w.load(std::sync::atomic::Ordering::Relaxed) == 0));
    }
    world.barrier().unwrap();
}

fn check_handle(world: &World, handle: &Handle) {
    assert_eq!((handle.rank(), handle.size()), (world.rank(), world.size()));
    assert_eq!(handle.group().name(), "world");
    assert_eq!(handle.buffer_size(), 400);
    assert_eq!(handle.signal_pad_size(), symmem::DEFAULT_SIGNAL_PAD_SIZE);
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
            .all(|w| w.load(std::sync::atomic::Ordering::Relaxed) == 0)
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

/// All ranks' parts come as one list, by rank, also where the memory does not begin its segment.
pub fn all_parts_come_as_a_list(world: World) {
    let pool = Pool::new(&world, 1 << 20);
    let _first = pool.alloc::<f32>(1024).unwrap();
    for len in [1024, 0] {
        let mut x = pool.alloc::<f32>(len).unwrap();
        assert_ne!(x.offset(), 0);
        x.local_mut().fill(world.rank() as f32);
        let x = x.rendezvous(&world).unwrap();
        let addresses = x.handle().buffer_ptrs();
        let shared = x.share().unwrap();
        let parts = shared.peers();
        assert_eq!(parts.len(), world.size());
        for (rank, part) in parts.iter().enumerate() {
            assert_eq!(*part, vec![rank as f32; len]);
            assert_eq!(part.as_ptr() as usize, addresses[rank]);
        }
        shared.release().unwrap();
    }
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
    // Ranks that are threads see each other's, of which a handful may be on their way, and those of tests beside this one,
    // which come and go: what was left behind would stay.
    let enough = before + 4 * world.size();
    let soon = Instant::now() + Duration::from_secs(20);
    while count() > enough && Instant::now() < soon {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(count() <= enough, "{before} descriptors, then {}", count());
    world.barrier().unwrap();
}
