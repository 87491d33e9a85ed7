//! What the library does today: every rank tells every rank of the other hosts. A barrier, and an all-reduce in pieces through
//! the staging buffers.

use super::network::{Message, Network, Program};

/// Bytes of a staging buffer.
pub(super) const STAGE: u64 = 128 << 10;
/// Bytes that come with an arrival.
const TINY: u64 = 24;
/// Bytes at whose multiples work is divided.
const LINE: u64 = 64;
/// The longest piece of what is staged that is one message, and what goes with the arrival.
const DATA: u64 = (60 << 10) - 128;
const HELD: u64 = 16 << 10;

const DATA_TAG: u64 = 1;
const ARRIVED: u64 = 2;

/// A rank's part in one exchange after another.
#[derive(Default, Clone)]
struct Rank {
    exchange: usize,
    /// Arrivals that it has heard, by exchange.
    heard: Vec<u64>,
    is_past_barrier: bool,
}

/// What one exchange stages for each of the other ranks, and the work after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Bytes that each rank sends to each rank of the others, of which the first `reads` read any.
    bytes: u64,
    reads: u64,
    /// Of which the first `writes` send any.
    writes: u64,
    /// Time that the ranks work on what they have got, those that have anything to do.
    work: u64,
}

pub(super) struct Flat {
    steps: Vec<Step>,
    ranks: Vec<Rank>,
}

impl Flat {
    pub(super) fn barrier(net: &Network) -> Self {
        Self::of(net, vec![Step { bytes: 0, reads: 0, writes: 0, work: 0 }])
    }

    /// So many pieces of the all-reduce of `bytes`, and how many there are.
    pub(super) fn all_reduce(net: &Network, bytes: u64, most: u64) -> (Self, u64, u64) {
        let pieces = bytes.div_ceil(STAGE).max(1);
        let simulated = pieces.min(most);
        let steps = Self::piece(net, bytes.min(STAGE));
        let steps = (0..simulated).flat_map(|_| steps.clone()).collect();
        (Self::of(net, steps), simulated, pieces)
    }

    fn of(net: &Network, steps: Vec<Step>) -> Self {
        let rank = Rank { heard: vec![0; steps.len()], ..Rank::default() };
        Self { steps, ranks: vec![rank; net.ranks()] }
    }

    fn piece(net: &Network, bytes: u64) -> Vec<Step> {
        let (ranks, costs) = (net.real_ranks(), net.costs);
        if bytes <= TINY || at_once(bytes, ranks) {
            let work = ranks * bytes * costs.fold;
            return vec![Step { bytes: bytes.max(TINY), reads: ranks, writes: ranks, work }];
        }
        let share = bytes.div_ceil(ranks).next_multiple_of(LINE);
        let owners = bytes.div_ceil(share);
        vec![
            Step { bytes: share, reads: owners, writes: ranks, work: ranks * share * costs.fold },
            Step { bytes: share, reads: ranks, writes: owners, work: bytes * costs.store },
        ]
    }

    /// Sends what this exchange stages, and then arrives.
    fn enter(&mut self, net: &mut Network, rank: usize) {
        let step = self.steps[self.ranks[rank].exchange];
        let alike = net.weight as u64;
        let writes = Self::is_among(net, rank, step.writes);
        let staged = |net: &Network, to| match writes && Self::is_among(net, to, step.reads) {
            true => alike * step.bytes,
            false => 0,
        };
        let is_held = step.bytes < HELD;
        for to in Self::far(net, rank).filter(|_| !is_held) {
            let (bytes, count) = (staged(net, to), alike * step.bytes.div_ceil(DATA));
            if bytes > 0 {
                net.send_some(Message { from: rank, to, bytes, count, tag: DATA_TAG });
            }
        }
        let tag = ARRIVED + self.ranks[rank].exchange as u64;
        for to in Self::far(net, rank) {
            let bytes = if is_held { staged(net, to) } else { 0 };
            net.send_some(Message { from: rank, to, bytes, count: alike, tag });
        }
        net.host_barrier(rank, tag);
    }

