//! Queues: collectives that run in the background.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use pyo3::prelude::*;
use symmem::Deadline;

use crate::collectives::Collective;
use crate::collectives::methods::array_collectives;
use crate::collectives::slices::{self, Arrays, Received};
use crate::error::{Op, exception, usage};
use crate::group::seconds;
use crate::life::Life;
use crate::lock::unlocked;
use crate::wait::{detached, raised, signalled};

/// Runs collectives in the background, one after the other, on a group of its own of the same ranks. All ranks put the same calls into
/// it in the same order. Each call returns a `Pending`, whose `wait` returns what the call of a group would. Until that is done, no thread
/// may write its arrays, or read its output.
///
/// A call that fails with another error than Mismatch leaves calls out, so later ones raise OutOfStepError on all ranks, until all
/// have called `resync`. In a `with` block, the queue is closed at the end, and aborted if an exception is raised.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Queue {
    /// None once it is closed.
    inner: RwLock<Option<Arc<symmem::Queue>>>,
    /// To check the arguments of calls. Jobs run on the group of the queue.
    group: symmem::Group,
    life: Arc<Life>,
}

impl Queue {
    pub(crate) fn new(
        queue: symmem::Queue,
        group: &symmem::Group,
        life: &Arc<Life>,
    ) -> PyResult<Self> {
        let queue = Arc::new(queue);
        life.add_queue(&queue);
        let inner = RwLock::new(Some(queue));
        Ok(Self { inner, group: group.clone(), life: Arc::clone(life) })
    }

    /// What `f` makes of the queue, if that is open.
    fn with<R>(
        &self,
        py: Python<'_>,
        op: &'static str,
        f: impl FnOnce(&symmem::Queue) -> R,
    ) -> PyResult<R> {
        self.life.check_open(py, op)?;
        let Some(queue) = self.inner.read().unwrap_or_else(PoisonError::into_inner).clone() else {
            let at = Op::at(op, self.group.rank());
            return Err(usage(py, at, "a queue that was not closed", "one that was"));
        };
        let result = f(&queue);
        // If another thread has closed it meanwhile, this one waits for the jobs.
        if let Some(last) = Arc::into_inner(queue) {
            py.detach(|| drop(last));
        }
        Ok(result)
    }

    fn submit(
        &self,
        py: Python<'_>,
        op: &'static str,
        job: impl FnOnce(&symmem::Group) -> symmem::Result<Option<Received>> + Send + 'static,
    ) -> PyResult<Pending> {
        let call = self.with(py, op, |queue| queue.submit(job))?;
        Ok(Pending { call, result: Mutex::new(None), life: Arc::clone(&self.life) })
    }

    fn run(
        &self,
        py: Python<'_>,
        collective: Collective,
        arrays: Arrays<'_, '_>,
        how: (&str, usize),
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pending> {
        let call = slices::on_arrays(py, &self.group, collective, arrays, how, dtype)?;
        self.submit(py, collective.shown(), |group| call(group).map(|()| None))
    }

    fn run_on_vector(
        &self,
        collective: Collective,
        data: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pending> {
        let py = data.py();
        let call = slices::on_vector(py, &self.group, collective, data, counts, dtype)?;
        self.submit(py, collective.shown(), |group| call(group).map(Some))
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn take(&self) -> Option<Arc<symmem::Queue>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Queue {
    /// Ends all calls that are not done: their `wait` raises Aborted. Later calls raise OutOfStepError on all ranks, until all have called
    /// `resync`.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, "abort", symmem::Queue::abort)
    }

    /// Waits for all calls, and ends the queue. Ctrl-C aborts the calls.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            drop(self.take());
            Ok(())
        })
    }

    /// Brings the ranks back in step after a call has failed. All ranks call it.
    fn resync(&self, py: Python<'_>) -> PyResult<Pending> {
        self.submit(py, "resync", |group| group.resync().map(|()| None))
    }

    /// As `Group.refuse`.
    fn refuse(&self, py: Python<'_>) -> PyResult<Pending> {
        self.submit(py, "refuse", |group| group.refuse().map(|()| None))
    }

    /// As `Group.barrier`.
    fn barrier(&self, py: Python<'_>) -> PyResult<Pending> {
        self.submit(py, "barrier", |group| group.barrier().map(|()| None))
    }

    fn __enter__<'py>(slf: &Bound<'py, Self>) -> Bound<'py, Self> {
        slf.clone()
    }

    #[pyo3(signature = (raised=None, *_more))]
    fn __exit__(
        &self,
        py: Python<'_>,
        raised: Option<&Bound<'_, PyAny>>,
        _more: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        if raised.is_some() {
            let _ = self.abort(py); // fails if it is closed
        }
        self.close(py)
    }

    fn __repr__(&self) -> String {
        match &*self.inner.read().unwrap_or_else(PoisonError::into_inner) {
            Some(queue) => format!("symmem.{queue:?}"),
            None => "symmem.Queue(closed)".to_owned(),
        }
    }
}

array_collectives!(Queue, Pending, Pending);

impl Drop for Queue {
    fn drop(&mut self) {
        let Some(queue) = self.take() else { return };
        unlocked(|| symmem::interruptible(signalled, || drop(queue)));
        if let Some(raised) = raised() {
            // Nobody is there to catch it.
            Python::try_attach(|py| raised.write_unraisable(py, None));
        }
    }
}

/// A call of a queue, to wait for.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Pending {
    call: symmem::Pending<Option<Received>>,
    /// What every `wait` gives. Locked only without the GIL, which its holder needs, and never while it waits.
    result: Mutex<Option<Arc<PyResult<Py<PyAny>>>>>,
    life: Arc<Life>,
}

impl Pending {
    /// The result of a call that is done. None while the interpreter ends.
    fn result(&self) -> Option<Arc<PyResult<Py<PyAny>>>> {
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(taken) = self.call.take() {
            *result = Python::try_attach(|py| match taken {
                Ok(None) => Ok(py.None()),
                Ok(Some(received)) => {
                    received.into_pyobject(py).map(|pair| pair.into_any().unbind())
                }
                Err(error) => Err(exception(py, error)),
            })
            .map(Arc::new);
        }
        result.clone()
    }
}

#[pymethods]
impl Pending {
    /// Waits until the call is done. Returns what the call returns, or raises its error, every time. After `timeout` seconds it raises
    /// Timeout; the call goes on, and can be waited for again. The call also ends by the time limit of its group.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        self.life.check_process(py, "wait")?;
        let given = timeout.map(|given| seconds(py, given)).transpose()?;
        let deadline = given.map_or(Deadline::NEVER, Deadline::within);
        detached(py, || self.call.done_by(deadline))?;
        match py.detach(|| self.result()).as_deref() {
            Some(Ok(result)) => Ok(result.clone_ref(py)),
            Some(Err(raised)) => Err(raised.clone_ref(py)),
            None => Ok(py.None()),
        }
    }

    /// Whether the call is done, with success or an error.
    fn done(&self) -> bool {
        self.call.is_done()
    }

    fn __repr__(&self) -> String {
        format!("symmem.{:?}", self.call)
    }
}
