//! Ranks that only the network connects: no address, no kernel, but NVSHMEM's own operations.

use symmem::{Error, ReduceOp};
use symmem_testing::test_name;

use super::{open, ranks};

const LEN: usize = 64;

#[test]
fn a_rank_behind_the_network_has_no_address_and_is_reached_all_the_same() {
    ranks(3).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 2).run(test_name!(), |world| {
        let (driver, gpu, stream) = open(&world);
        let mut x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        let reached = |rank: usize| (rank == 2) == (world.rank() == 2);
        for (rank, address) in x.handle().buffer_ptrs().into_iter().enumerate() {
            assert_eq!(address != 0, reached(rank), "rank {rank}");
            assert_eq!(x.handle().is_reachable(rank), reached(rank));
        }
        assert!(!x.handle().is_within_direct_access());
        let own = gpu.alloc::<u32>(&world, LEN).unwrap();
        x.write(&[world.rank() as u32 + 7; LEN], &stream).unwrap();
        world.barrier().unwrap();
        // Each puts one element with each, and gets one of each.
        for to in 0..3 {
            // SAFETY: this rank's own elements, which live until the stream has done it.
            let one = unsafe {
                symmem::cuda::View::from_raw(x.handle().buffer_ptrs()[world.rank()] as u64, 1)
            };
            x.put(to, 10 + world.rank(), one, &stream).unwrap();
        }
        world.barrier().unwrap();
        let got = x.read(&stream).unwrap();
        assert_eq!(got[10..13], [7, 8, 9]);
        for from in 0..3 {
            // SAFETY: `own` lives until the stream has done it.
            let out =
                unsafe { symmem::cuda::ViewMut::from_raw(own.address() + 4 * from as u64, 1) };
            x.get(from, 0, out, &stream).unwrap();
        }
        assert_eq!(own.read(&stream).unwrap()[..3], [7, 8, 9]);
        assert_eq!(driver.launches(), []);
        world.barrier().unwrap();
    });
}

#[test]
fn what_kernels_do_together_is_refused_with_the_rank_and_the_way_out() {
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 1).run(test_name!(), |world| {
        let (driver, gpu, stream) = open(&world);
        let mut x = gpu.alloc::<u32>(&world, LEN).unwrap().rendezvous(&world).unwrap();
        let peer = 1 - world.rank();
        let refused = [
            x.all_reduce(ReduceOp::Sum, &stream),
            x.barrier(&stream),
            x.broadcast(0, &stream),
            x.put_signal(peer, 0, &stream),
            x.wait_signal(peer, 0, &stream),
            x.barrier_on_channel(0, &stream),
            x.memset32(peer, 0, 1, 1, &stream),
            x.write_value32(peer, 0, 1, &stream),
        ];
        for refused in refused {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains("only the network connects rank"), "{e}");
            assert!(e.to_string().contains("Symmetric::nvshmem"), "{e}");
        }
        assert_eq!(driver.launches(), []);
        // The way out.
        x.write(&[world.rank() as u32 + 1; LEN], &stream).unwrap();
        x.nvshmem().unwrap().broadcast(1, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [2; LEN]);
        world.barrier().unwrap();
    });
}

#[test]
fn groups_of_ranks_that_reach_each_other_work_as_ever() {
    ranks(3).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 2).run(test_name!(), |world| {
        let (driver, gpu, stream) = open(&world);
        let buffer = gpu.alloc::<u32>(&world, LEN).unwrap();
        if world.rank() < 2 {
            let group = world.subgroup(&[0, 1]).unwrap();
            let x = buffer.rendezvous(&group).unwrap();
            assert!(x.handle().is_within_direct_access());
            x.barrier(&stream).unwrap();
            assert_eq!(driver.launches().len(), 1);
            group.barrier().unwrap();
        }
        world.barrier().unwrap();
    });
}

#[test]
fn rows_go_to_experts_and_back_over_the_network() {
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_UNREACHABLE", 1).run(test_name!(), |world| {
        let (driver, gpu, stream) = open(&world);
        let (own, row, experts, align) = (world.rank() as i64, 3, 2, 4);
        // Rank 0 sends 1, 2 and 3, 0 rows to the experts of ranks 0 and 1; rank 1 sends 2, 3 and 4, 1.
        let counts: Vec<i64> = [1, 2, 3, 0].iter().map(|rows| rows + own).collect();
        let total = counts.iter().sum::<i64>() as usize;
        let make = |len: usize| gpu.alloc::<u32>(&world, len).unwrap().rendezvous(&world).unwrap();
        let (mut x, mut there) = (make(10 * row), make(16 * row));
        let mut splits = gpu.alloc::<i64>(&world, 4).unwrap().rendezvous(&world).unwrap();
        let mut received = gpu.alloc::<i64>(&world, 8).unwrap().rendezvous(&world).unwrap();
        let sent: Vec<u32> = (0..10 * row).map(|i| (1000 * own as usize + i) as u32).collect();
        x.write(&sent, &stream).unwrap();
        splits.write(&counts, &stream).unwrap();
        let (out, told) = (there.view_mut(), received.view_mut());
        x.all_to_all_v_2d(row, &mut splits, align, out, told, &stream).unwrap();
        let expected: [[i64; 8]; 2] = [[1, 2, 2, 3, 0, 1, 4, 6], [3, 4, 0, 1, 0, 3, 8, 8]];
        assert_eq!(received.read(&stream).unwrap(), expected[world.rank()]);
        let mut back = gpu.alloc::<u32>(&world, 10 * row).unwrap();
        let mut last = gpu.alloc::<i64>(&world, 2 * 2 * experts).unwrap();
        let (out, told) = (back.view_mut(), last.view_mut());
        there.all_to_all_v_2d_offset(row, &mut received, out, told, &stream).unwrap();
        assert_eq!(back.read(&stream).unwrap()[..total * row], sent[..total * row]);
        assert_eq!(last.read(&stream).unwrap()[..4], counts);
        assert_eq!(driver.launches(), []);
        // What does not fit is an error on all ranks, and the next works.
        splits.write(&[own, 0, 100, 0], &stream).unwrap();
        let (out, told) = (there.view_mut(), received.view_mut());
        let e = x.all_to_all_v_2d(row, &mut splits, align, out, told, &stream).unwrap_err();
        assert!(e.to_string().contains("splits of rank 0 within its 10 rows"), "{e}");
        let mut one = gpu.alloc::<i64>(&world, 2).unwrap().rendezvous(&world).unwrap();
        let mut got = gpu.alloc::<i64>(&world, 4).unwrap();
        one.write(&[1, 1], &stream).unwrap();
        x.all_to_all_v(row, &mut one, there.view_mut(), got.view_mut(), &stream).unwrap();
        assert_eq!(got.read(&stream).unwrap(), [1, 1, 0, 1]);
        let first = own as u32 * 3;
        assert_eq!(
            there.read(&stream).unwrap()[..6],
            [0, 1, 2, 1000, 1001, 1002].map(|i| i + first)
        );
    });
}
