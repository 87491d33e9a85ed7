//! Events that are kept for the test to look at.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use symmem_sys::ucx::{
    Answer, Body, Data, Endpoint, Engine, Events, Failure, Posted, ReceiveBuffer, Result,
};

/// More than anything takes, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(30);

/// What has happened.
#[derive(Default)]
pub struct Log {
    /// Headers and bodies, as they came.
    pub messages: Vec<(Vec<u8>, Vec<u8>)>,
    /// How many of them were received from their senders.
    pub rendezvous: usize,
    pub sent: Vec<(u64, Result<()>)>,
    pub broken: Vec<Failure>,
    pub failed: Vec<(Endpoint, Failure)>,
    /// Headers of what is being received.
    coming: HashMap<u64, Vec<u8>>,
    tokens: u64,
    /// Nothing more is wanted.
    pub refuse: bool,
}

#[derive(Default)]
pub struct Recorder(Mutex<Log>);

impl Recorder {
    pub fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap()
    }
}

impl Events for Recorder {
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer {
        let mut log = self.log();
        if log.refuse {
            return Answer::Refuse;
        }
        match data {
            Data::Inline(bytes) => {
                log.messages.push((header.to_vec(), bytes.to_vec()));
                Answer::Done
            }
            Data::Rendezvous(bytes) => {
                log.tokens += 1;
                log.rendezvous += 1;
                let token = log.tokens;
                log.coming.insert(token, header.to_vec());
                Answer::Receive { buffer: ReceiveBuffer::new(bytes), token }
            }
        }
    }

    fn received(&self, token: u64, buffer: ReceiveBuffer, result: Result<()>) {
        let mut log = self.log();
        let header = log.coming.remove(&token).unwrap();
        match result {
            Ok(()) => log.messages.push((header, buffer.into_bytes().unwrap())),
            Err(failure) => log.broken.push(failure),
        }
    }

    fn sent(&self, token: u64, result: Result<()>) {
        self.log().sent.push((token, result));
    }

    fn failed(&self, endpoint: Endpoint, why: Failure) {
        self.log().failed.push((endpoint, why));
    }
}

/// An engine and what has happened to it.
pub struct Side {
    pub engine: Arc<dyn Engine>,
    pub events: Arc<Recorder>,
}

/// Makes engines that can reach each other.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    pub make: &'a (dyn Fn(Arc<dyn Events>) -> Arc<dyn Engine> + Sync),
    /// Whether large bodies stay with their senders until somebody receives them.
    pub rendezvous: bool,
}

impl Start<'_> {
    pub fn engine(self, events: Arc<dyn Events>) -> Arc<dyn Engine> {
        (self.make)(events)
    }
}

impl Side {
    pub fn new(start: Start<'_>) -> Self {
        let events = Arc::new(Recorder::default());
        Self { engine: start.engine(events.clone()), events }
    }

    pub fn post(&self, to: Endpoint, header: &[u8], body: Vec<u8>, token: u64) -> Result<Posted> {
        self.engine.post(to, header, Body::from(body), token)
    }

    /// Progresses until `done`; panics after a long time.
    pub fn until(&self, what: &str, done: impl FnMut(&Log) -> bool) {
        drive(what, &[self], done);
    }
}

/// Progresses all of them until the log of the first is as it should be.
pub fn drive(what: &str, sides: &[&Side], mut done: impl FnMut(&Log) -> bool) {
    let begun = Instant::now();
    loop {
        let mut worked = 0;
        for side in sides {
            worked += side.engine.progress().unwrap();
        }
        if done(&sides[0].events.log()) {
            return;
        }
        assert!(begun.elapsed() < LONG, "waited too long until {what}");
        if worked == 0 {
            std::thread::yield_now();
        }
    }
}

/// Two engines with an endpoint each.
pub struct Pair {
    pub a: Side,
    pub b: Side,
    pub a_to_b: Endpoint,
    pub b_to_a: Endpoint,
}

impl Pair {
    pub fn new(start: Start<'_>) -> Self {
        let (a, b) = (Side::new(start), Side::new(start));
        let a_to_b = a.engine.connect(b.engine.address()).unwrap();
        let b_to_a = b.engine.connect(a.engine.address()).unwrap();
        Self { a, b, a_to_b, b_to_a }
    }

    /// Sends one message each way, so that both connections are there.
    pub fn warm(&self) {
        self.a.post(self.a_to_b, b"warm", vec![], 0).unwrap();
        self.b.post(self.b_to_a, b"warm", vec![], 0).unwrap();
        drive("a is warm", &[&self.a, &self.b], |log| log.messages.len() == 1);
        drive("b is warm", &[&self.b, &self.a], |log| log.messages.len() == 1);
        let sides = [&self.a, &self.b];
        drive("nothing is pending", &sides, |_| sides.iter().all(|s| s.engine.pending() == 0));
        for side in sides {
            side.events.log().messages.clear();
            side.events.log().sent.clear();
        }
    }
}

/// A body that differs from those of other numbers.
pub fn pattern(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(|_| next()).collect()
}
