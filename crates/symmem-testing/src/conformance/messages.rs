//! What messages from one rank to another promise.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use symmem::store::SharedStore;
use symmem::{Deadline, Element, Error, ErrorKind, World, interruptible};

use super::{SHORT, SOON, next, previous};

/// More than is buffered on the way, so that a receiver has to take it.
const LARGE: usize = 3 << 20;

/// Values that differ between senders, messages and places.
fn values(from: usize, number: usize, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ (from * 1000 + number) as u32).collect()
}

fn expect(world: &World, from: usize, tag: u64, number: usize, len: usize) {
    let mut got = vec![0; len];
    world.recv(&mut got, from, tag).unwrap();
    assert!(got == values(from, number, len), "message {number} of {len} from rank {from}");
}

/// Empty messages, those of a few bytes, and those that take many fragments, one after the other.
pub fn messages_of_every_length_arrive(world: World) {
    let lengths = [0, 1, 2, 7, 8, 9, 100, 8_183, 8_184, 8_185, 8_192, 20_000, 65_536, 1_000_003];
    let (me, to, from) = (world.rank(), next(&world), previous(&world));
    for round in 0..3 {
        for (i, &len) in lengths.iter().enumerate() {
            let number = round * lengths.len() + i;
            if me % 2 == 0 {
                world.send(&values(me, number, len), to, 0).unwrap();
                expect(&world, from, 0, number, len);
            } else {
                expect(&world, from, 0, number, len);
                world.send(&values(me, number, len), to, 0).unwrap();
            }
        }
    }
    world.barrier().unwrap();
}

/// Small messages go around the ring many times.
pub fn many_messages_arrive_in_order(world: World) {
    let (me, to, from) = (world.rank(), next(&world), previous(&world));
    const BATCH: usize = 100;
    for round in 0..300 {
        for i in 0..BATCH {
            let number = round * BATCH + i;
            world.send(&values(me, number, number % 40), to, 5).unwrap();
        }
        for i in 0..BATCH {
            let number = round * BATCH + i;
            expect(&world, from, 5, number, number % 40);
        }
    }
    world.barrier().unwrap();
}

/// A message waits for a call with its tag, and those of one tag stay in order.
pub fn tags_are_kept_apart(world: World) {
    let (me, to, from) = (world.rank(), next(&world), previous(&world));
    let tags = [0, 1, u64::MAX, 1 << 40];
    for number in 0..6 {
        for (i, &tag) in tags.iter().enumerate() {
            world.send(&values(me, number * 10 + i, 1000), to, tag).unwrap();
        }
    }
    for (i, &tag) in tags.iter().enumerate().rev() {
        for number in 0..6 {
            expect(&world, from, tag, number * 10 + i, 1000);
        }
    }
    world.barrier().unwrap();
}

/// Ranks that all send first go on, because a rank that waits takes in what others send.
pub fn large_messages_cross(world: World) {
    let me = world.rank();
    for round in 0..3 {
        for to in (0..world.size()).filter(|&rank| rank != me) {
            world.send(&values(me, round, LARGE / 4), to, 9).unwrap();
        }
        for from in (0..world.size()).filter(|&rank| rank != me) {
            expect(&world, from, 9, round, LARGE / 4);
        }
    }
    world.barrier().unwrap();
}

/// Whoever waits for one message takes in others meanwhile, also large ones.
pub fn a_rank_that_waits_holds_nobody_up(world: World) {
    if world.rank() == 0 {
        world.barrier_on(1, SOON).unwrap();
        // The last rank sends this only once rank 1 is done with its large message, which nobody asks for yet.
        expect(&world, world.size() - 1, 1, 1, 3);
        expect(&world, 1, 2, 2, LARGE / 4);
    } else {
        world.barrier_on(1, SOON).unwrap();
    }
    if world.rank() == 1 {
        world.send(&values(1, 2, LARGE / 4), 0, 2).unwrap();
        world.send(&[1_u8], world.size() - 1, 3).unwrap();
    }
    if world.rank() == world.size() - 1 {
        world.recv(&mut [0_u8], 1, 3).unwrap();
        world.send(&values(world.rank(), 1, 3), 0, 1).unwrap();
    }
    world.barrier().unwrap();
}

