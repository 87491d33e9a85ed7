//! Signals, puts and gets of one rank in a stream. The kernels are functions, which do as the real ones.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use symmem::Error;
use symmem::cuda::{DeviceHandle, Gpu};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Fake, Launched};
use symmem_testing::{Ranks, die, kernels, test_name};

use super::{Group, declared, drivers, load, on, ranks, word};

/// Numbers by which kernels say what they are about.
const PUT_SIGNAL: u32 = 12;
const WAIT_SIGNAL: u32 = 13;
const BARRIER_ON_CHANNEL: u32 = 14;
/// Has launches signal as the kernels do.
fn signalling(drivers: &[Arc<Fake>]) {
    drivers.iter().for_each(|driver| kernels::install(driver));
}

/// All launches were of one block that knows what it is about.
fn check_launches(driver: &Fake) {
    for launched in driver.launches() {
        let op = match launched.function.as_str() {
            "put_signal" => PUT_SIGNAL,
            "wait_signal" => WAIT_SIGNAL,
            _ => BARRIER_ON_CHANNEL,
        };
        assert_eq!((launched.grid, launched.block), ([1, 1, 1], [32, 1, 1]));
        assert_eq!(Group::of(&launched).u32(16), op);
    }
}

/// The words of our own pad of a channel.
fn own_words(pads: &[usize], rank: usize, channel: usize) -> Vec<u32> {
    let n = pads.len();
    (0..n).map(|source| load((pads[rank] + 4 * (n * channel + source)) as u64)).collect()
}

#[test]
fn a_handle_is_as_long_as_the_kernels_say() {
    assert_eq!(declared("move", "put_signal"), [size_of::<DeviceHandle>(), 4, 4]);
    assert_eq!(declared("move", "barrier_on_channel"), [size_of::<DeviceHandle>(), 4]);
}

#[test]
fn signals_go_around_on_the_first_and_on_the_last_channel() {
    let drivers = drivers(3);
    signalling(&drivers);
    ranks(&drivers, |world, driver, gpu, stream| {
        let (n, own) = (world.size(), world.rank());
        let (next, last) = ((own + 1) % n, (own + n - 1) % n);
        let mut x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let channels = x.handle().signal_pad_size() / (4 * n);
        let mut data = gpu.alloc::<u32>(world, 2).unwrap();
        for channel in [0, channels - 1] {
            x.write(&[0; 4], stream).unwrap();
            x.barrier_on_channel(channel, stream).unwrap();
            data.write(&[own as u32 + 5, 9], stream).unwrap();
            x.put_with_signal(next, 1, data.view(), channel, stream).unwrap();
            x.wait_signal(last, channel, stream).unwrap();
            assert_eq!(x.read(stream).unwrap(), [0, last as u32 + 5, 9, 0]);
            // To oneself.
            x.put_signal(own, channel, stream).unwrap();
            x.wait_signal(own, channel, stream).unwrap();
            x.barrier_on_channel(channel, stream).unwrap();
            assert_eq!(own_words(&x.handle().signal_pad_ptrs(), own, channel), [0; 3]);
            world.barrier().unwrap();
        }
        let count = |name| driver.launches().iter().filter(|l| l.function == name).count();
        assert_eq!((count("put_signal"), count("wait_signal")), (4, 4));
        check_launches(driver);
    });
}

#[test]
fn a_signals_time_limit_is_that_of_its_group() {
    let drivers = drivers(1);
    drivers[0].kernel("put_signal", &declared("move", "put_signal"), |launched| {
        let handle = Group::of(launched);
        assert_eq!(handle.u64(24), 7_000_000_000);
        assert_eq!(load(handle.mailbox()), 0, "the mailbox is mapped, and nobody is lost");
    });
    ranks(&drivers, |world, driver, gpu, stream| {
        let timeout = Duration::from_secs(7);
        let group = world.subgroup_builder(&[0]).timeout(timeout).build();
        let x = gpu.alloc::<u32>(world, 1).unwrap().rendezvous(&group.unwrap()).unwrap();
        x.put_signal(0, 0, stream).unwrap();
        assert_eq!(driver.launches().len(), 1);
    });
}

