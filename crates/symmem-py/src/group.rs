//! Groups.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use symmem::Deadline;

use crate::collectives::Collective;
use crate::collectives::methods::array_collectives;
use crate::collectives::slices::{self, Arrays, Received};
use crate::error::usage;
use crate::life::Life;
use crate::memory::{self, Allocation, Buffer, Location, Memory, Pool};
use crate::messages;
use crate::queue::Queue;
use crate::wait::detached;

/// A set of ranks that work together.
#[pyclass(frozen, subclass, module = "symmem")]
pub(crate) struct Group {
    pub(crate) inner: symmem::Group,
    pub(crate) life: Arc<Life>,
}

impl Group {
    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        self.life.check_open(py, op)
    }

    /// Does `work` by the caller's deadline, or the group's.
    fn by<R: Send>(
        &self,
        py: Python<'_>,
        op: &'static str,
        timeout: Option<f64>,
        work: impl FnOnce(&symmem::Group, Deadline) -> symmem::Result<R> + Send,
    ) -> PyResult<R> {
        self.check_open(py, op)?;
        let given = timeout.map(|given| seconds(py, given)).transpose()?;
        let deadline = given.map_or_else(|| self.inner.deadline(), Deadline::within);
        detached(py, || work(&self.inner, deadline))
    }

    /// Makes a collective on arrays.
    fn run(
        &self,
        py: Python<'_>,
        collective: Collective,
        arrays: Arrays<'_, '_>,
        how: (&str, usize),
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.check_open(py, collective.shown())?;
        let call = slices::on_arrays(py, &self.inner, collective, arrays, how, dtype)?;
        detached(py, || call(&self.inner))
    }

    /// Makes a collective whose output is as long as the call finds out.
    fn run_on_vector(
        &self,
        collective: Collective,
        data: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Received> {
        let py = data.py();
        self.check_open(py, collective.shown())?;
        let call = slices::on_vector(py, &self.inner, collective, data, counts, dtype)?;
        detached(py, || call(&self.inner))
    }
}

/// A time in Python's seconds.
pub(crate) fn seconds(py: Python<'_>, given: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given)
        .map_err(|_| usage(py, "timeout", "a number of seconds from 0 on", given.to_string()))
}

#[pymethods]
impl Group {
    /// This rank's number in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    /// The number of ranks in the group.
    #[getter]
    fn size(&self) -> usize {
        self.inner.size()
    }

    /// The members' ranks in the world, in the order of their ranks in the group.
    #[getter]
    fn ranks(&self) -> Vec<usize> {
        self.inner.world_ranks().to_vec()
    }

    /// The group's name.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// The number of channels for barriers and signals.
    #[getter]
    fn channels(&self) -> usize {
        self.inner.channels()
    }

    /// Bytes of the signal pad.
    #[getter]
    fn signal_pad_size(&self) -> usize {
        self.inner.signal_pad_size()
    }

    /// The time limit of waits, in seconds, for calls without their own; None for no limit.
    #[getter]
    fn timeout(&self) -> Option<f64> {
        self.inner.deadline().remaining().map(|limit| limit.as_secs_f64())
    }

    #[setter]
    fn set_timeout(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.inner.set_timeout(seconds(py, timeout.unwrap_or(0.0))?);
        Ok(())
    }

