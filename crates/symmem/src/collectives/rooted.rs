//! Collectives with one rank at their root: reduce, gather, scatter.
#![allow(unsafe_code)] // S2, S3

use super::host::reduce::Reduce;
use super::slices::{self, Slice};
use super::{block_len, check_len, copy_bytes, loop_for, plan};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const REDUCE: &str = "reduce";
const GATHER: &str = "gather";
const SCATTER: &str = "scatter";

impl<T: Number> Symmetric<T> {
    /// On rank `root`, `out` becomes the reduction of all ranks' elements; on other ranks it is ignored. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<i32>(2)?.rendezvous(&world)?;
    /// x.local_mut().fill(3);
    /// let mut sum = [0; 2];
    /// x.reduce(symmem::ReduceOp::Sum, 0, &mut sum)?;
    /// assert_eq!(sum, if world.rank() == 0 { [6; 2] } else { [0; 2] });
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn reduce(&mut self, op: ReduceOp, root: usize, out: &mut [T]) -> Result<()> {
        let reduction = loop_for::<T>(self.group(), REDUCE, op)?;
        if self.is_root(REDUCE, root)? {
            check_len(self.group(), REDUCE, "an output", self.len(), out.len())?;
        }
        reduce(self.memory(), (op, reduction), root, out.as_mut_ptr().cast())
    }
}

impl<T: Element> Symmetric<T> {
    /// On rank `root`, `out` becomes the elements of all ranks, in rank order; on other ranks it is ignored. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(1)?.rendezvous(&world)?;
    /// x.local_mut()[0] = world.rank();
    /// let mut all = [7; 2];
    /// x.gather(1, &mut all)?;
    /// assert_eq!(all, if world.rank() == 1 { [0, 1] } else { [7, 7] });
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn gather(&mut self, root: usize, out: &mut [T]) -> Result<()> {
        if self.is_root(GATHER, root)? {
            let expected = self.len() * self.group().size();
            check_len(self.group(), GATHER, "an output", expected, out.len())?;
        }
        gather(self.memory(), root, out.as_mut_ptr().cast())
    }

    /// The elements of rank `root` are one block for each rank; `out` becomes the block for this rank. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(2)?.rendezvous(&world)?;
    /// x.local_mut().copy_from_slice(&[4, 5]);
    /// let mut own = [0];
    /// x.scatter(0, &mut own)?;
    /// assert_eq!(own, [4 + world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn scatter(&mut self, root: usize, out: &mut [T]) -> Result<()> {
        let block = block_len(self.group(), SCATTER, self.len())?;
        self.is_root(SCATTER, root)?;
        check_len(self.group(), SCATTER, "an output", block, out.len())?;
        scatter(self.memory(), root, block, out.as_mut_ptr().cast())
    }

    fn is_root(&self, name: &'static str, root: usize) -> Result<bool> {
        self.group().check_rank(name, root)?;
        Ok(self.group().rank() == root)
    }
}

/// Into `out`, which has room for a part on the root.
fn reduce(
    memory: &Memory,
    (op, reduce): (ReduceOp, Reduce),
    root: usize,
    out: *mut u8,
) -> Result<()> {
    let is_root = memory.group().rank() == root;
    let stores = plan::results(memory.bytes(), 1);
    let call = memory.call(const { Op::of(REDUCE) }, Way::Direct);
    let call = Call { operator: Some(op), root: Some(root), ..call };
    if let Some(mut running) = memory.begin_across(&call)? {
        let input = (Slice::of_part(memory, memory.len()), root);
        return slices::reduce_at(memory.group(), &mut running, input, reduce, out);
    }
    memory.read_parts(call, true, |parts| {
        if is_root {
            // SAFETY: nobody writes any part; `out` has room for one and is ours alone.
            unsafe { reduce(parts, &[out], memory.len(), stores) };
        }
    })
}

/// Into `out`, which has room for all parts on the root.
fn gather(memory: &Memory, root: usize, out: *mut u8) -> Result<()> {
    let (bytes, is_root) = (memory.bytes(), memory.group().rank() == root);
    let call = Call { root: Some(root), ..memory.call(const { Op::of(GATHER) }, Way::Direct) };
    if let Some(mut running) = memory.begin_across(&call)? {
        let input = (Slice::of_part(memory, memory.len()), root);
        return slices::gather_at(memory.group(), &mut running, input, out);
    }
    memory.read_parts(call, true, |parts| {
        for rank in memory.ranks_from_own().filter(|_| is_root) {
            // SAFETY: nobody writes any part; `out` has room for each.
            unsafe { copy_bytes(parts[rank], out.wrapping_add(rank * bytes), bytes) };
        }
    })
}

/// Into `out`, which has room for a block of `block` elements.
fn scatter(memory: &Memory, root: usize, block: usize, out: *mut u8) -> Result<()> {
    let (rank, bytes) = (memory.group().rank(), block * memory.size());
    let call = Call { root: Some(root), ..memory.call(const { Op::of(SCATTER) }, Way::Direct) };
    if let Some(mut running) = memory.begin_across(&call)? {
        let blocks = (Slice::of_part(memory, block), root);
        return slices::scatter_from(memory.group(), &mut running, blocks, out);
    }
    memory.read_parts(call, rank == root, |parts| {
        // SAFETY: the root's part has a block for each rank; nobody writes any part.
        unsafe { copy_bytes(parts[root].wrapping_add(rank * bytes), out, bytes) };
    })
}
