//! Which algorithm should be the fastest: a small cost model over whole numbers, so that all ranks of a group come to the
//! same answer: they all reckon with the costs of the group's rank 0. The counts of bytes and barriers behind it are in
//! `docs/algorithms.md`.

use super::Algorithm;
use super::host::copy::Stores;
use crate::dtype::{DType, Kind, ReduceOp};
pub use crate::group::PIECE;
use crate::group::{STAGE, Staging};
use crate::machine::{Costs, Rates, cores, last_cache};

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
    estimate(&here(ranks), bytes, ranks)
}

/// The algorithm for an all-reduce in place of `bytes` between `ranks` of this machine; never `Auto`.
pub fn choose(bytes: usize, ranks: usize) -> Algorithm {
    // What travels in the line of the flag needs no thought, and has no time for any.
    if bytes <= Staging::TINY { Algorithm::Staged } else { quickest(&here(ranks), bytes, ranks) }
}

/// Whether parts of `bytes` that are only read are better staged next to the flags, which saves the closing barrier,
/// than read where they are, which saves staging them; between `ranks` of this machine.
pub fn is_small(bytes: usize, ranks: usize) -> bool {
    bytes <= Staging::TINY || small(&here(ranks), bytes, ranks)
}

/// What a rank pays in a group of `ranks` whose rank 0 is this process.
fn here(ranks: usize) -> Rates {
    Costs::here().among(ranks, cores())
}

/// The same, where the ranks are on several hosts.
fn here_between_hosts(spread: &Spread) -> Rates {
    let per_host = spread.ranks.div_ceil(spread.hosts.max(1));
    Costs::here().between_hosts(per_host, spread.ranks, cores())
}

pub(super) fn estimate(rates: &Rates, bytes: usize, ranks: usize) -> [Estimate; 3] {
    let picoseconds = picoseconds(rates, bytes, ranks);
    std::array::from_fn(|i| Estimate {
        algorithm: ALGORITHMS[i],
        nanoseconds: picoseconds[i].div_ceil(1000),
    })
}

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Staged, Algorithm::OneShot, Algorithm::TwoShot];

/// Lines that a core takes from a peer at once. Each that is staged beyond waits for the one before: about as long as two
/// lines take in a stream.
const AT_ONCE: u64 = 16;

/// By algorithm, as above.
fn picoseconds(rates: &Rates, bytes: usize, ranks: usize) -> [u64; 3] {
    let lines = bytes.div_ceil(super::LINE) as u64;
    let (ranks, peers) = (ranks as u64, ranks.saturating_sub(1) as u64);
    // Costs come from a file: whatever it says, this does not overflow.
    let all = |each: u64| lines.saturating_mul(each);
    let fetched = all(rates.staged + peers * rates.fresh);
    let staged = if bytes <= Staging::TINY {
        rates.exchange // it travels in the line of the flag
    } else {
        let pieces = bytes.div_ceil(STAGE) as u64;
        let dearer = (2 * rates.moved).saturating_sub(rates.staged);
        let late = lines.saturating_sub(AT_ONCE).saturating_mul(dearer);
        pieces.saturating_mul(rates.exchange).saturating_add(fetched).saturating_add(late)
    };
    let one_shot = (3 * rates.exchange).saturating_add(fetched);
    let share = lines.div_ceil(ranks.max(1));
    let two_shot = (2 * rates.exchange).saturating_add(share.saturating_mul(peers * rates.moved));
    [staged, one_shot, two_shot]
}

/// The algorithm that should be the fastest by these rates; the first among equals.
pub(super) fn quickest(rates: &Rates, bytes: usize, ranks: usize) -> Algorithm {
    let [staged, one_shot, two_shot] = picoseconds(rates, bytes, ranks);
    if staged <= one_shot.min(two_shot) {
        Algorithm::Staged
    } else if one_shot <= two_shot {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShot
    }
}

