//! What the collectives promise.

use super::SOON;
use half::{bf16, f16};
use symmem::{
    Algorithm, Bool, Complex, Element, Error, F8E4M3, F8E5M2, Number, Pool, ReduceOp, Symmetric,
    World,
};

/// Numbers that tell every mistake, different for each rank and element.
fn seed(rank: usize, i: usize) -> u32 {
    let mut x = (rank as u32 + 1).wrapping_mul(2_654_435_761) ^ (i as u32).wrapping_mul(40_503);
    x ^= x << 13;
    x ^= x >> 17;
    x ^ (x << 5)
}

fn float(rank: usize, i: usize) -> f32 {
    (seed(rank, i) % 2001) as f32 / 16.0 - 62.5
}

fn filled<T: Number>(world: &World, len: usize, value: impl Fn(usize, usize) -> T) -> Symmetric<T> {
    let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
    let rank = world.rank();
    x.local_mut().iter_mut().enumerate().for_each(|(i, v)| *v = value(rank, i));
    x
}

fn bytes<T: Number>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| format!("{v:?},").into_bytes()).collect()
}

/// All ways of reducing all elements give the bits of the definition, on every rank.
fn reduces<T: Number>(
    world: &World,
    len: usize,
    op: ReduceOp,
    value: impl Fn(usize, usize) -> T,
    defined: impl Fn(&dyn Fn(usize) -> T) -> T,
) {
    let expected: Vec<T> = (0..len).map(|i| defined(&|rank| value(rank, i))).collect();
    let expected = bytes(&expected);
    for algorithm in [Algorithm::Auto, Algorithm::Staged, Algorithm::OneShot, Algorithm::TwoShot] {
        let mut x = filled(world, len, &value);
        x.all_reduce_with(op, algorithm).unwrap();
        assert_eq!(bytes(x.local()), expected, "{op} of {len} {} by {algorithm:?}", T::DTYPE);
    }
    let mut x = filled(world, len, &value);
    let before = bytes(x.local());
    let mut out = x.local().to_vec();
    x.all_reduce_into(op, &mut out).unwrap();
    assert_eq!(bytes(&out), expected);
    assert_eq!(bytes(x.local()), before, "the input is left as it was");
    x.reduce(op, world.size() - 1, &mut out).unwrap();
    if world.rank() == world.size() - 1 {
        assert_eq!(bytes(&out), expected);
    }
}

/// The sum in rank order, in f32, rounded once.
fn sum(world: &World) -> impl Fn(&dyn Fn(usize) -> f32) -> f32 {
    let size = world.size();
    move |of| (1..size).fold(of(0), |sum, rank| sum + of(rank))
}

