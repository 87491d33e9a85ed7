//! The way of what is small or not in symmetric memory: every rank writes what it has into its staging buffer, and after one
//! barrier all read it there. What is written stays as it is until all have passed the next.
#![allow(unsafe_code)] // S2 (staging buffers between two barriers), S3 (lengths that callers checked)

use std::ops::Range;

use super::host::copy::{Stores, copy};
use super::{LINE, PerRank, plan, record, share};
use crate::error::Result;
use crate::group::{Call, Group, Running, Sent, Span, Staging, Way};
use crate::machine::DefaultFloats;
use crate::memory::region::Region;
use crate::symmetric::Memory;

/// What a rank stages: the same piece of every block of its data, one after the other. By address, because the result may
/// go to the same place, once all have staged theirs.
pub(super) struct Input {
    pub(super) from: *const u8,
    /// Bytes from one block to the next.
    pub(super) block: usize,
    pub(super) blocks: usize,
    /// Bytes of a piece.
    pub(super) piece: usize,
    /// The block that nobody reads there: our own.
    pub(super) without: Option<usize>,
    /// The most bytes that any rank stages: the same on all, for it decides where they are staged.
    pub(super) most: usize,
    /// Which of it the others read.
    pub(super) read: Read,
    /// It is a piece of a call whose results are written around the caches.
    pub(super) is_long: bool,
}

/// Which of the bytes that a rank stages another one reads.
#[derive(Clone, Copy)]
pub(super) enum Read {
    All,
    /// The piece of its own block.
    Block,
    /// The same, which it finds at the beginning: of ranks that are alone on their hosts.
    BlockOnly,
    /// Its share of so many elements of a size.
    Share {
        len: usize,
        size: usize,
    },
}

impl Input {
    /// One piece, of so many bytes.
    pub(super) fn one(from: *const u8, bytes: usize) -> Self {
        let (without, read, is_long) = (None, Read::All, false);
        Self { from, block: bytes, blocks: 1, piece: bytes, without, most: bytes, read, is_long }
    }

    /// Nothing, where others stage so many bytes.
    pub(super) fn none(bytes: usize) -> Self {
        Self { without: Some(0), ..Self::one(std::ptr::null(), bytes) }
    }

    /// What of it `rank` of `ranks` reads. Where ranks read all, it is one block.
    fn read_by(&self, rank: usize, ranks: usize) -> Sent {
        let part = |from: usize, bytes, at| Sent { from: self.from.wrapping_add(from), bytes, at };
        match self.read {
            _ if self.blocks == 1 && self.without.is_some() => Sent::NOTHING,
            Read::All => part(0, self.piece, 0),
            Read::Block => part(rank * self.block, self.piece, rank * self.piece),
            Read::BlockOnly => part(rank * self.block, self.piece, 0),
            Read::Share { len, size } => {
                let share = share(len, size, rank, ranks);
                part(share.start * size, share.len() * size, share.start * size)
            }
        }
    }

    #[inline(always)]
    fn stores(&self) -> Stores {
        if self.is_long { Stores::Streaming } else { plan::staging(self.most) }
    }

    /// # Safety
    /// The pieces may be read, and `to` written for that many bytes.
    #[inline(always)]
    unsafe fn write(&self, to: *mut u8) {
        if self.blocks == 1 {
            if self.without.is_none() {
                // SAFETY: as the caller promises.
                unsafe { copy(self.from, to, self.piece, self.stores()) };
            }
            return;
        }
        for block in (0..self.blocks).filter(|block| Some(*block) != self.without) {
            let from = self.from.wrapping_add(block * self.block);
            let to = to.wrapping_add(block * self.piece);
            // SAFETY: as the caller promises.
            unsafe { copy(from, to, self.piece, self.stores()) };
        }
    }
}

/// Stages `input` and waits until all ranks have staged theirs, of as many bytes: at most [`Group::stage`].
///
/// # Safety
/// The input may be read.
#[inline(always)] // as all of a small message's way
pub(super) unsafe fn exchange<'r>(
    running: &'r mut Running<'_, '_>,
    input: &Input,
) -> Result<Staging<'r>> {
    if input.most > Staging::TINY {
        if running.spans_hosts() {
            // SAFETY: as the caller promises.
            unsafe { stage_across(running, input) };
        } else {
            // SAFETY: as the caller promises; a buffer of our own that nobody reads.
            unsafe { input.write(running.staging().own()) };
        }
        return running.exchange(None);
    }
    let mut tiny = [0_u64; Staging::TINY / size_of::<u64>()];
    // SAFETY: as above.
    unsafe { input.write(tiny.as_mut_ptr().cast()) };
    running.exchange(Some(&tiny))
}

