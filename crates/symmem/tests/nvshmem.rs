//! NVSHMEM's heap and operations on a real device, with the real library. `cargo xtask gpu` runs these where there is one.
//!
//! Ranks are processes that share the device. NVSHMEM's own kernels wait for each other, so they want MPS, and each rank
//! its share of the device. Without library or device the tests say so and pass, unless `SYMMEM_NVSHMEM` is set.
#![allow(clippy::unwrap_used, reason = "tests")]

use half::bf16;
use symmem::cuda::{Gpu, SignalOp, Stream, Symmetric};
use symmem::{Error, Number, ReduceOp, World};
use symmem_testing::{Ranks, gpu_ranks, test_name};

/// Why there is nothing to test here.
fn missing() -> Option<String> {
    let library = Gpu::nvshmem_version().err().map(|e| e.to_string());
    library.or_else(|| Gpu::open(0).err().map(|e| e.to_string()))
}

/// Runs `body` in worlds of each size, as processes, with memory of NVSHMEM's heap.
fn each(test: &'static str, body: impl Fn(&World, &Gpu, &Stream)) {
    for n in gpu_ranks() {
        // In a rank of its own: the device is not for a process that starts others.
        let ranks = Ranks::new(n)
            .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100 / n)
            .env("NVSHMEM_SYMMETRIC_SIZE", 256 << 20)
            .env("NVSHMEM_REMOTE_TRANSPORT", "none");
        ranks.run(test, |world| {
            if let Some(why) = missing() {
                // A user who says where the library is wants it tested.
                assert!(std::env::var_os("SYMMEM_NVSHMEM").is_none(), "{why}");
                eprintln!("skipped: {why}");
                return;
            }
            let gpu = Gpu::open(0).unwrap().with_backend(Some("nvshmem"), &world).unwrap();
            let stream = gpu.stream().unwrap();
            body(&world, &gpu, &stream);
            world.barrier().unwrap();
        });
    }
}

/// Likewise, for checks that want a number of ranks.
fn each_of(test: &'static str, _: usize, body: impl Fn(&World, &Gpu, &Stream)) {
    each(test, body);
}