/// Every type and operator, every algorithm, any length.
pub fn reductions_give_the_bits_of_their_definition(world: World) {
    let n = world.size();
    for len in [0, 1, 7, 64, 1000] {
        let sum = sum(&world);
        reduces(&world, len, ReduceOp::Sum, float, &sum);
        reduces(&world, len, ReduceOp::Average, float, |of| sum(of) / n as f32);
        reduces(&world, len, ReduceOp::Max, float, |of| (0..n).map(of).fold(f32::MIN, f32::max));
        reduces(&world, len, ReduceOp::Min, float, |of| (0..n).map(of).fold(f32::MAX, f32::min));
        reduces(&world, len, ReduceOp::Product, float, |of| (1..n).fold(of(0), |p, r| p * of(r)));
        let to_f64 = |r: usize, i: usize| f64::from(float(r, i)) / 3.0;
        reduces(&world, len, ReduceOp::Sum, to_f64, |of| (1..n).fold(of(0), |s, r| s + of(r)));
        let half = |r: usize, i: usize| f16::from_f32(float(r, i));
        reduces(&world, len, ReduceOp::Sum, half, |of| f16::from_f32(sum(&|r| of(r).to_f32())));
        let brain = |r: usize, i: usize| bf16::from_f32(float(r, i));
        reduces(&world, len, ReduceOp::Sum, brain, |of| bf16::from_f32(sum(&|r| of(r).to_f32())));
        let byte = |r: usize, i: usize| seed(r, i) as u8;
        reduces(&world, len, ReduceOp::Sum, byte, |of| {
            (1..n).fold(of(0), |s, r| s.wrapping_add(of(r)))
        });
        let long = |r: usize, i: usize| i64::from(seed(r, i)) << 20;
        reduces(&world, len, ReduceOp::Xor, long, |of| (1..n).fold(of(0), |s, r| s ^ of(r)));
        reduces(&world, len, ReduceOp::And, long, |of| (1..n).fold(of(0), |s, r| s & of(r)));
        reduces(&world, len, ReduceOp::Or, long, |of| (1..n).fold(of(0), |s, r| s | of(r)));
        // Powers of two, whose sums eight bits can hold.
        let e4m3 = |_: usize, i: usize| F8E4M3([0x38, 0x40, 0xb8][i % 3]);
        reduces(&world, len, ReduceOp::Max, e4m3, |of| of(0));
        let e5m2 = |_: usize, i: usize| F8E5M2([0x3c, 0x40, 0xbc][i % 3]);
        reduces(&world, len, ReduceOp::Min, e5m2, |of| of(0));
        let truth = |r: usize, i: usize| Bool::from(seed(r, i).is_multiple_of(3));
        let all = |of: &dyn Fn(usize) -> Bool| Bool::from((0..n).all(|r| of(r).into()));
        let any = |of: &dyn Fn(usize) -> Bool| Bool::from((0..n).any(|r| of(r).into()));
        for (op, defined) in [
            (ReduceOp::Sum, &any as &dyn Fn(&dyn Fn(usize) -> Bool) -> Bool),
            (ReduceOp::Product, &all),
            (ReduceOp::Max, &any),
            (ReduceOp::Min, &all),
            (ReduceOp::Or, &any),
            (ReduceOp::And, &all),
        ] {
            reduces(&world, len, op, truth, defined);
        }
        let complex = |r: usize, i: usize| Complex::new(float(r, i), float(r + 7, i) / 3.0);
        reduces(&world, len, ReduceOp::Sum, complex, |of| (1..n).fold(of(0), |s, r| s + of(r)));
        reduces(&world, len, ReduceOp::Product, complex, |of| (1..n).fold(of(0), |p, r| p * of(r)));
        let wide = |r: usize, i: usize| Complex::new(to_f64(r, i), to_f64(r + 7, i));
        reduces(&world, len, ReduceOp::Product, wide, |of| (1..n).fold(of(0), |p, r| p * of(r)));
        reduces(&world, len, ReduceOp::Average, wide, |of| {
            let sum = (1..n).fold(of(0), |s, r| s + of(r));
            Complex::new(sum.re / n as f64, sum.im / n as f64)
        });
        let index = |r: usize, i: usize| seed(r, i) as usize;
        reduces(&world, len, ReduceOp::Max, index, |of| (0..n).map(of).fold(0, usize::max));
    }
}

/// Bytes that are no truth value of Rust's count as true, and results are 0 or 1.
pub fn whatever_is_not_zero_is_true(world: World) {
    let rank = world.rank();
    let mut bytes = world.alloc::<u8>(4).unwrap().rendezvous(&world).unwrap();
    bytes.local_mut().copy_from_slice(&[0, 2, if rank == 0 { 4 } else { 0 }, rank as u8 + 1]);
    // SAFETY: nobody touches the bytes while there is a part of them.
    let mut truth = unsafe { bytes.handle().part::<Bool>(0, 4) }.unwrap();
    truth.all_reduce(ReduceOp::Product).unwrap();
    drop(truth);
    assert_eq!(bytes.local(), [0, 1, u8::from(world.size() == 1), 1]);
}

