//! Symmetric memory of NCCL and its windows, against a library that stands in for NCCL and a fake driver that it allocates
//! from: ranks are threads, and no device is needed. Those in `device.rs` want a device and the real library.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests, and what they share")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use symmem::cuda::{Gpu, Stream};
use symmem::nccl::Nccl;
use symmem::{Error, ReduceOp, World};
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{FakeNccl, Live, Ranks, test_name};

mod nccl_memory {
    mod device;
    mod every_backend;
    mod hosts;
}

const LEN: usize = 1000;

/// The driver that the library allocates from.
static DRIVER: Mutex<Option<Arc<Fake>>> = Mutex::new(None);

unsafe extern "C" fn allocate(bytes: usize) -> u64 {
    let driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    driver.as_ref().unwrap().allocate(bytes).unwrap()
}

unsafe extern "C" fn free(address: u64) {
    let driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: allocated above, and not used again.
    unsafe { driver.as_ref().unwrap().free(address) }.unwrap();
}

/// Runs ranks as threads, each on a device of its own with memory of NCCL; nothing may be left.
fn ranks(fake: &FakeNccl, nccl: &Nccl, n: usize, body: impl Fn(&World, &Gpu, &Stream) + Sync) {
    on(fake, nccl, Fake::plain(n), n, body);
}

fn on(
    fake: &FakeNccl,
    nccl: &Nccl,
    driver: Arc<Fake>,
    n: usize,
    body: impl Fn(&World, &Gpu, &Stream) + Sync,
) {
    fake.allocator(allocate, free);
    *DRIVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&driver));
    World::threads(n, |world| {
        world.set_timeout(Duration::from_secs(30));
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        let gpu = gpu.with_nccl(nccl).unwrap();
        let stream = gpu.stream().unwrap();
        body(&world, &gpu, &stream);
        world.barrier().unwrap();
    })
    .unwrap();
    *DRIVER.lock().unwrap_or_else(PoisonError::into_inner) = None;
    assert_eq!(fake.live(), Live::default(), "left with NCCL");
    assert_eq!(driver.live(), [""; 0], "left with the driver");
}

#[test]
fn ranks_see_each_others_bytes_through_windows() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 3, |world, gpu, stream| {
        assert_eq!(gpu.backend_name(), "nccl");
        for _ in 0..2 {
            let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
            assert_eq!(buffer.read(stream).unwrap(), [0; LEN]);
            let mut x = buffer.rendezvous(world).unwrap();
            x.write(&[world.rank() as u32 + 7; LEN], stream).unwrap();
            world.barrier().unwrap();
            let mut theirs =
                gpu.with_backend(Some("cuda"), world).unwrap().alloc(world, LEN).unwrap();
            for rank in 0..3 {
                x.get(rank, 0, theirs.view_mut(), stream).unwrap();
                assert_eq!(theirs.read(stream).unwrap(), [rank as u32 + 7; LEN]);
            }
            assert_eq!(
                (x.handle().backend_name(), x.handle().is_within_direct_access()),
                ("nccl", true)
            );
            let nccl = x.nccl().unwrap();
            assert_eq!((nccl.communicator().rank(), nccl.communicator().size()), (world.rank(), 3));
            assert_ne!(nccl.window().unwrap().raw(), 0);
            world.barrier().unwrap();
        }
    });
    assert_eq!(fake.calls("ncclCommWindowRegister"), 6);
    assert_eq!(fake.calls("ncclCommInitRankConfig"), 3, "one communicator for the group");
}

#[test]
fn there_is_a_multicast_address_where_devices_have_such() {
    let fake = FakeNccl::new();
    for multicast in [false, true] {
        let driver = Fake::new(vec![Config { multicast, ..Config::default() }; 2]);
        on(&fake, &fake.nccl(), driver, 2, |world, gpu, _| {
            let x = gpu.alloc::<f32>(world, LEN).unwrap().rendezvous(world).unwrap();
            assert_eq!(x.handle().multicast_ptr().is_some(), multicast);
            world.barrier().unwrap();
        });
    }
}

#[test]
fn many_allocations_are_registered_at_once_and_all_go() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let make = |i: usize| {
            let buffer = gpu.alloc::<f32>(world, 1).unwrap();
            let first = buffer.symmetric(world).unwrap();
            if i.is_multiple_of(16) {
                drop(buffer.symmetric(world).unwrap());
            }
            first
        };
        let mut all: Vec<_> = (0..256).map(make).collect();
        world.barrier().unwrap();
        assert_eq!(fake.live().windows, 512);
        // Our own kernels work on them.
        all[255].all_reduce(ReduceOp::Sum, stream).unwrap();
        world.barrier().unwrap();
        all.truncate(100);
        world.barrier().unwrap();
        assert_eq!((fake.live().windows, fake.live().allocations), (200, 200));
        world.barrier().unwrap();
    });
}

