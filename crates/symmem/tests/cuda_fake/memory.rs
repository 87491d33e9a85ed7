//! Allocation and rendezvous: what is mapped where, and that all of it is given back.

use std::any::Any;

use symmem::cuda::Gpu;
use symmem::{Error, World};
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_sys::cuda::{Devices, code};
use symmem_testing::{Random, Ranks, die, test_name};

use super::{drivers, load, on, ranks};

const LEN: usize = 1000;

fn value(rank: usize, i: usize) -> u32 {
    (rank * LEN + i) as u32
}

/// Fills this rank's memory, and sees all ranks' at the handle's addresses.
pub(super) fn check_peers_memory(world: &World, gpu: &Gpu) {
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
    assert_eq!(buffer.read(&stream).unwrap(), [0; LEN], "not zeroed");
    let mut x = buffer.rendezvous(world).unwrap();
    let own: Vec<u32> = (0..LEN).map(|i| value(world.rank(), i)).collect();
    x.write(&own, &stream).unwrap();
    world.barrier().unwrap();
    let (handle, granule) = (x.handle(), 2 << 20);
    assert_eq!(handle.buffer_size(), 4 * LEN);
    assert_eq!(handle.buffer_ptrs().len(), world.size());
    for (rank, address) in handle.buffer_ptrs().into_iter().enumerate() {
        assert!(address.is_multiple_of(granule), "{address:#x}");
        let there: Vec<u32> = (0..LEN).map(|i| load((address + 4 * i) as u64)).collect();
        let expected: Vec<u32> = (0..LEN).map(|i| value(rank, i)).collect();
        assert_eq!(there, expected, "of rank {rank}");
    }
    for address in handle.signal_pad_ptrs() {
        let words = handle.signal_pad_size() / 4;
        assert!((0..words).all(|i| load((address + 4 * i) as u64) == 0));
    }
    assert_eq!(x.read(&stream).unwrap(), own);
    assert_eq!(handle.multicast_ptr(), None);
    world.barrier().unwrap();
}

#[test]
fn ranks_see_each_others_bytes() {
    for n in [1, 2, 4] {
        ranks(&drivers(n), |world, _, gpu, _| check_peers_memory(world, gpu));
    }
}

#[test]
fn ranks_that_share_a_device_see_each_others_bytes() {
    let driver = Fake::plain(1);
    World::threads(3, |world| {
        check_peers_memory(&world, &Gpu::with_driver(driver.clone(), 0).unwrap());
    })
    .unwrap();
    assert_eq!(driver.live(), [""; 0]);
}

#[test]
fn processes_see_each_others_bytes() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::plain(2);
        check_peers_memory(&world, &Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap());
        drop(world);
        assert_eq!(driver.live(), [""; 0]);
    });
}

