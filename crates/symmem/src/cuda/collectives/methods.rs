//! Collectives on device memory as users call them: of a type, over those of memory whatever its type.

use crate::cuda::Algorithm;
use crate::cuda::stream::Stream;
use crate::cuda::symmetric::{Symmetric, ViewMut};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;

impl<T: Number> Symmetric<T> {
    /// In place: element i becomes the reduction of element i of all ranks. Collective, in `stream`.
    pub fn all_reduce(&mut self, op: ReduceOp, stream: &Stream) -> Result<()> {
        self.all_reduce_with(op, Algorithm::Auto, stream)
    }

    /// As [`Symmetric::all_reduce`], by the given algorithm. All give the same bits, except [`Algorithm::Multimem`], which
    /// sums in the switch's order.
    pub fn all_reduce_with(
        &mut self,
        op: ReduceOp,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.all_reduce(op, algorithm, stream)
    }

    /// Into `out`, which is not in symmetric memory of the group; this memory stays as it is. Collective, in `stream`.
    pub fn all_reduce_into(
        &mut self,
        op: ReduceOp,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        self.all_reduce_into_with(op, out, Algorithm::Auto, stream)
    }

    /// As [`Symmetric::all_reduce_into`], by [`Algorithm::Auto`] or [`Algorithm::Multimem`].
    pub fn all_reduce_into_with(
        &mut self,
        op: ReduceOp,
        out: ViewMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.all_reduce_into(op, out.elements(), algorithm, stream)
    }

    /// Each rank's elements are one block for each rank; `out` becomes the reduction of all ranks' blocks for this one.
    pub fn reduce_scatter(
        &mut self,
        op: ReduceOp,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        self.reduce_scatter_with(op, out, Algorithm::Auto, stream)
    }

    /// As [`Symmetric::reduce_scatter`], by [`Algorithm::Auto`], [`Algorithm::Multimem`] or [`Algorithm::CopyEngine`]. The
    /// last gathers the blocks in private memory as large as this rank's part, which the first such call allocates.
    pub fn reduce_scatter_with(
        &mut self,
        op: ReduceOp,
        out: ViewMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.reduce_scatter(op, out.elements(), algorithm, stream)
    }

    /// As [`Symmetric::reduce_scatter`], of rows of `columns` elements; each rank gets its share of the columns.
    pub fn reduce_scatter_last_dim(
        &mut self,
        op: ReduceOp,
        columns: usize,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.reduce_scatter_last_dim(op, columns, out.elements(), stream)
    }

    /// On rank `root`, `out` becomes the reduction of all ranks' elements; on other ranks it is not written.
    pub fn reduce(
        &mut self,
        op: ReduceOp,
        root: usize,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        self.reduce_with(op, root, out, Algorithm::Auto, stream)
    }

    /// As [`Symmetric::reduce`], by [`Algorithm::Auto`] or [`Algorithm::Multimem`].
    pub fn reduce_with(
        &mut self,
        op: ReduceOp,
        root: usize,
        out: ViewMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.reduce(op, root, out.elements(), algorithm, stream)
    }
}

impl<T: Element> Symmetric<T> {
    /// `out` becomes the elements of all ranks, in rank order. Collective, in `stream`.
    pub fn all_gather(&mut self, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        self.memory.all_gather(out.elements(), stream)
    }

    /// In place: the elements become those of rank `root`. Collective, in `stream`.
    pub fn broadcast(&mut self, root: usize, stream: &Stream) -> Result<()> {
        self.memory.broadcast(root, stream)
    }

    /// `out` becomes the blocks that the ranks have for this one, in rank order. Collective, in `stream`.
    pub fn all_to_all(&mut self, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        self.memory.all_to_all(out.elements(), stream)
    }

    /// On rank `root`, `out` becomes the elements of all ranks, in rank order; on other ranks it is not written.
    pub fn gather(&mut self, root: usize, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        self.memory.gather(root, out.elements(), stream)
    }

    /// `out` becomes the block that rank `root` has for this rank.
    pub fn scatter(&mut self, root: usize, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        self.memory.scatter(root, out.elements(), stream)
    }

    /// A barrier of the group, in `stream`: what any rank's stream did before it is visible to all streams after it.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.memory.barrier(stream)
    }
}
