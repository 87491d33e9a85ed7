//! Collectives on device memory: which kernel, with how many blocks, with which parameters.
//!
//! Calls put a kernel into the caller's stream and return. All ranks call them in the same order with arguments that
//! agree. A kernel that finds a difference, or whose wait ends at the deadline, records it, and the next call on the group fails.
#![allow(unsafe_code)] // S1, S3: lengths are checked here, and kernels touch nothing else

pub(in crate::cuda) mod algorithm;
mod checks;
pub(in crate::cuda) mod copies;
mod methods;
pub(in crate::cuda) mod multimem;
pub(in crate::cuda) mod rows;
pub(in crate::cuda) mod tiles;

use crate::cuda::Algorithm;
use crate::cuda::collectives::tiles::Tile;
use crate::cuda::device::kernels::{BuiltIn, parameters};
use crate::cuda::device::module::Parameter;
use crate::cuda::group::comm::LaunchContext;
use crate::cuda::group::layout::{FLAGGED, GroupParameter};
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::replays::{Launched, Replays};
use crate::cuda::stream::{Stream, Target};
use crate::dtype::ReduceOp;
use crate::error::Result;

/// Threads of a block that moves little, or much.
const THREADS: (u32, u32) = (256, 512);
/// Bytes that a thread moves at once.
const VECTOR: usize = 16;
/// The most bytes that calls alternately reduce forwards and backwards: their vectors are counted in 32 bits there.
const MOST_ALTERNATING: usize = 32 << 30;
/// The most bytes that are sent with flags: their units of 8 bytes are counted in 32 bits, and rounds in which all have one.
const MOST_FLAGGED: usize = 16 << 30;

/// Up to how many bytes the device finishes before the host's next launch, so that a replay saves time.
const REPLAYED: usize = 64 << 10;

/// Up to how many bytes of an element fit next to a flag.
const FITS_FLAG: usize = 8;

impl Memory {
    /// In place: element i becomes the reduction of element i of all ranks.
    fn all_reduce(&mut self, op: ReduceOp, algorithm: Algorithm, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_reduce";
        self.check_operator(NAME, op)?;
        let (bytes, ranks) = (self.bytes(), self.group().size());
        let chosen = match algorithm {
            Algorithm::Auto if self.is_small(self.len()) => Algorithm::Staged,
            Algorithm::Auto if self.may_multimem(op) => Algorithm::Multimem,
            Algorithm::Auto => Algorithm::TwoShot,
            given => given,
        };
        match chosen {
            Algorithm::Staged if self.size() <= FITS_FLAG => {
                self.flagged(NAME, "all_reduce_flagged", op, self.own(), stream)
            }
            Algorithm::Staged => {
                let ways = "Auto, OneShot or TwoShot for elements of more than 8 bytes";
                Err(self.unsupported(NAME, ways, chosen))
            }
            Algorithm::Multimem => self.multimem_all_reduce(op, stream),
            Algorithm::CopyEngine => {
                let ways = "Auto, Staged, OneShot, TwoShot or Multimem";
                Err(self.unsupported(NAME, ways, chosen))
            }
            Algorithm::OneShot => {
                self.in_place("all_reduce_one_shot_in_place", chosen, op, bytes, stream)
            }
            _ => {
                // What was accessed last is still in the cache, so the next call goes in the opposite direction.
                let alternates = self.overflows_cache(bytes) && bytes <= MOST_ALTERNATING;
                self.backwards = alternates && !self.backwards;
                let name = match alternates {
                    true => "all_reduce_two_shot_alternating",
                    false => "all_reduce_two_shot",
                };
                self.in_place(name, Algorithm::TwoShot, op, bytes.div_ceil(ranks), stream)
            }
        }
    }

    /// Reduces all parts in place, by the kernel `name`; this rank's share has so many bytes.
    fn in_place(
        &self,
        name: &'static str,
        algorithm: Algorithm,
        op: ReduceOp,
        share: usize,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_reduce";
        let alternates = name.ends_with("alternating");
        // If there is little more than the cache holds, each block has a fixed part: drawing pieces takes time, too.
        let draws = u32::from(self.overflows_cache(self.bytes() / 2));
        // Which elements a rank reduces depends on all of this.
        let agreed = [op as usize, algorithm as usize, usize::from(alternates), draws as usize];
        let call = self.digest(NAME, &agreed);
        let (length, op, backwards) = (self.len() as u64, op as u32, u32::from(self.backwards));
        self.enqueue(NAME, call, stream, |context| {
            let (group, parts) = (&context.group, &self.parts);
            let list = parameters![*group, *parts, 0_u64, length, op, backwards, draws];
            // Only the kernel that goes both ways has parameters for that.
            let list = if alternates { &list[..] } else { &list[..5] };
            // SAFETY: the kernel's parameters in order; it touches `length` elements of all parts.
            unsafe { self.run((self.reductions(), name), share, context.target, list) }
        })
    }

