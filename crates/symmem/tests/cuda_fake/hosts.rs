//! Ranks on several hosts: memory goes between them by fabric handles, or not at all.

use std::sync::Arc;

use symmem::cuda::{Algorithm, Gpu, Stream};
use symmem::{DType, Error, ReduceOp, World};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fabric, Fake};
use symmem_testing::{Ranks, die, kernels, test_name};

use super::load;
use super::memory::check_peers_memory;
use super::multicast::{able, has_multicast, logged};

const LEN: usize = 100;

/// Runs `n` ranks as processes: the first half of them on one host, the others on another. Each has a driver of its own that
/// sees all devices, of which ranks next to each other share one if there are fewer; nothing may be left there.
fn two_hosts(
    test: &'static str,
    n: usize,
    devices: &[Config],
    body: impl Fn(&World, &Arc<Fake>, &Gpu, &Stream),
) {
    Ranks::new(n).start(test, || {
        let world = join(n);
        let driver = Fake::new(devices.to_vec());
        kernels::install(&driver);
        let gpu =
            Gpu::with_driver(driver.clone(), (world.rank() * devices.len() / n) as u32).unwrap();
        let stream = gpu.stream().unwrap();
        body(&world, &driver, &gpu, &stream);
        world.barrier().unwrap();
        drop((stream, gpu, world));
        assert_eq!(driver.live(), [""; 0]);
    });
}

/// Joins the world as one of `n` ranks.
fn join(n: usize) -> World {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    // SAFETY: this process has no other thread that reads the environment.
    unsafe { std::env::set_var("SYMMEM_HOST", if rank < n.div_ceil(2) { "a" } else { "b" }) };
    let world = World::from_env().unwrap();
    assert_eq!(world.hosts().len(), 2);
    world
}

fn with(fabric: Fabric) -> Config {
    Config { fabric, ..Config::default() }
}

/// The error for memory that stays within its host.
fn check_stays<T>(result: Result<T, Error>, why: &str) {
    let e = result.err().unwrap();
    let text = e.to_string();
    assert!(matches!(e, Error::Unavailable { .. }), "{text}");
    assert!(text.contains(why), "{text}");
    assert!(text.contains("nccl") && text.contains("nvshmem"), "no way out: {text}");
    assert!(!text.contains("get and put reach it"), "that is host memory: {text}");
}

#[test]
fn fabric_handles_reach_other_hosts() {
    two_hosts(test_name!(), 4, &vec![with(Fabric::Yes); 4], |world, driver, gpu, stream| {
        let (_, log) = logged(|| check_peers_memory(world, gpu));
        assert_eq!(log, "");
        let imports = driver.calls("cuMemImportFromShareableHandle");
        assert_eq!((driver.calls("import_fabric"), imports), (6, 6), "also on the own host");
        let mut x = gpu.alloc::<u64>(world, LEN).unwrap().rendezvous(world).unwrap();
        assert!(x.handle().is_within_direct_access());
        x.write(&[1 << world.rank(); LEN], stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), [15; LEN]);
        let far = (world.rank() + 2) % 4;
        x.put_signal(far, 1, stream).unwrap();
        x.wait_signal(far, 1, stream).unwrap();
        x.barrier_on_channel(0, stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
    });
}

/// Devices of one host manage with descriptors; a group that spans hosts needs more.
#[test]
fn without_fabric_handles_memory_stays_within_its_host_and_every_rank_is_told() {
    two_hosts(test_name!(), 4, &vec![with(Fabric::No); 4], |world, driver, gpu, stream| {
        for _ in 0..3 {
            let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
            check_stays(buffer.rendezvous(world), "the device of rank 0 has none");
        }
        // Each host for itself, and host memory of all.
        let here = world.host_group().unwrap();
        let mut x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(&here).unwrap();
        x.write(&[2; LEN], stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), [4; LEN]);
        assert_eq!(driver.calls("import_fabric"), 0);
        let mut sum = [1];
        world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [4]);
        here.barrier().unwrap();
    });
}

#[test]
fn one_device_without_fabric_handles_is_named_to_every_rank() {
    one_cannot(test_name!(), Fabric::No);
}

#[test]
fn one_device_that_may_not_have_fabric_handles_is_named_to_every_rank() {
    one_cannot(test_name!(), Fabric::NotPermitted);
}

fn one_cannot(test: &'static str, cannot: Fabric) {
    let devices = [with(Fabric::Yes), with(Fabric::Yes), with(cannot)];
    two_hosts(test, 3, &devices, |world, driver, gpu, _| {
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        let (failed, log) = logged(|| buffer.symmetric(world).map(drop));
        check_stays(failed, "the device of rank 2 has none");
        assert!(log.contains("which do not reach other hosts: the device of rank 2"), "{log}");
        let (failed, log) = logged(|| buffer.symmetric(world).map(drop));
        check_stays(failed, "the device of rank 2 has none");
        assert_eq!(log, "", "told once");
        assert_eq!(driver.calls("import_fabric"), 0);
    });
}

/// As for devices that are not of one NVLink fabric.
#[test]
fn a_handle_that_leads_nowhere_is_told_to_every_rank() {
    two_hosts(test_name!(), 2, &vec![with(Fabric::Yes); 2], |world, driver, gpu, _| {
        if world.rank() == 1 {
            driver.fail("import_fabric", 1, code::NOT_PERMITTED);
        }
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        check_stays(buffer.symmetric(world), "import_fabric failed");
        check_stays(buffer.symmetric(world), "import_fabric failed");
        world.barrier().unwrap();
    });
}

