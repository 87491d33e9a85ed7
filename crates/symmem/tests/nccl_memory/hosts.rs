//! Ranks on several hosts: NCCL goes between them; addresses do if there are fabric handles.
//!
//! The fake library has threads for ranks, so these join a world with names of hosts of their own, in a process of its own.

use std::sync::Arc;
use std::time::Duration;

use symmem::cuda::{Gpu, Stream};
use symmem::store::{MemoryStore, SharedStore};
use symmem::{Deadline, Error, ReduceOp, World};
use symmem_sys::cuda::fake::{Config, Fabric, Fake};
use symmem_testing::{FakeNccl, Live, Ranks, kernels, test_name};

use crate::{DRIVER, LEN, allocate, free};

/// Runs `n` ranks as threads, each on a device of its own with memory of NCCL: the first half of them on one host, the others on
/// another. Nothing may be left.
fn two_hosts(
    test: &'static str,
    n: usize,
    fabric: Fabric,
    body: impl Fn(&World, &Gpu, &Stream) + Sync,
) {
    Ranks::new(1).env("SYMMEM_ADDR", "127.0.0.1").start(test, || {
        let fake = FakeNccl::new();
        fake.allocator(allocate, free);
        let driver = Fake::new(vec![Config { fabric, ..Config::default() }; n]);
        kernels::install(&driver);
        *DRIVER.lock().unwrap() = Some(Arc::clone(&driver));
        let nccl = fake.nccl();
        let store: SharedStore = Arc::new(MemoryStore::new());
        std::thread::scope(|scope| {
            for rank in 0..n {
                let host = if rank < n.div_ceil(2) { "a" } else { "b" };
                // SAFETY: what reads the environment meanwhile is Rust, too.
                unsafe { std::env::set_var("SYMMEM_HOST", host) };
                let (driver, store, body) = (driver.clone(), store.clone(), &body);
                let (nccl, joining) = (&nccl, store.clone());
                scope.spawn(move || {
                    let timeout = Duration::from_secs(30);
                    let world = World::builder().timeout(timeout).join(rank, n, joining).unwrap();
                    assert_eq!(world.hosts().len(), 2);
                    let gpu = Gpu::with_driver(driver, rank as u32).unwrap();
                    let gpu = gpu.with_nccl(nccl).unwrap();
                    let stream = gpu.stream().unwrap();
                    body(&world, &gpu, &stream);
                    world.barrier().unwrap();
                });
                // The rank has found out on which host it is.
                let key = format!("symmem/world//1/address/{rank}");
                store.wait(&[&key], Deadline::after(Duration::from_secs(30))).unwrap();
            }
        });
        *DRIVER.lock().unwrap() = None;
        assert_eq!(fake.live(), Live::default(), "left with NCCL");
        assert_eq!(driver.live(), [""; 0], "left with the driver");
    });
}

#[test]
fn without_fabric_handles_nccl_reaches_other_hosts_and_kernels_do_not() {
    two_hosts(test_name!(), 4, Fabric::No, |world, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        let own = world.rank();
        for rank in 0..4 {
            assert_eq!(x.handle().is_reachable(rank), world.is_local(rank), "rank {rank}");
            assert_eq!(x.handle().signal_pad_ptrs()[rank] != 0, world.is_local(rank));
        }
        assert_eq!(x.handle().multicast_ptr(), None);
        // NCCL's own collectives and signals.
        x.write(&[own as u32 + 1; LEN], stream).unwrap();
        world.barrier().unwrap();
        let mut sum = gpu.alloc::<u32>(world, LEN).unwrap();
        let nccl = x.nccl().unwrap();
        nccl.communicator().all_reduce(x.view(), sum.view_mut(), ReduceOp::Sum, stream).unwrap();
        nccl.communicator().synchronize(stream).unwrap();
        assert_eq!(sum.read(stream).unwrap(), [10; LEN]);
        assert!(nccl.window().unwrap().raw() != 0);
        let far = (own + 2) % 4;
        nccl.put_signal(far, 0, sum.view(), stream).unwrap();
        nccl.wait_signal(far, stream).unwrap();
        nccl.communicator().synchronize(stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), [10; LEN]);
        world.barrier().unwrap();
        // What kernels and copies would need addresses for.
        let view = sum.view();
        let refused = [
            x.all_reduce(ReduceOp::Sum, stream),
            x.barrier(stream),
            x.broadcast(0, stream),
            x.put(far, 0, view, stream),
            x.get(far, 0, sum.view_mut(), stream),
            x.put_signal(far, 0, stream),
            x.wait_signal(far, 0, stream),
            x.barrier_on_channel(0, stream),
            x.memset32(far, 0, 1, 1, stream),
            x.write_value32(far, 0, 1, stream),
            x.refuse("all_reduce"),
        ];
        for refused in refused {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            let text = e.to_string();
            assert!(text.contains("only the network connects rank"), "{text}");
            assert!(text.contains("Symmetric::nccl"), "{text}");
        }
        // The host has none of any device's memory, and is not told to use what is for host memory.
        let e = x.handle().view::<u32>(far, 0, 1).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        assert!(!e.to_string().contains("get and put reach it"), "{e}");
        let pad = x.handle().signal_pad();
        for refused in [pad.put(far, 0, Duration::ZERO), pad.words(far).map(drop)] {
            let e = refused.unwrap_err();
            assert!(e.to_string().contains("got memory of a device"), "{e}");
        }
        // Within the host they have them.
        let near = own ^ 1;
        x.put_signal(near, 0, stream).unwrap();
        x.wait_signal(near, 0, stream).unwrap();
        x.get(near, 0, sum.view_mut(), stream).unwrap();
        assert_eq!(sum.read(stream).unwrap(), [10; LEN]);
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn over_fabric_handles_kernels_reach_other_hosts_too() {
    two_hosts(test_name!(), 4, Fabric::Yes, |world, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        assert!(x.handle().is_within_direct_access());
        x.write(&[world.rank() as u32 + 1; LEN], stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), [10; LEN]);
        world.barrier().unwrap();
    });
}

/// The same group and device, by what NCCL has and by what the driver has.
#[test]
fn memory_of_the_driver_is_refused_next_to_that_of_nccl() {
    two_hosts(test_name!(), 2, Fabric::No, |world, gpu, _| {
        let of_driver = gpu.with_backend(Some("cuda"), world).unwrap();
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        for _ in 0..2 {
            let e = of_driver.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap_err();
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains("the device of rank 0 has none"), "{e}");
        }
        assert!(x.nccl().is_ok());
        let mixed = if world.rank() == 0 { gpu } else { &of_driver };
        let e = mixed.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "backend", .. }), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn rows_between_hosts_are_refused_with_the_way_out() {
    two_hosts(test_name!(), 2, Fabric::No, |world, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 8).unwrap().rendezvous(world).unwrap();
        let mut splits = gpu.alloc::<i64>(world, 2).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<u32>(world, 8).unwrap();
        let mut received = gpu.alloc::<i64>(world, 4).unwrap();
        let (to, told) = (out.view_mut(), received.view_mut());
        let e = x.all_to_all_v(1, &mut splits, to, told, stream).unwrap_err();
        assert!(e.to_string().contains("Symmetric::nccl"), "{e}");
        world.barrier().unwrap();
    });
}