/// A type of the user's: as many bytes as none of the library's.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Particle {
    position: [f32; 3],
    charge: i16,
    kind: [u8; 2],
}

impl Element for Particle {}

/// Structs move through memory and slices as numbers do; ranks with other structs are told.
pub fn structs_of_the_users_can_be_moved(world: World) {
    let n = world.size();
    let one = |rank: usize, i: usize| Particle {
        position: [float(rank, i), i as f32, -1.0],
        charge: rank as i16,
        kind: [i as u8, 7],
    };
    for len in [1, 3, 100, 20_000] {
        let own: Vec<Particle> = (0..len).map(|i| one(world.rank(), i)).collect();
        let mut x = world.alloc::<Particle>(len).unwrap().rendezvous(&world).unwrap();
        x.local_mut().copy_from_slice(&own);
        let mut all = vec![one(0, 0); len * n];
        x.all_gather(&mut all).unwrap();
        let right =
            |all: &[Particle]| all.iter().enumerate().all(|(i, got)| *got == one(i / len, i % len));
        assert!(right(&all));
        all.fill(one(0, 0));
        world.all_gather(&own, &mut all).unwrap();
        assert!(right(&all));
        x.broadcast(n - 1).unwrap();
        assert_eq!(x.local()[len - 1], one(n - 1, len - 1));
        let open = x.open().unwrap();
        open.put((world.rank() + 1) % n, 0, &own[..1]).unwrap();
        let x = open.close().unwrap();
        assert_eq!(x.local()[0], one((world.rank() + n - 1) % n, 0));
    }
    if n > 1 {
        let own = [one(0, 0)];
        let e = if world.rank() == 0 {
            world.broadcast(&mut own.clone(), 0).unwrap_err()
        } else {
            world.broadcast(&mut [0.0_f32], 0).unwrap_err()
        };
        assert!(e.to_string().contains("a struct of 16 bytes"), "{e}");
    }
}

/// Operators that mean nothing for a type are refused on every rank, and the next call works.
pub fn operators_that_do_not_apply_are_refused(world: World) {
    let refused = |e: Error| assert!(matches!(e, Error::Usage { .. }), "{e}");
    refused(world.all_reduce(&mut [Bool::from(true)], ReduceOp::Average).unwrap_err());
    refused(world.all_reduce(&mut [Complex::new(1.0_f32, 0.0)], ReduceOp::Max).unwrap_err());
    refused(world.all_reduce(&mut [1.0_f32], ReduceOp::Xor).unwrap_err());
    let mut one = [1_u32];
    world.all_reduce(&mut one, ReduceOp::Sum).unwrap();
    assert_eq!(one, [world.size() as u32]);
}

/// Around the sizes at which the way changes: the line of the flag, the staging buffer beside it and its end.
pub fn every_way_gives_the_same_bits_around_its_limits(world: World) {
    let sum = sum(&world);
    for len in [5, 6, 7, 127, 128, 160, 192, 193, 256, 320, 2047, 4095, 4096, 4097, 9000] {
        reduces(&world, len, ReduceOp::Sum, float, &sum);
        let byte = |r: usize, i: usize| seed(r, i) as u8;
        reduces(&world, len, ReduceOp::Max, byte, |of| {
            (0..world.size()).map(of).fold(0, |a, b| a.max(b))
        });
    }
}

/// Small collectives follow each other without a closing barrier: none sees what belongs to the next.
pub fn small_collectives_follow_each_other(world: World) {
    let n = world.size();
    for len in [2, 40] {
        let mut x = world.alloc::<u32>(len * n).unwrap().rendezvous(&world).unwrap();
        let mut out = vec![0; len * n * n];
        for round in 0..300_u32 {
            let rank = world.rank() as u32;
            x.local_mut().fill(round + rank);
            x.all_reduce(ReduceOp::Max).unwrap();
            assert!(x.local().iter().all(|v| *v == round + n as u32 - 1), "round {round}");
            x.local_mut().fill(1000 * round + rank);
            x.all_gather(&mut out).unwrap();
            let told = |(i, v): (usize, &u32)| *v == 1000 * round + (i / (len * n)) as u32;
            assert!(out.iter().enumerate().all(told), "round {round}");
            x.local_mut().fill(7 * round + rank);
            let root = round as usize % n;
            x.broadcast(root).unwrap();
            assert!(x.local().iter().all(|v| *v == 7 * round + root as u32), "round {round}");
        }
    }
}

