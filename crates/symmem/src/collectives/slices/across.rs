//! Collectives of groups that span hosts. What a host has to know crosses to it once, and its ranks pass it on among themselves.
//!
//! | way | what it does |
//! |---|---|
//! | raw | every rank sends its elements to all ranks of other hosts, and reduces all of them: `slices/mod.rs` |
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
    /// Where each rank has staged its part of the last step.
    staged: Vec<*const u8>,
}

impl<'s, 'r, 'c> Steps<'s, 'r, 'c> {
    /// Nothing where all ranks are on one host.
    pub(super) fn new(group: &'s Group, running: &'s mut Running<'r, 'c>) -> Option<Self> {
        let span = group.span()?;
        let staged = vec![std::ptr::null(); group.size()];
        Some(Self { group, rank: group.rank(), span, running, staged })
    }

    /// Whether a block of each of so many sources better crosses to each host once, although it takes a step more then.
    pub(super) fn relay(&self, bytes: usize, sources: usize) -> Result<bool> {
        let spread = super::spread(self.group, self.span, false);
        Ok(plan::is_relayed(self.group.rates()?, bytes, sources, &spread))
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
            unsafe { copy(from, self.own(at), bytes, plan::staging(bytes)) };
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

    /// What `rank` has staged for the last step, from byte `at` on.
    fn of(&self, rank: usize, at: usize) -> *const u8 {
        self.staged.get(rank).copied().unwrap_or(std::ptr::null()).wrapping_add(at)
    }

    /// The ranks of this host.
    fn near(&self) -> &'s [usize] {
        self.span.hosts().get(self.span.own().0).map_or(&[], Vec::as_slice)
    }

    /// The rank of a host with this rank's place, or another one.
    fn at_place(&self, host: usize, place: usize) -> usize {
        self.span.hosts().get(host).and_then(|host| host.get(place)).copied().unwrap_or_default()
    }

    /// The hosts but this one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.span.own().0;
        (0..self.span.hosts().len()).filter(move |&host| host != own)
    }
}

/// How data is cut into pieces, each of them into shares of several ranks. A staging buffer holds a piece, and behind it some shares.
struct Cut {
    data: Slice,
    shares: usize,
    /// Elements of a piece, and the number of pieces.
    each: usize,
    count: usize,
}

impl Cut {
    /// Into pieces of which a staging buffer holds one and `more` shares; nothing if there are too many ranks for that.
    fn new(data: Slice, shares: usize, more: usize) -> Option<Self> {
        let line = (LINE / data.size).max(1);
        let lines = STAGE / (line * data.size) / (shares + more);
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

    /// Where a staging buffer has the share behind the piece.
    fn behind(&self, share: usize) -> usize {
        let size = self.data.size;
        self.each * size + share * (self.each / self.shares) * size
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
            at: within.start * data.size,
            bytes: within.len() * data.size,
        }
    }
}

/// A share of a piece: where this rank has it, its elements, and where it lies in the piece.
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