    /// Into `out`; this memory stays as it is.
    fn all_reduce_into(
        &self,
        op: ReduceOp,
        out: Elements,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_reduce";
        let by_switch = self.by_switch(NAME, op, algorithm, "Auto or Multimem")?;
        let len = self.len();
        self.check_out(NAME, len, out.len)?;
        if algorithm == Algorithm::Auto && self.is_small(len) {
            return self.flagged(NAME, "all_reduce_flagged", op, out, stream);
        }
        self.pull(NAME, op, by_switch, Tile::flat(0, len), out, true, stream)
    }

    /// `out` becomes the reduction of all ranks' blocks for this one.
    fn reduce_scatter(
        &mut self,
        op: ReduceOp,
        out: Elements,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let block = self.block(NAME, self.len())?;
        if algorithm == Algorithm::CopyEngine {
            self.check_operator(NAME, op)?;
            self.check_out(NAME, block, out.len)?;
            let gathered = self.scratch()?;
            return self.fetch_and_reduce(op, out, gathered, stream);
        }
        let by_switch = self.by_switch(NAME, op, algorithm, "Auto, Multimem or CopyEngine")?;
        self.check_out(NAME, block, out.len)?;
        if algorithm == Algorithm::Auto && self.is_small_block(block) {
            return self.flagged(NAME, "reduce_scatter_flagged", op, out, stream);
        }
        let own = Tile::flat(self.group().rank() * block, block);
        self.pull(NAME, op, by_switch, own, out, true, stream)
    }

    /// The same of rows of `columns` elements; `out` becomes this rank's share of the columns.
    fn reduce_scatter_last_dim(
        &self,
        op: ReduceOp,
        columns: usize,
        out: Elements,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let rows = crate::collectives::rows_of(self.group(), NAME, self.len(), columns)?;
        let block = self.block(NAME, columns)?;
        self.check_out(NAME, rows * block, out.len)?;
        let first = self.group().rank() * block;
        let own = Tile { first, rows, columns: block, pitch: columns };
        self.pull(NAME, op, self.may_multimem(op), own, out, true, stream)
    }

    /// Into `out` on rank `root`.
    fn reduce(
        &self,
        op: ReduceOp,
        root: usize,
        out: Elements,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "reduce";
        let by_switch = self.by_switch(NAME, op, algorithm, "Auto or Multimem")?;
        self.group().check_rank(NAME, root)?;
        let (len, is_root) = (self.len(), self.group().rank() == root);
        if is_root {
            self.check_roots_out(NAME, len, out.len)?;
        }
        self.pull(NAME, op, by_switch, Tile::flat(0, len), out, is_root, stream)
    }

