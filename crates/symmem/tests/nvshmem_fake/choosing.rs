//! How the source is chosen, and what is said when it cannot be had.

use symmem::cuda::Gpu;
use symmem::{Error, World};
use symmem_sys::cuda::fake::{Config, Fake};
use symmem_testing::{Ranks, test_name};

use super::{driver, open, ranks};

fn plain(world: &World) -> Gpu {
    let driver = driver(world.size(), &Config::default());
    Gpu::with_driver(driver, world.rank() as u32).unwrap()
}

#[test]
fn the_environment_names_the_source_where_the_program_does_not() {
    ranks(2).env("SYMMEM_CUDA_BACKEND", "nvshmem").run(test_name!(), |world| {
        let gpu = plain(&world);
        assert_eq!(gpu.backend_name(), "cuda");
        assert_eq!(gpu.with_backend(None, &world).unwrap().backend_name(), "nvshmem");
        assert_eq!(gpu.with_backend(Some("cuda"), &world).unwrap().backend_name(), "cuda");
        world.barrier().unwrap();
        // SAFETY: no other thread of this process reads the environment now.
        unsafe { std::env::set_var("SYMMEM_CUDA_BACKEND", "tape") };
        let e = gpu.with_backend(None, &world).unwrap_err().to_string();
        assert!(e.contains("\"tape\" (from SYMMEM_CUDA_BACKEND)"), "{e}");
        assert!(e.contains("a backend of devices among cuda, nccl, nvshmem"), "{e}");
    });
}

#[test]
fn a_library_that_one_rank_does_not_have_is_an_error_on_all() {
    ranks(2).run(test_name!(), |world| {
        if world.rank() == 1 {
            // SAFETY: no other thread of this process reads the environment now.
            unsafe { std::env::set_var("SYMMEM_NVSHMEM", "/nowhere/libnvshmem_host.so.3") };
        }
        let e = plain(&world).with_backend(Some("nvshmem"), &world).map(drop).unwrap_err();
        if world.rank() == 1 {
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains("/nowhere/libnvshmem_host.so.3"), "{e}");
        } else {
            assert!(matches!(e, Error::PeerFailed { rank: 1, .. }), "{e}");
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_library_that_does_not_start_is_an_error_that_says_so() {
    let plan = "nvshmemx_hostlib_init_attr:1";
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_FAIL", plan).run(test_name!(), |world| {
        let e = plain(&world).with_backend(Some("nvshmem"), &world).map(drop).unwrap_err();
        assert!(e.to_string().contains("nvshmemx_hostlib_init_attr failed: status 7"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn a_process_is_initialised_once_and_for_the_same_ranks() {
    ranks(2).run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        gpu.with_backend(Some("nvshmem"), &world).unwrap();
        let alone = world.subgroup(&[world.rank()]).unwrap();
        let e = gpu.with_backend(Some("nvshmem"), &alone).map(drop).unwrap_err().to_string();
        assert!(e.contains("with which this process has initialised NVSHMEM"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn ranks_that_are_threads_cannot_have_it() {
    World::threads(2, |world| {
        let gpu = Gpu::with_driver(Fake::plain(2), world.rank() as u32).unwrap();
        let e = gpu.with_backend(Some("nvshmem"), &world).map(drop).unwrap_err().to_string();
        assert!(e.contains("its ranks are processes, and these are threads of one"), "{e}");
    })
    .unwrap();
}

#[test]
fn ranks_that_take_turns_on_a_device_have_no_collectives_of_the_library() {
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_STATUS", 3).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let x = gpu.alloc::<u32>(&world, 8).unwrap().rendezvous(&world).unwrap();
        let e = x.nvshmem().unwrap().barrier(&stream).unwrap_err();
        assert!(matches!(e, Error::Unavailable { .. }), "{e}");
        assert!(e.to_string().contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "{e}");
        x.barrier(&stream).unwrap(); // by a kernel, it works
        world.barrier().unwrap();
    });
}

#[test]
fn a_machine_without_the_library_is_told_what_was_looked_for() {
    Ranks::new(1).env("SYMMEM_NVSHMEM", "/nowhere/libx.so").run(test_name!(), |world| {
        let e = Gpu::nvshmem_version().unwrap_err().to_string();
        assert!(e.contains("NVSHMEM is not available") && e.contains("/nowhere/libx.so"), "{e}");
        drop(world);
    });
}