/// Stages `input` for ranks of this host, if there are any, and sends those of others what they read.
///
/// # Safety
/// The input may be read.
#[cold]
unsafe fn stage_across(running: &Running<'_, '_>, input: &Input) {
    let (group, staging) = (running.group(), running.staging());
    if group.span().is_some_and(Span::has_neighbours) {
        // SAFETY: as the caller promises; a buffer of our own that nobody reads.
        unsafe { input.write(staging.own()) };
    }
    // SAFETY: as the caller promises.
    unsafe { staging.send_far(|rank| [input.read_by(rank, group.size())]) };
}

/// Where each rank has staged its piece, `at` bytes on; ours is at `own`: lines that peers are fetching from our cache are
/// slow to read for us as well.
#[inline(always)]
pub(super) fn sources<'p>(
    places: &'p mut PerRank<*const u8>,
    group: &Group,
    staging: &Staging<'_>,
    bytes: usize,
    at: usize,
    own: *const u8,
) -> &'p [*const u8] {
    places.fill(group.size(), |rank| match rank == group.rank() {
        true => own,
        false => staging.of(rank, bytes).wrapping_add(at),
    })
}

impl Memory {
    /// Whether parts that are only read go through the staging buffers; the same on all ranks.
    fn is_small(&self) -> bool {
        let (group, bytes) = (self.group(), self.bytes());
        bytes <= Staging::TINY
            || group.rates().is_ok_and(|rates| plan::small(rates, bytes, group.size()))
    }

    /// Begins a call that goes through the staging buffers. Nobody touches a peer's part, so a failure leaves all memory to
    /// its owner.
    #[inline(always)] // what it returns is large to hand over
    pub(super) fn begin_staged<'m, 'c>(&'m self, call: &'c Call) -> Result<Running<'m, 'c>> {
        let group = self.group();
        group.reach_out(call);
        record(group, call, "staged");
        group.begin_call(call, group.deadline())
    }

    /// Begins a call that goes through the staging buffers because ranks are on several hosts; nothing if they are on one.
    pub(super) fn begin_across<'m, 'c>(
        &'m self,
        call: &'c Call,
    ) -> Result<Option<Running<'m, 'c>>> {
        self.group().spans_hosts().then(|| self.begin_staged(call)).transpose()
    }

    /// Makes a call that writes to no peer: `work` gets a pointer to each rank's part, staged if parts are small, in which
    /// only a source stages its own.
    #[inline(always)]
    pub(super) fn read_parts(
        &self,
        mut call: Call,
        is_source: bool,
        work: impl FnOnce(&[*const u8]),
    ) -> Result<()> {
        if !self.is_small() {
            return self.read_large(call, is_source, work);
        }
        call.way = Way::Staged;
        let (own, bytes) = (self.own(0).cast_const(), self.bytes());
        let input = if is_source { Input::one(own, bytes) } else { Input::none(bytes) };
        let mut running = self.begin_staged(&call)?;
        let mut places = PerRank::new();
        // SAFETY: our own part.
        let staging = unsafe { exchange(&mut running, &input) }?;
        work(sources(&mut places, self.group(), &staging, bytes, 0, own));
        Ok(())
    }

    #[inline(never)] // or the way of a small message would have to save its registers
    pub(super) fn read_large(
        &self,
        call: Call,
        is_source: bool,
        work: impl FnOnce(&[*const u8]),
    ) -> Result<()> {
        let mut work = Some(work);
        self.read_all(call, is_source, &mut |parts| {
            if let Some(work) = work.take() {
                work(parts);
            }
        })
    }

    fn read_all(
        &self,
        call: Call,
        is_source: bool,
        work: &mut dyn FnMut(&[*const u8]),
    ) -> Result<()> {
        if self.group().spans_hosts() {
            return self.read_copies(call, is_source, work);
        }
        let session = self.enter(&call)?;
        let mut places = PerRank::new();
        let mut floats = DefaultFloats::default();
        floats.enter();
        work(places.fill(self.group().size(), |rank| self.part(rank, 0).cast_const()));
        drop(floats);
        session.leave()
    }

