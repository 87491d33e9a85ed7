//! What NVSHMEM does in streams.

use symmem::cuda::{Gpu, SignalOp, Stream, Symmetric};
use symmem::{Error, Number, ReduceOp, World};
use symmem_testing::test_name;

use super::{counts, load, open, ranks};

const LEN: usize = 12;

fn memory<T: Number>(world: &World, gpu: &Gpu, stream: &Stream, data: &[T]) -> Symmetric<T> {
    let mut x = gpu.alloc::<T>(world, data.len()).unwrap().rendezvous(world).unwrap();
    x.write(data, stream).unwrap();
    world.barrier().unwrap();
    x
}

#[test]
fn a_put_with_a_signal_is_there_when_the_signal_is() {
    ranks(3).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let x = memory(&world, &gpu, &stream, &[world.rank() as u32; LEN]);
        let y = memory(&world, &gpu, &stream, &[99_u32; LEN]);
        let (next, last) = ((world.rank() + 1) % 3, (world.rank() + 2) % 3);
        let ops = y.nvshmem().unwrap();
        ops.put_with_signal(next, 0, x.view(), 3, (SignalOp::Set, 5), &stream).unwrap();
        ops.wait_for_signal(3, 5, &stream).unwrap();
        assert_eq!(y.read(&stream).unwrap(), [last as u32; LEN]);
        // Signals alone, which add up.
        for to in 0..3 {
            ops.signal(to, 4, (SignalOp::Add, 2), &stream).unwrap();
        }
        ops.wait_for_signal(4, 6, &stream).unwrap();
        let pad = y.handle().signal_pad_ptrs()[world.rank()];
        assert_eq!((load(pad + 24), load(pad + 32)), (5, 6));
        ops.quiet(&stream).unwrap();
        ops.barrier(&stream).unwrap();
        assert_eq!(counts(c"nvshmemx_quiet_on_stream").0, 1);
    });
}

