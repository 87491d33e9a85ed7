//! All ranks' memory of one rendezvous.

use std::sync::Arc;

use pyo3::prelude::*;
use symmem::cuda::{self, Stream};

use crate::array::Array;
use crate::collectives::one_sided::{Target, Words};
use crate::collectives::{Part, Rows};
use crate::dtype::Type;
use crate::error::usage;
use crate::group::{Group, Life};
use crate::mapped::Mapped;
use crate::memory::{Allocation, Memory, Place};
use crate::stream::stream_of;
use crate::wait::detached;

/// All ranks' memory of one rendezvous, as mapped into this process. Cheap; keeps the memory of all of them.
///
/// Collectives are calls of all ranks of the group with the same arguments. The elements of a call belong to it while it
/// lasts: nobody else on any rank touches them. On a device a call goes into a `stream`, and lasts until that is done with
/// it. After a collective that timed out or was interrupted, all ranks call `Group.resync` before they go on; after the loss of a
/// rank, the others bring the memory to a rendezvous of the group that `Group.shrink` gives.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Handle(Arc<Inner>);

struct Inner {
    mapped: Mapped,
    allocation: Arc<Allocation>,
    life: Arc<Life>,
}

impl Handle {
    pub(crate) fn new(mapped: Mapped, allocation: Arc<Allocation>, life: Arc<Life>) -> Self {
        Self(Arc::new(Inner { mapped, allocation, life }))
    }

    /// The same once more.
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

    /// A stream of the caller's, into which a call on this memory goes.
    pub(crate) fn stream(&self, device: &cuda::Symmetric<u8>, raw: usize) -> Arc<Stream> {
        if let Some(used) = &self.0.allocation.used {
            used.note(raw);
        }
        stream_of(device, raw)
    }