#[test]
fn ranks_and_channels_that_are_not_there_launch_nothing() {
    let drivers = drivers(2);
    signalling(&drivers);
    ranks(&drivers, |world, driver, gpu, stream| {
        let own = world.rank();
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let data = gpu.alloc::<u32>(world, 2).unwrap();
        let channels = x.handle().signal_pad_size() / 8;
        let text = |result: symmem::Result<()>| result.unwrap_err().to_string();
        for channel in [channels, usize::MAX] {
            for e in [
                text(x.put_signal(0, channel, stream)),
                text(x.wait_signal(0, channel, stream)),
                text(x.barrier_on_channel(channel, stream)),
                text(x.put_with_signal(0, 0, data.view(), channel, stream)),
            ] {
                let expected = format!("a channel up to {}, the maximum supported", channels - 1);
                assert!(e.contains(&expected) && e.contains(&channel.to_string()), "{e}");
            }
        }
        for e in [text(x.put_signal(2, 0, stream)), text(x.wait_signal(2, 0, stream))] {
            assert!(e.contains("a rank in [0, 2), got 2"), "{e}");
        }
        assert!(driver.launches().is_empty());
        assert_eq!(driver.calls("cuMemcpyDtoDAsync"), 0);
        x.put_signal(own, channels - 1, stream).unwrap();
        x.wait_signal(own, channels - 1, stream).unwrap();
    });
}

#[test]
fn ranges_that_are_not_there_copy_nothing() {
    ranks(&drivers(2), |world, driver, gpu, stream| {
        let (own, peer) = (world.rank(), 1 - world.rank());
        let x = gpu.alloc::<u32>(world, 6).unwrap().rendezvous(world).unwrap();
        let mut part = gpu.alloc::<u32>(world, 4).unwrap();
        let text = |result: symmem::Result<()>| result.unwrap_err().to_string();
        for at in [3, 6, usize::MAX] {
            let e = text(x.put(peer, at, part.view(), stream));
            assert!(e.contains("put") && e.contains(&format!("within the 6 of rank {peer}")));
            let e = text(x.get(peer, at, part.view_mut(), stream));
            assert!(e.contains("get") && e.contains(&format!("4 at {at}")), "{e}");
        }
        assert!(text(x.put(2, 0, part.view(), stream)).contains("a rank in [0, 2), got 2"));
        assert!(text(x.put(own, 0, x.view(), stream)).contains("do not overlap"));
        assert_eq!(driver.calls("cuMemcpyDtoDAsync"), 0);
        x.put(peer, 6, gpu.alloc(world, 0).unwrap().view(), stream).unwrap();
        assert_eq!(driver.calls("cuMemcpyDtoDAsync"), 0, "nothing is to be copied");

        part.write(&[own as u32 + 1; 4], stream).unwrap();
        x.put(peer, 2, part.view(), stream).unwrap();
        world.barrier().unwrap();
        let (ours, theirs) = (own as u32 + 1, peer as u32 + 1);
        assert_eq!(x.read(stream).unwrap(), [0, 0, theirs, theirs, theirs, theirs]);
        x.get(peer, 1, part.view_mut(), stream).unwrap();
        assert_eq!(part.read(stream).unwrap(), [0, ours, ours, ours]);
        world.barrier().unwrap();
    });
}

#[test]
fn signals_in_another_stream_are_not_ordered_with_collectives() {
    let drivers = drivers(2);
    signalling(&drivers);
    ranks(&drivers, |world, driver, gpu, a| {
        let b = gpu.stream().unwrap();
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        x.barrier(a).unwrap();
        x.put_signal(world.rank(), 0, &b).unwrap();
        x.barrier(a).unwrap();
        x.wait_signal(world.rank(), 0, &b).unwrap();
        assert_eq!(driver.calls("cuStreamWaitEvent"), 0);
        world.barrier().unwrap();
    });
}