/// Of any rank, a message of each comes, with its sender.
pub fn messages_of_any_rank_say_who_sent_them(world: World) {
    let (me, n) = (world.rank(), world.size());
    for (round, len) in [(0, 5), (1, LARGE / 4)] {
        if me > 0 {
            world.send(&values(me, round, len), 0, round as u64).unwrap();
            continue;
        }
        let mut senders = Vec::new();
        for _ in 1..n {
            let mut got = vec![0; len];
            let from = world.recv_any(&mut got, round as u64).unwrap();
            assert!(got == values(from, round, len));
            senders.push(from);
        }
        senders.sort_unstable();
        assert_eq!(senders, (1..n).collect::<Vec<_>>());
        let late = world.recv_any_by(&mut [0_u32], round as u64, SHORT).unwrap_err();
        let Error::Timeout { op, waiting_for, .. } = late else { panic!("{late}") };
        assert_eq!((op, waiting_for), ("recv_any", (1..n).collect::<Vec<_>>()));
    }
    world.barrier().unwrap();
}

/// A rank may send to itself, whatever fits.
pub fn messages_to_oneself_arrive(world: World) {
    let me = world.rank();
    world.send(&values(me, 0, 10), me, 1).unwrap();
    world.send(&values(me, 1, LARGE / 4), me, 1).unwrap();
    world.send(&values(me, 2, 3), me, 2).unwrap();
    expect(&world, me, 2, 2, 3);
    expect(&world, me, 1, 0, 10);
    let mut got = vec![0; LARGE / 4];
    assert_eq!(world.recv_any(&mut got, 1).unwrap(), me);
    assert!(got == values(me, 1, LARGE / 4));
    let late = world.recv_by(&mut [0_u32], me, 1, SHORT).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout);
    // More than is kept: another thread has to take it.
    let huge = vec![7_u8; 40 << 20];
    world.send(&huge, me, 3).unwrap();
    let late = world.send_by(&huge, me, 3, SHORT).unwrap_err();
    assert!(matches!(&late, Error::Timeout { waiting_for, .. } if *waiting_for == [me]), "{late}");
    std::thread::scope(|scope| {
        scope.spawn(|| world.send(&huge, me, 3).unwrap());
        let mut got = vec![0_u8; huge.len()];
        for _ in 0..2 {
            got.fill(0);
            world.recv(&mut got, me, 3).unwrap();
            assert!(got == huge);
        }
    });
}

fn mismatch<T: Element>(received: symmem::Result<T>) -> (&'static str, usize, String, String) {
    match received.err().unwrap() {
        Error::Mismatch { op: "recv" | "recv_any", what, rank, ours, theirs, .. } => {
            (what, rank, ours, theirs)
        }
        other => panic!("{other}"),
    }
}

/// A message of another length or type is named and consumed, and the next one arrives.
pub fn a_message_that_does_not_fit_is_named(world: World) {
    let (to, from) = (next(&world), previous(&world));
    for kept in [false, true] {
        world.send(&[1.0_f32; 5], to, 0).unwrap();
        world.send(&[1_u32; 4], to, 0).unwrap();
        world.send(&vec![1_u8; LARGE / 8], to, 0).unwrap();
        world.send(&[1.5_f32; 4], to, 0).unwrap();
        world.send(&[9_u8], to, 1).unwrap();
        if kept {
            world.recv(&mut [0_u8], from, 1).unwrap(); // takes in the others
        }
        let mut data = [0.0_f32; 4];
        let text = |ours: &str, theirs: &str| (ours.to_owned(), theirs.to_owned());
        let (what, rank, ours, theirs) = mismatch(world.recv(&mut data, from, 0).map(|()| 0_u8));
        assert_eq!((what, rank, (ours, theirs)), ("length", from, text("4 x f32", "5 x f32")));
        let (what, rank, ours, theirs) = mismatch(world.recv_any(&mut data, 0));
        assert_eq!(
            (what, rank, (ours, theirs)),
            ("element type", from, text("4 x f32", "4 x u32"))
        );
        let (_, _, _, theirs) = mismatch(world.recv(&mut data, from, 0).map(|()| 0_u8));
        assert_eq!(theirs, format!("{} x u8", LARGE / 8));
        world.recv(&mut data, from, 0).unwrap();
        assert_eq!(data, [1.5; 4]);
        if !kept {
            world.recv(&mut [0_u8], from, 1).unwrap();
        }
        world.barrier().unwrap();
    }
}

