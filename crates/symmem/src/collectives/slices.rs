//! Collectives on ordinary memory: piece by piece through the ranks' staging buffers, with the same bits as in symmetric memory.
//!
//! A rank stages a piece, and peers read it from there. Each rank has two staging buffers in turn, and a flag comes with each
//! piece, so one exchange per piece is all: while a slow rank still reads one, the others stage the next.
#![allow(unsafe_code)] // S2 (what is laid out stays until the next exchange), S3 (pieces of slices checked here)

use std::ops::Range;

use super::host::copy::{Stores, copy};
use super::{LINE, block_len, by_rank, check_len, copy_elements, loop_for, plan, record, share};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Group, Memory, Op, Running, STAGE, Staging};

impl Group {
    /// Element i of `data` becomes the reduction of element i of all ranks. Collective; after an error `data` may be
    /// reduced in part.
    pub fn all_reduce<T: Number>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        const NAME: &str = "all_reduce";
        let looped = loop_for::<T>(self, NAME, op)?;
        let len = data.len();
        let call = Call { operator: Some(op), ..on_slices::<T>(const { Op::of(NAME) }, len) };
        let mut running = self.begin_slices::<T>(&call)?;
        for piece in pieces::<T>(len, 1) {
            let data = data.get_mut(piece.clone()).unwrap_or_default();
            let (data, len) = (data.as_mut_ptr(), data.len());
            let laid = Laid::one(data, len);
            // SAFETY: a piece of `data`, which fits a staging buffer.
            let lay = |to: *mut u8| unsafe { laid.lay(to) };
            if laid.bytes() <= Staging::TINY
                || plan::at_once(self.rates()?, laid.bytes(), self.size())
            {
                self.staged(&mut running, laid.bytes(), lay, None, |from| {
                    // SAFETY: every other rank has laid out a piece of this length, and here is ours.
                    let reduce =
                        |from: &[*const T]| unsafe { looped(from, &[data], len, Stores::Cached) };
                    self.beside(from, 0, data, reduce);
                })?;
                continue;
            }
            let own = share::<T>(len, self.rank(), self.size());
            self.staged(&mut running, laid.bytes(), lay, None, |from| {
                let to = data.wrapping_add(own.start);
                // SAFETY: our share of what every other rank has laid out, and of ours.
                let reduce =
                    |from: &[*const T]| unsafe { looped(from, &[to], own.len(), Stores::Cached) };
                self.beside(from, own.start, to, reduce);
            })?;
            self.gather_shares(&mut running, data, len)?;
        }
        Ok(())
    }

    fn begin_slices<'c, T: Element>(&self, call: &'c Call) -> Result<Running<'_, 'c>> {
        self.reach_out();
        record::<T>(self, call.op.name(), call.len, "slices");
        self.begin_call(call, self.deadline())
    }

    /// Every rank has its share of the `len` elements at `data`, and gets those of the others.
    fn gather_shares<T: Element>(
        &self,
        running: &mut Running<'_, '_>,
        data: *mut T,
        len: usize,
    ) -> Result<()> {
        let shares = |rank| share::<T>(len, rank, self.size());
        let laid =
            Laid::one(data.wrapping_add(shares(self.rank()).start), shares(self.rank()).len());
        // SAFETY: our share of the elements, which fits a staging buffer.
        let lay = |to: *mut u8| unsafe { laid.lay(to) };
        let most = shares(0).len() * size_of::<T>();
        self.staged(running, most, lay, None, |from: &[*const T]| {
            for (rank, from) in from.iter().enumerate().filter(|(rank, _)| *rank != self.rank()) {
                let to = data.wrapping_add(shares(rank).start);
                // SAFETY: the rank has laid out its share, and here is the place for it.
                unsafe { copy_elements(*from, to, shares(rank).len()) };
            }
        })
    }

    /// `out` becomes all ranks' `input`s, one rank's after the other's. Collective.
    pub fn all_gather<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        const NAME: &str = "all_gather";
        let len = input.len();
        check_len(self, NAME, "an output", len.saturating_mul(self.size()), out.len())?;
        let call = on_slices::<T>(const { Op::of(NAME) }, len);
        let mut running = self.begin_slices::<T>(&call)?;
        for piece in pieces::<T>(len, 1) {
            let laid = Laid::one(input.as_ptr().wrapping_add(piece.start), piece.len());
            // SAFETY: a piece of `input`, which fits a staging buffer.
            let lay = |to: *mut u8| unsafe { laid.lay(to) };
            self.staged(&mut running, laid.bytes(), lay, None, |from| {
                self.take_up(from, 0, laid.from, out, len, &piece);
            })?;
        }
        Ok(())
    }

    /// `input` is one block for each rank; `out` becomes the reduction of all ranks' blocks for this one. Collective.
    pub fn reduce_scatter<T: Number>(
        &self,
        input: &[T],
        op: ReduceOp,
        out: &mut [T],
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let looped = loop_for::<T>(self, NAME, op)?;
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", block, out.len())?;
        let call = Call { operator: Some(op), ..on_slices::<T>(const { Op::of(NAME) }, block) };
        let mut running = self.begin_slices::<T>(&call)?;
        for piece in pieces::<T>(block, self.size()) {
            let laid = Laid::blocks(input, block, self, &piece);
            // SAFETY: a piece of each block of `input`, which all together fit a staging buffer.
            let lay = |to: *mut u8| unsafe { laid.lay(to) };
            let out = out.get_mut(piece).unwrap_or_default();
            self.staged(&mut running, laid.bytes(), lay, None, |from| {
                let own = laid.from.wrapping_add(self.rank() * block);
                let (out, len) = (out.as_mut_ptr(), out.len());
                self.beside(from, self.rank() * len, own, |from| {
                    // SAFETY: every other rank has laid out a piece of this length for us, ours is in `input`; `out` is one.
                    unsafe { looped(from, &[out], len, Stores::Cached) };
                });
            })?;
        }
        Ok(())
    }

    /// `data` becomes that of rank `root`. Collective.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        const NAME: &str = "broadcast";
        self.check_rank(NAME, root)?;
        let len = data.len();
        let call = Call { root: Some(root), ..on_slices::<T>(const { Op::of(NAME) }, len) };
        let mut running = self.begin_slices::<T>(&call)?;
        for piece in pieces::<T>(len, 1) {
            let data = data.get_mut(piece).unwrap_or_default();
            let (data, len) = (data.as_mut_ptr(), data.len());
            let laid = Laid::one(data, len);
            let lay = |to: *mut u8| {
                if self.rank() == root {
                    // SAFETY: a piece of `data`, which fits a staging buffer.
                    unsafe { laid.lay(to) };
                }
            };
            self.staged(&mut running, laid.bytes(), lay, None, |from: &[*const T]| {
                if let Some(from) = from.get(root).filter(|_| self.rank() != root) {
                    // SAFETY: the root has laid out a piece of this length, and here is the place for it.
                    unsafe { copy_elements(*from, data, len) };
                }
            })?;
        }
        Ok(())
    }

    /// `input` is one block for each rank; `out` becomes the blocks that all ranks have for this one, by rank. Collective.
    pub fn all_to_all<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        const NAME: &str = "all_to_all";
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", input.len(), out.len())?;
        let call = on_slices::<T>(const { Op::of(NAME) }, block);
        let mut running = self.begin_slices::<T>(&call)?;
        for piece in pieces::<T>(block, self.size()) {
            let laid = Laid::blocks(input, block, self, &piece);
            // SAFETY: a piece of each block of `input`, which all together fit a staging buffer.
            let lay = |to: *mut u8| unsafe { laid.lay(to) };
            self.staged(&mut running, laid.bytes(), lay, None, |from| {
                let own = laid.from.wrapping_add(self.rank() * block);
                self.take_up(from, self.rank() * piece.len(), own, out, block, &piece);
            })?;
        }
        Ok(())
    }

    /// Calls `f` with where each rank has laid out what we want, `at` elements from its start, and with our own at `own`:
    /// what we laid out ourselves has gone to memory, and what we laid it out from is in our cache.
    fn beside<T, R>(
        &self,
        from: &[*const T],
        at: usize,
        own: *const T,
        f: impl FnOnce(&[*const T]) -> R,
    ) -> R {
        let place = |rank: usize| match from.get(rank) {
            Some(place) if rank != self.rank() => place.wrapping_add(at),
            _ => own,
        };
        by_rank(from.len(), place, f)
    }

    /// Copies what each rank has laid out, `at` elements from its start, to `piece` of that rank's block of `out`.
    fn take_up<T: Element>(
        &self,
        from: &[*const T],
        at: usize,
        own: *const T,
        out: &mut [T],
        block: usize,
        piece: &Range<usize>,
    ) {
        let stores = plan::stores(size_of_val(out));
        // Our own first: it is in our cache. Then each rank begins with another one.
        for rank in (0..self.size()).map(|step| (self.rank() + step) % self.size()) {
            let to = rank * block + piece.start;
            let to = out.get_mut(to..to + piece.len()).unwrap_or_default();
            let from = if rank == self.rank() {
                Some(own)
            } else {
                from.get(rank).map(|p| p.wrapping_add(at))
            };
            if let Some(from) = from {
                // SAFETY: the rank has laid out a piece of this length there, and `to` is one.
                unsafe { copy(from.cast(), to.as_mut_ptr().cast(), size_of_val(to), stores) };
            }
        }
    }
}

