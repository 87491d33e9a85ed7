//! Collectives whose bytes the driver copies: what goes where, between which barriers, and what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use symmem::cuda::Algorithm;
use symmem::cuda::{Gpu, Stream};
use symmem::{Error, ReduceOp, World};
use symmem_sys::cuda::fake::{Config, Fake, Launched, PATIENCE};

use super::multicast::able;
use super::{GROUP, Group, configured, declared, drivers, load, ranks};

const WAY: Algorithm = Algorithm::CopyEngine;
const COPY: &str = "cuMemcpyDtoDAsync";

/// Waits until all of `n` have come, each as often as this one, as blocks that synchronise do.
fn wait_for_all(arrivals: &AtomicUsize, n: usize) {
    let (turn, start) = (arrivals.fetch_add(1, Ordering::AcqRel) / n, Instant::now());
    while arrivals.load(Ordering::Acquire) < (turn + 1) * n {
        assert!(start.elapsed() < PATIENCE, "a rank did not come");
        std::thread::yield_now();
    }
}

/// Drivers on whose devices kernels that synchronise wait for all ranks: the barrier, and the reduction, which `reduce` does.
fn drivers_with_barriers(devices: Vec<Config>) -> Vec<Arc<Fake>> {
    let n = devices.len();
    let (drivers, arrivals) = (configured(n, &devices), Arc::new(AtomicUsize::new(0)));
    for driver in &drivers {
        let all = arrivals.clone();
        driver.kernel("barrier", &[GROUP], move |_| wait_for_all(&all, n));
        let all = arrivals.clone();
        driver.kernel("reduce_pull", &declared("reduce_f32", "reduce_pull"), move |launched| {
            wait_for_all(&all, n);
            reduce(launched);
        });
    }
    drivers
}

fn plain(n: usize) -> Vec<Arc<Fake>> {
    drivers_with_barriers(vec![Config::default(); n])
}

/// What the driver was asked to do since the call before `first`: launches and copies.
fn done(driver: &Fake, first: usize) -> Vec<&'static str> {
    let calls = driver.history().split_off(first);
    calls.into_iter().filter(|call| call.starts_with("cuLaunch") || *call == COPY).collect()
}

fn pattern(rank: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| (1000 * rank + i) as u32).collect()
}

#[test]
fn a_gather_copies_from_all_between_two_meetings() {
    for n in [1, 2, 3] {
        ranks(&plain(n), |world, driver, gpu, stream| {
            let mut x = gpu.alloc::<u32>(world, 5).unwrap().rendezvous(world).unwrap();
            let mut out = gpu.alloc::<u32>(world, 5 * n).unwrap();
            x.write(&pattern(world.rank(), 5), stream).unwrap();
            let first = driver.history().len();
            x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
            let expected: Vec<u32> = (0..n).flat_map(|rank| pattern(rank, 5)).collect();
            assert_eq!(out.read(stream).unwrap(), expected);
            let done = done(driver, first);
            assert!(done[0].starts_with("cuLaunch") && done[n + 1].starts_with("cuLaunch"));
            assert_eq!(done[1..=n], vec![COPY; n]);
            assert_eq!(done.len(), n + 2);
        });
    }
}

/// Each rank stores its block with all; gives the blocks as this rank sees them, and what was done.
fn stored(world: &World, driver: &Fake, gpu: &Gpu, at: &Stream) -> (Vec<u32>, usize) {
    let len = 5 * world.size();
    let mut x = gpu.alloc::<u32>(world, len).unwrap().rendezvous(world).unwrap();
    let mut from = gpu.alloc::<u32>(world, 5).unwrap();
    from.write(&pattern(world.rank(), 5), at).unwrap();
    let first = driver.history().len();
    x.all_gather_from(from.view(), WAY, at).unwrap();
    let copies = done(driver, first).len() - 2;
    match x.handle().multicast_ptr() {
        // The fake driver's multicast is memory of its own, which all ranks see there.
        Some(all) => ((0..len).map(|i| load((all + 4 * i) as u64)).collect(), copies),
        None => (x.read(at).unwrap(), copies),
    }
}

#[test]
fn a_gather_into_symmetric_memory_copies_to_all() {
    for (config, copies) in [(Config::default(), 3), (able(), 1)] {
        ranks(&drivers_with_barriers(vec![config; 3]), |world, driver, gpu, stream| {
            let expected: Vec<u32> = (0..3).flat_map(|rank| pattern(rank, 5)).collect();
            assert_eq!(stored(world, driver, gpu, stream), (expected, copies));
        });
    }
}

#[test]
fn a_gather_by_multicast_is_captured_and_replayed() {
    ranks(&drivers_with_barriers(vec![able(); 2]), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 10).unwrap().rendezvous(world).unwrap();
        let all = x.handle().multicast_ptr().unwrap() as u64;
        let mut from = gpu.alloc::<u32>(world, 5).unwrap();
        x.all_gather_from(from.view(), WAY, stream).unwrap();
        let (copies, launches) = (driver.calls(COPY), driver.launches().len());
        let graph = stream.capture(|| x.all_gather_from(from.view(), WAY, stream)).unwrap();
        assert_eq!((driver.calls(COPY), driver.launches().len()), (copies + 1, launches));
        for turn in 0..4 {
            from.write(&[10 * turn + world.rank() as u32; 5], stream).unwrap();
            // SAFETY: the memory is there, and all ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            let seen: Vec<u32> = (0..10).map(|i| load(all + 4 * i)).collect();
            assert_eq!(seen, [[10 * turn; 5], [10 * turn + 1; 5]].concat());
            world.barrier().unwrap();
        }
    });
}

