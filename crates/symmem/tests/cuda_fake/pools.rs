//! Pools and persistent memory: what is handed out again, when, and that all of it is given back.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use symmem::cuda::Gpu;
use symmem::{Error, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{Random, Ranks, test_name};

use super::{GROUP, Group, configured, drivers, first_words, ranks, word};

const LEN: usize = 1000;
const SEGMENT: usize = 2 << 20;

/// Buffers of one segment, at other offsets on other ranks, each seen by all.
fn check_peers_memory(world: &World, driver: &Fake, gpu: &Gpu) {
    let stream = gpu.stream().unwrap();
    let pool = gpu.pool(world, SEGMENT);
    let before = driver.calls("cuMemCreate");
    let ahead: Vec<_> = (0..world.rank()).map(|_| pool.alloc::<u8>(300).unwrap()).collect();
    let first = |i: usize, rank: usize| (10 * i + rank) as u32;
    let make = |i: usize| {
        let buffer = pool.alloc::<u32>(LEN).unwrap();
        assert_eq!(buffer.offset() > 0, i > 0 || world.rank() > 0);
        let mut x = buffer.rendezvous(world).unwrap();
        x.write(&[first(i, world.rank()); LEN], &stream).unwrap();
        x
    };
    let all: Vec<_> = (0..3).map(make).collect();
    world.barrier().unwrap();
    for (i, x) in all.iter().enumerate() {
        let expected: Vec<u32> = (0..world.size()).map(|rank| first(i, rank)).collect();
        assert_eq!(first_words(x.handle()), expected);
        assert_eq!(x.handle().offset(), 0, "the user's memory begins at the part");
        assert_eq!(x.handle().buffer_size(), 4 * LEN);
    }
    // The segment, and the group's pad.
    assert_eq!(driver.calls("cuMemCreate") - before, 2);
    let (held, used) = pool.usage();
    assert_eq!(held, SEGMENT);
    world.barrier().unwrap();
    drop((ahead, all));
    assert!(used > 0 && pool.usage() == (SEGMENT, 0), "{:?}", pool.usage());
}

#[test]
fn parts_of_a_pool_are_seen_by_all_ranks() {
    for n in [1, 2, 4] {
        ranks(&drivers(n), |world, driver, gpu, _| check_peers_memory(world, driver, gpu));
    }
}

#[test]
fn parts_of_a_pool_are_seen_by_all_processes() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::plain(2);
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        check_peers_memory(&world, &driver, &gpu);
        drop((gpu, world));
        assert_eq!(driver.live(), [""; 0]);
    });
}

#[test]
fn a_part_is_handed_out_again_once_nothing_runs() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let pool = gpu.pool(world, SEGMENT);
        let x = pool.alloc::<u32>(LEN).unwrap();
        driver.fail("cuStreamQuery", 1, code::NOT_READY);
        for nth in [1, 2] {
            driver.fail("cuEventQuery", nth, code::NOT_READY);
        }
        drop(x); // while something is in the stream
        assert_ne!(pool.usage().1, 0);
        let y = pool.alloc::<u32>(LEN).unwrap();
        assert_ne!(y.offset(), 0, "handed out while something may use it");
        stream.synchronize().unwrap();
        let z = pool.alloc::<u32>(LEN).unwrap();
        assert_eq!(z.offset(), 0);
        assert_eq!(pool.usage().0, SEGMENT);
    });
}

/// A peer's kernel may be late, and still writing, when ours has given up.
#[test]
fn a_part_is_not_handed_out_again_after_a_kernel_gave_up() {
    let driver = Fake::plain(1);
    let fails = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&fails);
    driver.kernel("barrier", &[GROUP], move |launched| {
        if now.swap(false, Ordering::Relaxed) {
            let mailbox = Group::of(launched).mailbox();
            word(mailbox + 8).store(1, Ordering::Relaxed); // a timeout
            word(mailbox + 4).store(2, Ordering::Release); // noted
        }
    });
    ranks(&[driver], |world, _, gpu, stream| {
        let pool = gpu.pool(world, SEGMENT);
        let make = || pool.alloc::<u32>(LEN).unwrap();
        let x = make().rendezvous(world).unwrap();
        fails.store(true, Ordering::Relaxed);
        x.barrier(stream).unwrap();
        drop(x); // nobody has asked yet how it went
        let y = make();
        assert_ne!(y.offset(), 0);
        let y = y.rendezvous(world).unwrap();
        assert!(matches!(y.synchronize(stream), Err(Error::Timeout { .. })));
        world.resync().unwrap();
        let at = y.handle().buffer_ptrs();
        drop(y);
        assert_eq!(make().rendezvous(world).unwrap().handle().buffer_ptrs(), at);
    });
}

