//! What kernels note, and what the host makes of it. The kernels are functions of the test's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use symmem::Error;
use symmem::cuda::{Gpu, Stream};
use symmem_sys::cuda::fake::Fake;
use symmem_sys::cuda::{Devices, Streams, code};
use symmem_testing::{Ranks, die, test_name};

use super::{GROUP, Group, drivers, load, ranks, word};

/// Offsets in the mailbox.
const POISON: u64 = 0;
const STATE: u64 = 4;
/// Offsets in a pad.
const BROKEN: u64 = 0;
const DRAWN: u64 = 64;
const EPOCHS: u64 = 128;
const FLAGS: u64 = 4096;

const fn pad_bytes(ranks: usize) -> u64 {
    (4096 + 2048 * ranks).next_multiple_of(4096) as u64 + 524_288 * ranks as u64
}

/// kind, op, channel, rank, ours, theirs
type Note = [u32; 6];

/// As a kernel that gives up does: tells all ranks, and notes why. Flags and data of its peers may lie there.
fn give_up(group: &Group, note: Note) {
    let own = group.pad(group.rank());
    for at in (FLAGS..pad_bytes(group.size())).step_by(1000) {
        word(own + at / 4 * 4).store(u32::MAX / 2, Ordering::Relaxed);
    }
    word(own + DRAWN).store(7, Ordering::Relaxed);
    for block in 0..4 {
        word(own + EPOCHS + 4 * block).fetch_add(5 * (group.rank() as u32 + 1), Ordering::Relaxed);
    }
    for rank in 0..group.size() {
        word(group.pad(rank) + BROKEN).store(group.rank() as u32 + 1, Ordering::Relaxed);
    }
    for (i, value) in note.into_iter().enumerate() {
        word(group.mailbox() + STATE + 4 + 4 * i as u64).store(value, Ordering::Relaxed);
    }
    word(group.mailbox() + STATE).store(2, Ordering::Release);
}

/// Has each rank's next barrier note what stands in its place.
fn noting(drivers: &[Arc<Fake>]) -> Vec<Arc<Mutex<Option<Note>>>> {
    let notes: Vec<Arc<Mutex<Option<Note>>>> = drivers.iter().map(|_| Arc::default()).collect();
    for (driver, note) in drivers.iter().zip(&notes) {
        let note = note.clone();
        driver.kernel("barrier", &[GROUP], move |launched| {
            let group = Group::of(launched);
            match note.lock().unwrap().take() {
                Some(note) => give_up(&group, note),
                None => check_in_order(&group),
            }
        });
    }
    notes
}

/// What a kernel finds after the pads were put in order.
fn check_in_order(group: &Group) {
    let own = group.pad(group.rank());
    assert_eq!((load(own + BROKEN), load(group.mailbox() + STATE)), (0, 0));
    assert_eq!(load(own + DRAWN), 0, "no pieces of work are drawn yet");
    for rank in 0..group.size() {
        let words = (EPOCHS..pad_bytes(group.size())).step_by(4);
        let left = words.map(|at| load(group.pad(rank) + at)).find(|word| *word != 0);
        assert_eq!(left, None, "pads are as new");
    }
}