/// A collective that gave up leaves the group out of step on every rank, whatever they call, until all resynchronise; the
/// memory is as it was, because nobody came to the work.
pub fn a_collective_that_gave_up_needs_a_resync(world: World) {
    let all: Vec<usize> = (0..world.size()).collect();
    let timeout = std::time::Duration::from_millis(200);
    let group = world.subgroup_builder(&all).timeout(timeout).build().unwrap();
    group.ready().unwrap();
    let out_of_step = |e: Error| {
        let what = "gave up all_reduce of";
        let told = matches!(&e, Error::OutOfStep { rank: 0, what: w, .. } if w.starts_with(what));
        assert!(told, "{e}");
    };
    for len in [2, 40, 100_000] {
        let mut x = group.alloc::<u32>(len).unwrap().rendezvous(&group).unwrap();
        world.barrier().unwrap();
        x.local_mut().fill(1);
        if world.rank() == 0 {
            let e = x.all_reduce(ReduceOp::Sum).unwrap_err();
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
            assert!(x.local().len() == len && x.local().iter().all(|v| *v == 1));
        }
        world.barrier().unwrap();
        out_of_step(x.all_reduce(ReduceOp::Sum).unwrap_err());
        out_of_step(group.broadcast(&mut [1.0], 0).unwrap_err());
        out_of_step(group.barrier().unwrap_err());
        out_of_step(group.barrier_on(1, SOON).unwrap_err());
        let x = x.share().err().unwrap();
        out_of_step(x.error);
        let mut x = x.kept.give_up().unwrap();
        world.barrier().unwrap();
        group.resync_by(SOON).unwrap();
        x.local_mut().fill(world.rank() as u32);
        x.all_reduce(ReduceOp::Sum).unwrap();
        let sum = (0..world.size() as u32).sum::<u32>();
        assert!(x.local().len() == len && x.local().iter().all(|v| *v == sum));
        x.share().unwrap().release().unwrap();
        group.barrier_on(1, SOON).unwrap();
    }
}

/// Blocks go where they belong: reduce-scatter (flat and by rows), all-gather, all-to-all, gather, scatter, broadcast.
pub fn blocks_go_where_they_belong(world: World) {
    let (n, own) = (world.size(), world.rank());
    let tag = |rank: usize, i: usize| (rank * 100_000 + i) as u64;
    for block in [0, 1, 3, 33, 96, 500] {
        let mut x = filled(&world, n * block, tag);
        let mut out = vec![0; block];
        x.reduce_scatter(ReduceOp::Sum, &mut out).unwrap();
        let sum = |i: usize| (0..n).map(|r| tag(r, i)).sum::<u64>();
        assert!(out.iter().enumerate().all(|(i, v)| *v == sum(own * block + i)));
        x.scatter(n - 1, &mut out).unwrap();
        assert!(out.iter().enumerate().all(|(i, v)| *v == tag(n - 1, own * block + i)));
        let mut blocks = vec![0; n * block];
        x.all_to_all(&mut blocks).unwrap();
        assert!(
            blocks
                .iter()
                .enumerate()
                .all(|(i, v)| { block != 0 && *v == tag(i / block, own * block + i % block) })
        );
        let mut all = vec![0; n * n * block];
        x.all_gather(&mut all).unwrap();
        let whole = n * block;
        assert!(all.iter().enumerate().all(|(i, v)| *v == tag(i / whole, i % whole)));
        all.fill(0);
        x.gather(0, &mut all).unwrap();
        assert_eq!(all.iter().any(|v| *v != 0), own == 0 && n * block > 1);
        x.broadcast(n / 2).unwrap();
        assert!(x.local().iter().enumerate().all(|(i, v)| *v == tag(n / 2, i)));
        let rows = 3;
        let mut x = filled(&world, rows * n * block, tag);
        let mut out = vec![0; rows * block];
        x.reduce_scatter_last_dim(ReduceOp::Sum, n * block, &mut out).unwrap();
        for (i, v) in out.iter().enumerate() {
            assert_eq!(*v, sum(i / block * n * block + own * block + i % block));
        }
    }
}

