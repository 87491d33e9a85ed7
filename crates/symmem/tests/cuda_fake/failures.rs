//! Who learns of a failure on a device: no result of a failed call reaches the host unnoticed, and what takes the place of a
//! failed group works.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use symmem::cuda::{Gpu, Graph, Stream, Symmetric};
use symmem::store::MemoryStore;
use symmem::{Error, ReduceOp, Result, World};
use symmem_sys::cuda::fake::Fake;
use symmem_testing::{Ranks, die, test_name};

use super::{GROUP, Group, load, ranks, word};

/// A driver whose barriers give up when they are told to, as after a timeout.
fn failing() -> (Arc<Fake>, Arc<AtomicBool>) {
    let driver = Fake::plain(2);
    let fails = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&fails);
    driver.kernel("barrier", &[GROUP], move |launched| {
        if now.swap(false, Ordering::Relaxed) {
            let mailbox = Group::of(launched).mailbox();
            word(mailbox + 8).store(1, Ordering::Relaxed); // a timeout
            word(mailbox + 4).store(2, Ordering::Release); // noted
        }
    });
    (driver, fails)
}

fn is_loss(result: Result<()>) {
    match result {
        Err(Error::PeerLost { rank: 1, .. }) => {}
        other => panic!("rank 1 is lost, but: {other:?}"),
    }
}

fn launch(graph: &Graph, stream: &Stream) -> Result<()> {
    // SAFETY: the memory lives, and all ranks that live launch theirs.
    unsafe { graph.launch(stream) }
}

/// What every call answers once rank 1 is lost.
fn all_report_the_loss(x: &mut Symmetric<f32>, graph: &Graph, gpu: &Gpu, stream: &Stream) {
    is_loss(launch(graph, stream));
    is_loss(stream.synchronize());
    is_loss(x.synchronize(stream));
    is_loss(x.read(stream).map(drop));
    is_loss(x.all_reduce(ReduceOp::Sum, stream));
    is_loss(x.put_signal(0, 0, stream));
    is_loss(gpu.check_failures());
}

/// No kernel runs and fails here: that the host has lost the rank is enough.
#[test]
fn a_rank_killed_between_replays_is_the_error_of_every_later_replay() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let driver = Fake::plain(3);
        let poison: Arc<Mutex<u64>> = Arc::default();
        let seen = poison.clone();
        driver.kernel("all_reduce_flagged", &[GROUP, 8, 8, 8, 4], move |launched| {
            *seen.lock().unwrap() = Group::of(launched).mailbox();
        });
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).unwrap();
        let graph = stream.capture(|| x.all_reduce(ReduceOp::Sum, &stream)).unwrap();
        for _ in 0..3 {
            launch(&graph, &stream).unwrap();
            stream.synchronize().unwrap();
        }
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        let (poison, begin) = (*poison.lock().unwrap(), Instant::now());
        while load(poison) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "the loss was not noticed");
            std::thread::yield_now();
        }
        let launched = driver.launches().len();
        for _ in 0..5 {
            all_report_the_loss(&mut x, &graph, &gpu, &stream);
        }
        assert_eq!(driver.launches().len(), launched, "nothing runs on memory of the dead");
        // What takes its place works; the old group stays broken.
        let survivors = world.shrink().unwrap();
        let mut y = gpu.alloc::<f32>(&survivors, 10).unwrap().rendezvous(&survivors).unwrap();
        let next = stream.capture(|| y.all_reduce(ReduceOp::Sum, &stream)).unwrap();
        for _ in 0..3 {
            launch(&next, &stream).unwrap();
            y.read(&stream).unwrap();
            stream.synchronize().unwrap();
            gpu.check_failures().unwrap();
            is_loss(launch(&graph, &stream));
            is_loss(x.synchronize(&stream));
        }
        survivors.barrier().unwrap();
    });
}

