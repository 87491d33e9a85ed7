//! What NVSHMEM itself does in a stream: it reaches every rank, over the network too.
//!
//! Nothing here is ordered with the group's kernels in other streams, and nothing has a deadline: a rank that does not come
//! is waited for until it does.
#![allow(unsafe_code)] // S1, S3: ranks, words and ranges are checked here; S4, S5

use std::sync::Arc;

use symmem_sys::cuda as driver;
use symmem_sys::nvshmem::{self as sys, SignalOp, Team};

use super::Heap;
use crate::collectives::check_len;
use crate::cuda::Module;
use crate::cuda::{Gpu, Stream, Symmetric, View, ViewMut};
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::Result;
use crate::group::Group;
use crate::symmetric::check_elements;

/// Symmetric memory of NVSHMEM's heap, with the operations of NVSHMEM.
#[derive(Clone)]
pub struct Nvshmem<'a, T> {
    x: &'a Symmetric<T>,
    heap: Arc<Heap>,
}

impl<T: Element> Symmetric<T> {
    /// NVSHMEM's own operations on this memory; [`Error::Unavailable`](crate::Error::Unavailable) if it is not of NVSHMEM's heap.
    pub fn nvshmem(&self) -> Result<Nvshmem<'_, T>> {
        Ok(Nvshmem { x: self, heap: self.memory.gpu.heap()? })
    }
}

impl<T: Element> Nvshmem<'_, T> {
    /// Copies `data` to rank `rank`'s part, from its element `at` on, in `stream`. It is there after [`Nvshmem::quiet`] or
    /// [`Nvshmem::barrier`], and not before.
    pub fn put(&self, rank: usize, at: usize, data: View<'_, T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_put";
        let (to, pe) = self.part_at(NAME, rank, at, data.len)?;
        let bytes = data.len * size_of::<T>();
        // SAFETY: within the part of a rank that there is; `data` has as many elements.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.put(to, data.address, bytes, pe, s)
        })
    }

    /// Copies rank `rank`'s part to `out`, from its element `at` on, in `stream`: there for what comes after in it.
    pub fn get(&self, rank: usize, at: usize, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_get";
        let (from, pe) = self.part_at(NAME, rank, at, out.len)?;
        let bytes = out.len * size_of::<T>();
        // SAFETY: within the part of a rank that there is; `out` has as many elements.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.get(out.address, from, bytes, pe, s)
        })
    }

    /// As [`Nvshmem::put`], and then does `op` with `value` to the 64-bit word `word` of rank `rank`'s pad of this memory: who
    /// sees the word sees the data.
    #[allow(clippy::too_many_arguments)] // what a put and a signal have
    pub fn put_with_signal(
        &self,
        rank: usize,
        at: usize,
        data: View<'_, T>,
        word: usize,
        (op, value): (SignalOp, u64),
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "nvshmem_put_with_signal";
        let (to, pe) = self.part_at(NAME, rank, at, data.len)?;
        let signal = self.word(NAME, word)?;
        let bytes = data.len * size_of::<T>();
        // SAFETY: as for `put`; a word of the pad.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.put_signal(to, data.address, bytes, signal, (op, value), pe, s)
        })
    }

    /// Does `op` with `value` to the 64-bit word `word` of rank `rank`'s pad of this memory, in `stream`. Puts before it are
    /// there before it only after a [`Nvshmem::quiet`].
    pub fn signal(
        &self,
        rank: usize,
        word: usize,
        (op, value): (SignalOp, u64),
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "nvshmem_signal";
        let (_, pe) = self.part_at(NAME, rank, 0, 0)?;
        let signal = self.word(NAME, word)?;
        // SAFETY: a word of the pad of a rank that there is.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.signal(signal, (op, value), pe, s)
        })
    }

    /// Has `stream` wait until the 64-bit word `word` of this rank's pad is `value`. What was put with that signal is there for
    /// what comes after in the stream.
    pub fn wait_for_signal(&self, word: usize, value: u64, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_wait_for_signal";
        let signal = self.word(NAME, word)?;
        // SAFETY: a word of our own pad.
        self.enqueue(NAME, stream, |library, s| unsafe { library.wait(signal, value, s) })
    }

    /// Has `stream` wait until all that this rank has put is there.
    pub fn quiet(&self, stream: &Stream) -> Result<()> {
        // SAFETY: it touches no memory.
        self.enqueue("nvshmem_quiet", stream, |library, s| unsafe { library.quiet(s) })
    }

    /// All ranks of the group synchronise in `stream`, and what they have put is there.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_barrier";
        let team = self.team(NAME)?;
        // SAFETY: it touches no memory of ours.
        self.enqueue(NAME, stream, |library, s| unsafe { library.barrier(team, s) })
    }

    /// All ranks' elements become those of rank `root`. Collective, in `stream`.
    pub fn broadcast(&self, root: usize, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_broadcast";
        self.x.group().check_rank(NAME, root)?;
        let (team, own) = (self.team(NAME)?, self.x.view().address);
        let (bytes, root) = (self.x.len() * size_of::<T>(), root as i32);
        // SAFETY: all of all ranks' parts.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.broadcast(team, own, own, bytes, root, s)
        })
    }

    /// `out` becomes the blocks that all ranks have for this one, by rank. Collective, in `stream`.
    pub fn all_to_all(&self, out: &mut Symmetric<T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_all_to_all";
        let block = crate::collectives::block_len(self.x.group(), NAME, self.x.len())?;
        let (team, to, from) = self.other(NAME, out, self.x.len())?;
        let bytes = block * size_of::<T>();
        // SAFETY: a block for each rank in all ranks' parts, of both memories.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.all_to_all(team, to, from, bytes, s)
        })
    }

    /// `out` becomes all ranks' elements, by rank. Collective, in `stream`.
    pub fn all_gather(&self, out: &mut Symmetric<T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_all_gather";
        let (len, ranks) = (self.x.len(), self.x.group().size());
        let (team, to, from) = self.other(NAME, out, len * ranks)?;
        let bytes = len * size_of::<T>();
        // SAFETY: all of all ranks' parts, and room for them.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.all_gather(team, to, from, bytes, s)
        })
    }

    /// `out` becomes the reduction of all ranks' elements, in an order of NVSHMEM's. Collective, in `stream`.
    pub fn all_reduce(&self, op: ReduceOp, out: &mut Symmetric<T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "nvshmem_all_reduce";
        let names = (kind(T::DTYPE), operator(op));
        let (Some(kind), Some(operator)) = names else {
            let expected = "a sum, product, minimum or maximum of numbers that NVSHMEM reduces";
            let got = format!("{op} of {}", T::DTYPE);
            return Err(self.x.group().usage(NAME, expected.to_owned(), got));
        };
        let (team, to, from) = self.other(NAME, out, self.x.len())?;
        let count = self.x.len();
        // SAFETY: all of all ranks' parts, of both memories.
        self.enqueue(NAME, stream, |library, s| unsafe {
            library.all_reduce((kind, operator), team, to, from, count, s)
        })
    }

    fn team(&self, op: &'static str) -> Result<Team> {
        self.heap.team(op, self.x.group())
    }

    /// Where `len` elements lie in this rank's part, as NVSHMEM names those of rank `rank`, and its PE.
    fn part_at(&self, op: &'static str, rank: usize, at: usize, len: usize) -> Result<(u64, i32)> {
        let (group, own) = (self.x.group(), self.x.view());
        check_elements(group, op, (rank, own.len), at, len)?;
        let pe = self.heap.pes(op, group)?.get(rank).copied().unwrap_or(0);
        Ok((own.address + (at * size_of::<T>()) as u64, pe as i32))
    }

    /// A 64-bit word of this rank's pad, as NVSHMEM names those of all ranks.
    fn word(&self, op: &'static str, word: usize) -> Result<u64> {
        self.x.memory.check_word(op, word)?;
        let pads = self.x.handle().signal_pad_ptrs();
        let pad = pads.get(self.x.group().rank()).copied().unwrap_or(0);
        Ok((pad + 8 * word) as u64)
    }

    /// The team, and the addresses of `out` and of this memory, for a collective from this to `out`: of so many elements, not
    /// this memory, but of the heap and the group, too.
    fn other(&self, op: &'static str, out: &Symmetric<T>, len: usize) -> Result<(Team, u64, u64)> {
        let group = self.x.group();
        check_len(group, op, "an output", len, out.len())?;
        let same = out.gpu().heap().is_ok() && out.group().world_ranks() == group.world_ranks();
        let (to, from) = (out.view(), self.x.view());
        let bytes = (to.len.max(from.len) * size_of::<T>()) as u64;
        if same && to.address.abs_diff(from.address) >= bytes {
            return Ok((self.team(op)?, to.address, from.address));
        }
        let expected = "an output on NVSHMEM's heap, of the same ranks, and none of the input";
        Err(group.usage(op, expected.to_owned(), "another".to_owned()))
    }

    fn enqueue(
        &self,
        op: &'static str,
        stream: &Stream,
        work: impl FnOnce(&sys::Nvshmem, driver::Stream) -> sys::Result<()>,
    ) -> Result<()> {
        self.x.memory.comm.enqueue_unordered(self.x.group(), op, stream, || {
            self.heap.call(|library| work(library, stream.raw()))
        })
    }
}