/// An all-reduce in two hops. Where `relayed`, results cross to each host once, and a step later the ranks of the host pass them on.
/// False if there are too many ranks.
pub(super) fn two_hops(
    steps: &mut Steps<'_, '_, '_>,
    data: Slice,
    reduce: Reduce,
    relayed: bool,
) -> Result<bool> {
    let (rank, ranks, hosts) = (steps.rank, steps.staged.len(), steps.span.hosts().len());
    let Some(cut) = Cut::new(data, ranks, 1 + if relayed { hosts } else { 0 }) else {
        return Ok(false);
    };
    let result = cut.behind(0);
    let relay = |host: usize| cut.behind(1 + host);
    let place = steps.span.own().1;
    let mut from = Vec::with_capacity(ranks);
    for step in 0..cut.count + 1 + usize::from(relayed) {
        let (input, reduced) = (cut.piece(step, 0), cut.piece(step, 1));
        let known = cut.piece(step, 2).filter(|_| relayed);
        if let Some(piece) = &input {
            // SAFETY: a piece of the data; a staging buffer has room for it.
            unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        }
        if let Some(share) = reduced.as_ref().map(|piece| piece.share(rank)) {
            // SAFETY: our share of the piece; there is room for one behind a piece.
            unsafe { steps.stage(share.own, share.bytes, result) };
        }
        for (piece, host) in known.iter().flat_map(|piece| steps.others().map(move |h| (piece, h)))
        {
            let share = piece.share(steps.at_place(host, place));
            // SAFETY: as above, of the rank with our place there.
            unsafe { steps.stage(share.own, share.bytes, relay(host)) };
        }
        let span = steps.span;
        let sent = |to| {
            let input = input.as_ref().map(|piece| piece.share(to));
            let reduced = reduced.as_ref().filter(|_| !relayed || are_opposite(span, rank, to));
            [
                input.map_or(Sent::NOTHING, |share| share.sent(share.at)),
                reduced.map_or(Sent::NOTHING, |piece| piece.share(rank).sent(result)),
            ]
        };
        // SAFETY: shares of the data.
        unsafe { steps.step(sent) }?;
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
            for source in (0..ranks).filter(|&source| source != rank) {
                let is_opposite = are_opposite(steps.span, rank, source);
                if !relayed || is_opposite || steps.near().contains(&source) {
                    let share = piece.share(source);
                    // SAFETY: the rank has staged its share, and here is its place in the data.
                    unsafe { copy_bytes(steps.of(source, result), share.own, share.bytes) };
                }
            }
        }
        for (piece, host) in known.iter().flat_map(|piece| steps.others().map(move |h| (piece, h)))
        {
            for (at, &neighbour) in steps.near().iter().enumerate().filter(|(at, _)| *at != place) {
                let share = piece.share(steps.at_place(host, at));
                // SAFETY: the neighbour has staged the share of the rank with its place there.
                unsafe { copy_bytes(steps.of(neighbour, relay(host)), share.own, share.bytes) };
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
    let Some(cut) = Cut::new(data, near.len(), 2) else { return Ok(false) };
    let (partial, result) = (cut.behind(0), cut.behind(1));
    let before = host.checked_sub(1).map(|before| steps.at_place(before, place));
    let after = (host + 1 < hosts).then(|| steps.at_place(host + 1, place));
    let mut from = Vec::with_capacity(near.len() + 1);
    for step in 0..cut.count + 2 * hosts - 1 {
        // What the steps before have made of the pieces that are under way.
        let input = cut.piece(step, host);
        let passed_on = cut.piece(step, host + 1);
        let reduced = cut.piece(step, 2 * hosts - 1 - host);
        if let Some(piece) = &input {
            // SAFETY: a piece of the data; a staging buffer has room for it.
            unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        }
        if let Some(share) = reduced.as_ref().map(|piece| piece.share(place)) {
            // SAFETY: our share of the piece; there is room for one behind a piece.
            unsafe { steps.stage(share.own, share.bytes, result) };
        }
        let reduced_so_far = steps.own(partial).cast_const();
        let sent = |to| {
            let share = |piece: Option<&Piece<'_>>| piece.map(|piece| piece.share(place));
            let on = share(passed_on.as_ref().filter(|_| after == Some(to)));
            let back = share(reduced.as_ref().filter(|_| before == Some(to)));
            [
                on.map_or(Sent::NOTHING, |share| Sent {
                    from: reduced_so_far,
                    ..share.sent(partial)
                }),
                back.map_or(Sent::NOTHING, |share| share.sent(result)),
            ]
        };
        // SAFETY: what the step before has reduced into the staging buffer, and a share of the data.
        unsafe { steps.step(sent) }?;
        if let Some(share) = input.as_ref().map(|piece| piece.share(place)) {
            from.clear();
            from.extend(before.map(|before| steps.of(before, partial)));
            from.extend(near.iter().map(|&source| match source == steps.rank {
                true => share.own.cast_const(),
                false => steps.of(source, share.at),
            }));
            // The next host continues with it, or it is the result.
            let to = if after.is_some() { steps.own(partial) } else { share.own };
            // SAFETY: the ranks of this host have staged the share, ours lies in the data; the host before has reduced it.
            unsafe { reduce(&from, &[to], share.len, Stores::Cached) };
        }
        if let Some((after, piece)) = after.zip(cut.piece(step, 2 * hosts - 2 - host)) {
            let share = piece.share(place);
            // SAFETY: the next host has staged the result, and here is its place in the data.
            unsafe { copy_bytes(steps.of(after, result), share.own, share.bytes) };
        }
        for (piece, (at, &neighbour)) in
            reduced.iter().flat_map(|piece| near.iter().enumerate().map(move |near| (piece, near)))
        {
            if at != place {
                let share = piece.share(at);
                // SAFETY: the neighbour has staged the result of its share.
                unsafe { copy_bytes(steps.of(neighbour, result), share.own, share.bytes) };
            }
        }
    }
    Ok(true)
}

/// An all-gather in which each rank sends its block to one rank of each other host. The hosts have as many ranks each. False if
/// there are too many hosts.
pub(super) fn all_gather(
    steps: &mut Steps<'_, '_, '_>,
    input: Slice,
    out: *mut u8,
) -> Result<bool> {
    let (rank, (host, place), near) = (steps.rank, steps.span.own(), steps.near());
    let block = input.len * input.size;
    let Some(cut) = Cut::new(input, 1, steps.span.hosts().len() - 1) else { return Ok(false) };
    // The own piece, or one of another host, lies where its host says.
    let of_host = |number: usize| number * cut.each * input.size;
    let place_of = |source: usize, piece: &Piece<'_>| {
        out.wrapping_add(source * block + piece.elements.start * input.size)
    };
    for step in 0..=cut.count {
        let (new, known) = (cut.piece(step, 0), cut.piece(step, 1));
        if let Some(piece) = &new {
            // SAFETY: a piece of the input; a staging buffer has room for one of each host.
            unsafe { steps.stage(piece.own(), piece.bytes(), of_host(host)) };
        }
        for (piece, other) in known.iter().flat_map(|piece| steps.others().map(move |h| (piece, h)))
        {
            let from = place_of(steps.at_place(other, place), piece);
            // SAFETY: a piece that came in the step before; as above.
            unsafe { steps.stage(from, piece.bytes(), of_host(other)) };
        }
        let span = steps.span;
        let sent = |to| {
            let new = new.as_ref().filter(|_| are_opposite(span, rank, to));
            [new.map_or(Sent::NOTHING, |piece| piece.sent(of_host(host))), Sent::NOTHING]
        };
        // SAFETY: a piece of the input.
        unsafe { steps.step(sent) }?;
        let take = |from: *const u8, source: usize, piece: &Piece<'_>| {
            // SAFETY: the source has staged the piece, and there is a place for it in `out`.
            unsafe { copy_bytes(from, place_of(source, piece), piece.bytes()) };
        };
        if let Some(piece) = &new {
            for &source in near {
                let own = source == rank;
                take(
                    if own { piece.own() } else { steps.of(source, of_host(host)) },
                    source,
                    piece,
                );
            }
            for other in steps.others() {
                let source = steps.at_place(other, place);
                take(steps.of(source, of_host(other)), source, piece);
            }
        }
        for (piece, other) in known.iter().flat_map(|piece| steps.others().map(move |h| (piece, h)))
        {
            for (at, &neighbour) in near.iter().enumerate().filter(|(at, _)| *at != place) {
                take(steps.of(neighbour, of_host(other)), steps.at_place(other, at), piece);
            }
        }
    }
    Ok(true)
}

