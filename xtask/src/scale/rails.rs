//! All-reduces in which rank r of each host works on the r-th share of the data with ranks r of the other hosts: in two hops,
//! along a chain of hosts, and around a ring of them.

use super::network::{Message, Network, Program};

/// Bytes of a piece on its way along the chain.
pub(super) const CHUNK: u64 = 256 << 10;
const ELEMENT: u64 = 4;

/// Tags above those of pieces, which are numbers. That of a piece on its way back is `BACK` and its number.
const ENTERED: u64 = 1 << 40;
const REDUCED: u64 = 2 << 40;
const GATHERED: u64 = 3 << 40;
const STORED: u64 = 4 << 40;
const BACK: u64 = 5 << 40;

/// A share of `bytes` for each of `ranks`: its length, and how many have one.
fn shares(bytes: u64, ranks: u64) -> (u64, u64) {
    let share = bytes.div_ceil(ranks).next_multiple_of(ELEMENT);
    (share, bytes.div_ceil(share))
}

/// The owner of each share gets it from all hosts as it is, reduces it in rank order, and sends the result to all hosts.
pub(super) struct TwoHop {
    bytes: u64,
    share: u64,
    owners: u64,
    inputs: Vec<usize>,
    results: Vec<usize>,
    is_past_barrier: Vec<bool>,
    /// How many owners there are among the ranks of each lane.
    of_lane: Vec<usize>,
}

impl TwoHop {
    pub(super) fn new(net: &Network, bytes: u64) -> Self {
        let (share, owners) = shares(bytes, net.real_ranks());
        let none = vec![0; net.ranks()];
        let is_past_barrier = vec![false; net.ranks()];
        let of_lane = vec![0; net.lanes];
        let (inputs, results) = (none.clone(), none);
        let mut made = Self { bytes, share, owners, inputs, results, is_past_barrier, of_lane };
        for rank in (0..net.ranks()).filter(|&rank| made.owns(net, rank)).collect::<Vec<_>>() {
            made.of_lane[net.lane(rank)] += 1;
        }
        made
    }

    fn owns(&self, net: &Network, rank: usize) -> bool {
        ((rank * net.weight) as u64) < self.owners
    }

    fn look(&mut self, net: &mut Network, rank: usize) {
        let (lane, hosts) = (net.lane(rank), net.hosts);
        if self.owns(net, rank) && self.is_past_barrier[rank] && self.inputs[rank] == hosts - 1 {
            self.inputs[rank] = 0; // once
            let time = net.real_ranks() * self.share * net.costs.fold;
            return net.work(rank, time, REDUCED);
        }
        if self.is_past_barrier[rank] && self.results[rank] == self.of_lane[lane] {
            self.results[rank] = usize::MAX; // once
            net.host_barrier(rank, GATHERED);
        }
    }

    fn peers(net: &Network, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (hosts, host, lane, lanes) = (net.hosts, net.host(rank), net.lane(rank), net.lanes);
        (1..hosts).map(move |step| (host + step) % hosts * lanes + lane)
    }
}

impl Program for TwoHop {
    fn start(&mut self, net: &mut Network) {
        (0..net.ranks()).for_each(|rank| net.host_barrier(rank, ENTERED));
    }

    fn received(&mut self, net: &mut Network, rank: usize, message: Message) {
        match message.tag {
            ENTERED => self.inputs[rank] += 1,
            _ => self.results[rank] += 1,
        }
        self.look(net, rank);
    }

    fn done(&mut self, net: &mut Network, rank: usize, tag: u64) {
        match tag {
            ENTERED => {
                self.is_past_barrier[rank] = true;
                let bytes = net.real_lanes() * self.share;
                for to in Self::peers(net, rank) {
                    if self.owns(net, to) {
                        net.send(rank, to, bytes, ENTERED);
                    }
                }
                self.look(net, rank);
            }
            REDUCED => {
                self.results[rank] += 1;
                Self::peers(net, rank).for_each(|to| net.send(rank, to, self.share, REDUCED));
                self.look(net, rank);
            }
            GATHERED => net.work(rank, self.bytes * net.costs.store, STORED),
            _ => {}
        }
    }
}