/// What is pulled is what all ranks had at the call: a rank may change its part as soon as its own call is over.
pub fn a_gather_pulls_what_all_had_at_the_call(world: World) {
    let (n, own) = (world.size(), world.rank());
    for len in [3, 100, 5_000] {
        let mut x = world.alloc::<u32>(len).unwrap().rendezvous(&world).unwrap();
        for round in 0..20_usize {
            let value = |rank: usize, i: usize| (round * 1_000_000 + rank * 100_000 + i) as u32;
            let input: Vec<u32> = (0..len).map(|i| value(own, i)).collect();
            let right = |out: &[u32]| (0..n * len).all(|i| out[i] == value(i / len, i % len));
            x.local_mut().copy_from_slice(&input);
            let mut out = vec![0; n * len];
            x.all_gather(&mut out).unwrap();
            x.local_mut().fill(u32::MAX);
            assert!(right(&out), "of {len} in round {round}");
            out.fill(0);
            let mut ordinary = input;
            world.all_gather(&ordinary, &mut out).unwrap();
            ordinary.fill(u32::MAX);
            assert!(right(&out), "of {len} ordinary ones in round {round}");
        }
    }
}

/// Sum and mean of what all ranks had at the call, from symmetric and from ordinary memory; what cannot be is refused.
pub fn a_scattered_reduction_pulls_what_all_had_at_the_call(world: World) {
    let (n, own) = (world.size(), world.rank());
    let mean = |sum: f32| sum / n as f32;
    for block in [1, 50, 2_000] {
        let mut x = world.alloc::<f32>(n * block).unwrap().rendezvous(&world).unwrap();
        for round in 0..10 {
            let input: Vec<f32> = (0..n * block).map(|i| float(own + round, i)).collect();
            let sum = |i: usize| (1..n).fold(float(round, i), |s, r| s + float(r + round, i));
            let sums: Vec<f32> = (own * block..(own + 1) * block).map(sum).collect();
            let means: Vec<f32> = sums.iter().copied().map(mean).collect();
            for (op, expected) in [(ReduceOp::Sum, &sums), (ReduceOp::Average, &means)] {
                let mut out = vec![0.0; block];
                x.local_mut().copy_from_slice(&input);
                x.reduce_scatter(op, &mut out).unwrap();
                x.local_mut().fill(f32::NAN);
                assert_eq!(bytes(&out), bytes(expected), "{op} of {block} in round {round}");
                let mut ordinary = input.clone();
                world.reduce_scatter(&ordinary, op, &mut out).unwrap();
                ordinary.fill(f32::NAN);
                assert_eq!(bytes(&out), bytes(expected), "{op} of {block} ordinary ones");
            }
        }
        let e = x.reduce_scatter(ReduceOp::Or, &mut vec![0.0; block]).unwrap_err();
        assert!(matches!(e, Error::Usage { op: "reduce_scatter", .. }), "{e}");
    }
    let mut odd = world.alloc::<f32>(n + 1).unwrap().rendezvous(&world).unwrap();
    let e = odd.reduce_scatter(ReduceOp::Sum, &mut [0.0]).unwrap_err().to_string();
    assert!(n == 1 || e.contains("divisible by the"), "{e}");
}