/// What was given up leaves nothing behind: the message of a send is withdrawn, that of a receive comes later.
pub fn messages_given_up_leave_no_trace(world: World) {
    let (me, to, from) = (world.rank(), next(&world), previous(&world));
    let late = world.recv_by(&mut [0_u32; 3], from, 4, SHORT).unwrap_err();
    let Error::Timeout { op, channel, waiting_for, doing, .. } = late else { panic!("{late}") };
    assert_eq!((op, channel, waiting_for), ("recv", None, vec![from]));
    assert!(doing.len() == 1, "{doing:?}");
    world.barrier().unwrap();
    // Nobody takes this meanwhile: all ranks do the same, and then wait in a barrier. A rank that waits in `send` would take it
    // in, so the ranks do it one after the other.
    for sender in 0..world.size() {
        if me == sender {
            let late = world.send_by(&values(me, 1, LARGE / 4), to, 4, SHORT).unwrap_err();
            let Error::Timeout { op, waiting_for, .. } = late else { panic!("{late}") };
            assert_eq!((op, waiting_for), ("send", vec![to]));
        }
        world.barrier().unwrap();
    }
    let late = world.recv_by(&mut vec![0_u32; LARGE / 4], from, 4, SHORT).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
    world.barrier().unwrap();
    world.send(&values(me, 2, LARGE / 4), to, 4).unwrap();
    expect(&world, from, 4, 2, LARGE / 4);
    // A receive that gives up at any moment of a large message.
    let sending = std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            (0..20).try_for_each(|number| world.send(&values(me, number, LARGE / 4), to, 6))
        });
        let mut got = vec![0; LARGE / 4];
        for number in 0..20 {
            let mut limit = Duration::from_micros(1);
            while let Err(late) = world.recv_by(&mut got, from, 6, Deadline::after(limit)) {
                assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
                limit *= 2;
            }
            assert!(got == values(from, number, LARGE / 4), "message {number}");
        }
        sending.join()
    });
    sending.unwrap().unwrap();
    world.barrier().unwrap();
}

thread_local! {
    /// For [`stall`].
    static STORE: RefCell<Option<SharedStore>> = const { RefCell::new(None) };
}

/// Holds up a wait of this thread, until another rank lets it go on.
fn stall() -> bool {
    STORE.with_borrow(|store| {
        if let Some(store) = store {
            store.set("messages/stalled", b"").unwrap();
            store.wait(&["messages/go"], SOON).unwrap();
        }
    });
    false
}

/// Sends a message, and stops in the middle of it.
fn send_half(world: &World, to: usize, tag: u64) {
    STORE.set(Some(world.store().clone()));
    interruptible(stall, || world.send(&values(world.rank(), 1, LARGE / 4), to, tag)).unwrap();
}

/// The rest of a message whose receiver has panicked does not go to whoever receives next.
pub fn a_panic_in_a_wait_for_a_message_leaves_no_trace(world: World) {
    if world.rank() == 1 {
        send_half(&world, 0, 1);
        world.send(&values(1, 2, LARGE / 4), 0, 2).unwrap();
    } else {
        world.store().wait(&["messages/stalled"], SOON).unwrap();
        let mut got = vec![0_u32; LARGE / 4];
        let wait = || world.recv(&mut got, 1, 1);
        let wait = AssertUnwindSafe(|| interruptible(|| panic!("by design"), wait));
        assert!(catch_unwind(wait).is_err());
        world.store().set("messages/go", b"").unwrap();
        expect(&world, 1, 2, 2, LARGE / 4);
        expect(&world, 1, 1, 1, LARGE / 4);
    }
    world.barrier().unwrap();
}

/// Who waits for any rank gets the message that has come, not only the one that has begun to come.
pub fn a_message_that_stops_half_way_is_not_in_the_way_of_others(world: World) {
    match world.rank() {
        1 => send_half(&world, 0, 1),
        2 => {
            world.store().wait(&["messages/received"], SOON).unwrap();
            world.send(&values(2, 1, LARGE / 4), 0, 1).unwrap();
        }
        _ => {
            world.store().wait(&["messages/stalled"], SOON).unwrap();
            world.store().set("messages/received", b"").unwrap();
            let mut got = vec![0; LARGE / 4];
            assert_eq!(world.recv_any_by(&mut got, 1, Duration::from_secs(2)).unwrap(), 2);
            assert!(got == values(2, 1, LARGE / 4));
            world.store().set("messages/go", b"").unwrap();
            assert_eq!(world.recv_any(&mut got, 1).unwrap(), 1);
            assert!(got == values(1, 1, LARGE / 4));
        }
    }
    world.barrier().unwrap();
}

