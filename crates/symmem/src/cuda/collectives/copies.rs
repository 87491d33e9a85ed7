//! Collectives by the driver's copy engines, between two barriers in the stream. The multiprocessors stay free for other work,
//! and the bits are those of the kernels.
//!
//! Copies cannot be cancelled. If a barrier fails they are still made, of whatever the peers have there.
#![allow(unsafe_code)] // S1, S3: lengths are checked here, and copies touch nothing else

use crate::cuda::Algorithm;
use crate::cuda::device::kernels::parameters;
use crate::cuda::group::layout::Pointers;
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::Stream;
use crate::cuda::symmetric::{Symmetric, View, ViewMut};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;

impl<T: Element> Symmetric<T> {
    /// As [`Symmetric::all_gather`], by [`Algorithm::Auto`] or [`Algorithm::CopyEngine`].
    pub fn all_gather_with(
        &mut self,
        out: ViewMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.all_gather_with(out.elements(), algorithm, stream)
    }

    /// This memory becomes the `from` of all ranks, in rank order: each rank stores its own to all ranks. Collective, in
    /// `stream`.
    ///
    /// [`Algorithm::Multimem`] and [`Algorithm::CopyEngine`]; `Auto` is the first if there is multicast. The copy
    /// engine then stores once, otherwise once for each rank.
    pub fn all_gather_from(
        &mut self,
        from: View<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.all_gather_from(from.elements(), algorithm, stream)
    }
}

impl Memory {
    /// Copies all ranks' blocks for this one to `gathered`, and reduces them from there in rank order.
    pub(super) fn fetch_and_reduce(
        &self,
        op: ReduceOp,
        out: Elements,
        gathered: u64,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let call = self.digest(NAME, &[op as usize, Algorithm::CopyEngine as usize]);
        let bytes = out.len * self.size();
        let own = (self.group().rank() * bytes) as u64;
        let blocks: Vec<usize> =
            (0..self.group().size()).map(|peer| gathered as usize + peer * bytes).collect();
        self.enqueue(NAME, call, stream, |context| {
            self.barrier_in(&context)?;
            for (peer, from) in self.parts_in_turn() {
                let to = gathered + (peer * bytes) as u64;
                // SAFETY: our block of the peer's part; `gathered` has room for one of each rank.
                unsafe { self.copy(to, from + own, bytes, stream) }?;
            }
            // They all lie with this rank. All ranks synchronise in the kernel: their copies are made.
            let (group, parts, to) = (&context.group, Pointers::new(&blocks), out.address);
            let (first, rows, columns, active, op) =
                (0_u64, 1_u64, out.len as u64, 1_u32, op as u32);
            let list = parameters![*group, parts, to, first, rows, columns, columns, active, op];
            // SAFETY: the kernel's parameters in order; each part and `out` have as many elements.
            unsafe { self.run((self.reductions(), "reduce_pull"), bytes, context.target, list) }
        })
    }

    fn all_gather_with(&self, out: Elements, algorithm: Algorithm, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_gather";
        match algorithm {
            Algorithm::Auto => return self.all_gather(out, stream),
            Algorithm::CopyEngine => {}
            other => return Err(self.unsupported(NAME, "Auto or CopyEngine", other)),
        }
        self.check_out(NAME, self.len() * self.group().size(), out.len)?;
        let call = self.digest(NAME, &[self.len(), algorithm as usize]);
        let bytes = self.bytes();
        self.enqueue(NAME, call, stream, |context| {
            self.barrier_in(&context)?;
            for (peer, from) in self.parts_in_turn() {
                let to = out.address + (peer * bytes) as u64;
                // SAFETY: all of a peer's part; `out` has room for one of each rank.
                unsafe { self.copy(to, from, bytes, stream) }?;
            }
            self.barrier_in(&context)
        })
    }

    fn all_gather_from(&self, from: Elements, algorithm: Algorithm, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_gather";
        let block = self.block(NAME, self.len())?;
        crate::collectives::check_len(self.group(), NAME, "an input", block, from.len)?;
        let all = self.handle.multicast_ptr().map(|all| all as u64);
        match algorithm {
            Algorithm::Multimem => self.multimem_all_gather(from, stream),
            Algorithm::Auto if all.is_some() => self.multimem_all_gather(from, stream),
            Algorithm::Auto | Algorithm::CopyEngine => self.copy_to_all(from, all, stream),
            other => Err(self.unsupported(NAME, "Auto, Multimem or CopyEngine", other)),
        }
    }

    /// Copies `from` to this rank's block of all ranks' memory: through the multicast address `all`, or one after the other.
    fn copy_to_all(&self, from: Elements, all: Option<u64>, stream: &Stream) -> Result<()> {
        const NAME: &str = "all_gather";
        let call = self.digest(NAME, &[from.len, Algorithm::CopyEngine as usize]);
        let bytes = from.len * self.size();
        let at = (self.group().rank() * bytes) as u64;
        self.enqueue(NAME, call, stream, |context| {
            self.barrier_in(&context)?;
            let each = || self.parts_in_turn().map(|(_, part)| part).collect();
            for part in all.map_or_else(each, |all| vec![all]) {
                // SAFETY: all parts hold a block of that many bytes for each rank.
                unsafe { self.copy(part + at, from.address, bytes, stream) }?;
            }
            self.barrier_in(&context)
        })
    }

    /// All ranks and their parts, each rank beginning with its own and going down, so that no two read from the same rank at once.
    fn parts_in_turn(&self) -> impl Iterator<Item = (usize, u64)> {
        let (rank, size) = (self.group().rank(), self.group().size());
        let peers = (0..size).map(move |step| (rank + size - step) % size);
        peers.filter_map(|peer| Some((peer, *self.parts.0.get(peer)?)))
    }

    /// # Safety
    /// As many bytes can be read and written there when the stream comes to it.
    pub(crate) unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        self.gpu.call(|driver| unsafe { driver.copy(to, from, bytes, stream.raw()) })
    }
}
