//! The result of a job, and the wait for it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::worker::{Awaiting, NAP, Shared, is_worker_of};
use crate::error::{Error, Result};
use crate::group::WeakGroup;
use crate::sync::{Deadline, Expiry};

/// A job of a [`Queue`](crate::Queue), to wait for. Dropping it leaves the job as it is, and drops its result.
#[must_use = "only `wait` says whether the job succeeded"]
pub struct Pending<R> {
    slot: Arc<Slot<R>>,
    queue: Origin,
}

/// The queue of a job, for its waiter, who must not keep the world.
struct Origin {
    /// Only to be compared.
    id: usize,
    rank: usize,
    group: WeakGroup,
}

impl<R> Pending<R> {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let queue =
            Origin { id: shared.id(), rank: shared.group.rank(), group: shared.group.weak() };
        Self { slot: Arc::new(Slot::default()), queue }
    }

    pub(super) fn slot(&self) -> Arc<Slot<R>> {
        Arc::clone(&self.slot)
    }

    /// Whether the job is done, so that [`wait`](Self::wait) does not wait.
    pub fn is_done(&self) -> bool {
        !matches!(*self.slot.lock(), State::Waiting)
    }

    /// Waits until the job is done, and gives its result. The job ends by the deadlines of its own waits; this wait has none, but ends
    /// with [`Interrupted`](Error::Interrupted) if the caller is [`interruptible`](crate::interruptible). The job goes on then.
    pub fn wait(self) -> Result<R> {
        self.done_by(Deadline::NEVER)?;
        self.take().unwrap_or_else(|| {
            let (expected, got) = ("a job whose result was not taken", "one whose result was");
            Err(Error::usage("wait", expected, got).at_rank(self.queue.rank))
        })
    }

    /// The result, once, if the job is done. Does not wait.
    pub fn take(&self) -> Option<Result<R>> {
        let mut state = self.slot.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(result) => Some(result),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Waits until the job is done, without taking its result. Fails with [`Timeout`](Error::Timeout) or
    /// [`Interrupted`](Error::Interrupted) if it is not done then; it goes on, and may be waited for again.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let queue = world.queue()?;
    /// let pending = queue.submit(|group| group.barrier());
    /// pending.done_by(Duration::from_secs(10))?;
    /// pending.wait()?; // at once
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn done_by(&self, deadline: impl Into<Deadline>) -> Result<()> {
        if self.is_done() {
            return Ok(());
        }
        if is_worker_of(self.queue.id) {
            let (expected, got) = ("a job of another queue", "a later job of the same queue");
            return Err(Error::usage("wait", expected, got).at_rank(self.queue.rank));
        }
        let deadline = deadline.into().start();
        let endless = deadline.remaining().is_none();
        let awaiting = endless.then(|| Awaiting::begin(self.queue.id));
        if let Some(None) = awaiting {
            let (expected, got) =
                ("a job that can end first", "one of a queue that waits for this");
            return Err(Error::usage("wait", expected, got).at_rank(self.queue.rank));
        }
        while !self.is_done() {
            // Without the lock: who is asked whether to end the wait may look at this job.
            if let Some(why) = deadline.expiry() {
                return Err(self.late(why, deadline));
            }
            let state = self.slot.lock();
            if let State::Waiting = *state {
                drop(self.slot.filled.wait_timeout(state, deadline.nap(NAP)));
            }
        }
        Ok(())
    }

    #[cold]
    fn late(&self, why: Expiry, deadline: Deadline) -> Error {
        let rank = self.queue.rank;
        match why.error("wait", vec![rank], deadline.elapsed()) {
            Error::Timeout { op, channel, waiting_for, after, .. } => {
                let waits = self.queue.group.upgrade().map(|group| group.own_waits());
                let doing = match waits.unwrap_or_default() {
                    waits if waits.is_empty() => format!("the queue of rank {rank} is at work"),
                    waits => format!("rank {rank} is {}", waits.join(" and ")),
                };
                Error::Timeout { op, channel, waiting_for, after, doing: vec![doing] }
            }
            other => other,
        }
    }
}

impl<R> std::fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending({})", if self.is_done() { "done" } else { "not done" })
    }
}

/// Where a job leaves its result.
pub(super) struct Slot<R> {
    state: Mutex<State<R>>,
    filled: Condvar,
}

enum State<R> {
    Waiting,
    Done(Result<R>),
    Taken,
}

impl<R> Default for Slot<R> {
    fn default() -> Self {
        Self { state: Mutex::new(State::Waiting), filled: Condvar::new() }
    }
}

impl<R> Slot<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, result: Result<R>) {
        *self.lock() = State::Done(result);
        self.filled.notify_all();
    }
}
