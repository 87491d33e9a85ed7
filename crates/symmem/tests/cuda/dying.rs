//! A rank that is killed while its kernel runs. Not under MPS, where that ends the work of every client of the device.

use std::time::Duration;

use symmem::cuda::Gpu;
use symmem::{Error, ReduceOp};
use symmem_testing::{Ranks, die, test_name};

#[test]
#[ignore = "needs a CUDA device without MPS: cargo xtask gpu"]
fn a_rank_killed_in_its_kernel_is_named_and_the_others_go_on() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let gpu = Gpu::open(0).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(&world, 5000).unwrap().rendezvous(&world).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        x.put_signal(world.rank(), 0, &stream).unwrap();
        x.wait_signal(world.rank(), 0, &stream).unwrap();
        x.synchronize(&stream).unwrap(); // everything that is loaded when first used is there now
        world.barrier().unwrap();
        // Three kernels that wait: of ranks 1 and 2 for rank 0, whose own waits for a signal of rank 1.
        if world.rank() == 0 {
            x.wait_signal(1, 1, &stream).unwrap();
        } else {
            x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        }
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500)); // turns of the device are milliseconds
            assert!(!stream.is_idle().unwrap(), "its kernel waits for rank 0");
            die();
        }
        let e = x.synchronize(&stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        let e = x.put_signal(0, 0, &stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        drop(x);
        let survivors = world.shrink().unwrap();
        let mut x = gpu.alloc::<f32>(&survivors, 5000).unwrap().rendezvous(&survivors).unwrap();
        x.write(&[1.0; 5000], &stream).unwrap();
        x.all_reduce(ReduceOp::Sum, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [2.0; 5000], "the context lives on");
        let peer = 1 - survivors.rank();
        x.put_signal(peer, 0, &stream).unwrap();
        x.wait_signal(peer, 0, &stream).unwrap();
        x.synchronize(&stream).unwrap();
    });
}
