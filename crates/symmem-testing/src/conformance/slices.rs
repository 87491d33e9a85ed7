//! What the collectives on ordinary memory promise.

use bytemuck::{Pod, Zeroable};
use symmem::{Element, Error, ReduceOp, World};

/// Elements of a length that does not fit a staging buffer at once, different for each rank.
const LONG: usize = 300_007;

fn value(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 1009) % 4099) as f32 / 7.0 - 250.0
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Collectives on slices give the bits of those on symmetric memory, whatever the length.
pub fn slices_give_the_bits_of_symmetric_memory(world: World) {
    let (n, own) = (world.size(), world.rank());
    for block in [0, 1, 33, LONG / n] {
        let input = values(own, n * block);
        let mut x = world.alloc::<f32>(n * block).unwrap().rendezvous(&world).unwrap();
        x.local_mut().copy_from_slice(&input);

        let (mut sums, mut expected) = (input.clone(), vec![0.0; n * block]);
        world.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        x.all_reduce_into(ReduceOp::Sum, &mut expected).unwrap();
        assert_eq!(bits(&sums), bits(&expected), "all_reduce of {n} times {block}");

        let (mut sums, mut expected) = (vec![0.0; block], vec![0.0; block]);
        world.reduce_scatter(&input, ReduceOp::Average, &mut sums).unwrap();
        x.reduce_scatter(ReduceOp::Average, &mut expected).unwrap();
        assert_eq!(bits(&sums), bits(&expected), "reduce_scatter of {n} times {block}");

        let (mut blocks, mut expected) = (vec![0.0; n * block], vec![0.0; n * block]);
        world.all_to_all(&input, &mut blocks).unwrap();
        x.all_to_all(&mut expected).unwrap();
        assert_eq!(bits(&blocks), bits(&expected), "all_to_all of {n} times {block}");

        let mut all = vec![0.0; n * n * block];
        world.all_gather(&input, &mut all).unwrap();
        let expected: Vec<f32> = (0..n).flat_map(|r| values(r, n * block)).collect();
        assert_eq!(bits(&all), bits(&expected), "all_gather of {n} times {block}");

        for root in 0..n {
            let mut data = input.clone();
            world.broadcast(&mut data, root).unwrap();
            assert_eq!(bits(&data), bits(&values(root, n * block)), "broadcast from {root}");
        }
    }
    let mut bytes = vec![own as u8 + 1; 3 << 20];
    world.all_reduce(&mut bytes, ReduceOp::Max).unwrap();
    assert!(
        bytes.iter().all(|b| *b == n as u8),
        "of another type, through the same staging buffers"
    );
}

/// What is gathered and reduced is what all ranks had at the call, although each writes to its slice as soon as it is over.
pub fn a_slice_may_change_once_its_call_is_over(world: World) {
    let (n, own) = (world.size(), world.rank());
    for block in [1, 50, 5000] {
        for round in 0..10 {
            let len = n * block;
            let mut input = values(own + round, len);
            let mut all = vec![0.0; n * len];
            world.all_gather(&input, &mut all).unwrap();
            input.fill(f32::NAN);
            let expected: Vec<f32> = (0..n).flat_map(|r| values(r + round, len)).collect();
            assert_eq!(bits(&all), bits(&expected), "{len} in round {round}");
            let mut input = values(own + round, len);
            let mut sums = vec![0.0; block];
            world.reduce_scatter(&input, ReduceOp::Sum, &mut sums).unwrap();
            input.fill(f32::NAN);
            let sum = |i| (1..n).fold(value(round, i), |sum, r| sum + value(r + round, i));
            let expected: Vec<f32> = (own * block..(own + 1) * block).map(sum).collect();
            assert_eq!(bits(&sums), bits(&expected), "{len} in round {round}");
        }
    }
}

/// Every group has staging buffers of its own, which go with it.
pub fn slices_of_different_groups_are_kept_apart(world: World) {
    for _ in 0..3 {
        let pair = world.subgroup(&[world.rank()]).unwrap();
        let mut alone = [world.rank() as u64];
        pair.all_reduce(&mut alone, ReduceOp::Sum).unwrap();
        assert_eq!(alone, [world.rank() as u64]);
        let mut together = alone;
        world.all_reduce(&mut together, ReduceOp::Sum).unwrap();
        assert_eq!(together[0], (0..world.size() as u64).sum::<u64>());
    }
}

