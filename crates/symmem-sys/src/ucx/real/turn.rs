//! Who may call the library: one thread at a time, and none within an event.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::callbacks::Sending;
use crate::ucx::{Failure, Result};

thread_local! {
    /// Whether an event is being told on this thread.
    static IN_EVENT: Cell<bool> = const { Cell::new(false) };
}

/// The lock around the worker.
#[derive(Default)]
pub(super) struct Turns {
    lock: Mutex<()>,
    /// Threads that wait for their turn. Progress lets them go first: a thread that spins would get the lock every time.
    waiting: AtomicUsize,
    /// An event has panicked.
    panicked: AtomicBool,
    /// Nothing is left to call.
    stopped: AtomicBool,
}

/// This thread's turn.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    _lock: MutexGuard<'a, ()>,
    /// Dropped behind the lock: what owns a body may do anything when it goes.
    leftover: Cell<Option<Box<Sending>>>,
}

impl Turn<'_> {
    /// Drops it when the turn is over.
    pub(super) fn drop_later(&self, leftover: Box<Sending>) {
        self.leftover.set(Some(leftover));
    }

    /// It is the last turn.
    pub(super) fn stop(&self) {
        self.turns.stopped.store(true, Ordering::Relaxed);
    }
}

impl Turns {
    /// Waits for a turn.
    pub(super) fn wait(&self, call: &'static str) -> Result<Turn<'_>> {
        let turn = self.wait_even_if_stopped(call)?;
        self.usable(call)?;
        Ok(turn)
    }

    /// A turn, unless somebody else has it or waits for it.
    pub(super) fn take(&self, call: &'static str) -> Result<Option<Turn<'_>>> {
        outside(call)?;
        if self.waiting.load(Ordering::Relaxed) != 0 {
            return Ok(None);
        }
        let lock = match self.lock.try_lock() {
            Ok(lock) => lock,
            Err(TryLockError::Poisoned(lock)) => lock.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.usable(call)?;
        Ok(Some(Turn { turns: self, _lock: lock, leftover: Cell::new(None) }))
    }

    /// Waits for the last turn, unless that was.
    pub(super) fn last(&self, call: &'static str) -> Result<Option<Turn<'_>>> {
        let turn = self.wait_even_if_stopped(call)?;
        Ok((!self.is_stopped()).then_some(turn))
    }

    /// Whether there are no more turns.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Tells an event, unless one has panicked.
    pub(super) fn tell<T>(&self, tell: impl FnOnce() -> T) -> Option<T> {
        let _inside = Inside::enter();
        // In here, so that what it owns is dropped as in an event.
        let tell = tell;
        if self.panicked.load(Ordering::Relaxed) {
            return None;
        }
        match catch_unwind(AssertUnwindSafe(tell)) {
            Ok(answer) => Some(answer),
            Err(payload) => {
                // Its drop might panic as well, and nobody would catch that.
                std::mem::forget(payload);
                self.panicked.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    fn wait_even_if_stopped(&self, call: &'static str) -> Result<Turn<'_>> {
        outside(call)?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(Turn { turns: self, _lock: lock, leftover: Cell::new(None) })
    }

    fn usable(&self, call: &'static str) -> Result<()> {
        if self.is_stopped() {
            return Err(Failure::refused(call, "the engine is shut down"));
        }
        if self.panicked.load(Ordering::Relaxed) {
            return Err(Failure::refused(call, "an event has panicked"));
        }
        Ok(())
    }
}

/// Refuses a call within an event, which would wait for itself.
fn outside(call: &'static str) -> Result<()> {
    if IN_EVENT.get() {
        return Err(Failure::refused(call, "called within an event"));
    }
    Ok(())
}

/// As long as an event is told.
struct Inside {
    before: bool,
}

impl Inside {
    fn enter() -> Self {
        Self { before: IN_EVENT.replace(true) }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        IN_EVENT.set(self.before);
    }
}
