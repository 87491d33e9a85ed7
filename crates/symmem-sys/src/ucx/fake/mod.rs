//! Engines in plain Rust, for tests: those of one [`Network`] find each other by their addresses and misbehave on demand.
//!
//! What the real engine leaves open is drawn from a seed: whether a short message is pending for a while, when it arrives,
//! and in which order. Time is counted in calls of `progress` of whom a message is for. [`Network`] has the commands:
//! delays, losses, connections that fail, processes that die. Nothing is ever delivered twice.

mod deliver;
mod state;

use std::cell::Cell;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use self::state::{Process, State};
use super::engine::{Body, Endpoint, Engine, Events, MAX_HEADER, Posted};
use super::{Failure, Result, Version, address};

/// What the engines say of their version.
pub const VERSION: Version = Version::new(1, 12, 0);

/// How the network treats messages that no command is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Script {
    /// The most calls of `progress` that a message, or its end, takes longer than necessary.
    pub delay: u32,
    /// Whether messages overtake each other.
    pub reorder: bool,
    /// How many of a thousand messages get lost.
    pub lost: u32,
    /// How many of a thousand short messages are pending at first.
    pub pending: u32,
    /// The largest body that travels with its message.
    pub inline: usize,
}

impl Default for Script {
    fn default() -> Self {
        Self { delay: 0, reorder: false, lost: 0, pending: 0, inline: 8192 }
    }
}

/// What connects some engines.
#[derive(Clone)]
pub struct Network(Arc<Inner>);

struct Inner {
    id: u64,
    state: Mutex<State>,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Network").field(&self.0.id).finish()
    }
}

impl Network {
    /// A network whose chances are drawn from `seed`.
    pub fn new(seed: u64) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Inner { id, state: Mutex::new(State::new(seed)) }))
    }

    /// From now on, messages are treated so.
    pub fn set(&self, script: Script) {
        self.lock().script = script;
    }

    /// A new engine, of a process of its own.
    pub fn start(&self, events: Arc<dyn Events>) -> Result<Fake> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let bell = bell.map_err(|error| Failure::refused("eventfd", error.to_string()))?;
        let bell = Arc::new(bell);
        let number = self.lock().add(Process::new(Arc::clone(&bell)));
        let own = [self.0.id.to_le_bytes(), (number as u64).to_le_bytes()].concat();
        let address = address::wrap(VERSION, &own)?;
        let network = self.clone();
        Ok(Fake { network, number, address, bell, events, running: Mutex::new(()) })
    }

    /// Messages from one engine to the other stay on their way, until [`release`](Self::release).
    pub fn hold(&self, from: &Fake, to: &Fake) {
        self.lock().held.insert((from.number, to.number));
    }

    /// Messages that were held, and later ones, go on.
    pub fn release(&self, from: &Fake, to: &Fake) {
        let mut state = self.lock();
        state.held.remove(&(from.number, to.number));
        state.ring(to.number);
    }

    /// The next `count` messages from one engine to the other get lost.
    pub fn lose(&self, from: &Fake, to: &Fake, count: u32) {
        *self.lock().losing.entry((from.number, to.number)).or_default() += count;
    }

    /// The connection between two engines fails: all endpoints of both that lead to the other.
    pub fn cut(&self, one: &Fake, other: &Fake) {
        let mut state = self.lock();
        state.disconnect(one.number, other.number, Failure::CONNECTION_RESET);
        state.disconnect(other.number, one.number, Failure::CONNECTION_RESET);
    }

    /// The engine's process dies: it hears nothing more, and its peers that their connections have failed.
    pub fn kill(&self, engine: &Fake) {
        self.lock().kill(engine.number, "the process is dead");
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

thread_local! {
    /// Whether an event is being told on this thread.
    static IN_EVENT: Cell<bool> = const { Cell::new(false) };
}

/// An engine of a [`Network`].
pub struct Fake {
    network: Network,
    number: usize,
    address: Vec<u8>,
    bell: Arc<OwnedFd>,
    events: Arc<dyn Events>,
    /// Held by the thread that runs events.
    running: Mutex<()>,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fake")
            .field("network", &self.network)
            .field("number", &self.number)
            .finish()
    }
}

