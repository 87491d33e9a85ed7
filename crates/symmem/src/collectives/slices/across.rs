//! Collectives of groups that span hosts. What a host has to know crosses to it once: its ranks read each other's mirrors.
//!
//! | way | what it does |
//! |---|---|
//! | raw | every rank sends its elements to all ranks of other hosts, and reduces all of them: `slices/mod.rs` |
//! | raw, relayed | every rank sends its elements to one rank of each host, where all find them: all reduce all of them |
//! | two hops | every rank sends each share to its owner, who reduces it and sends the result to one rank of each host |
//! | chain | the ranks of the first host reduce their shares, those of the next host continue with theirs, …; the results run back |
//!
//! Ranks at the same place on their hosts talk to each other. A call goes in steps. In each, a rank stages what others need next, sends
//! ranks of other hosts their part of it, and all ranks exchange. Pieces of the data follow each other, each one step behind the
//! one before, so a step carries something of several pieces.
#![allow(unsafe_code)] // S2 (what is staged stays until the next exchange), S3 (pieces of slices and of staging buffers)

use std::ops::Range;

use super::super::host::copy::{Stores, copy};
use super::super::host::reduce::Reduce;
use super::super::{LINE, copy_bytes, plan, share};
use super::Slice;
use crate::error::Result;
use crate::group::{Group, Running, STAGE, Sent, Span};

/// The steps of a call.
pub(super) struct Steps<'s, 'r, 'c> {
    group: &'s Group,
    rank: usize,
    span: &'s Span,
    running: &'s mut Running<'r, 'c>,
    /// Where each rank has staged its part of the last step; or, if it is on another host, what it has sent this rank.
    staged: Vec<*const u8>,
    /// What each rank of another host has sent in the last step to the rank with its place here.
    relayed: Vec<*const u8>,
}

impl<'s, 'r, 'c> Steps<'s, 'r, 'c> {
    /// Nothing where all ranks are on one host.
    pub(super) fn new(group: &'s Group, running: &'s mut Running<'r, 'c>) -> Option<Self> {
        let span = group.span()?;
        let (staged, relayed) = (vec![std::ptr::null(); group.size()], Vec::new());
        Some(Self { group, rank: group.rank(), span, running, staged, relayed })
    }

    /// Whether blocks that all ranks read cross to each host once, and its ranks read them there.
    pub(super) fn relays(&self, bytes: usize) -> bool {
        plan::crosses_once(bytes, &super::spread(self.group, self.span, false))
    }

    /// Byte `at` of this rank's staging buffer for the next step, which nobody reads yet.
    fn own(&self, at: usize) -> *mut u8 {
        self.running.staging().own().wrapping_add(at)
    }

    /// Copies bytes to this rank's staging buffer for the next step, for other ranks of this host.
    ///
    /// # Safety
    /// So many bytes may be read there; from `at` on they fit the buffer.
    unsafe fn stage(&self, from: *const u8, bytes: usize, at: usize) {
        if self.span.has_neighbours() {
            // SAFETY: as the caller promises; a buffer of our own that nobody reads.
            unsafe { copy(from, self.own(at), bytes, Stores::Cached) };
        }
    }

