//! What barriers, signals and signal pads promise.

use symmem::{Error, World};

use super::{SHORT, SOON, next, previous};

/// A signal carries all that was written before it.
pub fn signals_order_data(world: World) {
    let x = world.alloc::<u64>(512).unwrap().rendezvous(&world).unwrap().open().unwrap();
    let (to, from) = (next(&world), previous(&world));
    for round in 1..200_u64 {
        x.put(to, 0, &[round; 512]).unwrap();
        world.put_signal(to, 3, SOON).unwrap();
        world.wait_signal(from, 3, SOON).unwrap();
        let mut own = [0; 512];
        x.get(world.rank(), 0, &mut own).unwrap();
        assert_eq!(own, [round; 512]);
        world.put_signal(from, 4, SOON).unwrap();
        world.wait_signal(to, 4, SOON).unwrap();
    }
    x.close().unwrap();
}

/// As [`signals_order_data`], with the plain stores of a caller who keeps to the protocol.
pub fn signals_order_plain_stores(world: World) {
    let x = world.alloc::<u64>(512).unwrap().rendezvous(&world).unwrap();
    let to = x.peer_ptr(next(&world)).unwrap();
    for round in 1..200_u64 {
        for i in 0..512 {
            // SAFETY: the receiver does not look before our signal, nor we write again before its answer.
            unsafe { to.wrapping_add(i).write_volatile(round) };
        }
        world.put_signal(next(&world), 3, SOON).unwrap();
        world.wait_signal(previous(&world), 3, SOON).unwrap();
        assert!(x.local().iter().all(|v| *v == round));
        world.put_signal(previous(&world), 4, SOON).unwrap();
        world.wait_signal(next(&world), 4, SOON).unwrap();
    }
}

/// Signals to oneself, on the first and the last channel.
pub fn signals_reach_oneself_on_every_channel(world: World) {
    for channel in [0, world.channels() - 1] {
        world.put_signal(world.rank(), channel, SOON).unwrap();
        world.wait_signal(world.rank(), channel, SOON).unwrap();
    }
}

/// A second signal waits until the first is consumed.
pub fn a_full_slot_holds_the_sender_back(world: World) {
    let (to, from) = (next(&world), previous(&world));
    world.put_signal(to, 0, SOON).unwrap();
    world.barrier().unwrap();
    let e = world.put_signal(to, 0, SHORT).unwrap_err();
    let Error::Timeout { op, channel, waiting_for, .. } = e else { panic!("{e}") };
    assert_eq!((op, channel, waiting_for), ("put_signal", Some(0), vec![to]));
    world.barrier().unwrap();
    world.wait_signal(from, 0, SOON).unwrap();
    world.put_signal(to, 0, SOON).unwrap();
    world.wait_signal(from, 0, SOON).unwrap();
}

/// Bad arguments are refused with rank, operation, expectation and value; the next call works.
pub fn bad_ranks_and_channels_are_named(world: World) {
    let n = world.size();
    let channels = world.channels();
    let text = |r: symmem::Result<()>| r.unwrap_err().to_string();
    let own = world.rank();
    assert_eq!(
        text(world.put_signal(n, 0, SOON)),
        format!("rank {own}: put_signal: expected a rank in [0, {n}), got {n}")
    );
    assert!(text(world.wait_signal(usize::MAX, 0, SOON)).contains("a rank in [0"));
    assert!(text(world.barrier_on(channels, SOON)).contains("maximum supported channel"));
    assert!(text(world.put_signal(0, channels, SOON)).contains("maximum supported channel"));
    world.barrier_on(channels - 1, SOON).unwrap();
}

