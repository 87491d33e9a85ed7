//! Launches: which kernel, how large, with which parameters, and in which order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use symmem::cuda::Algorithm;
use symmem::cuda::Gpu;
use symmem::{Error, ReduceOp};
use symmem_sys::cuda::code;

use super::{GROUP, Group, drivers, on, ranks};

#[test]
fn a_kernel_gets_the_group_it_meets() {
    let drivers = drivers(3);
    let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    for driver in &drivers {
        let seen = seen.clone();
        driver.kernel("barrier", &[GROUP], move |launched| {
            assert_eq!((launched.grid, launched.block), ([1, 1, 1], [64, 1, 1]));
            let group = Group::of(launched);
            // All pads are mapped, and start as zeros.
            assert!((0..group.size()).all(|rank| super::load(group.pad(rank)) == 0));
            assert_eq!(super::load(group.mailbox()), 0);
            seen.lock().unwrap().push(launched.parameters[0].clone());
        });
    }
    ranks(&drivers, |world, _, gpu, stream| {
        let group = world
            .subgroup_builder(&[0, 1, 2])
            .timeout(std::time::Duration::from_secs(7))
            .build()
            .unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&group).unwrap();
        x.barrier(stream).unwrap();
        world.barrier().unwrap();
    });
    let mut seen: Vec<Group> = seen.lock().unwrap().drain(..).map(Group).collect();
    seen.sort_by_key(Group::rank);
    assert_eq!(seen.iter().map(Group::rank).collect::<Vec<_>>(), [0, 1, 2]);
    for group in &seen {
        let (scope, op, timeout) = (group.u32(8), group.u32(12), group.u64(24));
        assert_eq!((group.size(), scope, op, timeout), (3, 0, 0, 7_000_000_000));
        assert_eq!(group.u32(16), seen[0].u32(16), "the digest of the call");
        let pads: std::collections::HashSet<_> = (0..3).map(|rank| group.pad(rank)).collect();
        assert!(pads.len() == 3 && !pads.contains(&0) && group.pad(3) == 0);
    }
}

#[test]
fn grids_fit_on_a_device_together_with_those_of_neighbours() {
    for shared in [false, true] {
        let drivers = drivers(2);
        on(
            &drivers,
            |rank| if shared { 0 } else { rank },
            |world, driver, gpu, stream| {
                let len = 1 << 20;
                let mut x = gpu.alloc::<f32>(world, len).unwrap().rendezvous(world).unwrap();
                let mut out = gpu.alloc::<f32>(world, 2 * len).unwrap();
                for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                    x.all_reduce_with(ReduceOp::Sum, algorithm, stream).unwrap();
                }
                x.all_gather(out.view_mut(), stream).unwrap();
                x.broadcast(0, stream).unwrap();
                let launches = driver.launches();
                assert_eq!(launches.len(), 4);
                for launched in launches {
                    let (blocks, threads) = (launched.grid[0], launched.block[0]);
                    let fit = 8 * (2048 / threads) / 2; // with a neighbour, or as if there were one
                    assert!(threads <= 1024 && threads.is_multiple_of(32));
                    let name = &launched.function;
                    assert!((1..=256).contains(&blocks) && blocks <= fit, "{name}: {blocks}");
                }
            },
        );
    }
}

/// Block b of a rank synchronises with block b of every other.
#[test]
fn grids_are_alike_where_some_ranks_share_a_device() {
    let drivers = drivers(3);
    on(
        &drivers,
        |rank| rank / 2,
        |world, _, gpu, stream| {
            let mut x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(world).unwrap();
            x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
            world.barrier().unwrap();
        },
    );
    let grids: Vec<_> = drivers.iter().map(|driver| driver.launches()[0].grid).collect();
    assert_eq!(grids, [[16, 1, 1]; 3]);
}

/// The pads on which kernels synchronise are not the signal pad, and have room for every grid.
#[test]
fn a_small_signal_pad_limits_no_grid() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let group = world.subgroup_builder(&[0, 1]).signal_pad_size(8).build().unwrap();
        let mut x = gpu.alloc::<f32>(world, 1 << 20).unwrap().rendezvous(&group).unwrap();
        x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, stream).unwrap();
        assert_eq!(driver.launches()[0].grid, [16, 1, 1]);
        world.barrier().unwrap();
    });
}