#[test]
fn each_group_has_its_communicator_and_windows() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let group = world.subgroup(&[0, 1]).unwrap();
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        let (x, y) = (buffer.symmetric(world).unwrap(), buffer.symmetric(&group).unwrap());
        let windows =
            [x.nccl().unwrap().window().unwrap().raw(), y.nccl().unwrap().window().unwrap().raw()];
        assert_ne!(windows[0], windows[1]);
        let ours = x.nccl().unwrap().communicator().raw();
        assert_ne!(ours, y.nccl().unwrap().communicator().raw());
        x.barrier(stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn parts_of_one_segment_share_its_window() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let pool = gpu.pool(world, 4 << 20);
        let first = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let mut second = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let window = |x: &symmem::cuda::Symmetric<u32>| x.nccl().unwrap().window().unwrap().raw();
        assert_eq!(window(&first), window(&second));
        // A put goes to the part and not to the segment's beginning.
        second.write(&[0; LEN], stream).unwrap();
        world.barrier().unwrap();
        let mut own = gpu.alloc::<u32>(world, 10).unwrap();
        own.write(&[world.rank() as u32 + 3; 10], stream).unwrap();
        let peer = 1 - world.rank();
        second.nccl().unwrap().put_signal(peer, 5, own.view(), stream).unwrap();
        second.nccl().unwrap().wait_signal(peer, stream).unwrap();
        let got = second.read(stream).unwrap();
        assert_eq!((got[4], got[5], got[14], got[15]), (0, peer as u32 + 3, peer as u32 + 3, 0));
        assert_eq!(first.read(stream).unwrap(), [0; LEN]);
        world.barrier().unwrap();
    });
}

#[test]
fn a_pools_memory_is_used_again_with_its_window() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let pool = gpu.pool(world, 2 << 20);
        let make = || pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let (mut first, kept) = (make(), make());
        first.all_reduce(ReduceOp::Sum, stream).unwrap();
        let address = first.handle().buffer_ptrs();
        let window = first.nccl().unwrap().window().unwrap().raw();
        stream.synchronize().unwrap();
        world.barrier().unwrap();
        drop(first);
        world.barrier().unwrap();
        let mut again = make();
        assert_eq!(again.handle().buffer_ptrs(), address);
        assert_eq!(again.nccl().unwrap().window().unwrap().raw(), window);
        again.barrier(stream).unwrap();
        again.all_reduce(ReduceOp::Sum, stream).unwrap();
        drop(kept);
        world.barrier().unwrap();
    });
    assert_eq!((fake.calls("ncclMemAlloc"), fake.calls("ncclCommWindowRegister")), (2, 2));
}

#[test]
fn memory_with_a_pad_of_another_size_is_the_librarys_too() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let x = gpu.alloc_with_pad::<u32>(world, LEN, 4096).unwrap().rendezvous(world).unwrap();
        assert_eq!((x.handle().backend_name(), x.handle().signal_pad_size()), ("nccl", 4096));
        x.barrier(stream).unwrap();
        world.barrier().unwrap();
    });
    assert_eq!(fake.calls("ncclMemAlloc"), 2);
}

#[test]
fn memory_with_an_id_is_had_again_within_a_capture() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let kept = || gpu.alloc_persistent::<u32>(world, 7, LEN)?.rendezvous(world);
        kept().unwrap().barrier(stream).unwrap();
        world.barrier().unwrap();
        let graph = stream.capture(|| {
            let e = gpu.alloc::<u32>(world, LEN).map(drop).unwrap_err().to_string();
            assert!(e.contains("capturing a graph"), "{e}");
            kept()?.all_reduce(ReduceOp::Sum, stream)
        });
        let graph = graph.unwrap();
        // SAFETY: the memory lives with the world, and all ranks launch theirs.
        unsafe { graph.launch(stream) }.unwrap();
        stream.synchronize().unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn each_peer_has_an_endpoint_at_the_same_offset() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 3, |world, gpu, _| {
        let pool = gpu.pool(world, 2 << 20);
        let first = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let x = pool.alloc::<u32>(LEN).unwrap().rendezvous(world).unwrap();
        let all: Vec<_> = (0..3).map(|r| x.nccl().unwrap().cft_handle(r).unwrap()).collect();
        assert!(all[0].0 != all[1].0 && all[1].0 != all[2].0 && all[0].0 != all[2].0);
        assert!(all.iter().all(|(_, at)| *at == all[0].1), "{all:?}");
        assert_ne!(all[0].1, first.nccl().unwrap().cft_handle(0).unwrap().1);
        let (_, at) = x.nccl().unwrap().multicast_cft_handle().unwrap();
        assert_eq!(at, all[0].1);
        let e = x.nccl().unwrap().cft_handle(3).unwrap_err().to_string();
        assert!(e.contains("a rank in [0, 3)"), "{e}");
        drop(first);
        world.barrier().unwrap();
    });
}