/// A barrier that times out names the missing and is finished by a later call.
pub fn a_barrier_that_timed_out_is_resumed(world: World) {
    if world.rank() == 0 {
        let e = world.barrier_on(1, SHORT).unwrap_err();
        let Error::Timeout { op, channel, waiting_for, .. } = e else { panic!("{e}") };
        assert_eq!((op, channel), ("barrier", Some(1)));
        assert_eq!(waiting_for, (1..world.size()).collect::<Vec<_>>());
    }
    world.barrier().unwrap();
    for _ in 0..3 {
        world.barrier_on(1, SOON).unwrap();
    }
}

/// The user's pad is the user's: built-in synchronisation leaves it alone, and its protocol works.
pub fn the_allocations_pad_belongs_to_the_user(world: World) {
    use std::sync::atomic::Ordering::Relaxed;
    let x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    let y = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    let own = x.handle().signal_pad().words(world.rank()).unwrap();
    own.iter().for_each(|w| w.store(1, Relaxed));
    world.barrier().unwrap();
    world.put_signal(next(&world), 1, SOON).unwrap();
    world.wait_signal(previous(&world), 1, SOON).unwrap();
    let x = x.share().unwrap().release().unwrap();
    let own = x.handle().signal_pad().words(world.rank()).unwrap();
    assert!(own.iter().all(|w| w.load(Relaxed) == 1));
    let pad = y.handle().signal_pad();
    let last = pad.channels() - 1;
    for _ in 0..20 {
        pad.put(next(&world), last, SOON).unwrap();
        let layout = world.size() * last + previous(&world);
        pad.wait(previous(&world), last, SOON).unwrap();
        assert!(layout < pad.words(world.rank()).unwrap().len());
    }
    world.barrier().unwrap();
    assert!(pad.words(world.rank()).unwrap().iter().all(|w| w.load(Relaxed) == 0), "zero at rest");
    world.barrier().unwrap();
}

/// Word `ws · channel + source`, as PyTorch's kernels have it.
pub fn the_pads_layout_is_pytorchs(world: World) {
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    let x = world.alloc::<u32>(1).unwrap().rendezvous(&world).unwrap();
    let pad = x.handle().signal_pad();
    let n = world.size();
    pad.words(next(&world)).unwrap()[n * 3 + world.rank()].store(1, Relaxed);
    world.barrier().unwrap();
    let own = pad.words(world.rank()).unwrap();
    let set: Vec<usize> = (0..own.len()).filter(|&i| own[i].load(Acquire) == 1).collect();
    assert_eq!(set, [n * 3 + previous(&world)]);
    pad.wait(previous(&world), 3, SOON).unwrap();
    assert_eq!(own[n * 3 + previous(&world)].load(Relaxed), 0);
    world.barrier().unwrap();
}

/// Every wait on a pad: its error names the operation that was called, and the channel.
pub fn waits_on_a_pad_name_their_channel(world: World) {
    let x = world.alloc::<u32>(1).unwrap().rendezvous(&world).unwrap();
    let pad = x.handle().signal_pad();
    let me = world.rank();
    let check = |waited: symmem::Result<()>, expected: &str| match waited.unwrap_err() {
        Error::Timeout { op, channel: Some(5), .. } if op == expected => {}
        e => panic!("{expected}: {e}"),
    };
    check(pad.wait(me, 5, SHORT), "signal_pad.wait");
    check(pad.wait_value(me, 5, 7, SHORT), "signal_pad.wait_value");
    pad.put(me, 5, SOON).unwrap();
    check(pad.put(me, 5, SHORT), "signal_pad.put");
    pad.wait(me, 5, SOON).unwrap();
    if me == 0 {
        check(pad.barrier(5, SHORT), "signal_pad.barrier");
    }
    world.barrier().unwrap();
    pad.barrier(5, SOON).unwrap();
    let stopped = symmem::interruptible(|| true, || pad.wait(me, 5, SOON)).unwrap_err();
    let is_named = matches!(stopped, Error::Interrupted { channel: Some(5), .. });
    assert!(is_named && stopped.to_string().contains("on channel 5: interrupted"), "{stopped}");
    world.barrier().unwrap();
}