/// The fake's devices have a cache of 50 MiB. Of more than twice that, blocks draw pieces.
#[test]
fn what_the_cache_does_not_hold_is_gone_through_there_and_back() {
    let ways: Arc<Mutex<Vec<(u8, u8)>>> = Arc::default();
    let drivers = drivers(2);
    let seen = ways.clone();
    let parameters = [GROUP, 576, 8, 8, 4, 4, 4];
    drivers[1].kernel("all_reduce_two_shot_alternating", &parameters, move |launched| {
        seen.lock().unwrap().push((launched.parameters[5][0], launched.parameters[6][0]));
    });
    ranks(&drivers, |world, driver, gpu, stream| {
        let mut fits = gpu.alloc::<u8>(world, 50 << 20).unwrap().rendezvous(world).unwrap();
        let mut more = gpu.alloc::<u8>(world, (50 << 20) + 1).unwrap().rendezvous(world).unwrap();
        let mut most = gpu.alloc::<u8>(world, (100 << 20) + 2).unwrap().rendezvous(world).unwrap();
        for _ in 0..3 {
            more.all_reduce(ReduceOp::Sum, stream).unwrap();
            fits.all_reduce(ReduceOp::Sum, stream).unwrap();
        }
        most.all_reduce(ReduceOp::Sum, stream).unwrap();
        let names = driver.launches().into_iter().map(|launched| launched.function);
        let plain = names.filter(|name| name == "all_reduce_two_shot").count();
        assert_eq!(plain, 3);
        world.barrier().unwrap();
    });
    assert_eq!(*ways.lock().unwrap(), [(1, 0), (0, 0), (1, 0), (1, 1)]);
}

#[test]
fn ranks_on_one_device_need_its_scope_only() {
    let drivers = drivers(2);
    for driver in &drivers {
        driver.kernel("barrier", &[GROUP], |launched| assert_eq!(Group::of(launched).u32(8), 1));
    }
    on(
        &drivers,
        |_| 0,
        |world, _, gpu, stream| {
            let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
            x.barrier(stream).unwrap();
            world.barrier().unwrap();
        },
    );
}

#[test]
fn two_streams_are_ordered_by_an_event() {
    ranks(&drivers(2), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let count = || (driver.calls("cuEventRecord"), driver.calls("cuStreamWaitEvent"));
        x.barrier(a).unwrap();
        x.barrier(a).unwrap();
        assert_eq!(count(), (2, 0), "marked, so that nobody waits for what comes later");
        x.barrier(&b).unwrap();
        assert_eq!(count(), (3, 1));
        x.barrier(&b).unwrap();
        assert_eq!(count(), (4, 1));
        x.barrier(a).unwrap();
        assert_eq!(count(), (5, 2));
        let other = world.subgroup(&[0, 1]).unwrap();
        let y = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&other).unwrap();
        y.barrier(&b).unwrap();
        assert_eq!(count(), (6, 2), "groups are not ordered against each other");
        world.barrier().unwrap();
    });
}

#[test]
fn one_stream_needs_no_event_until_there_is_another() {
    ranks(&drivers(2), |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let count = || (driver.calls("cuEventRecord"), driver.calls("cuStreamWaitEvent"));
        x.barrier(a).unwrap();
        x.barrier(a).unwrap();
        assert_eq!(count(), (0, 0));
        let b = gpu.stream().unwrap();
        x.barrier(&b).unwrap();
        assert_eq!(count(), (2, 1), "the end of the first, and the mark of the second");
        world.barrier().unwrap();
    });
}

