//! The jobs of a queue in order, the thread that runs them, and how they are aborted.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::pending::Pending;
use super::scope::Guest;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::interrupt::interruptible;
use crate::sync::atomic::AtomicBool;
use crate::sync::{Deadline, Ordering, lock};

/// How long a thread sleeps before it looks whether its waits are being ended.
pub(super) const NAP: Duration = Duration::from_millis(50);

/// What a job does: with the group, or with the error that it ends with instead. Nothing of it is left when it returns.
pub(super) type Work<'a> = Box<dyn FnOnce(Result<&Shared>) + Send + 'a>;

/// A job. Its fields are dropped in this order: a scope ends when nothing of its jobs is left.
pub(super) struct Job {
    work: Work<'static>,
    guest: Option<Guest>,
}

impl Job {
    pub(super) fn new(work: Work<'static>) -> Self {
        Self { work, guest: None }
    }

    /// A job that borrows. What `work` borrows lives until `guest` is dropped.
    pub(super) fn borrowing(work: Work<'static>, guest: Guest) -> Self {
        Self { work, guest: Some(guest) }
    }

    fn end(self, with: Result<&Shared>) {
        let Self { work, guest } = self;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(with))) {
            std::mem::forget(panic); // by a value that nobody waited for, when it was dropped; the panic may hold another
        }
        drop(guest);
    }
}

/// What a queue shares with its thread.
pub(super) struct Shared {
    pub(super) group: Group,
    state: Mutex<State>,
    /// For the thread: there is something to do.
    begun: Condvar,
    /// For who drops the queue.
    ended: Condvar,
    /// The job that runs shall end.
    aborting: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    is_running: bool,
    /// Jobs were aborted before they began: peers may make their calls.
    has_left_out: bool,
    is_closed: bool,
    has_ended: bool,
}

thread_local! {
    /// Of the queue whose thread this is: its id, and whether its job shall end.
    static WORKER: RefCell<Option<(usize, Arc<AtomicBool>)>> = const { RefCell::new(None) };
}

/// Whether this is the thread of the queue.
pub(super) fn is_worker_of(id: usize) -> bool {
    WORKER.with_borrow(|worker| worker.as_ref().is_some_and(|(own, _)| *own == id))
}

/// Of queues whose job waits without a deadline for one of another queue: that queue.
static AWAITED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// A wait without a deadline for a job of another queue.
pub(super) struct Awaiting(Option<usize>);

impl Awaiting {
    /// Of this thread, for a job of queue `other`. Nothing if this is a queue's thread and that queue waits for this one, perhaps by
    /// way of others: such a wait would never end.
    pub(super) fn begin(other: usize) -> Option<Self> {
        let own = WORKER.with_borrow(|worker| worker.as_ref().map(|(own, _)| *own));
        let Some(own) = own else { return Some(Self(None)) };
        let mut awaited = lock(&AWAITED);
        let mut next = Some(other);
        while let Some(queue) = next.filter(|queue| *queue != own) {
            next = awaited.get(&queue).copied();
        }
        next.is_none().then(|| {
            awaited.insert(own, other);
            Self(Some(own))
        })
    }
}

impl Drop for Awaiting {
    fn drop(&mut self) {
        if let Some(own) = self.0 {
            lock(&AWAITED).remove(&own);
        }
    }
}

fn is_aborted() -> bool {
    WORKER.with_borrow(|worker| {
        worker.as_ref().is_some_and(|(_, aborting)| aborting.load(Ordering::Relaxed))
    })
}

impl Shared {
    pub(super) fn new(group: Group) -> Self {
        let aborting = Arc::new(AtomicBool::new(false));
        let (state, begun, ended) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self { group, state, begun, ended, aborting }
    }

