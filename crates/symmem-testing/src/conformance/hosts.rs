//! What groups that span hosts promise beyond what every group does.

use symmem::internals::plan::{Across, PIECE, Spread, across};
use symmem::{DType, Error, ReduceOp, World, with_element};
use symmem_chaos::element::{Plain, Source};

use super::every_backend::same;

/// Lengths for which the ways between hosts differ, and at which staging buffers end.
const LENGTHS: [usize; 7] = [3, 7, 100, 3_001, 20_000, 70_001, 300_007];

fn source(len: usize) -> Source {
    Source { seed: 7, call: len as u64 }
}

/// By the definition.
fn reduced<T: Plain>(world: &World, op: ReduceOp, len: usize) -> Vec<T> {
    let ranks: Vec<usize> = (0..world.size()).collect();
    (0..len).map(|i| source(len).reduced(&ranks, op, i)).collect()
}

/// Reductions give the bits of their definition wherever the ranks are, for every type and operator, in both kinds of memory.
pub fn reductions_give_the_same_bits_wherever_ranks_are(world: World) {
    for &dtype in DType::ALL {
        let is_usual = matches!(dtype, DType::F32 | DType::BF16);
        let lengths = if is_usual { &LENGTHS[..] } else { &[100, 20_000] };
        with_element!(dtype, T => all_operators::<T>(&world, lengths)).unwrap();
    }
}

fn all_operators<T: Plain>(world: &World, lengths: &[usize]) {
    for &len in lengths {
        let mut x = world.alloc::<T>(len).unwrap().rendezvous(world).unwrap();
        for op in ReduceOp::ALL.into_iter().filter(|op| op.applies_to(T::DTYPE.kind())) {
            let expected = reduced::<T>(world, op, len);
            let mut data = source(len).elements::<T>(world.rank(), len);
            x.local_mut().copy_from_slice(&data);
            let mut out = data.clone();
            x.all_reduce_into(op, &mut out).unwrap();
            same(&out, &expected, &format!("{op} of {len} into other memory"));
            same(x.local(), &data, "the input");
            x.all_reduce(op).unwrap();
            same(x.local(), &expected, &format!("{op} of {len} in symmetric memory"));
            world.all_reduce(&mut data, op).unwrap();
            same(&data, &expected, &format!("{op} of {len} in a slice"));
            if len > 100 {
                break; // the operators differ in the loop alone
            }
        }
    }
}

/// Ranks that make different calls leave what they would have written as it was.
pub fn nothing_is_written_by_calls_that_differ(world: World) {
    for len in [3, 20_000] {
        let mut x = world.alloc::<u32>(len).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(world.rank() as u32 + 1);
        let mut out = vec![77; len];
        let op = if world.rank() == 0 { ReduceOp::Max } else { ReduceOp::Sum };
        let error = x.all_reduce_into(op, &mut out).unwrap_err();
        assert!(matches!(error, Error::Mismatch { what: "operator", .. }), "{error}");
        assert!(out.iter().all(|value| *value == 77), "{len} elements");
        assert!(x.local().iter().all(|value| *value == world.rank() as u32 + 1));
        x.all_reduce_into(ReduceOp::Max, &mut out).unwrap();
        assert!(out.iter().all(|value| *value == world.size() as u32));
    }
}

/// What is moved arrives whole, wherever the ranks are, in both kinds of memory.
pub fn data_arrives_wherever_ranks_are(world: World) {
    let (n, own) = (world.size(), world.rank());
    for len in LENGTHS.map(|len| len / n + 1) {
        let of: Vec<Vec<u32>> = (0..n).map(|rank| source(len).elements(rank, n * len)).collect();
        let (mine, block) = (&of[own], |rank: usize, i: usize| &of[rank][i * len..][..len]);
        let mut x = world.alloc::<u32>(n * len).unwrap().rendezvous(&world).unwrap();
        let mut first = world.alloc::<u32>(len).unwrap().rendezvous(&world).unwrap();
        let fresh = |x: &mut symmem::Symmetric<u32>| x.local_mut().copy_from_slice(mine);

        let all: Vec<u32> = (0..n).flat_map(|rank| block(rank, 0)).copied().collect();
        let (mut out, mut too) = (vec![0; n * len], vec![0; n * len]);
        world.all_gather(&mine[..len], &mut out).unwrap();
        first.local_mut().copy_from_slice(&mine[..len]);
        first.all_gather(&mut too).unwrap();
        assert!(out == all && too == all, "all_gather of {len}");

        let blocks: Vec<u32> = (0..n).flat_map(|rank| block(rank, own)).copied().collect();
        world.all_to_all(mine, &mut out).unwrap();
        fresh(&mut x);
        x.all_to_all(&mut too).unwrap();
        assert!(out == blocks && too == blocks, "all_to_all of {len}");

        let sum =
            |i: usize| (0..n).fold(0_u32, |sum, rank| sum.wrapping_add(of[rank][own * len + i]));
        let mut part = vec![0; len];
        world.reduce_scatter(mine, ReduceOp::Sum, &mut part).unwrap();
        x.reduce_scatter(ReduceOp::Sum, &mut too[..len]).unwrap();
        assert!((0..len).step_by(97).all(|i| part[i] == sum(i)), "reduce_scatter of {len}");
        assert_eq!(part, too[..len]);

        for root in [0, n - 1, n / 2] {
            let mut data = mine.clone();
            world.broadcast(&mut data, root).unwrap();
            fresh(&mut x);
            x.broadcast(root).unwrap();
            assert!(data == of[root] && x.local() == of[root], "broadcast of {len} from {root}");
            fresh(&mut x);
            x.scatter(root, &mut part).unwrap();
            assert_eq!(part, block(root, own), "scatter of {len} from {root}");
            first.local_mut().copy_from_slice(&mine[..len]);
            let mut all_there = vec![0; if own == root { n * len } else { 0 }];
            first.gather(root, &mut all_there).unwrap();
            assert!(own != root || all_there == all, "gather of {len} to {root}");
            let mut sums = vec![0; if own == root { n * len } else { 0 }];
            x.reduce(ReduceOp::Max, root, &mut sums).unwrap();
            let most = |i: usize| (0..n).map(|rank| of[rank][i]).max();
            assert!(sums.iter().enumerate().step_by(101).all(|(i, s)| Some(*s) == most(i)));
        }
    }
}

/// The lengths of these checks take every way that there is.
pub fn every_way_between_hosts_is_taken() {
    let chosen = |ranks, hosts, is_even, can_chain| -> Vec<Across> {
        let spread = Spread { ranks, hosts, is_even, can_chain, stage: PIECE };
        LENGTHS.iter().filter_map(|len| Some(across(4 * len, &spread).first()?.0)).collect()
    };
    let chained = chosen(4, 2, true, true);
    assert!(
        chained.contains(&Across::RawRelayed) && chained.contains(&Across::Chain),
        "{chained:?}"
    );
    assert!(chosen(4, 2, true, false).contains(&Across::TwoHopsRelayed));
    assert!(chosen(4, 4, true, true).contains(&Across::TwoHops));
    let uneven = chosen(4, 2, false, false);
    assert!(uneven.contains(&Across::Raw) && uneven.contains(&Across::TwoHops), "{uneven:?}");
}