/// All that synchronises on the group's pads.
#[test]
fn every_collective_waits_for_the_last_in_another_stream() {
    ranks(&drivers(2), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(world, 8).unwrap().rendezvous(world).unwrap();
        let [mut half, mut same, mut double] =
            [4, 8, 16].map(|len| gpu.alloc::<f32>(world, len).unwrap());
        x.barrier(a).unwrap();
        let mut streams = [&b, a].into_iter().cycle();
        let mut waits = 0;
        let mut next = |done: symmem::Result<()>| {
            done.unwrap();
            waits += 1;
            assert_eq!(driver.calls("cuStreamWaitEvent"), waits);
        };
        next(x.all_reduce(ReduceOp::Sum, streams.next().unwrap()));
        next(x.all_reduce_with(ReduceOp::Sum, Algorithm::TwoShot, streams.next().unwrap()));
        next(x.all_reduce_into(ReduceOp::Sum, same.view_mut(), streams.next().unwrap()));
        next(x.reduce_scatter(ReduceOp::Sum, half.view_mut(), streams.next().unwrap()));
        next(x.reduce(ReduceOp::Sum, 0, same.view_mut(), streams.next().unwrap()));
        next(x.all_gather(double.view_mut(), streams.next().unwrap()));
        next(x.broadcast(0, streams.next().unwrap()));
        next(x.all_to_all(same.view_mut(), streams.next().unwrap()));
        next(x.gather(0, double.view_mut(), streams.next().unwrap()));
        next(x.scatter(0, half.view_mut(), streams.next().unwrap()));
        next(x.barrier(streams.next().unwrap()));
        world.barrier().unwrap();
    });
}

/// Nothing runs without the order that it needs; a mark that cannot be made is made up for by waiting for more.
#[test]
fn an_order_that_cannot_be_kept_is_an_error() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        driver.fail("cuEventRecord", 1, code::UNKNOWN);
        x.barrier(a).unwrap();
        for call in ["cuEventRecord", "cuStreamWaitEvent"] {
            driver.fail(call, 1, code::UNKNOWN);
            let e = x.barrier(&b).unwrap_err();
            assert!(e.to_string().contains(call), "{e}");
            assert_eq!(driver.launches().len(), 1);
        }
        x.barrier(&b).unwrap();
        assert_eq!(driver.launches().len(), 2);
    });
}

#[test]
fn threads_launch_one_at_a_time() {
    let drivers = drivers(1);
    let inside = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&inside);
    drivers[0].kernel("barrier", &[GROUP], move |_| {
        assert!(!now.swap(true, Ordering::Relaxed), "two launches at once");
        std::thread::yield_now();
        now.store(false, Ordering::Relaxed);
    });
    ranks(&drivers, |world, driver, gpu, _| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let stream = gpu.stream().unwrap();
                    (0..50).for_each(|_| x.barrier(&stream).unwrap());
                });
            }
        });
        assert_eq!(driver.launches().len(), 100);
    });
}

#[test]
fn what_was_in_a_stream_that_is_gone_comes_first() {
    ranks(&drivers(2), |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let b = gpu.stream().unwrap();
        x.barrier(&b).unwrap();
        drop(b);
        x.barrier(a).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 1, "its mark is still there");
        let c = gpu.stream().unwrap();
        driver.fail("cuEventRecord", 2, code::UNKNOWN);
        x.barrier(&c).unwrap(); // the end of `a`, and no mark of its own
        driver.fail("cuStreamQuery", 1, code::NOT_READY);
        let waits = driver.calls("cuStreamWaitEvent");
        drop(c);
        x.barrier(a).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), waits + 1);
        world.barrier().unwrap();
    });
}

/// The driver gives a new stream the address of the one that is gone.
#[test]
fn a_new_stream_is_not_taken_for_one_that_is_gone() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let b = gpu.stream().unwrap();
        x.barrier(&b).unwrap();
        drop(b);
        let c = gpu.stream().unwrap();
        x.barrier(&c).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 1, "for what was in b");
        x.barrier(&c).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 1);
        x.barrier(a).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 2);
    });
}

