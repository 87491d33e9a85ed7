//! Which algorithm should be the fastest: a small cost model over whole numbers, so that all ranks of a group come to the
//! same answer. The counts of bytes and barriers behind it are in `docs/algorithms.md`.

use super::Algorithm;
use super::host::copy::Stores;
use crate::group::{DESK, Desk};
use crate::machine::{cores, last_cache};

/// What a rank pays, in nanoseconds. Measured on two cores that share no cache but the last; what counts is where the
/// algorithms cross, and that moves little between machines because all costs scale with the way between two cores.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// All ranks tell each other that they are there.
    exchange: u64,
    /// A line is written that peers have read the last time.
    laid: u64,
    /// A line is read that a peer has only just written.
    fresh: u64,
    /// A line is read that a peer has written a while ago.
    settled: u64,
    /// A line of a peer is read and written back in a stream of such.
    moved: u64,
}

impl Costs {
    fn among(ranks: usize, cores: usize) -> Self {
        let (ranks, cores) = (ranks as u64, cores.max(1) as u64);
        // Beyond the cores every rank of a core has to be let run once.
        let exchange = if ranks <= cores { 80 + 10 * ranks } else { 1000 * ranks.div_ceil(cores) };
        Self { exchange, laid: 5, fresh: 6, settled: 3, moved: 3 }
    }
}

/// What an algorithm should take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Which one.
    pub algorithm: Algorithm,
    /// Its time from the last rank's call to the last rank's return.
    pub nanoseconds: u64,
}

/// What each algorithm should take for an all-reduce in place of `bytes` between `ranks` of this machine.
pub fn all_reduce(bytes: usize, ranks: usize) -> [Estimate; 3] {
    estimate(bytes, ranks, cores())
}

fn estimate(bytes: usize, ranks: usize, cores: usize) -> [Estimate; 3] {
    let costs = Costs::among(ranks, cores);
    let lines = bytes.div_ceil(super::LINE) as u64;
    let (ranks, peers) = (ranks as u64, ranks.saturating_sub(1) as u64);
    let staged = if bytes <= Desk::TINY {
        costs.exchange // it travels in the line of the flag
    } else {
        let pieces = bytes.div_ceil(DESK) as u64;
        pieces * costs.exchange + lines * (costs.laid + peers * costs.fresh)
    };
    let one_shot = 3 * costs.exchange + lines * (peers * costs.fresh + costs.laid);
    let two_shot = 2 * costs.exchange + lines.div_ceil(ranks.max(1)) * peers * costs.moved;
    [
        Estimate { algorithm: Algorithm::Staged, nanoseconds: staged },
        Estimate { algorithm: Algorithm::OneShot, nanoseconds: one_shot },
        Estimate { algorithm: Algorithm::TwoShot, nanoseconds: two_shot },
    ]
}

/// The algorithm for an all-reduce in place of `bytes` between `ranks` of this machine; never `Auto`.
pub fn choose(bytes: usize, ranks: usize) -> Algorithm {
    // What travels in the line of the flag needs no thought, and has no time for any.
    if bytes <= Desk::TINY { Algorithm::Staged } else { quickest(all_reduce(bytes, ranks)) }
}

/// The first among equals.
fn quickest(estimates: [Estimate; 3]) -> Algorithm {
    estimates.iter().min_by_key(|e| e.nanoseconds).map_or(Algorithm::TwoShot, |e| e.algorithm)
}

/// Whether parts of `bytes` that are only read are better laid out beside the flags, which saves the closing barrier,
/// than read where they are, which saves laying them out.
pub fn is_small(bytes: usize, ranks: usize) -> bool {
    bytes <= Desk::TINY || small(bytes, ranks, cores())
}

fn small(bytes: usize, ranks: usize, cores: usize) -> bool {
    let costs = Costs::among(ranks, cores);
    let (lines, peers) = (bytes.div_ceil(super::LINE) as u64, ranks.saturating_sub(1) as u64);
    let laid = lines * (costs.laid + peers * (costs.fresh - costs.settled));
    bytes <= DESK && laid <= costs.exchange
}

/// Whether, of `bytes` that every rank has laid out, each rank better reduces all for itself than its share for all, which
/// takes an exchange more.
pub(super) fn at_once(bytes: usize, ranks: usize) -> bool {
    bytes <= Desk::TINY || at_once_on(bytes, ranks, cores())
}

fn at_once_on(bytes: usize, ranks: usize, cores: usize) -> bool {
    let costs = Costs::among(ranks, cores);
    let (lines, ranks) = (bytes.div_ceil(super::LINE) as u64, ranks.max(1) as u64);
    let peers = ranks - 1;
    let alone = lines * peers * costs.fresh;
    let shared = costs.exchange + lines.div_ceil(ranks) * (2 * peers * costs.fresh + costs.laid);
    alone <= shared
}

/// How a block of `bytes` is written: around the caches where it would not stay in them until it is read. The other
/// ranks copy at the same time, and what is copied wants its place too.
pub(super) fn stores(bytes: usize) -> Stores {
    if bytes >= 1 << 20 && bytes > last_cache() / 4 { Stores::Streaming } else { Stores::Cached }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(bytes: usize, ranks: usize, cores: usize) -> Algorithm {
        quickest(estimate(bytes, ranks, cores))
    }

    #[test]
    fn small_messages_travel_with_their_flag_and_large_ones_move_once_each_way() {
        for ranks in [2, 3, 8, 64] {
            assert_eq!(chosen(8, ranks, 64), Algorithm::Staged);
            assert_eq!(chosen(0, ranks, 64), Algorithm::Staged);
            assert_eq!(chosen(16 << 10, ranks, 64), Algorithm::TwoShot);
            assert_eq!(chosen(1 << 30, ranks, 64), Algorithm::TwoShot);
            assert!(is_small(24, ranks) && !small(8 << 10, ranks, 64));
        }
    }

    #[test]
    fn there_is_one_size_up_to_which_messages_are_small() {
        for (ranks, cores) in [(1, 2), (2, 2), (4, 2), (8, 8), (72, 2)] {
            let staged = |bytes: &usize| chosen(*bytes, ranks, cores) == Algorithm::Staged;
            let sizes: Vec<usize> = (0..20_000).step_by(8).collect();
            assert_eq!(sizes.iter().rposition(staged).map(|p| p + 1), {
                Some(sizes.iter().take_while(|b| staged(b)).count())
            });
            let small = |bytes: &&usize| **bytes <= Desk::TINY || small(**bytes, ranks, cores);
            assert_eq!(sizes.iter().filter(small).count(), sizes.iter().take_while(small).count());
        }
    }

    #[test]
    fn barriers_are_saved_longer_where_ranks_wait_for_a_core() {
        assert_eq!(chosen(2048, 4, 4), Algorithm::TwoShot);
        assert_eq!(chosen(2048, 4, 2), Algorithm::Staged);
    }

    #[test]
    fn more_than_two_ranks_share_the_work_on_what_is_large() {
        assert!(at_once_on(DESK, 2, 64) && at_once_on(64, 8, 64));
        assert!(!at_once_on(DESK, 4, 64) && !at_once_on(DESK, 72, 64));
        assert!(at_once_on(4096, 4, 2), "an exchange is dear where ranks share cores");
    }

    #[test]
    fn only_what_leaves_the_caches_is_written_around_them() {
        assert_eq!(stores(64 << 10), Stores::Cached);
        assert_eq!(stores(usize::MAX), Stores::Streaming);
    }
}