    /// Sends each rank of another host what `sent` says, and waits for all ranks.
    ///
    /// # Safety
    /// What is sent may be read.
    unsafe fn step(&mut self, sent: impl Fn(usize) -> [Sent; 2]) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.running.staging().send_far(sent) };
        let staging = self.running.exchange(None)?;
        for (rank, staged) in self.staged.iter_mut().enumerate() {
            *staged = staging.of(rank, STAGE);
        }
        Ok(())
    }

    /// As `step`. What ranks of other hosts have sent to any rank of this one is there as well.
    ///
    /// # Safety
    /// As of `step`.
    unsafe fn step_relayed(&mut self, sent: impl Fn(usize) -> [Sent; 2]) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.step(sent) }?;
        let staging = self.running.await_landed()?;
        self.relayed.clear();
        self.relayed.extend((0..self.staged.len()).map(|rank| staging.relayed(rank)));
        Ok(())
    }

    /// What `rank`, which may be on another host, has staged for the last step, from byte `at` on: after [`Steps::step_relayed`].
    fn of_any(&self, rank: usize, at: usize) -> *const u8 {
        match self.relayed.get(rank) {
            Some(relayed) if !relayed.is_null() => relayed.wrapping_add(at),
            _ => self.of(rank, at),
        }
    }

    /// What `rank` has staged for the last step, from byte `at` on.
    fn of(&self, rank: usize, at: usize) -> *const u8 {
        self.staged.get(rank).copied().unwrap_or(std::ptr::null()).wrapping_add(at)
    }

    /// The ranks of this host.
    fn near(&self) -> &'s [usize] {
        self.span.hosts().get(self.span.own().0).map_or(&[], Vec::as_slice)
    }

    fn is_near(&self, rank: usize) -> bool {
        self.near().contains(&rank)
    }

    /// The rank of a host with this rank's place, or another one.
    fn at_place(&self, host: usize, place: usize) -> usize {
        self.span.hosts().get(host).and_then(|host| host.get(place)).copied().unwrap_or_default()
    }
}

/// How data is cut into pieces, each of them into shares of several ranks. A staging buffer holds a piece.
struct Cut {
    data: Slice,
    shares: usize,
    /// Elements of a piece, and the number of pieces.
    each: usize,
    count: usize,
}

impl Cut {
    /// Into pieces that a staging buffer of `stage` bytes holds; nothing if there are too many ranks for that.
    fn new(stage: usize, data: Slice, shares: usize) -> Option<Self> {
        let line = (LINE / data.size).max(1);
        let lines = stage / (line * data.size) / shares;
        let most = Some(lines * line * shares).filter(|most| *most > 0)?;
        let count = data.len.div_ceil(most).max(1);
        let each = data.len.div_ceil(count).next_multiple_of(line * shares).max(1);
        Some(Self { data, shares, each, count: data.len.div_ceil(each).max(1) })
    }

    /// The piece that is this much behind the first one in a step.
    fn piece(&self, step: usize, behind: usize) -> Option<Piece<'_>> {
        let number = step.checked_sub(behind).filter(|&number| number < self.count)?;
        let elements = number * self.each..((number + 1) * self.each).min(self.data.len);
        Some(Piece { cut: self, elements })
    }

    /// Where a staging buffer has a share, of whichever piece. A rank's own share is read by nobody, so what it has made of its share
    /// of an earlier piece lies there.
    fn place(&self, share: usize) -> usize {
        share * (self.each / self.shares) * self.data.size
    }
}

struct Piece<'c> {
    cut: &'c Cut,
    elements: Range<usize>,
}

impl Piece<'_> {
    fn own(&self) -> *mut u8 {
        self.cut.data.at(self.elements.start)
    }

    fn bytes(&self) -> usize {
        self.elements.len() * self.cut.data.size
    }

    /// To where others expect it.
    fn sent(&self, at: usize) -> Sent {
        Sent { from: self.own(), bytes: self.bytes(), at }
    }

    /// A share of the piece.
    fn share(&self, of: usize) -> Share {
        let Cut { data, shares, .. } = *self.cut;
        let within = share(self.elements.len(), data.size, of, shares);
        Share {
            own: data.at(self.elements.start + within.start),
            len: within.len(),
            at: self.cut.place(of),
            bytes: within.len() * data.size,
        }
    }
}

/// A share of a piece: where this rank has it, its elements, and where staging buffers have it.
struct Share {
    own: *mut u8,
    len: usize,
    at: usize,
    bytes: usize,
}

impl Share {
    /// To where others expect it.
    fn sent(&self, at: usize) -> Sent {
        Sent { from: self.own, bytes: self.bytes, at }
    }
}