impl Fake {
    /// The network's state, if this engine may be called now.
    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        if IN_EVENT.get() {
            return Err(Failure::refused(call, "called within an event"));
        }
        let state = self.network.lock();
        state.usable(self.number, call)?;
        Ok(state)
    }

    /// Tells events until there is none, or many were told.
    fn work(&self) -> Result<usize> {
        const MANY: usize = 16;
        let mut told = 0;
        self.network.lock().tick(self.number);
        while told < MANY {
            let next = self.network.lock().next(self.number);
            let Some(event) = next else { break };
            told += 1;
            let before = IN_EVENT.replace(true);
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                self.tell(event);
            }));
            IN_EVENT.set(before);
            if ended.is_err() {
                self.network.lock().end(self.number, "an event has panicked");
                return Err(Failure::refused("progress", "an event has panicked"));
            }
        }
        Ok(told)
    }
}

impl Engine for Fake {
    fn version(&self) -> Version {
        VERSION
    }

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(&self, address: &[u8]) -> Result<Endpoint> {
        let (version, address) = address::unwrap(address)?;
        if !VERSION.understands(version) {
            let Version { major, minor, .. } = version;
            let text = format!("the peer has UCX {major}.{minor}, this process has {VERSION}");
            return Err(Failure::refused("connect", text));
        }
        let mut state = self.enter("connect")?;
        let number = |at: usize| {
            let bytes = address.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u64::from_le_bytes)
        };
        let here = number(0) == Some(self.network.0.id);
        let peer = number(8).filter(|_| here).and_then(|number| usize::try_from(number).ok());
        let peer = peer.filter(|peer| state.exists(*peer));
        let peer = peer.ok_or_else(|| Failure::of("connect", Failure::UNREACHABLE))?;
        Ok(state.connect(self.number, peer))
    }

    fn post(&self, to: Endpoint, header: &[u8], body: Body, token: u64) -> Result<Posted> {
        if header.len() > MAX_HEADER {
            let text = format!("a header of {} bytes, {MAX_HEADER} is the most", header.len());
            return Err(Failure::refused("post", text));
        }
        let body = Arc::new(body);
        // The last owner drops it after the lock is released, because a `drop` may do anything.
        self.enter("post")?.post(self.number, to, header, &body, token)
    }

    fn progress(&self) -> Result<usize> {
        drop(self.enter("progress")?);
        let _running = match self.running.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(0),
        };
        self.work()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn arm(&self) -> Result<bool> {
        let state = self.enter("arm")?;
        if state.has_work(self.number) {
            return Ok(false);
        }
        let mut rung = [0; 8];
        // That it has not rung is no error.
        let _ = rustix::io::read(&self.bell, &mut rung);
        Ok(true)
    }

    fn wake(&self) -> Result<()> {
        self.enter("wake")?.ring(self.number);
        Ok(())
    }

    fn close(&self, endpoint: Endpoint) -> Result<()> {
        self.enter("close")?.close(self.number, endpoint)
    }

    fn pending(&self) -> usize {
        self.network.lock().pending(self.number)
    }

    fn shutdown(&self, patience: Duration) -> Result<()> {
        if IN_EVENT.get() {
            return Err(Failure::refused("shutdown", "called within an event"));
        }
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if self.network.lock().usable(self.number, "shutdown").is_err() {
            return Ok(());
        }
        self.network.lock().close_all(self.number);
        let begun = Instant::now();
        while self.pending() != 0 && begun.elapsed() < patience {
            self.work()?;
        }
        let left = self.pending();
        self.network.lock().kill(self.number, "the engine is shut down");
        if left == 0 {
            return Ok(());
        }
        let text = format!("{left} messages were still pending after {patience:?}");
        Err(Failure::refused("shutdown", text))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.network.lock().kill(self.number, "the engine is shut down");
    }
}
