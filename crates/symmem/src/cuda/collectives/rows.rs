//! All-to-all of rows, with numbers of rows in device memory. The rules are those of host memory.
//!
//! One kernel reads all ranks' splits and finds what goes where, or that something does not fit; all ranks find the same. The
//! next kernel fetches the rows. Rows that do not fit are reported like any other failure.
#![allow(unsafe_code)] // S1, S3: lengths are checked here, and kernels check the splits against them

use std::sync::{Arc, Mutex};

use crate::collectives::{block_len, check_len};
use crate::cuda::device::gpu::Gpu;
use crate::cuda::device::kernels::parameters;
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::Stream;
use crate::cuda::symmetric::{Buffer, Symmetric, ViewMut};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Group, digest};
use crate::sync::lock;

/// Threads of the one block that plans.
const THREADS: u32 = 512;
/// Beyond this, a kernel's sums end; so does any memory.
const TOO_MANY: usize = 1 << 48;

/// One call.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) name: &'static str,
    pub(crate) row_len: usize,
    pub(crate) align: usize,
    experts: usize,
    /// The way back from experts: splits come with offsets.
    pub(crate) is_back: bool,
}

impl<T: Element> Symmetric<T> {
    /// Sends rows of `row_len` elements, `splits[r]` of them to rank r, in rank order. `out` becomes the rows for this
    /// rank, by source; `received` becomes the number of rows from each rank, and then the first row of each.
    /// Collective, in `stream`.
    ///
    /// `out` is equally long on all ranks, and is neither in this memory nor in that of the splits. If one is too short for
    /// what its rank would get, every rank gets an error and nothing is written.
    ///
    /// If only the network connects some of the ranks, the host waits for the stream and NVSHMEM fetches the rows; `out`
    /// must be memory of its heap then.
    pub fn all_to_all_v(
        &mut self,
        row_len: usize,
        splits: &mut Symmetric<i64>,
        out: ViewMut<'_, T>,
        received: ViewMut<'_, i64>,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_to_all_v";
        check_len(self.group(), NAME, "splits", self.group().size(), splits.len())?;
        let call = Rows { name: NAME, row_len, align: 1, experts: 1, is_back: false };
        call.enqueue(&self.memory, splits, out.elements(), received, stream)
    }

    /// As [`Symmetric::all_to_all_v`], to experts. `splits` has an entry for each expert of each rank, rank by rank. `out`
    /// becomes the rows for this rank's experts, expert by expert and for each by source; `received` the number of
    /// rows and then the first row of each of these. Collective, in `stream`.
    ///
    /// Each expert's rows begin at a multiple of `major_align` rows, and an expert without rows takes up `major_align`.
    pub fn all_to_all_v_2d(
        &mut self,
        row_len: usize,
        splits: &mut Symmetric<i64>,
        major_align: usize,
        out: ViewMut<'_, T>,
        received: ViewMut<'_, i64>,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_to_all_v_2d";
        let experts = block_len(self.group(), NAME, splits.len())?;
        let call = Rows { name: NAME, row_len, align: major_align, experts, is_back: false };
        call.enqueue(&self.memory, splits, out.elements(), received, stream)
    }

    /// The way back from experts. `splits_offsets` is what [`Symmetric::all_to_all_v_2d`] wrote to `received`, or
    /// similar: the number of rows for each rank from each expert, expert by expert, and then the first row of each;
    /// there may be gaps. `out` becomes the rows for this rank, by source and for each by expert, without gaps;
    /// `received` the number of rows and then the first row of each of these. Collective, in `stream`.
    pub fn all_to_all_v_2d_offset(
        &mut self,
        row_len: usize,
        splits_offsets: &mut Symmetric<i64>,
        out: ViewMut<'_, T>,
        received: ViewMut<'_, i64>,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_to_all_v_2d_offset";
        let (ranks, words) = (self.group().size(), splits_offsets.len());
        let experts = words / (2 * ranks);
        check_len(self.group(), NAME, "splits and offsets", 2 * ranks * experts, words)?;
        let call = Rows { name: NAME, row_len, align: 1, experts, is_back: true };
        call.enqueue(&self.memory, splits_offsets, out.elements(), received, stream)
    }
}

