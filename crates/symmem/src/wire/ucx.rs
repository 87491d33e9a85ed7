//! Messages to ranks of other hosts as UCX's active messages.
//!
//! UCX promises no order, so messages are numbered, and the receiver delivers them in the order of their numbers. The amount of
//! unacknowledged data is bounded.
//!
//! One thread at a time works with the engine, and no thread waits for that or holds a lock meanwhile: work that other threads
//! have for the engine is done by that thread before it returns. So a group may send an answer while a message is delivered to it.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use symmem_sys::ucx::{Body, Engine, Events};

use super::message::{Header, Kind, SHORT};
use super::outbound::Parcel;
use super::peers::{MOST, Peer, Shared, Sink};
use super::{Parts, Transport};
use crate::error::Result;
use crate::mesh::{Carrier, Gone, PeerObserver, Subject};
use crate::sync::atomic::{AtomicBool, AtomicUsize};
use crate::sync::{Deadline, Ordering, lock};

/// How long after the failure of a connection its rank is lost, so that the mesh, which knows the cause, can report it first.
const GRACE: Duration = Duration::from_millis(100);
/// How long a sender polls for room before it sleeps between polls.
const SPIN: Duration = Duration::from_millis(1);
/// How long dropping the engine waits for what is pending.
const PATIENCE: Duration = Duration::from_millis(500);

/// This rank's engine.
pub(crate) struct Ucx {
    shared: Arc<Shared>,
    engine: Arc<dyn Engine>,
    /// Whether some thread works with the engine.
    busy: AtomicBool,
    /// How often waiting threads have worked with the engine: now, and when the watcher last checked.
    visits: AtomicUsize,
    seen: AtomicUsize,
    /// Whether the watcher sleeps until something comes.
    is_asleep: AtomicBool,
    /// The process whose engine it is; a fork of it has a copy that it must not touch.
    process: u32,
}

impl Ucx {
    /// The transport of rank `own` of `size` to the far ranks. `start` makes the engine.
    pub(super) fn new(
        (own, size): (usize, usize),
        is_far: impl Fn(usize) -> bool,
        tag: u64,
        sink: Box<Sink>,
        start: impl FnOnce(Arc<dyn Events>) -> Result<Arc<dyn Engine>, String>,
    ) -> Result<Self, String> {
        let peers = (0..size).map(|rank| is_far(rank).then(Peer::default)).collect();
        let shared = Arc::new(Shared {
            own,
            tag,
            sink,
            peers,
            due: Mutex::default(),
            is_due: AtomicBool::new(false),
            bodies: Mutex::default(),
            failed: Mutex::default(),
            strangers: AtomicUsize::new(0),
        });
        let engine = start(Arc::<Shared>::clone(&shared))?;
        Ok(Self {
            shared,
            engine,
            busy: AtomicBool::new(false),
            visits: AtomicUsize::new(0),
            seen: AtomicUsize::new(0),
            is_asleep: AtomicBool::new(false),
            process: std::process::id(),
        })
    }

    pub(super) fn version(&self) -> String {
        self.engine.version().to_string()
    }

    pub(super) fn address(&self) -> &[u8] {
        self.engine.address()
    }

    /// Connects with a rank of another host. Its earlier messages have been received.
    pub(super) fn connect(&self, rank: usize, address: &[u8]) -> Result<(), String> {
        let Some(peer) = self.shared.peer(rank) else { return Ok(()) };
        let endpoint = self.engine.connect(address).map_err(|failure| failure.to_string())?;
        let _ = peer.endpoint.set(endpoint);
        self.shared.is_due_for(rank);
        self.work();
        Ok(())
    }

    /// Sends what is due, unless another thread works with the engine, which then does it.
    fn work(&self) {
        // Sequentially consistent with the stores to `is_due` and `busy`: either we see that the other thread has finished, or it
        // sees what is due.
        while self.shared.is_due.load(Ordering::SeqCst) && !self.busy.swap(true, Ordering::SeqCst) {
            self.send_due();
            self.busy.store(false, Ordering::SeqCst);
        }
    }

