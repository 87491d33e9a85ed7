//! The calls of a process group of `torch.distributed`, on tensors by their addresses.
//!
//! | file | contents |
//! |---|---|
//! | `mod.rs` | `ProcessGroup`: one method for collectives, one for each direction of messages |
//! | `line.rs` | the order of calls, the thread that makes those which nobody waits for, and their end |
//! | `arena.rs` | memory for tensors that peers read in place |
//! | `calls.rs` | what a collective does with memory in pieces |
//! | `parts.rs` | memory in pieces |
//!
//! Python checks the tensors and reads their properties: it does that faster than the stable ABI can.

mod arena;
mod calls;
mod line;
mod parts;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use symmem::internals::Registrations;
use symmem::{Deadline, Error};

use crate::argument::Slice;
use crate::array::Array;
use crate::collectives::{Call, Collective, reduce_op};
use crate::dtype::Type;
use crate::error::{Op, exception, usage};
use crate::group::{Group, seconds};
use crate::life::Life;
use crate::memory::Location;
use crate::messages::{receive_elements, send_elements};
use crate::wait::{detached, raised};
use arena::Arena;
use calls::{OnParts, Rooms};
use line::{Abort, Job, Line, Task, abortable};
use parts::Parts;

/// A message up to this size is sent in the thread of the caller, if there is room for it on the way.
const SMALL: usize = 64 << 10;

/// Messages with these are received or sent in the order of the calls: whether they are sent, the other rank and the tag.
type Key = (bool, Option<usize>, u64);

/// The calls of a process group of torch, on the tensors of this rank. A tensor is given by its address and its number of elements, a
/// list of tensors by those of all. `keep` is kept alive as long as the call needs it.
///
/// Collectives are made in the order of their calls, in the caller's thread if it waits for them. Otherwise they return a `ProcessGroupCall`,
/// and are made in a thread of the group.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct ProcessGroup {
    group: symmem::Group,
    life: Arc<Life>,
    /// torch's types, by identity.
    types: Vec<(Py<PyAny>, &'static Type)>,
    rooms: Arc<Mutex<Rooms>>,
    lines: Arc<Lines>,
    registrations: Arc<Registrations>,
    arena: Arc<Arena>,
}

/// The lines of a process group.
pub(crate) struct Lines {
    collectives: Arc<Line>,
    messages: Mutex<HashMap<Key, Arc<Line>>>,
    /// What runs apart from calls.
    notes: Arc<Line>,
    abort: Abort,
}

impl Lines {
    /// The line of messages with these.
    fn of(&self, key: Key) -> Arc<Line> {
        let mut lines = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lines.entry(key).or_insert_with(|| Line::new(&self.abort)))
    }

    /// Ends all calls that are not done.
    pub(crate) fn abort(&self) {
        self.abort.store(true, Ordering::Relaxed);
    }

    /// Waits until all calls are done, or all but the messages that this rank receives.
    pub(crate) fn drain(&self, with_received: bool) {
        let lines: Vec<_> = {
            let messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = messages.iter().filter(|((is_sent, ..), _)| *is_sent || with_received);
            waited.map(|(_, line)| line).chain([&self.collectives, &self.notes]).cloned().collect()
        };
        lines.iter().for_each(|line| line.drain());
    }
}

impl ProcessGroup {
    fn at(&self, op: &'static str) -> Op {
        Op::at(op, self.group.rank())
    }

    /// Refuses calls on a group that was aborted, or whose world was closed.
    fn check(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        if self.lines.abort.load(Ordering::Relaxed) {
            return Err(usage(
                py,
                self.at(op),
                "a process group that was not aborted",
                "one that was",
            ));
        }
        self.life.check_open(py, op)
    }

