//! Allocation, rendezvous and addresses, and how memory goes back to the heap.

use symmem::ReduceOp;
use symmem::cuda::Gpu;
use symmem_fake_nvshmem::{BASE, HEAP};
use symmem_sys::cuda::fake::Config;
use symmem_testing::test_name;

use super::{counts, driver, load, open, ranks};

const LEN: usize = 1000;

fn value(rank: usize, i: usize) -> u32 {
    (rank * LEN + i) as u32
}

#[test]
fn ranks_see_each_others_bytes_at_the_librarys_addresses() {
    for n in [1, 2, 4] {
        ranks(n).run(test_name!(), |world| {
            let (_, gpu, stream) = open(&world);
            assert_eq!(gpu.backend_name(), "nvshmem");
            for _ in 0..3 {
                let buffer = gpu.alloc::<u32>(&world, LEN).unwrap();
                assert_eq!(buffer.read(&stream).unwrap(), [0; LEN], "not zeroed");
                let mut x = buffer.rendezvous(&world).unwrap();
                let own: Vec<u32> = (0..LEN).map(|i| value(world.rank(), i)).collect();
                x.write(&own, &stream).unwrap();
                world.barrier().unwrap();
                let handle = x.handle();
                assert_eq!(
                    (handle.backend_name(), handle.is_within_direct_access()),
                    ("nvshmem", true)
                );
                for (rank, address) in handle.buffer_ptrs().into_iter().enumerate() {
                    let heap = BASE as usize + rank * HEAP as usize;
                    assert!((heap..heap + HEAP as usize).contains(&address), "{address:#x}");
                    assert_eq!(load(address + 4 * (LEN - 1)), value(rank, LEN - 1));
                }
                for address in handle.signal_pad_ptrs() {
                    let words = handle.signal_pad_size() / 4;
                    assert!(
                        (0..words).all(|i| load(address + 4 * i) == 0),
                        "the pad is not zeroed"
                    );
                }
                world.barrier().unwrap();
            }
        });
    }
}

#[test]
fn kernels_get_the_addresses_of_the_heap() {
    ranks(2).run(test_name!(), |world| {
        let (driver, gpu, stream) = open(&world);
        let mut x = gpu.alloc::<f32>(&world, 1 << 20).unwrap().rendezvous(&world).unwrap();
        let parts = x.handle().buffer_ptrs();
        // The kernel's second parameter is an address for each rank.
        driver.kernel("all_reduce_two_shot", &[616, 576, 8, 8, 4], move |launched| {
            let pointers = &launched.parameters[1];
            for (rank, part) in parts.iter().enumerate() {
                let bytes = &pointers[8 * rank..8 * rank + 8];
                assert_eq!(u64::from_ne_bytes(bytes.try_into().unwrap()), *part as u64);
            }
        });
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        let names: Vec<String> = driver.launches().into_iter().map(|l| l.function).collect();
        assert_eq!(names, ["all_reduce_two_shot"]);
        x.put_signal(1 - world.rank(), 0, &stream).unwrap();
        x.barrier_on_channel(0, &stream).unwrap();
        let channels = x.handle().signal_pad_size() / 8;
        for wrong in [
            x.put_signal(1, channels, &stream),
            x.wait_signal(1, channels, &stream),
            x.barrier_on_channel(channels, &stream),
        ] {
            let e = wrong.unwrap_err().to_string();
            assert!(e.contains("the maximum supported channel"), "{e}");
        }
        assert!(x.put_signal(2, 0, &stream).is_err() && x.wait_signal(2, 0, &stream).is_err());
        x.synchronize(&stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn a_pool_cuts_from_one_allocation_of_the_heap() {
    ranks(2).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let pool = gpu.pool(&world, 1 << 20);
        let first = pool.alloc::<u32>(LEN).unwrap().rendezvous(&world).unwrap();
        let second = pool.alloc::<u32>(LEN).unwrap();
        assert!(second.offset() >= 4 * LEN);
        let mut second = second.rendezvous(&world).unwrap();
        assert_eq!(counts(c"nvshmem_align").0, 1);
        second.write(&[world.rank() as u32 + 5; LEN], &stream).unwrap();
        world.barrier().unwrap();
        let next = (world.rank() + 1) % 2;
        assert_eq!(load(second.handle().buffer_ptrs()[next]), next as u32 + 5);
        assert_eq!(load(first.handle().buffer_ptrs()[next]), 0);
        world.barrier().unwrap();
    });
}

#[test]
fn memory_goes_back_to_the_heap_once_all_ranks_have_let_go() {
    ranks(2).run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        let alloc = || gpu.alloc::<u32>(&world, LEN).unwrap();
        let live = |expected: i32| {
            // Besides the first, which everything else is measured from.
            assert_eq!(counts(c"nvshmem_free").1, expected + 1);
        };
        let (first, second) = (alloc(), alloc());
        live(2);
        // Each rank drops the other one: nothing is common yet.
        let kept = if world.rank() == 0 {
            drop(first);
            second
        } else {
            drop(second);
            first
        };
        let third = alloc();
        live(3);
        drop(kept);
        let fourth = alloc();
        live(2);
        drop((third, fourth));
        for _ in 0..100 {
            drop(alloc());
        }
        live(1);
        world.barrier().unwrap();
    });
}

