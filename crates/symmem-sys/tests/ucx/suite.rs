//! What every engine does.

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use symmem_sys::ucx::{
    Answer, Body, Data, Endpoint, Engine, Events, Failure, MAX_HEADER, Posted, ReceiveBuffer,
    Result,
};

use super::recorder::{LONG, Pair, Recorder, Side, Start, drive, pattern};

pub const SIZES: [usize; 14] =
    [0, 1, 8, 63, 1000, 4096, 8192, 8193, 30_000, 65_536, 262_147, 1 << 20, (4 << 20) + 1, 8 << 20];

pub fn bodies_of_all_sizes_arrive_intact(start: Start<'_>) {
    let pair = Pair::new(start);
    let mut pending = HashSet::new();
    for (number, bytes) in (0..).zip(SIZES) {
        let header = pattern(number, 8 + (number as usize * 19) % (MAX_HEADER - 8));
        let posted = pair.a.post(pair.a_to_b, &header, pattern(number, bytes), number).unwrap();
        if posted == Posted::Pending {
            pending.insert(number);
        }
        drive("the message is there", &[&pair.b, &pair.a], |log| !log.messages.is_empty());
        let (got, body) = pair.b.events.log().messages.pop().unwrap();
        assert!(got == header, "the header of {bytes} bytes");
        assert!(body == pattern(number, bytes), "the body of {bytes} bytes");
    }
    drive("all is sent", &[&pair.a, &pair.b], |log| log.sent.len() == pending.len());
    let sent = std::mem::take(&mut pair.a.events.log().sent);
    assert!(sent.iter().all(|(token, result)| pending.remove(token) && result.is_ok()), "{sent:?}");
    assert_eq!(pair.a.engine.pending() + pair.b.engine.pending(), 0);
    assert_eq!(pair.b.events.log().rendezvous > 0, start.rendezvous, "how 8 MiB came");
    // A message may also have nothing at all.
    pair.a.post(pair.a_to_b, b"", vec![], 0).unwrap();
    drive("nothing is there", &[&pair.b, &pair.a], |log| log.messages.len() == 1);
    assert_eq!(pair.b.events.log().messages.pop(), Some((vec![], vec![])));
}

pub fn messages_go_both_ways_at_once(start: Start<'_>) {
    const COUNT: u64 = 200;
    let size = |number: u64| [8, 900, 12_000, 70_000, 300_000][number as usize % 5];
    let pair = Pair::new(start);
    let run = |side: &Side, to: Endpoint, mine: u64, theirs: u64| {
        let mut pending = 0;
        for number in 0..COUNT {
            let header = [mine.to_le_bytes(), number.to_le_bytes()].concat();
            let body = pattern(mine + number, size(number));
            if side.post(to, &header, body, number).unwrap() == Posted::Pending {
                pending += 1;
            }
            side.engine.progress().unwrap();
        }
        side.until("all messages are there and sent", |log| {
            log.messages.len() == COUNT as usize && log.sent.len() == pending
        });
        let log = side.events.log();
        assert!(log.sent.iter().all(|(_, result)| result.is_ok()), "{:?}", log.sent);
        let mut seen = HashSet::new();
        for (header, body) in &log.messages {
            let number = u64::from_le_bytes(header[8..].try_into().unwrap());
            assert_eq!(header[..8], theirs.to_le_bytes());
            assert!(*body == pattern(theirs + number, size(number)), "message {number}");
            assert!(seen.insert(number), "message {number} came twice");
        }
        drop(log);
        side.engine.pending()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(&pair.b, pair.b_to_a, 2000, 1000));
        assert_eq!(run(&pair.a, pair.a_to_b, 1000, 2000), 0);
        assert_eq!(other.join().unwrap(), 0);
    });
}

pub fn several_threads_use_one_engine(start: Start<'_>) {
    const COUNT: usize = 300;
    let pair = Pair::new(start);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let a = &pair.a;
            scope.spawn(move || {
                for number in 0..COUNT {
                    let body = pattern(number as u64, number * 50);
                    a.post(pair.a_to_b, &[thread], body, 0).unwrap();
                    a.engine.progress().unwrap();
                }
            });
        }
        drive("all messages are there", &[&pair.b, &pair.a], |log| log.messages.len() == 2 * COUNT);
    });
}