    fn type_of(&self, op: &'static str, dtype: &Bound<'_, PyAny>) -> PyResult<&'static Type> {
        let known = self.types.iter().find(|(known, _)| known.as_ptr() == dtype.as_ptr());
        known.map_or_else(|| Type::named(self.at(op), dtype), |(_, dtype)| Ok(*dtype))
    }

    /// A collective, checked.
    fn on_parts(
        &self,
        py: Python<'_>,
        collective: Collective,
        (op, root): (&str, usize),
        dtype: &Bound<'_, PyAny>,
        (inputs, outputs): (&[usize], &[usize]),
    ) -> PyResult<OnParts> {
        let at = self.at(collective.shown());
        let dtype = self.type_of(at.name, dtype)?;
        let call = Call { root, ..Call::new(collective, dtype, (0, 0), reduce_op(py, at, op)?, 0) };
        let element = call.checked_element(py, at)?;
        let (input, out) = (Parts::new(inputs, dtype.size()), Parts::new(outputs, dtype.size()));
        Ok(OnParts { call, element, input, out })
    }

    /// Makes a call in this thread if the caller `waits` and nothing is before it, else in the order of the line.
    fn start(
        &self,
        py: Python<'_>,
        line: &Arc<Line>,
        job: Job,
        (waits, keep, finish): (bool, Py<PyAny>, Option<Py<PyAny>>),
    ) -> PyResult<Option<ProcessGroupCall>> {
        if waits && let Some(turn) = line.turn() {
            let made = py.detach(|| {
                let made = abortable(&self.lines.abort, job);
                drop(turn);
                made
            });
            return match (raised(), made) {
                (Some(raised), _) => Err(raised),
                (None, made) => {
                    made.map(|_| None).map_err(|error| self.lines.collectives.exception(py, error))
                }
            };
        }
        let call = self.submit(line, Task::new(job, keep, finish))?;
        if waits { call.wait(py, None).map(|_| None) } else { Ok(Some(call)) }
    }

    /// Makes a small collective that nobody waits for in this thread, if nothing is before it and all other ranks have come: that takes
    /// less time than handing it over. Its error is that of its work.
    fn start_small(
        &self,
        py: Python<'_>,
        job: Job,
        (keep, finish): (Py<PyAny>, Option<Py<PyAny>>),
    ) -> PyResult<Option<ProcessGroupCall>> {
        let line = &self.lines.collectives;
        if finish.is_none()
            && self.group.is_awaited()
            && let Some(turn) = line.turn()
        {
            let made = py.detach(|| {
                let made = abortable(&self.lines.abort, job);
                drop(turn);
                made
            });
            let outcome = match (raised(), made) {
                (Some(raised), _) => return Err(raised),
                (None, Ok(_)) => return Ok(None),
                (None, Err(error)) => Err(line.exception(py, error)),
            };
            return Ok(Some(self.call(line, Task::done(outcome, keep))));
        }
        self.start(py, line, job, (false, keep, finish))
    }

    fn submit(&self, line: &Arc<Line>, task: Arc<Task>) -> PyResult<ProcessGroupCall> {
        line.submit(Arc::clone(&task))?;
        Ok(self.call(line, task))
    }

    fn call(&self, line: &Arc<Line>, task: Arc<Task>) -> ProcessGroupCall {
        ProcessGroupCall { task, line: Arc::clone(line), rank: self.group.rank() }
    }

    /// Tries a message in the thread of the caller, without waiting, if no other with these is before it. None if it is not done.
    fn try_now(
        &self,
        py: Python<'_>,
        line: &Line,
        job: impl FnOnce() -> symmem::Result<usize> + Send,
    ) -> Option<PyResult<usize>> {
        let turn = line.turn()?;
        let made = py.detach(|| {
            let made = job();
            drop(turn);
            made
        });
        match made {
            Ok(value) => Some(Ok(value)),
            // The message is consumed. After any other error the call is made once more, and its work has the error.
            Err(error @ Error::Mismatch { .. }) => Some(Err(exception(py, error))),
            Err(_) => None,
        }
    }
}

/// Long enough to look once.
const AT_ONCE: Duration = Duration::from_nanos(1);

#[pymethods]
impl ProcessGroup {
    /// `types` are torch's, by the library's names.
    #[new]
    fn new(group: &Bound<'_, Group>, types: Vec<(Py<PyAny>, String)>) -> PyResult<Self> {
        let named = |(object, name): (Py<PyAny>, String)| {
            let name = name.into_pyobject(group.py())?;
            Ok((object, Type::named("ProcessGroup", name.as_any())?))
        };
        let types = types.into_iter().map(named).collect::<PyResult<_>>()?;
        let (group, abort) = (group.get(), Arc::new(AtomicBool::new(false)));
        let (life, collectives) = (Arc::clone(&group.life), Line::new(&abort));
        let (messages, notes) = (Mutex::default(), Line::new(&abort));
        let lines = Arc::new(Lines { collectives, messages, notes, abort });
        life.add_lines(&lines);
        let group = group.inner.clone();
        let (registrations, arena) = (Arc::new(Registrations::new(&group)), Arena::new(&group));
        Ok(Self { group, life, types, rooms: Arc::default(), lines, registrations, arena })
    }

