//! Calls that are made one after the other: each in the thread of its caller if nothing is before it, else in the line's own thread,
//! which starts when it is first needed. A thread that waits for a call makes the calls before it, if nobody else does.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use symmem::{Deadline, Error, interruptible};

use crate::error::{aborted, exception};
use crate::wait::{raised, signalled};

/// How long a thread sleeps before it looks whether its wait has ended.
const NAP: Duration = Duration::from_millis(50);
/// How long the line's thread waits for a call before it ends.
const IDLE: Duration = Duration::from_secs(2);

/// What a call does; for a message from any rank it returns the sender.
pub(super) type Job = Box<dyn FnOnce() -> symmem::Result<usize> + Send>;

/// Ends the waits of all lines that share it.
pub(super) type Abort = Arc<AtomicBool>;

thread_local! {
    /// How many calls this thread tells of: what it calls then does not wait for itself.
    static TELLING: Cell<usize> = const { Cell::new(0) };
    static ABORT: RefCell<Option<Abort>> = const { RefCell::new(None) };
}

fn has_ended() -> bool {
    let is_aborted = |abort: &Option<Abort>| abort.as_ref().is_some_and(is_set);
    ABORT.with_borrow(is_aborted) || signalled()
}

fn is_set(abort: &Abort) -> bool {
    abort.load(Ordering::Relaxed)
}

/// Runs `f`, whose waits end with `abort`, and when a signal handler raises.
pub(super) fn abortable<R>(abort: &Abort, f: impl FnOnce() -> R) -> R {
    let before = ABORT.replace(Some(Arc::clone(abort)));
    let result = interruptible(has_ended, f);
    ABORT.set(before);
    result
}

/// What a call returned, or the exception that its waiters get.
pub(super) type Outcome = PyResult<usize>;

/// A call that may not have been made yet.
pub(super) struct Task {
    job: Mutex<Option<Job>>,
    /// Python's part, after the call has succeeded: copies what it received to where it belongs.
    finish: Option<Py<PyAny>>,
    /// What the call accesses lives as long.
    _keep: Py<PyAny>,
    outcome: OnceLock<Outcome>,
    /// What is called when the call is done; `None` once it is.
    after: Mutex<Option<Vec<Py<PyAny>>>>,
}

impl Task {
    pub(super) fn new(job: Job, keep: Py<PyAny>, finish: Option<Py<PyAny>>) -> Arc<Self> {
        let (job, after) = (Mutex::new(Some(job)), Mutex::new(Some(Vec::new())));
        Arc::new(Self { job, finish, _keep: keep, outcome: OnceLock::new(), after })
    }

    /// A call that was made at once, and what came of it.
    pub(super) fn done(outcome: Outcome, keep: Py<PyAny>) -> Arc<Self> {
        let (job, after) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Self { job, finish: None, _keep: keep, outcome: OnceLock::from(outcome), after })
    }

    pub(super) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.get()
    }

    /// Has `callback` called when the call is done; false if it is done already.
    pub(super) fn then(&self, callback: Py<PyAny>) -> bool {
        let mut after = self.after.lock().unwrap_or_else(PoisonError::into_inner);
        after.as_mut().map(|after| after.push(callback)).is_some()
    }

    fn make(&self, line: &Line) {
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(job) = job else { return };
        if is_set(&line.abort) {
            let _ = self.outcome.set(Err(attached(|py| aborted(py, "it had not begun"))));
            return;
        }
        let made = catch_unwind(AssertUnwindSafe(|| abortable(&line.abort, job)));
        let outcome = match (made, raised()) {
            (_, Some(raised)) => Err(raised),
            (Ok(Ok(value)), None) => self.finished(value),
            (Ok(Err(error)), None) => Err(attached(|py| line.exception(py, error))),
            (Err(_), None) => Err(PyRuntimeError::new_err("the call panicked")),
        };
        let _ = self.outcome.set(outcome); // nobody else has made it
    }

    fn finished(&self, value: usize) -> Outcome {
        let Some(finish) = &self.finish else { return Ok(value) };
        let called = Python::try_attach(|py| finish.call0(py).map(drop));
        called.unwrap_or_else(|| Err(is_ending())).map(|()| value)
    }

    /// Tells those who asked. Without the turn: what they call may make further calls.
    fn tell(&self) {
        let after = self.after.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(after) = after.filter(|after| !after.is_empty()) else { return };
        Python::try_attach(|py| {
            for callback in after {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, None);
                }
            }
        });
    }
}