/// A timeout says what the other rank waits for, and with which tags it has sent messages.
pub fn a_wait_for_the_wrong_tag_is_explained(world: World) {
    if world.rank() == 0 {
        world.send(&[1_u8], 1, 7).unwrap();
        world.send(&[1_u8], 1, 3).unwrap();
        world.barrier_on(1, SOON).unwrap();
        world.recv(&mut [0_u8], 1, 5).unwrap();
    } else if world.rank() == 1 {
        world.barrier_on(1, SOON).unwrap();
        let late =
            world.recv_by(&mut [0_u8], 0, 4, Duration::from_millis(500)).unwrap_err().to_string();
        assert!(late.contains("messages that wait here, with tag 3, 7"), "{late}");
        assert!(late.contains("recv with tag 5 of group") && late.contains("rank 1"), "{late}");
        world.send(&[1_u8], 0, 5).unwrap();
        world.recv(&mut [0_u8], 0, 3).unwrap();
        world.recv(&mut [0_u8], 0, 7).unwrap();
    } else {
        world.barrier_on(1, SOON).unwrap();
    }
    world.barrier().unwrap();
}

/// Threads of one rank send and receive at the same time, with a tag each, small and large messages.
pub fn threads_send_and_receive_at_the_same_time(world: World) {
    let (me, to, from) = (world.rank(), next(&world), previous(&world));
    let len = |number: usize| [3, 20_000, 200_000][number % 3];
    std::thread::scope(|scope| {
        for tag in 0..3_u64 {
            let world = &world;
            let number = move |i: usize| tag as usize * 100 + i;
            scope.spawn(move || {
                (0..30).for_each(|i| {
                    world.send(&values(me, number(i), len(number(i))), to, tag).unwrap();
                });
            });
            scope.spawn(move || {
                (0..30).for_each(|i| expect(world, from, tag, number(i), len(number(i))));
            });
        }
    });
    world.barrier().unwrap();
}

/// Several threads take messages with one tag: each message comes once.
pub fn threads_share_the_messages_of_a_tag(world: World) {
    let (to, n) = (next(&world), 40);
    let sum = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| (0..4 * n).for_each(|i| world.send(&[i; 5000], to, 0).unwrap()));
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..n {
                    let mut got = [0_u32; 5000];
                    world.recv_any(&mut got, 0).unwrap();
                    assert!(got.iter().all(|value| *value == got[0]));
                    sum.fetch_add(got[0], std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), (0..4 * n).sum::<u32>());
    world.barrier().unwrap();
}

/// Groups of the same ranks have messages of their own, and collective calls have nothing to do with them.
pub fn groups_have_messages_of_their_own(world: World) {
    let all: Vec<usize> = (0..world.size()).rev().collect();
    let group = world.subgroup(&all).unwrap();
    let (to, from) = (next(&world), previous(&world));
    world.send(&[1_u8], to, 0).unwrap();
    group.send(&[2_u8], (group.rank() + 1) % group.size(), 0).unwrap();
    let mut sum = [1_u32];
    world.all_reduce(&mut sum, symmem::ReduceOp::Sum).unwrap();
    let mut got = [0_u8];
    group.recv_any(&mut got, 0).unwrap();
    assert_eq!(got, [2]);
    world.recv(&mut got, from, 0).unwrap();
    assert_eq!(got, [1]);
    world.barrier().unwrap();
}

/// Bad arguments are refused with rank, operation, expectation and value.
pub fn ranks_that_are_none_are_no_receivers(world: World) {
    let (own, n) = (world.rank(), world.size());
    assert_eq!(
        world.send(&[1_u8], n, 0).unwrap_err().to_string(),
        format!("rank {own}: send: expected a rank in [0, {n}), got {n}")
    );
    let e = world.recv(&mut [1_u8], usize::MAX, 0).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Usage, "{e}");
}
