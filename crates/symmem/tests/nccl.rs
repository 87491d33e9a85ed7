//! Communicators of the real NCCL on a real device: of one rank, for the library refuses two on one device, and of two that
//! say that they are on different hosts.
//!
//! `cargo xtask gpu` runs these where there is a device. NCCL is looked for as usual, or at `SYMMEM_NCCL`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use half::{bf16, f16};
use symmem::cuda::{Buffer, Gpu, Stream};
use symmem::nccl::{Communicator, Feature, Nccl, Source, Target};
use symmem::{DType, Error, F8E5M2, Group, Number, ReduceOp, World};
use symmem_testing::{Ranks, test_name};

const LONG: Duration = Duration::from_secs(60);

/// A communicator of this rank alone.
struct Alone {
    group: Group,
    nccl: Nccl,
    gpu: Gpu,
    stream: Stream,
    communicator: Communicator,
}

impl Alone {
    fn new() -> Self {
        let world = World::threads(1, |world| world.clone()).unwrap().remove(0);
        let (nccl, gpu) = (Nccl::load().unwrap(), Gpu::open(0).unwrap());
        println!("NCCL {} from {:?}", nccl.version(), nccl.path());
        let communicator = nccl.of_group(&world, &gpu).unwrap();
        let stream = gpu.stream().unwrap();
        Self { group: (*world).clone(), nccl, gpu, stream, communicator }
    }

    fn buffer<T: Number>(&self, data: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.alloc(&self.group, data.len()).unwrap();
        buffer.write(data, &self.stream).unwrap();
        buffer
    }