    /// Sends what is due to all ranks. Only for the thread that works with the engine.
    fn send_due(&self) {
        self.shared.is_due.store(false, Ordering::SeqCst);
        let due = std::mem::take(&mut *lock(&self.shared.due));
        for rank in due {
            if let Some(peer) = self.shared.peer(rank) {
                self.send_all(rank, peer);
            }
        }
    }

    fn send_all(&self, rank: usize, peer: &Peer) {
        let Some(&endpoint) = peer.endpoint.get() else { return };
        if peer.is_gone.load(Ordering::Acquire) {
            if !peer.is_closed.swap(true, Ordering::Relaxed) {
                let _ = self.engine.close(endpoint); // nothing else can be done
            }
            return;
        }
        loop {
            let popped = lock(&peer.out).pop();
            let (sequence, Parcel { kind, group, bytes }) = match popped {
                Some(next) => next,
                None if peer.owes() => {
                    (0, Parcel { kind: Kind::Credit, group: 0, bytes: Vec::new() })
                }
                None => return,
            };
            peer.asked.store(false, Ordering::Relaxed);
            let taken = lock(&peer.into).tell();
            let from = self.shared.own as u32;
            let header = Header { tag: self.shared.tag, from, kind, sequence, taken, group };
            let sent = match kind {
                Kind::Long => {
                    let body = Body::from(bytes);
                    self.engine.post(endpoint, &header.encode(&[]), body, rank as u64)
                }
                _ => self.engine.post(endpoint, &header.encode(&bytes), Body::EMPTY, rank as u64),
            };
            if let Err(failure) = sent {
                self.shared.note_failure(rank, &failure);
                return;
            }
        }
    }

    /// Receives messages and sends what is due, unless another thread works with the engine. Returns how much was received.
    fn poll(&self) -> usize {
        if self.busy.swap(true, Ordering::SeqCst) {
            return 0;
        }
        let done = self.engine.progress().unwrap_or_else(|failure| {
            self.shared.far_ranks().for_each(|rank| self.shared.note_failure(rank, &failure));
            0
        });
        self.send_due();
        self.busy.store(false, Ordering::SeqCst);
        self.work(); // what has become due since
        done
    }

    /// The same for a thread that polls: the watcher leaves the engine to it.
    fn visit(&self) -> usize {
        self.visits.fetch_add(1, Ordering::Relaxed);
        self.poll()
    }

