//! Collectives over symmetric memory: one file each, over the loops in `host`.
//!
//! Every collective is a call of all ranks of the memory's group, with arguments that agree; ranks that disagree all
//! get [`Error::Mismatch`] and nothing is done. Element i of a reduction is ((x₀ ⊕ x₁) ⊕ x₂) … in rank order, computed in
//! f32 for 8- and 16-bit floats with one rounding at the end, whatever the algorithm: the same bits on every rank.
#![allow(unsafe_code)] // S1 (the memory keeps all mappings), S2 (between the barriers of a call), S3 (ranges below `len`)

mod all_gather;
mod all_reduce;
mod all_to_all;
pub(crate) mod all_to_all_v;
mod broadcast;
mod host;
mod one_sided;
pub mod plan;
mod reduce_scatter;
mod rooted;
mod slices;
mod words;

use std::ops::Range;
use std::ptr::NonNull;

pub use all_reduce::Algorithm;
pub use one_sided::Open;
pub(crate) use words::{fill_range, write_place};
pub use words::{memset32, write_value32};

use crate::dtype::{Element, Number, ReduceOp};
use crate::error::{Error, Result};
use crate::group::{Call, Group, Op, Running, Staging, Way};
use crate::symmetric::Symmetric;
use host::copy::copy;
use host::reduce::{Loop, reduce_loop};

/// Work is divided at multiples of this many bytes, so that no two ranks write one cache line.
const LINE: usize = 64;

/// One call of a collective, as its work sees it: all ranks are in it, and nobody else touches any part.
struct Session<'a, T> {
    group: &'a Group,
    parts: &'a [NonNull<T>],
    running: Running<'a, 'a>,
}

impl<T: Element> Session<'_, T> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    /// Rank `rank`'s part from element `at` on.
    fn part(&self, rank: usize, at: usize) -> *mut T {
        self.parts.get(rank).map_or(std::ptr::null_mut(), |part| part.as_ptr().wrapping_add(at))
    }

    /// A barrier within the call: what each rank wrote before is seen by all after.
    fn synchronize(&mut self) -> Result<()> {
        self.running.barrier()
    }

    /// Waits until all ranks have made the call. On an error says whether no rank can be at work on our part.
    fn enter(&mut self) -> Result<(), (Error, bool)> {
        let entered = self.running.barrier().and_then(|()| self.running.check_not_given_up());
        entered.map_err(|error| {
            let is_void = self.running.is_void(&error);
            (error, is_void)
        })
    }

    /// Reduces the elements of `range` of all parts into `to`, at the elements from `at` on of each.
    ///
    /// # Safety
    /// The range lies within the parts and, shifted to `at`, within every destination, and nobody else writes there.
    unsafe fn reduce(&self, looped: Loop<T>, range: Range<usize>, to: &[*mut T]) {
        let stores = plan::results(range.len() * size_of::<T>(), to.len());
        let part = |rank| self.part(rank, range.start).cast_const();
        // SAFETY: as the caller promises.
        by_rank(self.size(), part, |from| unsafe { looped(from, to, range.len(), stores) });
    }
}

