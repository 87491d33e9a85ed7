//! Staging buffers, in which small collectives put the data that goes with their flags.
//!
//! A few bytes fit into the cache line of the flag, in the pad of each reader. More go behind the words of the writer's
//! own pad, once for all readers. All of these exist twice, for even and odd epochs: see `ChannelGuard::exchange`.
#![allow(unsafe_code)] // S2 (nobody reads before the flag), S3

use super::wire::Wire;
use crate::memory::region::{Region, Words};
use crate::signal::{Layout, PadUpdate, Pads, Tiny};
use crate::sync::SharedWord;

/// Bytes of a staging buffer. Each rank has two, for even and odd epochs.
pub(crate) const STAGE: usize = 128 << 10;

/// Where the staging buffers begin in a pad: on a page of their own.
pub(super) const fn staging_offset(layout: Layout) -> usize {
    (layout.words() * 4).next_multiple_of(4096)
}

/// The group's pads in mapped memory; for ranks of other hosts, mirrors of theirs.
pub(super) struct RegionPads {
    pub(super) words: Vec<Words>,
    /// Twice [`STAGE`] bytes each.
    pub(super) stages: Vec<Region>,
    /// The connections to ranks of other hosts, if there are any.
    pub(super) wire: Option<Wire>,
}

impl Pads for RegionPads {
    type Word = SharedWord;

    #[inline]
    fn word(&self, owner: usize, index: usize) -> &SharedWord {
        &self.words[owner][index]
    }

    #[inline]
    fn write_tiny(&self, owner: usize, index: usize, tiny: &Tiny) {
        let to = self.words[owner][index..index + 2 * tiny.len()].as_ptr().cast_mut().cast::<u64>();
        for (at, value) in tiny.iter().enumerate() {
            // Word by word, as the caller has written them: wider loads would wait until those stores are through.
            // SAFETY: S3: as many words, aligned; S2: the owner does not read them before our flag.
            unsafe { to.wrapping_add(at).write_volatile(*value) };
        }
    }

    fn is_far(&self, owner: usize) -> bool {
        self.wire.as_ref().is_some_and(|wire| wire.is_far(owner))
    }

    fn send(&self, to: usize, update: &PadUpdate) {
        if let Some(wire) = &self.wire {
            wire.send_update(to, update);
        }
    }

    fn progress(&self) {
        if let Some(wire) = &self.wire {
            wire.progress();
        }
    }
}

/// Bytes that a rank of another host finds in this rank's staging buffer, from byte `at` on.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) from: *const u8,
    pub(crate) bytes: usize,
    pub(crate) at: usize,
}

impl Sent {
    pub(crate) const NOTHING: Self = Self { from: std::ptr::null(), bytes: 0, at: 0 };
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

    /// The `bytes` bytes that rank `rank` has staged for this one.
    #[inline]
    pub(crate) fn of(&self, rank: usize, bytes: usize) -> *const u8 {
        if bytes <= Self::TINY { self.tiny(rank) } else { self.stage(rank).cast_const() }
    }

    /// This rank's own buffer, for more than [`Staging::TINY`] bytes.
    #[inline]
    pub(crate) fn own(&self) -> *mut u8 {
        self.stage(self.rank)
    }

    /// Sends ranks of other hosts what they read of this rank's staging buffer: to each what `sent` has for it. That need not be in
    /// the buffer itself, which only ranks of this host read. The arrival follows.
    ///
    /// # Safety
    /// The bytes may be read.
    pub(crate) unsafe fn send_far<R: IntoIterator<Item = Sent>>(&self, sent: impl Fn(usize) -> R) {
        let Some(wire) = &self.pads.wire else { return };
        for rank in wire.far_ranks() {
            for Sent { from, bytes, at } in sent(rank).into_iter().filter(|sent| sent.bytes > 0) {
                // SAFETY: as the caller promises.
                let data = unsafe { std::slice::from_raw_parts(from, bytes) };
                wire.stage(rank, self.epoch, at, data);
            }
        }
    }

    /// What came with the flag of rank `source`; null for a rank that is not in the group.
    #[inline]
    fn tiny(&self, source: usize) -> *const u8 {
        let first = self.layout.payload(source, self.epoch);
        let words = self.pads.words.get(self.rank);
        let words = words.and_then(|words| words.get(first..first + Self::TINY / 4));
        // Not through the first word alone: a pointer to one element reaches no further.
        words.map_or(std::ptr::null(), |words| words.as_ptr().cast())
    }

    /// The [`STAGE`] bytes that rank `rank` has for all; null for a rank that is not in the group.
    #[inline]
    fn stage(&self, rank: usize) -> *mut u8 {
        let offset = (self.epoch & 1) as usize * STAGE;
        let stage =
            self.pads.stages.get(rank).and_then(|staging| staging.at::<u8>(offset, STAGE).ok());
        stage.map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr)
    }
}
