//! Staging buffers, in which small collectives put the data that goes with their flags.
//!
//! A few bytes fit into the cache line of the flag, in the pad of each reader. More go behind the words of the writer's
//! own pad, once for all readers. All of these exist twice, for even and odd epochs: see `ChannelGuard::exchange`.
#![allow(unsafe_code)] // S2 (nobody reads before the flag), S3

use super::wire::Wire;
use crate::memory::region::{Region, Words};
use crate::signal::{Layout, PadUpdate, Pads, Tiny};
use crate::sync::SharedWord;

/// Bytes of a staging buffer, at least. Each rank has two, for even and odd epochs.
pub(crate) const STAGE: usize = 128 << 10;

/// The same, at most, where all ranks share a host, and those of all its ranks together as far as [`STAGE`] bytes a buffer permit:
/// pads take their memory when they are made.
const LARGE: usize = 256 << 10;
const ALL_LARGE: usize = 2 << 20;

/// Bytes of a staging buffer of a group whose ranks share a host.
pub(super) fn stage_within_host(ranks: usize) -> usize {
    (ALL_LARGE / ranks.max(1) / PAGE * PAGE).clamp(STAGE, LARGE)
}

/// Bytes of a staging buffer of a group that spans hosts, at most. Each piece costs an exchange over the network; but longer ones leave
/// the caches before they are read.
pub const PIECE: usize = 352 << 10;

const PAGE: usize = 4096;

/// Bytes of all mirrors of a rank, as far as [`STAGE`] bytes a buffer permit; and of those that it shares with its host.
const ALL_MIRRORED: usize = 8 << 20;
const ALL_SHARED: usize = 32 << 20;

/// The most bytes of a staging buffer of a group of ranks on several hosts: for these there is room in their pads.
pub(super) fn room(ranks: usize, hosts: usize, has_relays: bool) -> usize {
    let mirrored = (ALL_MIRRORED / 2 / ranks.saturating_sub(1).max(1)).clamp(STAGE, PIECE);
    let shared = if has_relays { ALL_SHARED / 2 / hosts.max(1) } else { PIECE };
    (mirrored.min(shared) / PAGE * PAGE).max(PAGE)
}

/// Bytes of a staging buffer of such a group; the same on all its ranks. What two exchanges send a rank, and what it has not
/// acknowledged before, fits the `window` of what may be under way to it. Otherwise the end of a call's data would be sent when its
/// sender looks at the connection again, and that may be long after the call.
pub(super) fn stage_between_hosts(room: usize, window: u64) -> usize {
    let fits = usize::try_from(window / 16 * 7).unwrap_or(usize::MAX);
    (room.min(fits) / PAGE * PAGE).max(PAGE)
}

/// Two staging buffers: where the one for an exchange begins, and how long it is.
pub(super) fn buffer(both: &Region, epoch: u32) -> (usize, usize) {
    let each = both.bytes() / 2;
    ((epoch & 1) as usize * each, each)
}

/// Where the staging buffers begin in a pad: on a page of their own.
pub(super) const fn staging_offset(layout: Layout) -> usize {
    (layout.words() * 4).next_multiple_of(PAGE)
}

/// The group's pads in mapped memory; for ranks of other hosts, mirrors of theirs.
pub(super) struct RegionPads {
    pub(super) words: Vec<Words>,
    /// By rank: both staging buffers. [`stage_within_host`] or [`room`] says for how many bytes each has room;
    /// mirrors have it for as many as [`Wire`] says.
    pub(super) stages: Vec<Region>,
    /// By rank, where hosts have as many ranks each, and several: the mirror of a rank of another host that its counterpart here has.
    /// It lies behind the counterpart's own buffers.
    pub(super) relayed: Vec<Option<Region>>,
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

    fn host(&self, rank: usize) -> usize {
        self.wire.as_ref().map_or(0, |wire| wire.host(rank))
    }

    fn sent(&self, to: usize) -> u64 {
        self.wire.as_ref().map_or(0, |wire| wire.sent(to))
    }