impl<T: Element> Symmetric<T> {
    /// Runs `work` between the barrier at which all ranks have come and that at which all are done.
    ///
    /// After a failure in between, peers may be in the middle of the work: this rank's part is suspended.
    fn collective<R>(
        &mut self,
        call: Call,
        work: impl FnOnce(&mut Session<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let group = self.group();
        group.reach_out();
        record::<T>(group, call.op.name(), self.len(), "direct");
        let running = group.begin_call(&call, group.deadline())?;
        let mut session = Session { group, parts: self.parts(), running };
        let block = self.handle().block();
        block.set_open(true);
        let done = session.enter().and_then(|()| {
            let done = work(&mut session);
            done.and_then(|result| session.synchronize().map(|()| result)).map_err(|e| (e, false))
        });
        drop(session);
        done.inspect(|_| block.set_open(false)).map_err(|(error, is_void)| {
            if is_void {
                self.handle().block().set_open(false)
            } else {
                self.suspend()
            }
            error
        })
    }

    /// Whether parts that are only read go through the staging buffers; the same on all ranks.
    fn is_small(&self) -> bool {
        let (group, bytes) = (self.group(), self.len() * size_of::<T>());
        bytes <= Staging::TINY
            || group.rates().is_ok_and(|rates| plan::small(rates, bytes, group.size()))
    }

    /// A call on this memory.
    #[inline]
    fn call(&self, op: Op, way: Way) -> Call {
        Call {
            op,
            way,
            dtype: Some(T::DTYPE),
            memory: self.handle().memory(),
            len: self.len(),
            ..Call::default()
        }
    }

    /// [`Group::staged`] with the elements of `range` of our part, written by every rank that is a `source`; `work` also
    /// gets where our own part has these elements. Nobody touches a peer's part, so a failure leaves all memory to its
    /// owner.
    fn staged<R>(
        &mut self,
        call: Call,
        range: Range<usize>,
        source: bool,
        work: impl FnOnce(&[*const T], *mut T) -> R,
    ) -> Result<R> {
        let group = self.group();
        group.reach_out();
        let mut running = group.begin_call(&call, group.deadline())?;
        self.stage(&mut running, call.op.name(), range, source, work)
    }

    /// One exchange of a call that [`Symmetric::staged`] makes.
    #[inline]
    fn stage<R>(
        &self,
        running: &mut Running<'_, '_>,
        op: &'static str,
        range: Range<usize>,
        source: bool,
        work: impl FnOnce(&[*const T], *mut T) -> R,
    ) -> Result<R> {
        record::<T>(self.group(), op, range.len(), "staged");
        let (group, bytes) = (self.group(), range.len() * size_of::<T>());
        let own = self.parts().get(group.rank()).map_or(std::ptr::null_mut(), |part| part.as_ptr());
        let own = own.wrapping_add(range.start);
        let write = |to: *mut u8| {
            if source {
                // SAFETY: our own part, and a place of our own, which nobody reads yet.
                unsafe { copy(own.cast(), to, bytes, plan::lay(bytes)) };
            }
        };
        group.staged(running, bytes, write, Some(own.cast_const()), |from| work(from, own))
    }
}

impl Group {
    /// The way of what is small or not in symmetric memory: every rank writes at most `bytes` bytes, by `write`, into its
    /// staging buffer, and `work` gets what each has written, by rank. `bytes` is the same on all ranks, and at most
    /// [`STAGE`](crate::group::STAGE).
    ///
    /// One barrier is all: what is written stays as it is until all have passed the next. What this rank has written it
    /// finds at `own`, where that is given: lines that peers are fetching from our cache are slow to read for us as well.
    #[inline]
    fn staged<T, R>(
        &self,
        running: &mut Running<'_, '_>,
        bytes: usize,
        write: impl Fn(*mut u8),
        own: Option<*const T>,
        work: impl FnOnce(&[*const T]) -> R,
    ) -> Result<R> {
        let own = |rank| own.filter(|_| rank == self.rank());
        if bytes > Staging::TINY {
            let write = |staging: &Staging<'_>, to: usize| {
                if to == self.rank() {
                    write(staging.stage(to));
                }
            };
            let read = |staging: &Staging<'_>| {
                let place = |rank| own(rank).unwrap_or(staging.stage(rank).cast_const().cast());
                by_rank(self.size(), place, work)
            };
            return running.exchange(write, read);
        }
        let mut tiny = [0_u64; Staging::TINY / size_of::<u64>()];
        write(tiny.as_mut_ptr().cast());
        let write = |staging: &Staging<'_>, to: usize| {
            let place = staging.tiny_for(to);
            for (at, word) in tiny.iter().enumerate() {
                // Word by word, as `write` has written them: wider loads would wait until those stores are through.
                // SAFETY: as many words as there are, aligned; `to` does not read them before our flag.
                unsafe { place.wrapping_add(at).write_volatile(*word) };
            }
        };
        let read = |staging: &Staging<'_>| {
            let place = |rank| own(rank).unwrap_or(staging.tiny_from(rank).cast());
            by_rank(self.size(), place, work)
        };
        running.exchange(write, read)
    }
}

/// What a call leaves for those who listen.
#[inline(always)]
fn record<T: Element>(group: &Group, op: &'static str, len: usize, way: &'static str) {
    // All in the macro, which looks at none of it unless somebody listens.
    tracing::debug!(op, group = group.name(), rank = group.rank(), bytes = len * size_of::<T>(), dtype = %T::DTYPE, way);
}

/// Calls `f` with a pointer for each rank, made by `of`; without an allocation where the ranks are few.
#[inline]
fn by_rank<P: Copy, R>(ranks: usize, of: impl Fn(usize) -> P, f: impl FnOnce(&[P]) -> R) -> R {
    if ranks == 2 {
        return f(&[of(0), of(1)]);
    }
    let mut few = [of(0); 16];
    match few.get_mut(..ranks) {
        Some(few) => {
            few.iter_mut().enumerate().for_each(|(rank, pointer)| *pointer = of(rank));
            f(few)
        }
        None => f(&(0..ranks).map(of).collect::<Vec<_>>()),
    }
}

/// The elements that rank `rank` of `ranks` works on: equal shares, cut at cache lines.
fn share<T>(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let line = (LINE / size_of::<T>()).max(1);
    let each = len.div_ceil(ranks).next_multiple_of(line);
    let begin = (rank * each).min(len);
    begin..(begin + each).min(len)
}

pub(crate) fn loop_for<T: Number>(
    group: &Group,
    name: &'static str,
    op: ReduceOp,
) -> Result<Loop<T>> {
    reduce_loop::<T>(op).ok_or_else(|| {
        group.usage(name, format!("an operator that {} has", T::DTYPE), op.to_string())
    })
}

/// Copies `len` elements.
///
/// # Safety
/// Both may be touched for that many elements by nobody else, and they do not overlap.
unsafe fn copy_elements<T>(from: *const T, to: *mut T, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        copy(from.cast(), to.cast(), len * size_of::<T>(), plan::stores(len * size_of::<T>()))
    };
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
    Err(group.usage(name, format!("{what} of {expected} elements"), got.to_string()))
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
    let expected = format!("a length divisible by the {ranks} ranks");
    Err(group.usage(name, expected, len.to_string()))
}