#[test]
fn puts_and_gets_are_of_any_part() {
    ranks(2).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let own: Vec<u32> = (0..LEN).map(|i| (100 * world.rank() + i) as u32).collect();
        let x = memory(&world, &gpu, &stream, &own);
        let mut part = gpu.alloc::<u32>(&world, 3).unwrap();
        let peer = 1 - world.rank();
        x.nvshmem().unwrap().get(peer, 5, part.view_mut(), &stream).unwrap();
        let expected: Vec<u32> = (5..8).map(|i| 100 * peer as u32 + i).collect();
        assert_eq!(part.read(&stream).unwrap(), expected);
        world.barrier().unwrap();
        x.nvshmem().unwrap().put(peer, 0, part.view(), &stream).unwrap();
        world.barrier().unwrap();
        let back: Vec<u32> = (5..8).map(|i| 100 * world.rank() as u32 + i).collect();
        assert_eq!(x.read(&stream).unwrap()[..3], back);
        let e = x.nvshmem().unwrap().put(peer, LEN - 1, part.view(), &stream).unwrap_err();
        assert!(e.to_string().contains("elements within the 12 of rank"), "{e}");
        let e = x.nvshmem().unwrap().put(2, 0, part.view(), &stream).unwrap_err().to_string();
        assert!(e.contains("nvshmem_put") && e.contains("rank 2") || e.contains("got 2"), "{e}");
        let e = x.nvshmem().unwrap().wait_for_signal(1 << 20, 1, &stream).unwrap_err();
        assert!(e.to_string().contains("a word of 8 bytes among"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn blocks_go_where_they_belong() {
    ranks(3).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let (rank, block) = (world.rank(), LEN / 3);
        let own: Vec<u32> = (0..LEN).map(|i| (100 * rank + i) as u32).collect();
        let x = memory(&world, &gpu, &stream, &own);
        let mut out = memory(&world, &gpu, &stream, &[0_u32; LEN]);
        x.nvshmem().unwrap().all_to_all(&mut out, &stream).unwrap();
        let sent = (0..LEN).map(|i| (100 * (i / block) + rank * block + i % block) as u32);
        assert_eq!(out.read(&stream).unwrap(), sent.collect::<Vec<u32>>());
        let mut all = memory(&world, &gpu, &stream, &[0_u32; 3 * LEN]);
        x.nvshmem().unwrap().all_gather(&mut all, &stream).unwrap();
        let gathered = (0..3 * LEN).map(|i| (100 * (i / LEN) + i % LEN) as u32);
        assert_eq!(all.read(&stream).unwrap(), gathered.collect::<Vec<u32>>());
        x.nvshmem().unwrap().broadcast(2, &stream).unwrap();
        let of_2 = (0..LEN).map(|i| 200 + i as u32);
        assert_eq!(x.read(&stream).unwrap(), of_2.collect::<Vec<u32>>());
        let e = x.nvshmem().unwrap().broadcast(3, &stream).unwrap_err().to_string();
        assert!(e.contains("nvshmem_broadcast"), "{e}");
        // An output that is the input, or of another source, is refused before anybody waits.
        let mut plain = gpu.with_backend(Some("cuda"), &world).unwrap().alloc::<u32>(&world, LEN);
        let mut plain = plain.as_mut().unwrap().symmetric(&world).unwrap();
        let e = x.nvshmem().unwrap().all_to_all(&mut plain, &stream).unwrap_err().to_string();
        assert!(e.contains("an output on NVSHMEM's heap"), "{e}");
        let e = plain.nvshmem().map(drop).unwrap_err().to_string();
        assert!(e.contains("its backend is cuda"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn reductions_are_those_that_the_library_has() {
    ranks(2).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let own: Vec<f32> = (0..LEN).map(|i| (i + world.rank()) as f32).collect();
        let x = memory(&world, &gpu, &stream, &own);
        let mut out = memory(&world, &gpu, &stream, &[0_f32; LEN]);
        x.nvshmem().unwrap().all_reduce(ReduceOp::Sum, &mut out, &stream).unwrap();
        let sums = (0..LEN).map(|i| (2 * i + 1) as f32);
        assert_eq!(out.read(&stream).unwrap(), sums.collect::<Vec<f32>>());
        x.nvshmem().unwrap().all_reduce(ReduceOp::Max, &mut out, &stream).unwrap();
        assert_eq!(out.read(&stream).unwrap()[0], 1.0);
        let y = memory(&world, &gpu, &stream, &[3_i32 - world.rank() as i32; LEN]);
        let mut least = memory(&world, &gpu, &stream, &[0_i32; LEN]);
        y.nvshmem().unwrap().all_reduce(ReduceOp::Min, &mut least, &stream).unwrap();
        assert_eq!(least.read(&stream).unwrap(), [2; LEN]);
        let e = x.nvshmem().unwrap().all_reduce(ReduceOp::Average, &mut out, &stream).unwrap_err();
        assert!(matches!(e, Error::Usage { .. }), "{e}");
        let e = x.nvshmem().unwrap().all_reduce(ReduceOp::Product, &mut out, &stream).unwrap_err();
        assert!(e.to_string().contains("nvshmemx_float_prod_reduce_on_stream"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn a_module_is_made_ready_for_calls_of_the_library() {
    ranks(1).run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        let module = gpu.module(".version 8.4\n.target sm_80\n.entry k() {}").unwrap();
        gpu.init_module(&module).unwrap();
        gpu.forget_module(&module).unwrap();
        assert_eq!(counts(c"nvshmemx_cumodule_init").0, 1);
        assert_eq!(counts(c"nvshmemx_cumodule_finalize").0, 1);
        assert_eq!(Gpu::nvshmem_version().unwrap(), (3, 99, 0));
        let plain = gpu.with_backend(Some("cuda"), &world).unwrap();
        let e = plain.init_module(&module).unwrap_err().to_string();
        assert!(e.contains("its backend is cuda"), "{e}");
    });
}