pub fn closing_ends_what_is_pending(start: Start<'_>) {
    let pair = Pair::new(start);
    pair.warm();
    // The other side does nothing, so nobody receives it.
    let posted = pair.a.post(pair.a_to_b, b"large", vec![1; 8 << 20], 7).unwrap();
    assert_eq!(posted, Posted::Pending);
    for _ in 0..100 {
        pair.a.engine.progress().unwrap();
    }
    assert_eq!((pair.a.engine.pending(), pair.a.events.log().sent.len()), (1, 0));
    pair.a.engine.close(pair.a_to_b).unwrap();
    pair.a.engine.close(pair.a_to_b).unwrap();
    pair.a.until("the message has ended", |log| log.sent.len() == 1);
    let (token, result) = pair.a.events.log().sent.pop().unwrap();
    let failure = result.unwrap_err();
    assert_eq!((token, pair.a.engine.pending()), (7, 0));
    assert!(failure.is_canceled() || failure.is_disconnected(), "{failure}");
    let failure = pair.a.post(pair.a_to_b, b"late", vec![], 0).unwrap_err();
    assert!(failure.is_canceled() && failure.to_string().contains("closed"), "{failure}");
    // The peer has had its connection cut, and can do without.
    for _ in 0..1000 {
        pair.b.engine.progress().unwrap();
    }
    assert!(pair.b.events.log().messages.is_empty());
    // A new endpoint to the same peer works.
    let again = pair.a.engine.connect(pair.b.engine.address()).unwrap();
    pair.a.post(again, b"again", vec![2; 100_000], 8).unwrap();
    drive("it is there", &[&pair.b, &pair.a], |log| log.messages.iter().any(|m| m.0 == b"again"));
}

pub fn a_message_that_is_refused_is_a_failure_of_its_sender(start: Start<'_>) {
    let pair = Pair::new(start);
    pair.b.events.log().refuse = true;
    pair.a.post(pair.a_to_b, b"unwanted", vec![1; 4 << 20], 3).unwrap();
    drive("the sender is through", &[&pair.a, &pair.b], |log| log.sent.len() == 1);
    let result = pair.a.events.log().sent.pop().unwrap().1;
    // Where the body travels with its message, the sender is never told.
    let status = start.rendezvous.then_some(Failure::REJECTED);
    assert_eq!(result.err().and_then(|failure| failure.status), status);
    // The endpoint is as good as before.
    pair.b.events.log().refuse = false;
    pair.a.post(pair.a_to_b, b"wanted", vec![1; 4 << 20], 4).unwrap();
    drive("it is there", &[&pair.b, &pair.a], |log| log.messages.len() == 1);
}

pub fn what_is_no_address_is_refused(start: Start<'_>) {
    let (a, b) = (Side::new(start), Side::new(start));
    let address = b.engine.address().to_vec();
    let refused = |bytes: &[u8]| {
        let failure = a.engine.connect(bytes).unwrap_err();
        assert!(failure.to_string().contains("no address of UCX"), "{failure}");
    };
    for number in 0..200 {
        refused(&pattern(number, number as usize));
    }
    for bytes in 0..address.len() {
        refused(&address[..bytes]);
        let mut damaged = address.clone();
        damaged[bytes] ^= 0x40;
        refused(&damaged);
    }
    refused(&[address.as_slice(), &[0]].concat());
    let endpoint = a.engine.connect(&address).unwrap();
    a.post(endpoint, b"still there", vec![], 0).unwrap();
    drive("it is there", &[&b, &a], |log| log.messages.len() == 1);
}

pub fn calls_that_make_no_sense_are_refused(start: Start<'_>) {
    let pair = Pair::new(start);
    let other = Pair::new(start);
    for _ in 0..3 {
        other.a.engine.connect(other.b.engine.address()).unwrap();
    }
    let foreign = other.a.engine.connect(other.b.engine.address()).unwrap();
    let failure = pair.a.post(foreign, b"", vec![], 0).unwrap_err();
    assert!(failure.to_string().contains("not an endpoint of this engine"), "{failure}");
    assert!(pair.a.engine.close(foreign).is_err());
    let failure = pair.a.post(pair.a_to_b, &[0; MAX_HEADER + 1], vec![], 0).unwrap_err();
    assert!(failure.to_string().contains("256 is the most"), "{failure}");
    pair.a.post(pair.a_to_b, &[0; MAX_HEADER], vec![], 0).unwrap();
    drive("it is there", &[&pair.b, &pair.a], |log| log.messages.len() == 1);
}

