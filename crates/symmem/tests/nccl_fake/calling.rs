//! What calls do with elements.

use half::bf16;
use symmem::nccl::{Operator, Source, Target};
use symmem::{DType, F8E4M3, ReduceOp};
use symmem_testing::FakeNccl;

use super::{alone, devices, ranks};

#[test]
fn every_operator_reduces_in_rank_order() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let mine = [rank.number() as f32 + 1.0, -(rank.number() as f32)];
        let from = rank.buffer(&mine);
        for (op, expected) in [
            (ReduceOp::Sum, [6.0, -3.0]),
            (ReduceOp::Product, [6.0, 0.0]),
            (ReduceOp::Min, [1.0, -2.0]),
            (ReduceOp::Max, [3.0, 0.0]),
            (ReduceOp::Average, [2.0, -1.0]),
        ] {
            let mut to = rank.buffer(&[0.0_f32; 2]);
            let comm = &rank.communicator;
            comm.all_reduce(from.view(), to.view_mut(), op, &rank.stream).unwrap();
            assert_eq!(to.read(&rank.stream).unwrap(), expected, "{op}");
        }
    });
}

#[test]
fn all_reduce_in_place_replaces_the_elements() {
    let fake = FakeNccl::new();
    ranks(&fake, 4, |rank| {
        let mut x = rank.buffer(&[bf16::from_f32(0.5 + rank.number() as f32)]);
        let comm = &rank.communicator;
        comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        comm.synchronize(&rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [bf16::from_f32(8.0)]);
    });
}

#[test]
fn only_the_root_of_a_reduce_is_written() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let (from, mut to) = (rank.buffer(&[rank.number() as i64]), rank.buffer(&[-1_i64]));
        let target = Some(Target::from(to.view_mut()));
        let comm = &rank.communicator;
        comm.reduce(from.view(), target, ReduceOp::Sum, 2, &rank.stream).unwrap();
        let expected = if rank.number() == 2 { 3 } else { -1 };
        assert_eq!(to.read(&rank.stream).unwrap(), [expected]);
    });
}

#[test]
fn broadcast_honours_the_root_and_moves_what_nccl_does_not_know() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let comm = &rank.communicator;
        for root in 0..3 {
            let mut words = rank.buffer(&[rank.number() as i16 + 7; 5]);
            comm.broadcast(words.view_mut(), root, &rank.stream).unwrap();
            assert_eq!(words.read(&rank.stream).unwrap(), [root as i16 + 7; 5]);
            let mut small = rank.buffer(&[F8E4M3(rank.number() as u8); 3]);
            comm.broadcast(small.view_mut(), root, &rank.stream).unwrap();
            assert_eq!(small.read(&rank.stream).unwrap(), [F8E4M3(root as u8); 3]);
        }
    });
}

#[test]
fn all_gather_and_reduce_scatter_take_parts_in_rank_order() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let (comm, n) = (&rank.communicator, rank.number() as i32);
        let (from, mut all) = (rank.buffer(&[n, n + 10]), rank.buffer(&[0_i32; 6]));
        comm.all_gather(from.view(), all.view_mut(), &rank.stream).unwrap();
        assert_eq!(all.read(&rank.stream).unwrap(), [0, 10, 1, 11, 2, 12]);
        let mut part = rank.buffer(&[0_i32; 2]);
        comm.reduce_scatter(all.view(), part.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
        assert_eq!(part.read(&rank.stream).unwrap(), [3 * n, 3 * n + 30]);
    });
}

#[test]
fn a_ring_of_sends_and_receives_is_begun_together() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let (comm, n) = (&rank.communicator, rank.number());
        let (from, mut to) = (rank.buffer(&[n as u32; 4]), rank.buffer(&[9_u32; 4]));
        let sent = rank.nccl.group(|| {
            comm.send(from.view(), (n + 1) % 3, &rank.stream)?;
            comm.recv(to.view_mut(), (n + 2) % 3, &rank.stream)
        });
        sent.unwrap();
        assert_eq!(to.read(&rank.stream).unwrap(), [((n + 2) % 3) as u32; 4]);
    });
}

#[test]
fn all_to_all_exchanges_equal_and_unequal_parts() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let (comm, n) = (&rank.communicator, rank.number());
        let mine: Vec<u8> = (0..6).map(|i| (10 * n + i) as u8).collect();
        let (from, mut to) = (rank.buffer(&mine), rank.buffer(&[0_u8; 6]));
        comm.all_to_all(from.view(), to.view_mut(), &rank.stream).unwrap();
        let (a, b) = (2 * n as u8, 2 * n as u8 + 1);
        assert_eq!(to.read(&rank.stream).unwrap(), [a, b, 10 + a, 10 + b, 20 + a, 20 + b]);

        // Rank i sends i + peer elements to each peer.
        let sent: Vec<usize> = (0..3).map(|peer| n + peer).collect();
        let data: Vec<u8> = (0..3).flat_map(|peer| vec![(10 * n + peer) as u8; n + peer]).collect();
        let (from, mut to) = (rank.buffer(&data), rank.buffer(&vec![0_u8; data.len()]));
        comm.all_to_all_v(from.view(), &sent, to.view_mut(), &sent, &rank.stream).unwrap();
        let expected: Vec<u8> =
            (0..3).flat_map(|peer| vec![(10 * peer + n) as u8; n + peer]).collect();
        assert_eq!(to.read(&rank.stream).unwrap(), expected);
    });
}