/// What memory of every backend must do.
mod every_backend {
    symmem_testing::every_backend!(device: super::each_of, #[ignore = "needs a CUDA device: cargo xtask gpu"]);
}

fn memory<T: Number>(world: &World, gpu: &Gpu, stream: &Stream, data: &[T]) -> Symmetric<T> {
    let mut x = gpu.alloc::<T>(world, data.len()).unwrap().rendezvous(world).unwrap();
    x.write(data, stream).unwrap();
    x.barrier(stream).unwrap();
    x.synchronize(stream).unwrap();
    x
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn rows_go_where_their_splits_say_on_the_heap() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let mut splits = memory(world, gpu, stream, &vec![2_i64; n]);
        let mut rows = memory(world, gpu, stream, &vec![own as u32; 2 * n * 8]);
        let mut out = gpu.alloc::<u32>(world, 2 * n * 8).unwrap();
        let mut received = gpu.alloc::<i64>(world, 2 * n).unwrap();
        rows.all_to_all_v(8, &mut splits, out.view_mut(), received.view_mut(), stream).unwrap();
        let expected: Vec<u32> = (0..2 * n * 8).map(|i| (i / 16) as u32).collect();
        assert_eq!(out.read(stream).unwrap(), expected);
        rows.synchronize(stream).unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn the_librarys_own_operations_arrive() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let x = memory(world, gpu, stream, &[own as u32 + 10; 64]);
        let y = memory(world, gpu, stream, &[0_u32; 64]);
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let ops = y.nvshmem().unwrap();
        ops.put_with_signal(next, 0, x.view(), 2, (SignalOp::Set, 5), stream).unwrap();
        ops.wait_for_signal(2, 5, stream).unwrap();
        assert_eq!(y.read(stream).unwrap(), [last as u32 + 10; 64]);
        ops.quiet(stream).unwrap();
        if let Err(e @ Error::Unavailable { .. }) = ops.barrier(stream) {
            eprintln!("skipped: {e}");
            return;
        }
        x.nvshmem()
            .unwrap()
            .get(next, 0, gpu.alloc(world, 64).unwrap().view_mut(), stream)
            .unwrap();
        stream.synchronize().unwrap();
        ops.broadcast(n - 1, stream).unwrap();
        assert_eq!(y.read(stream).unwrap(), [(n + 8) as u32 + u32::from(n == 1); 64]);

        let blocks: Vec<u32> = (0..16 * n).map(|i| (100 * own + i / 16) as u32).collect();
        let from = memory(world, gpu, stream, &blocks);
        let mut to = memory(world, gpu, stream, &vec![0_u32; 16 * n]);
        from.nvshmem().unwrap().all_to_all(&mut to, stream).unwrap();
        let sent: Vec<u32> = (0..16 * n).map(|i| (100 * (i / 16) + own) as u32).collect();
        assert_eq!(to.read(stream).unwrap(), sent);
        let mut all = memory(world, gpu, stream, &vec![0_u32; 16 * n * n]);
        from.nvshmem().unwrap().all_gather(&mut all, stream).unwrap();
        assert_eq!(all.read(stream).unwrap()[16 * n * (n - 1)], 100 * (n as u32 - 1));

        let halves = memory(world, gpu, stream, &[bf16::from_f32(0.5 + own as f32); 128]);
        let mut sums = memory(world, gpu, stream, &[bf16::ZERO; 128]);
        halves.nvshmem().unwrap().all_reduce(ReduceOp::Sum, &mut sums, stream).unwrap();
        let sum = (0..n).map(|rank| 0.5 + rank as f32).sum::<f32>();
        assert_eq!(sums.read(stream).unwrap(), [bf16::from_f32(sum); 128]);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn teams_of_every_other_rank_work_at_once() {
    each(test_name!(), |world, gpu, stream| {
        if world.size() < 4 {
            return;
        }
        let half = world.rank() % 2;
        let group = world.subgroup(&[half, half + 2]).unwrap();
        let mut x = gpu.alloc::<u32>(world, 64).unwrap().rendezvous(&group).unwrap();
        x.write(&[world.rank() as u32; 64], stream).unwrap();
        match x.nvshmem().unwrap().broadcast(1, stream) {
            Err(e @ Error::Unavailable { .. }) => eprintln!("skipped: {e}"),
            done => {
                done.unwrap();
                assert_eq!(x.read(stream).unwrap(), [half as u32 + 2; 64]);
            }
        }
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        x.synchronize(stream).unwrap();
        // Rows to experts and back, in both halves at once.
        let (rows, experts, len) = (3_i64, 2, 4);
        let count = (rows as usize) * 2 * experts;
        let sent: Vec<u32> = (0..count * len).map(|i| (1000 * world.rank() + i) as u32).collect();
        let make = |len: usize| gpu.alloc::<u32>(world, len).unwrap().rendezvous(&group).unwrap();
        let mut splits = gpu.alloc::<i64>(world, 2 * experts).unwrap().rendezvous(&group).unwrap();
        splits.write(&vec![rows; 2 * experts], stream).unwrap();
        let (mut from, mut there) = (make(sent.len()), make(sent.len() + 8 * 2 * len));
        let mut received =
            gpu.alloc::<i64>(world, 4 * experts).unwrap().rendezvous(&group).unwrap();
        from.write(&sent, stream).unwrap();
        let (out, told) = (there.view_mut(), received.view_mut());
        from.all_to_all_v_2d(len, &mut splits, 8, out, told, stream).unwrap();
        let mut back = gpu.alloc::<u32>(world, sent.len()).unwrap();
        let mut counts = gpu.alloc::<i64>(world, 4 * experts).unwrap();
        let (out, told) = (back.view_mut(), counts.view_mut());
        there.all_to_all_v_2d_offset(len, &mut received, out, told, stream).unwrap();
        there.synchronize(stream).unwrap();
        assert_eq!(back.read(stream).unwrap(), sent);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn there_is_a_multicast_address_iff_the_library_has_one() {
    each(test_name!(), |world, gpu, _| {
        let x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
        // Ranks that share a device have none.
        assert_eq!(x.handle().multicast_ptr(), None);
    });
}