/// How an all-reduce of a group that spans hosts is done. All ways give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Across {
    /// Every rank sends all elements to all ranks of other hosts.
    Raw,
    /// Every rank sends all elements to one rank of each host, which passes them on to the others there.
    RawRelayed,
    /// Every rank sends each share of the elements to the rank that reduces it, which sends the result to all ranks.
    TwoHops,
    /// The same; but the result goes to one rank of each host, and its ranks pass it on to each other.
    TwoHopsRelayed,
    /// The hosts reduce one after the other, each its own ranks' elements on top of what those before have reduced.
    Chain,
}

/// How ranks lie on hosts, and what they reduce.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// All ranks.
    pub ranks: usize,
    /// Their hosts.
    pub hosts: usize,
    /// Every host has as many ranks.
    pub is_even: bool,
    /// What was reduced of the first ranks can be passed on: the ranks of each host follow each other, and the elements are computed
    /// in their own type.
    pub can_chain: bool,
    /// Bytes of a staging buffer.
    pub stage: usize,
}

impl Spread {
    /// Each of several ranks of a host has one on each other.
    fn has_counterparts(&self) -> bool {
        self.is_even && self.ranks > self.hosts
    }

    fn is_possible(&self, way: Across) -> bool {
        let is_even = self.has_counterparts();
        match way {
            Across::Raw | Across::TwoHops => true,
            Across::RawRelayed | Across::TwoHopsRelayed => is_even,
            Across::Chain => is_even && self.can_chain,
        }
    }
}

/// What each possible way between hosts should take for an all-reduce of `bytes`, the quickest first.
pub fn across(bytes: usize, spread: &Spread) -> Vec<(Across, u64)> {
    let mut all: Vec<_> = possible(&here_between_hosts(spread), bytes, spread)
        .map(|(way, picoseconds)| (way, picoseconds.div_ceil(1000)))
        .collect();
    all.sort_by_key(|(_, time)| *time);
    all
}

/// Whether a partial result of this type is passed on from host to host as it is. An average divides at the end; some types are
/// computed in wider ones, of which a partial result would have to be.
pub fn is_passed_on(dtype: DType, op: ReduceOp) -> bool {
    let is_whole = match dtype.kind() {
        Kind::Float => dtype.size() >= size_of::<f32>(),
        Kind::Signed | Kind::Unsigned | Kind::Complex => true,
        Kind::Bool | Kind::Struct => false,
    };
    is_whole && op != ReduceOp::Average
}

/// Whether blocks of `bytes` that all ranks read cross to each host once, and its ranks read them there.
pub fn crosses_once(bytes: usize, spread: &Spread) -> bool {
    bytes > Staging::TINY && spread.has_counterparts()
}

/// The way between hosts that should be the fastest by these rates; the first among equals.
pub(super) fn quickest_across(rates: &Rates, bytes: usize, spread: &Spread) -> Across {
    possible(rates, bytes, spread).min_by_key(|(_, time)| *time).map_or(Across::TwoHops, |it| it.0)
}

fn possible(rates: &Rates, bytes: usize, spread: &Spread) -> impl Iterator<Item = (Across, u64)> {
    let (rates, spread) = (*rates, *spread);
    use Across::{Chain, Raw, RawRelayed, TwoHops, TwoHopsRelayed};
    [Raw, RawRelayed, TwoHops, TwoHopsRelayed, Chain]
        .into_iter()
        .filter(move |way| spread.is_possible(*way))
        .map(move |way| (way, picoseconds_across(&rates, bytes, &spread, way)))
}