/// The first host reduces its ranks' share, each next one goes on with its own, and the result comes back: piece by piece.
pub(super) struct Chain {
    chunk: u64,
    /// Of each rank's share, of which the first so many ranks of a host have one.
    chunks: u64,
    rails: u64,
    /// How many pieces of the result each rank has.
    stored: Vec<u64>,
}

impl Chain {
    pub(super) fn new(net: &Network, bytes: u64) -> Self {
        let (share, rails) = shares(bytes, net.real_lanes());
        let chunk = share.min(CHUNK);
        Self { chunk, chunks: share.div_ceil(chunk), rails, stored: vec![0; net.ranks()] }
    }

    fn has_share(&self, net: &Network, rank: usize) -> bool {
        ((net.lane(rank) * net.weight) as u64) < self.rails
    }

    fn fold(&self, net: &mut Network, rank: usize, chunk: u64) {
        net.work(rank, net.real_lanes() * self.chunk * net.costs.fold, chunk);
    }

    fn next(net: &Network, rank: usize) -> Option<usize> {
        (net.host(rank) + 1 < net.hosts).then_some(rank + net.lanes)
    }

    fn store(&mut self, net: &mut Network, rank: usize) {
        self.stored[rank] += 1;
        if self.stored[rank] == self.chunks {
            net.host_barrier(rank, GATHERED);
        }
    }

    /// Sends a piece of the result back.
    fn pass_back(&self, net: &mut Network, rank: usize, chunk: u64) {
        if net.host(rank) > 0 {
            net.send(rank, rank - net.lanes, self.chunk, BACK + chunk);
        }
    }
}

impl Program for Chain {
    fn start(&mut self, net: &mut Network) {
        (0..net.ranks()).for_each(|rank| net.host_barrier(rank, ENTERED));
    }

    fn received(&mut self, net: &mut Network, rank: usize, message: Message) {
        match message.tag.checked_sub(BACK) {
            None => self.fold(net, rank, message.tag),
            Some(chunk) => {
                self.pass_back(net, rank, chunk);
                net.work(rank, net.real_lanes() * self.chunk * net.costs.store, STORED);
            }
        }
    }

    fn done(&mut self, net: &mut Network, rank: usize, tag: u64) {
        match tag {
            ENTERED if !self.has_share(net, rank) => net.host_barrier(rank, GATHERED),
            ENTERED if net.host(rank) == 0 => {
                (0..self.chunks).for_each(|c| self.fold(net, rank, c))
            }
            ENTERED | GATHERED => {}
            STORED => self.store(net, rank),
            chunk => match Self::next(net, rank) {
                Some(next) => net.send(rank, next, self.chunk, chunk),
                // The last host has the result: reducing it has stored it.
                None => {
                    self.pass_back(net, rank, chunk);
                    self.store(net, rank);
                }
            },
        }
    }
}

/// Each host reduces in its memory. Then ranks r pass segments of their share around, reducing them, and around again.
pub(super) struct Ring {
    segment: u64,
    rails: u64,
    share: u64,
    bytes: u64,
    /// How many segments each rank has got, and how many came before it was ready.
    steps: Vec<usize>,
    early: Vec<usize>,
    is_ready: Vec<bool>,
}

impl Ring {
    pub(super) fn new(net: &Network, bytes: u64) -> Self {
        let (share, rails) = shares(bytes, net.real_lanes());
        let (segment, _) = shares(share, net.hosts as u64);
        let none = vec![0; net.ranks()];
        let is_ready = vec![false; net.ranks()];
        Self { segment, rails, share, bytes, steps: none.clone(), early: none, is_ready }
    }

    fn has_share(&self, net: &Network, rank: usize) -> bool {
        ((net.lane(rank) * net.weight) as u64) < self.rails
    }

    fn pass_on(&self, net: &mut Network, rank: usize) {
        let to = (rank + net.lanes) % net.ranks();
        net.send(rank, to, self.segment, 0);
    }

    fn take(&mut self, net: &mut Network, rank: usize) {
        let reduces = self.steps[rank] < net.hosts - 1;
        let cost = if reduces { 2 * net.costs.fold } else { net.costs.store };
        net.work(rank, self.segment * cost, REDUCED);
    }
}

