//! Small calls that come often are replayed: what is launched stays the same, and only the way it is put into the stream
//! differs.

use std::sync::Arc;

use symmem::ReduceOp::{Max, Sum};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::Fake;

use super::{GROUP, Group, on, ranks};

const REPLAY: &str = "cuGraphLaunch";
const NOTE: &str = "cuGraphInstantiate";

/// Drivers that know the parameters of the kernels, so that launches have them.
fn drivers(n: usize) -> Vec<Arc<Fake>> {
    let drivers = super::drivers(n);
    for driver in &drivers {
        driver.kernel("barrier", &[GROUP], |_| ());
        driver.kernel("all_reduce_flagged", &[GROUP, 8, 8, 8, 4], |_| ());
        driver.kernel("reduce_scatter_flagged", &[GROUP, 8, 8, 8, 4], |_| ());
    }
    drivers
}

#[test]
fn what_comes_often_is_replayed_with_the_same_parameters() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        for _ in 0..20 {
            x.all_reduce(Sum, stream).unwrap();
        }
        assert_eq!((driver.calls(NOTE), driver.calls(REPLAY)), (1, 13), "from the eighth time on");
        let launches = driver.launches();
        assert_eq!(launches.len(), 20);
        assert!(launches.iter().all(|launched| {
            launched.function == "all_reduce_flagged"
                && launched.grid == launches[0].grid
                && launched.block == launches[0].block
                && launched.parameters == launches[0].parameters
        }));
        assert_eq!(launches[0].parameters.len(), 5);
        world.barrier().unwrap();
    });
}

#[test]
fn another_operator_length_place_or_timeout_is_another_call() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let group = world.subgroup(&[0]).unwrap();
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(&group).unwrap();
        let mut y = gpu.alloc::<f32>(world, 101).unwrap().rendezvous(&group).unwrap();
        let mut out = gpu.alloc::<f32>(world, 100).unwrap();
        for _ in 0..10 {
            x.all_reduce(Sum, stream).unwrap();
            x.all_reduce(Max, stream).unwrap();
            x.all_reduce_into(Sum, out.view_mut(), stream).unwrap();
            x.reduce_scatter(Sum, out.view_mut(), stream).unwrap();
            x.barrier(stream).unwrap();
            y.all_reduce(Sum, stream).unwrap();
        }
        assert_eq!((driver.calls(NOTE), driver.calls(REPLAY)), (6, 18));
        let launches = driver.launches();
        let (first, last) = (&launches[..6], &launches[54..]);
        for (first, last) in first.iter().zip(last) {
            assert_eq!((&first.function, &first.parameters), (&last.function, &last.parameters));
        }
        group.set_timeout(std::time::Duration::from_secs(7));
        x.all_reduce(Sum, stream).unwrap();
        let last = driver.launches().pop().unwrap();
        assert_eq!(Group::of(&last).u64(24), 7_000_000_000);
        assert_eq!(driver.calls(REPLAY), 18);
    });
}

#[test]
fn what_is_captured_is_launched() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        for _ in 0..10 {
            x.all_reduce(Sum, stream).unwrap();
        }
        let launches = || driver.calls("cuLaunchKernel") + driver.calls("cuLaunchKernelEx");
        let before = (launches(), driver.calls(REPLAY));
        let graph = stream.capture(|| x.all_reduce(Sum, stream)).unwrap();
        assert_eq!((launches(), driver.calls(REPLAY)), (before.0 + 1, before.1));
        // SAFETY: the memory is there, and no other rank takes part.
        unsafe { graph.launch(stream) }.unwrap();
        x.all_reduce(Sum, stream).unwrap();
        assert_eq!(driver.launches().len(), 12);
    });
}

/// The graph is made aside, by a thread whose capture must not end by it.
#[test]
fn a_capture_of_another_stream_goes_on_while_a_call_is_noted() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let other = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        let y = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(&world.subgroup(&[0]).unwrap());
        let y = y.unwrap();
        let graph = other.capture(|| {
            for _ in 0..10 {
                x.all_reduce(Sum, stream)?;
            }
            y.barrier(&other)
        });
        assert_eq!(driver.calls(REPLAY), 3);
        // SAFETY: the memory is there, and no other rank takes part.
        unsafe { graph.unwrap().launch(&other) }.unwrap();
        assert_eq!(driver.launches().len(), 11);
    });
}

#[test]
fn what_cannot_be_noted_is_launched_each_time() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        driver.fail_always(NOTE, code::OUT_OF_MEMORY);
        for _ in 0..20 {
            x.all_reduce(Sum, stream).unwrap();
        }
        assert_eq!((driver.calls(NOTE), driver.calls(REPLAY)), (1, 0));
        assert_eq!(driver.launches().len(), 20);
    });
}

/// Of large ones the host is done sooner than the device, and a device that three share takes graphs one after the other.
#[test]
fn what_is_large_or_has_many_neighbours_is_launched() {
    let calls = |drivers: &[Arc<Fake>], len| {
        on(
            drivers,
            |_| 0,
            |world, _, gpu, stream| {
                let mut x = gpu.alloc::<u8>(world, len).unwrap().rendezvous(world).unwrap();
                for _ in 0..10 {
                    x.all_reduce(Sum, stream).unwrap();
                }
                world.barrier().unwrap();
            },
        );
        drivers[0].calls(REPLAY)
    };
    assert_eq!(calls(&drivers(2), 64 << 10), 3);
    assert_eq!(calls(&drivers(2), (64 << 10) + 1), 0);
    assert_eq!(calls(&drivers(3), 8), 0);
}

/// Sixteen calls are remembered. Those that come once do not make those be forgotten that come often.
#[test]
fn what_is_seldom_makes_room() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let mut often = gpu.alloc::<u8>(world, 8).unwrap().rendezvous(world).unwrap();
        for len in 1..100 {
            let mut once = gpu.alloc::<u8>(world, 8 * len).unwrap().rendezvous(world).unwrap();
            once.all_reduce(Sum, stream).unwrap();
            often.all_reduce(Sum, stream).unwrap();
        }
        assert_eq!((driver.calls(NOTE), driver.calls(REPLAY)), (1, 92));
        let live = driver.live();
        assert_eq!(live.iter().filter(|thing| thing.contains("executable graph")).count(), 1);
    });
}

#[test]
fn a_replay_that_fails_is_an_error_and_the_next_works() {
    ranks(&drivers(1), |world, driver, gpu, stream| {
        let x = gpu.alloc::<f32>(world, 100).unwrap().rendezvous(world).unwrap();
        for _ in 0..10 {
            x.barrier(stream).unwrap();
        }
        driver.fail(REPLAY, 1, code::OUT_OF_MEMORY);
        let e = x.barrier(stream).unwrap_err();
        assert!(matches!(e, symmem::Error::Driver { call: REPLAY, .. }), "{e}");
        x.barrier(stream).unwrap();
        assert_eq!(driver.launches().len(), 11);
    });
}