    /// Different for all queues that are alive.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.aborting) as usize
    }

    /// Whether this is the queue's thread.
    pub(super) fn is_here(&self) -> bool {
        is_worker_of(self.id())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing of the users' runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unfinished(&self) -> usize {
        let state = self.lock();
        state.jobs.len() + usize::from(state.is_running)
    }

    /// A job as it is run, and where its result comes.
    pub(super) fn prepare<'a, R: Send + 'a>(
        self: &Arc<Self>,
        job: impl FnOnce(&Group) -> Result<R> + Send + 'a,
    ) -> (Pending<R>, Work<'a>) {
        let pending = Pending::new(self);
        let (slot, rank) = (pending.slot(), self.group.rank());
        let work = move |with: Result<&Self>| {
            let result = match with {
                Ok(shared) => {
                    let result = shared.run(job);
                    // Before anybody has the result: who has it does not find its job among those that are not done.
                    shared.lock().is_running = false;
                    result
                }
                Err(error) => match catch_unwind(AssertUnwindSafe(|| drop(job))) {
                    Ok(()) => Err(error),
                    Err(panic) => Err(panicked(rank, panic)),
                },
            };
            slot.put(result);
        };
        (pending, Box::new(work))
    }

    pub(super) fn push(&self, job: Job) {
        self.lock().jobs.push_back(job);
        self.begun.notify_one();
    }

    /// Runs jobs until the queue is closed and none is left.
    pub(super) fn work(self: Arc<Self>) {
        WORKER.set(Some((self.id(), Arc::clone(&self.aborting))));
        let mut state = self.lock();
        loop {
            if std::mem::take(&mut state.has_left_out) {
                drop(state);
                self.group.give_up_job();
                state = self.lock();
            } else if let Some(job) = state.jobs.pop_front() {
                state.is_running = true;
                drop(state);
                job.end(Ok(&self));
                state = self.lock();
                state.is_running = false;
                self.aborting.store(false, Ordering::Relaxed); // set under the lock
            } else if state.is_closed {
                break;
            } else {
                state = self.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.has_ended = true;
        self.ended.notify_all();
    }

    /// Runs a job, and puts the group out of step if peers may make calls that it has left out.
    fn run<R>(&self, job: impl FnOnce(&Group) -> Result<R>) -> Result<R> {
        let rank = self.group.rank();
        let run = || interruptible(is_aborted, || job(&self.group));
        let result = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Err(error @ Error::Interrupted { .. })) if is_aborted() => {
                Err(Error::Aborted { rank, what: error.to_string() })
            }
            Ok(result) => result,
            Err(panic) => Err(panicked(rank, panic)),
        };
        if result.as_ref().is_err_and(|error| !self.is_known_to_all(error)) {
            self.group.give_up_job();
        }
        result
    }

    /// Whether the other ranks have such an error as well, so that all are in step after it, or none will ever be.
    fn is_known_to_all(&self, error: &Error) -> bool {
        match error {
            Error::PeerLost { rank, .. } => self.group.is_gone(*rank),
            _ => self.group.is_common(error),
        }
    }

    /// See [`Queue::abort`](super::Queue::abort).
    pub(super) fn abort(&self) {
        let mut state = self.lock();
        if state.is_running {
            self.aborting.store(true, Ordering::Relaxed);
        }
        let jobs = std::mem::take(&mut state.jobs);
        state.has_left_out |= !jobs.is_empty();
        self.begun.notify_one();
        drop(state);
        let rank = self.group.rank();
        for job in jobs {
            let what = "the job had not begun".to_owned();
            job.end(Err(Error::Aborted { rank, what }));
        }
    }

    /// Has the thread end after the jobs that were submitted.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.begun.notify_one();
    }

    /// Waits for the end of the thread. Aborts the jobs if the wait is interrupted, or if one of them waits for this thread.
    pub(super) fn await_end(&self) {
        let awaiting = Awaiting::begin(self.id());
        if awaiting.is_none() {
            self.abort();
        }
        while !self.lock().has_ended {
            if Deadline::NEVER.expired() {
                self.abort();
            }
            let state = self.lock();
            if !state.has_ended {
                drop(self.ended.wait_timeout(state, NAP));
            }
        }
    }
}

fn panicked(rank: usize, panic: Box<dyn Any + Send>) -> Error {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let what = text.or_else(|| panic.downcast_ref::<String>().cloned());
    std::mem::forget(panic); // dropping it may panic again
    Error::Panicked { rank, what: what.unwrap_or_else(|| "it does not say why".to_owned()) }
}
