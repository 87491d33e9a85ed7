//! More than the device's cache holds, which is gone through forwards and backwards in turn.

use symmem::cuda::Algorithm;
use symmem::{Error, ReduceOp};
use symmem_testing::test_name;

/// Rank `rank`'s element `i` in turn `turn`: small integers, whose sums are exact.
fn element(rank: usize, turn: usize, i: usize) -> f32 {
    ((i * 7 + i / 4096 + rank * 13 + turn * 5) % 16) as f32
}

#[test]
#[ignore = "needs a CUDA device"]
fn more_than_the_cache_holds_is_reduced_there_and_back() {
    super::super::each(test_name!(), |world, gpu, stream| {
        let mut small = gpu.alloc::<f32>(world, 300_000).unwrap().rendezvous(world).unwrap();
        // 96 MiB of all ranks together, and so much that blocks draw pieces; with a few elements besides whole vectors.
        for mebibytes in [96, 192] {
            let len = (mebibytes << 18) / world.size() + 3;
            let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
            for turn in 0..4 {
                // Kernels of other sizes between, so that not all blocks have synchronised equally often.
                for _ in 0..=turn {
                    small.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
                }
                let op = if turn < 2 { ReduceOp::Sum } else { ReduceOp::Max };
                let own: Vec<f32> = (0..len).map(|i| element(world.rank(), turn, i)).collect();
                x.write(&own, stream).unwrap();
                x.barrier(stream).unwrap();
                x.all_reduce_with(op, Algorithm::TwoShot, stream).unwrap();
                let got = x.read(stream).unwrap();
                let expected = |i| {
                    let all = (0..world.size()).map(|rank| element(rank, turn, i));
                    if turn < 2 { all.sum::<f32>() } else { all.fold(0.0, f32::max) }
                };
                let wrong = (0..len).find(|&i| got[i] != expected(i));
                assert_eq!(
                    wrong,
                    None,
                    "{op}, turn {turn}: {:?}",
                    wrong.map(|i| (got[i], expected(i)))
                );
                x.barrier(stream).unwrap();
            }
        }
    });
}

/// Which way a rank goes is its own affair: one that has made its memory anew begins from the start.
#[test]
#[ignore = "needs a CUDA device"]
fn ranks_that_go_different_ways_have_the_same_shares() {
    super::super::each(test_name!(), |world, gpu, stream| {
        for mebibytes in [96, 192] {
            let len = (mebibytes << 18) / world.size() + 3;
            let buffer = gpu.alloc::<f32>(world, len).unwrap();
            let mut x = buffer.symmetric(world).unwrap();
            for turn in 0..4 {
                if world.rank() == 0 {
                    x = buffer.symmetric(world).unwrap();
                }
                let own: Vec<f32> = (0..len).map(|i| element(world.rank(), turn, i)).collect();
                x.write(&own, stream).unwrap();
                x.barrier(stream).unwrap();
                x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
                let got = x.read(stream).unwrap();
                let expected =
                    |i| (0..world.size()).map(|rank| element(rank, turn, i)).sum::<f32>();
                let wrong = (0..len).find(|&i| got[i] != expected(i));
                assert_eq!(wrong.map(|i| (i, got[i], expected(i))), None, "turn {turn}");
                x.barrier(stream).unwrap();
                x.synchronize(stream).unwrap();
            }
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_does_not_come_to_much_is_a_timeout_and_the_next_call_works() {
    super::super::each(test_name!(), |world, gpu, stream| {
        let group = super::super::hasty(world);
        let len = (192 << 18) / world.size() + 3;
        let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(&group).unwrap();
        if world.size() > 1 {
            for absent in [true, false] {
                if absent == (world.rank() != 0) {
                    x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
                    let e = x.synchronize(stream).unwrap_err();
                    assert!(matches!(e, Error::Timeout { .. } | Error::PeerFailed { .. }), "{e}");
                }
                world.barrier().unwrap();
            }
            group.resync().unwrap();
        }
        x.write(&vec![1.0; len], stream).unwrap();
        world.barrier().unwrap();
        for calls in 1..=2 {
            x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            let got = x.read(stream).unwrap();
            let expected = (world.size() as f32).powi(calls);
            assert_eq!(
                got.iter().find(|&&x| x != expected),
                None,
                "call {calls} after the failure"
            );
            x.barrier(stream).unwrap();
        }
    });
}
