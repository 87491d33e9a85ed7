//! Ranks that share a device: kernels wait for those of other ranks, and leave them multiprocessors to run on.

use std::time::Duration;

use symmem::ReduceOp;
use symmem::cuda::Algorithm;
use symmem::cuda::Gpu;
use symmem_testing::{Ranks, test_name};

/// One rank is ahead of the others: what it has put into its stream behind a kernel that takes up its whole share of the
/// device must not take up theirs.
#[test]
#[ignore = "needs a CUDA device"]
fn what_comes_early_leaves_room_for_what_is_late() {
    super::super::each(test_name!(), |world, gpu, stream| {
        let (group, n, own) = (super::super::hasty(world), world.size(), world.rank());
        let mut large =
            gpu.alloc::<f32>(world, (16 << 20) / n).unwrap().rendezvous(&group).unwrap();
        let mut small = gpu.alloc::<f32>(world, 4096).unwrap().rendezvous(&group).unwrap();
        let mut out = gpu.alloc::<f32>(world, 4096 * n).unwrap();
        large.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
        small.all_reduce_with(ReduceOp::Max, Algorithm::TwoShot, stream).unwrap();
        let noted = stream
            .capture(|| large.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream))
            .unwrap();
        for turn in 0..4 * n {
            large.write(&vec![1.0; large.len()], stream).unwrap();
            small.write(&vec![own as f32; 4096], stream).unwrap();
            large.synchronize(stream).unwrap();
            world.barrier().unwrap();
            if own != turn % n {
                std::thread::sleep(Duration::from_millis(20));
            }
            if turn < 3 * n {
                large.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            } else {
                // SAFETY: the memory lives, and all ranks launch theirs.
                unsafe { noted.launch(stream) }.unwrap();
            }
            match turn / n {
                0 => small.all_gather(out.view_mut(), stream).unwrap(),
                1 => small.all_reduce_with(ReduceOp::Max, Algorithm::Staged, stream).unwrap(),
                _ => small.all_reduce_with(ReduceOp::Max, Algorithm::TwoShot, stream).unwrap(),
            }
            large.synchronize(stream).unwrap();
            if turn < n {
                let expected = (0..n).flat_map(|rank| [rank as f32; 4096]);
                assert!(out.read(stream).unwrap().into_iter().eq(expected), "turn {turn}");
            } else {
                assert_eq!(small.read(stream).unwrap(), [n as f32 - 1.0; 4096], "turn {turn}");
            }
            assert!(large.read(stream).unwrap().iter().all(|x| *x == n as f32), "turn {turn}");
        }
    });
}

/// Two groups, whose kernels each take up their whole share of the device.
#[test]
#[ignore = "needs a CUDA device"]
fn groups_beside_each_other_have_room() {
    super::super::each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let half: Vec<usize> = (0..n).filter(|rank| rank % 2 == own % 2).collect();
        let timeout = Duration::from_millis(1500);
        let group = world.subgroup_builder(&half).timeout(timeout).build().unwrap();
        let mut x = gpu.alloc::<f32>(world, (32 << 20) / n).unwrap().rendezvous(&group).unwrap();
        x.write(&vec![1.0; x.len()], stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
        for _ in 0..10 {
            x.all_reduce_with(ReduceOp::Max, Algorithm::TwoShot, stream).unwrap();
        }
        x.synchronize(stream).unwrap();
        assert!(x.read(stream).unwrap().iter().all(|x| *x == 1.0));
    });
}

/// Two groups of the same ranks, in two streams: half of the ranks begin with the one, half with the other.
#[test]
#[ignore = "needs a CUDA device"]
fn groups_of_the_same_ranks_have_room_if_it_is_said() {
    for n in symmem_testing::gpu_ranks() {
        let ranks = Ranks::new(n).env("SYMMEM_RANKS_PER_DEVICE", 2 * n);
        ranks.run(test_name!(), |world| {
            let gpu = Gpu::open(0).unwrap();
            let mut calls = [(); 2].map(|()| {
                let group = super::super::hasty(&world);
                let x = gpu.alloc::<f32>(&world, (16 << 20) / n).unwrap();
                (x.rendezvous(&group).unwrap(), gpu.stream().unwrap())
            });
            if world.rank() % 2 == 1 {
                calls.reverse();
            }
            for turn in 0..10 {
                world.barrier().unwrap();
                for (x, stream) in &mut calls {
                    x.all_reduce_with(ReduceOp::Max, Algorithm::TwoShot, stream).unwrap();
                    if turn % 2 == 0 {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                for (x, stream) in &calls {
                    x.synchronize(stream).unwrap();
                }
            }
            world.barrier().unwrap();
        });
    }
}