    /// All collectives with one element type; of one rank, each gives what it got.
    fn collectives<T: Number + PartialEq>(&self, data: &[T]) {
        let Self { communicator: comm, stream, .. } = self;
        let from = self.buffer(data);
        let zero = vec![data[0]; data.len()];
        let check = |to: &Buffer<T>, what: &str| {
            comm.synchronize(stream).unwrap();
            assert!(to.read(stream).unwrap() == data, "{what} of {}", T::DTYPE);
        };
        // 8-bit floats are reduced by newer devices only.
        if !matches!(T::DTYPE, DType::I16 | DType::F8E5M2) {
            for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Average] {
                let mut to = self.buffer(&zero);
                comm.all_reduce(from.view(), to.view_mut(), op, stream).unwrap();
                check(&to, "all_reduce");
                let mut to = self.buffer(&zero);
                comm.reduce_scatter(from.view(), to.view_mut(), op, stream).unwrap();
                check(&to, "reduce_scatter");
            }
            let mut to = self.buffer(&zero);
            let target = Some(Target::from(to.view_mut()));
            comm.reduce(from.view(), target, ReduceOp::Sum, 0, stream).unwrap();
            check(&to, "reduce");
        }
        let mut to = self.buffer(data);
        comm.broadcast(to.view_mut(), 0, stream).unwrap();
        check(&to, "broadcast");
        let mut to = self.buffer(&zero);
        comm.all_gather(from.view(), to.view_mut(), stream).unwrap();
        check(&to, "all_gather");
        let mut to = self.buffer(&zero);
        comm.all_to_all(from.view(), to.view_mut(), stream).unwrap();
        check(&to, "all_to_all");
        let mut to = self.buffer(&zero);
        comm.gather(from.view(), Some(to.view_mut().into()), 0, stream).unwrap();
        check(&to, "gather");
        let mut to = self.buffer(&zero);
        comm.scatter(Some(Source::from(from.view())), to.view_mut(), 0, stream).unwrap();
        check(&to, "scatter");
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn every_collective_of_one_rank_gives_what_it_got() {
    let alone = Alone::new();
    let numbers = |len: usize| (0..len).map(|i| i as f32 * 0.25 - 3.0);
    for len in [1, 1000, 1 << 20] {
        alone.collectives::<f32>(&numbers(len).collect::<Vec<_>>());
    }
    alone.collectives::<f64>(&numbers(77).map(f64::from).collect::<Vec<_>>());
    alone.collectives::<f16>(&numbers(77).map(f16::from_f32).collect::<Vec<_>>());
    alone.collectives::<bf16>(&numbers(77).map(bf16::from_f32).collect::<Vec<_>>());
    alone.collectives::<i64>(&(-30..30).collect::<Vec<_>>());
    alone.collectives::<i32>(&(-30..30).collect::<Vec<_>>());
    alone.collectives::<i16>(&(-30..30).collect::<Vec<_>>());
    alone.collectives::<i8>(&(-30..30).collect::<Vec<_>>());
    alone.collectives::<u8>(&(0..200).collect::<Vec<_>>());
    alone.collectives::<F8E5M2>(&(0..60).map(F8E5M2).collect::<Vec<_>>());
    alone.communicator.close().unwrap();
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn types_that_nccl_does_not_reduce_are_refused() {
    let alone = Alone::new();
    let mut words = alone.buffer(&[1_u16; 4]);
    let refused =
        alone.communicator.all_reduce_in_place(words.view_mut(), ReduceOp::Sum, &alone.stream);
    assert!(refused.unwrap_err().to_string().contains("Unconvertible NCCL type u16"));
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_scaled_sum_of_one_rank_is_its_product() {
    let alone = Alone::new();
    let sum = alone.communicator.scaled_sum(2.5, DType::F32).unwrap();
    let mut x = alone.buffer(&[1.0_f32, 4.0]);
    alone.communicator.all_reduce_in_place(x.view_mut(), &sum, &alone.stream).unwrap();
    assert_eq!(x.read(&alone.stream).unwrap(), [2.5, 10.0]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_communicator_of_all_devices_of_the_process_works_in_a_group() {
    let alone = Alone::new();
    let all = alone.nccl.of_devices(std::slice::from_ref(&alone.gpu), LONG).unwrap();
    let mut x = alone.buffer(&[7_i32; 3]);
    let done = alone.nccl.group(|| {
        all[0].all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream)?;
        all[0].broadcast(x.view_mut(), 0, &alone.stream)
    });
    done.unwrap();
    all[0].synchronize(&alone.stream).unwrap();
    assert_eq!(x.read(&alone.stream).unwrap(), [7; 3]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn split_gives_a_communicator_or_none() {
    let alone = Alone::new();
    assert!(alone.communicator.split(None, 0).unwrap().is_none());
    let child = alone.communicator.split(Some(3), 0).unwrap().unwrap();
    assert_eq!((child.rank(), child.size()), (0, 1));
    let mut x = alone.buffer(&[1.5_f32]);
    child.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
    assert_eq!(x.read(&alone.stream).unwrap(), [1.5]);
    child.close().unwrap();
    alone.communicator.check().unwrap();
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_rank_that_never_comes_is_given_up_and_the_library_goes_on() {
    let alone = Alone::new();
    let id = alone.nccl.unique_id().unwrap();
    let waited = alone.nccl.communicator(&alone.gpu, 2, &id, 0, Duration::from_secs(2));
    let error = waited.unwrap_err();
    assert!(matches!(&error, Error::Timeout { waiting_for, .. } if waiting_for == &[1]), "{error}");
    let mut x = alone.buffer(&[2.0_f32]);
    alone.communicator.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
    assert_eq!(x.read(&alone.stream).unwrap(), [2.0]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn an_aborted_communicator_says_so_and_a_new_one_works() {
    let alone = Alone::new();
    alone.communicator.check().unwrap();
    alone.communicator.abort();
    let mut x = alone.buffer(&[2.0_f32]);
    let after = alone.communicator.broadcast(x.view_mut(), 0, &alone.stream).unwrap_err();
    assert!(after.to_string().contains("it was aborted"), "{after}");
    let again = alone.nccl.of_group(&alone.group, &alone.gpu).unwrap();
    again.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
    assert_eq!(x.read(&alone.stream).unwrap(), [2.0]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn an_argument_that_nccl_refuses_is_an_error_in_its_words() {
    let alone = Alone::new();
    let mut x = alone.buffer(&[2.0_f32]);
    let op = symmem::nccl::Operator::from_code(100);
    let refused = alone.communicator.all_reduce_in_place(x.view_mut(), op, &alone.stream);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("all_reduce: NCCL Error "), "{text}");
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_is_registered_and_forgotten() {
    let alone = Alone::new();
    let mut x = alone.buffer(&vec![1.0_f32; 1 << 20]);
    for _ in 0..3 {
        // SAFETY: the buffer outlives it.
        let registered = unsafe { alone.communicator.register(x.address(), 4 << 20) }.unwrap();
        alone.communicator.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
        alone.communicator.synchronize(&alone.stream).unwrap();
        drop(registered);
    }
    assert_eq!(x.read(&alone.stream).unwrap(), vec![1.0; 1 << 20]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_window_onto_memory_of_our_own_is_opened_and_closed() {
    let alone = Alone::new();
    if !alone.nccl.has(Feature::Windows) {
        return println!("skipped: no windows before 2.27");
    }
    let mut x = alone.buffer(&vec![1.0_f32; 1 << 20]);
    // SAFETY: the buffer outlives it, and there are no peers.
    let window = unsafe { alone.communicator.window(x.address(), 4 << 20) }.unwrap();
    println!("windows are supported: {}", window.is_some());
    alone.communicator.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
    alone.communicator.synchronize(&alone.stream).unwrap();
    if let Some(window) = window.as_ref().filter(|_| alone.nccl.has(Feature::Signals)) {
        println!("its own address as a peer: {:x?}", window.peer_address(0, 0).unwrap());
    }
    drop(window);
    assert_eq!(x.read(&alone.stream).unwrap(), vec![1.0; 1 << 20]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn windows_that_come_and_go_leave_no_memory() {
    let alone = Alone::new();
    if !alone.nccl.has(Feature::Windows) {
        return println!("skipped: no windows before 2.27");
    }
    let x = alone.buffer(&vec![1.0_f32; 1 << 20]);
    let times = |times: usize| {
        for _ in 0..times {
            // SAFETY: the buffer outlives it, and there are no peers.
            drop(unsafe { alone.communicator.window(x.address(), 4 << 20) }.unwrap());
        }
    };
    times(16);
    let before = free_memory();
    times(256);
    let lost = before.saturating_sub(free_memory());
    assert!(lost < 4 << 20, "{lost} bytes were lost by 256 windows");
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn communicators_that_come_and_go_leave_no_memory() {
    let alone = Alone::new();
    let once = || {
        let one = alone.nccl.of_devices(std::slice::from_ref(&alone.gpu), LONG).unwrap().remove(0);
        let mut x = alone.buffer(&[1.0_f32]);
        one.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, &alone.stream).unwrap();
        one.synchronize(&alone.stream).unwrap();
        one.close().unwrap();
    };
    once();
    let before = free_memory();
    (0..5).for_each(|_| once());
    let lost = before.saturating_sub(free_memory());
    assert!(lost < 16 << 20, "{lost} bytes were lost by five communicators");
}

fn free_memory() -> usize {
    let driver = symmem_sys::cuda::load().unwrap();
    driver.init().unwrap();
    let context = driver.context_retain(driver.device(0).unwrap()).unwrap();
    driver.context_push(context).unwrap();
    let free = driver.memory_info().unwrap().free;
    driver.context_pop().unwrap();
    free
}

/// Two ranks as processes on one device. NCCL refuses that on one host, and so each says that it is on another: what they
/// exchange then goes through sockets. Their kernels wait for each other, so they want MPS.
fn as_two_hosts(test: &'static str, body: impl Fn(&World, &Communicator, &Stream)) {
    let named = ["sh", "-c", "NCCL_HOSTID=host-$RANK exec \"$@\"", "sh"];
    let ranks = Ranks::new(2).under(&named).env("NCCL_SOCKET_IFNAME", "lo");
    ranks.run(test, |world| {
        let (nccl, gpu) = (Nccl::load().unwrap(), Gpu::open(0).unwrap());
        let communicator = nccl.of_group(&world, &gpu).unwrap();
        assert_eq!((communicator.rank(), communicator.size()), (world.rank(), 2));
        let stream = gpu.stream().unwrap();
        body(&world, &communicator, &stream);
        world.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn every_collective_as_two_hosts_gives_what_both_have() {
    as_two_hosts(test_name!(), |world, comm, stream| {
        let (gpu, rank) = (comm.gpu(), world.rank());
        let buffer = |data: &[f32]| {
            let mut buffer = gpu.alloc(world, data.len()).unwrap();
            buffer.write(data, stream).unwrap();
            buffer
        };
        let of = |rank: usize| [1.0 + rank as f32, 10.0 + rank as f32];
        let from = buffer(&of(rank));
        let read = |buffer: &Buffer<f32>| {
            comm.synchronize(stream).unwrap();
            buffer.read(stream).unwrap()
        };

        let mut to = buffer(&[0.0; 2]);
        comm.all_reduce(from.view(), to.view_mut(), ReduceOp::Sum, stream).unwrap();
        assert_eq!(read(&to), [3.0, 21.0]);
        comm.all_reduce(from.view(), to.view_mut(), ReduceOp::Max, stream).unwrap();
        assert_eq!(read(&to), [2.0, 11.0]);
        let target = (rank == 1).then(|| Target::from(to.view_mut()));
        comm.reduce(from.view(), target, ReduceOp::Product, 1, stream).unwrap();
        assert_eq!(read(&to), if rank == 1 { [2.0, 110.0] } else { [2.0, 11.0] });
        let mut same = buffer(&of(rank));
        comm.broadcast(same.view_mut(), 1, stream).unwrap();
        assert_eq!(read(&same), of(1));

        let mut all = buffer(&[0.0; 4]);
        comm.all_gather(from.view(), all.view_mut(), stream).unwrap();
        assert_eq!(read(&all), [of(0), of(1)].concat());
        let mut part = buffer(&[0.0]);
        comm.reduce_scatter(from.view(), part.view_mut(), ReduceOp::Average, stream).unwrap();
        assert_eq!(read(&part), [[1.5, 10.5][rank]]);
        comm.all_to_all(from.view(), to.view_mut(), stream).unwrap();
        assert_eq!(read(&to), [of(0)[rank], of(1)[rank]]);

        let half = comm.split(Some(rank as u32), 0).unwrap().unwrap();
        assert_eq!((half.rank(), half.size()), (0, 1));
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_rank_that_does_not_call_as_two_hosts_is_named_and_a_new_communicator_works() {
    as_two_hosts(test_name!(), |world, comm, stream| {
        let mut x = comm.gpu().alloc::<f32>(world, 1 << 20).unwrap();
        if world.rank() == 0 {
            comm.set_deadline(Duration::from_secs(3));
            // Connections are made by the first call, which waits for them.
            let called = comm.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, stream);
            let e = called.and_then(|()| comm.synchronize(stream)).unwrap_err();
            assert!(matches!(&e, Error::Timeout { waiting_for, .. } if waiting_for == &[1]), "{e}");
        }
        world.barrier().unwrap();
        comm.abort();
        let again = comm.nccl().of_group(world, comm.gpu()).unwrap();
        x.write(&vec![1.0; 1 << 20], stream).unwrap();
        again.all_reduce_in_place(x.view_mut(), ReduceOp::Sum, stream).unwrap();
        again.synchronize(stream).unwrap();
        assert_eq!(x.read(stream).unwrap(), vec![2.0; 1 << 20]);
    });
}