/// What a rank lays out: the same piece of every block of a slice, each at its place. By address, because the result
/// may go to the same place, once all have laid out theirs.
struct Laid<T> {
    from: *const T,
    /// Elements from one block to the next.
    block: usize,
    blocks: usize,
    /// Elements of a piece.
    len: usize,
    /// The block that nobody takes up: our own.
    without: Option<usize>,
}

impl<T> Laid<T> {
    fn one(from: *const T, len: usize) -> Self {
        Self { from, block: len, blocks: 1, len, without: None }
    }

    /// A piece of one block for each rank of `group`.
    fn blocks(of: &[T], block: usize, group: &Group, piece: &Range<usize>) -> Self {
        let from = of.as_ptr().wrapping_add(piece.start);
        let (blocks, without) = (group.size(), Some(group.rank()));
        Self { from, block, blocks, len: piece.len(), without }
    }

    fn bytes(&self) -> usize {
        self.blocks * self.len * size_of::<T>()
    }

    /// # Safety
    /// The pieces may be read, and `to` written for that many bytes.
    unsafe fn lay(&self, to: *mut u8) {
        let bytes = self.len * size_of::<T>();
        for block in (0..self.blocks).filter(|block| Some(*block) != self.without) {
            let from = self.from.wrapping_add(block * self.block).cast();
            // SAFETY: as the caller promises.
            unsafe { copy(from, to.wrapping_add(block * bytes), bytes, plan::lay(self.bytes())) };
        }
    }
}