/// The reduction that the kernel does, in plain Rust.
fn reduce(launched: &Launched) {
    let group = Group::of(launched);
    let part = |rank: usize| {
        let at = launched.parameters[1][8 * rank..8 * rank + 8].try_into().unwrap();
        u64::from_ne_bytes(at)
    };
    let (out, first, columns) = (launched.u64(2), launched.u64(3), launched.u64(5));
    assert_eq!((first, launched.u64(4), launched.u32(7)), (Some(0), Some(1), Some(1)));
    for i in 0..columns.unwrap() {
        let element = |rank| f32::from_bits(load(part(rank) + 4 * i));
        let sum: f32 = (1..group.size()).fold(element(0), |sum, rank| sum + element(rank));
        let to = super::word(out.unwrap() + 4 * i);
        to.store(sum.to_bits(), Ordering::Release);
    }
}

#[test]
fn a_scattered_reduction_copies_and_then_reduces_in_rank_order() {
    for n in [1, 2, 3] {
        ranks(&plain(n), |world, driver, gpu, stream| {
            // Sums of these depend on the order.
            let data = |rank: usize| -> Vec<f32> {
                (0..4 * n).map(|i| [1e8, 1.0, -1e8][(rank + i) % 3] + i as f32).collect()
            };
            let mut x = gpu.alloc::<f32>(world, 4 * n).unwrap().rendezvous(world).unwrap();
            let mut out = gpu.alloc::<f32>(world, 4).unwrap();
            x.write(&data(world.rank()), stream).unwrap();
            let mut expected = vec![0.0; 4];
            let own = data(world.rank());
            world.reduce_scatter(&own, ReduceOp::Sum, &mut expected).unwrap();
            for turn in 0..2 {
                let (created, first) = (driver.calls("cuMemCreate"), driver.history().len());
                x.reduce_scatter_with(ReduceOp::Sum, out.view_mut(), WAY, stream).unwrap();
                assert_eq!(out.read(stream).unwrap(), expected);
                let new = driver.calls("cuMemCreate") - created;
                assert_eq!(new, usize::from(turn == 0), "allocated once");
                assert_eq!(done(driver, first).len(), n + 2);
            }
            assert_eq!(x.read(stream).unwrap(), own, "the input is left as it was");
        });
    }
}

/// A rank that copies and one that has a kernel do it do not fit together.
#[test]
fn ways_that_differ_are_different_calls() {
    let drivers = drivers(1);
    let calls: Arc<std::sync::Mutex<Vec<u32>>> = Arc::default();
    let note = calls.clone();
    let noted = move |launched: &Launched| note.lock().unwrap().push(Group::of(launched).u32(16));
    let sizes = declared("move", "all_gather");
    drivers[0].kernel("all_gather", &sizes, noted.clone());
    drivers[0].kernel("barrier", &[GROUP], noted);
    ranks(&drivers, |world, _, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 5).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<u32>(world, 5).unwrap();
        x.all_gather_with(out.view_mut(), Algorithm::Auto, stream).unwrap();
        x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
        x.barrier(stream).unwrap();
    });
    let calls = calls.lock().unwrap();
    let [kernel, before, after, barrier] = calls[..] else { panic!("{calls:?}") };
    assert_eq!(before, after);
    assert!(kernel != before && before != barrier);
}

#[test]
fn what_cannot_be_copied_is_refused_before_anything_is_done() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 6).unwrap().rendezvous(world).unwrap();
        let mut odd = gpu.alloc::<u32>(world, 5).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<u32>(world, 7).unwrap();
        let sum = ReduceOp::Sum;
        let first = driver.history().len();
        let refusals = [
            x.all_gather_with(out.view_mut(), WAY, stream),
            x.all_gather_with(out.view_mut(), Algorithm::Multimem, stream),
            x.all_gather_from(out.view(), WAY, stream),
            odd.all_gather_from(out.view(), WAY, stream),
            x.reduce_scatter_with(sum, out.view_mut(), WAY, stream),
            x.reduce_scatter_with(sum, out.view_mut(), Algorithm::TwoShot, stream),
            odd.reduce_scatter_with(sum, out.view_mut(), WAY, stream),
        ];
        for refused in refusals {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::Usage { rank: Some(_), .. }), "{e}");
        }
        assert_eq!(done(driver, first).len(), 0);
        let mut out = gpu.alloc::<u32>(world, 12).unwrap();
        x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
        assert_eq!(done(driver, first).len(), 4);
        world.barrier().unwrap();
    });
}

#[test]
fn no_bytes_need_no_copies() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<u32>(world, 0).unwrap().rendezvous(world).unwrap();
        let mut out = gpu.alloc::<u32>(world, 0).unwrap();
        x.all_gather_with(out.view_mut(), WAY, stream).unwrap();
        assert_eq!((driver.launches().len(), driver.calls(COPY)), (2, 0), "they still synchronise");
        world.barrier().unwrap();
    });
}