pub fn the_descriptor_wakes_a_sleeper(start: Start<'_>) {
    let pair = Pair::new(start);
    pair.warm();
    let sleep = |side: &Side| {
        let mut descriptors = [PollFd::from_borrowed_fd(side.engine.descriptor(), PollFlags::IN)];
        let longest = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(poll(&mut descriptors, Some(&longest)).unwrap(), 1, "nobody has woken it");
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            pair.a.post(pair.a_to_b, b"wake up", vec![], 0).unwrap();
        });
        // What is not ours may wake it as well.
        while pair.b.events.log().messages.is_empty() {
            if pair.b.engine.arm().unwrap() {
                sleep(&pair.b);
            }
            pair.b.engine.progress().unwrap();
            assert!(begun.elapsed() < LONG);
        }
    });
    while !pair.b.engine.arm().unwrap() {
        pair.b.engine.progress().unwrap();
        assert!(begun.elapsed() < LONG, "there is always something to progress");
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            pair.b.engine.wake().unwrap();
        });
        sleep(&pair.b);
    });
}

/// Receives into memory that was there before.
struct Region {
    memory: Vec<std::sync::atomic::AtomicU8>,
}

struct Into(Arc<Region>, Mutex<Vec<Result<()>>>);

impl Events for Into {
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer {
        let offset = u32::from_le_bytes(header.try_into().unwrap()) as usize;
        let start = self.0.memory.as_ptr().cast_mut().cast::<u8>();
        let room = (self.0.memory.len() - offset).min(1 << 20);
        assert!(data.len() <= 2 << 20);
        let start = NonNull::new(start.wrapping_add(offset)).unwrap();
        // SAFETY: the region stays, and everybody uses atomics there.
        let buffer = unsafe { ReceiveBuffer::in_memory(start, room, self.0.clone()) };
        Answer::Receive { buffer, token: 0 }
    }

    fn received(&self, _: u64, buffer: ReceiveBuffer, result: Result<()>) {
        drop(buffer);
        self.1.lock().unwrap().push(result);
    }

    fn sent(&self, _: u64, _: Result<()>) {}

    fn failed(&self, _: Endpoint, _: Failure) {}
}

pub fn bodies_go_straight_to_their_places(start: Start<'_>) {
    let region = Arc::new(Region { memory: (0..4 << 20).map(|_| 0.into()).collect() });
    let into = Arc::new(Into(region.clone(), Mutex::default()));
    let (a, b) = (Side::new(start), start.engine(into.clone()));
    let to = a.engine.connect(b.address()).unwrap();
    let ends = |count: usize| {
        let begun = Instant::now();
        while into.1.lock().unwrap().len() < count {
            a.engine.progress().unwrap();
            b.progress().unwrap();
            assert!(begun.elapsed() < LONG);
        }
    };
    for (bytes, offset) in [(100, 3_u32), (1 << 20, 1 << 20), (50_000, 3 << 20)] {
        a.post(to, &offset.to_le_bytes(), pattern(offset.into(), bytes), 0).unwrap();
        ends(1);
        into.1.lock().unwrap().pop().unwrap().unwrap();
        let there = &region.memory[offset as usize..][..bytes];
        let there: Vec<u8> =
            there.iter().map(|byte| byte.load(std::sync::atomic::Ordering::Relaxed)).collect();
        assert!(there == pattern(offset.into(), bytes), "{bytes} bytes");
    }
    // What is too large for its buffer is not received at all.
    a.post(to, &0_u32.to_le_bytes(), vec![9; (1 << 20) + 1], 5).unwrap();
    ends(1);
    let failure = into.1.lock().unwrap().pop().unwrap().unwrap_err();
    assert_eq!(failure.status, Some(Failure::TRUNCATED));
    assert!(region.memory[0].load(std::sync::atomic::Ordering::Relaxed) == 0);
    assert_eq!(Arc::strong_count(&region), 2, "a buffer is still held");
}

