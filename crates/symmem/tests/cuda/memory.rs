//! Memory on a real device: what is refused, what waits for what, and that nothing grows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use symmem::cuda::{Buffer, Gpu, Stream};
use symmem::{Error, Pool, ReduceOp, Result, World};
use symmem_sys::cuda::{self as sys, Compare, Driver, HostMemory};
use symmem_testing::{Ranks, gpu_ranks, test_name};

use crate::each;

const SEGMENT: usize = 8 << 20;

/// A stream of the test's own, which can be made to wait until it is let go.
struct Held {
    driver: Arc<dyn Driver>,
    raw: sys::Stream,
    word: HostMemory,
}

// SAFETY: the word is only touched as an atomic, and the driver may be called by all threads.
unsafe impl Sync for Held {}

impl Held {
    /// For the life of the process. The device's context stays current for this thread.
    fn new() -> Self {
        let driver = sys::load().unwrap();
        let context = driver.context_retain(driver.device(0).unwrap()).unwrap();
        driver.context_set(Some(context)).unwrap();
        let raw = driver.stream_create().unwrap();
        let word = driver.host_alloc(4).unwrap();
        let held = Self { driver, raw, word };
        held.word().store(0, Ordering::Release);
        held
    }

    fn stream(&self, gpu: &Gpu) -> Stream {
        // SAFETY: a stream of the device's primary context, never destroyed.
        unsafe { Stream::from_raw(gpu, self.raw.raw()) }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: pinned memory of four bytes, never freed, which nobody touches but as an atomic.
        unsafe { AtomicU32::from_ptr(self.word.host.as_ptr().cast()) }
    }

    /// Lets what comes later in the stream wait.
    fn hold(&self) {
        // SAFETY: the word lives as long as the process.
        unsafe { self.driver.wait32(self.raw, self.word.device, 1, Compare::Equal) }.unwrap();
    }

    /// Does `body` while the stream is held up; in vain, if `body` waits for the stream.
    fn meanwhile(&self, body: impl FnOnce()) {
        let (done, late) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                while !done.load(Ordering::Acquire) {
                    if start.elapsed() > Duration::from_secs(30) {
                        late.store(true, Ordering::Relaxed);
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.word().store(1, Ordering::Release);
            });
            body();
            done.store(true, Ordering::Release);
        });
        assert!(!late.load(Ordering::Relaxed), "it waited for the stream");
    }

    /// Bytes of the device that are free.
    fn free(&self) -> usize {
        self.driver.memory_info().unwrap().free
    }
}

fn refused<T>(result: Result<T>) {
    let e = result.map(drop).unwrap_err();
    assert!(matches!(e, Error::Usage { rank: Some(_), .. }), "{e}");
    assert!(e.to_string().contains("capturing a graph"), "{e}");
}

