//! Allocation, rendezvous and handles.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use symmem::{DType, Device, Error};
use symmem_chaos::element::Plain;

use super::platform::{Memory, Platform};
use super::{LONG, next, same, source};

/// All sizes work, also none and one that is no multiple of anything.
pub fn any_length_works(platform: &impl Platform) {
    fn check<T: Plain>(platform: &impl Platform, len: usize) {
        let (own, next) = (platform.world().rank(), next(platform.world()));
        let data = |rank: usize| source(len).elements::<T>(rank, len);
        let mut x = platform.filled(&data(own));
        x.open();
        let mut got = data(own);
        x.get(next, 0, &mut got).unwrap();
        same(&got, &data(next), "the next rank's part");
        x.close();
        same(&x.read().unwrap(), &data(own), "the own part");
        assert_eq!(x.handle().buffer_size(), len * size_of::<T>());
    }
    for len in [0, 1, 3, 127, 4097, 1 << 18] {
        check::<u8>(platform, len);
        check::<f64>(platform, len);
    }
}

/// An allocation is zeroed, data and pad, also where it was used before.
pub fn memory_starts_as_zero(platform: &impl Platform) {
    for _ in 0..3 {
        let mut x = platform.memory::<u32>(platform.world(), 5000).unwrap();
        assert_eq!(x.read().unwrap(), [0; 5000]);
        assert!(x.pad().iter().all(|word| *word == 0));
        x.barrier().unwrap();
        x.write(&[u32::MAX; 5000]);
        x.put_signal(next(platform.world()), 3, LONG).unwrap();
        x.barrier().unwrap();
        assert!(x.pad().contains(&1), "the signal that nobody takes");
        x.barrier().unwrap();
    }
}

/// A handle tells all that PyTorch's does.
pub fn a_handle_tells_sizes_and_addresses(platform: &impl Platform) {
    let world = platform.world();
    let buffer = platform.alloc::<f32>(100).unwrap();
    let (address, offset) = platform.at(&buffer);
    assert_eq!(offset, 0);
    let x = platform.rendezvous(buffer, world).unwrap();
    let handle = x.handle();
    assert_eq!((handle.rank(), handle.size()), (world.rank(), world.size()));
    assert_eq!(handle.group().name(), "world");
    assert_eq!((handle.buffer_size(), handle.offset()), (400, 0));
    assert_eq!(handle.signal_pad_size(), symmem::DEFAULT_SIGNAL_PAD_SIZE);
    assert_eq!((handle.backend_name(), handle.device().to_string()), platform.names());
    assert_eq!(handle.multicast_ptr(), None);
    // Of other hosts, only devices' memory has addresses.
    let reached = |&rank: &usize| world.is_local(rank) || handle.device() != Device::Host;
    let here = (0..world.size()).filter(reached).count();
    assert!((0..world.size()).all(|rank| handle.is_reachable(rank) == reached(&rank)));
    assert_eq!(handle.is_within_direct_access(), here == world.size());
    let (parts, pads) = (handle.buffer_ptrs(), handle.signal_pad_ptrs());
    assert_eq!(parts[world.rank()], address);
    assert!(pads.iter().all(|pad| pad.is_multiple_of(128)));
    let all = parts.into_iter().chain(pads).filter(|&address| address != 0);
    assert_eq!(all.collect::<HashSet<_>>().len(), 2 * here, "an address for each part and pad");
    world.barrier().unwrap();
}

/// A rendezvous is collective once. Afterwards one rank may ask alone.
pub fn rendezvous_is_remembered(platform: &impl Platform) {
    let world = platform.world();
    let buffer = platform.alloc::<u32>(10).unwrap();
    let (address, _) = platform.at(&buffer);
    let x = platform.rendezvous(buffer, world).unwrap();
    let addresses = x.handle().buffer_ptrs();
    if world.rank() == 0 {
        for _ in 0..3 {
            let again = world.rendezvous_at(address, DType::U32).unwrap().unwrap();
            assert_eq!(again.buffer_ptrs(), addresses);
        }
    }
    world.barrier().unwrap();
}