#[test]
fn a_larger_buffer_than_a_segment_has_one_of_its_own() {
    ranks(&drivers(1), |world, driver, gpu, _| {
        let pool = gpu.pool(world, SEGMENT);
        let small = pool.alloc::<u8>(100).unwrap();
        let large = pool.alloc::<u8>(3 * SEGMENT).unwrap();
        assert_eq!((small.offset(), large.offset()), (0, 0));
        assert!(pool.usage().0 > 4 * SEGMENT);
        assert!(matches!(pool.alloc::<u64>(usize::MAX), Err(Error::Usage { op: "alloc", .. })));
        // What the driver refuses leaves the pool as it was.
        driver.fail("cuMemCreate", 1, code::OUT_OF_MEMORY);
        assert!(matches!(pool.alloc::<u8>(3 * SEGMENT), Err(Error::Driver { .. })));
        let used = pool.usage();
        driver.fail("cuMemsetD8Async", 1, code::INVALID_VALUE);
        assert!(matches!(pool.alloc::<u8>(100), Err(Error::Driver { .. })));
        assert_eq!(pool.usage(), used);
    });
}

fn able(n: usize) -> Vec<Arc<Fake>> {
    configured(n, &vec![Config { multicast: true, ..Config::default() }; n])
}

#[test]
fn the_address_of_all_ranks_has_the_offset_of_the_part() {
    ranks(&able(2), |world, driver, gpu, _| {
        let pool = gpu.pool(world, SEGMENT);
        let make = || pool.alloc::<u32>(LEN).unwrap();
        let (x, y) = (make(), make());
        let apart = y.offset() - x.offset();
        let (x, y) = (x.rendezvous(world).unwrap(), y.rendezvous(world).unwrap());
        let (first, second) = (x.handle().multicast_ptr(), y.handle().multicast_ptr());
        assert_eq!(second.unwrap(), first.unwrap() + apart);
        // Once for the group's pads if they want one, and once for the segment.
        let bound = driver.calls("cuMulticastBindMem");
        let z = make().rendezvous(world).unwrap();
        assert_eq!(z.handle().multicast_ptr(), Some(first.unwrap() + 2 * apart));
        assert_eq!(driver.calls("cuMulticastBindMem"), bound, "one object for a segment");
        // In another group it is another object, for the members may be others.
        let group = world.subgroup(&[0, 1]).unwrap();
        let z = make().rendezvous(&group).unwrap();
        assert_eq!(driver.calls("cuMulticastBindMem"), bound + 1);
        assert!(z.handle().multicast_ptr().is_some());
        world.barrier().unwrap();
    });
}

#[test]
fn parts_at_different_offsets_have_no_address_for_all() {
    ranks(&able(2), |world, _, gpu, _| {
        let pool = gpu.pool(world, SEGMENT);
        let ahead = (world.rank() == 1).then(|| pool.alloc::<u8>(300).unwrap());
        let x = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        assert_eq!(x.handle().multicast_ptr(), None);
        let y = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        assert!(y.handle().multicast_ptr().is_some());
        world.barrier().unwrap();
        drop(ahead);
    });
}