    /// The ranks of other hosts, in their order; one of each host where it stands for all of them.
    fn far(net: &Network, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (host, lanes) = (net.host(rank), net.lanes);
        (0..net.ranks()).filter(move |to| to / lanes != host)
    }

    /// Whether a rank is one of the first so many.
    fn is_among(net: &Network, rank: usize, first: u64) -> bool {
        ((rank * net.weight) as u64) < first
    }

    /// Goes on, if all have come.
    fn look(&mut self, net: &mut Network, rank: usize) {
        let far = ((net.hosts - 1) * net.lanes) as u64;
        let state = &self.ranks[rank];
        let Some(step) = self.steps.get(state.exchange) else { return };
        if state.is_past_barrier && state.heard[state.exchange] == far {
            let works = step.reads == 0 || Self::is_among(net, rank, step.reads);
            self.ranks[rank].is_past_barrier = false;
            net.work(rank, if works { step.work } else { 0 }, 0);
        }
    }
}

/// Whether each rank reduces all of a piece itself: as `at_once` in `collectives/plan.rs`, with `Rates::between_hosts`.
fn at_once(bytes: u64, ranks: u64) -> bool {
    let (exchange, fresh, staged) = (7_000_000, 20_000, 2_000);
    let (lines, fetched) = (bytes.div_ceil(LINE), (ranks - 1) * fresh);
    lines * fetched <= exchange + lines.div_ceil(ranks) * (2 * fetched + staged)
}

impl Program for Flat {
    fn start(&mut self, net: &mut Network) {
        (0..net.ranks()).for_each(|rank| self.enter(net, rank));
    }

    fn received(&mut self, net: &mut Network, rank: usize, message: Message) {
        if message.tag >= ARRIVED {
            self.ranks[rank].heard[(message.tag - ARRIVED) as usize] += 1;
            self.look(net, rank);
        }
    }

    fn done(&mut self, net: &mut Network, rank: usize, tag: u64) {
        if tag >= ARRIVED {
            self.ranks[rank].is_past_barrier = true;
            return self.look(net, rank);
        }
        self.ranks[rank].exchange += 1;
        if self.ranks[rank].exchange < self.steps.len() {
            self.enter(net, rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::{MESH, RDMA, TCP};
    use super::*;

    #[test]
    fn small_pieces_are_reduced_at_once_and_large_ones_in_shares() {
        assert!(at_once(64, 64) && at_once(16 << 10, 2) && !at_once(16 << 10, 64));
        let net = Network::new(RDMA, 64, 8, 1);
        let [reduce, gather] = Flat::piece(&net, 16 << 10)[..] else { panic!() };
        // Not more shares than lines.
        assert_eq!((reduce.bytes, reduce.reads, reduce.writes), (64, 256, 512));
        assert_eq!((gather.bytes, gather.reads, gather.writes), (64, 512, 256));
    }

    #[test]
    fn every_rank_tells_every_rank_of_other_hosts() {
        let mut net = Network::new(RDMA, 3, 4, 1);
        let mut flat = Flat::barrier(&net);
        net.run(&mut flat);
        assert_eq!(net.messages, 12 * 8);
    }

    /// Ranks of a host that stand for each other take as long as they would themselves.
    #[test]
    fn folded_ranks_take_as_long() {
        for costs in [RDMA, TCP, MESH] {
            let time = |lanes, weight| {
                let mut net = Network::new(costs, 32, lanes, weight);
                let (mut flat, ..) = Flat::all_reduce(&net, 1 << 16, 2);
                (net.run(&mut flat) as f64, net.messages)
            };
            let ((alone, messages), (folded, same)) = (time(4, 1), time(1, 4));
            assert_eq!(messages, same);
            assert!((0.8..1.25).contains(&(folded / alone)), "{costs:?}: {folded} and {alone}");
        }
    }
}
