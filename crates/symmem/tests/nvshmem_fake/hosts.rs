//! Ranks on several hosts: NVSHMEM goes between them, whatever the driver's memory does.

use symmem::cuda::{Gpu, View};
use symmem::{Error, ReduceOp, World};
use symmem_testing::{kernels, test_name};

use super::{open, ranks};

const LEN: usize = 64;

/// Joins the world with rank 2 on another host than ranks 0 and 1.
fn join() -> World {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    // SAFETY: this process has no other thread that reads the environment.
    unsafe { std::env::set_var("SYMMEM_HOST", if rank < 2 { "a" } else { "b" }) };
    let world = World::from_env().unwrap();
    assert_eq!(world.hosts(), [vec![0, 1], vec![2]]);
    world
}

/// What a kernel would do with ranks of other hosts is refused.
fn check_refused(result: Result<(), Error>) {
    let e = result.unwrap_err();
    assert!(matches!(e, Error::Unavailable { .. }), "{e}");
    assert!(e.to_string().contains("only the network connects rank"), "{e}");
    assert!(e.to_string().contains("Symmetric::nvshmem"), "{e}");
}

/// Within a host the heap has addresses: signals work there, and tell of failures.
#[test]
fn the_heap_reaches_other_hosts_by_the_network_and_the_own_one_by_addresses() {
    ranks(3).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 2).start(test_name!(), || {
        let world = join();
        let (driver, gpu, stream) = open(&world);
        kernels::install(&driver);
        let mut x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        let own = world.rank();
        for rank in 0..3 {
            assert_eq!(x.handle().is_reachable(rank), world.is_local(rank), "rank {rank}");
        }
        x.write(&[own as u32 + 7; LEN], &stream).unwrap();
        world.barrier().unwrap();
        for to in 0..3 {
            // SAFETY: this rank's own elements, which live until the stream has done it.
            let one = unsafe { View::from_raw(x.handle().buffer_ptrs()[own] as u64, 1) };
            x.put(to, 10 + own, one, &stream).unwrap();
        }
        world.barrier().unwrap();
        assert_eq!(x.read(&stream).unwrap()[10..13], [7, 8, 9]);
        check_refused(x.all_reduce(ReduceOp::Sum, &stream));
        check_refused(x.barrier(&stream));
        check_refused(x.barrier_on_channel(0, &stream));
        let far = if own < 2 { 2 } else { 0 };
        assert!(x.put_signal(far, 0, &stream).is_err() && x.put_value(far, 0, 1, &stream).is_err());
        if own < 2 {
            x.put_signal(1 - own, 0, &stream).unwrap();
            x.wait_signal(1 - own, 0, &stream).unwrap();
            x.synchronize(&stream).unwrap();
        }
        world.barrier().unwrap();
        x.write(&[own as u32 + 1; LEN], &stream).unwrap();
        x.nvshmem().unwrap().broadcast(2, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [3; LEN]);
        world.barrier().unwrap();
    });
}

/// A kernel that waits in vain looks at the group's pads, and tells all of them.
#[test]
fn a_signal_in_vain_within_a_host_is_a_timeout_and_a_resync_helps() {
    ranks(3).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 2).start(test_name!(), || {
        let world = join();
        let (driver, gpu, stream) = open(&world);
        kernels::install(&driver);
        let x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        if world.rank() == 0 {
            let limit = std::time::Duration::from_millis(20);
            let _ = x.wait_signal_within(1, 0, limit, &stream);
            let e = x.synchronize(&stream).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
        }
        world.resync().unwrap();
        x.synchronize(&stream).unwrap();
        world.barrier().unwrap();
    });
}

/// As over NVLink between hosts, where NVSHMEM may and this library may not.
#[test]
fn addresses_of_the_heap_on_other_hosts_do_not_make_kernels_synchronise_there() {
    ranks(3).start(test_name!(), || {
        let world = join();
        let (driver, gpu, stream) = open(&world);
        let mut x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        assert!(x.handle().is_within_direct_access());
        check_refused(x.all_reduce(ReduceOp::Sum, &stream));
        x.write(&[world.rank() as u32 + 1; LEN], &stream).unwrap();
        x.nvshmem().unwrap().broadcast(2, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [3; LEN]);
        assert_eq!(driver.launches(), []);
        let of_driver: Gpu = gpu.with_backend(Some("cuda"), &world).unwrap();
        let e = of_driver.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap_err();
        assert!(e.to_string().contains("the device of rank 0 has none"), "{e}");
        world.barrier().unwrap();
    });
}
