//! Groups, and the lifetime of a world.
#![allow(unsafe_code)] // S2 (a closed world refuses every call; arrays are the caller's, as documented for users)

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use symmem::Deadline;
use symmem::store::TcpServer;

use crate::collectives::{Collective, slices};
use crate::error::usage;
use crate::memory::{self, Allocation, Buffer, Location, Memory, Pool};
use crate::wait::detached;

/// A world that this process joined. It lives as long as a group or handle of it.
pub(crate) struct Life {
    world: symmem::World,
    closed: AtomicBool,
    /// The process that joined; a fork of it has not.
    process: u32,
    /// The store, where this rank hosts it.
    _server: Option<TcpServer>,
}

impl Life {
    /// A world that this process has just joined; it is left when the process ends.
    pub(crate) fn new(world: symmem::World, server: Option<TcpServer>) -> Arc<Self> {
        let closed = AtomicBool::new(false);
        let life = Arc::new(Self { world, closed, process: process(), _server: server });
        let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        worlds.retain(|world| world.strong_count() > 0);
        worlds.push(Arc::downgrade(&life));
        life
    }

    pub(crate) fn world(&self) -> &symmem::World {
        &self.world
    }

    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::Relaxed) {
            // SAFETY: as its users were told, nothing touches the memory of a world that they have closed.
            unsafe { self.world.leave_unchecked() };
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Relaxed) && self.process == process()
    }

    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(usage(py, op, "a world that was not closed", "one that was"));
        }
        if self.process != process() {
            let got = "one of the process that this one was forked from";
            return Err(usage(py, op, "a world that this process joined", got));
        }
        Ok(())
    }
}

/// The id of this process. Cached, because the system call takes longer than all other checks of a call.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn process() -> u32 {
    PROCESS.load(Ordering::Relaxed)
}

/// Records the id of this process. The package calls it at import and after every fork.
#[pyfunction]
pub(crate) fn note_process() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
}

/// All worlds of this process, to be left when it ends.
static WORLDS: Mutex<Vec<Weak<Life>>> = Mutex::new(Vec::new());

impl Life {
    /// All worlds of this process that are alive.
    pub(crate) fn all() -> Vec<Arc<Self>> {
        let worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        worlds.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Leaves all worlds in order. The package registers it to run at exit.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) {
    let worlds = std::mem::take(&mut *WORLDS.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| worlds.iter().filter_map(Weak::upgrade).for_each(|life| life.close()));
}

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

    /// Reduces all ranks' `data` element by element, in place. Collective. `data` is any contiguous array on the host.
    #[pyo3(signature = (data, op="sum", *, dtype=None))]
    fn all_reduce(
        &self,
        data: &Bound<'_, PyAny>,
        op: &str,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        slices::run(self, Collective::AllReduce, (None, data), (op, 0), dtype)
    }

    /// Copies all ranks' `data` to `out`, in rank order. Collective.
    #[pyo3(signature = (data, out, *, dtype=None))]
    fn all_gather(
        &self,
        data: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        slices::run(self, Collective::AllGather, (Some(data), out), ("sum", 0), dtype)
    }

    /// Reduces all ranks' `data`, and copies the r-th equal part to `out` of rank r. Collective.
    #[pyo3(signature = (data, out, op="sum", *, dtype=None))]
    fn reduce_scatter(
        &self,
        data: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        op: &str,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        slices::run(self, Collective::ReduceScatter, (Some(data), out), (op, 0), dtype)
    }

    /// Copies rank `root`'s `data` to all ranks. Collective.
    #[pyo3(signature = (data, root=0, *, dtype=None))]
    fn broadcast(
        &self,
        data: &Bound<'_, PyAny>,
        root: usize,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        slices::run(self, Collective::Broadcast, (None, data), ("sum", root), dtype)
    }

    /// Sends the r-th equal part of `data` to rank r; `out` receives the parts in rank order. Collective.
    #[pyo3(signature = (data, out, *, dtype=None))]
    fn all_to_all(
        &self,
        data: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        slices::run(self, Collective::AllToAll, (Some(data), out), ("sum", 0), dtype)
    }

    fn __repr__(&self) -> String {
        let (name, rank, size) = (self.inner.name(), self.inner.rank(), self.inner.size());
        format!("symmem.Group({name:?}, rank {rank} of {size})")
    }
}

/// The default size of signal pads, in bytes.
#[pyfunction]
pub(crate) fn signal_pad_size() -> usize {
    symmem::internals::signal_pad_size()
}

/// Sets the default size of signal pads, in bytes; 0 restores the built-in default. All ranks must set the same.
#[pyfunction]
pub(crate) fn set_signal_pad_size(py: Python<'_>, bytes: usize) -> PyResult<()> {
    detached(py, || symmem::internals::set_signal_pad_size(bytes))
}
