//! Collectives on ordinary memory whose lengths differ between ranks: all_gather_v and all_to_all_v.
//!
//! All ranks first exchange their lengths, so each knows how much every rank sends, and in how many pieces. Every rank stages
//! its input piece by piece, and copies what is for it from the pieces of the others.
#![allow(unsafe_code)] // S2, S3

use std::ops::Range;

use super::super::copy_bytes;
use super::super::staged::{Input, exchange};
use super::cutting::{Sources, each_piece};
use super::{Slice, begin, copy_pieces};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::group::{Call, Group, Op, Running};

/// In place of a length: the rank's arguments are wrong, and it says so itself.
const REFUSED: u64 = u64::MAX;

impl Group {
    /// `out` becomes the `input` of all ranks, in rank order; their lengths may differ. Returns the length of each rank's
    /// input. Collective; after an error `out` is empty.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut all = Vec::new();
    /// let lengths = world.all_gather_v(&vec![world.rank(); world.rank()], &mut all)?;
    /// assert_eq!((lengths, all), (vec![0, 1, 2], vec![1, 2, 2]));
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_gather_v<T: Element>(&self, input: &[T], out: &mut Vec<T>) -> Result<Vec<usize>> {
        const OP: Op = Op::of("all_gather_v");
        let lengths = Lengths { ranks: self.size(), counts: 1 };
        self.send_and_receive(OP, lengths, input, &[input.len()], out)
    }

    /// `input` is `counts[r]` elements for each rank r, in rank order. `out` becomes what the ranks have for this one, in
    /// rank order. Returns how many elements came from each rank. Collective; after an error `out` is empty.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let (input, counts) = [(vec![1, 2, 3], [1, 2]), (vec![4], [1, 0])][world.rank()].clone();
    /// let mut out = Vec::new();
    /// let received = world.all_to_all_v(&input, &counts, &mut out)?;
    /// let expected = [(vec![1, 4], vec![1, 1]), (vec![2, 3], vec![2, 0])];
    /// assert_eq!((out, received), expected[world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        out: &mut Vec<T>,
    ) -> Result<Vec<usize>> {
        const OP: Op = Op::of("all_to_all_v");
        let lengths = Lengths { ranks: self.size(), counts: self.size() };
        self.send_and_receive(OP, lengths, input, counts, out)
    }

    fn send_and_receive<T: Element>(
        &self,
        op: Op,
        lengths: Lengths,
        input: &[T],
        counts: &[usize],
        out: &mut Vec<T>,
    ) -> Result<Vec<usize>> {
        out.clear();
        let wrong = lengths.check(self, op, input.len(), counts).err();
        let own = match wrong {
            None => counts.iter().map(|&count| count as u64).collect(),
            Some(_) => vec![REFUSED; lengths.counts],
        };
        // The call's length is one that no rank's own arguments change.
        let call = Call { len: 0, ..Slice::new(std::ptr::null_mut(), 0, T::DTYPE).call(op) };
        let mut running = begin(self, &call)?;
        let table = gather_words(self, &mut running, &own)?;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        if let Some(at) = table.iter().position(|&count| count == REFUSED) {
            let reason = "its counts do not fit its input".to_owned();
            let failed = Error::PeerFailed { op: op.name(), rank: at / lengths.counts, reason };
            return Err(self.note_common(failed));
        }
        let wanted = lengths.wanted(&table, self.rank());
        let received: Vec<usize> = wanted.iter().map(Range::len).collect();
        let total = received.iter().fold(0, |sum: usize, len| sum.saturating_add(*len));
        let input = Slice::new(input.as_ptr().cast_mut().cast(), input.len(), T::DTYPE);
        let units = size_of::<T>().checked_div(input.size).unwrap_or(0);
        let most = lengths.totals(&table).max().unwrap_or(0) * units;
        let mut wanted: Vec<_> = wanted.iter().map(|w| w.start * units..w.end * units).collect();
        let reserved = out.try_reserve_exact(total);
        if reserved.is_err() {
            wanted.clear(); // the others go on, and so do we
        }
        let to = out.spare_capacity_mut().as_mut_ptr().cast();
        receive(self, &mut running, input, most, &wanted, to)?;
        reserved.map_err(|e| no_memory(total, T::DTYPE, &e))?;
        // SAFETY: `receive` has written as many elements, of which every pattern of bits is a value.
        unsafe { out.set_len(total) };
        Ok(received)
    }
}

