//! All ranks' memory of one rendezvous.

use std::sync::{Arc, Weak};

use pyo3::prelude::*;
use symmem::cuda::{self, Stream};

use crate::array::Array;
use crate::collectives::one_sided::{Direction, Target, Words};
use crate::collectives::{Call, Named, Rows, RowsGiven};
use crate::dtype::Type;
use crate::error::{Op, usage};
use crate::group::Group;
use crate::life::Life;
use crate::mapped::Mapped;
use crate::memory::{Allocation, Location, Memory};
use crate::stream::stream_of;
use crate::wait::detached;

/// All ranks' memory of one rendezvous, as mapped into this process. It keeps the memory of all ranks alive.
///
/// All ranks of the group call a collective, with matching arguments. No thread of any rank may access the elements until the call
/// returns, or on a device until its stream has completed it. If a collective times out or is interrupted, all ranks must call
/// `Group.resync`. If a rank is lost, the others call `Group.shrink` and repeat the rendezvous with the new group.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Handle(Arc<Inner>);

/// What all clones of a handle share.
pub(crate) struct Inner {
    mapped: Mapped,
    allocation: Arc<Allocation>,
    life: Arc<Life>,
}

impl Inner {
    /// Whether another handle is of the same group.
    pub(crate) fn is_of_group_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.life, &other.life) && self.group().name() == other.group().name()
    }

    fn group(&self) -> &symmem::Group {
        self.mapped.handle().group()
    }
}

impl Handle {
    pub(crate) fn new(mapped: Mapped, allocation: Arc<Allocation>, life: Arc<Life>) -> Self {
        let inner = Arc::new(Inner { mapped, allocation, life });
        inner.allocation.note(&inner);
        Self(inner)
    }

    /// The operation of a call on this memory, for errors.
    pub(crate) fn op(&self, name: &'static str) -> Op {
        Op::at(name, self.raw().rank())
    }

    /// The handle that `inner` is part of, if that is of the group and its world is `life`.
    pub(crate) fn of_group(
        inner: &Weak<Inner>,
        group: &symmem::Group,
        life: &Arc<Life>,
    ) -> Option<Self> {
        let found = inner.upgrade()?;
        let is_same = Arc::ptr_eq(&found.life, life) && found.group().name() == group.name();
        is_same.then_some(Self(found))
    }

    /// Another reference to the same.
    pub(crate) fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    pub(crate) fn raw(&self) -> &symmem::Handle {
        self.0.mapped.handle()
    }

    pub(crate) fn mapped(&self) -> &Mapped {
        &self.0.mapped
    }

    /// The memory, if it is a device's.
    pub(crate) fn cuda(&self) -> Option<&cuda::Symmetric<u8>> {
        self.0.mapped.cuda()
    }

    /// The caller's stream for a call on this memory.
    pub(crate) fn stream(&self, device: &cuda::Symmetric<u8>, raw: usize) -> Arc<Stream> {
        if let Some(used) = &self.0.allocation.used {
            used.note(raw);
        }
        stream_of(device, raw)
    }

    pub(crate) fn place(&self) -> Location {
        self.0.allocation.place
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.life.is_open()
    }

    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        self.0.life.check_open(py, op)
    }

    /// `nbytes` from byte `offset` of the `len` bytes at `addresses[rank]`.
    fn bytes_at(
        &self,
        py: Python<'_>,
        op: &'static str,
        (addresses, len): (&[usize], usize),
        rank: usize,
        (nbytes, offset): (Option<usize>, usize),
    ) -> PyResult<Array> {
        let Some(address) = addresses.get(rank) else {
            let expected = format!("a rank in [0, {})", addresses.len());
            return Err(usage(py, op, expected, rank.to_string()));
        };
        let shape = vec![nbytes.unwrap_or_else(|| len.saturating_sub(offset))];
        Array::check(py, op, (len, offset), Type::of(symmem::DType::U8), &shape)?;
        if *address == 0 {
            // On another host: the library's own error says what works instead.
            detached(py, || self.raw().view::<u8>(rank, 0, 0).map(drop))?;
        }
        let (keep, used): (Arc<Inner>, _) = (Arc::clone(&self.0), self.0.allocation.used.clone());
        let keep = (keep as Arc<dyn Send + Sync>, used);
        Ok(Array::new(address + offset, Type::of(symmem::DType::U8), shape, self.place(), keep))
    }
}

#[pymethods]
impl Handle {
    /// This rank's number in the group.
    #[getter]
    fn rank(&self) -> usize {
        self.raw().rank()
    }

