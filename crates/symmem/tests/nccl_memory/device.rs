//! Memory of the real library, on a device.

use symmem::cuda::{Gpu, Stream};
use symmem::nccl::Nccl;
use symmem::{Error, ReduceOp, World};
use symmem_testing::{Ranks, gpu_ranks, test_name};

/// NCCL takes ranks on one device only for ranks of different machines: then it goes over sockets, and windows reach nobody
/// by addresses. Ours do.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_of_the_real_library_is_reduced_alike_by_it_and_by_us() {
    with_the_real_library(test_name!(), &[], on_a_device);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn its_collectives_and_ours_are_captured_and_replayed_with_new_inputs() {
    with_the_real_library(test_name!(), &[], captured);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_pool_of_the_real_librarys_memory_is_used_again() {
    with_the_real_library(test_name!(), &[], pooled);
}

/// Engines copy only between devices with windows; elsewhere NCCL does it as ever, and the result is the same.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn what_it_moves_is_right_where_it_prefers_copy_engines() {
    with_the_real_library(test_name!(), &[("NCCL_CTA_POLICY", "2")], moved);
}

/// Each rank says to NCCL that it is on a host of its own, and the first half of them and the others to this library that they are on
/// two: without fabric handles, memory of NCCL is of use to both, and the driver's to each alone.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_of_the_real_library_is_reduced_between_hosts() {
    joined(test_name!(), &[], on_two_hosts, between_hosts);
}

pub(super) fn with_the_real_library(
    test: &'static str,
    set: &[(&str, &str)],
    body: impl Fn(&World, &Gpu, &Stream),
) {
    joined(test, set, |_| World::from_env().unwrap(), body);
}

/// Joins the world as one of `n` ranks on two hosts.
fn on_two_hosts(n: usize) -> World {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    // SAFETY: nothing else of this process reads the environment now.
    unsafe { std::env::set_var("SYMMEM_HOST", if rank < n.div_ceil(2) { "a" } else { "b" }) };
    World::from_env().unwrap()
}

fn joined(
    test: &'static str,
    set: &[(&str, &str)],
    join: impl Fn(usize) -> World,
    body: impl Fn(&World, &Gpu, &Stream),
) {
    for n in gpu_ranks() {
        let ranks = Ranks::new(n).env("NCCL_SOCKET_IFNAME", "lo");
        let ranks = set.iter().fold(ranks, |ranks, (name, value)| ranks.env(name, value));
        ranks.start(test, || {
            // As many as this job has: the test's loop begins anew in each process.
            let n = std::env::var("WORLD_SIZE").unwrap().parse().unwrap();
            let world = join(n);
            // SAFETY: nothing else of this process reads the environment now.
            unsafe { std::env::set_var("NCCL_HOSTID", format!("host{}", world.rank())) };
            let (nccl, gpu) = match (Nccl::load(), Gpu::open(0)) {
                (Ok(nccl), Ok(gpu)) => (nccl, gpu),
                (Err(e), _) | (_, Err(e)) => {
                    assert!(std::env::var_os("SYMMEM_NCCL").is_none(), "{e}");
                    eprintln!("skipped: {e}");
                    return;
                }
            };
            let gpu = gpu.with_nccl(&nccl).unwrap();
            body(&world, &gpu, &gpu.stream().unwrap());
            world.barrier().unwrap();
        });
    }
}

