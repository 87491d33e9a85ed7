//! More than the device's cache holds, which is gone through forwards and backwards in turn.

use symmem::{Algorithm, ReduceOp};
use symmem_testing::test_name;

/// Rank `rank`'s element `i` in turn `turn`: small integers, whose sums are exact.
fn element(rank: usize, turn: usize, i: usize) -> f32 {
    ((i * 7 + i / 4096 + rank * 13 + turn * 5) % 16) as f32
}

#[test]
#[ignore = "needs a CUDA device"]
fn more_than_the_cache_holds_is_reduced_there_and_back() {
    super::super::each(test_name!(), |world, gpu, stream| {
        // 96 MiB of all ranks together, and a few elements beside whole vectors.
        let len = (24 << 20) / world.size() + 3;
        let mut small = gpu.alloc::<f32>(world, 300_000).unwrap().rendezvous(world).unwrap();
        let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        for turn in 0..4 {
            // Kernels of other sizes between, so that not all blocks have met equally often.
            for _ in 0..=turn {
                small.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            }
            let own: Vec<f32> = (0..len).map(|i| element(world.rank(), turn, i)).collect();
            x.write(&own, stream).unwrap();
            x.barrier(stream).unwrap();
            x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            let got = x.read(stream).unwrap();
            let sum = |i| (0..world.size()).map(|rank| element(rank, turn, i)).sum::<f32>();
            let wrong = (0..len).find(|&i| got[i] != sum(i));
            assert_eq!(wrong, None, "turn {turn}: {:?}", wrong.map(|i| (got[i], sum(i))));
            x.barrier(stream).unwrap();
        }
    });
}
