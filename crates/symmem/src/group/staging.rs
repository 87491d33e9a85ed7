//! Staging buffers: where a rank writes what small collectives carry along with their flag.
//!
//! A few bytes lie in the line of the flag itself, in the pad of each rank that shall read them. More lie behind the
//! words of the writer's own pad, once for all readers. Each place is there twice, for even and odd epochs:
//! see `Turn::exchange`.

use super::form::RegionPads;
use crate::signal::Layout;

/// Bytes of a staging buffer, for each of two epochs in turn.
pub(crate) const STAGE: usize = 128 << 10;

/// Where the staging buffers begin in a pad: on a page of their own.
pub(super) const fn staging_offset(layout: Layout) -> usize {
    (layout.words() * 4).next_multiple_of(4096)
}

/// All staging buffers, at one epoch, as one rank sees them.
pub(crate) struct Staging<'a> {
    pub(super) pads: &'a RegionPads,
    pub(super) layout: Layout,
    pub(super) rank: usize,
    pub(super) epoch: u32,
}

impl Staging<'_> {
    /// Bytes that fit into the line of a flag.
    pub(crate) const TINY: usize = Layout::PAYLOAD;

    /// The [`Staging::TINY`] bytes that this rank has for rank `to`; null for a rank that is not in the group.
    #[inline]
    pub(crate) fn tiny_for(&self, to: usize) -> *mut u64 {
        self.tiny(to, self.rank)
    }

    /// Those that rank `from` has for this rank.
    #[inline]
    pub(crate) fn tiny_from(&self, from: usize) -> *const u64 {
        self.tiny(self.rank, from).cast_const()
    }

    #[inline]
    fn tiny(&self, owner: usize, source: usize) -> *mut u64 {
        let first = self.layout.payload(source, self.epoch);
        let words = self.pads.words.get(owner).and_then(|w| w.get(first..first + Self::TINY / 4));
        // Not through the first word alone: a pointer to one element reaches no further.
        words.map_or(std::ptr::null_mut(), |words| words.as_ptr().cast_mut().cast())
    }

    /// The [`STAGE`] bytes that rank `rank` has for all; null for a rank that is not in the group.
    #[inline]
    pub(crate) fn stage(&self, rank: usize) -> *mut u8 {
        let offset = (self.epoch & 1) as usize * STAGE;
        let stage =
            self.pads.stages.get(rank).and_then(|staging| staging.at::<u8>(offset, STAGE).ok());
        stage.map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr)
    }
}