#[test]
fn signals_and_copies_are_captured_and_replayed() {
    let drivers = drivers(2);
    signalling(&drivers);
    ranks(&drivers, |world, driver, gpu, stream| {
        let (own, peer) = (world.rank(), 1 - world.rank());
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let mut data = gpu.alloc::<u32>(world, 4).unwrap();
        let graph = stream.capture(|| {
            x.put_with_signal(peer, 0, data.view(), 3, stream)?;
            x.wait_signal(peer, 3, stream)?;
            x.barrier_on_channel(4, stream)
        });
        let graph = graph.unwrap();
        assert!(driver.launches().is_empty(), "noted, not done");
        for round in 0..3 {
            data.write(&[10 * round + own as u32; 4], stream).unwrap();
            // SAFETY: `x` and `data` are there, and both ranks launch theirs.
            unsafe { graph.launch(stream) }.unwrap();
            assert_eq!(x.read(stream).unwrap(), [10 * round + peer as u32; 4]);
            x.barrier_on_channel(5, stream).unwrap();
        }
    });
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let drivers = drivers(2);
    signalling(&drivers);
    on(
        &drivers,
        |rank| rank,
        |world, driver, gpu, stream| {
            let other = Gpu::with_driver(driver.clone(), 1 - world.rank() as u32).unwrap();
            let theirs = other.stream().unwrap();
            let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
            let e = x.put_signal(world.rank(), 0, &theirs).unwrap_err();
            assert!(matches!(e, Error::Usage { op: "put_signal", .. }), "{e}");
            let e = x.memset32(0, 0, 1, 1, &theirs).unwrap_err();
            assert!(e.to_string().contains("expected a stream of cuda:"), "{e}");
            x.put_signal(world.rank(), 0, stream).unwrap();
        },
    );
}

/// As a kernel that waits in vain: notes it, and all ranks are told.
fn give_up(launched: &Launched) {
    let handle = Group::of(launched);
    let (from, channel) = (launched.u32(1).unwrap(), launched.u32(2).unwrap());
    let note = [1, handle.u32(16), channel, from, 0, 0];
    for (i, value) in note.into_iter().enumerate() {
        word(handle.mailbox() + 8 + 4 * i as u64).store(value, Ordering::Relaxed);
    }
    word(handle.mailbox() + 4).store(2, Ordering::Release);
}

#[test]
fn a_wait_in_vain_is_the_error_of_every_call_until_the_group_is_back_in_step() {
    let drivers = drivers(2);
    for driver in &drivers {
        driver.kernel("wait_signal", &declared("move", "wait_signal"), give_up);
    }
    ranks(&drivers, |world, driver, gpu, stream| {
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let peer = 1 - world.rank();
        for by_synchronize in [false, true] {
            x.wait_signal(peer, 6, stream).unwrap();
            let told =
                if by_synchronize { x.synchronize(stream) } else { x.put_signal(0, 0, stream) };
            match told.unwrap_err() {
                Error::Timeout { op: "wait_signal", channel: Some(6), waiting_for, .. } => {
                    assert_eq!(waiting_for, [peer]);
                }
                other => panic!("{other:?}"),
            }
            let launched = driver.launches().len();
            for refused in [x.put_signal(0, 0, stream), x.memset32(0, 0, 1, 1, stream)] {
                let e = refused.unwrap_err();
                assert!(matches!(e, Error::Timeout { op: "wait_signal", .. }), "{e}");
            }
            assert_eq!(driver.launches().len(), launched);
            let pad = x.handle().signal_pad_ptrs()[world.rank()] as u64;
            word(pad + 4).store(1, Ordering::Relaxed); // a signal that came too late
            world.resync().unwrap();
            assert_eq!(load(pad + 4), 0, "pads are as new");
            x.memset32(world.rank(), 0, 1, 1, stream).unwrap();
            world.barrier().unwrap();
        }
    });
}