    /// Sends our elements with flags, and reduces what all have sent into `to`, by `kernel`.
    fn flagged(
        &self,
        name: &'static str,
        kernel: &'static str,
        op: ReduceOp,
        to: Elements,
        stream: &Stream,
    ) -> Result<()> {
        self.check_operator(name, op)?;
        let call = self.digest(name, &[op as usize, Algorithm::Staged as usize]);
        let (bytes, ranks) = (to.len * self.size(), self.group().size());
        if bytes > MOST_FLAGGED {
            let expected = format!("at most {MOST_FLAGGED} bytes with flags");
            return Err(self.group().usage(name, expected, bytes.to_string()));
        }
        let (length, op) = (to.len as u64, op as u32);
        let (from, to) = (self.own().address, to.address);
        self.enqueue(name, call, stream, |context| {
            let group = context.group;
            let shape = flagged(bytes, ranks);
            let kernel = self.gpu.kernel(self.reductions(), kernel, shape.1)?;
            let blocks = shape.0.min(self.together(kernel));
            let launched = Launched::new(kernel, blocks, &group, [from, to, length, op.into()]);
            let launch = &mut |target: Target<'_>| {
                let list = parameters![group, from, to, length, op];
                // SAFETY: the kernel's parameters in order; our part has `length` elements, or as many for each rank.
                unsafe { self.launch(kernel, blocks, target, list) }
            };
            let replays = context.replays.filter(|_| bytes <= REPLAYED);
            // SAFETY: likewise; what the group's parameter has else is the same in all its calls.
            unsafe { Replays::launch(replays, launched, context.target, launch) }
        })
    }

    /// Reduces `tile` of all parts into `out`, which only an `active` rank needs.
    #[allow(clippy::too_many_arguments)] // what such a reduction has
    fn pull(
        &self,
        name: &'static str,
        op: ReduceOp,
        by_switch: bool,
        tile: Tile,
        out: Elements,
        active: bool,
        stream: &Stream,
    ) -> Result<()> {
        let kernel = if by_switch { "multimem_reduce_pull" } else { "reduce_pull" };
        let (file, all) = match by_switch {
            true => self.check_multimem(name, op)?,
            false => (self.reductions(), 0),
        };
        self.check_operator(name, op)?;
        if !by_switch && !out.address.is_multiple_of(self.size() as u64) {
            let expected = format!("an output at a multiple of {} bytes", self.size());
            return Err(self
                .refused(name, self.group().usage(name, expected, format!("{:#x}", out.address))));
        }
        let Tile { first, rows, columns, pitch } = tile;
        let agreed = [op as usize, usize::from(by_switch), rows, columns, pitch];
        let call = self.digest(name, &agreed);
        let bytes = rows * columns * self.size();
        let [first, rows, columns, pitch] = [first, rows, columns, pitch].map(|n| n as u64);
        let (to, active, op) = (out.address, u32::from(active), op as u32);
        self.enqueue(name, call, stream, |context| {
            let (group, parts) = (&context.group, &self.parts);
            let list = match by_switch {
                true => parameters![*group, *parts, all, to, first, rows, columns, pitch, active],
                false => parameters![*group, *parts, to, first, rows, columns, pitch, active, op],
            };
            // SAFETY: the kernel's parameters in order; the rows lie within all parts, and `out` has as many elements.
            unsafe { self.run((file, kernel), bytes, context.target, list) }
        })
    }

    /// `out` becomes the elements of all ranks, in rank order.
    fn all_gather(&self, out: Elements, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_gather";
        self.check_out(NAME, self.len() * self.group().size(), out.len)?;
        self.moved(NAME, out, self.len(), None, stream)
    }

    /// In place: the elements become those of rank `root`.
    fn broadcast(&self, root: usize, stream: &Stream) -> Result<()> {
        const NAME: &str = "broadcast";
        self.group().check_rank(NAME, root)?;
        self.moved(NAME, self.own(), self.len(), Some(root), stream)
    }

    /// `out` becomes the blocks that the ranks have for this one, in rank order.
    fn all_to_all(&self, out: Elements, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_to_all";
        let block = self.block(NAME, self.len())?;
        self.check_out(NAME, self.len(), out.len)?;
        self.moved(NAME, out, block, None, stream)
    }

    /// On rank `root`, `out` becomes the elements of all ranks, in rank order.
    fn gather(&self, root: usize, out: Elements, stream: &Stream) -> Result<()> {
        const NAME: &str = "gather";
        self.group().check_rank(NAME, root)?;
        if self.group().rank() == root {
            self.check_roots_out(NAME, self.len() * self.group().size(), out.len)?;
        }
        self.moved(NAME, out, self.len(), Some(root), stream)
    }

    /// `out` becomes the block that rank `root` has for this rank.
    fn scatter(&self, root: usize, out: Elements, stream: &Stream) -> Result<()> {
        const NAME: &str = "scatter";
        self.group().check_rank(NAME, root)?;
        let block = self.block(NAME, self.len())?;
        self.check_out(NAME, block, out.len)?;
        self.moved(NAME, out, block, Some(root), stream)
    }

    /// Synchronises all ranks in `stream`.
    fn barrier(&self, stream: &Stream) -> Result<()> {
        const NAME: &str = "barrier";
        let call = self.digest(NAME, &[]);
        self.enqueue(NAME, call, stream, |context| {
            let (kernel, group) = (self.barrier_kernel()?, context.group);
            let launched = Launched::new(kernel, 1, &group, [0; 4]);
            let launch = &mut |target: Target<'_>| self.launch_barrier(kernel, group, target);
            // SAFETY: the kernel gets the group's parameter alone.
            unsafe { Replays::launch(context.replays, launched, context.target, launch) }
        })
    }

    /// One block of each rank synchronises with the others.
    pub(crate) fn barrier_in(&self, context: &LaunchContext<'_>) -> Result<()> {
        self.launch_barrier(self.barrier_kernel()?, context.group, context.target)
    }

    fn launch_barrier(
        &self,
        kernel: BuiltIn,
        group: GroupParameter,
        target: Target<'_>,
    ) -> Result<()> {
        // SAFETY: the kernel's parameter; it touches the pads alone.
        unsafe { self.launch(kernel, 1, target, parameters![group]) }
    }

    fn barrier_kernel(&self) -> Result<BuiltIn> {
        let ranks = self.group().size() as u32;
        let threads = ranks.next_multiple_of(32) + 32; // one warp more than tells the peers
        self.gpu.kernel("move", "barrier", threads)
    }

    /// Runs the kernel `name` that moves blocks of `len` elements to `out`.
    fn moved(
        &self,
        name: &'static str,
        out: Elements,
        len: usize,
        root: Option<usize>,
        stream: &Stream,
    ) -> Result<()> {
        let call = self.digest(name, &[len, root.unwrap_or(usize::MAX)]);
        let bytes = (len * self.size()) as u64;
        self.enqueue(name, call, stream, |context| {
            let (work, number) = (bytes as usize, root.unwrap_or(0) as u32);
            let list = parameters![context.group, self.parts, out.address, 0_u64, bytes, number];
            // The kernels without a root have no parameter for it.
            let list = if root.is_some() { &list[..] } else { &list[..5] };
            // SAFETY: the kernel's parameters in order; blocks of that many bytes lie within all parts and `out`.
            unsafe { self.run(("move", name), work, context.target, list) }
        })
    }

    pub(crate) fn enqueue(
        &self,
        name: &'static str,
        call: u32,
        stream: &Stream,
        launch: impl FnOnce(LaunchContext<'_>) -> Result<()>,
    ) -> Result<()> {
        self.comm.enqueue(self.group(), name, call, stream, launch)
    }

    /// Launches the kernel `name` of a file, with as many blocks as work on so many bytes of this rank wants.
    ///
    /// # Safety
    /// See [`Gpu::launch`](crate::cuda::Gpu).
    pub(crate) unsafe fn run(
        &self,
        (file, name): (&'static str, &'static str),
        bytes: usize,
        target: Target<'_>,
        parameters: &[Parameter<'_>],
    ) -> Result<()> {
        let (kernel, blocks) = self.shaped(file, name, bytes)?;
        // SAFETY: as the caller promises.
        unsafe { self.launch(kernel, blocks, target, parameters) }
    }

    /// # Safety
    /// See [`Gpu::launch`](crate::cuda::Gpu).
    pub(crate) unsafe fn launch(
        &self,
        kernel: BuiltIn,
        blocks: u32,
        target: Target<'_>,
        parameters: &[Parameter<'_>],
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.gpu.launch(kernel, blocks, self.comm.ranks_per_device, target, parameters) }
    }

    /// The kernel `name` of a file for work on so many bytes of this rank, and its blocks: enough to keep the device busy, and
    /// no more than fit on it together with those of the ranks that share it.
    pub(crate) fn shaped(
        &self,
        file: &'static str,
        name: &'static str,
        bytes: usize,
    ) -> Result<(BuiltIn, u32)> {
        let vectors = u32::try_from(bytes.div_ceil(VECTOR)).unwrap_or(u32::MAX).max(1);
        // Little work goes to small blocks, so that many multiprocessors share in it; but each block has flags of its own.
        let ranks = self.group().size() as u32;
        let threads = if vectors.div_ceil(THREADS.0) * ranks <= 64 { THREADS.0 } else { THREADS.1 };
        let kernel = self.gpu.kernel(file, name, threads)?;
        let (wanted, most) = (vectors.div_ceil(threads), self.together(kernel));
        // As long as a thread has few vectors, it is better to leave room for the next kernel, which is then there early.
        let half = (most / 2).max(1);
        Ok((kernel, wanted.min(if wanted <= 4 * half { half } else { most })))
    }

    /// Up to how many elements an all-reduce sends with their flags; beyond, each rank reduces its share. Every rank sends to
    /// every other, so it grows with the square of their number. Measured on an H200 that the ranks share, as is what follows.
    fn is_small(&self, len: usize) -> bool {
        let (bytes, ranks) = (len * self.size(), self.group().size());
        self.size() <= FITS_FLAG && bytes <= (1 << 18).min((2 << 20) / (ranks * ranks).max(1))
    }

    /// The same for the block of a reduce-scatter.
    fn is_small_block(&self, len: usize) -> bool {
        len * self.size() <= (1 << 17) && self.is_small(len)
    }

    /// The file of its type's reductions.
    fn reductions(&self) -> &'static str {
        self.dtype().kernels().unwrap_or_default()
    }

    /// Whether parts of so many bytes are more than the cache of a device holds.
    fn overflows_cache(&self, bytes: usize) -> bool {
        bytes.saturating_mul(self.comm.neighbours) > self.comm.cache
    }

    /// The most blocks of each rank, so that those of all ranks that share the device fit on it: they wait for each other.
    fn together(&self, kernel: BuiltIn) -> u32 {
        self.comm.blocks_together(kernel.fit)
    }
}

/// Blocks and threads of the kernel that sends data with flags: 8 bytes a thread, until there are as many as may be.
fn flagged(bytes: usize, ranks: usize) -> (u32, u32) {
    let words = u32::try_from(bytes.div_ceil(8)).unwrap_or(u32::MAX);
    let least = (ranks as u32).next_multiple_of(32) + 32; // one warp more than tells the peers
    let threads = words.next_multiple_of(32).clamp(least, FLAGGED.1.max(least));
    (words.div_ceil(threads).clamp(1, FLAGGED.0), threads)
}