/// Wrong lengths, roots and operators are refused; ranks that differ all learn it; the next call works.
pub fn bad_calls_with_slices_are_named(world: World) {
    let n = world.size();
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    let mut data = values(world.rank(), 2 * n);
    assert!(text(world.all_reduce(&mut data, ReduceOp::Or)).contains("an operator that f32 has"));
    assert!(text(world.broadcast(&mut data, n)).contains("a rank in [0"));
    assert!(text(world.all_gather(&data, &mut [0.0])).contains("an output of"));
    assert!(text(world.all_to_all(&data, &mut [0.0])).contains("an output of"));
    let odd = vec![0.0; n + 1];
    let divisible = text(world.reduce_scatter(&odd, ReduceOp::Sum, &mut [0.0]));
    assert!(divisible.contains("divisible by the"), "{divisible}");
    let before = bits(&data);
    let e = world.all_reduce(&mut data[world.rank()..], ReduceOp::Sum).unwrap_err();
    assert!(matches!(e, Error::Mismatch { op: "all_reduce", .. }), "{e}");
    assert_eq!(bits(&data), before);
    world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    world.barrier().unwrap();
}

/// Reduce, gather and scatter give the root, and each rank, what their definition says, whatever the length.
pub fn slices_go_to_the_root_and_come_from_it(world: World) {
    let (n, own) = (world.size(), world.rank());
    for (len, root) in [0, 1, 5, 33, LONG].into_iter().flat_map(|l| (0..n).map(move |r| (l, r))) {
        let input = values(own, len);
        let mut sums = input.clone();
        world.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        let mut out = vec![-1.0; if own == root { len } else { 1 }];
        world.reduce(&input, ReduceOp::Sum, root, &mut out).unwrap();
        let expected = if own == root { sums } else { vec![-1.0] };
        assert_eq!(bits(&out), bits(&expected), "reduce of {len} to {root}");

        let mut all = vec![-1.0; if own == root { n * len } else { 0 }];
        world.gather(&input, root, &mut all).unwrap();
        let everyone: Vec<f32> = (0..n).flat_map(|rank| values(rank, len)).collect();
        assert!(own != root || bits(&all) == bits(&everyone), "gather of {len} to {root}");

        let blocks = if own == root { everyone } else { Vec::new() };
        let mut block = vec![-1.0; len];
        world.scatter(&blocks, root, &mut block).unwrap();
        assert_eq!(bits(&block), bits(&input), "scatter of {len} from {root}");
    }
}