    /// Makes a group of some of this group's ranks. Those ranks call it; any other rank that calls it gets None.
    #[pyo3(signature = (ranks, name=None, timeout=None))]
    fn subgroup(
        &self,
        py: Python<'_>,
        ranks: Vec<usize>,
        name: Option<String>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Self>> {
        self.check_open(py, "subgroup")?;
        if ranks.iter().all(|rank| *rank < self.inner.size()) && !ranks.contains(&self.inner.rank())
        {
            return Ok(None);
        }
        let timeout = timeout.map(|given| seconds(py, given)).transpose()?;
        let mut builder = self.inner.subgroup_builder(&ranks);
        if let Some(name) = name {
            builder = builder.name(name);
        }
        if let Some(timeout) = timeout {
            builder = builder.timeout(timeout);
        }
        let inner = detached(py, || builder.build())?;
        Ok(Some(Self { inner, life: Arc::clone(&self.life) }))
    }

    /// Makes a group of the ranks that give the same `color`, numbered by `key`, and by their rank here where keys are equal. A rank
    /// that gives None as its color gets None. Collective.
    #[pyo3(signature = (color, key=0))]
    fn split(&self, py: Python<'_>, color: Option<u64>, key: i64) -> PyResult<Option<Self>> {
        self.check_open(py, "split")?;
        let inner = detached(py, || self.inner.split(color, key))?;
        Ok(inner.map(|inner| Self { inner, life: Arc::clone(&self.life) }))
    }

    /// The ranks of the group by host: the hosts in the order of their first ranks in the world. Only ranks of one host reach each
    /// other's memory by an address.
    fn hosts(&self) -> Vec<Vec<usize>> {
        self.inner.hosts()
    }

    /// Whether rank `rank` is on this rank's host. False if there is no such rank.
    fn is_local(&self, rank: usize) -> bool {
        self.inner.is_local(rank)
    }

    /// Makes a group of this group's ranks on this rank's host. All of those call it. In it, every rank reaches every rank's memory by
    /// an address.
    fn host_group(&self, py: Python<'_>) -> PyResult<Self> {
        self.check_open(py, "host_group")?;
        let inner = detached(py, || self.inner.host_group())?;
        Ok(Self { inner, life: Arc::clone(&self.life) })
    }

    /// Waits for all ranks of the group. What any rank wrote before the barrier, all see after it.
    #[pyo3(signature = (timeout=None, channel=0))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>, channel: usize) -> PyResult<()> {
        self.by(py, "barrier", timeout, |group, deadline| group.barrier_on(channel, deadline))
    }

    /// Signals rank `to`. Its `wait_signal` returns, and sees everything this rank wrote before.
    #[pyo3(signature = (to, channel=0, timeout=None))]
    fn put_signal(
        &self,
        py: Python<'_>,
        to: usize,
        channel: usize,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.by(py, "put_signal", timeout, |group, limit| group.put_signal(to, channel, limit))
    }

