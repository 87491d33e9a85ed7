//! What allocation, rendezvous and handles of main memory promise besides what [`every_backend`](super::every_backend) checks.

use symmem::{Pool, World};

use super::{SOON, next, part_of, previous};

/// A rendezvous that fails gives the buffer back.
pub fn a_failed_rendezvous_gives_the_buffer_back(world: World) {
    let len = 1000 * (1 + world.rank());
    let failed = world.alloc::<f32>(len).unwrap().rendezvous(&world).err().unwrap();
    assert_eq!(failed.kept.len(), len);
    let x = world.alloc::<f32>(1000).unwrap().rendezvous(&world).unwrap();
    let x = x.rendezvous(&world).unwrap(); // a second time: nothing happens
    x.share().unwrap().release().unwrap();
}

/// Views of parts and pads are checked.
pub fn views_beyond_a_part_are_refused(world: World) {
    let x = world.alloc::<f32>(100).unwrap().rendezvous(&world).unwrap();
    let handle = x.handle();
    assert_eq!(handle.view::<f32>(0, 0, 100).unwrap().as_ptr() as usize, handle.buffer_ptrs()[0]);
    assert!(handle.view::<u8>(0, 399, 1).is_ok());
    let beyond = handle.view::<f32>(0, 99, 2).unwrap_err().to_string();
    assert!(beyond.contains("within the 400 bytes of rank 0"), "{beyond}");
    assert!(handle.view::<f32>(0, usize::MAX, 1).is_err());
    assert!(handle.view::<f64>(0, usize::MAX / 8, 1).is_err());
    let nobody = handle.view::<f32>(world.size(), 0, 1).unwrap_err().to_string();
    assert!(nobody.contains("a rank in [0"), "{nobody}");
    assert!(handle.signal_pad().words(world.size()).is_err());
    let at = x.local().as_ptr() as usize;
    let rest = world.rendezvous_at(at + 40, symmem::DType::F32).unwrap().unwrap();
    assert_eq!(rest.view::<f32>(world.rank(), 5, 1).unwrap().as_ptr() as usize, at + 60);
    assert!(rest.view::<f32>(0, 90, 1).is_err());
    world.barrier().unwrap();
}

/// An id whose last user did not release its memory, which a peer may still read, gets new memory.
pub fn an_id_gets_new_memory_while_a_peer_may_read(world: World) {
    let mut x = world.alloc_persistent::<u32>(7, 100).unwrap();
    x.local_mut()[99] = 42;
    let shared = x.rendezvous(&world).unwrap().share().unwrap();
    assert_eq!(part_of(&shared, next(&world))[99], 42);
    world.barrier().unwrap(); // all have read
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
        assert!(part_of(&shared, rank).iter().all(|v| *v == rank as u64));
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
        let parts = shared.peers().unwrap();
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