    /// Before this rank's goodbye: waits until its peers have acknowledged all its messages, or until the deadline.
    pub(super) fn finish(&self, deadline: Deadline) {
        self.ask_all();
        let deadline = deadline.start();
        while self.unanswered().next().is_some() && !deadline.expired() {
            if self.poll() == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Waits for the first answer of every peer. An error names one that has not answered.
    pub(super) fn try_all(&self, deadline: Deadline) -> Result<(), String> {
        self.ask_all();
        let deadline = deadline.start();
        while let Some(rank) = self.unanswered().next() {
            // If the rank has died, the mesh reports it soon.
            if let Some((rank, how)) = self.lost().pop() {
                return Err(format!("rank {rank}: {how}"));
            }
            if deadline.expired() {
                let after = deadline.elapsed();
                return Err(format!("rank {rank} did not answer within {after:.1?}"));
            }
            if self.poll() == 0 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Asks all peers for an acknowledgement.
    fn ask_all(&self) {
        for rank in self.shared.far_ranks() {
            self.push(rank, Parcel { kind: Kind::Last, group: 0, bytes: Vec::new() });
        }
        self.work();
    }

    /// Peers that have not acknowledged all messages.
    fn unanswered(&self) -> impl Iterator<Item = usize> {
        self.shared.far_ranks().filter(|&rank| {
            let is_through = |peer: &Peer| {
                let is_connected = peer.endpoint.get().is_some();
                !is_connected || self.shared.is_gone(rank) || lock(&peer.out).is_through()
            };
            !self.shared.peer(rank).is_none_or(is_through)
        })
    }

    /// Shuts the engine down. Later messages are not received.
    pub(super) fn end(&self) {
        if self.process == std::process::id() {
            let _ = self.engine.shutdown(PATIENCE); // what is still pending is never given back
        }
    }

    fn push(&self, to: usize, parcel: Parcel) {
        if let Some(peer) = self.shared.peer(to) {
            lock(&peer.out).push(parcel);
            self.shared.is_due_for(to);
        }
    }

    #[cfg(test)]
    pub(super) fn strangers(&self) -> usize {
        self.shared.strangers.load(Ordering::Relaxed)
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The connections are those of the process that this one was forked from.
            std::mem::forget(Arc::clone(&self.engine));
        }
    }
}

fn parcel(group: u128, bytes: Vec<u8>) -> Parcel {
    let kind = if bytes.len() <= SHORT { Kind::Short } else { Kind::Long };
    Parcel { kind, group, bytes }
}

impl Transport for Ucx {
    fn most(&self) -> usize {
        MOST
    }

    fn post(&self, to: usize, group: u128, bytes: Vec<u8>) {
        self.push(to, parcel(group, bytes));
        self.work();
    }

    fn post_all(&self, to: usize, group: u128, messages: &[Parts<'_>]) {
        messages.iter().for_each(|bytes| self.push(to, parcel(group, bytes.concat())));
        self.work();
    }

    fn post_soon(&self, to: usize, group: u128, messages: &[Parts<'_>]) {
        messages.iter().for_each(|bytes| self.push(to, parcel(group, bytes.concat())));
        // Otherwise the watcher or another thread does it soon.
        if self.is_asleep.load(Ordering::SeqCst) {
            self.work();
        }
    }

    fn progress(&self, _from: &[usize]) {
        self.visit();
    }

    fn send(
        &self,
        to: usize,
        group: u128,
        messages: &[Parts<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let Some(peer) = self.shared.peer(to) else { return Ok(()) };
        let deadline = deadline.start();
        for bytes in messages {
            let mut idle = Instant::now();
            while !lock(&peer.out).has_room(bytes.iter().map(|part| part.len()).sum()) {
                if let Some(why) = deadline.expiry() {
                    return Err(why.error("send", vec![], deadline.elapsed()));
                }
                match self.visit() {
                    0 if idle.elapsed() > SPIN => std::thread::sleep(deadline.nap(SPIN / 4)),
                    0 => std::thread::yield_now(),
                    _ => idle = Instant::now(),
                }
            }
            self.post(to, group, bytes.concat());
        }
        Ok(())
    }
}

impl Carrier for Ucx {
    fn serve(&self) -> usize {
        self.poll()
    }

    fn was_visited(&self) -> bool {
        self.is_asleep.store(false, Ordering::Relaxed);
        let visits = self.visits.load(Ordering::Relaxed);
        self.seen.swap(visits, Ordering::Relaxed) != visits
    }

    fn may_sleep(&self) -> bool {
        if self.busy.swap(true, Ordering::SeqCst) {
            return false;
        }
        // An engine that is shut down has no events.
        let may = self.engine.arm().unwrap_or(true);
        self.busy.store(false, Ordering::SeqCst);
        // From here on, a thread that posts does not rely on the watcher.
        self.is_asleep.store(may, Ordering::SeqCst);
        self.work();
        may
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.engine.descriptor()
    }

    fn lost(&self) -> Vec<(usize, String)> {
        let mut lost = Vec::new();
        lock(&self.shared.failed).retain(|failed| {
            if self.shared.is_gone(failed.rank) {
                return false; // the mesh has said how
            }
            let is_over = failed.since.is_none_or(|since| since.elapsed() >= GRACE);
            if is_over {
                lost.push((failed.rank, failed.how.clone()));
            }
            !is_over
        });
        lost
    }
}

impl PeerObserver for Ucx {
    /// Only notes it. The next thread that works with the engine closes the endpoint.
    fn gone(&self, world_rank: usize, _gone: &Gone, subject: Option<&Subject>) {
        let Some(peer) = self.shared.peer(world_rank).filter(|_| subject.is_none()) else { return };
        peer.is_gone.store(true, Ordering::Release); // pairs with the acquire in `send_all`
        lock(&peer.out).end();
        self.shared.is_due_for(world_rank);
    }
}