fn no_memory(len: usize, dtype: DType, why: &std::collections::TryReserveError) -> Error {
    Error::unavailable(format!("memory for {len} elements of {dtype}"), why.to_string())
}

/// What ranks tell each other of their lengths.
#[derive(Clone, Copy)]
struct Lengths {
    ranks: usize,
    /// How many each rank has: one for all others together, or one for each.
    counts: usize,
}

impl Lengths {
    fn check(self, group: &Group, op: Op, len: usize, counts: &[usize]) -> Result<()> {
        if counts.len() != self.counts {
            let expected = format!("a count for each of the {} ranks", self.ranks);
            return Err(group.usage(op.name(), expected, format!("{} counts", counts.len())));
        }
        let sum = counts.iter().try_fold(0, |sum: usize, count| sum.checked_add(*count));
        if sum == Some(len) {
            return Ok(());
        }
        let got = sum.map_or("more than memory has".to_owned(), |sum| sum.to_string());
        Err(group.usage(op.name(), format!("counts whose sum is the input's length, {len}"), got))
    }

    /// The elements of each rank's input.
    fn totals(self, table: &[u64]) -> impl Iterator<Item = usize> {
        table.chunks_exact(self.counts).map(|counts| counts.iter().sum::<u64>() as usize)
    }

    /// Which elements of each rank's input are for `rank`.
    fn wanted(self, table: &[u64], rank: usize) -> Vec<Range<usize>> {
        let of = |counts: &[u64]| {
            let at = if self.counts == 1 { 0 } else { rank };
            let first = counts[..at].iter().sum::<u64>() as usize;
            first..first + counts[at] as usize
        };
        table.chunks_exact(self.counts).map(of).collect()
    }
}

/// All ranks' words, by rank; all have as many.
fn gather_words(group: &Group, running: &mut Running<'_, '_>, own: &[u64]) -> Result<Vec<u64>> {
    let mut all = vec![0; own.len() * group.size()];
    let words = Slice::new(own.as_ptr().cast_mut().cast(), own.len(), DType::U64);
    each_piece(group, running, words, Sources::All(0), |piece, from| {
        // SAFETY: each rank has staged a piece; there is room for the words of each.
        unsafe { copy_pieces(group, from, words, &piece, all.as_mut_ptr().cast()) };
    })?;
    Ok(all)
}

/// Stages all of `input`, in as many pieces as a rank needs that has `most` elements, and writes the `wanted` elements of each
/// rank's to `to`, one rank's after the other's.
fn receive(
    group: &Group,
    running: &mut Running<'_, '_>,
    input: Slice,
    most: usize,
    wanted: &[Range<usize>],
    to: *mut u8,
) -> Result<()> {
    let each = (group.stage() / input.size).max(1);
    for first in (0..most).step_by(each) {
        let end = most.min(first + each);
        let own = first.min(input.len)..end.min(input.len);
        let staged = Input {
            most: (end - first) * input.size,
            ..Input::one(input.at(own.start), own.len() * input.size)
        };
        // SAFETY: a piece of the input.
        let staging = unsafe { exchange(running, &staged) }?;
        let mut place = 0;
        for (rank, wanted) in wanted.iter().enumerate() {
            let part = wanted.start.max(first)..wanted.end.min(end);
            let at = place + part.start.saturating_sub(wanted.start);
            place += wanted.len();
            if part.is_empty() {
                continue;
            }
            let from = match rank == group.rank() {
                true => input.at(part.start).cast_const(),
                false => {
                    let skip = (part.start - first) * input.size;
                    staging.of(rank, staged.most).wrapping_add(skip)
                }
            };
            // SAFETY: the rank has staged the part, whose place among the wanted elements this is.
            unsafe {
                copy_bytes(from, to.wrapping_add(at * input.size), part.len() * input.size);
            }
        }
    }
    Ok(())
}