    /// Where no rank reaches all parts: each gets a copy of every part, piece by piece.
    fn read_copies(
        &self,
        mut call: Call,
        is_source: bool,
        work: &mut dyn FnMut(&[*const u8]),
    ) -> Result<()> {
        call.way = Way::Staged;
        let (group, size) = (self.group(), self.size());
        let (rank, bytes) = (group.rank(), self.bytes());
        let room = bytes.next_multiple_of(LINE);
        let copies = Region::anonymous(room.saturating_mul(group.size()).max(1))?;
        let copies = |source: usize, at| copies.at::<u8>(source * room + at, bytes - at);
        let mut running = self.begin_staged(&call)?;
        for piece in pieces(self.len(), size, 1, || group.stage()) {
            let (own, at, len) = (self.own(piece.start), piece.start * size, piece.len() * size);
            let input = if is_source { Input::one(own, len) } else { Input::none(len) };
            // SAFETY: a piece of our own part.
            let staging = unsafe { exchange(&mut running, &input) }?;
            for source in (0..group.size()).filter(|&source| source != rank) {
                let to = copies(source, at)?.as_ptr();
                // SAFETY: the rank has staged its piece, if anybody reads it; there is room for it in the copy.
                unsafe { copy(staging.of(source, len), to, len, plan::staging(len)) };
            }
        }
        let mut places = PerRank::new();
        let first: Vec<_> =
            (0..group.size()).map(|source| copies(source, 0)).collect::<Result<_>>()?;
        work(places.fill(group.size(), |source| match source == rank {
            true => self.own(0).cast_const(),
            false => first[source].as_ptr().cast_const(),
        }));
        Ok(())
    }
}

/// Cuts a block of `len` elements of `size` bytes into pieces, of which a buffer of `stage` bytes holds one of each of `blocks`. One
/// empty piece if there are no elements, so that ranks still synchronise.
#[inline]
pub(super) fn pieces(
    len: usize,
    size: usize,
    blocks: usize,
    stage: impl FnOnce() -> usize,
) -> impl Iterator<Item = Range<usize>> {
    // A small message is one piece, and has no time for divisions.
    let bytes = len.saturating_mul(size * blocks);
    let (each, count) = if bytes <= SHORT { (len, 1) } else { cut(len, size, blocks, stage()) };
    (0..count).map(move |i| i * each..((i + 1) * each).min(len))
}

/// Every staging buffer holds as many bytes.
pub(super) const SHORT: usize = 4096;

/// How long pieces are, and how many there are.
fn cut(len: usize, size: usize, blocks: usize, stage: usize) -> (usize, usize) {
    let most = (stage / blocks / size).max(1);
    // All of about the same length: what is left over at the end would not be worth its exchange.
    let each = len.div_ceil(len.div_ceil(most).max(1)).max(1);
    let each = each.next_multiple_of((LINE / size).max(1)).min(most);
    (each, len.div_ceil(each).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::STAGE;

    #[test]
    fn pieces_cover_everything_once_and_fit_a_staging_buffer() {
        for (len, blocks) in
            [(0, 1), (1, 3), (100, 7), (STAGE / 4, 1), (STAGE / 4 + 1, 1), (1 << 20, 72)]
        {
            let stage = if blocks == 3 { 2 * STAGE } else { STAGE };
            let cut: Vec<_> = pieces(len, 4, blocks, || stage).collect();
            assert!(cut.iter().all(|p| p.len() * blocks * 4 <= stage));
            assert!(cut.windows(2).all(|p| p[0].end == p[1].start && !p[1].is_empty()));
            assert_eq!((cut[0].start, cut[cut.len() - 1].end), (0, len));
        }
        let short = |stage| pieces(100 << 10, 1, 1, || stage).all(|piece| piece.len() <= stage);
        assert!([SHORT, STAGE / 2, STAGE].into_iter().all(short), "a buffer may be shorter");
        let longest = |len, stage| pieces(len, 1, 1, || stage).map(|p| p.len()).max();
        assert_eq!(longest(STAGE + 1, STAGE), Some(STAGE / 2 + 64));
        assert_eq!(longest(4 * STAGE, 4 * STAGE), Some(4 * STAGE));
    }
}
