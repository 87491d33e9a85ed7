//! Collectives that move blocks, and what ranks may do right after one.

use symmem::ReduceOp;
use symmem_chaos::element::Plain;

use super::platform::{Call, Memory, Platform, Way};
use super::{reduced, same, source};

/// Makes a call and compares what it wrote; `None` if this rank's output must stay as it was.
fn gives<T: Plain>(x: &mut impl Memory<T>, call: Call, len: usize, expected: Option<Vec<T>>) {
    let untouched = vec![T::random(424_242); len];
    let mut out = untouched.clone();
    x.call(call, &mut out).unwrap();
    same(&out, &expected.unwrap_or(untouched), &format!("{call:?} into {len}"));
}

fn blocks<T: Plain>(platform: &impl Platform, block: usize) {
    let (n, own) = (platform.world().size(), platform.world().rank());
    let (len, source) = (n * block, source(block));
    let data = |rank: usize| source.elements::<T>(rank, len);
    let of = |all: &[T], rank: usize| all[rank * block..][..block].to_vec();
    let everyone: Vec<T> = (0..n).flat_map(data).collect();
    let sums = reduced::<T>(platform.world(), source, ReduceOp::Sum, len);
    let mut x = platform.filled(&data(own));

    gives(&mut x, Call::ReduceScatter(ReduceOp::Sum), block, Some(of(&sums, own)));
    let received = (0..n).flat_map(|rank| of(&data(rank), own)).collect();
    gives(&mut x, Call::AllToAll, len, Some(received));
    gives(&mut x, Call::AllGather, n * len, Some(everyone.clone()));
    for root in [0, n - 1] {
        let on_root = |all: &[T]| (own == root).then(|| all.to_vec());
        gives(&mut x, Call::Reduce(ReduceOp::Sum, root), len, on_root(&sums));
        gives(&mut x, Call::Gather(root), n * len, on_root(&everyone));
        gives(&mut x, Call::Scatter(root), block, Some(of(&data(root), own)));
    }
    same(&x.read().unwrap(), &data(own), "the input");
    x.broadcast(n / 2).unwrap();
    same(&x.read().unwrap(), &data(n / 2), "broadcast");

    let (rows, columns) = (3, n * block);
    let whole = reduced::<T>(platform.world(), source, ReduceOp::Max, rows * columns);
    let mut x = platform.filled(&source.elements::<T>(own, rows * columns));
    let parts = (0..rows).flat_map(|row| of(&whole[row * columns..], own)).collect();
    gives(&mut x, Call::ReduceColumns(ReduceOp::Max, columns), rows * block, Some(parts));
}

/// Reduce-scatter, flat and by columns, all-to-all, all-gather, and everything with a root.
pub fn blocks_go_where_they_belong(platform: &impl Platform) {
    for block in [0, 1, 3, 33, 96, 500, 4099] {
        blocks::<f32>(platform, block);
        blocks::<u8>(platform, block);
    }
    blocks::<half::bf16>(platform, 4096);
    blocks::<u64>(platform, 20_001);
}

/// Collectives follow each other without a barrier: none sees what belongs to the next.
pub fn small_collectives_follow_each_other(platform: &impl Platform) {
    let (n, own) = (platform.world().size(), platform.world().rank() as u32);
    for len in [2, 40] {
        let mut x = platform.memory::<u32>(platform.world(), len * n).unwrap();
        let mut out = vec![0; len * n * n];
        for round in 0..100_u32 {
            x.write(&vec![round + own; len * n]);
            x.all_reduce(ReduceOp::Max, Way::Auto).unwrap();
            assert_eq!(x.read().unwrap(), vec![round + n as u32 - 1; len * n], "round {round}");
            x.write(&vec![1000 * round + own; len * n]);
            x.call(Call::AllGather, &mut out).unwrap();
            let told = |(i, v): (usize, &u32)| *v == 1000 * round + (i / (len * n)) as u32;
            assert!(out.iter().enumerate().all(told), "round {round}");
            let root = round as usize % n;
            x.write(&vec![7 * round + own; len * n]);
            x.broadcast(root).unwrap();
            assert_eq!(x.read().unwrap(), vec![7 * round + root as u32; len * n], "round {round}");
        }
    }
}

/// What is pulled is what all ranks had at the call, although each writes to its part as soon as its own call is over.
pub fn a_rank_may_change_its_part_once_its_call_is_over(platform: &impl Platform) {
    let (n, own) = (platform.world().size(), platform.world().rank());
    for block in [1, 25, 5000] {
        let len = n * block;
        let mut x = platform.memory::<f32>(platform.world(), len).unwrap();
        for round in 0..10 {
            let source = source(100 * block + round);
            let data = |rank: usize| source.elements::<f32>(rank, len);
            x.write(&data(own));
            gives(&mut x, Call::AllGather, n * len, Some((0..n).flat_map(data).collect()));
            x.write(&vec![f32::NAN; len]);
            for op in [ReduceOp::Sum, ReduceOp::Average] {
                let sums = reduced::<f32>(platform.world(), source, op, len);
                x.write(&data(own));
                let expected = sums[own * block..][..block].to_vec();
                gives(&mut x, Call::ReduceScatter(op), block, Some(expected));
                x.write(&vec![f32::NAN; len]);
            }
        }
    }
}
