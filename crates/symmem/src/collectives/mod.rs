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

use std::cell::Cell;
use std::ops::Range;
use std::ptr::NonNull;

pub use all_reduce::Algorithm;
pub use one_sided::Open;
pub(crate) use words::{fill_range, write_place};
pub use words::{memset32, write_value32};

use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, Result};
use crate::group::{Call, Desk, Group, digest};
use crate::symmetric::Symmetric;
use host::copy::copy;
use host::reduce::{Loop, reduce_loop};

/// Work is divided at multiples of this many bytes, so that no two ranks write one cache line.
const LINE: usize = 64;

/// Whether peers touch each other's parts. Told to them: ranks that chose differently must not go on together.
#[derive(Clone, Copy)]
enum Way {
    Direct,
    Staged,
}

/// One call of a collective, as its work sees it: all ranks are in it, and nobody else touches any part.
struct Session<'a, T> {
    group: &'a Group,
    parts: &'a [NonNull<T>],
    call: Call,
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
    fn meet(&self) -> Result<()> {
        self.group.meet_for(self.call, self.group.deadline())
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
    /// A failure other than a disagreement, which all ranks notice before anything is done, leaves this rank with a
    /// copy of its part: peers may be in the middle of the work.
    fn collective<R>(
        &mut self,
        name: &'static str,
        agreed: &[usize],
        work: impl FnOnce(&Session<'_, T>) -> Result<R>,
    ) -> Result<R> {
        self.group().reach_out();
        self.check_whole(name)?;
        record::<T>(self.group(), name, self.len(), "direct");
        let call = self.call(name, Way::Direct, agreed);
        let session = Session { group: self.group(), parts: self.parts(), call };
        let block = self.handle().block();
        block.set_open(true);
        let met = session.meet();
        let agreed = !matches!(met, Err(Error::Mismatch { .. }));
        let done =
            met.and_then(|()| work(&session)).and_then(|result| session.meet().map(|()| result));
        // Whoever disagrees before the work has everyone know it; later on, peers may be in the middle of it.
        if done.is_ok() || !agreed {
            block.set_open(false);
        } else {
            self.sever();
        }
        done
    }

    /// Whether parts that are only read are laid out beside the flags; the same on all ranks.
    fn is_small(&self) -> bool {
        let (group, bytes) = (self.group(), self.len() * size_of::<T>());
        bytes <= Desk::TINY
            || group.rates().is_ok_and(|rates| plan::small(rates, bytes, group.size()))
    }

    fn call(&self, name: &'static str, way: Way, agreed: &[usize]) -> Call {
        let memory = self.handle().digest() ^ (way as usize) << 31;
        Call::Collective(name, digest(name, T::DTYPE, memory, self.len(), agreed))
    }

    /// [`Group::staged`] with the elements of `range` of our part, laid out by every rank that `lays`; `work` also gets
    /// where our own part has these elements. Nobody touches a peer's part, so a failure leaves all memory to its owner.
    fn staged<R>(
        &mut self,
        name: &'static str,
        agreed: &[usize],
        range: Range<usize>,
        lays: bool,
        work: impl FnOnce(&[*const T], *mut T) -> R,
    ) -> Result<R> {
        self.group().reach_out();
        self.check_whole(name)?;
        record::<T>(self.group(), name, range.len(), "staged");
        let call = self.call(name, Way::Staged, agreed);
        let (group, bytes) = (self.group(), range.len() * size_of::<T>());
        let own = self.parts().get(group.rank()).map_or(std::ptr::null_mut(), |part| part.as_ptr());
        let own = own.wrapping_add(range.start);
        let lay = |to: *mut u8| {
            if lays {
                // SAFETY: our own part, and a place of our own, which nobody reads yet.
                unsafe { copy(own.cast(), to, bytes, plan::lay(bytes)) };
            }
        };
        group.staged(call, bytes, lay, Some(own.cast_const()), |from| work(from, own))
    }
}

impl Group {
    /// The way of what is small or not in symmetric memory: every rank lays out at most `bytes` bytes, by `lay`, beside its
    /// flag, and `work` gets what each has laid out, by rank. `bytes` is the same on all ranks, and at most [`DESK`].
    ///
    /// One barrier is all: what is laid out stays as it is until all have passed the next. What this rank has laid out it
    /// finds at `own`, where that is given: lines that peers are fetching from our cache are slow to read for us as well.
    fn staged<T, R>(
        &self,
        call: Call,
        bytes: usize,
        lay: impl Fn(*mut u8),
        own: Option<*const T>,
        work: impl FnOnce(&[*const T]) -> R,
    ) -> Result<R> {
        // A call that goes on with an expired one lays out nothing: what counts is what was laid out then.
        let laid = Cell::new(false);
        let own = |rank| own.filter(|_| rank == self.rank() && laid.get());
        let name = call.name();
        if bytes > Desk::TINY {
            let write = |desk: &Desk<'_>, to: usize| {
                if to == self.rank() {
                    lay(desk.stage(to));
                    laid.set(true);
                }
            };
            let read = |desk: &Desk<'_>| {
                if !laid.get() {
                    // SAFETY: our own desk has as many bytes, and nobody writes there before our next exchange.
                    let then =
                        unsafe { std::slice::from_raw_parts(desk.stage(self.rank()), bytes) };
                    self.check_unchanged(name, then, &lay)?;
                }
                let place = |rank| own(rank).unwrap_or(desk.stage(rank).cast_const().cast());
                Ok(by_rank(self.size(), place, work))
            };
            return self.exchange(call, write, read)?;
        }
        let mut tiny = [0_u64; Desk::TINY / size_of::<u64>()];
        lay(tiny.as_mut_ptr().cast());
        let write = |desk: &Desk<'_>, to: usize| {
            let place = desk.tiny_for(to);
            for (at, word) in tiny.iter().enumerate() {
                // Word by word, as `lay` has written them: wider loads would wait until those stores are through.
                // SAFETY: as many words as there are, aligned; `to` does not read them before our flag.
                unsafe { place.wrapping_add(at).write_volatile(*word) };
            }
            laid.set(true);
        };
        let read = |desk: &Desk<'_>| {
            if !laid.get() {
                let then = desk.tiny_from(self.rank()).cast();
                // SAFETY: what we had for ourselves, likewise.
                let then = unsafe { std::slice::from_raw_parts(then, bytes) };
                self.check_unchanged(name, then, &lay)?;
            }
            let place = |rank| own(rank).unwrap_or(desk.tiny_from(rank).cast());
            Ok(by_rank(self.size(), place, work))
        };
        self.exchange(call, write, read)?
    }

    /// A call that goes on with an expired one has to be the same call: peers may have taken up what was laid out `then`,
    /// and would come to another result.
    #[cold]
    fn check_unchanged(
        &self,
        name: &'static str,
        then: &[u8],
        lay: impl Fn(*mut u8),
    ) -> Result<()> {
        let mut now = then.to_vec(); // a rank that lays out nothing leaves it so
        lay(now.as_mut_ptr());
        if now == then {
            return Ok(());
        }
        let expected = "the elements of the call before, which expired and went on now".to_owned();
        let got = "others; for the peers the call is over, with the elements of then".to_owned();
        Err(self.usage(name, expected, got))
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

pub(crate) fn loop_for<T: Element>(
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