    /// How many ranks the group has.
    #[getter]
    fn size(&self) -> usize {
        self.raw().size()
    }

    /// As `size`.
    #[getter]
    fn world_size(&self) -> usize {
        self.raw().size()
    }

    /// Bytes of each rank's memory.
    #[getter]
    fn nbytes(&self) -> usize {
        self.raw().buffer_size()
    }

    /// The name of the group.
    #[getter]
    fn group_name(&self) -> &str {
        self.raw().group().name()
    }

    /// The group of this handle.
    #[getter]
    fn group(&self) -> Group {
        Group { inner: self.raw().group().clone(), life: Arc::clone(&self.0.life) }
    }

    /// This rank's memory.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::new(Arc::clone(&self.0.allocation))
    }

    /// The addresses of all ranks' memory as mapped here, by rank; 0 for a rank that only the network connects.
    #[getter]
    fn buffer_ptrs(&self) -> Vec<usize> {
        self.0.mapped.buffers.clone()
    }

    /// The address of an array of `buffer_ptrs`, in device memory for a device.
    #[getter]
    fn buffer_ptrs_dev(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || Ok(self.0.mapped.tables()?.0))
    }

    /// The addresses of all ranks' signal pads as mapped here, by rank; 0 for a rank that only the network connects.
    #[getter]
    fn signal_pad_ptrs(&self) -> Vec<usize> {
        self.0.mapped.pads.clone()
    }

    /// The address of an array of `signal_pad_ptrs`, in device memory for a device.
    #[getter]
    fn signal_pad_ptrs_dev(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || Ok(self.0.mapped.tables()?.1))
    }

    /// Whether rank `rank`'s memory has an address here, and is not reached by the network alone.
    fn is_reachable(&self, rank: usize) -> bool {
        self.raw().is_reachable(rank)
    }

    /// Whether all ranks' memory has an address here. If not, `view` fails for some ranks, which `get` and `put` reach.
    #[getter]
    fn is_within_direct_access(&self) -> bool {
        self.raw().is_within_direct_access()
    }

    /// Bytes of this memory's signal pad.
    #[getter]
    fn signal_pad_size(&self) -> usize {
        self.raw().signal_pad_size()
    }

    /// The multicast address of all ranks' memory; 0 if the hardware has no multicast.
    #[getter]
    fn multicast_ptr(&self) -> usize {
        self.raw().multicast_ptr().unwrap_or(0)
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.place().to_string()
    }

    /// Signals rank `dst` in this memory's signal pad. Waits while `dst` has not received the previous signal on the channel.
    /// A timeout of 0 is the group's. On a device, the signal is put into `stream`.
    #[pyo3(signature = (dst, channel=0, timeout_ms=0, stream=0))]
    fn put_signal(
        &self,
        py: Python<'_>,
        dst: usize,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.in_pad(
            py,
            "put_signal",
            (timeout_ms, stream),
            |pad, limit| pad.put(dst, channel, limit),
            |device, limit, stream| device.put_signal_within(dst, channel, limit, stream),
        )
    }

    /// Waits for a signal from rank `src` in this memory's signal pad, and clears it. Everything `src` wrote before is then visible.
    #[pyo3(signature = (src, channel=0, timeout_ms=0, stream=0))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        src: usize,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.in_pad(
            py,
            "wait_signal",
            (timeout_ms, stream),
            |pad, limit| pad.wait(src, channel, limit),
            |device, limit, stream| device.wait_signal_within(src, channel, limit, stream),
        )
    }

    /// Waits for all ranks of the group in this memory's signal pad. What any rank wrote before the barrier, all see after it.
    /// After a timeout, the next barrier on the channel resumes it.
    #[pyo3(signature = (channel=0, timeout_ms=0, stream=0))]
    fn barrier(
        &self,
        py: Python<'_>,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.in_pad(
            py,
            "barrier",
            (timeout_ms, stream),
            |pad, limit| pad.barrier(channel, limit),
            |device, limit, stream| device.barrier_on_channel_within(channel, limit, stream),
        )
    }

    /// A barrier of all ranks in a device's stream, in the pads of the group, as collectives use them. On the host, use
    /// `Group.barrier`.
    #[pyo3(signature = (stream=0))]
    fn group_barrier(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        self.check_open(py, "barrier")?;
        let Some(device) = self.cuda() else {
            return Err(usage(py, "barrier", "memory of a device", "memory of the host"));
        };
        detached(py, || device.barrier(&self.stream(device, stream)))
    }

    /// Waits until a device's stream has completed, and raises the failure of a call in it, if there was one.
    #[pyo3(signature = (stream=0))]
    fn synchronize(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        self.check_open(py, "synchronize")?;
        detached(py, || match self.cuda() {
            None => Ok(()),
            Some(device) => device.synchronize(&stream_of(device, stream)),
        })
    }

    /// A view of rank `rank`'s memory, as bytes. Unavailable for a rank on another host.
    #[pyo3(signature = (rank, nbytes=None, offset=0))]
    fn view(
        &self,
        py: Python<'_>,
        rank: usize,
        nbytes: Option<usize>,
        offset: usize,
    ) -> PyResult<Array> {
        let whole = (self.0.mapped.buffers.as_slice(), self.nbytes());
        self.bytes_at(py, "view", whole, rank, (nbytes, offset))
    }

    /// A view of rank `rank`'s signal pad of this memory, as bytes. Unavailable for a rank on another host.
    #[pyo3(signature = (rank, nbytes=None, offset=0))]
    fn pad_view(
        &self,
        py: Python<'_>,
        rank: usize,
        nbytes: Option<usize>,
        offset: usize,
    ) -> PyResult<Array> {
        let whole = (self.0.mapped.pads.as_slice(), self.signal_pad_size());
        self.bytes_at(py, "pad_view", whole, rank, (nbytes, offset))
    }

    /// Calls the collective `name` (one of `symmem._native.COLLECTIVES`) on the `count` elements of `dtype` from byte `offset`.
    /// `Symmetric` has a method for each collective, which is easier to use.
    ///
    /// A collective uses the arguments that it needs. Reductions use `op`, all_reduce uses `algorithm`, collectives with a root use
    /// `root`, and reduce_scatter_last_dim uses `columns`, the elements of a row. `rows` is for all_to_all_v: the elements of a row;
    /// handle, byte offset and count of the int64 splits; an int64 output for the numbers of rows received and the first row of
    /// each; and None, the alignment of each expert's rows, or 0 to send rows back from experts.
    #[pyo3(signature = (name, dtype, offset, count, out=None, *, op="sum", root=0, algorithm="auto", columns=0, rows=None, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn collective(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        out: Option<&Bound<'_, PyAny>>,
        op: &str,
        root: usize,
        algorithm: &str,
        columns: usize,
        rows: Option<RowsGiven<'_>>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let named = Named { collective: name, dtype, op, algorithm };
        let rows = rows.map(|given| Rows::new(py, self, given)).transpose()?;
        let call =
            Call::named(py, self.rank(), &named, (offset, count), stream.unwrap_or_default())?;
        self.run(py, Call { root, columns, rows, ..call }, out)
    }

    /// Copies `data` to rank `rank`'s memory, at byte `offset`. A later signal or barrier makes it visible to other ranks.
    #[pyo3(signature = (rank, offset, data, *, stream=0))]
    fn put(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        data: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        self.copy(py, Target { rank, offset, stream }, data, Direction::Peer)
    }

    /// Copies rank `rank`'s memory, at byte `offset`, to `out`.
    #[pyo3(signature = (rank, offset, out, *, stream=0))]
    fn get(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        out: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        self.copy(py, Target { rank, offset, stream }, out, Direction::Here)
    }

    /// Sets `count` 32-bit words of rank `rank`'s memory to `value`, starting at word `offset`.
    #[pyo3(signature = (rank, offset, value, count=1, *, stream=0))]
    fn fill32(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        value: i64,
        count: usize,
        stream: usize,
    ) -> PyResult<()> {
        let value = word(py, "fill32", value)?;
        self.do_words(py, "fill32", Words::Fill { rank, at: offset, value, count }, stream)
    }

    /// Sets 32-bit word `offset` of rank `rank`'s memory to `value`. A rank that reads it sees everything this rank wrote before.
    #[pyo3(signature = (rank, offset, value, *, stream=0))]
    fn write32(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        value: i64,
        stream: usize,
    ) -> PyResult<()> {
        let value = word(py, "write32", value)?;
        self.do_words(py, "write32", Words::Write { rank, at: offset, value }, stream)
    }

    fn __repr__(&self) -> String {
        let (bytes, rank, size) = (self.nbytes(), self.rank(), self.size());
        format!("symmem.Handle({bytes} bytes, rank {rank} of {size}, on {})", self.place())
    }
}

fn word(py: Python<'_>, op: &'static str, value: i64) -> PyResult<u32> {
    let refused = |_| usage(py, op, "a value in [0, 4294967295] (uint32_t)", value.to_string());
    u32::try_from(value).map_err(refused)
}