impl Rows {
    fn enqueue(
        &self,
        x: &Memory,
        splits: &Symmetric<i64>,
        out: Elements,
        received: ViewMut<'_, i64>,
        stream: &Stream,
    ) -> Result<()> {
        let (group, ranks) = (x.group(), x.group().size());
        let experts = self.check(x, splits)?;
        let pieces = ranks * self.experts;
        check_len(group, self.name, "splits and offsets received", 2 * pieces, received.len)?;
        if x.comm.is_apart() && x.gpu.heap().is_ok() {
            return self.over_network(x, splits, out, received, stream);
        }
        x.comm.check_together(group, self.name)?;
        let (row_bytes, out_rows) = (self.row_len * x.size(), out.len / self.row_len);
        let words = 1 + 3 * pieces + ranks * splits.len();
        let words = scratch(group, &x.gpu, self.name, words, stream)?;
        let agreed =
            [self.row_len, self.align, out_rows, self.experts, splits.memory.handle.digest()];
        let call = digest(self.name, x.dtype(), x.handle.digest(), x.len(), &agreed);
        let (in_rows, align) = (x.len() / self.row_len, self.align.min(TOO_MANY));
        let [in_rows, out_rows, align, row_bytes] =
            [in_rows, out_rows, align, row_bytes].map(|n| n as u64);
        let (out, received) = (out.address, received.address);
        let (parts, tables) = (x.parts, splits.memory.parts);
        let offsets = u32::from(self.is_back);
        x.comm.enqueue(group, self.name, call, stream, |context| {
            let group = context.group;
            let plan = x.gpu.kernel("rows", "all_to_all_v_plan", THREADS)?;
            let bytes = (out_rows * row_bytes) as usize;
            let (fetch, blocks) = x.shaped("rows", "all_to_all_v", bytes)?;
            let list =
                parameters![group, tables, words, experts, offsets, in_rows, out_rows, align];
            // SAFETY: the kernel's parameters in order; tables and words are as long as it takes for so many experts.
            unsafe { x.launch(plan, 1, context.target, list) }?;
            let list = parameters![
                group, parts, out, received, words, experts, offsets, row_bytes, out_rows
            ];
            // SAFETY: the kernel's parameters in order; it moves what the plan found to lie within the parts and `out`.
            unsafe { x.launch(fetch, blocks, context.target, list) }
        })
    }

    /// The number of experts as the kernels take it, if all is as it should be.
    fn check(&self, x: &Memory, splits: &Symmetric<i64>) -> Result<u32> {
        let group = x.group();
        for (what, number) in [("a row length", self.row_len), ("an alignment", self.align)] {
            if number == 0 {
                return Err(group.usage(self.name, format!("{what} of at least 1"), "0".into()));
            }
        }
        if !Arc::ptr_eq(&x.comm, &splits.memory.comm) {
            let expected = "splits in the memory's group and on its device".to_owned();
            let got = format!("{:?} on {:?}", splits.group(), splits.gpu());
            return Err(group.usage(self.name, expected, got));
        }
        u32::try_from(self.experts).map_err(|_| {
            let expected = format!("at most {} experts of a rank", u32::MAX);
            group.usage(self.name, expected, self.experts.to_string())
        })
    }
}

/// Memory in which a group's kernels, which run one after the other, leave their plans for the next. What was handed out
/// stays as long as the group does, since graphs have its address.
#[derive(Default)]
struct Scratch(Mutex<Vec<Buffer<u64>>>);

/// The address of at least so many words.
fn scratch(
    group: &Group,
    gpu: &Gpu,
    op: &'static str,
    words: usize,
    stream: &Stream,
) -> Result<u64> {
    let scratch = group.attached(u64::from(gpu.number()), || Ok(Arc::<Scratch>::default()))?;
    let mut buffers = lock(&scratch.0);
    if let Some(buffer) = buffers.iter().find(|buffer| buffer.len() >= words) {
        return Ok(buffer.view().address);
    }
    if stream.captured_by()?.is_some() {
        let expected = "a call of this size before the first that is captured".to_owned();
        return Err(group.usage(op, expected, "none".to_owned()));
    }
    // Rounded up so that few sizes need another.
    let buffer = gpu.of_driver().alloc::<u64>(group, words.next_power_of_two().max(1 << 17))?;
    let address = buffer.view().address;
    buffers.push(buffer);
    Ok(address)
}