impl Gpu {
    /// Makes the team that NVSHMEM's own collectives need for a group of some of its ranks; none, for a rank that only takes
    /// part. Collective over all ranks of the heap, each for a group of its own or for none. There is no need to for the
    /// group of all of them.
    pub fn make_team(&self, group: Option<&Group>) -> Result<()> {
        let heap = self.heap()?;
        heap.make_teams(group.map(|group| heap.shape_of(group)).transpose()?)
    }

    /// Makes kernels of the caller's usable that call NVSHMEM themselves; [`Gpu::forget_module`] before the module goes.
    pub fn init_module(&self, module: &Module) -> Result<()> {
        self.heap()?.call(|library| library.module_init(module.raw()))
    }

    /// The counterpart of [`Gpu::init_module`].
    pub fn forget_module(&self, module: &Module) -> Result<()> {
        self.heap()?.call(|library| library.module_finalize(module.raw()))
    }

    /// The version of NVSHMEM, if it is there: [`Error::Unavailable`](crate::Error::Unavailable) says why it is not.
    pub fn nvshmem_version() -> Result<(i32, i32, i32)> {
        super::library()?.version().map_err(super::failed)
    }
}

/// What NVSHMEM calls a type of elements.
const fn kind(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float"),
        DType::F64 => Some("double"),
        DType::F16 => Some("half"),
        DType::BF16 => Some("bfloat16"),
        DType::I32 => Some("int32"),
        DType::I64 => Some("int64"),
        _ => None,
    }
}

/// What NVSHMEM calls an operator.
const fn operator(op: ReduceOp) -> Option<&'static str> {
    match op {
        ReduceOp::Sum => Some("sum"),
        ReduceOp::Product => Some("prod"),
        ReduceOp::Min => Some("min"),
        ReduceOp::Max => Some("max"),
        _ => None,
    }
}

debug_of!([T: Element] Nvshmem<'_, T>, "Nvshmem": |this| memory = this.x);