#[test]
fn gather_and_scatter_are_each_others_reverse() {
    let fake = FakeNccl::new();
    ranks(&fake, 3, |rank| {
        let (comm, n) = (&rank.communicator, rank.number());
        let (from, mut all) = (rank.buffer(&[n as f64, 0.5]), rank.buffer(&[0.0_f64; 6]));
        let target = (n == 1).then(|| Target::from(all.view_mut()));
        comm.gather(from.view(), target, 1, &rank.stream).unwrap();
        if n == 1 {
            assert_eq!(all.read(&rank.stream).unwrap(), [0.0, 0.5, 1.0, 0.5, 2.0, 0.5]);
        }
        let mut back = rank.buffer(&[0.0_f64; 2]);
        let source = (n == 1).then(|| Source::from(all.view()));
        comm.scatter(source, back.view_mut(), 1, &rank.stream).unwrap();
        assert_eq!(back.read(&rank.stream).unwrap(), [n as f64, 0.5]);
    });
}

#[test]
fn a_scaled_sum_multiplies_with_each_ranks_factor() {
    let fake = FakeNccl::new();
    ranks(&fake, 2, |rank| {
        let comm = &rank.communicator;
        let sum = comm.scaled_sum(rank.number() as f64 + 2.0, DType::F32).unwrap();
        let mut x = rank.buffer(&[1.0_f32, 10.0]);
        comm.all_reduce_in_place(x.view_mut(), &sum, &rank.stream).unwrap();
        assert_eq!(x.read(&rank.stream).unwrap(), [5.0, 50.0]);
        let refused = comm.scaled_sum(1.0, DType::I16).err().unwrap().to_string();
        assert!(refused.contains("expected f32, f64 or i32, got i16"), "{refused}");
    });
}

#[test]
fn one_thread_with_all_devices_calls_in_a_group() {
    let fake = FakeNccl::new();
    let world = alone();
    let (nccl, gpus, streams, comms) = devices(&fake, 4);
    let mut buffers: Vec<_> =
        (0..4).map(|i| super::buffer(&world, &gpus[i], &streams[i], &[i as i32, 1])).collect();
    let all = comms.iter().zip(&mut buffers).zip(&streams);
    let done = nccl.group(|| {
        for ((comm, buffer), stream) in all {
            comm.all_reduce_in_place(buffer.view_mut(), ReduceOp::Sum, stream)?;
        }
        Ok(())
    });
    done.unwrap();
    for (buffer, stream) in buffers.iter().zip(&streams) {
        assert_eq!(buffer.read(stream).unwrap(), [6, 4]);
    }
    drop(comms);
    assert_eq!(fake.live().communicators, 0);
}

#[test]
fn what_does_not_fit_is_refused_before_nccl_sees_it() {
    let fake = FakeNccl::new();
    ranks(&fake, 2, |rank| {
        let comm = &rank.communicator;
        let (from, mut to) = (rank.buffer(&[1.0_f32; 4]), rank.buffer(&[0.0_f32; 3]));
        let mut words = rank.buffer(&[0_i16; 4]);
        let said = |result: symmem::Result<()>| result.unwrap_err().to_string();
        let text = said(comm.all_reduce(from.view(), to.view_mut(), ReduceOp::Sum, &rank.stream));
        let expected = "all_reduce: expected 4 elements of f32 to write, got 3 of f32";
        assert!(text.ends_with(expected), "{text}");
        let text = said(comm.all_gather(from.view(), to.view_mut(), &rank.stream));
        assert!(text.ends_with("expected 8 elements of f32 to write, got 3 of f32"), "{text}");
        let text = said(comm.broadcast(to.view_mut(), 2, &rank.stream));
        assert!(text.ends_with("broadcast: expected a rank in [0, 2), got 2"), "{text}");
        let text = said(comm.all_reduce_in_place(words.view_mut(), ReduceOp::Sum, &rank.stream));
        assert!(text.ends_with("Unconvertible NCCL type i16"), "{text}");
        let text = said(comm.all_reduce_in_place(to.view_mut(), ReduceOp::Xor, &rank.stream));
        assert!(text.ends_with("expected sum, prod, min, max or avg, got xor"), "{text}");
        let text = said(comm.reduce(from.view(), None, ReduceOp::Sum, rank.number(), &rank.stream));
        assert!(text.contains("expected elements to write at the root, got none"), "{text}");
        let counts = [1, 9];
        let text =
            said(comm.all_to_all_v(from.view(), &counts, to.view_mut(), &[0, 0], &rank.stream));
        assert!(text.contains("2 counts of at most 4 elements together"), "{text}");
        let other = super::gpu(0, 1);
        let text = said(comm.broadcast(to.view_mut(), 0, &other.stream().unwrap()));
        assert!(text.contains("expected a stream of cuda:"), "{text}");
        rank.world.barrier().unwrap();
        for call in ["ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclReduce", "ncclSend"] {
            assert_eq!(fake.calls(call), 0, "{call}");
        }
        rank.world.barrier().unwrap();
        // An operator by its number is NCCL's to check, and the communicator works on.
        let unknown = Operator::from_code(77);
        let text = said(comm.all_reduce_in_place(to.view_mut(), unknown, &rank.stream));
        assert!(text.contains("all_reduce: NCCL Error 4: invalid argument"), "{text}");
        comm.all_reduce_in_place(to.view_mut(), ReduceOp::Sum, &rank.stream).unwrap();
    });
}