/// An all-reduce in which every rank gets the elements of all, which cross to each host once. The hosts have as many ranks each. False
/// if there are too many ranks.
pub(super) fn raw_relayed(
    steps: &mut Steps<'_, '_, '_>,
    data: Slice,
    reduce: Reduce,
) -> Result<bool> {
    let (rank, span) = (steps.rank, steps.span);
    let Some(cut) = Cut::new(steps.group.stage(), data, 1) else { return Ok(false) };
    let mut from = Vec::with_capacity(steps.staged.len());
    for piece in (0..cut.count).filter_map(|step| cut.piece(step, 0)) {
        // SAFETY: a piece of the data; a staging buffer has room for it.
        unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        let sent = |to| {
            let is_opposite = are_opposite(span, rank, to);
            [if is_opposite { piece.sent(0) } else { Sent::NOTHING }, Sent::NOTHING]
        };
        // SAFETY: a piece of the data.
        unsafe { steps.step_relayed(sent) }?;
        from.clear();
        from.extend((0..steps.staged.len()).map(|source| match source == rank {
            true => piece.own().cast_const(),
            false => steps.of_any(source, 0),
        }));
        // SAFETY: all have staged or sent the piece; ours lies in the data, where nobody else touches it.
        unsafe { reduce(&from, &[piece.own()], piece.elements.len(), Stores::Cached) };
    }
    Ok(true)
}

/// An all-reduce in two hops. Where `relayed`, results cross to each host once. False if there are too many ranks.
pub(super) fn two_hops(
    steps: &mut Steps<'_, '_, '_>,
    data: Slice,
    reduce: Reduce,
    relayed: bool,
) -> Result<bool> {
    let (rank, ranks) = (steps.rank, steps.staged.len());
    let Some(cut) = Cut::new(steps.group.stage(), data, ranks) else { return Ok(false) };
    let loans = steps.group.loans().filter(|_| !relayed);
    let mut from = Vec::with_capacity(ranks);
    for step in 0..=cut.count {
        let (input, reduced) = (cut.piece(step, 0), cut.piece(step, 1));
        let of_others = || steps.near().iter().copied().filter(|&near| near != rank);
        let staged = input.iter().flat_map(|piece| of_others().map(|near| piece.share(near)));
        for share in staged.chain(reduced.iter().map(|piece| piece.share(rank))) {
            // SAFETY: a share of a piece of the data; a staging buffer has room for the piece.
            unsafe { steps.stage(share.own, share.bytes, share.at) };
        }
        let span = steps.span;
        for (loans, piece) in loans.iter().zip(&input) {
            // The results of the piece come with the next exchange.
            let next = steps.running.staging().epoch().wrapping_add(1);
            for source in (0..ranks).filter(|&source| !steps.is_near(source)) {
                let share = piece.share(source);
                // SAFETY: a share of the data, which the source sends when it has ours, so that has been sent; nobody touches it before
                // that exchange is over, and the loans end with this call.
                unsafe { loans.lend((source, next, share.at), share.own, share.bytes) };
            }
        }
        let sent = |to| {
            let input = input.as_ref().map(|piece| piece.share(to));
            let reduced = reduced.as_ref().filter(|_| !relayed || are_opposite(span, rank, to));
            let reduced = reduced.map(|piece| piece.share(rank));
            [input, reduced].map(|share| share.map_or(Sent::NOTHING, |share| share.sent(share.at)))
        };
        match relayed && reduced.is_some() {
            // SAFETY: shares of the data.
            true => unsafe { steps.step_relayed(sent) },
            // SAFETY: as above.
            false => unsafe { steps.step(sent) },
        }?;
        if let Some(share) = input.as_ref().map(|piece| piece.share(rank)) {
            from.clear();
            from.extend((0..ranks).map(|source| match source == rank {
                true => share.own.cast_const(),
                false => steps.of(source, share.at),
            }));
            // SAFETY: all have staged the share, ours lies in the data, where nobody else touches it.
            unsafe { reduce(&from, &[share.own], share.len, Stores::Cached) };
        }
        if let Some(piece) = &reduced {
            let is_there = |source| source == rank || loans.is_some() && !steps.is_near(source);
            for source in (0..ranks).filter(|&source| !is_there(source)) {
                let share = piece.share(source);
                let from = match relayed {
                    true => steps.of_any(source, share.at),
                    false => steps.of(source, share.at),
                };
                // SAFETY: the rank has staged or sent its share, and here is its place in the data.
                unsafe { copy_bytes(from, share.own, share.bytes) };
            }
        }
    }
    Ok(true)
}

