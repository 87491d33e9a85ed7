//! Collectives over symmetric memory: one file each, over the loops in `host`.
//!
//! Every collective is a call of all ranks of the memory's group, with arguments that agree; ranks that disagree all
//! get [`Error::Mismatch`](crate::Error::Mismatch) and nothing is done. Element i of a reduction is ((x₀ ⊕ x₁) ⊕ x₂) … in rank order, computed in
//! f32 for 8- and 16-bit floats with one rounding at the end, whatever the algorithm: the same bits on every rank.
#![allow(unsafe_code)] // S1 (the memory keeps all mappings), S2 (between the barriers of a call), S3 (ranges below `len`)

mod all_gather;
mod all_reduce;
mod all_to_all;
pub(crate) mod all_to_all_v;
mod broadcast;
mod host;
mod per_rank;
pub mod plan;
mod reduce_scatter;
pub mod registered;
mod rooted;
mod slices;
mod staged;

use std::ops::Range;

pub use all_reduce::Algorithm;

use crate::dtype::{DType, Number, ReduceOp};
use crate::error::{Error, Result};
use crate::group::{Call, Group, Op, Running, Way};
use crate::machine::DefaultFloats;
use crate::memory::block::Access;
use crate::symmetric::Memory;
use host::copy::copy;
use host::reduce::{Reduce, reduce_loop};
use per_rank::PerRank;

/// Work is divided at multiples of this many bytes, so that no two ranks write one cache line.
const LINE: usize = 64;

/// A call on all ranks' parts where they lie, from the barrier at which all come to that at which all are done. In between
/// nobody else touches any part.
///
/// If it is dropped before [`Session::leave`], peers may be in the middle of the work: our part is suspended.
struct Session<'m, 'c> {
    memory: &'m Memory,
    running: Running<'m, 'c>,
    is_over: bool,
}

impl Memory {
    /// A call on this memory.
    #[inline]
    fn call(&self, op: Op, way: Way) -> Call {
        Call {
            op,
            way,
            dtype: Some(self.dtype()),
            memory: self.handle().memory(),
            len: self.len(),
            ..Call::default()
        }
    }

    /// All ranks, beginning with our own: it is in our cache, and the others do not all begin with the same.
    fn ranks_from_own(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.group().rank(), self.group().size());
        (rank..size).chain(0..rank)
    }

    /// Waits until all ranks have made the call.
    #[inline(always)] // what it returns is large to hand over
    fn enter<'m, 'c>(&'m self, call: &'c Call) -> Result<Session<'m, 'c>> {
        let (group, block) = (self.group(), self.handle().block());
        group.reach_out(call);
        record(group, call, "direct");
        let running = group.begin_call(call, group.deadline())?;
        block.set_access(Access::Write);
        let mut session = Session { memory: self, running, is_over: false };
        let running = &mut session.running;
        match running.barrier().and_then(|()| running.check_not_given_up()) {
            Ok(()) => Ok(session),
            Err(error) => {
                if running.is_void(&error) {
                    block.set_access(Access::Nothing);
                    session.is_over = true;
                }
                Err(error)
            }
        }
    }
}

impl Session<'_, '_> {
    fn rank(&self) -> usize {
        self.memory.group().rank()
    }

    fn size(&self) -> usize {
        self.memory.group().size()
    }

    /// A barrier within the call: what each rank wrote before is seen by all after.
    fn synchronize(&mut self) -> Result<()> {
        self.running.barrier()
    }

    /// Reduces the elements of `range` of all parts into `to`.
    ///
    /// # Safety
    /// The range lies within the parts, every destination has as many elements, and nobody else writes there.
    unsafe fn reduce(&self, reduce: Reduce, range: Range<usize>, to: &[*mut u8]) {
        let stores = plan::results(range.len() * self.memory.size(), to.len());
        let part = |rank| self.memory.part(rank, range.start).cast_const();
        let mut floats = DefaultFloats::default();
        floats.enter();
        // SAFETY: as the caller promises.
        unsafe { reduce(PerRank::new().fill(self.size(), part), to, range.len(), stores) };
    }