/// By the exchanges that follow each other, and the lines that cross to a host.
fn picoseconds_across(rates: &Rates, bytes: usize, spread: &Spread, way: Across) -> u64 {
    let [ranks, hosts, bytes, stage] =
        [spread.ranks.max(1), spread.hosts.max(1), bytes, spread.stage]
            .map(|number| number as u128);
    let here = ranks.div_ceil(hosts);
    let far = ranks - here;
    // How many exchanges follow the last chunk; how often all data crosses to a host, in parts of the ranks.
    let (steps, crossing) = match way {
        Across::Raw => (0, here * far * ranks),
        Across::RawRelayed => (0, far * ranks),
        Across::TwoHops => (1, 2 * here * far),
        Across::TwoHopsRelayed => (1, (here + 1) * far),
        Across::Chain => (2 * hosts - 2, hosts.min(3).saturating_sub(1) * ranks),
    };
    // How often a rank reads all data to reduce it, or to put results where they belong; in halves.
    let read = match way {
        Across::Raw | Across::RawRelayed => 2 * ranks,
        Across::TwoHops if here == 1 => 3, // results come to their place
        _ => 4,
    };
    let chunks = bytes.div_ceil(stage.max(1)).max(1);
    let whole = bytes.div_ceil(super::LINE as u128);
    let lines = whole.saturating_mul(crossing) / ranks;
    let time = (chunks + steps).saturating_mul(rates.exchange.into());
    let time = time.saturating_add(lines.saturating_mul(rates.moved.into()));
    let time =
        time.saturating_add(whole.saturating_mul(read).saturating_mul(rates.staged.into()) / 2);
    u64::try_from(time).unwrap_or(u64::MAX)
}

pub(super) fn small(rates: &Rates, bytes: usize, ranks: usize) -> bool {
    let (lines, peers) = (bytes.div_ceil(super::LINE) as u64, ranks.saturating_sub(1) as u64);
    let staged = rates.staged + peers * rates.fresh.saturating_sub(rates.settled);
    bytes <= STAGE && lines * staged <= rates.exchange
}

/// Whether, of `bytes` that every rank has staged, each rank better reduces all for itself than its share for all, which
/// takes an exchange more.
pub(super) fn at_once(rates: &Rates, bytes: usize, ranks: usize) -> bool {
    let (lines, ranks) = (bytes.div_ceil(super::LINE) as u64, ranks.max(1) as u64);
    let fetched = (ranks - 1) * rates.fresh;
    let alone = lines.saturating_mul(fetched);
    let share = lines.div_ceil(ranks).saturating_mul(2 * fetched + rates.staged);
    alone <= rates.exchange.saturating_add(share)
}

/// How a block of `bytes` is written: around the caches where it would not stay in them until it is read. The other
/// ranks copy at the same time, and what is copied wants its place too.
pub(super) fn stores(bytes: usize) -> Stores {
    if bytes >= 1 << 20 && bytes > last_cache() / 4 { Stores::Streaming } else { Stores::Cached }
}

/// How the results of a reduction of `bytes` are written to `destinations`. Those that are also sources are in the cache,
/// unless the data of all ranks together is far too much for it.
pub(super) fn results(bytes: usize, destinations: usize) -> Stores {
    match destinations {
        0 | 1 => stores(bytes),
        _ if bytes.saturating_mul(destinations) > 2 * last_cache() => Stores::Streaming,
        _ => Stores::Cached,
    }
}

/// How `bytes` are written to a staging buffer. Peers have its old contents in their caches. As many lines as a core has
/// stores under way are taken back from there all at once; beyond, each would wait for the one before.
pub(super) fn staging(bytes: usize) -> Stores {
    if bytes > 2048 { Stores::Passed } else { Stores::Cached }
}

/// What a piece costs in exchanges: besides its own, both copies begin anew, and it takes some lines until they come in a stream.
const PER_PIECE: u64 = 4;

