//! The bits are those of a scalar sum in rank order: by every algorithm, for every length around a limit of the code, at
//! every misalignment of the caller's slices. Parts of symmetric memory lie at multiples of a cache line by themselves.

use std::time::{Duration, Instant};

use half::bf16;
use symmem::{Algorithm, Number, ReduceOp, Symmetric, World};
use symmem_testing::{Ranks, test_name};

use crate::threads;

const WAYS: [Algorithm; 4] =
    [Algorithm::Auto, Algorithm::Staged, Algorithm::OneShot, Algorithm::TwoShot];

/// Bytes at which something changes: the line of a flag, registers, a cache line, the lanes of the reduce loop for each
/// type, a page, the staging, beyond which a staged all-reduce goes piece by piece.
const LIMITS: [usize; 10] = [1, 8, 24, 32, 64, 128, 256, 512, 4 << 10, 16 << 10];

/// The workspace of collectives on slices, beyond which they go piece by piece.
const WORKSPACE: usize = 1 << 20;

/// A number whose sum can be told from all others.
trait Summand: Number {
    const ZERO: Self;
    fn of(seed: u64) -> Self;
    /// One after the other, rounded to the type at the end.
    fn sum(values: impl Iterator<Item = Self>) -> Self;
    fn same(self, other: Self) -> bool;
    /// The first element in which two slices differ.
    fn difference(a: &[Self], b: &[Self]) -> Option<usize> {
        a.iter().zip(b).position(|(a, b)| !a.same(*b))
    }
}