    /// Waits until all ranks are done: from here each has its part for itself again.
    #[inline(always)] // as above
    fn leave(mut self) -> Result<()> {
        self.running.barrier()?;
        self.memory.handle().block().set_access(Access::Nothing);
        self.is_over = true;
        Ok(())
    }
}

impl Drop for Session<'_, '_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.memory.suspend();
        }
    }
}

/// What a call leaves for those who listen.
#[inline(always)]
fn record(group: &Group, call: &Call, way: &'static str) {
    // All in the macro, which looks at none of it unless somebody listens.
    tracing::debug!(
        op = call.op.name(),
        group = group.name(),
        rank = group.rank(),
        bytes = call.bytes(),
        dtype = %call.dtype.map_or("none", DType::name),
        way
    );
}

/// The elements, of `size` bytes each, that rank `rank` of `ranks` works on: equal shares, cut at cache lines.
fn share(len: usize, size: usize, rank: usize, ranks: usize) -> Range<usize> {
    let line = (LINE / size).max(1);
    let each = len.div_ceil(ranks).next_multiple_of(line);
    let begin = (rank * each).min(len);
    begin..(begin + each).min(len)
}

/// The loop that reduces elements of type `T`.
pub(crate) fn loop_for<T: Number>(
    group: &Group,
    name: &'static str,
    op: ReduceOp,
) -> Result<Reduce> {
    reduce_loop::<T>(op).ok_or_else(|| refused_operator(group, name, T::DTYPE, op))
}

/// Refuses an operator that elements of this type do not have.
pub(crate) fn check_operator(
    group: &Group,
    name: &'static str,
    dtype: DType,
    op: ReduceOp,
) -> Result<()> {
    if op.applies_to(dtype.kind()) {
        return Ok(());
    }
    Err(refused_operator(group, name, dtype, op))
}

#[cold]
#[inline(never)]
fn refused_operator(group: &Group, name: &'static str, dtype: DType, op: ReduceOp) -> Error {
    group.usage(name, format!("an operator that {dtype} has"), op.to_string())
}

/// Copies `bytes`.
///
/// # Safety
/// Both may be touched for that many bytes by nobody else, and they do not overlap.
#[inline(always)] // a few bytes take less time than a call
unsafe fn copy_bytes(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: as the caller promises.
    unsafe { copy(from, to, bytes, plan::stores(bytes)) };
}

pub(crate) fn check_len(
    group: &Group,
    name: &'static str,
    what: &str,
    expected: usize,
    got: usize,
) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(wrong_len(group, name, what, expected, got))
}

/// Apart, so that the comparison is all that callers contain.
#[cold]
#[inline(never)]
fn wrong_len(group: &Group, name: &'static str, what: &str, expected: usize, got: usize) -> Error {
    group.usage(name, format!("{what} of {expected} elements"), got.to_string())
}

/// How many rows of `columns` there are in `len` elements: in none, none of whatever columns.
pub(crate) fn rows_of(
    group: &Group,
    name: &'static str,
    len: usize,
    columns: usize,
) -> Result<usize> {
    if !len.is_multiple_of(columns) {
        let expected = format!("a number of columns that divides {len}");
        return Err(group.usage(name, expected, columns.to_string()));
    }
    Ok(len.checked_div(columns).unwrap_or(0))
}

/// The length of one block where `len` elements are `ranks` blocks.
pub(crate) fn block_len(group: &Group, name: &'static str, len: usize) -> Result<usize> {
    let ranks = group.size();
    if len.is_multiple_of(ranks) {
        return Ok(len / ranks);
    }
    Err(indivisible(group, name, len))
}

#[cold]
#[inline(never)]
fn indivisible(group: &Group, name: &'static str, len: usize) -> Error {
    let expected = format!("a length divisible by the {} ranks", group.size());
    group.usage(name, expected, len.to_string())
}
