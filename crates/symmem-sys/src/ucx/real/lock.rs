//! The lock around UCX's worker: one thread at a time calls the library, and none does from within an event.

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

/// The lock around the worker. It also runs the events, which must not call the library.
#[derive(Default)]
pub(super) struct WorkerLock {
    mutex: Mutex<()>,
    /// Threads that wait for the lock. Progress lets them go first: a thread that spins would get the lock every time.
    waiting: AtomicUsize,
    /// An event has panicked.
    panicked: AtomicBool,
    /// Nothing is left to call.
    stopped: AtomicBool,
}

/// Held by the thread that may call the library.
pub(super) struct WorkerGuard<'a> {
    lock: &'a WorkerLock,
    _held: MutexGuard<'a, ()>,
    /// Dropped after the lock is released, because the owner of a body may do anything in its `drop`.
    leftover: Cell<Option<Box<Sending>>>,
}

impl WorkerGuard<'_> {
    /// Drops `leftover` after the lock is released.
    pub(super) fn drop_later(&self, leftover: Box<Sending>) {
        self.leftover.set(Some(leftover));
    }

    /// Stops the engine: nobody gets the lock any more.
    pub(super) fn stop(&self) {
        self.lock.stopped.store(true, Ordering::Relaxed);
    }
}

impl WorkerLock {
    /// Waits for the lock. Fails if the engine is shut down.
    pub(super) fn lock(&self, call: &'static str) -> Result<WorkerGuard<'_>> {
        let guard = self.lock_even_if_stopped(call)?;
        self.usable(call)?;
        Ok(guard)
    }

    /// The lock, unless another thread holds it or waits for it.
    pub(super) fn try_lock(&self, call: &'static str) -> Result<Option<WorkerGuard<'_>>> {
        outside(call)?;
        if self.waiting.load(Ordering::Relaxed) != 0 {
            return Ok(None);
        }
        let held = match self.mutex.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.usable(call)?;
        Ok(Some(WorkerGuard { lock: self, _held: held, leftover: Cell::new(None) }))
    }

    /// Waits for the lock to shut the engine down; nothing if that has been done.
    pub(super) fn lock_last(&self, call: &'static str) -> Result<Option<WorkerGuard<'_>>> {
        let guard = self.lock_even_if_stopped(call)?;
        Ok((!self.is_stopped()).then_some(guard))
    }

    /// Whether the engine is shut down.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Runs an event's callback, unless an earlier one has panicked.
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

    fn lock_even_if_stopped(&self, call: &'static str) -> Result<WorkerGuard<'_>> {
        outside(call)?;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let held = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Ok(WorkerGuard { lock: self, _held: held, leftover: Cell::new(None) })
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