pub fn a_body_belongs_to_the_engine_until_it_is_sent(start: Start<'_>) {
    let pair = Pair::new(start);
    pair.warm();
    let memory: Arc<Vec<u8>> = Arc::new(pattern(1, 4 << 20));
    let first = NonNull::from(memory.as_slice()).cast();
    // SAFETY: the vector stays.
    let body = unsafe { Body::in_memory(first, memory.len(), memory.clone()) };
    assert_eq!(pair.a.engine.post(pair.a_to_b, b"", body, 0).unwrap(), Posted::Pending);
    assert_eq!(Arc::strong_count(&memory), 2);
    drive("it is sent", &[&pair.a, &pair.b], |log| log.sent.len() == 1);
    drive("it is there", &[&pair.b, &pair.a], |log| log.messages.len() == 1);
    // Its bytes may still be somebody's for a moment, in another event.
    drive("it is free", &[&pair.b, &pair.a], |_| Arc::strong_count(&memory) == 1);
}

/// Calls its engine from within an event, and panics if told to.
#[derive(Default)]
struct Meddler {
    engine: OnceLock<(Arc<dyn Engine>, Endpoint)>,
    answers: Mutex<Vec<String>>,
}

impl Events for Meddler {
    fn message(&self, header: &[u8], _: Data<'_>) -> Answer {
        assert!(header != b"panic", "as it was told");
        let (engine, endpoint) = self.engine.get().unwrap();
        let mut answers = self.answers.lock().unwrap();
        answers.push(engine.post(*endpoint, b"", Body::EMPTY, 0).unwrap_err().to_string());
        answers.push(engine.progress().unwrap_err().to_string());
        answers.push(engine.close(*endpoint).unwrap_err().to_string());
        answers.push(engine.shutdown(Duration::ZERO).unwrap_err().to_string());
        Answer::Done
    }

    fn received(&self, _: u64, _: ReceiveBuffer, _: Result<()>) {}

    fn sent(&self, _: u64, _: Result<()>) {}

    fn failed(&self, _: Endpoint, _: Failure) {}
}

pub fn events_cannot_call_and_may_panic(start: Start<'_>) {
    let meddler = Arc::new(Meddler::default());
    let (a, b) = (Side::new(start), start.engine(meddler.clone()));
    let to = a.engine.connect(b.address()).unwrap();
    let back = b.connect(a.engine.address()).unwrap();
    assert!(meddler.engine.set((b.clone(), back)).is_ok());
    a.post(to, b"call", vec![], 0).unwrap();
    let begun = Instant::now();
    while meddler.answers.lock().unwrap().len() < 4 {
        a.engine.progress().unwrap();
        b.progress().unwrap();
        assert!(begun.elapsed() < LONG);
    }
    for answer in meddler.answers.lock().unwrap().iter() {
        assert!(answer.contains("called within an event"), "{answer}");
    }
    a.post(to, b"panic", vec![], 0).unwrap();
    let failure = loop {
        a.engine.progress().unwrap();
        if let Err(failure) = b.progress() {
            break failure;
        }
        assert!(begun.elapsed() < LONG);
    };
    assert!(failure.to_string().contains("an event has panicked"), "{failure}");
    let failure = b.post(back, b"", Body::EMPTY, 0).unwrap_err();
    assert!(failure.to_string().contains("an event has panicked"), "{failure}");
}

pub fn an_engine_ends_once_and_with_all_that_is_pending(start: Start<'_>) {
    let pair = Pair::new(start);
    pair.warm();
    pair.a.post(pair.a_to_b, b"large", vec![1; 8 << 20], 7).unwrap();
    pair.a.engine.shutdown(LONG).unwrap();
    let sent = std::mem::take(&mut pair.a.events.log().sent);
    assert!(matches!(sent.as_slice(), [(7, Err(_))]), "{sent:?}");
    pair.a.engine.shutdown(LONG).unwrap();
    let failure = pair.a.post(pair.a_to_b, b"", vec![], 0).unwrap_err();
    assert!(failure.to_string().contains("shut down"), "{failure}");
    assert!(pair.a.engine.progress().is_err() && pair.a.engine.arm().is_err());
    // The peer finds out, and lives.
    drive("its endpoint has failed", &[&pair.b], |log| log.failed.len() == 1);
    let (endpoint, failure) = pair.b.events.log().failed.pop().unwrap();
    assert_eq!(endpoint, pair.b_to_a);
    assert!(failure.is_disconnected(), "{failure}");
    let failure = pair.b.post(pair.b_to_a, b"", vec![], 0).unwrap_err();
    assert!(failure.is_disconnected(), "{failure}");
    drop(Arc::<Recorder>::clone(&pair.b.events));
}