/// Cuts a block of `len` elements into pieces, of which a staging buffer holds one of each of `blocks`. One empty piece if there are
/// no elements, so that ranks still meet.
fn pieces<T>(len: usize, blocks: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (STAGE / blocks / size_of::<T>()).max(1);
    let count = len.div_ceil(most).max(1);
    // All of about the same length: what is left over at the end would not be worth its exchange.
    let each =
        len.div_ceil(count).max(1).next_multiple_of((LINE / size_of::<T>()).max(1)).min(most);
    (0..len.div_ceil(each).max(1)).map(move |i| i * each..((i + 1) * each).min(len))
}

/// A call on slices of `len` elements, or blocks of as many.
fn on_slices<T: Element>(op: Op, len: usize) -> Call {
    Call { op, dtype: Some(T::DTYPE), memory: Memory::Slices, len, ..Call::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once_and_fit_a_staging_buffer() {
        for (len, blocks) in
            [(0, 1), (1, 3), (100, 7), (STAGE / 4, 1), (STAGE / 4 + 1, 1), (1 << 20, 72)]
        {
            let cut: Vec<_> = pieces::<f32>(len, blocks).collect();
            assert!(cut.iter().all(|p| p.len() * blocks * 4 <= STAGE));
            assert!(cut.windows(2).all(|p| p[0].end == p[1].start && !p[1].is_empty()));
            assert_eq!((cut[0].start, cut[cut.len() - 1].end), (0, len));
        }
        assert_eq!(pieces::<u8>(STAGE + 1, 1).map(|p| p.len()).max(), Some(STAGE / 2 + 64));
    }
}