    /// Waits for a signal from rank `source`, and clears it.
    #[pyo3(signature = (source, channel=0, timeout=None))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        source: usize,
        channel: usize,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.by(py, "wait_signal", timeout, |group, limit| {
            group.wait_signal(source, channel, limit)
        })
    }

    /// Sends `data`, any contiguous array on the host, to rank `to`. Returns once `data` may be changed. Some 200 KiB wait on the way, so
    /// a small message need not wait for the receiver. A message that raises is not received.
    #[pyo3(signature = (data, to, tag=0, timeout=None, *, dtype=None))]
    fn send(
        &self,
        data: &Bound<'_, PyAny>,
        to: usize,
        tag: u64,
        timeout: Option<f64>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        messages::send(self, data, (to, tag), (timeout, dtype))
    }

    /// Receives the next message with this tag from rank `source` into `out`. Raises Mismatch if it has another length or type; the
    /// message is consumed then.
    #[pyo3(signature = (out, source, tag=0, timeout=None, *, dtype=None))]
    fn recv(
        &self,
        out: &Bound<'_, PyAny>,
        source: usize,
        tag: u64,
        timeout: Option<f64>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        messages::receive(self, out, (Some(source), tag), (timeout, dtype)).map(drop)
    }

    /// As `recv`, from any rank. Returns the sender.
    #[pyo3(signature = (out, tag=0, timeout=None, *, dtype=None))]
    fn recv_any(
        &self,
        out: &Bound<'_, PyAny>,
        tag: u64,
        timeout: Option<f64>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        messages::receive(self, out, (None, tag), (timeout, dtype))
    }

    /// Refuses a collective that the other ranks call: they get PeerFailed at once instead of waiting. Call it in place of the
    /// collective.
    fn refuse(&self, py: Python<'_>) -> PyResult<()> {
        self.check_open(py, "refuse")?;
        detached(py, || self.inner.refuse())
    }

    /// Brings the ranks of a group back in step after a failed collective. All ranks call it. Then all calls work again, on devices
    /// too. The elements of the failed collective are unspecified. After a timeout it may be called again.
    #[pyo3(signature = (timeout=None))]
    fn resync(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.by(py, "resync", timeout, symmem::Group::resync_by)
    }

    /// Raises PeerLost if a member of the group was lost.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.check())
    }

    /// Makes a group of the surviving ranks. All of them call it.
    #[pyo3(signature = (timeout=None))]
    fn shrink(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Self> {
        let inner = self.by(py, "shrink", timeout, symmem::Group::shrink_by)?;
        Ok(Self { inner, life: Arc::clone(&self.life) })
    }

    /// Makes a queue of collectives that run in the background. All ranks of the group call it.
    fn queue(&self, py: Python<'_>) -> PyResult<Queue> {
        self.check_open(py, "queue")?;
        Queue::new(detached(py, || self.inner.queue())?, &self.inner, &self.life)
    }

    /// Allocates zeroed symmetric memory. Not collective. With `persistent_id`, the memory is kept when it is no longer used, and the
    /// next call with the same id returns it.
    ///
    /// On a device, `backend` is "cuda", "nccl" or "nvshmem"; the default is SYMMEM_CUDA_BACKEND, or else "cuda". Raises Unavailable
    /// if the backend's library is missing. All ranks of the group allocate NVSHMEM memory together.
    #[pyo3(signature = (nbytes, *, device=None, backend=None, pad_bytes=None, persistent_id=None))]
    fn alloc(
        &self,
        py: Python<'_>,
        nbytes: usize,
        device: Option<&Bound<'_, PyAny>>,
        backend: Option<&str>,
        pad_bytes: Option<usize>,
        persistent_id: Option<u64>,
    ) -> PyResult<Memory> {
        const OP: &str = "alloc";
        self.check_open(py, OP)?;
        let place = Location::named(OP, device)?;
        place.check_backend(py, OP, backend)?;
        if persistent_id.is_some() && pad_bytes.is_some() {
            return Err(usage(py, OP, "a persistent_id or pad_bytes", "both"));
        }
        let group = &self.inner;
        let buffer = detached(py, || match place {
            Location::Cuda(number) => {
                let gpu = memory::open(number, backend, group)?;
                let own = match (persistent_id, pad_bytes) {
                    (Some(id), _) => gpu.alloc_persistent(group, id, nbytes),
                    (None, Some(pad)) => gpu.alloc_with_pad(group, nbytes, pad),
                    (None, None) => gpu.alloc(group, nbytes),
                };
                own.map(Buffer::Cuda)
            }
            Location::Host => {
                let own = match (persistent_id, pad_bytes) {
                    (Some(id), _) => group.alloc_persistent(id, nbytes),
                    (None, Some(pad)) => group.alloc_with_pad(nbytes, pad),
                    (None, None) => group.alloc(nbytes),
                };
                own.map(Buffer::Host)
            }
        });
        Ok(Memory::new(Allocation::new(buffer?)))
    }

    /// Makes a pool of small allocations. It allocates segments of `segment_bytes` as `alloc` does.
    #[pyo3(signature = (segment_bytes, *, device=None, backend=None))]
    fn pool(
        &self,
        py: Python<'_>,
        segment_bytes: usize,
        device: Option<&Bound<'_, PyAny>>,
        backend: Option<&str>,
    ) -> PyResult<Pool> {
        Pool::new(py, self, segment_bytes, Location::named("pool", device)?, backend)
    }

    /// What `Memory.attach` attached to the allocation of this world that contains an address; None if there is none.
    fn attached<'py>(&self, py: Python<'py>, address: usize) -> Option<Bound<'py, PyAny>> {
        Allocation::at(&self.inner, address)?.0.attached(py)
    }

    fn __repr__(&self) -> String {
        let (name, rank, size) = (self.inner.name(), self.inner.rank(), self.inner.size());
        format!("symmem.Group({name:?}, rank {rank} of {size})")
    }
}

array_collectives!(Group, (), Received);