/// A scan has the bits of a reduction of the ranks up to each.
pub fn scans_reduce_the_ranks_up_to_each(world: World) {
    let own = world.rank();
    for len in [0, 1, 6, 33, LONG] {
        let sum = |ranks: usize| -> Vec<f32> {
            let at = |i| (1..ranks).fold(value(0, i), |sum, rank| sum + value(rank, i));
            (0..len).map(at).collect()
        };
        let mut data = values(own, len);
        world.scan(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(bits(&data), bits(&sum(own + 1)), "scan of {len}");
        let mut data = values(own, len);
        world.exclusive_scan(&mut data, ReduceOp::Sum).unwrap();
        let expected = if own == 0 { values(0, len) } else { sum(own) };
        assert_eq!(bits(&data), bits(&expected), "exclusive scan of {len}");
    }
    let mut data = [1.0, 2.0];
    let e = world.scan(&mut data, ReduceOp::Average).unwrap_err().to_string();
    assert!(e.contains("an operator other than the average"), "{e}");
    let odd = own % 2 == 1;
    let scanned = if odd {
        world.scan(&mut data, ReduceOp::Sum)
    } else {
        world.exclusive_scan(&mut data, ReduceOp::Sum)
    };
    assert!(scanned.unwrap_err().to_string().contains("kind of scan"));
    assert_eq!(data, [1.0, 2.0]);
}

/// Inputs of different lengths reach everyone, or those they are for, and the lengths with them.
pub fn slices_of_different_lengths_arrive(world: World) {
    let (n, own) = (world.size(), world.rank());
    for scale in [0, 1, 7, 1000, LONG / n] {
        // Some ranks have nothing, for some or for all.
        let count = |from: usize, to: usize| (from * 5 + to * 3) % 4 * scale;
        let len = |rank: usize| count(rank, rank + 1);
        let mut all = vec![9.0; 3];
        let lengths = world.all_gather_v(&values(own, len(own)), &mut all).unwrap();
        assert_eq!(lengths, (0..n).map(len).collect::<Vec<_>>());
        let expected: Vec<f32> = (0..n).flat_map(|rank| values(rank, len(rank))).collect();
        assert_eq!(bits(&all), bits(&expected), "all_gather_v, scale {scale}");

        let counts: Vec<usize> = (0..n).map(|to| count(own, to)).collect();
        let mut out = Vec::new();
        let received =
            world.all_to_all_v(&values(own, counts.iter().sum()), &counts, &mut out).unwrap();
        let mut expected = Vec::new();
        for from in 0..n {
            let first: usize = (0..own).map(|to| count(from, to)).sum();
            expected.extend((first..first + count(from, own)).map(|i| value(from, i)));
        }
        assert_eq!(bits(&out), bits(&expected), "all_to_all_v, scale {scale}");
        assert_eq!(received, (0..n).map(|from| count(from, own)).collect::<Vec<_>>());
    }
}

/// Counts that do not fit on one rank are an error on all, and the next call works.
pub fn lengths_that_do_not_fit_are_told_to_every_rank(world: World) {
    let (n, own) = (world.size(), world.rank());
    let input = [1_u16; 4];
    let right = |to: usize| if to == 0 { 4 } else { 0 };
    let cases: [Vec<usize>; 3] =
        [vec![1; n + 1], (0..n).map(|to| right(to) + 1).collect(), vec![usize::MAX; n]];
    for wrong in cases {
        let counts = if own == n - 1 { wrong } else { (0..n).map(right).collect() };
        let mut out = vec![5];
        let e = world.all_to_all_v(&input, &counts, &mut out).unwrap_err();
        match e {
            Error::Usage { op: "all_to_all_v", rank: Some(rank), .. } => {
                assert_eq!((rank, own), (n - 1, n - 1), "{e}");
            }
            Error::PeerFailed { op: "all_to_all_v", rank, .. } => {
                assert!(rank == n - 1 && own != n - 1, "{e}");
            }
            other => panic!("{other}"),
        }
        assert!(out.is_empty());
    }
    let mut out = Vec::new();
    let e = if own == 0 {
        world.all_gather_v(&input, &mut out).unwrap_err()
    } else {
        world.all_gather_v(&[1_i8; 4], &mut Vec::new()).unwrap_err()
    };
    assert!(matches!(e, Error::Mismatch { what: "element type", .. }), "{e}");
    world.all_gather_v(&input, &mut out).unwrap();
    assert_eq!(out, vec![1; 4 * n]);
}

/// Larger than a staging buffer.
#[derive(Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Huge([[[u64; 32]; 32]; 20]);

impl Element for Huge {}

/// One element may be larger than what is staged at once.
pub fn elements_larger_than_a_staging_buffer_arrive_whole(world: World) {
    let (n, own) = (world.size(), world.rank());
    assert!(size_of::<Huge>() > 128 << 10);
    let huge = |rank: usize, i: usize| {
        let mut huge = vec![Huge::zeroed()];
        let words: &mut [u64] = bytemuck::cast_slice_mut(&mut huge);
        words
            .iter_mut()
            .enumerate()
            .for_each(|(at, w)| *w = (at * 10 + i) as u64 * 100 + rank as u64);
        huge[0]
    };
    let input: Vec<Huge> = (0..n).map(|i| huge(own, i)).collect();
    let mut all = vec![Huge::zeroed(); n * n];
    world.all_gather(&input, &mut all).unwrap();
    assert!((0..n * n).all(|i| all[i] == huge(i / n, i % n)));
    let mut blocks = vec![Huge::zeroed(); n];
    world.all_to_all(&input, &mut blocks).unwrap();
    assert!((0..n).all(|rank| blocks[rank] == huge(rank, own)));
    let mut one = input.clone();
    world.broadcast(&mut one, n - 1).unwrap();
    assert!((0..n).all(|i| one[i] == huge(n - 1, i)));
    let mut out = Vec::new();
    let lengths = world.all_gather_v(&input[..own], &mut out).unwrap();
    assert_eq!(lengths, (0..n).collect::<Vec<_>>());
    let expected = (0..n).flat_map(|rank| (0..rank).map(move |i| (rank, i)));
    assert!(out.iter().zip(expected).all(|(got, (rank, i))| *got == huge(rank, i)));
}