#[test]
fn a_peers_memory_outlives_the_peer() {
    Ranks::new(2).dying(&[1]).run(test_name!(), |world| {
        let gpu = Gpu::with_driver(Fake::plain(2), world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        x.write(&[7; LEN], &stream).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        while x.barrier(&stream).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(load(x.handle().buffer_ptrs()[1] as u64), 7);
        assert!(matches!(x.barrier(&stream), Err(Error::PeerLost { rank: 1, .. })));
    });
}

#[test]
fn many_allocations_lie_apart() {
    ranks(&drivers(2), |world, _, gpu, stream| {
        let make = |i: u32| {
            let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
            x.write(&vec![i; LEN], stream).unwrap();
            x
        };
        let all: Vec<_> = (0..8).map(make).collect();
        world.barrier().unwrap();
        for (i, x) in all.iter().enumerate() {
            for address in x.handle().buffer_ptrs() {
                assert_eq!(load((address + 4 * (LEN - 1)) as u64), i as u32);
            }
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_pad_has_the_size_that_was_asked_for_and_must_be_alike() {
    ranks(&drivers(2), |world, _, gpu, _| {
        let x = gpu.alloc_with_pad::<u32>(world, LEN, 4096).unwrap().rendezvous(world).unwrap();
        assert_eq!(x.handle().signal_pad_size(), 4096);
        let pad = 4096 << world.rank();
        let unlike = gpu.alloc_with_pad::<u32>(world, LEN, pad).unwrap();
        let e = unlike.rendezvous(world).map(drop).unwrap_err();
        assert!(e.to_string().contains("signal pad size"), "{e}");
        let e = gpu.alloc_with_pad::<u32>(world, LEN, 3).map(drop).unwrap_err();
        assert!(matches!(e, Error::Usage { .. }), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn a_device_settles_but_not_while_something_is_captured() {
    ranks(&drivers(1), |_, driver, gpu, stream| {
        let waits = || driver.calls("cuCtxSynchronize");
        let before = waits();
        gpu.settle().unwrap();
        assert_eq!(waits(), before + 1);
        stream.capture(|| gpu.settle()).map(drop).unwrap();
        assert_eq!(waits(), before + 1);
    });
}

#[test]
fn nothing_is_left_whatever_goes_first() {
    for seed in 0..24 {
        let drivers = drivers(2);
        World::threads(2, |world| {
            let rank = world.rank();
            let gpu = Gpu::with_driver(drivers[rank].clone(), rank as u32).unwrap();
            let (a, b) = (gpu.stream().unwrap(), gpu.stream().unwrap());
            let group = world.subgroup(&[0, 1]).unwrap();
            let x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
            let y = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&group).unwrap();
            let buffer = gpu.alloc::<f32>(&world, LEN).unwrap();
            x.barrier(&a).unwrap();
            y.barrier(&b).unwrap();
            let graph = a.capture(|| x.barrier(&a)).unwrap();
            let handle = x.handle().clone();
            world.barrier().unwrap();
            let mut things: Vec<Box<dyn Any>> = vec![Box::new(x), Box::new(y), Box::new(buffer)];
            things.extend([Box::new(a) as Box<dyn Any>, Box::new(b), Box::new(graph)]);
            things.extend([Box::new(world) as Box<dyn Any>, Box::new(group), Box::new(gpu)]);
            things.push(Box::new(handle));
            let mut random = Random(seed * 2 + rank as u64);
            while !things.is_empty() {
                drop(things.swap_remove(random.below(things.len())));
            }
        })
        .unwrap();
        for driver in drivers {
            assert_eq!(driver.live(), [""; 0], "seed {seed}");
        }
    }
}

#[test]
fn memory_in_use_is_given_back_once_nothing_runs() {
    let driver = Fake::plain(1);
    World::threads(1, |world| {
        let gpu = Gpu::with_driver(driver.clone(), 0).unwrap();
        let stream = gpu.stream().unwrap();
        let x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        let before = driver.calls("cuMemUnmap");
        driver.fail("cuStreamQuery", 1, code::NOT_READY);
        driver.fail("cuEventQuery", 1, code::NOT_READY);
        drop(x);
        assert_eq!(driver.calls("cuMemUnmap"), before, "unmapped while something runs");
        drop(gpu.alloc::<u32>(&world, LEN).unwrap());
        assert_eq!(driver.calls("cuMemUnmap"), before + 2);
        let buffer = gpu.alloc::<u32>(&world, LEN).unwrap();
        driver.fail("cuStreamQuery", 1, code::NOT_READY);
        driver.fail("cuEventQuery", 1, code::NOT_READY);
        drop(buffer);
        assert_eq!(driver.calls("cuMemUnmap"), before + 2);
        stream.synchronize().unwrap();
        assert_eq!(driver.calls("cuMemUnmap"), before + 3);
        // A stream that goes with something in it leaves its end, which goes with the device.
        driver.fail("cuStreamQuery", 1, code::NOT_READY);
        drop(stream);
    })
    .unwrap();
    assert_eq!(driver.live(), [""; 0]);
}

#[test]
fn network_cards_may_reach_the_memory_where_the_device_allows_it() {
    for rdma in [false, true] {
        let driver = Fake::new(vec![Config { rdma, ..Config::default() }]);
        ranks(&[driver], |world, driver, gpu, _| {
            let _buffer = gpu.alloc::<u32>(world, LEN).unwrap();
            let fit = driver.live().iter().filter(|line| line.contains("for RDMA")).count();
            assert_eq!(fit, usize::from(rdma));
        });
    }
}

/// Whatever is current for the caller's thread stays so, and none need be.
#[test]
fn the_callers_context_stays_current() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let other = driver.device(1 - world.rank()).unwrap();
        let context = driver.context_retain(other).unwrap();
        for current in [None, Some(context)] {
            driver.context_set(current).unwrap();
            let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
            x.write(&[3; LEN], stream).unwrap();
            x.barrier(stream).unwrap();
            assert_eq!(x.read(stream).unwrap(), [3; LEN]);
            driver.fail("cuStreamQuery", 1, code::NOT_READY); // something is still in the stream
            drop(x);
            stream.synchronize().unwrap();
            assert_eq!(driver.context_current().unwrap(), current);
        }
        driver.context_set(None).unwrap();
        // SAFETY: retained above, and not used again.
        unsafe { driver.context_release(other) }.unwrap();
    });
}

/// After a fault the driver refuses everything, also to take things back: that is no reason to panic or to hang.
#[test]
fn a_device_that_has_failed_is_left_alone() {
    let drivers = drivers(2);
    on(
        &drivers,
        |rank| rank,
        |world, driver, gpu, stream| {
            let pool = gpu.pool(world, 2 << 20);
            let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
            let y = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
            x.barrier(stream).unwrap();
            world.barrier().unwrap();
            for call in ["cuStreamQuery", "cuEventQuery", "cuMemUnmap", "cuStreamSynchronize"] {
                driver.fail_always(call, code::ILLEGAL_ADDRESS);
            }
            assert!(matches!(x.synchronize(stream), Err(Error::Driver { .. })));
            drop((x, y, pool));
            assert!(matches!(gpu.alloc::<u32>(world, LEN), Err(Error::Driver { .. })));
        },
    );
}

/// What a stream left behind when it went, or was captured, holds up all that is dropped after.
#[test]
fn memory_outlives_what_streams_had_in_them() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let busy = |call: &str, times: usize| {
            (1..=times).for_each(|nth| driver.fail(call, nth, code::NOT_READY));
        };
        for capture in [false, true] {
            let other = gpu.stream().unwrap();
            let [x, y] = [(); 2].map(|()| gpu.alloc::<u32>(world, LEN).unwrap());
            let before = driver.calls("cuMemUnmap");
            busy("cuStreamQuery", 1);
            busy("cuEventQuery", 2); // once for each that is dropped
            let drop_both = || {
                drop(x);
                drop(y);
                assert_eq!(driver.calls("cuMemUnmap"), before, "capture: {capture}");
                Ok(())
            };
            if capture {
                other.capture(drop_both).unwrap();
            } else {
                drop(other);
                drop_both().unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(driver.calls("cuMemUnmap"), before + 2);
        }
    });
}

#[test]
fn a_device_that_is_not_there_or_cannot_is_told_apart() {
    let why = |e: Error| match e {
        Error::Unavailable { what, why, .. } => format!("{what}: {why}"),
        other => panic!("{other}"),
    };
    let e = Gpu::with_driver(Fake::plain(2), 2).unwrap_err();
    assert_eq!(why(e), "cuda:2: this process sees 2 devices");
    let old = Config { virtual_memory: false, ..Config::default() };
    let e = why(Gpu::with_driver(Fake::new(vec![old]), 0).unwrap_err());
    assert!(e.contains("virtual memory management: cuda:0 (Fake GPU) does not have it"), "{e}");
    match symmem_sys::cuda::load() {
        Ok(_) => assert!(Gpu::open(u32::MAX).is_err()),
        Err(_) => assert!(why(Gpu::open(0).unwrap_err()).starts_with("the CUDA driver: ")),
    }
}

#[test]
fn parts_lie_within_the_memory_and_the_buffer_stays_with_its_owner() {
    ranks(&drivers(2), |world, _, gpu, stream| {
        let (rank, peer) = (world.rank(), 1 - world.rank());
        let buffer = gpu.alloc::<u8>(world, 1024).unwrap();
        let whole = buffer.symmetric(world).unwrap();
        // SAFETY: what is done through it is ordered by the stream and the barriers.
        let part = unsafe { whole.part::<f32>(256, 16) }.unwrap();
        let addresses = whole.handle().buffer_ptrs().into_iter().map(|first| first + 256);
        assert_eq!(part.handle().buffer_ptrs(), addresses.collect::<Vec<_>>());
        let mut data = gpu.alloc::<f32>(world, 16).unwrap();
        data.write(&[rank as f32 + 1.0; 16], stream).unwrap();
        part.put(peer, 0, data.view(), stream).unwrap();
        stream.synchronize().unwrap();
        world.barrier().unwrap();
        assert_eq!(part.read(stream).unwrap(), [peer as f32 + 1.0; 16]);
        let bytes = buffer.read(stream).unwrap();
        assert!(bytes[..256].iter().chain(&bytes[320..]).all(|byte| *byte == 0));
        for (offset, len) in [(2, 1), (1024, 1), (0, 257)] {
            // SAFETY: refused before anything is touched.
            let refused = unsafe { whole.part::<f32>(offset, len) }.err().unwrap();
            assert!(refused.to_string().contains("aligned elements within the 1024"), "{refused}");
        }
        world.barrier().unwrap();
    });
}