/// Whether another rank has the place on its host that `rank`, which is this one, has here.
fn are_opposite(span: &Span, rank: usize, other: usize) -> bool {
    let place = span.own().1;
    other != rank && span.hosts().iter().any(|host| host.get(place) == Some(&other))
}

/// An all-reduce along the chain of hosts, which have as many ranks each, one after the other. The loop takes what it has reduced as
/// the first source of what follows, with the same bits. False if there are too many ranks.
pub(super) fn chain(steps: &mut Steps<'_, '_, '_>, data: Slice, reduce: Reduce) -> Result<bool> {
    let (hosts, (host, place)) = (steps.span.hosts().len(), steps.span.own());
    let near = steps.near();
    let Some(cut) = Cut::new(steps.group.stage(), data, near.len()) else { return Ok(false) };
    let own = cut.place(place); // partial and final results, of pieces before the one whose shares are staged
    let before = host.checked_sub(1).map(|before| steps.at_place(before, place));
    let after = (host + 1 < hosts).then(|| steps.at_place(host + 1, place));
    let mut from = Vec::with_capacity(near.len() + 1);
    for step in 0..cut.count + 2 * hosts - 2 {
        // What the steps before have made of the pieces that are under way: ours are staged, what was reduced so far is passed on,
        // results run back.
        let input = cut.piece(step, host);
        let passed_on = cut.piece(step, host + 1);
        let back = cut.piece(step, 2 * hosts - 1 - host);
        // What this host has the results of after the step.
        let done = cut.piece(step, if after.is_some() { 2 * hosts - 2 - host } else { hosts });
        let of_others = || (0..near.len()).filter(|at| *at != place);
        for share in input.iter().flat_map(|piece| of_others().map(|at| piece.share(at))) {
            // SAFETY: a share of a piece of the data; a staging buffer has room for the piece.
            unsafe { steps.stage(share.own, share.bytes, share.at) };
        }
        let reduced_so_far = steps.own(own).cast_const();
        let sent = |to| {
            let share = |piece: Option<&Piece<'_>>| piece.map(|piece| piece.share(place));
            let on = share(passed_on.as_ref().filter(|_| after == Some(to)));
            let back = share(back.as_ref().filter(|_| before == Some(to)));
            [
                on.map_or(Sent::NOTHING, |share| Sent { from: reduced_so_far, ..share.sent(own) }),
                back.map_or(Sent::NOTHING, |share| share.sent(own)),
            ]
        };
        match after.is_some() && done.is_some() {
            // SAFETY: what the step before has reduced into the staging buffer, and a share of the data.
            true => unsafe { steps.step_relayed(sent) },
            // SAFETY: as above.
            false => unsafe { steps.step(sent) },
        }?;
        if let Some(share) = input.as_ref().map(|piece| piece.share(place)) {
            from.clear();
            from.extend(before.map(|before| steps.of(before, own)));
            from.extend(near.iter().map(|&source| match source == steps.rank {
                true => share.own.cast_const(),
                false => steps.of(source, share.at),
            }));
            // The next host continues with it; or it is the result, which the ranks of this one get in the next step.
            let to: &[_] = match after {
                Some(_) => &[steps.own(own)],
                None => &[share.own, steps.own(own)],
            };
            // SAFETY: the ranks of this host have staged the share, ours lies in the data; the host before has reduced it. Staging
            // buffers have room for a share there.
            unsafe { reduce(&from, to, share.len, Stores::Cached) };
        }
        if let Some(piece) = &done {
            for (at, &neighbour) in near.iter().enumerate() {
                let share = piece.share(at);
                let from = match after {
                    Some(_) => steps.of_any(steps.at_place(host + 1, at), share.at),
                    None if at == place => continue,
                    None => steps.of(neighbour, share.at),
                };
                // SAFETY: the next host has sent the result of this share, or the neighbour has staged it.
                unsafe { copy_bytes(from, share.own, share.bytes) };
            }
        }
    }
    Ok(true)
}