    /// Makes a collective by its name. If this rank refuses it, the others do not wait for this one. `inputs` and `outputs` are addresses and numbers of elements, one after the other. `finish` is called
    /// when a call that nobody waited for has succeeded, before it is done.
    #[pyo3(signature = (collective, inputs, outputs, dtype, op, root, waits, keep, finish=None, /))]
    #[allow(clippy::too_many_arguments, reason = "one call from Python is what makes it fast")]
    fn collective(
        &self,
        py: Python<'_>,
        collective: &str,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
        dtype: &Bound<'_, PyAny>,
        op: &str,
        root: usize,
        waits: bool,
        keep: Py<PyAny>,
        finish: Option<Py<PyAny>>,
    ) -> PyResult<Option<ProcessGroupCall>> {
        let Some(collective) = Collective::of_arrays(collective) else {
            let expected = "the name of a collective on arrays";
            return Err(usage(py, self.at("collective"), expected, collective));
        };
        self.check(py, collective.shown())?;
        let on_parts = self.on_parts(py, collective, (op, root), dtype, (&inputs, &outputs));
        let on_parts = match on_parts {
            Ok(on_parts) => on_parts,
            Err(error) => {
                self.refuse(py)?;
                return Err(error);
            }
        };
        let (group, rooms) = (self.group.clone(), Arc::clone(&self.rooms));
        let (registrations, is_small) =
            (Arc::clone(&self.registrations), on_parts.bytes() <= SMALL);
        let job = move || {
            let rooms = &mut *rooms.lock().unwrap_or_else(PoisonError::into_inner);
            on_parts.run((&group, &registrations), rooms).map(|()| 0)
        };
        let job = Box::new(job);
        if !waits && is_small {
            return self.start_small(py, job, (keep, finish));
        }
        self.start(py, &self.lines.collectives, job, (waits, keep, finish))
    }

    /// Waits for all ranks.
    fn barrier(&self, py: Python<'_>, waits: bool) -> PyResult<Option<ProcessGroupCall>> {
        self.check(py, "barrier")?;
        let group = self.group.clone();
        let job = Box::new(move || group.barrier().map(|()| 0));
        self.start(py, &self.lines.collectives, job, (waits, py.None(), None))
    }

    /// Makes the call that the other ranks make fail there, in place of it.
    fn refuse(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.group.clone();
        let job = Box::new(move || group.refuse().map(|()| 0));
        self.start(py, &self.lines.collectives, job, (false, py.None(), None)).map(drop)
    }

    /// Sends a tensor to rank `to`. Returns None if it is on the way already.
    #[pyo3(signature = (address, count, dtype, to, tag, keep, /))]
    #[allow(clippy::too_many_arguments, reason = "as for collectives")]
    fn send(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        to: usize,
        tag: u64,
        keep: Py<PyAny>,
    ) -> PyResult<Option<ProcessGroupCall>> {
        self.check(py, "send")?;
        let dtype = self.type_of("send", dtype)?;
        let bytes = count * dtype.size();
        let (line, data) = (self.lines.of((true, Some(to), tag)), Slice::raw(address, bytes));
        let at_once = || {
            send_elements(&self.group, (&data, dtype), (to, tag), Deadline::within(AT_ONCE))
                .map(|()| to)
        };
        if bytes <= SMALL
            && let Some(sent) = self.try_now(py, &line, at_once)
        {
            return sent.map(|_| None);
        }
        let group = self.group.clone();
        let job =
            move || send_elements(&group, (&data, dtype), (to, tag), group.deadline()).map(|()| to);
        self.start(py, &line, Box::new(job), (false, keep, None))
    }