#[test]
fn a_stream_of_another_device_is_refused() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let other = Gpu::with_driver(driver.clone(), 1 - world.rank() as u32).unwrap();
        let (theirs, x) = (other.stream().unwrap(), gpu.alloc::<f32>(world, 10).unwrap());
        let mut x = x.rendezvous(world).unwrap();
        let e = x.all_reduce(ReduceOp::Sum, &theirs).unwrap_err();
        assert!(matches!(e, Error::Usage { op: "all_reduce", .. }), "{e}");
        assert!(e.to_string().contains("expected a stream of cuda:"), "{e}");
        x.all_reduce(ReduceOp::Sum, stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn work_is_captured_in_one_stream_and_launched_again() {
    ranks(&drivers(2), |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(a).unwrap();
        let graph = a.capture(|| x.barrier(a).and_then(|()| x.barrier(a))).unwrap();
        assert_eq!(driver.launches().len(), 1, "noted, not done");
        for _ in 0..3 {
            // SAFETY: `x` is there, and the fake kernels wait for nobody.
            unsafe { graph.launch(a) }.unwrap();
        }
        assert_eq!(driver.launches().len(), 7);
        x.barrier(a).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn a_capture_and_what_is_under_way_in_another_stream_cannot_be_ordered() {
    const WHY: &str = "only one of the two is being captured";
    ranks(&drivers(1), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(&b).unwrap();
        driver.fail("cuEventQuery", 1, code::NOT_READY);
        let e = a.capture(|| x.barrier(a)).unwrap_err();
        assert!(e.to_string().contains(WHY), "{e}");
        // The broken capture is over, and what was noted is gone.
        x.barrier(a).unwrap();
        let both = || x.barrier(a).and_then(|()| x.barrier(&b));
        let e = a.capture(both).unwrap_err();
        assert!(e.to_string().contains(WHY), "{e}");
        assert!(e.to_string().contains("one that is not captured"), "{e}");
        x.barrier(a).unwrap();
        x.barrier(&b).unwrap();
        assert_eq!(driver.launches().len(), 4);
    });
}

#[test]
fn a_capture_needs_no_order_with_what_is_done_and_nothing_with_one_that_is_over() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(&b).unwrap();
        drop(a.capture(|| x.barrier(a)).unwrap());
        x.barrier(&b).unwrap();
        drop(a.capture(|| x.barrier(a)).unwrap());
        drop(b.capture(|| x.barrier(&b)).unwrap());
        assert_eq!(driver.launches().len(), 2);
        assert_eq!(driver.calls("cuStreamWaitEvent"), 0);
    });
}

/// What a capture has noted does not hide what runs.
#[test]
fn what_runs_is_ordered_whatever_was_captured_since() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(a).unwrap();
        drop(a.capture(|| x.barrier(a)).unwrap());
        x.barrier(&b).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 1);
        // A capture of two streams is ordered within, whatever ran since the last.
        let graph = a.capture(|| x.barrier(a));
        drop(graph.unwrap());
        x.barrier(a).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 2);
    });
}

#[test]
fn a_capture_in_a_stream_that_is_gone_is_over() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let b = gpu.stream().unwrap();
        let graph = b.capture(|| x.barrier(&b)).unwrap();
        x.barrier(a).unwrap();
        drop(b);
        x.barrier(a).unwrap();
        let c = gpu.stream().unwrap();
        x.barrier(&c).unwrap();
        // SAFETY: `x` is there, and the fake kernels wait for nobody.
        unsafe { graph.launch(&c) }.unwrap();
        // What ran there before is known by its mark.
        drop(c);
        drop(a.capture(|| x.barrier(a)).unwrap());
        assert_eq!(driver.launches().len(), 4);
    });
}

/// A signal of the only stream may wait for what a peer does after the group's next kernel, in a stream that comes later.
#[test]
fn what_waits_for_peers_is_not_waited_for() {
    let drivers = drivers(1);
    ranks(&drivers, |world, driver, gpu, a| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let records = || driver.calls("cuEventRecord");
        x.barrier(a).unwrap();
        assert_eq!(records(), 0);
        x.wait_signal(0, 0, a).unwrap();
        assert_eq!(records(), 1, "behind the barrier");
        x.wait_signal(0, 0, a).unwrap();
        let b = gpu.stream().unwrap();
        x.barrier(&b).unwrap();
        assert_eq!((records(), driver.calls("cuStreamWaitEvent")), (2, 1), "its own, in b");
    });
}

#[test]
fn a_capture_that_fails_leaves_nothing() {
    for call in
        ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuLaunchKernel"]
    {
        ranks(&drivers(1), |world, driver, gpu, a| {
            let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
            x.barrier(a).unwrap();
            driver.fail(call, 1, code::UNKNOWN);
            let e = a.capture(|| x.barrier(a)).unwrap_err();
            assert!(e.to_string().contains(call), "{e}");
            if call == "cuStreamEndCapture" {
                return; // the driver has not ended it
            }
            drop(a.capture(|| x.barrier(a)).unwrap());
        });
    }
}
