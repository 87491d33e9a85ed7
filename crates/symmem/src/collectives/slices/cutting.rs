//! How long the pieces are in which slices go through the staging buffers, and how they are written there.
//!
//! All ranks cut alike, so nothing here may depend on what a rank finds out for itself: ranks in different containers of a host may
//! see different caches.
#![allow(unsafe_code)] // S2 (staging buffers between two barriers)

use std::ops::Range;

use super::super::host::copy::Stores;
use super::super::staged::{Input, SHORT, exchange, pieces, sources};
use super::super::{PerRank, plan};
use super::Slice;
use crate::error::Result;
use crate::group::{Group, Running, STAGE};

/// Who stages data in a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sources {
    /// Every rank, and all read; each writes so many bytes of results.
    All(usize),
    /// Some ranks, and this is one of them or not. Others read what these have staged while these stage the next piece.
    Some(bool),
}

impl Sources {
    /// The most bytes of a piece; the same on all ranks.
    fn most(self, group: &Group, bytes: usize) -> Result<usize> {
        if bytes <= SHORT {
            return Ok(SHORT);
        }
        if let Self::All(written) = self {
            return Ok(longest_piece(group, written >= STREAM));
        }
        let each = bytes.div_ceil(plan::relay_pieces(group.rates()?, bytes));
        Ok(each.clamp(SHORT, longest_piece(group, true)))
    }

    fn are_long(self) -> bool {
        matches!(self, Self::All(written) if is_long(written))
    }
}

/// Whether results of so many bytes are written around the caches. What is staged for them leaves the caches as well. Each rank decides
/// for itself, for this changes no data.
pub(super) fn is_long(written: usize) -> bool {
    plan::stores(written) == Stores::Streaming
}

/// From so many bytes of results on, pieces are shorter. About where they leave the caches of a usual machine.
pub(super) const STREAM: usize = 8 << 20;

/// The most bytes of a piece; in streams of much data, and of what one rank reads while another one writes, long ones do not pay.
pub(super) fn longest_piece(group: &Group, is_stream: bool) -> usize {
    let is_shortened = is_stream && !group.spans_hosts();
    if is_shortened { group.stage().min(STAGE) } else { group.stage() }
}

/// Stages `input` piece by piece, if this rank is a source. `work` gets each piece, and where each source has it.
pub(super) fn each_piece(
    group: &Group,
    running: &mut Running<'_, '_>,
    input: Slice,
    who: Sources,
    mut work: impl FnMut(Range<usize>, &[*const u8]),
) -> Result<()> {
    let mut places = PerRank::new();
    let most = who.most(group, input.bytes())?;
    for piece in pieces(input.len, input.size, 1, || most) {
        let (own, bytes) = (input.at(piece.start), piece.len() * input.size);
        let staged =
            if who != Sources::Some(false) { Input::one(own, bytes) } else { Input::none(bytes) };
        let staged = Input { is_long: who.are_long(), ..staged };
        // SAFETY: a piece of the input.
        let staging = unsafe { exchange(running, &staged) }?;
        work(piece, sources(&mut places, group, &staging, bytes, 0, own));
    }
    Ok(())
}
