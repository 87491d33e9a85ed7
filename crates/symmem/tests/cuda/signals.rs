//! Signals, puts, gets and words on a device: who takes a signal sees what was before it.

use symmem::cuda::Algorithm;
use symmem::cuda::{Stream, Symmetric};
use symmem::{Error, ReduceOp, World};
use symmem_testing::test_name;

use crate::{each, hasty, input, same};

/// A signal right behind a kernel does not overtake it, nor does a kernel overtake the wait before it.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn signals_and_kernels_of_a_stream_keep_their_order() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own, len) = (world.size(), world.rank(), 3000);
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        let mut got = gpu.alloc::<f32>(world, len).unwrap();
        for (round, algorithm) in
            [Algorithm::Staged, Algorithm::TwoShot].repeat(15).into_iter().enumerate()
        {
            x.write(&vec![(own + round) as f32; len], stream).unwrap();
            x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
            x.put_signal(next, 0, stream).unwrap();
            x.wait_signal(last, 0, stream).unwrap();
            x.get(last, 0, got.view_mut(), stream).unwrap();
            x.barrier_on_channel(1, stream).unwrap();
            x.all_reduce_with(ReduceOp::Max, algorithm, stream).unwrap(); // all have the same
            let expected = (n * round + n * (n - 1) / 2) as f32;
            assert_eq!(got.read(stream).unwrap(), vec![expected; len], "round {round}");
            assert_eq!(x.read(stream).unwrap(), vec![expected; len], "round {round}");
        }
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn signals_and_puts_are_captured_and_replayed() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own, len) = (world.size(), world.rank(), 1001);
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
        let mut data = gpu.alloc::<f32>(world, len).unwrap();
        let work = || {
            x.put_with_signal(next, 0, data.view(), 0, stream)?;
            x.wait_signal(last, 0, stream)?;
            x.barrier_on_channel(1, stream)
        };
        work().unwrap();
        x.synchronize(stream).unwrap();
        let graph = stream.capture(work).unwrap();
        for round in 0..5 {
            data.write(&input::<f32>(own + 10 * round, len), stream).unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            same(&x.read(stream).unwrap(), &input::<f32>(last + 10 * round, len), "a replay");
            x.barrier_on_channel(2, stream).unwrap();
        }
        x.synchronize(stream).unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn words_of_any_rank_are_filled_and_written() {
    each(test_name!(), |world, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let x = gpu.alloc::<u32>(world, 64).unwrap().rendezvous(world).unwrap();
        x.memset32(own, 0, 1, 64, stream).unwrap();
        x.memset32(own, 63, u32::MAX, 1, stream).unwrap();
        x.barrier(stream).unwrap();
        x.memset32(next, 32, 42 + own as u32, 16, stream).unwrap();
        for at in 0..4 {
            x.write_value32(next, at, (100 * own + at) as u32, stream).unwrap();
        }
        x.barrier(stream).unwrap();
        let mut expected = [1; 64];
        expected[63] = u32::MAX;
        expected[32..48].fill(42 + last as u32);
        (0..4).for_each(|at| expected[at] = (100 * last + at) as u32);
        assert_eq!(x.read(stream).unwrap(), expected);
        x.memset32(own, 64, 1, 1, stream).unwrap_err();
        x.write_value32(own, 64, 1, stream).unwrap_err();
        x.barrier(stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), expected);
    });
}

/// Rank 0 waits in vain for the last rank, the others learn of it, and all go on.
fn in_vain(world: &World, x: &Symmetric<f32>, stream: &Stream, name: &str, on: usize) {
    let last = world.size() - 1;
    if world.rank() == 0 {
        let e = x.synchronize(stream).unwrap_err();
        let told = matches!(
            &e,
            Error::Timeout { op, channel, waiting_for, .. }
                if *op == name && *channel == Some(on) && *waiting_for == [last]
        );
        assert!(told, "{e}");
        let again = x.put_signal(0, 9, stream).unwrap_err();
        assert_eq!(again.to_string(), e.to_string(), "the same for every call");
    }
    world.barrier().unwrap();
    if world.rank() != 0 {
        x.barrier(stream).unwrap();
        let e = x.synchronize(stream).unwrap_err();
        assert!(matches!(e, Error::PeerFailed { .. } | Error::Timeout { .. }), "{e}");
    }
    x.group().resync().unwrap();
    x.barrier(stream).unwrap();
    x.synchronize(stream).unwrap();
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_signal_in_vain_is_a_timeout_that_names_rank_and_channel() {
    each(test_name!(), |world, gpu, stream| {
        let (group, peer) = (hasty(world), world.size() - 1);
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&group).unwrap();
        x.barrier(stream).unwrap();
        if world.rank() == 0 {
            x.put_signal(peer, 3, stream).unwrap();
            x.put_signal(peer, 3, stream).unwrap(); // the first is not taken
        }
        in_vain(world, &x, stream, "put_signal", 3);
        x.barrier_on_channel(3, stream).unwrap(); // the first has gone with the failure
        if world.rank() == 0 {
            x.wait_signal(peer, 4, stream).unwrap();
        }
        in_vain(world, &x, stream, "wait_signal", 4);
        if world.size() == 2 {
            if world.rank() == 0 {
                x.barrier_on_channel(5, stream).unwrap();
            }
            in_vain(world, &x, stream, "barrier_on_channel", 5);
        }
        x.barrier_on_channel(6, stream).unwrap();
        x.synchronize(stream).unwrap();
    });
}