fn on_a_device(world: &World, gpu: &Gpu, stream: &Stream) {
    let own: Vec<f32> = (0..5000).map(|i| (i % 71 * (world.rank() + 1)) as f32).collect();
    let mut many = Vec::new();
    for round in 0..40 {
        let mut x = gpu.alloc::<f32>(world, own.len()).unwrap().rendezvous(world).unwrap();
        x.write(&own, stream).unwrap();
        let mut theirs = gpu.alloc::<f32>(world, own.len()).unwrap();
        let communicator = x.nccl().unwrap().communicator().clone();
        communicator.all_reduce(x.view(), theirs.view_mut(), ReduceOp::Sum, stream).unwrap();
        communicator.synchronize(stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        assert!(x.read(stream).unwrap() == theirs.read(stream).unwrap(), "round {round}");
        assert!(x.handle().is_within_direct_access());
        let signal = x.nccl().unwrap().put_signal(0, 0, theirs.view(), stream);
        if let Err(Error::Unavailable { why, .. }) = &signal {
            assert!(why.contains("needs NCCL 2.29") || why.contains("does not support"), "{why}");
        }
        many.push(x);
    }
    many.truncate(3);
    let x = gpu.alloc::<f32>(world, 16).unwrap().rendezvous(world).unwrap();
    x.barrier(stream).unwrap();
    x.synchronize(stream).unwrap();
}

fn between_hosts(world: &World, gpu: &Gpu, stream: &Stream) {
    let len = 5000;
    let own: Vec<f32> = (0..len).map(|i| (i % 71 * (world.rank() + 1)) as f32).collect();
    let ranks: usize = (1..=world.size()).sum();
    let expected: Vec<f32> = (0..len).map(|i| (i % 71 * ranks) as f32).collect();
    for _ in 0..3 {
        let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        x.write(&own, stream).unwrap();
        let mut theirs = gpu.alloc::<f32>(world, len).unwrap();
        let communicator = x.nccl().unwrap().communicator().clone();
        communicator.all_reduce(x.view(), theirs.view_mut(), ReduceOp::Sum, stream).unwrap();
        communicator.synchronize(stream).unwrap();
        assert!(theirs.read(stream).unwrap() == expected, "between hosts");
        let reached = x.handle().is_within_direct_access();
        assert!(
            (0..world.size())
                .all(|rank| reached || x.handle().is_reachable(rank) == world.is_local(rank))
        );
        let ours = x.all_reduce(ReduceOp::Sum, stream);
        match ours {
            Ok(()) => assert!(reached && x.read(stream).unwrap() == expected),
            Err(e) => assert!(!reached && e.to_string().contains("Symmetric::nccl"), "{e}"),
        }
        world.barrier().unwrap();
        let driver = gpu.with_backend(Some("cuda"), world).unwrap();
        let driver = driver.alloc::<f32>(world, len).unwrap().rendezvous(world);
        match driver {
            Ok(_) => assert!(reached || world.hosts().len() == 1),
            Err(e) => {
                assert!(matches!(e, Error::Unavailable { .. }) && !reached, "{e}");
                assert!(e.to_string().contains("nccl"), "{e}");
            }
        }
        world.barrier().unwrap();
    }
}

fn captured(world: &World, gpu: &Gpu, stream: &Stream) {
    let len = 5000;
    let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
    let (mut theirs, mut ours) =
        (gpu.alloc::<f32>(world, len).unwrap(), gpu.alloc::<f32>(world, len).unwrap());
    let communicator = x.nccl().unwrap().communicator().clone();
    let mut both = || {
        communicator.all_reduce(x.view(), theirs.view_mut(), ReduceOp::Sum, stream)?;
        x.all_reduce_into(ReduceOp::Sum, ours.view_mut(), stream)
    };
    both().unwrap(); // connections are made outside
    communicator.synchronize(stream).unwrap();
    let graph = stream.capture(both).unwrap();
    for round in 0..4 {
        let own: Vec<f32> =
            (0..len).map(|i| (i % 37 + round * (world.rank() + 1)) as f32).collect();
        x.write(&own, stream).unwrap();
        world.barrier().unwrap();
        // SAFETY: the memory lives, and all ranks launch theirs.
        unsafe { graph.launch(stream) }.unwrap();
        communicator.synchronize(stream).unwrap();
        let sum = |i: usize| -> f32 {
            (1..=world.size()).map(|rank| (i % 37 + round * rank) as f32).sum()
        };
        let expected: Vec<f32> = (0..len).map(sum).collect();
        assert!(theirs.read(stream).unwrap() == expected, "NCCL's, round {round}");
        assert!(ours.read(stream).unwrap() == expected, "ours, round {round}");
        world.barrier().unwrap();
    }
}

fn pooled(world: &World, gpu: &Gpu, stream: &Stream) {
    let pool = gpu.pool(world, 2 << 20);
    let mut address = None;
    for round in 0..3 {
        let buffer = pool.alloc::<f32>(1024).unwrap();
        assert_eq!(*address.get_or_insert(buffer.address()), buffer.address());
        let mut x = buffer.rendezvous(world).unwrap();
        x.write(&[(world.rank() + round) as f32; 1024], stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        let sum: usize = (0..world.size()).map(|rank| rank + round).sum();
        assert_eq!(x.read(stream).unwrap(), [sum as f32; 1024]);
        x.barrier(stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
        drop(x);
        world.barrier().unwrap();
    }
}

fn moved(world: &World, gpu: &Gpu, stream: &Stream) {
    let (n, own, len) = (world.size(), world.rank(), 1 << 16);
    let make = |len: usize| gpu.alloc::<u32>(world, len).unwrap().rendezvous(world).unwrap();
    let (mut from, mut all, mut parts) = (make(len * n), make(len * n), make(len * n));
    let sent: Vec<u32> = (0..len * n).map(|i| (1000 * own + i / len) as u32).collect();
    from.write(&sent, stream).unwrap();
    let communicator = from.nccl().unwrap().communicator().clone();
    communicator.all_to_all(from.view(), parts.view_mut(), stream).unwrap();
    let mut part = make(len);
    part.write(&vec![own as u32 + 7; len], stream).unwrap();
    communicator.all_gather(part.view(), all.view_mut(), stream).unwrap();
    communicator.synchronize(stream).unwrap();
    let got: Vec<u32> = (0..len * n).map(|i| (1000 * (i / len) + own) as u32).collect();
    assert!(parts.read(stream).unwrap() == got, "all-to-all");
    let got: Vec<u32> = (0..len * n).map(|i| (i / len) as u32 + 7).collect();
    assert!(all.read(stream).unwrap() == got, "all-gather");
}