/// A survivor that learns of the loss on the host, and whose first call on the device is that of the next group.
#[test]
fn survivors_work_on_the_device_at_once() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let gpu = Gpu::with_driver(Fake::plain(3), world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        is_loss(world.barrier());
        let survivors = world.shrink().unwrap();
        let y = gpu.alloc::<f32>(&survivors, 10).unwrap().rendezvous(&survivors).unwrap();
        y.barrier(&stream).unwrap();
        y.read(&stream).unwrap();
        stream.synchronize().unwrap();
        is_loss(x.barrier(&stream));
        survivors.barrier().unwrap();
    });
}

#[test]
fn a_group_formed_by_who_knows_of_a_failure_takes_the_place_of_the_failed_one() {
    let (driver, fails) = failing();
    ranks(&[driver], |world, _, gpu, stream| {
        let subgroup = || world.subgroup(&[0]).unwrap();
        let (old, early) = (subgroup(), subgroup());
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&old).unwrap();
        let graph = stream.capture(|| x.barrier(stream)).unwrap();
        fails.store(true, Ordering::Relaxed);
        launch(&graph, stream).unwrap();
        // Who forms a group without having heard of the failure still does.
        let y = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&early).unwrap();
        for _ in 0..3 {
            assert!(matches!(stream.synchronize(), Err(Error::Timeout { .. })));
            assert!(matches!(y.read(stream), Err(Error::Timeout { .. })));
        }
        let next = subgroup();
        let z = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&next).unwrap();
        z.barrier(stream).unwrap();
        stream.synchronize().unwrap();
        y.read(stream).unwrap();
        gpu.check_failures().unwrap();
        assert!(matches!(x.read(stream), Err(Error::Timeout { .. })));
        assert!(matches!(launch(&graph, stream), Err(Error::Timeout { .. })));
        // Even a replaced group can be put back in step, and then counts again.
        old.resync().unwrap();
        launch(&graph, stream).unwrap();
        x.read(stream).unwrap();
        fails.store(true, Ordering::Relaxed);
        launch(&graph, stream).unwrap();
        assert!(matches!(stream.synchronize(), Err(Error::Timeout { .. })));
        old.resync().unwrap();
    });
}

#[test]
fn a_new_world_takes_the_place_of_a_failed_one() {
    let (driver, fails) = failing();
    let gpu = Gpu::with_driver(driver, 0).unwrap();
    let stream = gpu.stream().unwrap();
    let world = || {
        let store = Arc::new(MemoryStore::new());
        World::builder().join(0, 1, store).unwrap()
    };
    let old = world();
    let x = gpu.alloc::<f32>(&old, 10).unwrap().rendezvous(&old).unwrap();
    fails.store(true, Ordering::Relaxed);
    x.barrier(&stream).unwrap();
    assert!(matches!(stream.synchronize(), Err(Error::Timeout { .. })));
    let new = world();
    let y = gpu.alloc::<f32>(&new, 10).unwrap().rendezvous(&new).unwrap();
    y.barrier(&stream).unwrap();
    y.synchronize(&stream).unwrap();
    assert!(matches!(x.barrier(&stream), Err(Error::Timeout { .. })));
}

#[test]
fn a_group_that_is_gone_is_not_reported() {
    let (driver, fails) = failing();
    ranks(&[driver], |world, _, gpu, stream| {
        let group = world.subgroup_builder(&[0]).build().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(&group).unwrap();
        fails.store(true, Ordering::Relaxed);
        x.barrier(stream).unwrap();
        assert!(matches!(gpu.check_failures(), Err(Error::Timeout { .. })));
        drop((x, group));
        gpu.check_failures().unwrap();
        stream.synchronize().unwrap();
    });
}

