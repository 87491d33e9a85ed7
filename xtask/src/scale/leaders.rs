//! One rank of each host speaks for the others, which it reaches through shared memory: a barrier, and all-reduces by
//! recursive doubling and of raw inputs.

use super::network::{Message, Network, Program};

/// What the leaders do once the ranks of their hosts have synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Everybody tells everybody.
    All,
    /// In rounds: to the host 2ᵏ further on, from that 2ᵏ before.
    Dissemination,
    /// In rounds: with the host whose number differs in bit k.
    Doubling,
}

/// Hosts of which a leader tells each.
const FEW: usize = 4;

const ENTERED: u64 = 1;
const GATHERED: u64 = 2;
const LEAVE: u64 = 3;
const FOLDED: u64 = 4;
const PREPARED: u64 = 5;
const END: u64 = 6;

pub(super) struct Leaders {
    way: Way,
    bytes: u64,
    /// Work of every rank before its leader sends, of a leader after each round, and of every rank at the end.
    before: u64,
    between: u64,
    after: u64,
    hosts: Vec<Host>,
}

#[derive(Clone, Default)]
struct Host {
    round: u32,
    /// What has come, by round.
    heard: Vec<usize>,
    is_ready: bool,
}

impl Leaders {
    pub(super) fn barrier(net: &Network) -> Self {
        let way = if net.hosts <= FEW { Way::All } else { Way::Dissemination };
        Self::of(net, way, 0, [0, 0, 0])
    }

    /// Each host reduces in its memory; leaders exchange and reduce what that made; everybody copies the result.
    pub(super) fn doubling(net: &Network, bytes: u64) -> Self {
        assert!(net.hosts.is_power_of_two());
        let (fold, store) = (net.costs.fold, net.costs.store);
        Self::of(net, Way::Doubling, bytes, [bytes * fold, 2 * bytes * fold, bytes * store])
    }

    /// Each host sends the inputs of its ranks to all others, and reduces all of them in rank order.
    pub(super) fn raw(net: &Network, bytes: u64) -> Self {
        let (ranks, lanes) = (net.real_ranks(), net.real_lanes());
        let after = (bytes * ranks).div_ceil(lanes) * net.costs.fold;
        Self::of(net, Way::All, bytes * lanes, [0, 0, after])
    }

    fn of(net: &Network, way: Way, bytes: u64, [before, between, after]: [u64; 3]) -> Self {
        let rounds = match way {
            Way::All => 1,
            Way::Dissemination | Way::Doubling => net.hosts.next_power_of_two().ilog2().max(1),
        };
        let host = Host { heard: vec![0; rounds as usize], ..Host::default() };
        Self { way, bytes, before, between, after, hosts: vec![host; net.hosts] }
    }

    fn send(&self, net: &mut Network, host: usize) {
        let (hosts, from) = (net.hosts, net.rank(host, 0));
        let round = self.hosts[host].round;
        let peers: Vec<usize> = match self.way {
            // Not all begin with the same one.
            Way::All => (1..hosts).map(|step| (host + step) % hosts).collect(),
            Way::Dissemination => vec![(host + (1 << round)) % hosts],
            Way::Doubling => vec![host ^ (1 << round)],
        };
        for peer in peers.into_iter().filter(|&peer| peer != host) {
            let to = net.rank(peer, 0);
            net.send(from, to, self.bytes, u64::from(round));
        }
    }

    fn look(&mut self, net: &mut Network, host: usize) {
        let expected = if self.way == Way::All { net.hosts - 1 } else { 1 };
        let state = &mut self.hosts[host];
        let Some(heard) = state.heard.get(state.round as usize) else { return };
        if state.is_ready && *heard == expected.min(net.hosts - 1) {
            state.is_ready = false;
            net.work(net.rank(host, 0), self.between, FOLDED);
        }
    }
}

impl Program for Leaders {
    fn start(&mut self, net: &mut Network) {
        (0..net.ranks()).for_each(|rank| net.host_barrier(rank, ENTERED));
    }

    fn received(&mut self, net: &mut Network, rank: usize, message: Message) {
        let host = net.host(rank);
        self.hosts[host].heard[message.tag as usize] += 1;
        self.look(net, host);
    }

    fn done(&mut self, net: &mut Network, rank: usize, tag: u64) {
        let (host, is_leader) = (net.host(rank), net.lane(rank) == 0);
        match tag {
            ENTERED if self.before > 0 => net.work(rank, self.before, PREPARED),
            PREPARED => net.host_barrier(rank, GATHERED),
            ENTERED | GATHERED if is_leader => {
                self.hosts[host].is_ready = true;
                self.send(net, host);
                self.look(net, host);
            }
            ENTERED | GATHERED => net.host_barrier(rank, LEAVE), // it waits there
            FOLDED => {
                let state = &mut self.hosts[host];
                state.round += 1;
                if (state.round as usize) < state.heard.len() {
                    state.is_ready = true;
                    self.send(net, host);
                    self.look(net, host);
                } else {
                    net.host_barrier(rank, LEAVE);
                }
            }
            LEAVE => net.work(rank, self.after, END),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::{HEADER, RDMA};
    use super::*;

    #[test]
    fn dissemination_takes_a_message_each_round() {
        for (hosts, rounds) in [(8, 3), (64, 6), (5, 3)] {
            let mut net = Network::new(RDMA, hosts, 1, 1);
            let mut barrier = Leaders::barrier(&net);
            let message = RDMA.send + RDMA.hop + HEADER * RDMA.link + RDMA.receive;
            assert_eq!(net.run(&mut barrier), rounds * message);
            assert_eq!(net.messages, rounds * hosts as u64);
        }
    }

    #[test]
    fn ranks_of_a_host_synchronise_before_and_after() {
        let time = |lanes| {
            let mut net = Network::new(RDMA, 8, lanes, 1);
            let mut barrier = Leaders::barrier(&net);
            net.run(&mut barrier)
        };
        assert_eq!(time(8) - time(1), 2 * RDMA.host_barrier(8));
    }

    #[test]
    fn raw_inputs_take_the_link_of_each_host() {
        let mut net = Network::new(RDMA, 8, 8, 1);
        let mut raw = Leaders::raw(&net, 1 << 20);
        let least = 7 * 8 * (1 << 20) * RDMA.link;
        let time = net.run(&mut raw);
        assert_eq!(net.messages, 8 * 7);
        let fold = 8 * (1 << 20) * RDMA.fold;
        assert!((least + fold..least + fold + 20_000_000).contains(&time), "{time} and {least}");
    }
}