    pub(crate) fn place(&self) -> Place {
        self.0.allocation.place
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.life.is_open()
    }

    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        self.0.life.check_open(py, op)
    }

    /// `nbytes` from byte `offset` on of what lies at `addresses[rank]` and is `len` bytes long.
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

    /// The addresses of all ranks' memory as mapped here, by rank.
    #[getter]
    fn buffer_ptrs(&self) -> Vec<usize> {
        self.0.mapped.buffers.clone()
    }

    /// The address of a table of `buffer_ptrs`.
    #[getter]
    fn buffer_ptrs_dev(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || Ok(self.0.mapped.tables()?.0))
    }

    /// The addresses of all ranks' signal pads as mapped here, by rank.
    #[getter]
    fn signal_pad_ptrs(&self) -> Vec<usize> {
        self.0.mapped.pads.clone()
    }

    /// The address of a table of `signal_pad_ptrs`.
    #[getter]
    fn signal_pad_ptrs_dev(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || Ok(self.0.mapped.tables()?.1))
    }

    /// Bytes of this memory's signal pad.
    #[getter]
    fn signal_pad_size(&self) -> usize {
        self.raw().signal_pad_size()
    }

    /// An address that reaches all ranks at once; 0 where the hardware has none.
    #[getter]
    fn multicast_ptr(&self) -> usize {
        self.raw().multicast_ptr().unwrap_or(0)
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.place().to_string()
    }

    /// Signals to rank `dst` in this memory's pad; waits while the last signal there is not taken. A timeout of 0 is the group's.
    /// On a device it goes into `stream`.
    #[pyo3(signature = (dst, channel=0, timeout_ms=0, stream=0))]
    fn put_signal(
        &self,
        py: Python<'_>,
        dst: usize,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.do_put_signal(py, (dst, channel), timeout_ms, stream)
    }

    /// Waits for a signal of rank `src` in this memory's pad and takes it: then all that `src` wrote before is seen.
    #[pyo3(signature = (src, channel=0, timeout_ms=0, stream=0))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        src: usize,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.do_wait_signal(py, (src, channel), timeout_ms, stream)
    }

    /// Waits for all ranks of the group in this memory's pad; what any of them wrote before, all see after. After a timeout,
    /// the next one on the channel goes on with it.
    #[pyo3(signature = (channel=0, timeout_ms=0, stream=0))]
    fn barrier(
        &self,
        py: Python<'_>,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.do_barrier(py, channel, timeout_ms, stream)
    }

    /// A barrier of all ranks in a device's stream, on the group's own pads as collectives use them. On the host, call
    /// `Group.barrier`.
    #[pyo3(signature = (stream=0))]
    fn group_barrier(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        self.check_open(py, "barrier")?;
        let Some(device) = self.cuda() else {
            return Err(usage(py, "barrier", "memory of a device", "memory of the host"));
        };
        detached(py, || device.barrier(&self.stream(device, stream)))
    }

    /// Waits until all in a device's stream is done, and raises what went wrong in it.
    #[pyo3(signature = (stream=0))]
    fn synchronize(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        self.check_open(py, "synchronize")?;
        detached(py, || match self.cuda() {
            None => Ok(()),
            Some(device) => device.synchronize(&stream_of(device, stream)),
        })
    }

    /// Bytes of rank `rank`'s memory.
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

    /// Bytes of rank `rank`'s signal pad of this memory.
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

    /// The `count` elements at byte `offset` become the reduction of all ranks' (or `out` does). `algorithm` is "auto",
    /// "staged", "one_shot" or "two_shot", or on a device "copy_engine", all of which give the same bits, or "multimem".
    #[pyo3(signature = (dtype, op, offset, count, *, out=None, algorithm="auto", stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        op: &str,
        offset: usize,
        count: usize,
        out: Option<&Bound<'_, PyAny>>,
        algorithm: &str,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let part = Part::new("all_reduce", dtype, (offset, count), stream)?;
        self.do_all_reduce(py, part, op, out, algorithm)
    }

    /// The elements are one block for each rank, or rows of `columns` with such blocks each; `out` becomes the reduced blocks for this one.
    #[pyo3(signature = (dtype, op, offset, count, out, *, columns=None, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        op: &str,
        offset: usize,
        count: usize,
        out: &Bound<'_, PyAny>,
        columns: Option<usize>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let part = Part::new("reduce_scatter", dtype, (offset, count), stream)?;
        self.do_reduce_scatter(py, part, op, columns, out)
    }

    /// On rank `root`, `out` becomes the reduction of all ranks' elements.
    #[pyo3(signature = (dtype, op, offset, count, root, out=None, *, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn reduce(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        op: &str,
        offset: usize,
        count: usize,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let part = Part::new("reduce", dtype, (offset, count), stream)?;
        self.do_reduce(py, part, op, root, out)
    }

    /// `out` becomes all ranks' elements, one rank's after the other's.
    #[pyo3(signature = (dtype, offset, count, out, *, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        out: &Bound<'_, PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        self.do_all_gather(py, Part::new("all_gather", dtype, (offset, count), stream)?, out)
    }

    /// The elements are one block for each rank; `out` becomes the blocks that all ranks have for this one.
    #[pyo3(signature = (dtype, offset, count, out, *, stream=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        out: &Bound<'_, PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        self.do_all_to_all(py, Part::new("all_to_all", dtype, (offset, count), stream)?, out)
    }

    /// The elements become those of rank `root`.
    #[pyo3(signature = (dtype, offset, count, root, *, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        root: usize,
        stream: Option<usize>,
    ) -> PyResult<()> {
        self.do_broadcast(py, Part::new("broadcast", dtype, (offset, count), stream)?, root)
    }

    /// On rank `root`, `out` becomes all ranks' elements, by rank.
    #[pyo3(signature = (dtype, offset, count, root, out=None, *, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn gather(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        self.do_gather(py, Part::new("gather", dtype, (offset, count), stream)?, root, out)
    }

    /// The elements of rank `root` are one block for each rank; `out` becomes that for this one.
    #[pyo3(signature = (dtype, offset, count, root, out, *, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        root: usize,
        out: &Bound<'_, PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        self.do_scatter(py, Part::new("scatter", dtype, (offset, count), stream)?, root, out)
    }

    /// Rows of `row_len` elements, a number of them for each rank. `splits` is `(handle, offset, count)` of int64 numbers in
    /// symmetric memory; `received` gets the numbers of rows that came and then the first row of each.
    ///
    /// With `major_align`, to experts: `splits` has a number for each expert of each rank. With `offsets`, the way back:
    /// `splits` are numbers and first rows, expert by expert.
    #[pyo3(signature = (dtype, offset, count, row_len, splits, out, received, *, major_align=None, offsets=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "named in Python")]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
        row_len: usize,
        splits: (Bound<'_, Self>, usize, usize),
        out: &Bound<'_, PyAny>,
        received: &Bound<'_, PyAny>,
        major_align: Option<usize>,
        offsets: bool,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let part = Part::new("all_to_all_v", dtype, (offset, count), stream)?;
        let rows = match major_align {
            _ if offsets => Rows::FromExperts(row_len),
            Some(align) => Rows::ByExpert(row_len, align),
            None => Rows::ByRank(row_len),
        };
        let splits = (splits.0.get(), splits.1, splits.2);
        self.do_all_to_all_v(py, part, rows, splits, (out, received))
    }

    /// Copies `data` to rank `rank`'s memory, from byte `offset` on. A later signal or barrier shows it to others.
    #[pyo3(signature = (rank, offset, data, *, stream=0))]
    fn put(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        data: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        self.do_put(py, Target { rank, offset, stream }, data)
    }

    /// Copies rank `rank`'s memory, from byte `offset` on, to `out`.
    #[pyo3(signature = (rank, offset, out, *, stream=0))]
    fn get(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        out: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        self.do_get(py, Target { rank, offset, stream }, out)
    }

    /// Sets `count` 32-bit words of rank `rank`'s memory, from word `offset` on, to `value`.
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

    /// Sets word `offset` of rank `rank`'s memory to `value`; whoever reads it sees what this rank wrote before.
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