#[test]
fn memory_by_its_address_goes_by_fabric_handles_too() {
    two_hosts(test_name!(), 2, &vec![with(Fabric::Yes); 2], |world, _, gpu, stream| {
        let mut buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        buffer.write(&[world.rank() as u32 + 3; LEN], stream).unwrap();
        world.barrier().unwrap();
        let handle = world.rendezvous_at(buffer.address() as usize, DType::U32).unwrap().unwrap();
        assert!(handle.is_within_direct_access());
        let there = handle.buffer_ptrs();
        assert_eq!([0, 1].map(|rank| load(there[rank] as u64)), [3, 4]);
        world.barrier().unwrap();
    });
}

#[test]
fn memory_by_its_address_stays_where_one_rank_has_no_fabric_handle() {
    let devices = [with(Fabric::Yes), with(Fabric::No)];
    two_hosts(test_name!(), 2, &devices, |world, _, gpu, _| {
        let buffer = gpu.alloc::<u32>(world, LEN).unwrap();
        let address = buffer.address() as usize;
        check_stays(world.rendezvous_at(address, DType::U32), "CUDA_ERROR_INVALID_VALUE");
    });
}

#[test]
fn terms_that_differ_are_a_mismatch_where_nothing_could_go_either() {
    two_hosts(test_name!(), 2, &vec![with(Fabric::No); 2], |world, _, gpu, _| {
        let other = gpu.alloc_with_pad::<u32>(world, LEN, 4096 << world.rank()).unwrap();
        let e = other.symmetric(world).map(drop).unwrap_err();
        assert!(matches!(e, Error::Mismatch { what: "signal pad size", .. }), "{e}");
    });
}

#[test]
fn a_multicast_object_goes_to_other_hosts_by_a_fabric_handle() {
    let device = Config { fabric: Fabric::Yes, ..able() };
    two_hosts(test_name!(), 2, &vec![device; 2], |world, driver, gpu, _| {
        assert!(has_multicast(world, gpu));
        let imports = driver.calls("cuMemImportFromShareableHandle");
        assert_eq!((driver.calls("import_fabric"), imports), (3, 3));
    });
}

/// A kernel of this rank waits; its host hears of the loss and says so in the mailbox.
#[test]
fn a_rank_of_another_host_that_dies_ends_what_waits_for_it() {
    let ranks = Ranks::new(3).dying(&[2]).may_leave_files();
    ranks.start(test_name!(), || {
        let world = join(3);
        let driver = Fake::new(vec![with(Fabric::Yes); 3]);
        kernels::install(&driver);
        let gpu = Gpu::with_driver(driver, world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        x.barrier(&stream).unwrap();
        x.synchronize(&stream).unwrap();
        world.barrier().unwrap();
        if world.rank() == 2 {
            die();
        }
        let _ = x.wait_signal(2, 0, &stream);
        let e = loop {
            if let Err(e) = x.synchronize(&stream) {
                break e;
            }
        };
        assert!(matches!(e, Error::PeerLost { rank: 2, .. }), "{e}");
        let group = world.shrink().unwrap();
        let mut y = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&group).unwrap();
        y.write(&[1; LEN], &stream).unwrap();
        y.all_reduce(ReduceOp::Sum, &stream).unwrap();
        assert_eq!(y.read(&stream).unwrap(), [2; LEN]);
        group.barrier().unwrap();
    });
}

#[test]
fn a_wait_for_another_host_that_gave_up_is_put_right_by_a_resync() {
    two_hosts(test_name!(), 2, &vec![with(Fabric::Yes); 2], |world, _, gpu, stream| {
        let x = gpu.alloc::<u32>(world, LEN).unwrap().rendezvous(world).unwrap();
        if world.rank() == 0 {
            let limit = std::time::Duration::from_millis(20);
            let _ = x.wait_signal_within(1, 0, limit, stream);
            let e = x.synchronize(stream).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
        }
        world.resync().unwrap();
        x.barrier(stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
    });
}

/// Kernels that wait for each other must fit on each device together with those of its other ranks.
#[test]
fn ranks_of_each_host_that_are_not_in_the_group_count_on_its_devices() {
    two_hosts(test_name!(), 4, &vec![with(Fabric::Yes); 2], |world, driver, gpu, stream| {
        if world.rank() == 3 {
            return;
        }
        let group = world.subgroup(&[0, 1, 2]).unwrap();
        let mut x = gpu.alloc::<f32>(&group, 1 << 20).unwrap().rendezvous(&group).unwrap();
        x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
        x.synchronize(stream).unwrap();
        assert_eq!(driver.launches()[0].grid, [8 * 4 / 3, 1, 1]);
        group.barrier().unwrap();
    });
}

mod conformance {
    use super::{Config, Fabric, Gpu, Stream, World};

    fn over_the_fabric(test: &'static str, n: usize, body: impl Fn(&World, &Gpu, &Stream)) {
        let device = Config { fabric: Fabric::Yes, ..Config::default() };
        super::two_hosts(test, n, &vec![device; n], |world, _, gpu, stream| {
            world.set_timeout(std::time::Duration::from_secs(30));
            body(world, gpu, stream);
        });
    }

    symmem_testing::every_backend!(device: over_the_fabric);
}