/// A broadcast in which the root sends its elements to one rank of each other host. The hosts have as many ranks each.
pub(super) fn broadcast(steps: &mut Steps<'_, '_, '_>, data: Slice, root: usize) -> Result<()> {
    let (host, place) = steps.span.own();
    let of_root =
        steps.span.hosts().iter().enumerate().find_map(|(number, ranks)| {
            Some((number, ranks.iter().position(|&rank| rank == root)?))
        });
    let (root_host, root_place) = of_root.unwrap_or_default();
    let is_root = steps.rank == root;
    // On other hosts, the rank that hears from the root passes it on, a step later.
    let passes_on = host != root_host && place == root_place;
    let source =
        if passes_on || host == root_host { root } else { steps.at_place(host, root_place) };
    let behind = usize::from(source != root);
    let cut =
        Cut::new(data, 1, 0).unwrap_or(Cut { data, shares: 1, each: data.len.max(1), count: 1 });
    for step in 0..=cut.count {
        let staged = match is_root {
            true => cut.piece(step, 0),
            false => cut.piece(step, 1).filter(|_| passes_on),
        };
        if let Some(piece) = &staged {
            // SAFETY: a piece of the data, which came in the step before unless it is our own; a staging buffer has room for it.
            unsafe { steps.stage(piece.own(), piece.bytes(), 0) };
        }
        let span = steps.span;
        let sent = |to| {
            let sent = staged.as_ref().filter(|_| is_root && are_opposite(span, root, to));
            [sent.map_or(Sent::NOTHING, |piece| piece.sent(0)), Sent::NOTHING]
        };
        // SAFETY: a piece of the data.
        unsafe { steps.step(sent) }?;
        if let Some(piece) = cut.piece(step, behind).filter(|_| !is_root) {
            // SAFETY: the source has staged the piece, and here is its place in the data.
            unsafe { copy_bytes(steps.of(source, 0), piece.own(), piece.bytes()) };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn cut(len: usize, shares: usize, more: usize) -> Option<Cut> {
        Cut::new(Slice::new(std::ptr::null_mut(), len, DType::F32), shares, more)
    }

    #[test]
    fn pieces_cover_everything_and_fit_a_staging_buffer_with_the_shares_behind_them() {
        for (shares, more) in [(1, 0), (1, 3), (2, 2), (3, 4), (8, 1), (72, 10)] {
            for len in [0, 1, 7, 100, 20_000, STAGE / 4, STAGE, 1 << 20] {
                let cut = cut(len, shares, more).unwrap();
                let pieces: Vec<_> = (0..cut.count).map(|i| cut.piece(i, 0).unwrap()).collect();
                assert!(cut.piece(cut.count, 0).is_none() && cut.piece(0, 1).is_none());
                let mut ends = pieces.iter().map(|piece| piece.elements.end);
                assert_eq!(ends.next_back(), Some(len));
                assert!(pieces.windows(2).all(|p| p[0].elements.end == p[1].elements.start));
                for piece in &pieces {
                    let all = (0..shares).map(|i| piece.share(i));
                    assert_eq!(all.map(|share| share.len).sum::<usize>(), piece.elements.len());
                    let widest = (0..shares).map(|i| piece.share(i).bytes).max().unwrap();
                    assert!(piece.bytes() <= cut.behind(0));
                    assert!((0..more).all(|i| cut.behind(i) + widest <= cut.behind(i + 1)));
                    assert!(cut.behind(more) <= STAGE, "{len} in {shares} and {more}");
                }
            }
        }
        assert!(cut(1, STAGE, 0).is_none());
    }
}