    fn send(&self, to: usize, update: &PadUpdate) {
        if let Some(wire) = &self.wire {
            wire.send_update(to, update);
        }
    }

    fn send_arrival(&self, to: usize, arrival: &PadUpdate) {
        if let Some(wire) = &self.wire {
            wire.send_arrival(to, arrival);
        }
    }

    fn has_arrived(&self) {
        if let Some(wire) = &self.wire {
            wire.forget_staged();
        }
    }

    fn progress(&self, from: &[usize]) {
        if let Some(wire) = &self.wire {
            wire.progress(from);
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
    /// the buffer itself, which only ranks of this host read. They go with the arrival, which follows.
    ///
    /// # Safety
    /// The bytes may be read until this rank has arrived.
    pub(crate) unsafe fn send_far<R: IntoIterator<Item = Sent>>(&self, sent: impl Fn(usize) -> R) {
        let Some(wire) = &self.pads.wire else { return };
        for rank in wire.far_ranks() {
            for Sent { from, bytes, at } in sent(rank).into_iter().filter(|sent| sent.bytes > 0) {
                // SAFETY: as the caller promises.
                let data = unsafe { std::slice::from_raw_parts(from, bytes) };
                // SAFETY: as the caller promises.
                unsafe { wire.stage(rank, self.epoch, at, data) };
            }
        }
    }

    /// The number of the exchange.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What rank `rank`, of another host, has sent to its counterpart here, from where this one may read it once it has landed; null if
    /// there is no such rank, or if it has no counterpart at its place.
    pub(crate) fn relayed(&self, rank: usize) -> *const u8 {
        let mirror = self.pads.relayed.get(rank).and_then(Option::as_ref);
        let first = mirror.and_then(|both| {
            let (first, bytes) = buffer(both, self.epoch);
            both.at::<u8>(first, bytes).ok()
        });
        first.map_or(std::ptr::null(), |first| first.as_ptr().cast_const())
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

    /// What rank `rank` has for all; null for a rank that is not in the group.
    #[inline]
    fn stage(&self, rank: usize) -> *mut u8 {
        let stage = self.pads.stages.get(rank).and_then(|both| {
            let (first, bytes) = buffer(both, self.epoch);
            both.at::<u8>(first, bytes).ok()
        });
        stage.map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{MOST, WIDEST, WINDOW, cost_of};

    #[test]
    fn two_pieces_fit_the_window_and_all_mirrors_a_bound() {
        for ranks in [2, 3, 9, 10, 32, 33, 1000] {
            for window in [WINDOW, WINDOW + 12_345, 500_000, WIDEST] {
                let stage = stage_between_hosts(room(ranks, ranks, false), window);
                let messages = stage.div_ceil(MOST - 64) as u64;
                let piece = stage as u64 + messages * cost_of(0);
                assert!(2 * piece + window / 16 + cost_of(1000) <= window, "{stage} of {window}");
                assert!(stage >= 100 << 10 && stage.is_multiple_of(PAGE));
                assert!(stage <= STAGE || 2 * stage * (ranks - 1) <= ALL_MIRRORED);
            }
        }
        assert_eq!(stage_between_hosts(room(2, 2, false), WIDEST), PIECE);
        assert_eq!(stage_between_hosts(room(2, 2, false), 0), PAGE, "whatever a peer says");
    }

    #[test]
    fn staging_buffers_of_one_host_are_longer_where_few_ranks_have_them() {
        assert_eq!([1, 2, 8].map(stage_within_host), [LARGE; 3]);
        assert_eq!([16, 17, 1000].map(stage_within_host), [STAGE; 3]);
        assert!((1..100).all(|ranks| stage_within_host(ranks).is_multiple_of(PAGE)));
    }

    #[test]
    fn a_rank_of_many_hosts_shares_no_more_than_a_bound_with_its_own() {
        for hosts in [2, 3, 8, 100, 1000] {
            let room = room(8 * hosts, hosts, true);
            assert!(2 * room * hosts <= ALL_SHARED && room.is_multiple_of(PAGE), "{hosts}");
        }
        assert!(room(256, 128, true) >= STAGE);
    }
}