/// Only the root knows how long its output is.
#[test]
fn what_the_root_refuses_reaches_all_ranks() {
    let drivers = super::drivers(3);
    for driver in &drivers {
        driver.kernel("barrier", &[GROUP], |_| ());
    }
    ranks(&drivers, |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        x.barrier(stream).unwrap();
        let group = Group::of(&driver.launches().pop().unwrap());
        let told = || load(group.pad(world.rank()));
        let mut short = gpu.alloc::<f32>(world, 9).unwrap();
        for gathers in [false, true] {
            let made = if gathers {
                x.gather(1, short.view_mut(), stream)
            } else {
                x.reduce(ReduceOp::Sum, 1, short.view_mut(), stream)
            };
            assert_eq!(made.is_err(), world.rank() == 1, "only the root looks at its output");
            world.barrier().unwrap();
            assert_eq!(told(), 2, "by rank 1");
            if world.rank() == 1 {
                assert!(matches!(made, Err(Error::Usage { rank: Some(1), .. })));
                let e = stream.synchronize().unwrap_err();
                assert!(matches!(e, Error::PeerFailed { rank: 1, .. }), "{e}");
            }
            world.resync().unwrap();
            assert_eq!(told(), 0);
            world.barrier().unwrap(); // all have looked, before rank 1 refuses again
            x.read(stream).unwrap();
        }
    });
}

/// Whether that matters is for kernels to find out: it may have come before it left.
#[test]
fn a_rank_that_leaves_in_order_is_no_failure_but_kernels_are_told() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::plain(2);
        let mailbox: Arc<Mutex<u64>> = Arc::default();
        let seen = mailbox.clone();
        driver.kernel("barrier", &[GROUP], move |launched| {
            *seen.lock().unwrap() = Group::of(launched).mailbox();
        });
        let gpu = Gpu::with_driver(driver, world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).unwrap();
        x.barrier(&stream).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            return;
        }
        let (left, begin) = (*mailbox.lock().unwrap() + 32, Instant::now());
        while load(left) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "nobody wrote it");
            std::thread::yield_now();
        }
        assert_eq!(load(left), 1 << 1, "a bit for rank 1");
        gpu.check_failures().unwrap();
        x.read(&stream).unwrap();
        // As a kernel that waits for it does.
        let mailbox = left - 32;
        for (at, value) in [(8, 6), (12, 1), (20, 1)] {
            word(mailbox + at).store(value, Ordering::Relaxed);
        }
        word(mailbox + 4).store(2, Ordering::Release);
        is_loss(x.synchronize(&stream));
    });
}

/// The environment is read when a group first uses a device.
#[test]
fn the_limit_of_devices_is_the_environments() {
    for set in ["600", "0", "0.5", ""] {
        let default = Ranks::new(1).env("SYMMEM_TIMEOUT", "");
        default.env("SYMMEM_DEVICE_TIMEOUT", set).run(test_name!(), |world| {
            let set = std::env::var("SYMMEM_DEVICE_TIMEOUT").unwrap();
            let seconds: f64 = if set.is_empty() { 1800.0 } else { set.parse().unwrap() };
            let driver = Fake::plain(1);
            driver.kernel("barrier", &[GROUP], |_| ());
            let gpu = Gpu::with_driver(driver.clone(), 0).unwrap();
            let stream = gpu.stream().unwrap();
            let x = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).unwrap();
            let waited = || Group::of(&driver.launches().pop().unwrap()).u64(24);
            x.barrier(&stream).unwrap();
            assert_eq!(waited(), (seconds * 1e9) as u64, "by default");
            world.set_timeout(Duration::from_secs(7));
            x.barrier(&stream).unwrap();
            assert_eq!(waited(), 7_000_000_000, "a limit of the group's own");
        });
    }
}

#[test]
fn a_limit_that_is_no_number_is_an_error_that_names_it() {
    Ranks::new(1).env("SYMMEM_DEVICE_TIMEOUT", "soon").run(test_name!(), |world| {
        let gpu = Gpu::with_driver(Fake::plain(1), 0).unwrap();
        let e = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).map(drop).unwrap_err();
        assert!(e.to_string().contains("SYMMEM_DEVICE_TIMEOUT"), "{e}");
    });
}