#[test]
fn a_put_beyond_the_memory_or_the_ranks_is_refused() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 1, |world, gpu, stream| {
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let own = gpu.alloc::<u32>(world, 10).unwrap();
        let e = x.nccl().unwrap().put_signal(1, 0, own.view(), stream).unwrap_err().to_string();
        assert!(e.contains("a rank in [0, 1)"), "{e}");
        let e = x.nccl().unwrap().wait_signal(1, stream).unwrap_err().to_string();
        assert!(e.contains("a rank in [0, 1)"), "{e}");
        let e = x.nccl().unwrap().put_signal(0, LEN - 5, own.view(), stream).unwrap_err();
        assert!(e.to_string().contains("elements within the 1000 of rank 0"), "{e}");
    });
}

#[test]
fn what_a_version_lacks_says_which_has_it() {
    let fake = FakeNccl::new();
    let old = fake.of_version(22605);
    let gpu = Gpu::with_driver(Fake::plain(1), 0).unwrap();
    let e = gpu.with_nccl(&old).unwrap_err();
    assert!(matches!(e, Error::Unavailable { .. }), "{e}");
    assert!(e.to_string().contains("it requires NCCL 2.27, and this is 2.26.5"), "{e}");
    ranks(&fake, &fake.of_version(22809), 1, |world, gpu, stream| {
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let own = gpu.alloc::<u32>(world, 10).unwrap();
        let nccl = x.nccl().unwrap();
        let e = nccl.put_signal(0, 0, own.view(), stream).unwrap_err().to_string();
        assert!(e.contains("needs NCCL 2.29, 2.28.9 is loaded"), "{e}");
        let e = nccl.cft_handle(0).unwrap_err().to_string();
        assert!(e.contains("needs NCCL 2.31.2, 2.28.9 is loaded"), "{e}");
        assert!(nccl.multicast_cft_handle().is_err());
        let plain = gpu.with_backend(Some("cuda"), world).unwrap();
        let plain = plain.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let e = plain.nccl().map(drop).unwrap_err().to_string();
        assert!(e.contains("only available on memory of NCCL"), "{e}");
    });
}

#[test]
fn memory_without_windows_works_all_the_same() {
    let fake = FakeNccl::new();
    fake.windows(false, false, None);
    ranks(&fake, &fake.nccl(), 2, |world, gpu, stream| {
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        x.barrier(stream).unwrap();
        let e = x.nccl().unwrap().window().map(drop).unwrap_err().to_string();
        assert!(e.contains("a window of NCCL is not available"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn a_communicator_made_elsewhere_can_be_the_groups() {
    let fake = FakeNccl::new();
    let nccl = fake.nccl();
    ranks(&fake, &nccl, 2, |world, gpu, _| {
        let theirs = nccl.of_group(world, gpu).unwrap();
        // SAFETY: it is live until after all of this.
        let external = unsafe { nccl.register_external(world, gpu, theirs.raw()) }.unwrap();
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        assert_eq!(x.nccl().unwrap().communicator().raw(), theirs.raw());
        external.unregister();
        external.unregister();
        let y = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        assert_ne!(y.nccl().unwrap().communicator().raw(), theirs.raw());
        drop(external);
        // SAFETY: null is refused before it is looked at.
        let e = unsafe { nccl.register_external(world, gpu, 0) }.map(drop).unwrap_err();
        assert!(e.to_string().contains("a null pointer"), "{e}");
        let alone = world.subgroup(&[world.rank()]).unwrap();
        // SAFETY: it is live.
        let e = unsafe { nccl.register_external(&alone, gpu, theirs.raw()) }.map(drop).unwrap_err();
        assert!(e.to_string().contains("a communicator of rank 0 of 1"), "{e}");
        drop((x, y));
        world.barrier().unwrap();
    });
}

#[test]
fn memory_that_cannot_be_had_is_an_error_and_the_next_works() {
    let fake = FakeNccl::new();
    ranks(&fake, &fake.nccl(), 1, |world, gpu, _| {
        fake.fail("ncclMemAlloc", 1, 1);
        assert!(matches!(gpu.alloc::<u32>(world, LEN), Err(Error::Driver { .. })));
        fake.fail("ncclCommWindowRegister", 3, 1);
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        assert!(buffer.symmetric(world).is_err());
        drop(buffer);
        gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
    });
}

#[test]
fn without_the_library_every_way_to_it_says_what_was_looked_for() {
    Ranks::new(1).env("SYMMEM_NCCL", "/nowhere/libnccl.so.2").run(test_name!(), |world| {
        let gpu = Gpu::with_driver(Fake::plain(1), 0).unwrap();
        let unavailable = |e: Error| {
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains("/nowhere/libnccl.so.2"), "{e}");
        };
        unavailable(Nccl::load().unwrap_err());
        unavailable(Nccl::open("/nowhere/libnccl.so.2").unwrap_err());
        unavailable(gpu.with_backend(Some("nccl"), &world).map(drop).unwrap_err());
        // SAFETY: no other thread of this process reads the environment now.
        unsafe { std::env::set_var("SYMMEM_CUDA_BACKEND", "nccl") };
        unavailable(gpu.with_backend(None, &world).map(drop).unwrap_err());
        let x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        let e = x.nccl().map(drop).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
    });
}
