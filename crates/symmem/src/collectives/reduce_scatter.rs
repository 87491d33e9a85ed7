//! Reduce-scatter: rank r gets block r of the reduction of all ranks' elements.

use super::host::copy::Stores;
use super::{block_len, by_rank, check_len, loop_for, rows_of};
use crate::dtype::{Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::Symmetric;

const NAME: &str = "reduce_scatter";

impl<T: Number> Symmetric<T> {
    /// The elements are one block for each rank; `out` becomes the reduction of all ranks' blocks for this one.
    /// Collective.
    pub fn reduce_scatter(&mut self, op: ReduceOp, out: &mut [T]) -> Result<()> {
        let block = block_len(self.group(), NAME, self.len())?;
        self.reduce_rows(op, 1, block * self.group().size(), out)
    }

    /// The elements are rows of `columns`, and each row is one block for each rank; `out` becomes the reduced blocks for this
    /// one, row by row. Collective.
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
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let block = block_len(self.group(), NAME, columns)?;
        check_len(self.group(), NAME, "an output", rows * block, out.len())?;
        let first = self.group().rank() * block;
        let more = [rows, columns, 0];
        let call =
            |way| Call { operator: Some(op), more, ..self.call(const { Op::of(NAME) }, way) };
        if self.is_small() {
            return self.staged(call(Way::Staged), 0..self.len(), true, |from, _| {
                for (row, out) in out.chunks_exact_mut(block.max(1)).enumerate() {
                    let begin = row * columns + first;
                    let source = |rank: usize| {
                        from.get(rank).map_or(std::ptr::null(), |p| p.wrapping_add(begin))
                    };
                    // SAFETY: within what each rank has laid out; `out` has a block's length and is ours alone.
                    by_rank(from.len(), source, |from| unsafe {
                        looped(from, &[out.as_mut_ptr()], block, Stores::Cached)
                    });
                }
            });
        }
        self.collective(call(Way::Direct), |session| {
            for (row, out) in out.chunks_exact_mut(block.max(1)).enumerate() {
                let begin = row * columns + first;
                // SAFETY: within all parts; `out` has a block's length and is ours alone, and nobody writes any part.
                unsafe { session.reduce(looped, begin..begin + block, &[out.as_mut_ptr()]) };
            }
            Ok(())
        })
    }
}