fn try_all(world: &World, gpu: &Gpu, pool: &Pool<Gpu>, buffer: Buffer<f32>) {
    refused(gpu.alloc::<f32>(world, 10));
    refused(gpu.alloc_persistent::<f32>(world, 1, 10));
    refused(pool.alloc::<f32>(10));
    refused(buffer.rendezvous(world)); // which drops it
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_is_refused_in_a_capture_which_goes_on() {
    each(test_name!(), |world, gpu, stream| {
        let pool = gpu.pool(world, SEGMENT);
        let mut x = gpu.alloc::<f32>(world, 3000).unwrap().rendezvous(world).unwrap();
        x.all_reduce(ReduceOp::Sum, stream).unwrap(); // loads the kernel
        x.synchronize(stream).unwrap();
        let part = pool.alloc::<f32>(10).unwrap().rendezvous(world).unwrap();
        let buffer = gpu.alloc::<f32>(world, 10).unwrap();
        let graph = stream.capture(|| {
            try_all(world, gpu, &pool, buffer);
            drop(part);
            x.all_reduce(ReduceOp::Sum, stream)
        });
        let graph = graph.unwrap();
        for _ in 0..3 {
            x.write(&[1.0; 3000], stream).unwrap();
            world.barrier().unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            assert_eq!(x.read(stream).unwrap(), [world.size() as f32; 3000]);
        }
        gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_is_refused_while_somebody_elses_stream_is_captured() {
    each(test_name!(), |world, gpu, stream| {
        let (held, pool) = (Held::new(), gpu.pool(world, SEGMENT));
        let buffer = gpu.alloc::<f32>(world, 10).unwrap();
        let theirs = held.stream(gpu);
        held.driver.capture_begin(held.raw).unwrap();
        try_all(world, gpu, &pool, buffer);
        let graph = held.driver.capture_end(held.raw).unwrap();
        // SAFETY: the test's own, and not used again.
        unsafe { held.driver.graph_destroy(graph) }.unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(stream).unwrap();
        x.synchronize(stream).unwrap();
        drop(theirs);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn who_is_strict_shares_no_device() {
    for n in gpu_ranks() {
        Ranks::new(n).env("SYMMEM_STRICT_DEVICES", "1").run(test_name!(), |world| {
            let gpu = Gpu::open(0).unwrap();
            let mapped = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).map(drop);
            if world.size() == 1 {
                return mapped.unwrap();
            }
            let e = mapped.unwrap_err();
            assert!(matches!(e, Error::Usage { op: "rendezvous", .. }), "{e}");
            assert!(e.to_string().contains("ranks 0 and 1 both on GPU-"), "{e}");
        });
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn allocations_and_rendezvous_in_a_loop_take_no_more_memory() {
    const ROUNDS: usize = 100;
    each(test_name!(), |world, gpu, stream| {
        let (held, pool) = (Held::new(), gpu.pool(world, SEGMENT));
        let round = |i: usize| {
            let len = [0, 1, 4095, 1 << 20][i % 4]; // the last is more than a granule
            let x = gpu.alloc::<u32>(world, len).unwrap().rendezvous(world).unwrap();
            let y = pool.alloc::<u32>(len).unwrap().rendezvous(world).unwrap();
            assert_eq!((x.len(), x.handle().buffer_size()), (len, 4 * len));
            y.barrier(stream).unwrap();
            x.barrier(stream).unwrap();
            // Half of the allocations go while something is in the stream.
            let x = i.is_multiple_of(2).then_some(x);
            y.synchronize(stream).unwrap();
            drop((x, y));
        };
        let free = || {
            stream.synchronize().unwrap();
            world.barrier().unwrap(); // all ranks have let go: they may share the device
            let free = held.free();
            world.barrier().unwrap();
            free
        };
        (0..8).for_each(round);
        let before = free();
        (0..ROUNDS).for_each(round);
        let after = free();
        // A leak of one granule in each round would be many times as much.
        assert!(after + (32 << 20) > before, "{before} bytes free before, {after} after");
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn allocation_and_rendezvous_wait_for_no_stream_of_the_caller() {
    each(test_name!(), |world, gpu, stream| {
        let (held, pool) = (Held::new(), gpu.pool(world, SEGMENT));
        let theirs = held.stream(gpu);
        // What the group and the pool have, and the kernel.
        let x = pool.alloc::<f32>(10).unwrap().rendezvous(world).unwrap();
        x.barrier(stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
        held.hold();
        held.meanwhile(|| {
            let mut y = gpu.alloc::<f32>(world, 1000).unwrap().rendezvous(world).unwrap();
            let z = pool.alloc::<f32>(1000).unwrap().rendezvous(world).unwrap();
            y.write(&[1.0; 1000], stream).unwrap();
            z.barrier(stream).unwrap();
            z.synchronize(stream).unwrap();
            assert!(!theirs.is_idle().unwrap());
        });
        theirs.synchronize().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn a_barrier_waits_for_the_last_one_and_not_for_what_came_after_it() {
    each(test_name!(), |world, gpu, stream| {
        let held = Held::new();
        let theirs = held.stream(gpu);
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(stream).unwrap();
        x.barrier(&theirs).unwrap();
        x.synchronize(&theirs).unwrap();
        world.barrier().unwrap();
        x.barrier(&theirs).unwrap();
        held.hold();
        held.meanwhile(|| {
            x.barrier(stream).unwrap();
            x.synchronize(stream).unwrap();
            assert!(!theirs.is_idle().unwrap());
        });
        x.synchronize(&theirs).unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn memory_is_freed_and_handed_out_again_after_what_is_in_a_stream() {
    each(test_name!(), |world, gpu, stream| {
        let (held, pool) = (Held::new(), gpu.pool(world, SEGMENT));
        let theirs = held.stream(gpu);
        let outs = [(); 2].map(|()| gpu.alloc::<u32>(world, 1000).unwrap());
        let [mut part, mut whole] = [pool.alloc::<u32>(1000), gpu.alloc(world, 1000)]
            .map(|buffer: Result<Buffer<u32>>| buffer.unwrap());
        part.write(&[7; 1000], stream).unwrap();
        whole.write(&[8; 1000], stream).unwrap();
        held.hold();
        for (from, to) in [(&part, &outs[0]), (&whole, &outs[1])] {
            // SAFETY: both are as long, and what is dropped lives until the copy is done: that is what is tested.
            unsafe { held.driver.copy(to.address(), from.address(), 4000, held.raw) }.unwrap();
        }
        held.meanwhile(|| {
            drop((part, whole));
            let mut again = pool.alloc::<u32>(1000).unwrap();
            assert_ne!(again.offset(), 0, "handed out while it is read");
            again.write(&[9; 1000], stream).unwrap();
            drop(gpu.alloc::<u32>(world, 1000).unwrap());
        });
        theirs.synchronize().unwrap();
        assert_eq!(outs[0].read(stream).unwrap(), [7; 1000]);
        assert_eq!(outs[1].read(stream).unwrap(), [8; 1000]);
        assert_eq!(pool.alloc::<u32>(1000).unwrap().offset(), 0);
    });
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn two_allocations_share_the_groups_pads_and_leave_their_own_alone() {
    each(test_name!(), |world, gpu, stream| {
        let (held, other) = (Held::new(), gpu.stream().unwrap());
        let make = || gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let both = [make(), make()];
        let words = both[0].handle().signal_pad_size() / 4;
        let pad = |i: usize| both[i].handle().signal_pad_ptrs()[world.rank()] as u64;
        for i in 0..2 {
            // SAFETY: our own pad, of so many words, which nobody uses.
            unsafe { held.driver.memset32(pad(i), 1, words, held.raw) }.unwrap();
        }
        held.driver.stream_synchronize(held.raw).unwrap();
        for _ in 0..100 {
            both[0].barrier(stream).unwrap();
            both[1].barrier(&other).unwrap();
        }
        both[0].synchronize(stream).unwrap();
        both[1].synchronize(&other).unwrap();
        for i in 0..2 {
            let mut there = vec![0_u32; words];
            let to = there.as_mut_ptr().cast();
            // SAFETY: as long as the pad, and alive until the stream is empty.
            unsafe { held.driver.copy_to_host(to, pad(i), 4 * words, held.raw) }.unwrap();
            held.driver.stream_synchronize(held.raw).unwrap();
            assert!(there.iter().all(|word| *word == 1), "allocation {i}");
        }
    });
}

/// As others fork a capture: by an event of one stream that another waits for, and back.
#[test]
#[ignore = "needs a CUDA device: cargo xtask gpu"]
fn streams_that_fork_within_a_capture_are_ordered() {
    each(test_name!(), |world, gpu, stream| {
        let (first, second) = (Held::new(), Held::new());
        let (a, b) = (first.stream(gpu), second.stream(gpu));
        let driver = &first.driver;
        let join = |from: sys::Stream, to: sys::Stream| {
            let event = driver.event_create(false).unwrap();
            driver.event_record(event, from).unwrap();
            driver.stream_wait(to, event).unwrap();
        };
        let mut x = gpu.alloc::<f32>(world, 3000).unwrap().rendezvous(world).unwrap();
        x.all_reduce(ReduceOp::Sum, &a).unwrap(); // loads the kernel
        x.synchronize(&a).unwrap();
        let graph = a.capture(|| {
            join(first.raw, second.raw);
            x.all_reduce(ReduceOp::Sum, &a)?;
            x.all_reduce(ReduceOp::Sum, &b)?;
            join(second.raw, first.raw);
            Ok(())
        });
        let (graph, n) = (graph.unwrap(), world.size() as f32);
        for round in 0..4 {
            x.write(&[1.0; 3000], stream).unwrap();
            world.barrier().unwrap();
            // SAFETY: the memory lives, and all ranks launch theirs.
            unsafe { graph.launch(&a) }.unwrap();
            a.synchronize().unwrap();
            assert_eq!(x.read(stream).unwrap(), [n * n; 3000], "round {round}");
        }
    });
}