/// In how many pieces ranks best copy `bytes` that one rank stages for them: while they copy one, it stages the next. So all
/// takes as long as one piece more than there are.
pub(super) fn relay_pieces(rates: &Rates, bytes: usize) -> usize {
    let staged = (bytes.div_ceil(super::LINE) as u64).saturating_mul(rates.staged);
    let piece = rates.exchange.saturating_mul(PER_PIECE).max(1);
    usize::try_from((staged / piece).isqrt()).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(ranks: usize, cores: usize) -> Rates {
        Costs::BUILT_IN.among(ranks, cores)
    }

    fn chosen(bytes: usize, ranks: usize, cores: usize) -> Algorithm {
        quickest(&rates(ranks, cores), bytes, ranks)
    }

    #[test]
    fn small_messages_travel_with_their_flag_and_large_ones_move_once_each_way() {
        for ranks in [2, 3, 8, 64] {
            assert_eq!(chosen(8, ranks, 64), Algorithm::Staged);
            assert_eq!(chosen(0, ranks, 64), Algorithm::Staged);
            assert_eq!(chosen(16 << 10, ranks, 64), Algorithm::TwoShot);
            assert_eq!(chosen(1 << 30, ranks, 64), Algorithm::TwoShot);
            assert!(is_small(24, ranks) && !small(&rates(ranks, 64), 8 << 10, ranks));
        }
    }

    #[test]
    fn there_is_one_size_up_to_which_messages_are_small() {
        for (ranks, cores) in [(1, 2), (2, 2), (4, 2), (8, 8), (72, 2)] {
            let rates = rates(ranks, cores);
            let staged = |bytes: &usize| chosen(*bytes, ranks, cores) == Algorithm::Staged;
            let sizes: Vec<usize> = (0..20_000).step_by(8).collect();
            assert_eq!(sizes.iter().rposition(staged).map(|p| p + 1), {
                Some(sizes.iter().take_while(|b| staged(b)).count())
            });
            let small = |bytes: &&usize| **bytes <= Staging::TINY || small(&rates, **bytes, ranks);
            assert_eq!(sizes.iter().filter(small).count(), sizes.iter().take_while(small).count());
        }
    }

    /// The sizes up to which an all-reduce is staged, and up to which parts that are only read are.
    fn crossings(costs: Costs) -> [usize; 2] {
        let rates = costs.among(4, 8);
        let staged = |bytes: &usize| quickest(&rates, *bytes, 4) == Algorithm::Staged;
        let is_small = |bytes: &usize| small(&rates, *bytes, 4);
        [(0..STAGE).take_while(staged).count(), (0..STAGE).take_while(is_small).count()]
    }

    #[test]
    fn a_cost_that_grows_moves_the_crossing_away_from_those_who_pay_it() {
        let usual = Costs::BUILT_IN;
        let [reduced, read] = crossings(usual);
        assert!(reduced > 64 && read > 64);
        let [later, read_later] = crossings(Costs { exchange: 800_000, ..usual });
        assert!(later > reduced && read_later > read, "barriers are saved longer");
        let [flags, _] = crossings(Costs { flag: 100_000, ..usual });
        assert!(flags > reduced);
        for dearer in [Costs { staged: 20_000, ..usual }, Costs { fresh: 20_000, ..usual }] {
            let [sooner, read_sooner] = crossings(dearer);
            assert!(sooner < reduced && read_sooner < read, "{dearer:?}");
        }
        let [moved, _] = crossings(Costs { moved: 20_000, ..usual });
        assert!(moved > reduced);
        let [_, settled] = crossings(Costs { settled: 5_000, ..usual });
        assert!(settled > read);
        assert_eq!(crossings(Costs { switch: 1, ..usual }), [reduced, read], "all have a core");
    }

    #[test]
    fn what_is_relayed_goes_in_more_pieces_the_longer_it_is_and_the_cheaper_they_are() {
        let pieces = |bytes| relay_pieces(&rates(2, 2), bytes);
        assert_eq!([0, 8, 16 << 10, 128 << 10, 1 << 20].map(pieces), [1, 1, 1, 3, 9]);
        let dear = Costs { exchange: 10_000_000, ..Costs::BUILT_IN }.among(2, 2);
        assert_eq!(relay_pieces(&dear, 1 << 20), 1);
        let free = Costs { exchange: 0, flag: 0, staged: u32::MAX, ..Costs::BUILT_IN }.among(2, 2);
        assert!(relay_pieces(&free, usize::MAX) > 1, "whatever the costs file says");
    }

    const TWO_BY_TWO: Spread =
        Spread { ranks: 4, hosts: 2, is_even: true, can_chain: true, stage: STAGE };

    fn between(spread: &Spread) -> Rates {
        Costs::BUILT_IN.between_hosts(spread.ranks / spread.hosts, spread.ranks, 64)
    }

    #[test]
    fn between_hosts_exchanges_count_at_first_and_then_the_bytes_that_cross() {
        let way = |bytes, spread: Spread| quickest_across(&between(&spread), bytes, &spread);
        assert_eq!(way(64, TWO_BY_TWO), Across::RawRelayed);
        assert_eq!(way(64, Spread { is_even: false, ..TWO_BY_TWO }), Across::Raw);
        assert_eq!(way(16 << 20, TWO_BY_TWO), Across::Chain);
        let narrow = Spread { can_chain: false, ..TWO_BY_TWO };
        assert_eq!(way(16 << 20, narrow), Across::TwoHopsRelayed);
        assert_eq!(way(16 << 20, Spread { is_even: false, ..narrow }), Across::TwoHops);
        let alone = Spread { ranks: 2, ..TWO_BY_TWO };
        assert_eq!(way(16 << 10, alone), Across::Raw, "as many bytes as two hops");
        assert_eq!(way(16 << 20, alone), Across::TwoHops, "each reduces its share alone");
        let many = Spread { ranks: 32, hosts: 8, ..TWO_BY_TWO };
        assert_eq!(way(64 << 20, many), Across::Chain);
    }

    #[test]
    fn what_all_ranks_read_crosses_once_to_hosts_with_as_many_ranks_each() {
        let once = |spread: Spread| crosses_once(64, &spread);
        assert!(once(TWO_BY_TWO) && !crosses_once(Staging::TINY, &TWO_BY_TWO));
        assert!(!once(Spread { ranks: 2, ..TWO_BY_TWO }), "nobody to pass it on to");
        assert!(!once(Spread { is_even: false, ..TWO_BY_TWO }));
    }

    #[test]
    fn senseless_costs_lead_to_some_plan() {
        for cost in [0, u32::MAX] {
            let rates = Rates::from_words([cost; Rates::WORDS]);
            for (ranks, hosts) in [(1, 1), (4, 2), (4096, 512)] {
                let spread = Spread { ranks, hosts, ..TWO_BY_TWO };
                quickest_across(&rates, usize::MAX, &spread);
            }
            for (bytes, ranks) in [(25, 1), (1 << 20, 2), (usize::MAX, 4096)] {
                assert_ne!(quickest(&rates, bytes, ranks), Algorithm::Auto);
                small(&rates, bytes, ranks);
            }
        }
    }

    #[test]
    fn barriers_are_saved_longer_where_ranks_wait_for_a_core() {
        assert_eq!(chosen(2048, 4, 4), Algorithm::TwoShot);
        assert_eq!(chosen(2048, 4, 2), Algorithm::Staged);
    }

    #[test]
    fn more_than_two_ranks_share_the_work_on_what_is_large() {
        let at_once = |bytes, ranks, cores| at_once(&rates(ranks, cores), bytes, ranks);
        assert!(at_once(STAGE, 2, 64) && at_once(64, 8, 64));
        assert!(!at_once(STAGE, 4, 64) && !at_once(STAGE, 72, 64));
        assert!(at_once(4096, 4, 2), "an exchange is dear where ranks share cores");
    }

    #[test]
    fn only_what_leaves_the_caches_is_written_around_them() {
        assert_eq!(stores(64 << 10), Stores::Cached);
        assert_eq!(stores(usize::MAX), Stores::Streaming);
        assert_eq!(results(16 << 20, 1), stores(16 << 20));
        assert_eq!(results(64 << 10, 2), Stores::Cached);
        assert_eq!(results(usize::MAX, 2), Stores::Streaming);
    }
}