/// An address inside an allocation finds it, with the offset applied everywhere.
pub fn interior_addresses_resolve_with_their_offset(platform: &impl Platform) {
    let world = platform.world();
    let pool = platform.pool(1 << 20);
    let buffers = [platform.alloc::<u32>(100), platform.cut(&pool, 100), platform.cut(&pool, 100)];
    for buffer in buffers.map(Result::unwrap) {
        let (at, _) = platform.at(&buffer);
        let x = platform.rendezvous(buffer, world).unwrap();
        let handle = world.rendezvous_at(at + 40, DType::U32).unwrap().unwrap();
        assert_eq!((handle.offset(), handle.buffer_size()), (40, 360));
        let ahead: Vec<usize> = x
            .handle()
            .buffer_ptrs()
            .iter()
            .map(|&part| if part == 0 { 0 } else { part + 40 })
            .collect();
        assert_eq!(handle.buffer_ptrs(), ahead);
        assert!(world.is_symmetric(at + 399) && !world.is_symmetric(at + 400));
        world.barrier().unwrap();
        drop((x, handle));
        assert!(!world.is_symmetric(at));
    }
    let elsewhere = 0_u32;
    let address = &raw const elsewhere as usize;
    assert!(!world.is_symmetric(address));
    assert!(world.rendezvous_at(address, DType::U32).unwrap().is_none());
    world.barrier().unwrap();
}

/// Persistent allocations: one user at a time, the same memory, the same rendezvous.
pub fn an_id_gives_the_same_memory_again(platform: &impl Platform) {
    let world = platform.world();
    let refused = |asked: symmem::Result<()>, why: &str| {
        let e = asked.unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    let buffer = platform.persistent::<u32>(7, 100).unwrap();
    refused(platform.persistent::<u32>(7, 100).map(drop), "still active");
    let mut x = platform.rendezvous(buffer, world).unwrap();
    let data: Vec<u32> = (0..100).map(|i| i + world.rank() as u32).collect();
    x.write(&data);
    let addresses = x.handle().buffer_ptrs();
    refused(platform.persistent::<u32>(7, 100).map(drop), "still active");
    drop(x);
    refused(platform.persistent::<u32>(7, 101).map(drop), "400 bytes");
    refused(platform.persistent::<f32>(7, 100).map(drop), "element type");
    for _ in 0..2 {
        let buffer = platform.persistent::<u32>(7, 100).unwrap();
        let x = platform.rendezvous(buffer, world).unwrap();
        assert_eq!(x.handle().buffer_ptrs(), addresses);
        assert_eq!(x.read().unwrap(), data);
        world.barrier().unwrap();
    }
}

/// Ranks that disagree all learn it, and the next rendezvous works.
pub fn mismatches_are_told_to_every_rank(platform: &impl Platform) {
    let world = platform.world();
    if world.size() == 1 {
        return;
    }
    let odd = world.rank() == 1;
    let told = |failed: symmem::Result<()>, expected: &str| match failed.unwrap_err() {
        Error::Mismatch { what, rank, .. } => {
            assert_eq!((what, rank), (expected, usize::from(!odd)));
        }
        other => panic!("{other}"),
    };
    told(platform.memory::<f32>(world, if odd { 200_000 } else { 1000 }).map(drop), "size");
    let types = if odd {
        platform.memory::<i32>(world, 1000).map(drop)
    } else {
        platform.memory::<f32>(world, 1000).map(drop)
    };
    told(types, "element type");
    platform.memory::<f32>(world, 1000).unwrap().barrier().unwrap();
}

/// Many groups and buffers come and go without leaving descriptors behind.
pub fn nothing_is_left_of_what_is_dropped(platform: &impl Platform) {
    let world = platform.world();
    let all: Vec<usize> = (0..world.size()).collect();
    let count = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let cycle = || {
        let group = world.subgroup(&all).unwrap();
        let x = platform.memory::<u8>(&group, 10_000).unwrap();
        x.barrier().unwrap();
    };
    (0..3).for_each(|_| cycle());
    world.barrier().unwrap();
    let before = count();
    (0..20).for_each(|_| cycle());
    world.barrier().unwrap();
    // Ranks that are threads see each other's descriptors, of which a few may be in use, and those of other tests, which come
    // and go. What was left behind would stay.
    let enough = before + 4 * world.size();
    let soon = Instant::now() + Duration::from_secs(20);
    while count() > enough && Instant::now() < soon {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(count() <= enough, "{before} descriptors, then {}", count());
    world.barrier().unwrap();
}