/// Those of the group are its own, or the environment's for devices; a call may have another.
#[test]
fn a_call_waits_for_its_own_limit_or_the_groups() {
    let drivers = drivers(1);
    for driver in &drivers {
        for kernel in ["put_signal", "wait_signal", "barrier_on_channel"] {
            driver.kernel(kernel, &declared("move", kernel), |_| ());
        }
    }
    ranks(&drivers, |world, driver, gpu, stream| {
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let waited = || {
            let launched = driver.launches().pop().unwrap();
            let at = |at: usize| launched.parameters[0][at];
            u64::from_ne_bytes(std::array::from_fn(|i| at(24 + i)))
        };
        let limit = Duration::from_millis(1500);
        x.put_signal_within(0, 0, limit, stream).unwrap();
        assert_eq!(waited(), 1_500_000_000);
        x.wait_signal_within(0, 0, limit, stream).unwrap();
        assert_eq!(waited(), 1_500_000_000);
        x.barrier_on_channel_within(0, limit, stream).unwrap();
        assert_eq!(waited(), 1_500_000_000);
        x.put_signal(0, 0, stream).unwrap();
        assert_eq!(waited(), 1_800_000_000_000, "what devices have by default");
        world.set_timeout(Duration::from_secs(7));
        x.put_signal_within(0, 0, Duration::ZERO, stream).unwrap();
        assert_eq!(waited(), 7_000_000_000);
        world.set_timeout(Duration::ZERO);
        x.put_signal(0, 0, stream).unwrap();
        assert_eq!(waited(), 0);
    });
}

#[test]
fn nothing_is_put_into_a_stream_once_a_rank_is_lost() {
    Ranks::new(2).dying(&[1]).run(test_name!(), |world| {
        let driver = Fake::plain(2);
        let gpu = Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let mut x = gpu.alloc::<u32>(&world, 10).unwrap().rendezvous(&world).unwrap();
        let mut splits = gpu.alloc::<i64>(&world, 2).unwrap().rendezvous(&world).unwrap();
        let (mut out, mut received) =
            (gpu.alloc(&world, 8).unwrap(), gpu.alloc(&world, 4).unwrap());
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        while world.check().is_ok() {
            std::thread::yield_now();
        }
        let all = [
            x.put_signal(0, 0, &stream),
            x.wait_signal(1, 0, &stream),
            x.barrier_on_channel(0, &stream),
            x.put(1, 0, out.view(), &stream),
            x.get(1, 0, out.view_mut(), &stream),
            x.memset32(1, 0, 1, 1, &stream),
            x.write_value32(1, 0, 1, &stream),
            x.all_to_all_v(1, &mut splits, out.view_mut(), received.view_mut(), &stream),
        ];
        for refused in all {
            assert!(matches!(refused, Err(Error::PeerLost { rank: 1, .. })), "{refused:?}");
        }
        assert!(driver.launches().is_empty());
        assert_eq!(driver.calls("cuMemcpyDtoDAsync") + driver.calls("cuStreamWriteValue32"), 0);
    });
}

#[test]
fn a_call_that_the_driver_fails_is_named_and_the_next_works() {
    let drivers = drivers(1);
    signalling(&drivers);
    ranks(&drivers, |world, driver, gpu, stream| {
        let x = gpu.alloc::<u32>(world, 4).unwrap().rendezvous(world).unwrap();
        let data = gpu.alloc::<u32>(world, 4).unwrap();
        let calls: [(&str, &dyn Fn() -> symmem::Result<()>); 5] = [
            ("cuModuleLoadDataEx", &|| x.put_signal(0, 0, stream)),
            ("cuLaunchKernelEx", &|| x.wait_signal(0, 0, stream)),
            ("cuMemcpyDtoDAsync", &|| x.put(0, 0, data.view(), stream)),
            ("cuMemsetD32Async", &|| x.memset32(0, 0, 1, 1, stream)),
            ("cuStreamWriteValue32", &|| x.write_value32(0, 0, 1, stream)),
        ];
        for (call, work) in calls {
            driver.fail(call, 1, code::UNKNOWN);
            let e = work().unwrap_err();
            assert!(matches!(&e, Error::Driver { call: named, .. } if *named == call), "{e}");
            work().unwrap();
        }
    });
}
