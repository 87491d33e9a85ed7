//! Allocation and rendezvous: what is mapped where, and that all of it is given back.

use std::any::Any;

use symmem::cuda::Gpu;
use symmem::{Error, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{Random, Ranks, die, test_name};

use super::{drivers, load, ranks};

const LEN: usize = 1000;

fn value(rank: usize, i: usize) -> u32 {
    (rank * LEN + i) as u32
}

/// Fills this rank's memory, and sees all ranks' at the handle's addresses.
pub(super) fn exchange(world: &World, gpu: &Gpu) {
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
        ranks(&drivers(n), |world, _, gpu, _| exchange(world, gpu));
    }
}

#[test]
fn ranks_that_share_a_device_see_each_others_bytes() {
    let driver = Fake::plain(1);
    World::threads(3, |world| {
        exchange(&world, &Gpu::with_driver(driver.clone(), 0).unwrap());
    })
    .unwrap();
    assert_eq!(driver.live(), [""; 0]);
}

#[test]
fn processes_see_each_others_bytes() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::plain(2);
        exchange(&world, &Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap());
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
fn sizes_that_differ_are_told_to_all_and_the_next_rendezvous_works() {
    ranks(&drivers(2), |world, _, gpu, _| {
        let len = LEN + world.rank();
        let e = gpu.alloc::<u32>(world, len).unwrap().rendezvous(world).map(drop).unwrap_err();
        assert!(e.to_string().contains("ranks disagree on the size"), "{e}");
        exchange(world, gpu);
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
fn a_device_that_is_not_there_or_cannot_is_told_apart() {
    let why = |e: Error| match e {
        Error::Unavailable { what, why } => format!("{what}: {why}"),
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
