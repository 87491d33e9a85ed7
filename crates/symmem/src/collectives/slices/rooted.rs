//! Collectives on ordinary memory with one rank at their root: reduce, gather, scatter.
#![allow(unsafe_code)] // S2, S3

use super::super::host::copy::Stores;
use super::super::host::reduce::Reduce;
use super::super::staged::{Input, Read, exchange};
use super::super::{check_len, copy_bytes, loop_for};
use super::cutting::{Sources, each_piece};
use super::{Slice, begin, copy_pieces};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Group, Op, Running};

const REDUCE: &str = "reduce";
const GATHER: &str = "gather";
const SCATTER: &str = "scatter";

impl Group {
    /// On rank `root`, `out` becomes the reduction of all ranks' `input`; on other ranks it is ignored. Collective.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut sum = [0];
    /// world.reduce(&[world.rank() as u32], symmem::ReduceOp::Sum, 0, &mut sum)?;
    /// assert_eq!(sum, [if world.rank() == 0 { 3 } else { 0 }]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn reduce<T: Number>(
        &self,
        input: &[T],
        op: ReduceOp,
        root: usize,
        out: &mut [T],
    ) -> Result<()> {
        let reduction = loop_for::<T>(self, REDUCE, op)?;
        if self.is_root(REDUCE, root)? {
            check_len(self, REDUCE, "an output", input.len(), out.len())?;
        }
        let input = Slice::new(input.as_ptr().cast_mut().cast(), input.len(), T::DTYPE);
        reduce(self, input, (op, reduction), root, out.as_mut_ptr().cast())
    }

    /// On rank `root`, `out` becomes the `input` of all ranks, in rank order; on other ranks it is ignored.
    /// Collective.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut all = vec![0; if world.rank() == 1 { 3 } else { 0 }];
    /// world.gather(&[world.rank()], 1, &mut all)?;
    /// assert!(world.rank() != 1 || all == [0, 1, 2]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn gather<T: Element>(&self, input: &[T], root: usize, out: &mut [T]) -> Result<()> {
        if self.is_root(GATHER, root)? {
            let expected = input.len().saturating_mul(self.size());
            check_len(self, GATHER, "an output", expected, out.len())?;
        }
        let input = Slice::new(input.as_ptr().cast_mut().cast(), input.len(), T::DTYPE);
        gather(self, input, root, out.as_mut_ptr().cast())
    }

    /// On rank `root`, `input` is one block for each rank; on others it is not looked at. `out` becomes the block for this
    /// rank. Collective.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let blocks = if world.rank() == 0 { vec![10, 11, 12] } else { vec![] };
    /// let mut own = [0];
    /// world.scatter(&blocks, 0, &mut own)?;
    /// assert_eq!(own, [10 + world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn scatter<T: Element>(&self, input: &[T], root: usize, out: &mut [T]) -> Result<()> {
        if self.is_root(SCATTER, root)? {
            let expected = out.len().saturating_mul(self.size());
            check_len(self, SCATTER, "an input", expected, input.len())?;
        }
        let block = Slice::new(input.as_ptr().cast_mut().cast(), out.len(), T::DTYPE);
        scatter(self, block, root, out.as_mut_ptr().cast())
    }

    fn is_root(&self, name: &'static str, root: usize) -> Result<bool> {
        self.check_rank(name, root)?;
        Ok(self.rank() == root)
    }
}

/// Into `out`, which is as long as the input on the root.
fn reduce(
    group: &Group,
    input: Slice,
    (op, reduce): (ReduceOp, Reduce),
    root: usize,
    out: *mut u8,
) -> Result<()> {
    let operation = input.call(const { Op::of(REDUCE) });
    let call = Call { operator: Some(op), root: Some(root), ..operation };
    reduce_at(group, &mut begin(group, &call)?, (input, root), reduce, out)
}

/// On the root, `out` gets the reduction of all ranks' `input`.
pub(in super::super) fn reduce_at(
    group: &Group,
    running: &mut Running<'_, '_>,
    (input, root): (Slice, usize),
    reduce: Reduce,
    out: *mut u8,
) -> Result<()> {
    let is_root = group.rank() == root;
    each_piece(group, running, input, Sources::Some(!is_root), |piece, from| {
        if is_root {
            let to = out.wrapping_add(piece.start * input.size);
            // SAFETY: every other rank has staged a piece, ours is in the input; `out` has room for it.
            unsafe { reduce(from, &[to], piece.len(), Stores::Cached) };
        }
    })
}

/// Into `out`, which has room for all inputs on the root.
fn gather(group: &Group, input: Slice, root: usize, out: *mut u8) -> Result<()> {
    let call = Call { root: Some(root), ..input.call(const { Op::of(GATHER) }) };
    gather_at(group, &mut begin(group, &call)?, (input, root), out)
}

/// On the root, `out` gets all ranks' `input`.
pub(in super::super) fn gather_at(
    group: &Group,
    running: &mut Running<'_, '_>,
    (input, root): (Slice, usize),
    out: *mut u8,
) -> Result<()> {
    let is_root = group.rank() == root;
    each_piece(group, running, input, Sources::Some(!is_root), |piece, from| {
        if is_root {
            // SAFETY: every other rank has staged a piece, ours is in the input; `out` has room for a block of each.
            unsafe { copy_pieces(group, from, input, &piece, out) };
        }
    })
}

/// Of the blocks that begin at `block` on the root, into `out`, which has room for one.
fn scatter(group: &Group, block: Slice, root: usize, out: *mut u8) -> Result<()> {
    let call = Call { root: Some(root), ..block.call(const { Op::of(SCATTER) }) };
    scatter_from(group, &mut begin(group, &call)?, (block, root), out)
}

/// `out` gets the root's block for this rank, of which `block` is the first.
pub(in super::super) fn scatter_from(
    group: &Group,
    running: &mut Running<'_, '_>,
    (block, root): (Slice, usize),
    out: *mut u8,
) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    for piece in block.pieces(group, ranks) {
        let bytes = piece.len() * block.size;
        let staged = Input {
            from: block.at(piece.start).cast_const(),
            block: block.len * block.size,
            blocks: ranks,
            piece: bytes,
            without: Some(root),
            most: ranks * bytes,
            read: Read::Block,
            is_long: false,
        };
        let staged = if rank == root { staged } else { Input::none(ranks * bytes) };
        // SAFETY: a piece of each block.
        let staging = unsafe { exchange(running, &staged) }?;
        let from = match rank == root {
            true => block.at(rank * block.len + piece.start).cast_const(),
            false => staging.of(root, staged.most).wrapping_add(rank * bytes),
        };
        // SAFETY: the root has staged a piece for each other rank; `out` has room for a block.
        unsafe { copy_bytes(from, out.wrapping_add(piece.start * block.size), bytes) };
    }
    Ok(())
}