fn attached(f: impl FnOnce(Python<'_>) -> PyErr) -> PyErr {
    Python::try_attach(f).unwrap_or_else(is_ending)
}

fn is_ending() -> PyErr {
    PyRuntimeError::new_err("the interpreter is shutting down")
}

/// Calls in order.
pub(super) struct Line {
    state: Mutex<State>,
    changed: Condvar,
    abort: Abort,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Arc<Task>>,
    /// A thread has the turn: it makes a call.
    is_taken: bool,
    has_thread: bool,
    /// Threads that wait for a change.
    waiting: usize,
    /// Threads that tell Python of calls that are done. The interpreter must not end meanwhile.
    telling: usize,
}

/// The turn to make a call.
pub(super) struct Turn<'a>(&'a Line);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_taken = false;
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.0.changed.notify_all();
        }
    }
}

impl Line {
    pub(super) fn new(abort: &Abort) -> Arc<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Self { state, changed, abort: Arc::clone(abort) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing of the users' runs under this lock, and nobody waits for the interpreter's under it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The exception for the error of a call.
    pub(super) fn exception(&self, py: Python<'_>, error: Error) -> PyErr {
        match error {
            Error::Interrupted { .. } if is_set(&self.abort) => aborted(py, &error.to_string()),
            error => exception(py, error),
        }
    }

    /// The turn, if nothing is before this call.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        let mut state = self.lock();
        if state.is_taken || !state.tasks.is_empty() {
            return None;
        }
        state.is_taken = true;
        Some(Turn(self))
    }

    /// Has a call made after those before it.
    pub(super) fn submit(self: &Arc<Self>, task: Arc<Task>) -> PyResult<()> {
        let mut state = self.lock();
        state.tasks.push_back(task);
        let (starts, waiting) = (!state.has_thread, state.waiting);
        state.has_thread = true;
        drop(state);
        if starts {
            let line = Arc::clone(self);
            let thread = std::thread::Builder::new().name("symmem-line".into());
            if let Err(error) = thread.spawn(move || line.work()) {
                self.lock().has_thread = false;
                return Err(error.into());
            }
        } else if waiting > 0 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Makes the first call, if no thread makes one.
    fn make_first<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Option<MutexGuard<'a, State>> {
        if state.is_taken {
            return Some(state);
        }
        let Some(task) = state.tasks.pop_front() else { return Some(state) };
        state.is_taken = true;
        drop(state);
        let turn = Turn(self);
        task.make(self);
        self.lock().telling += 1;
        drop(turn);
        TELLING.set(TELLING.get() + 1);
        task.tell();
        TELLING.set(TELLING.get() - 1);
        let mut state = self.lock();
        state.telling -= 1;
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.changed.notify_all();
        }
        None
    }

    fn pause<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> (MutexGuard<'a, State>, bool) {
        state.waiting += 1;
        let (mut state, slept) =
            self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        (state, slept.timed_out())
    }

    /// The line's own thread.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            state = match self.make_first(state) {
                None => self.lock(),
                Some(state) => {
                    let (mut state, is_late) = self.pause(state, IDLE);
                    if is_late && state.tasks.is_empty() && !state.is_taken {
                        state.has_thread = false;
                        return;
                    }
                    state
                }
            };
        }
    }

    /// Waits until a call of this line is done, which it makes itself if nobody else does. False if the deadline passes, or a signal
    /// handler raises, before.
    pub(super) fn wait(&self, task: &Task, deadline: Deadline) -> bool {
        let (deadline, may_make) = (deadline.start(), deadline.remaining().is_none());
        interruptible(signalled, || {
            loop {
                if task.outcome().is_some() {
                    return true;
                }
                if deadline.expired() {
                    return false;
                }
                let mut state = self.lock();
                if may_make {
                    let Some(unchanged) = self.make_first(state) else { continue };
                    state = unchanged;
                }
                if task.outcome().is_none() {
                    let left = deadline.remaining().map_or(NAP, |left| left.min(NAP));
                    drop(self.pause(state, left));
                }
            }
        })
    }

    /// Whether all calls are done, and told of.
    fn is_idle(&self) -> bool {
        let state = self.lock();
        !state.is_taken && state.tasks.is_empty() && state.telling <= TELLING.get()
    }

    /// Waits until all calls are done and told of, or a signal handler raises.
    pub(super) fn drain(&self) {
        interruptible(signalled, || {
            while !self.is_idle() && !Deadline::NEVER.expired() {
                let state = self.lock();
                if let Some(state) = self.make_first(state) {
                    drop(self.pause(state, NAP));
                }
            }
        });
    }
}
