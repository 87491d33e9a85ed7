//! What a rank of a large group has, by the formulas of the library.

use super::flat::STAGE;
use super::{LANES, bytes_of};

/// Bytes from one slot of a pad to the next, and of a decision.
const SLOT: u64 = 128;
/// The words before a pad's decisions.
const FIRST: u64 = 4 * 32 + 3 * 16 + 4 * 40;
const DEFAULT_PAD: u64 = 32 * 72 * 4;
const PAGE: u64 = 4096;

/// Of a group of so many ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Connections of a rank to ranks of other hosts.
    pub(super) streams: u64,
    /// The user's channels in a pad of the default size, or in the smallest that the library takes.
    pub(super) channels: u64,
    /// Bytes of a pad with its staging buffers.
    pub(super) pad: u64,
    /// Bytes of a rank's copies of the pads of ranks on other hosts.
    pub(super) mirrors: u64,
    /// Connections that the whole job makes, and values that its ranks read from the store.
    pub(super) handshakes: u64,
    pub(super) reads: u64,
}

impl Limits {
    pub(super) fn of(hosts: u64) -> Self {
        let ranks = hosts * LANES as u64;
        let streams = ranks - LANES as u64;
        let channels = (DEFAULT_PAD / (4 * ranks)).max(1); // a smaller pad is refused
        let pad = pad(ranks, channels);
        let (handshakes, reads) = (ranks * streams / 2, 2 * ranks * ranks);
        Self { streams, channels, pad, mirrors: streams * pad, handshakes, reads }
    }

    pub(super) fn row(&self, hosts: u64) -> String {
        format!(
            "| {hosts} | {} | {} | {} | {} | {} | {} | {} |",
            self.streams,
            self.channels,
            bytes_of(self.pad),
            bytes_of(self.mirrors),
            bytes_of(self.mirrors * LANES as u64),
            self.handshakes,
            self.reads,
        )
    }
}

/// As `Layout::words` in `signal/layout.rs`, with the staging buffers behind it.
fn pad(ranks: u64, channels: u64) -> u64 {
    let generations = ranks + 64;
    let decided = FIRST + generations + generations * ranks.div_ceil(32) + ranks;
    let words = 4 * decided;
    let slots = words.next_multiple_of(SLOT) + (channels + 1) * ranks * SLOT;
    slots.next_multiple_of(PAGE) + 2 * STAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_grows_with_the_ranks() {
        let (few, many) = (Limits::of(8), Limits::of(1024));
        assert_eq!((few.streams, many.streams), (56, 8184));
        assert_eq!((few.handshakes, few.reads), (64 * 56 / 2, 2 * 64 * 64));
        assert_eq!((few.channels, many.channels), (36, 1));
        // 37 channels of 64 slots, two staging buffers, and some pages of decisions.
        assert!((37 * 64 * 128 + (256 << 10)..37 * 64 * 128 + (272 << 10)).contains(&few.pad));
    }
}
