//! Bits of the collectives: every way to the same result gives the same bits on every rank, near the exact result,
//! for any number of ranks, any length and any alignment. And what is left when one on slices, or one-sided access, fails.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

mod collectives {
    mod alignment;
}

use std::time::Duration;

use half::{bf16, f16};
use proptest::prelude::*;
use symmem::{Algorithm, Error, Number, ReduceOp, Symmetric, World};
use symmem_testing::conformance::every_backend::{OnHost, puts_and_gets_reach_every_rank};
use symmem_testing::{Random, Ranks, assert_nothing_is_held, conformance, die, test_name};

/// A float that can be compared with the exact result.
trait Float: Number + Default {
    /// The largest relative error of one rounding.
    const ROUNDING: f64;
    fn new(value: f64) -> Self;
    fn value(self) -> f64;
    fn bits(self) -> u64;
}

macro_rules! floats {
    ($($type:ty, $digits:expr, $new:expr, $value:expr;)*) => {$(
        impl Float for $type {
            const ROUNDING: f64 = 1.0 / (1_u64 << $digits) as f64;
            fn new(value: f64) -> Self { $new(value) }
            fn value(self) -> f64 { $value(self) }
            fn bits(self) -> u64 { self.to_bits().into() }
        }
    )*};
}

floats! {
    f64, 53, |v: f64| v, |v: f64| v;
    f32, 24, |v: f64| v as f32, f64::from;
    f16, 11, f16::from_f64, f16::to_f64;
    bf16, 8, bf16::from_f64, bf16::to_f64;
}

/// What is computed in.
const WIDE_ROUNDING: f64 = 1.0 / (1 << 24) as f64;

/// One case: the same on all ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    bytes: usize,
    /// Of ordinary slices, in elements.
    offset: usize,
    seed: u64,
}

impl Case {
    fn len<T>(self) -> usize {
        self.bytes.div_ceil(size_of::<T>())
    }

    /// Of magnitudes far apart, so that the order of additions shows in the bits.
    fn values<T: Float>(self, rank: usize) -> Vec<T> {
        let mut random = Random(self.seed ^ (rank as u64) << 32);
        let mut value = || {
            let scale = [1.0, 0.01, 50.0][random.below(3)];
            T::new((random.below(20_001) as f64 / 10_000.0 - 1.0) * scale)
        };
        (0..self.len::<T>()).map(|_| value()).collect()
    }
}

fn symmetric<T: Number>(world: &World, values: &[T]) -> Symmetric<T> {
    let mut x = world.alloc::<T>(values.len()).unwrap().rendezvous(world).unwrap();
    x.local_mut().copy_from_slice(values);
    x
}

fn bits<T: Float>(values: &[T]) -> Vec<u64> {
    values.iter().map(|v| v.bits()).collect()
}

/// Memory in which a slice of `len` begins `offset` elements from the start.
fn shifted<T: Float>(offset: usize, len: usize) -> Vec<T> {
    vec![T::default(); offset + len]
}

/// All ways to all-reduce; returns the result.
fn all_ways<T: Float>(world: &World, case: Case, op: ReduceOp) -> Vec<T> {
    let (own, at) = (case.values::<T>(world.rank()), case.offset);
    let mut x = symmetric(world, &own);
    x.all_reduce(op).unwrap();
    let result = x.local().to_vec();
    let same = |other: &[T], way: &str| {
        assert!(bits(other) == bits(&result), "{way} of {} by {op}, {case:?}", T::DTYPE);
    };
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let mut x = symmetric(world, &own);
        x.all_reduce_with(op, algorithm).unwrap();
        same(x.local(), &format!("{algorithm:?}"));
    }
    let mut x = symmetric(world, &own);
    let mut out = shifted(at, own.len());
    x.all_reduce_into(op, &mut out[at..]).unwrap();
    same(&out[at..], "all_reduce_into");
    let mut out = shifted(at, own.len());
    x.all_reduce_from(&own, op, &mut out[at..]).unwrap();
    same(&out[at..], "all_reduce_from");
    let mut slice = shifted(at, own.len());
    slice[at..].copy_from_slice(&own);
    world.all_reduce(&mut slice[at..], op).unwrap();
    same(&slice[at..], "a slice");

    // By blocks, whose beginnings lie anywhere.
    let block = own.len() / world.size();
    let even = &own[..block * world.size()];
    let expected = &bits(&result)[world.rank() * block..][..block];
    let mut out = shifted(at, block);
    symmetric(world, even).reduce_scatter(op, &mut out[at..]).unwrap();
    assert!(bits(&out[at..]) == expected, "reduce_scatter of {} by {op}, {case:?}", T::DTYPE);
    world.reduce_scatter(even, op, &mut out[at..]).unwrap();
    assert!(bits(&out[at..]) == expected, "reduce_scatter of a slice of {}, {case:?}", T::DTYPE);
    result
}

/// The result is near the exact one, and the same on all ranks.
fn check<T: Float>(world: &World, case: Case) {
    let n = world.size();
    let inputs: Vec<Vec<T>> = (0..n).map(|rank| case.values(rank)).collect();
    for op in [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max] {
        let result = all_ways::<T>(world, case, op);
        let mut digests = vec![0; n];
        let digest =
            bits(&result).iter().fold(0, |d: u64, b| d.rotate_left(5).wrapping_mul(31) ^ b);
        world.all_gather(&[digest], &mut digests).unwrap();
        assert!(digests.iter().all(|d| *d == digest), "the bits differ between ranks: {digests:?}");
        for (i, value) in result.iter().enumerate() {
            let all = || inputs.iter().map(|input| input[i].value());
            let size: f64 = all().map(f64::abs).sum();
            let exact = match op {
                ReduceOp::Max => all().fold(f64::MIN, f64::max),
                ReduceOp::Average => all().sum::<f64>() / n as f64,
                _ => all().sum(),
            };
            // One rounding in the computation for each step, f64 as exact as the reference, and one to the type.
            let steps = (n + 1) as f64 * size * WIDE_ROUNDING.min(T::ROUNDING);
            let bound =
                if op == ReduceOp::Max { 0.0 } else { 2.0 * steps + exact.abs() * T::ROUNDING };
            let error = (value.value() - exact).abs();
            // Below the smallest normal number of 16 bits errors are no longer relative.
            assert!(
                error <= bound + 1e-7,
                "{op} of {}: {value:?}, not {exact}; {case:?}",
                T::DTYPE
            );
        }
    }
}