impl Program for Ring {
    fn start(&mut self, net: &mut Network) {
        (0..net.ranks()).for_each(|rank| net.host_barrier(rank, ENTERED));
    }

    fn received(&mut self, net: &mut Network, rank: usize, _: Message) {
        match self.is_ready[rank] {
            true => self.take(net, rank),
            false => self.early[rank] += 1,
        }
    }

    fn done(&mut self, net: &mut Network, rank: usize, tag: u64) {
        match tag {
            ENTERED if !self.has_share(net, rank) => net.host_barrier(rank, GATHERED),
            ENTERED => net.work(rank, net.real_lanes() * self.share * net.costs.fold, BACK),
            BACK => {
                self.is_ready[rank] = true;
                self.pass_on(net, rank);
                for _ in 0..std::mem::take(&mut self.early[rank]) {
                    self.take(net, rank);
                }
            }
            REDUCED => {
                self.steps[rank] += 1;
                match self.steps[rank] == 2 * (net.hosts - 1) {
                    true => net.host_barrier(rank, GATHERED),
                    false => self.pass_on(net, rank),
                }
            }
            GATHERED => net.work(rank, self.bytes * net.costs.store, STORED),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::{Costs, HEADER, RDMA};
    use super::*;

    /// Links and nothing else.
    const BARE: Costs = Costs { send: 0, receive: 0, fold: 0, store: 0, ..RDMA };

    #[test]
    fn a_chain_of_two_hosts_passes_pieces_both_ways_at_once() {
        for chunks in [1, 2, 40] {
            let mut net = Network::new(BARE, 2, 1, 1);
            let mut chain = Chain::new(&net, chunks * CHUNK);
            let wire = (CHUNK + HEADER) * BARE.link;
            assert_eq!(net.run(&mut chain), 2 * (wire + BARE.hop) + (chunks - 1) * wire);
            assert_eq!(net.messages, 2 * chunks);
        }
    }

    /// A host within the chain sends each piece twice.
    #[test]
    fn a_long_chain_is_as_fast_as_the_links_within_it() {
        let (hosts, chunks) = (5, 400);
        let mut net = Network::new(BARE, hosts, 1, 1);
        let mut chain = Chain::new(&net, chunks * CHUNK);
        let time = net.run(&mut chain) as f64;
        let wire = ((CHUNK + HEADER) * BARE.link) as f64;
        let least = 2.0 * chunks as f64 * wire;
        assert!((1.0..1.1).contains(&(time / least)), "{}", time / least);
    }

    #[test]
    fn a_ring_takes_two_rounds_of_segments() {
        let (hosts, segment) = (6, 1 << 14);
        let mut net = Network::new(BARE, hosts, 1, 1);
        let mut ring = Ring::new(&net, segment * hosts as u64);
        let step = (segment + HEADER) * BARE.link + BARE.hop;
        assert_eq!(net.run(&mut ring), 10 * step);
        assert_eq!(net.messages, 10 * 6);
    }

    #[test]
    fn two_hops_bring_a_host_p_and_one_shares_of_the_data() {
        let (hosts, lanes, bytes) = (4, 4, 1 << 24);
        let mut net = Network::new(BARE, hosts, lanes, 1);
        let mut hops = TwoHop::new(&net, bytes);
        let time = net.run(&mut hops) as f64;
        assert_eq!(net.messages, 2 * 16 * 3);
        let least = (3.0 / 4.0 * 5.0) * (bytes * BARE.link) as f64;
        assert!((1.0..1.15).contains(&(time / least)), "{}", time / least);
    }

    /// With few elements, few ranks have a share; all of them end.
    #[test]
    fn few_elements_are_reduced_too() {
        let ends = |mut net: Network, mut program: Box<dyn FnMut(&mut Network) -> u64>| {
            assert!(program(&mut net) > 0);
        };
        for bytes in [4, 8, 100] {
            let net = || Network::new(RDMA, 4, 4, 1);
            ends(net(), Box::new(move |net| net.run(&mut TwoHop::new(net, bytes))));
            ends(net(), Box::new(move |net| net.run(&mut Chain::new(net, bytes))));
            ends(net(), Box::new(move |net| net.run(&mut Ring::new(net, bytes))));
        }
    }
}