#[test]
fn a_heap_without_room_is_an_error_on_all_ranks_and_goes_on() {
    ranks(2).env("NVSHMEM_SYMMETRIC_SIZE", 1 << 20).run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        let e = gpu.alloc::<u8>(&world, 2 << 20).map(drop).unwrap_err().to_string();
        assert!(e.contains("NVSHMEM_SYMMETRIC_SIZE sets its size"), "{e}");
        // More than the device has is not even asked for: the library would end the process.
        let asked = counts(c"nvshmem_align").0;
        let e = gpu.alloc::<u8>(&world, 4 << 30).map(drop).unwrap_err().to_string();
        assert!(e.contains("free on the device of rank 0, for 1"), "{e}");
        assert_eq!(counts(c"nvshmem_align").0, asked);
        gpu.alloc::<u8>(&world, 64).unwrap().rendezvous(&world).unwrap();
        // Sizes that differ are found out before NVSHMEM is asked.
        let e = gpu.alloc::<u8>(&world, 9000 * (1 + world.rank())).map(drop).unwrap_err();
        assert!(e.to_string().contains("ranks disagree on the size"), "{e}");
        gpu.alloc::<u8>(&world, 64).unwrap().rendezvous(&world).unwrap();
    });
}

#[test]
fn an_allocation_that_the_library_refuses_is_an_error_and_the_next_works() {
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_FAIL", "nvshmem_align:1").run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        assert!(gpu.alloc::<u8>(&world, 64).is_err());
        gpu.alloc::<u8>(&world, 64).unwrap().rendezvous(&world).unwrap();
    });
}

#[test]
fn there_is_a_multicast_address_iff_the_library_has_one() {
    for there in [false, true] {
        let ranks = ranks(2);
        let ranks = if there { ranks.env("SYMMEM_FAKE_NVSHMEM_MULTICAST", 1) } else { ranks };
        ranks.run(test_name!(), |world| {
            let config = Config { multicast: true, ..Config::default() };
            let driver = driver(2, &config);
            let gpu = Gpu::with_driver(driver, world.rank() as u32).unwrap();
            let gpu = gpu.with_backend(Some("nvshmem"), &world).unwrap();
            let x = gpu.alloc::<f32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
            let there = std::env::var_os("SYMMEM_FAKE_NVSHMEM_MULTICAST").is_some();
            let address = x.handle().multicast_ptr();
            assert_eq!(address.is_some(), there);
            if let Some(address) = address {
                let own = x.handle().buffer_ptrs()[world.rank()];
                let at = |base: u64| base as usize + (own % HEAP as usize);
                assert_eq!(address, at(BASE + 16 * HEAP));
            }
            world.barrier().unwrap();
        });
    }
}