fn check_type(world: &World, kind: usize, case: Case) {
    match kind {
        0 => check::<f64>(world, case),
        1 => check::<f32>(world, case),
        2 => check::<f16>(world, case),
        _ => check::<bf16>(world, case),
    }
}

fn threads(ranks: usize, f: impl Fn(World) + Sync) {
    let timeout = Duration::from_secs(60);
    World::builder().timeout(timeout).threads(ranks, f).unwrap();
}

/// Lengths of every magnitude.
fn lengths() -> impl Strategy<Value = usize> {
    (0_u32..17).prop_flat_map(|magnitude| 1_usize << magnitude..2 << magnitude)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..Default::default() })]

    #[test]
    fn every_way_to_reduce_gives_the_same_bits(
        ranks in 1_usize..=5, bytes in lengths(), offset in 0_usize..64, kind in 0_usize..4, seed: u64,
    ) {
        threads(ranks, |world| check_type(&world, kind, Case { bytes, offset, seed }));
    }
}

#[test]
fn megabytes_give_the_same_bits() {
    let case = Case { bytes: (3 << 20) - 3, offset: 1, seed: 3 };
    threads(3, |world| check::<f32>(&world, case));
}

fn some_of_every_magnitude(world: World) {
    let mut random = Random(world.size() as u64);
    for magnitude in 0..17 {
        let bytes = (1 << magnitude) + random.below(1 << magnitude);
        let case = Case { bytes, offset: random.below(64), seed: random.next() };
        check_type(&world, magnitude, case);
    }
}

macro_rules! in_processes {
    ($($name:ident($ranks:expr);)*) => {$(
        #[test]
        fn $name() {
            Ranks::new($ranks).run(test_name!(), some_of_every_magnitude);
        }
    )*};
}

in_processes! {
    two_processes_get_the_same_bits(2);
    three_processes_get_the_same_bits(3);
    four_processes_get_the_same_bits(4);
}

/// Bytes, which may begin anywhere: sources by the blocks' length, destinations by the slices' beginning.
#[test]
fn every_misalignment_gives_the_same_bytes() {
    let value = |rank: usize, i: usize| (i * 7 + rank * 89 + (i >> 8)) as u8;
    threads(3, |world| {
        let (n, own) = (world.size(), world.rank());
        for offset in 0..64 {
            let block = 130 + offset;
            let input: Vec<u8> = (0..n * block).map(|i| value(own, i)).collect();
            let sum = |i: usize| (1..n).fold(value(0, i), |s, r| s.wrapping_add(value(r, i)));
            let sums: Vec<u8> = (0..n * block).map(sum).collect();
            let mut x = symmetric(&world, &input);
            let mut out = vec![0xee; offset + n * block + 64];
            let (before, rest) = out.split_at_mut(offset);
            let (whole, after) = rest.split_at_mut(n * block);
            x.reduce_scatter(ReduceOp::Sum, &mut whole[..block]).unwrap();
            assert_eq!(whole[..block], sums[own * block..(own + 1) * block]);
            x.all_reduce_into(ReduceOp::Sum, whole).unwrap();
            assert_eq!(whole, sums);
            x.all_to_all(whole).unwrap();
            assert!((0..n * block).all(|i| whole[i] == value(i / block, own * block + i % block)));
            whole.copy_from_slice(&input);
            world.all_reduce(whole, ReduceOp::Sum).unwrap();
            assert_eq!(whole, sums);
            assert!(before.iter().chain(after.iter()).all(|v| *v == 0xee), "beyond the slice");
        }
    });
}

#[test]
fn rows_find_their_way_among_any_number_of_ranks() {
    for ranks in 1..=5 {
        threads(ranks, conformance::rows_go_to_the_ranks_they_are_for);
        threads(ranks, conformance::experts_get_their_rows_and_give_them_back);
        threads(ranks, |world| puts_and_gets_reach_every_rank(&OnHost(&world, "process")));
    }
}

#[test]
fn a_death_in_a_collective_on_slices_ends_it_and_survivors_go_on() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let mut data = vec![world.rank() as u64; 500_000];
        world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            die();
        }
        let e = world.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        let survivors = world.shrink().unwrap();
        data.fill(1);
        survivors.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|v| *v == 2));
        drop((survivors, world));
        assert_nothing_is_held();
    });
}

#[test]
fn a_death_while_memory_is_open_leaves_it_to_the_survivors() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
        let open = x.open().unwrap();
        open.put(world.rank(), 0, &[7; 10]).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            die();
        }
        let failed = open.close().err().unwrap();
        assert!(matches!(failed.error, Error::PeerLost { rank: 1, .. }), "{}", failed.error);
        let survivors = world.shrink().unwrap();
        let own = failed.kept.rendezvous(&survivors).unwrap();
        assert_eq!(own.local(), [7; 10]);
        let open = own.open().unwrap();
        open.put(1 - survivors.rank(), 0, &[9]).unwrap();
        assert_eq!(open.close().unwrap().local()[..2], [9, 7]);
    });
}