#[test]
fn an_id_gives_the_same_memory_again() {
    ranks(&able(2), |world, driver, gpu, stream| {
        let alloc = || gpu.alloc_persistent::<u32>(world, 7, LEN);
        let mut x = alloc().unwrap().rendezvous(world).unwrap();
        x.write(&[5; LEN], stream).unwrap();
        let (at, all) = (x.handle().buffer_ptrs(), x.handle().multicast_ptr());
        let refused = |e: symmem::Result<_>, what: &str| match e.map(drop) {
            Err(e @ Error::Usage { op: "alloc_persistent", rank: Some(_), .. }) => {
                assert!(e.to_string().contains(what), "{e}");
            }
            other => panic!("{other:?}"),
        };
        refused(alloc(), "still active");
        drop(x);
        refused(gpu.alloc_persistent::<u32>(world, 7, LEN + 1), "the size of the previous");
        let e = gpu.alloc_persistent::<f32>(world, 7, LEN).map(drop).unwrap_err();
        assert!(e.to_string().contains("the element type of the previous"), "{e}");
        let other = 1 - world.rank() as u32;
        let other = Gpu::with_driver(driver.clone(), other).unwrap();
        refused(other.alloc_persistent::<u32>(world, 7, LEN), "the backend of the previous");
        let e = world.alloc_persistent::<u32>(7, LEN).map(drop).unwrap_err();
        assert!(e.to_string().contains("cuda on cuda:"), "{e}");
        world.barrier().unwrap();
        if world.rank() == 0 {
            let calls = driver.calls("cuMemCreate");
            let x = alloc().unwrap().rendezvous(world).unwrap(); // alone: it is known
            assert_eq!((x.handle().buffer_ptrs(), x.handle().multicast_ptr()), (at, all));
            assert_eq!(x.read(stream).unwrap(), [5; LEN]);
            assert_eq!(driver.calls("cuMemCreate"), calls);
        }
    });
}

/// What two ranks of one process have, dropped in any order.
fn drop_in_any_order(seed: u64, gpu: impl Fn(usize) -> Gpu + Sync) {
    World::threads(2, |world| {
        let rank = world.rank();
        let gpu = gpu(rank);
        let stream = gpu.stream().unwrap();
        let pool = gpu.pool(&world, SEGMENT);
        let x = pool.alloc::<u32>(LEN).unwrap().rendezvous(&world).unwrap();
        let y = pool.alloc::<u32>(LEN).unwrap();
        let z = gpu.alloc_persistent::<u32>(&world, 1, LEN).unwrap();
        let z = z.rendezvous(&world).unwrap();
        drop(gpu.alloc_persistent::<u32>(&world, 2, LEN).unwrap());
        x.barrier(&stream).unwrap();
        world.barrier().unwrap();
        let handle = x.handle().clone();
        let mut things: Vec<Box<dyn Any>> = vec![Box::new(x), Box::new(y), Box::new(z)];
        things.extend([Box::new(pool) as Box<dyn Any>, Box::new(stream), Box::new(gpu)]);
        things.extend([Box::new(world) as Box<dyn Any>, Box::new(handle)]);
        let mut random = Random(seed * 2 + rank as u64);
        while !things.is_empty() {
            drop(things.swap_remove(random.below(things.len())));
        }
    })
    .unwrap();
}

#[test]
fn nothing_is_left_of_a_process_with_two_devices_whatever_goes_first() {
    for seed in 0..24 {
        let driver = Fake::plain(2);
        let open = |number| Gpu::with_driver(driver.clone(), number as u32).unwrap();
        drop_in_any_order(seed, open);
        assert_eq!(driver.live(), [""; 0], "seed {seed}");
    }
}

#[test]
fn nothing_is_left_of_two_ranks_with_one_device_whatever_goes_first() {
    for seed in 0..24 {
        let driver = Fake::plain(1);
        let gpu = Gpu::with_driver(driver.clone(), 0).unwrap();
        drop_in_any_order(seed, |_| gpu.clone());
        drop(gpu);
        assert_eq!(driver.live(), [""; 0], "seed {seed}");
    }
}

#[test]
fn allocations_and_rendezvous_in_a_loop_take_no_more_memory() {
    ranks(&drivers(2), |world, driver, gpu, _| {
        let pool = gpu.pool(world, SEGMENT);
        let round = || {
            let x = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
            let y = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
            world.barrier().unwrap();
            drop((x, y));
            world.barrier().unwrap();
        };
        round();
        let before = driver.live().len();
        (0..50).for_each(|_| round());
        assert_eq!(driver.live().len(), before);
        assert_eq!(pool.usage(), (SEGMENT, 0));
    });
}