/// Magnitudes far apart, so that the order of additions shows.
fn float(seed: u64) -> f64 {
    let scale = [1e-3, 1.0, 3e3][(seed % 3) as usize];
    ((seed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0) * scale
}

impl Summand for f32 {
    const ZERO: Self = 0.0;
    fn of(seed: u64) -> Self {
        float(seed) as f32
    }
    fn sum(values: impl Iterator<Item = Self>) -> Self {
        values.reduce(|sum, value| sum + value).unwrap()
    }
    fn same(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl Summand for f64 {
    const ZERO: Self = 0.0;
    fn of(seed: u64) -> Self {
        float(seed)
    }
    fn sum(values: impl Iterator<Item = Self>) -> Self {
        values.reduce(|sum, value| sum + value).unwrap()
    }
    fn same(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl Summand for bf16 {
    const ZERO: Self = bf16::ZERO;
    fn of(seed: u64) -> Self {
        bf16::from_f64(float(seed))
    }
    fn sum(values: impl Iterator<Item = Self>) -> Self {
        bf16::from_f32(f32::sum(values.map(bf16::to_f32)))
    }
    fn same(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl Summand for i8 {
    const ZERO: Self = 0;
    fn of(seed: u64) -> Self {
        seed as Self
    }
    fn sum(values: impl Iterator<Item = Self>) -> Self {
        values.fold(0, Self::wrapping_add)
    }
    fn same(self, other: Self) -> bool {
        self == other
    }
    fn difference(a: &[Self], b: &[Self]) -> Option<usize> {
        // Most of these tests are about bytes, and a loop over them takes its time without optimisation.
        if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
    }
}

/// What rank `rank` brings as element `i`.
fn value<T: Summand>(rank: usize, i: usize) -> T {
    let seed = (i as u64) << 8 | rank as u64;
    let mixed = (seed ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    T::of((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9))
}

fn expected<T: Summand>(ranks: usize, i: usize) -> T {
    T::sum((0..ranks).map(|rank| value(rank, i)))
}

/// All that ranks of a test compare with, made once.
struct Known<T> {
    inputs: Vec<Vec<T>>,
    sums: Vec<T>,
}

impl<T: Summand> Known<T> {
    fn new(ranks: usize, len: usize) -> Self {
        let input = |rank| (0..len).map(|i| value(rank, i)).collect();
        let sums: Vec<T> = (0..len).map(|i| expected(ranks, i)).collect();
        Self { inputs: (0..ranks).map(input).collect(), sums }
    }
}

/// Memory of which a slice begins `bytes` after a cache line; what lies around it is looked after.
struct Slice<T> {
    memory: Vec<T>,
    begin: usize,
    len: usize,
}

impl<T: Summand> Slice<T> {
    const AROUND: usize = 64;

    fn new(bytes: usize, len: usize) -> Self {
        let size = size_of::<T>();
        let memory = vec![Self::guard(); len + 4 * Self::AROUND];
        let after_line = memory.as_ptr() as usize % 64 / size;
        let begin = Self::AROUND - after_line + bytes / size;
        let slice = Self { memory, begin, len };
        assert_eq!(slice.get().as_ptr() as usize % 64, bytes);
        slice
    }

    fn of(bytes: usize, values: &[T]) -> Self {
        let mut slice = Self::new(bytes, values.len());
        slice.get_mut().copy_from_slice(values);
        slice
    }

    fn guard() -> T {
        T::of(0x0123_4567_89ab_cdef)
    }

    fn get(&self) -> &[T] {
        &self.memory[self.begin..][..self.len]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.begin..][..self.len]
    }

    /// Holds `expected`, and nothing was written around it.
    fn check(&self, expected: &[T], what: &str) {
        same(self.get(), expected, what);
        let after = &self.memory[self.begin + self.len..];
        let mut around = self.memory[..self.begin].iter().chain(after);
        assert!(around.all(|v| v.same(Self::guard())), "{what}: beyond the slice");
    }
}

fn same<T: Summand>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    if let Some(i) = T::difference(got, expected) {
        panic!("{what}: element {i} is {:?}, not {:?}", got[i], expected[i]);
    }
}

fn describe<T: Number>(what: &str, world: &World, len: usize, bytes: usize) -> String {
    format!("{what} of {len} {} by {} ranks, misaligned by {bytes}", T::DTYPE, world.size())
}

/// Every algorithm on symmetric memory.
fn in_place<T: Summand>(world: &World, known: &Known<T>, x: &mut Symmetric<T>) {
    let len = x.len();
    for way in WAYS {
        x.local_mut().copy_from_slice(&known.inputs[world.rank()][..len]);
        x.all_reduce_with(ReduceOp::Sum, way).unwrap();
        same(x.local(), &known.sums[..len], &describe::<T>(&format!("{way:?}"), world, len, 0));
    }
}

/// What takes slices, with all of them misaligned by `bytes`: reductions each time, what only copies in turn. `x` has this
/// rank's input.
fn misaligned<T: Summand>(world: &World, known: &Known<T>, x: &mut Symmetric<T>, bytes: usize) {
    let (n, own, len) = (world.size(), world.rank(), x.len());
    let what = |name: &str| describe::<T>(name, world, len, bytes);
    let (input, sums) = (&known.inputs[own][..len], &known.sums[..len]);
    let mut out = Slice::new(bytes, len);
    x.all_reduce_into(ReduceOp::Sum, out.get_mut()).unwrap();
    out.check(sums, &what("all_reduce_into"));
    let mut data = Slice::of(bytes, input);
    world.all_reduce(data.get_mut(), ReduceOp::Sum).unwrap();
    data.check(sums, &what("all_reduce of a slice"));

    let block = len / n;
    let even = Slice::of(bytes, &input[..block * n]);
    let theirs = |rank: usize| &known.inputs[rank];
    match (len + bytes / size_of::<T>()) % 4 {
        0 => {
            let mut out = Slice::new(bytes, n * len);
            world.all_gather(Slice::of(bytes, input).get(), out.get_mut()).unwrap();
            let every: Vec<&[T]> = (0..n).map(|rank| &theirs(rank)[..len]).collect();
            out.check(&every.concat(), &what("all_gather of a slice"));
        }
        1 => {
            let mut out = Slice::new(bytes, block);
            world.reduce_scatter(even.get(), ReduceOp::Sum, out.get_mut()).unwrap();
            out.check(&sums[own * block..][..block], &what("reduce_scatter of a slice"));
        }
        2 => {
            let mut out = Slice::new(bytes, block * n);
            world.all_to_all(even.get(), out.get_mut()).unwrap();
            let every: Vec<&[T]> = (0..n).map(|r| &theirs(r)[own * block..][..block]).collect();
            out.check(&every.concat(), &what("all_to_all of a slice"));
        }
        _ => {
            let mut data = Slice::of(bytes, input);
            world.broadcast(data.get_mut(), n - 1).unwrap();
            data.check(&theirs(n - 1)[..len], &what("broadcast of a slice"));
        }
    }
}

fn lengths<T>() -> Vec<usize> {
    let at = |bytes: &usize| bytes.div_ceil(size_of::<T>());
    let mut all: Vec<usize> =
        LIMITS.iter().map(at).flat_map(|n| [n.max(2) - 1, n, n + 1]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Elements of the longest part that is looked at here.
fn most<T>() -> usize {
    WORKSPACE / size_of::<T>() + 1
}

fn every_case<T: Summand>(world: &World, known: &Known<T>) {
    let (ranks, most) = (world.size(), most::<T>());
    let check = |len: usize, misalignments: &[usize]| {
        let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
        in_place(world, known, &mut x);
        x.local_mut().copy_from_slice(&known.inputs[world.rank()][..len]);
        misalignments.iter().for_each(|&bytes| misaligned(world, known, &mut x, bytes));
    };
    // Those that a slice of `T` can have.
    let all: Vec<usize> = (0..64).step_by(size_of::<T>()).collect();
    for (turn, len) in lengths::<T>().into_iter().enumerate() {
        // Three ranks go through everything, others a third of it: each misalignment, and each length, in turn.
        let in_turn = |bytes: usize| (turn + bytes / size_of::<T>()).is_multiple_of(3);
        let expected = all.iter().copied().filter(|&bytes| ranks == 3 || in_turn(bytes));
        check(len, &expected.collect::<Vec<usize>>());
    }
    let long = if ranks == 3 { most - 2..=most } else { most..=most };
    long.for_each(|len| check(len, &[64 - size_of::<T>()]));
}

fn among_threads<T: Summand>() {
    for ranks in [2, 3, 4] {
        let known = Known::<T>::new(ranks, most::<T>());
        threads(ranks, |world| every_case(&world, &known));
    }
}

#[test]
fn sums_of_f32_have_the_bits_of_rank_order_at_every_misalignment() {
    among_threads::<f32>();
}

#[test]
fn sums_of_f64_have_the_bits_of_rank_order_at_every_misalignment() {
    among_threads::<f64>();
}

#[test]
fn sums_of_bf16_have_the_bits_of_rank_order_at_every_misalignment() {
    among_threads::<bf16>();
}

#[test]
fn sums_of_i8_are_right_at_every_misalignment() {
    among_threads::<i8>();
}

#[test]
fn processes_get_the_bits_of_rank_order_at_every_misalignment() {
    Ranks::new(3).run(test_name!(), |world| {
        every_case(&world, &Known::<f32>::new(world.size(), most::<f32>()));
    });
}

/// Otherwise the tests above would prove little.
#[test]
fn the_order_shows_in_the_bits() {
    let backwards = |i| f32::sum((0..3).rev().map(|rank| value(rank, i)));
    let differ = (0..1000).filter(|&i| !backwards(i).same(expected::<f32>(3, i))).count();
    assert!(differ > 100, "{differ} of 1000");
    assert!(!expected::<f32>(3, 5).same(f32::ZERO));
}

/// As much as nobody wants to hold twice: inputs and sums are made anew where they are needed.
fn large<T: Summand>(world: &World, len: usize) {
    let (n, own) = (world.size(), world.rank());
    let begin = Instant::now();
    let check = |got: &[T], what: &str, bytes| {
        let differs = (0..len).find(|&i| !got[i].same(expected(n, i)));
        assert_eq!(differs, None, "{}", describe::<T>(what, world, len, bytes));
    };
    let fill = |to: &mut [T]| to.iter_mut().enumerate().for_each(|(i, v)| *v = value(own, i));
    let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
    for way in WAYS {
        fill(x.local_mut());
        x.all_reduce_with(ReduceOp::Sum, way).unwrap();
        check(x.local(), &format!("{way:?}"), 0);
    }
    fill(x.local_mut());
    for bytes in [0, size_of::<T>(), 64 - size_of::<T>()] {
        let mut slice = Slice::new(bytes, len);
        x.all_reduce_into(ReduceOp::Sum, slice.get_mut()).unwrap();
        check(slice.get(), "all_reduce_into", bytes);
        fill(slice.get_mut());
        world.all_reduce(slice.get_mut(), ReduceOp::Sum).unwrap();
        check(slice.get(), "all_reduce of a slice", bytes);
    }
    println!("rank {own} of {n}, {len} of {}: {:?}", T::DTYPE, begin.elapsed());
}

fn large_of_all_types(world: World) {
    for bytes in [16 << 20, 256 << 20] {
        large::<f32>(&world, bytes / size_of::<f32>());
        large::<f32>(&world, bytes / size_of::<f32>() - 1);
    }
    large::<f64>(&world, (16 << 20) / size_of::<f64>() + 1);
    large::<bf16>(&world, (16 << 20) / size_of::<bf16>() + 1);
    large::<i8>(&world, (16 << 20) + 1);
}

#[test]
#[ignore = "gigabytes and minutes: cargo test --release -p symmem --test collectives large_parts -- --ignored --test-threads 1"]
fn large_parts_have_the_bits_of_rank_order_among_threads() {
    for ranks in [2, 3] {
        let timeout = Duration::from_secs(120);
        let options = World::builder().timeout(timeout);
        options.threads(ranks, large_of_all_types).unwrap();
    }
}

#[test]
#[ignore = "gigabytes and minutes: cargo test --release -p symmem --test collectives large_parts -- --ignored --test-threads 1"]
fn large_parts_have_the_bits_of_rank_order_among_processes() {
    Ranks::new(2).run(test_name!(), large_of_all_types);
}