/// Collectives keep to their memory where it begins within an allocation, at another offset on each rank.
pub fn parts_of_a_pool_are_reduced_where_they_lie(world: World) {
    let (n, own) = (world.size(), world.rank());
    let pool = Pool::new(&world, 1 << 20);
    let mut before = pool.alloc::<u8>(200 * (own + 1)).unwrap();
    before.local_mut().fill(0xaa);
    for len in [3, 5000] {
        let mut x = pool.alloc::<i32>(len).unwrap();
        let mut after = pool.alloc::<u8>(300).unwrap();
        after.local_mut().fill(0xbb);
        assert_ne!(x.offset(), 0);
        x.local_mut().fill(own as i32 + 1);
        let mut x = x.rendezvous(&world).unwrap();
        let (sum, mut all) = ((n * (n + 1) / 2) as i32, vec![0; n * len]);
        x.all_gather(&mut all).unwrap();
        assert!(all.chunks(len).zip(1..).all(|(part, rank)| part.iter().all(|v| *v == rank)));
        x.all_reduce(ReduceOp::Sum).unwrap();
        assert!(x.local().iter().all(|v| *v == sum), "{len} elements");
        x.broadcast(n - 1).unwrap();
        assert!(before.local().iter().all(|b| *b == 0xaa));
        assert!(after.local().iter().all(|b| *b == 0xbb));
    }
}

/// Wrong lengths, roots and operators are refused before anything is done, and the next call works.
pub fn bad_collective_calls_are_named(world: World) {
    let mut x = filled(&world, 10 * world.size(), float);
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    assert!(text(x.all_reduce(ReduceOp::Xor)).contains("an operator that f32 has, got xor"));
    assert!(text(x.all_gather(&mut [0.0; 3])).contains("an output of"));
    assert!(text(x.broadcast(world.size())).contains("a rank in [0"));
    let none = text(x.reduce_scatter_last_dim(ReduceOp::Sum, 0, &mut []));
    assert!(none.contains("a number of columns that divides"), "{none}");
    let mut odd = filled(&world, 10 * world.size() + 1, float);
    assert!(text(odd.reduce_scatter(ReduceOp::Sum, &mut [])).contains("divisible by the"));
    x.all_reduce(ReduceOp::Sum).unwrap();
}

/// Ranks that call a collective differently all learn it, nothing is done, and the next call works.
pub fn different_collective_calls_are_told_to_every_rank(world: World) {
    let mut x = filled(&world, 100, float);
    let before = bytes(x.local());
    let op = if world.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
    let e = x.all_reduce(op).unwrap_err();
    assert!(matches!(e, Error::Mismatch { op: "all_reduce", what: "operator", .. }), "{e}");
    assert_eq!(bytes(x.local()), before);
    let root = usize::from(world.rank() != 0);
    let e = x.broadcast(root).unwrap_err().to_string();
    let other = 1 - root;
    let text = format!("ranks disagree on the root: here rank {root}, on rank");
    assert!(e.contains(&text) && e.ends_with(&format!(" rank {other}")), "{e}");
    let mut y = filled(&world, 100, float);
    let memory = if world.rank() == 0 { &mut x } else { &mut y };
    let e = memory.all_reduce(ReduceOp::Sum).unwrap_err();
    assert!(matches!(e, Error::Mismatch { op: "all_reduce", what: "memory", .. }), "{e}");
    let e = if world.rank() == 0 { world.barrier() } else { x.all_reduce(ReduceOp::Sum) };
    let e = e.unwrap_err();
    assert!(matches!(e, Error::Mismatch { what: "operation", .. }), "{e}");
    assert!(e.to_string().contains("all_reduce of 100 f32, sum"), "{e}");
    assert_eq!(bytes(x.local()), before);
    x.all_reduce(ReduceOp::Sum).unwrap();
    x.share().unwrap().release().unwrap();
}