/// An all-gather in which each rank sends its block to one rank of each other host. The hosts have as many ranks each.
pub(super) fn all_gather(
    steps: &mut Steps<'_, '_, '_>,
    input: Slice,
    out: *mut u8,
) -> Result<bool> {
    let rank = steps.rank;
    let Some(cut) = Cut::new(steps.group.stage(), input, 1) else { return Ok(false) };
    for piece in (0..cut.count).filter_map(|step| cut.piece(step, 0)) {
        // SAFETY: a piece of the input; a staging buffer has room for it.
        unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        let span = steps.span;
        let sent = |to| {
            let is_opposite = are_opposite(span, rank, to);
            [if is_opposite { piece.sent(0) } else { Sent::NOTHING }, Sent::NOTHING]
        };
        // SAFETY: a piece of the input.
        unsafe { steps.step_relayed(sent) }?;
        let ranks = steps.staged.len();
        // Our own first: it is in our cache. Then each rank begins with another one.
        for source in (rank..ranks).chain(0..rank) {
            let from =
                if source == rank { piece.own().cast_const() } else { steps.of_any(source, 0) };
            let at = source * input.len * input.size + piece.elements.start * input.size;
            // SAFETY: the source has staged or sent the piece, and there is a place for it in `out`.
            unsafe { copy_bytes(from, out.wrapping_add(at), piece.bytes()) };
        }
    }
    Ok(true)
}

/// A broadcast in which the root sends its elements to one rank of each other host. The hosts have as many ranks each. False if an
/// element does not fit a staging buffer.
pub(super) fn broadcast(steps: &mut Steps<'_, '_, '_>, data: Slice, root: usize) -> Result<bool> {
    let Some(cut) = Cut::new(steps.group.stage(), data, 1) else { return Ok(false) };
    let is_root = steps.rank == root;
    for piece in (0..cut.count).filter_map(|step| cut.piece(step, 0)) {
        if is_root {
            // SAFETY: a piece of the data; a staging buffer has room for it.
            unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        }
        let span = steps.span;
        let sent = |to| {
            let is_sent = is_root && are_opposite(span, root, to);
            [if is_sent { piece.sent(0) } else { Sent::NOTHING }, Sent::NOTHING]
        };
        // SAFETY: a piece of the data.
        unsafe { steps.step_relayed(sent) }?;
        if !is_root {
            // SAFETY: the root has staged or sent the piece, and here is its place in the data.
            unsafe { copy_bytes(steps.of_any(root, 0), piece.own(), piece.bytes()) };
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn cut(len: usize, shares: usize) -> Option<Cut> {
        Cut::new(STAGE, Slice::new(std::ptr::null_mut(), len, DType::F32), shares)
    }

    #[test]
    fn pieces_cover_everything_and_their_shares_have_fixed_places_in_a_staging_buffer() {
        for shares in [1, 2, 3, 8, 72] {
            for len in [0, 1, 7, 100, 20_000, STAGE / 4, STAGE, 1 << 20] {
                let cut = cut(len, shares).unwrap();
                let pieces: Vec<_> = (0..cut.count).map(|i| cut.piece(i, 0).unwrap()).collect();
                assert!(cut.piece(cut.count, 0).is_none() && cut.piece(0, 1).is_none());
                let mut ends = pieces.iter().map(|piece| piece.elements.end);
                assert_eq!(ends.next_back(), Some(len));
                assert!(pieces.windows(2).all(|p| p[0].elements.end == p[1].elements.start));
                for piece in &pieces {
                    let all = (0..shares).map(|i| piece.share(i));
                    assert_eq!(all.map(|share| share.len).sum::<usize>(), piece.elements.len());
                    assert!((0..shares).all(|i| {
                        let share = piece.share(i);
                        share.at == cut.place(i) && share.at + share.bytes <= cut.place(i + 1)
                    }));
                    assert!(cut.place(shares) <= STAGE, "{len} in {shares}");
                }
            }
        }
        assert!(cut(1, STAGE).is_none());
    }
}