fn fail_and_resync(note: Note, check: impl Fn(Error) + Sync) {
    let drivers = drivers(2);
    let notes = noting(&drivers);
    ranks(&drivers, |world, driver, gpu, stream| {
        let mut x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let y = gpu.alloc::<f32>(world, 10).unwrap();
        let graph = stream.capture(|| x.barrier(stream)).unwrap();
        for round in 0..2 {
            world.barrier().unwrap();
            *notes[world.rank()].lock().unwrap() = Some(note);
            // SAFETY: the memory is there, and both ranks launch theirs.
            let launch = || unsafe { graph.launch(stream) };
            if round == 0 { x.barrier(stream) } else { launch() }.unwrap();
            world.barrier().unwrap();
            let launched = driver.launches().len();
            for _ in 0..3 {
                check(launch().unwrap_err());
                check(x.barrier(stream).unwrap_err());
                check(x.put_signal(0, 0, stream).unwrap_err());
                check(x.synchronize(stream).unwrap_err());
                check(x.read(stream).unwrap_err());
                check(x.write(&[0.0; 10], stream).unwrap_err());
                check(y.read(stream).unwrap_err());
                check(stream.synchronize().unwrap_err());
                check(stream.is_idle().unwrap_err());
                check(gpu.check_failures().unwrap_err());
            }
            assert_eq!(driver.launches().len(), launched, "nothing is launched after a failure");
            world.resync().unwrap();
            gpu.check_failures().unwrap();
            launch().unwrap();
            x.barrier(stream).unwrap();
            x.synchronize(stream).unwrap();
            y.read(stream).unwrap();
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_kernel_that_waits_in_vain_is_a_timeout() {
    // The limit that it waited for, in nanoseconds.
    fail_and_resync([1, 1, 9, 1, 7, 2], |e| match e {
        Error::Timeout { op: "all_reduce", channel: Some(9), waiting_for, after, .. } => {
            assert_eq!((waiting_for, after), (vec![1], Duration::from_nanos((2 << 32) + 7)));
        }
        other => panic!("{other:?}"),
    });
}

#[test]
fn a_kernel_of_a_poisoned_group_names_the_lost_rank() {
    fail_and_resync([2, 4, 0, 1, 0, 0], |e| {
        assert!(matches!(e, Error::PeerLost { rank: 1, during: "all_gather", .. }), "{e:?}");
    });
}

#[test]
fn a_kernel_that_meets_another_call_is_a_mismatch() {
    let (broadcast, all_reduce) = (5 << 25 | 1 << 20 | 0xabc, 1 << 25 | 3 << 20 | 0xdef);
    fail_and_resync([3, 5, 0, 1, broadcast, all_reduce], |e| {
        assert!(matches!(e, Error::Mismatch { op: "broadcast", rank: 1, .. }), "{e:?}");
        let how = "here broadcast of f32, on rank 1 all_reduce of bf16";
        assert!(e.to_string().ends_with(how), "{e}");
    });
}

#[test]
fn a_kernel_that_is_told_by_a_peer_names_it() {
    fail_and_resync([4, 0, 0, 1, 0, 0], |e| {
        assert!(matches!(e, Error::PeerFailed { op: "barrier", rank: 1, .. }), "{e:?}");
    });
}

#[test]
fn a_kernel_that_is_told_says_for_whom_the_other_waited() {
    fail_and_resync([4, 0, 0, 1, 0, 3], |e| match e {
        Error::PeerFailed { rank: 1, reason, .. } => {
            assert!(reason.starts_with("it waited in vain for rank 2"), "{reason}");
        }
        // On rank 1 itself, of which another block told before the one that waited noted it.
        Error::Timeout { waiting_for, .. } => assert_eq!(*waiting_for, [2]),
        other => panic!("{other:?}"),
    });
}

#[test]
fn a_kernel_that_finds_rows_that_do_not_fit_is_a_usage_error() {
    fail_and_resync([5, 7, 0, 1, 2, 0], |e| {
        assert!(matches!(e, Error::Usage { op: "all_to_all_v", .. }), "{e:?}");
        assert!(e.to_string().contains("rows of rank 1 beyond the input"), "{e}");
    });
}

#[test]
fn a_kernel_of_the_callers_own_is_told_as_such() {
    fail_and_resync([4, u32::MAX, 0, 0, 0, 0], |e| {
        assert!(matches!(e, Error::PeerFailed { rank: 0, .. }), "{e:?}");
    });
}

#[test]
fn the_error_survives_a_stream_that_goes() {
    let drivers = drivers(2);
    let notes = noting(&drivers);
    ranks(&drivers, |world, _, gpu, stream| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let other = gpu.stream().unwrap();
        *notes[world.rank()].lock().unwrap() = Some([4, 0, 0, 0, 0, 0]);
        x.barrier(&other).unwrap();
        drop(other);
        world.barrier().unwrap();
        x.barrier(stream).unwrap_err();
        world.resync().unwrap();
        x.barrier(stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn a_resync_that_fails_on_one_rank_is_tried_again_there_while_the_others_wait() {
    for (call, nth) in [
        ("cuStreamQuery", 1),
        ("cuStreamCreate", 1),
        ("cuMemsetD32Async", 1),
        ("cuStreamSynchronize", 1),
    ] {
        let drivers = drivers(2);
        let notes = noting(&drivers);
        ranks(&drivers, |world, driver, gpu, stream| {
            let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
            *notes[world.rank()].lock().unwrap() = Some([4, 0, 0, 0, 0, 0]);
            x.barrier(stream).unwrap();
            world.barrier().unwrap();
            x.barrier(stream).unwrap_err();
            if world.rank() == 1 {
                driver.fail(call, nth, code::UNKNOWN);
                let e = world.resync().unwrap_err();
                assert!(e.to_string().contains(call), "{call} {nth}: {e}");
            }
            world.resync().unwrap();
            x.barrier(stream).unwrap();
            x.synchronize(stream).unwrap();
            world.barrier().unwrap();
        });
    }
}

/// Graphs may still have kernels where they were launched, and somebody else's streams may hold any of them.
#[test]
fn a_resync_waits_for_all_streams_of_the_group_and_for_no_other() {
    ranks(&drivers(1), |world, driver, gpu, a| {
        let [b, c, unused] = [(); 3].map(|()| gpu.stream().unwrap());
        let device = driver.device(0).unwrap();
        driver.context_push(driver.context_retain(device).unwrap()).unwrap();
        let foreign = driver.stream_create().unwrap();
        driver.context_pop().unwrap();
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        let graph = b.capture(|| x.barrier(&b)).unwrap();
        x.barrier(a).unwrap();
        // SAFETY: the memory is there, and no other rank takes part.
        unsafe { graph.launch(&c) }.unwrap();
        // SAFETY: a stream of this device, which lives for longer.
        let known = unsafe { Stream::from_raw(gpu, foreign.raw()) };
        let before = driver.calls("cuStreamQuery");
        world.resync().unwrap();
        let queries = driver.calls("cuStreamQuery") - before;
        assert_eq!(queries, 5, "a, b, c, the foreign one, and what clears the pads when it goes");
        drop((known, unused));
        // SAFETY: the test's own, and not used again.
        unsafe { driver.stream_destroy(foreign) }.unwrap();
        // SAFETY: likewise.
        unsafe { driver.context_release(device) }.unwrap();
    });
}

/// It waits for the device.
#[test]
fn a_group_is_not_put_back_in_step_within_a_capture() {
    let drivers = drivers(2);
    let notes = noting(&drivers);
    ranks(&drivers, |world, _, gpu, stream| {
        let x = gpu.alloc::<f32>(world, 10).unwrap().rendezvous(world).unwrap();
        *notes[world.rank()].lock().unwrap() = Some([4, 0, 0, 0, 0, 0]);
        x.barrier(stream).unwrap();
        world.barrier().unwrap();
        let graph = stream.capture(|| {
            let e = world.resync().unwrap_err();
            let refused = matches!(e, Error::Usage { op: "resync", .. } | Error::PeerFailed { .. });
            assert!(refused && e.to_string().contains("capturing a graph"), "{e}");
            Ok(())
        });
        graph.unwrap();
        world.resync().unwrap();
        x.barrier(stream).unwrap();
        x.synchronize(stream).unwrap();
        world.barrier().unwrap();
    });
}

#[test]
fn the_mailbox_is_poisoned_when_a_peer_dies() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let driver = Fake::plain(3);
        let address: Arc<Mutex<u64>> = Arc::default();
        let seen = address.clone();
        driver.kernel("barrier", &[GROUP], move |launched| {
            *seen.lock().unwrap() = Group::of(launched).mailbox();
        });
        let gpu = Gpu::with_driver(driver, world.rank() as u32).unwrap();
        let stream = gpu.stream().unwrap();
        let x = gpu.alloc::<f32>(&world, 10).unwrap().rendezvous(&world).unwrap();
        x.barrier(&stream).unwrap();
        world.barrier().unwrap();
        if world.rank() == 1 {
            die();
        }
        let (mailbox, begin) = (*address.lock().unwrap(), Instant::now());
        while load(mailbox + POISON) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "nobody wrote it");
            std::thread::yield_now();
        }
        assert_eq!(load(mailbox + POISON), 2, "the lost rank, and one");
        let e = x.barrier(&stream).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, during: "barrier", .. }), "{e:?}");
    });
}