    /// Receives a tensor from rank `source`, or from any.
    #[pyo3(signature = (address, count, dtype, source, tag, keep, finish=None, /))]
    #[allow(clippy::too_many_arguments, reason = "as for collectives")]
    fn receive(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        source: Option<usize>,
        tag: u64,
        keep: Py<PyAny>,
        finish: Option<Py<PyAny>>,
    ) -> PyResult<ProcessGroupCall> {
        let op = if source.is_some() { "recv" } else { "recv_any" };
        self.check(py, op)?;
        let dtype = self.type_of(op, dtype)?;
        let line = self.lines.of((false, source, tag));
        let mut out = Slice::raw(address, count * dtype.size());
        if finish.is_none() {
            let limit = Deadline::within(AT_ONCE);
            let at_once = || receive_elements(&self.group, (&mut out, dtype), (source, tag), limit);
            if let Some(received) = self.try_now(py, &line, at_once) {
                return Ok(self.call(&line, Task::done(received, keep)));
            }
        }
        let group = self.group.clone();
        let job =
            move || receive_elements(&group, (&mut out, dtype), (source, tag), group.deadline());
        self.submit(&line, Task::new(Box::new(job), keep, finish))
    }

    /// Memory of so many bytes that peers can read in place, as an array of bytes that are not zeroed; None if the group has ended.
    /// No other rank takes part. It is used again once the array is gone.
    fn allocate(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Array>> {
        self.check(py, "allocate_tensor")?;
        let lease = detached(py, || self.arena.allocate(nbytes))?;
        Ok(lease.map(|lease| {
            let (address, bytes) = (lease.address(), Type::of(symmem::DType::U8));
            Array::new(address, bytes, vec![nbytes], Location::Host, (Arc::new(lease), None))
        }))
    }

    /// How many allocations of all ranks this one has mapped, and the bytes of its own that are free.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        (self.registrations.mapped(), self.arena.free_bytes())
    }

    /// Gives peers' memory back, and this rank's that is not in use. Later calls use ordinary memory.
    fn release(&self, py: Python<'_>) {
        py.detach(|| {
            self.registrations.close();
            self.arena.close();
        });
    }

    /// Calls `callback` in another thread, soon.
    fn later(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let task = Task::new(Box::new(|| Ok(0)), py.None(), Some(callback));
        self.submit(&self.lines.notes, task).map(drop)
    }

    /// Ends all calls that are not done, and refuses later ones.
    fn abort(&self) {
        self.lines.abort();
    }

    /// Waits until all calls are done but those that receive messages, which may never come.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.lines.drain(false));
        raised().map_or(Ok(()), Err)
    }

    fn __repr__(&self) -> String {
        format!("symmem.ProcessGroup({:?})", self.group)
    }
}

/// A call of a process group that may not be done.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct ProcessGroupCall {
    task: Arc<Task>,
    line: Arc<Line>,
    rank: usize,
}

#[pymethods]
impl ProcessGroupCall {
    /// Waits until it is done, or `timeout` seconds. Returns the sender of a message, or raises the error of the call.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        if self.task.outcome().is_none() {
            let given = timeout.map(|given| seconds(py, given)).transpose()?;
            let deadline = given.map_or(Deadline::NEVER, Deadline::within);
            if !py.detach(|| self.line.wait(&self.task, deadline)) {
                let late = || {
                    exception(
                        py,
                        Error::timeout("wait", vec![self.rank], given.unwrap_or_default()),
                    )
                };
                return Err(raised().unwrap_or_else(late));
            }
        }
        match self.task.outcome() {
            Some(Ok(value)) => Ok(*value),
            Some(Err(error)) => Err(error.clone_ref(py)),
            None => {
                Err(usage(py, Op::at("wait", self.rank), "a call that is done", "one that is not"))
            }
        }
    }

    /// Whether it is done, with success or an error.
    fn done(&self) -> bool {
        self.task.outcome().is_some()
    }

    /// The error of a call that is done, or None.
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.task.outcome()?.as_ref().err()?;
        Some(error.clone_ref(py).into_value(py).into_any())
    }

    /// Calls `callback` when the call is done: now if it is, else in the thread that makes it.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        if self.task.then(callback.clone_ref(py)) { Ok(()) } else { callback.call0(py).map(drop) }
    }
}
