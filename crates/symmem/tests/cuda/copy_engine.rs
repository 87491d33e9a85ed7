//! Collectives whose bytes the copy engines move; and what is said where there is no multicast.

use half::{bf16, f16};
use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream};
use symmem::{Error, F8E4M3, ReduceOp, World};
use symmem_testing::test_name;

use crate::{Sample, each, hasty, input, same};

const WAY: Algorithm = Algorithm::CopyEngine;
const BLOCKS: [usize; 4] = [1, 33, 5000, 300_001];

fn gathers<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream) {
    let n = world.size();
    for block in BLOCKS {
        let mut x = gpu.alloc::<T>(world, block).unwrap().rendezvous(world).unwrap();
        let mut y = gpu.alloc::<T>(world, n * block).unwrap().rendezvous(world).unwrap();
        let (mut from, mut out) =
            (gpu.alloc::<T>(world, block).unwrap(), gpu.alloc::<T>(world, n * block).unwrap());
        // Again with other data: what is left of the first turn must not pass for the second's.
        for turn in 0..2 {
            let data = |rank: usize| input::<T>(rank + 100 * turn, block);
            let expected: Vec<T> = (0..n).flat_map(data).collect();
            let what = |way: &str| format!("{} of {block} by {way}, {n} ranks", T::DTYPE);
            x.write(&data(world.rank()), stream).unwrap();
            x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
            same(&out.read(stream).unwrap(), &expected, &what("copies from all"));
            from.write(&data(world.rank()), stream).unwrap();
            for way in [WAY, Algorithm::Auto] {
                y.write(&input::<T>(7777, n * block), stream).unwrap();
                y.all_gather_from(from.view(), way, stream).unwrap();
                same(&y.read(stream).unwrap(), &expected, &what("copies to all"));
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn copied_gathers_have_the_bytes_of_all() {
    each(test_name!(), |world, gpu, stream| {
        gathers::<u8>(world, gpu, stream);
        gathers::<f32>(world, gpu, stream);
    });
}

fn scattered<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream) {
    let n = world.size();
    for block in [1, 33, 5000, 70_001] {
        let mut x = gpu.alloc::<T>(world, n * block).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<T>(world, block).unwrap();
        for (turn, op) in ReduceOp::ALL.into_iter().enumerate() {
            let data = input::<T>(world.rank() + 100 * turn, n * block);
            let mut expected = data[..block].to_vec();
            if world.reduce_scatter(&data, op, &mut expected).is_err() {
                assert!(x.reduce_scatter_with(op, out.view_mut(), WAY, stream).is_err());
                continue;
            }
            x.write(&data, stream).unwrap();
            x.reduce_scatter_with(op, out.view_mut(), WAY, stream).unwrap();
            let what = format!("{} {op} of {block}, {n} ranks", T::DTYPE);
            same(&out.read(stream).unwrap(), &expected, &what);
            same(&x.read(stream).unwrap(), &data, "the input");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn copied_reductions_have_the_bits_of_host_memory() {
    each(test_name!(), |world, gpu, stream| {
        scattered::<f32>(world, gpu, stream);
        scattered::<bf16>(world, gpu, stream);
        scattered::<f16>(world, gpu, stream);
        scattered::<F8E4M3>(world, gpu, stream);
        scattered::<i32>(world, gpu, stream);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn copies_are_replayed_in_a_graph() {
    each(test_name!(), |world, gpu, stream| {
        let (n, len) = (world.size(), 3000 * world.size());
        let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        let (mut all, mut own) =
            (gpu.alloc::<f32>(world, n * len).unwrap(), gpu.alloc::<f32>(world, 3000).unwrap());
        let mut both = || {
            x.all_gather_with(all.view_mut(), WAY, stream)?;
            x.reduce_scatter_with(ReduceOp::Sum, own.view_mut(), WAY, stream)
        };
        both().unwrap(); // loads the kernels and allocates, which a capture cannot
        stream.synchronize().unwrap();
        let graph = stream.capture(both).unwrap();
        for turn in 0..4 {
            let data = |rank| input::<f32>(rank + 100 * turn, len);
            x.write(&data(world.rank()), stream).unwrap();
            world.barrier().unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            let gathered: Vec<f32> = (0..n).flat_map(data).collect();
            same(&all.read(stream).unwrap(), &gathered, "all_gather in a graph");
            let mut expected = vec![0.0; 3000];
            world.reduce_scatter(&data(world.rank()), ReduceOp::Sum, &mut expected).unwrap();
            same(&own.read(stream).unwrap(), &expected, "reduce_scatter in a graph");
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_rank_that_does_not_come_ends_a_copied_gather_as_well() {
    each(test_name!(), |world, gpu, stream| {
        let (group, n) = (hasty(world), world.size());
        let mut x = gpu.alloc::<f32>(world, 5000).unwrap().rendezvous(&group).unwrap();
        let mut out = gpu.alloc::<f32>(world, n * 5000).unwrap();
        x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
        let mut failing = || {
            x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
            let e = x.synchronize(stream).unwrap_err();
            let known = matches!(e, Error::Timeout { .. } | Error::PeerFailed { .. });
            assert!(known && e.to_string().contains("all_gather"), "{e}");
        };
        if world.rank() != 0 {
            failing();
        }
        world.barrier().unwrap();
        if world.rank() == 0 && n > 1 {
            failing();
        }
        group.resync().unwrap();
        x.write(&[world.rank() as f32; 5000], stream).unwrap();
        x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
        let got = out.read(stream).unwrap();
        x.synchronize(stream).unwrap();
        let blocks = got.chunks(5000).enumerate();
        assert!(blocks.into_iter().all(|(rank, block)| block == [rank as f32; 5000]));
    });
}

/// Ranks that share a device have none, whatever the device can.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn without_multicast_the_switch_is_refused_and_the_next_call_works() {
    each(test_name!(), |world, gpu, stream| {
        let n = world.size() as f32;
        let mut x = gpu.alloc::<f32>(world, 5000).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 5000).unwrap();
        assert_eq!(x.handle().multicast_ptr(), None);
        x.write(&[1.0; 5000], stream).unwrap();
        let refusals = [
            x.all_reduce_with(ReduceOp::Sum, Algorithm::Multimem, stream),
            x.all_reduce_into_with(ReduceOp::Sum, out.view_mut(), Algorithm::Multimem, stream),
            x.copy_to_multicast(out.view(), 0, stream),
        ];
        for refused in refusals {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains(&format!("on rank {}", world.rank())), "{e}");
        }
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), [n; 5000]);
    });
}
