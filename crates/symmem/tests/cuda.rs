//! Memory, signals and collectives on a real device, whose bits are compared with those of host memory.
//!
//! `cargo xtask gpu` runs these where there is one. Ranks are processes that share the device: they want MPS, without
//! which they take turns of milliseconds. But one that dies in a kernel takes all clients of MPS with it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use half::{bf16, f16};
use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream};
use symmem::{Bool, Complex, Error, F8E4M3, F8E5M2, Group, Number, ReduceOp, World};
use symmem_testing::{Ranks, die, gpu_ranks, test_name};

mod cuda {
    mod copy_engine;
    mod dying;
    mod every_backend;
    mod large;
    mod litmus;
    mod memory;
    mod occupancy;
    mod rows;
    mod signals;
    mod tiles;
    mod values;
}

/// Runs `body` in groups of each size, as processes.
fn each(test: &'static str, body: impl Fn(&World, &Gpu, &Stream)) {
    for n in gpu_ranks() {
        Ranks::new(n).run(test, |world| {
            let gpu = Gpu::open(0).unwrap();
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

/// All ranks, with little patience.
fn hasty(world: &World) -> Group {
    let all: Vec<usize> = (0..world.size()).collect();
    let timeout = Duration::from_millis(1500);
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    group.ready().unwrap();
    group
}

trait Sample: Number {
    fn sample(seed: usize) -> Self;
}

macro_rules! samples {
    ($($type:ty => |$x:ident| $make:expr),* $(,)?) => {$(
        impl Sample for $type {
            fn sample(seed: usize) -> Self {
                let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                state ^= state >> 29;
                state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let $x = state ^ state >> 32;
                $make
            }
        }
    )*};
}

/// Numbers of all sizes, and now and then one that is none.
fn float(x: u64) -> f32 {
    match x % 61 {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => -0.0,
        _ => f32::from_bits((x as u32 & 0x83ff_ffff) | 0x3c00_0000),
    }
}

samples!(
    f64 => |x| f64::from(float(x)) * 1.000_000_1,
    f32 => |x| float(x),
    f16 => |x| f16::from_f32(float(x)),
    bf16 => |x| bf16::from_f32(float(x)),
    i64 => |x| x as i64, i32 => |x| x as i32, i16 => |x| x as i16, i8 => |x| x as i8,
    F8E4M3 => |x| F8E4M3(x as u8), F8E5M2 => |x| F8E5M2(x as u8), Bool => |x| Bool::from(x.is_multiple_of(3)),
    u64 => |x| x, u32 => |x| x as u32, u16 => |x| x as u16, u8 => |x| x as u8,
);

impl<T> Sample for Complex<T>
where
    T: Sample,
    Self: Number,
{
    fn sample(seed: usize) -> Self {
        Self::new(T::sample(seed), T::sample(seed + 1_000_003))
    }
}

fn input<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::sample(i * 131 + rank * 7919)).collect()
}

fn same<T: Sample>(got: &[T], expected: &[T], what: &str) {
    let (a, b): (&[u8], &[u8]) = (bytemuck::cast_slice(got), bytemuck::cast_slice(expected));
    let at = a.iter().zip(b).position(|(a, b)| a != b);
    assert!(a == b, "{what}: differs at byte {at:?} of {}", a.len());
}

fn reductions<T: Sample>(world: &World, gpu: &Gpu, stream: &Stream, lengths: &[usize]) {
    let (n, own) = (world.size(), world.rank());
    for &len in lengths {
        let mut x = gpu.alloc::<T>(world, len).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<T>(world, len).unwrap();
        for op in ReduceOp::ALL {
            let data = input::<T>(own, len);
            let mut expected = data.clone();
            if world.all_reduce(&mut expected, op).is_err() {
                assert!(x.all_reduce(op, stream).is_err());
                continue;
            }
            let all = [Algorithm::Auto, Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Staged];
            // Elements of 16 bytes do not fit next to a flag.
            for algorithm in all.into_iter().take(if size_of::<T>() > 8 { 3 } else { 4 }) {
                x.write(&data, stream).unwrap();
                x.all_reduce_with(op, algorithm, stream).unwrap();
                let what = format!("{} {op} of {len} by {algorithm:?}, {n} ranks", T::DTYPE);
                same(&x.read(stream).unwrap(), &expected, &what);
            }
            x.write(&data, stream).unwrap();
            x.all_reduce_into(op, out.view_mut(), stream).unwrap();
            same(&out.read(stream).unwrap(), &expected, &format!("{} into", T::DTYPE));
            same(&x.read(stream).unwrap(), &data, "the input of an all-reduce into");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn reductions_have_the_bits_of_host_memory() {
    each(test_name!(), |world, gpu, stream| {
        let lengths = [1, 5, 64, 1000, 4096, 70_001];
        reductions::<f32>(world, gpu, stream, &lengths);
        reductions::<bf16>(world, gpu, stream, &lengths);
        let few = [3, 4097, 20_000];
        reductions::<f16>(world, gpu, stream, &few);
        reductions::<f64>(world, gpu, stream, &few);
        reductions::<F8E4M3>(world, gpu, stream, &few);
        reductions::<F8E5M2>(world, gpu, stream, &few);
        reductions::<i8>(world, gpu, stream, &few);
        reductions::<u16>(world, gpu, stream, &few);
        reductions::<i32>(world, gpu, stream, &few);
        reductions::<u64>(world, gpu, stream, &few);
        reductions::<Bool>(world, gpu, stream, &few);
        reductions::<Complex<f32>>(world, gpu, stream, &few);
        reductions::<Complex<f64>>(world, gpu, stream, &few);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_rank_that_does_not_come_is_a_timeout_and_the_context_lives_on() {
    each(test_name!(), |world, gpu, stream| {
        let (group, n) = (hasty(world), world.size());
        let mut x = gpu.alloc::<f32>(world, 5000).unwrap().rendezvous(&group).unwrap();
        for algorithm in [Algorithm::TwoShot, Algorithm::Staged] {
            // Everything that is loaded when it is first used is there afterwards, and what comes often is replayed.
            x.write(&[1.0; 5000], stream).unwrap();
            for _ in 0..10 {
                x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
            }
            x.synchronize(stream).unwrap();
            world.barrier().unwrap();
            if world.rank() != 0 {
                let start = Instant::now();
                x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
                let e = x.synchronize(stream).unwrap_err();
                let timeout = matches!(&e, Error::Timeout { op: "all_reduce", waiting_for, .. } if *waiting_for == [0]);
                assert!(timeout || matches!(&e, Error::PeerFailed { op: "all_reduce", .. }), "{e}");
                assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
            }
            world.barrier().unwrap();
            if world.rank() == 0 && n > 1 {
                x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
                let e = x.synchronize(stream).unwrap_err();
                assert!(matches!(e, Error::PeerFailed { op: "all_reduce", .. }), "{e}");
            }
            group.resync().unwrap();
            if n > 1 {
                let left = x.read(stream).unwrap();
                assert!(left.iter().all(|x| x.is_nan()), "what failed leaves no numbers");
            }
            x.write(&[1.0; 5000], stream).unwrap();
            world.barrier().unwrap();
            x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
            assert_eq!(x.read(stream).unwrap(), [n as f32; 5000], "after the failure");
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_graph_is_replayed_and_gives_the_same_each_time() {
    each(test_name!(), |world, gpu, stream| {
        let n = world.size() as f32;
        let mut x = gpu.alloc::<f32>(world, 3000).unwrap().rendezvous(world).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        x.synchronize(stream).unwrap();
        let graph = stream.capture(|| (0..3).try_for_each(|_| x.all_reduce(ReduceOp::Sum, stream)));
        let graph = graph.unwrap();
        for _ in 0..5 {
            x.write(&[1.0; 3000], stream).unwrap();
            world.barrier().unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            assert_eq!(x.read(stream).unwrap(), [n * n * n; 3000]);
        }
        // Alongside the graph, in another stream, in the order of the calls.
        let other = gpu.stream().unwrap();
        x.write(&[1.0; 3000], stream).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        x.all_reduce(ReduceOp::Sum, &other).unwrap();
        assert_eq!(x.read(&other).unwrap(), [n * n; 3000]);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn small_calls_that_come_often_stay_right() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let other = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(world, 40 * n).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<f32>(world, 40).unwrap();
        for turn in 0..40 {
            // Now one stream, now the other, and something large in between.
            let stream = if turn % 3 == 0 { &other } else { stream };
            let data = input::<f32>(own + turn, 40 * n);
            let (mut sum, mut block) = (data.clone(), vec![0.0; 40]);
            world.reduce_scatter(&data, ReduceOp::Sum, &mut block).unwrap();
            world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            x.write(&data, stream).unwrap();
            x.reduce_scatter(ReduceOp::Sum, out.view_mut(), stream).unwrap();
            x.barrier(stream).unwrap();
            if turn % 5 == 0 {
                x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            } else {
                x.all_reduce(ReduceOp::Sum, stream).unwrap();
            }
            same(&out.read(stream).unwrap(), &block, "reduce_scatter");
            same(&x.read(stream).unwrap(), &sum, "all_reduce");
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_rank_that_dies_is_named_and_the_others_go_on() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let gpu = Gpu::open(0).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(&world, 5000).unwrap().rendezvous(&world).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        x.synchronize(&stream).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            die(); // its device is idle: in a kernel it would take all clients of MPS with it
        }
        x.all_reduce(ReduceOp::Sum, &stream).unwrap(); // waits for rank 1 on the device
        let e = x.synchronize(&stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        let e = x.all_reduce(ReduceOp::Sum, &stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        drop(x);
        let survivors = world.shrink().unwrap();
        let mut x = gpu.alloc::<f32>(&survivors, 5000).unwrap().rendezvous(&survivors).unwrap();
        x.write(&[1.0; 5000], &stream).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [2.0; 5000], "the context lives on");
    });
}

#[test]
fn without_a_device_the_error_says_so() {
    if let Err(e) = Gpu::open(0) {
        let text = e.to_string();
        assert!(matches!(e, Error::Unavailable { .. } | Error::Driver { .. }), "{text}");
        assert!(text.contains("CUDA"), "{text}");
    }
}
