//! Reduce-scatter: rank r gets block r of the reduction of all ranks' elements.
#![allow(unsafe_code)] // S2, S3

use super::host::reduce::Reduce;
use super::slices::{self, Slice};
use super::{PerRank, block_len, check_len, loop_for, plan, rows_of};
use crate::dtype::{Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const NAME: &str = "reduce_scatter";

impl<T: Number> Symmetric<T> {
    /// The elements are one block for each rank; `out` becomes the reduction of all ranks' blocks for this one.
    /// Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<i32>(4)?.rendezvous(&world)?;
    /// x.local_mut().copy_from_slice(&[1, 2, 3, 4]);
    /// let mut out = [0; 2];
    /// x.reduce_scatter(symmem::ReduceOp::Sum, &mut out)?;
    /// assert_eq!(out, if world.rank() == 0 { [2, 4] } else { [6, 8] });
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn reduce_scatter(&mut self, op: ReduceOp, out: &mut [T]) -> Result<()> {
        let block = block_len(self.group(), NAME, self.len())?;
        self.reduce_rows(op, 1, block * self.group().size(), out)
    }

    /// The elements are rows of `columns`, and each row is one block for each rank; `out` becomes the reduced blocks for
    /// this rank, row by row. Collective.
    pub fn reduce_scatter_last_dim(
        &mut self,
        op: ReduceOp,
        columns: usize,
        out: &mut [T],
    ) -> Result<()> {
        let rows = rows_of(self.group(), NAME, self.len(), columns)?;
        self.reduce_rows(op, rows, columns, out)
    }

    fn reduce_rows(
        &mut self,
        op: ReduceOp,
        rows: usize,
        columns: usize,
        out: &mut [T],
    ) -> Result<()> {
        let reduce = loop_for::<T>(self.group(), NAME, op)?;
        let block = block_len(self.group(), NAME, columns)?;
        check_len(self.group(), NAME, "an output", rows * block, out.len())?;
        reduce_scatter(self.memory(), (op, reduce), (rows, columns), out.as_mut_ptr().cast())
    }
}

/// Blocks of rows of `columns`, into `out`, which has room for one block of each row.
fn reduce_scatter(
    memory: &Memory,
    (op, reduce): (ReduceOp, Reduce),
    (rows, columns): (usize, usize),
    out: *mut u8,
) -> Result<()> {
    let (rank, ranks, size) = (memory.group().rank(), memory.group().size(), memory.size());
    let block = columns / ranks;
    let stores = plan::results(block * size, 1);
    let call = Call {
        operator: Some(op),
        more: [rows, columns, 0],
        ..memory.call(const { Op::of(NAME) }, Way::Direct)
    };
    if rows == 1
        && let Some(mut running) = memory.begin_across(&call)?
    {
        let first = Slice::of_part(memory, block);
        return slices::reduce_blocks(memory.group(), &mut running, first, reduce, out);
    }
    memory.read_parts(call, true, |parts| {
        for row in 0..rows {
            let (begin, to) = ((row * columns + rank * block) * size, row * block * size);
            let mut from = PerRank::new();
            let from = from.fill(ranks, |rank| parts[rank].wrapping_add(begin));
            // SAFETY: within all parts, which nobody writes; `out` has room for a block of each row and is ours alone.
            unsafe { reduce(from, &[out.wrapping_add(to)], block, stores) };
        }
    })
}
