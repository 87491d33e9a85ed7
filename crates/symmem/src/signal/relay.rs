//! Arrivals at the barriers of the sequence where hosts have several ranks: one message tells a host that a rank has arrived.
//!
//! A rank sends its arrival to one rank of each other host, its *counterpart* there: the one at the same place among the ranks of
//! its host, counted around if there are fewer. The others of that host take it from the counterpart's pad. Ranks of a host have
//! different counterparts, as far as possible, so all of them send and receive alike.
//!
//! An arrival must not overtake what its rank has sent before. So if the rank has sent something to others of a host since it last
//! told them itself, it tells all ranks of that host itself, and none of them takes the arrival from another one.
//!
//! A rank that waits for long asks those that it misses, and they answer it themselves. So a counterpart that is stopped makes
//! nobody take ranks for missing that have arrived.

use std::sync::PoisonError;
use std::time::Duration;

use super::{InvalidMessage, PadUpdate, Pads, Signals, Stop, Tiny};
use crate::sync::atomic::{AtomicBool, AtomicU32, fence};
use crate::sync::shared::AtomicU64;
use crate::sync::{Deadline, Ended, Mutex, Ordering, Word};

/// How long a wait continues after its deadline for the answers of ranks that it misses.
const ANSWERS: Duration = Duration::from_millis(20);
/// One look of so many is at all connections, not only at those on which the next arrivals should come. A power of two.
const LOOKS: u32 = 16;

/// The way of arrivals to and from one rank.
pub(super) struct Relays {
    /// The other hosts.
    hosts: Vec<Host>,
    /// By rank.
    peers: Vec<Peer>,
    /// The ranks of other hosts whose counterpart this rank is.
    heard: Vec<usize>,
    /// By rank: the barrier whose arrival came before the arrival at the barrier before it. Held while arrivals are stored in
    /// this rank's pad.
    early: Mutex<Vec<Option<u32>>>,
    /// Whether this rank told all ranks of a host itself of its last arrival. The others did so too, as a rule.
    told_all: AtomicBool,
    /// The last barrier at which this rank asked who is missing.
    asked: AtomicU32,
}

struct Host {
    ranks: Vec<usize>,
    counterpart: usize,
}

/// What concerns one other rank.
struct Peer {
    /// The rank of this host that is its counterpart.
    hearer: usize,
    /// How many messages it had been sent when this rank last told it of an arrival.
    told: AtomicU64,
    /// It waits for our arrival.
    waits: AtomicBool,
    /// The last barrier at which it said that it had not arrived.
    absent: AtomicU32,
}

impl Relays {
    /// Nothing where all ranks are on one host, or each is alone on its host.
    pub(super) fn new(pads: &impl Pads, rank: usize, ranks: usize) -> Option<Self> {
        let mut hosts: Vec<(usize, Vec<usize>)> = Vec::new();
        for other in 0..ranks {
            let number = pads.host(other);
            match hosts.iter_mut().find(|(host, _)| *host == number) {
                Some((_, there)) => there.push(other),
                None => hosts.push((number, vec![other])),
            }
        }
        if hosts.len() < 2 || hosts.iter().all(|(_, there)| there.len() == 1) {
            return None;
        }
        let place =
            |of| hosts.iter().find_map(|(_, there)| there.iter().position(|&rank| rank == of));
        let counterpart = |of: usize, there: &[usize]| {
            place(of).and_then(|place| there.get(place % there.len())).copied()
        };
        let (near, far): (Vec<_>, Vec<_>) =
            hosts.iter().map(|(_, there)| there).partition(|there| there.contains(&rank));
        let near = near.first()?;
        let host = |there: &&Vec<usize>| {
            Some(Host { ranks: there.to_vec(), counterpart: counterpart(rank, there)? })
        };
        let peer = |other| Peer {
            hearer: counterpart(other, near).unwrap_or(rank),
            told: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            absent: AtomicU32::new(0),
        };
        let peers: Vec<Peer> = (0..ranks).map(peer).collect();
        Some(Self {
            heard: far
                .iter()
                .flat_map(|there| there.iter().copied())
                .filter(|&other| peers[other].hearer == rank)
                .collect(),
            hosts: far.iter().filter_map(host).collect(),
            peers,
            early: Mutex::new(vec![None; ranks]),
            told_all: AtomicBool::new(true),
            asked: AtomicU32::new(0),
        })
    }
}

impl<P: Pads> Signals<P> {
    pub(super) fn relays_on(&self, channel: usize) -> Option<&Relays> {
        self.relays.as_ref().filter(|_| channel == self.sequence())
    }

    /// Receives messages, mostly from where the next arrivals should come.
    pub(super) fn progress(&self, look: u32) {
        let usual = self.relays.as_ref().filter(|relays| {
            !look.is_multiple_of(LOOKS) && !relays.told_all.load(Ordering::Relaxed)
        });
        self.pads.progress(usual.map_or(&self.far, |relays| &relays.heard));
    }

    /// Tells other hosts that this rank has arrived, after it has told the ranks of its own.
    pub(super) fn send_arrival(
        &self,
        relays: &Relays,
        (epoch, call): (u32, u32),
        tiny: Option<&Tiny>,
    ) {
        let (own, channel, layout) = (self.rank, self.sequence(), self.layout);
        // For answers.
        if let Some(tiny) = tiny {
            self.pads.write_tiny(own, layout.payload(own, epoch), tiny);
        }
        self.pads.word(own, layout.call(channel, own, epoch)).store(call, Ordering::Relaxed);
        let tell = |rank: usize, for_host: bool| {
            // Counted before the arrival is posted, so it comes after all that were counted.
            relays.peers[rank].told.store(self.pads.sent(rank), Ordering::Relaxed);
            let tiny = tiny.copied();
            let arrival = PadUpdate::Arrived { channel, epoch, call, tiny, for_host };
            self.pads.send_arrival(rank, &arrival);
        };
        let mut told_all = false;
        for Host { ranks, counterpart } in &relays.hosts {
            let has_something = |&rank: &usize| {
                let told = relays.peers[rank].told.load(Ordering::Relaxed);
                rank != *counterpart && self.pads.sent(rank) != told
            };
            if ranks.iter().any(has_something) {
                ranks.iter().for_each(|&rank| tell(rank, false));
                told_all = true;
            } else {
                tell(*counterpart, true);
            }
        }
        relays.told_all.store(told_all, Ordering::Relaxed);
        // Not before all have been told: an answer by another thread would overtake what goes with the arrival.
        // Release: pairs with the acquire in `apply_awaited`.
        self.pads.word(own, layout.epoch(channel, own)).store(epoch, Ordering::Release);
        // Pairs with that in `apply_awaited`: either it sees that we have arrived, or we see that the peer waits.
        fence(Ordering::SeqCst);
        for rank in self.far_peers() {
            let waits = &relays.peers[rank].waits;
            if waits.load(Ordering::Relaxed) {
                waits.store(false, Ordering::Relaxed);
                self.answer(rank, epoch);
            }
        }
    }

    /// Tells `to` itself of an arrival, at one of the last two barriers. No arrival counts as told by that, since nobody waits for
    /// an answer that has the arrival.
    fn answer(&self, to: usize, epoch: u32) {
        let (channel, own) = (self.sequence(), self.rank);
        let (call, tiny) = (self.call_at(channel, own, epoch), self.tiny_at(own, own, epoch));
        let (tiny, for_host) = (Some(tiny), false);
        self.pads.send(to, &PadUpdate::Arrived { channel, epoch, call, tiny, for_host });
    }

    fn tiny_at(&self, owner: usize, source: usize, epoch: u32) -> Tiny {
        let first = self.layout.payload(source, epoch);
        let word = |i: usize| u64::from(self.pads.word(owner, first + i).load(Ordering::Relaxed));
        std::array::from_fn(|i| word(2 * i) | word(2 * i + 1) << 32)
    }

    /// Tells all ranks of other hosts itself of its last two arrivals, before messages that must not overtake these.
    #[cold]
    pub(crate) fn tell_of_arrivals(&self) {
        let epoch = self.epoch();
        if self.relays.is_some() && epoch != 0 {
            for rank in self.far_peers() {
                self.answer(rank, epoch.wrapping_sub(1));
                self.answer(rank, epoch);
            }
        }
    }

    /// Whether `source` has reached `epoch`, by our pad or that of its counterpart on this host.
    pub(super) fn has_come(&self, channel: usize, source: usize, epoch: u32) -> bool {
        self.has_reached(channel, source, epoch)
            || self.relays_on(channel).is_some_and(|relays| self.adopt(relays, source, epoch))
    }

    /// Takes an arrival from the pad of the counterpart, if it is there.
    fn adopt(&self, relays: &Relays, source: usize, epoch: u32) -> bool {
        let hearer = relays.peers[source].hearer;
        if hearer == self.rank || !self.pads.is_far(source) {
            return false;
        }
        let known = self.pads.word(hearer, self.layout.known(source, epoch));
        // Acquire: pairs with the release in `store_arrival`.
        if known.load(Ordering::Acquire) != epoch {
            return false;
        }
        // Not rewritten before this rank has reached the next barrier.
        let call = self.pads.word(hearer, self.layout.call(self.sequence(), source, epoch));
        let arrived = (self.sequence(), epoch, call.load(Ordering::Relaxed));
        let tiny = self.tiny_at(hearer, source, epoch);
        self.store_arrival(relays, source, arrived, Some(&tiny), false).is_ok()
    }

    /// Stores an arrival of a rank of another host in our pad, unless it is there. One that comes before the arrival at the barrier
    /// before it counts only from then on.
    pub(super) fn store_arrival(
        &self,
        relays: &Relays,
        from: usize,
        (channel, epoch, call): (usize, u32, u32),
        tiny: Option<&Tiny>,
        for_host: bool,
    ) -> Result<(), InvalidMessage> {
        let mut early = relays.early.lock().unwrap_or_else(PoisonError::into_inner);
        let early = early.get_mut(from).ok_or(InvalidMessage)?;
        let flag = self.pads.word(self.rank, self.layout.epoch(channel, from));
        let later = epoch.wrapping_sub(flag.load(Ordering::Relaxed)) as i32;
        // It reaches no barrier before we have reached the one before.
        if later > 2 || (for_host && relays.peers[from].hearer != self.rank) {
            return Err(InvalidMessage);
        }
        if later > 0 && *early != Some(epoch) {
            if let Some(tiny) = tiny {
                self.pads.write_tiny(self.rank, self.layout.payload(from, epoch), tiny);
            }
            let word = self.pads.word(self.rank, self.layout.call(channel, from, epoch));
            word.store(call, Ordering::Relaxed);
        }
        match later {
            2 => *early = Some(epoch),
            // Release: pairs with the acquire in `is_flagged`, as in `arrive`.
            1 => flag.store(early.take().unwrap_or(epoch), Ordering::Release),
            _ => {}
        }
        if for_host && later >= 0 {
            let known = self.pads.word(self.rank, self.layout.known(from, epoch));
            known.store(epoch, Ordering::Release); // pairs with the acquire in `adopt`
        }
        Ok(())
    }

    /// Asks the ranks of other hosts that have not reached `epoch`, as far as this rank knows: once.
    #[cold]
    pub(super) fn ask_missing(&self, channel: usize, epoch: u32) {
        let Some(relays) = self.relays_on(channel) else { return };
        if relays.asked.load(Ordering::Relaxed) != epoch {
            relays.asked.store(epoch, Ordering::Relaxed);
            for rank in self.far_peers().filter(|&rank| !self.has_come(channel, rank, epoch)) {
                self.pads.send(rank, &PadUpdate::Awaited(epoch));
            }
        }
    }

    /// After a deadline: waits for the answers of those that were asked.
    #[cold]
    pub(super) fn await_answers(&self, channel: usize, epoch: u32) {
        let Some(relays) = self.relays_on(channel) else { return };
        let has_answered = |rank| {
            self.has_come(channel, rank, epoch)
                || relays.peers[rank].absent.load(Ordering::Relaxed) == epoch
        };
        let mut soon = Deadline::after(ANSWERS);
        self.wait(&mut soon, || self.far_peers().all(has_answered), || false, || true);
    }

    /// Answers rank `from`, which waits for us.
    pub(super) fn apply_awaited(&self, from: usize, epoch: u32) -> Result<(), InvalidMessage> {
        let peer = self.relays.as_ref().and_then(|relays| relays.peers.get(from));
        let peer = peer.ok_or(InvalidMessage)?;
        let word = self.pads.word(self.rank, self.layout.epoch(self.sequence(), self.rank));
        // Acquire: pairs with the release in `send_arrival`.
        let has_arrived = || word.load(Ordering::Acquire).wrapping_sub(epoch) as i32 >= 0;
        if !has_arrived() {
            peer.waits.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst); // pairs with that in `send_arrival`
        }
        match has_arrived() {
            true => self.answer(from, epoch),
            false => self.pads.send(from, &PadUpdate::NotArrived(epoch)),
        }
        Ok(())
    }

    pub(super) fn apply_not_arrived(&self, from: usize, epoch: u32) -> Result<(), InvalidMessage> {
        let peer = self.relays.as_ref().and_then(|relays| relays.peers.get(from));
        peer.ok_or(InvalidMessage)?.absent.store(epoch, Ordering::Relaxed);
        Ok(())
    }

    /// After a barrier of the sequence: waits until each rank of this host has received what it hears from other hosts up to their
    /// arrival there. That is so already, unless a rank has told this one itself. `lost` is as for a barrier.
    pub(crate) fn await_landed(
        &self,
        deadline: &mut Deadline,
        mut lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        let all_done = || self.far_peers().all(|source| self.has_landed(source));
        if all_done() {
            return Ok(());
        }
        let mut stop = Stop::Lost;
        let broken = || {
            if let Some(rank) = self.out_of_step() {
                stop = Stop::OutOfStep { rank };
                return true;
            }
            lost(&|rank| self.has_heard_all(rank))
        };
        match self.wait(deadline, all_done, broken, || true) {
            Ended::Ready => Ok(()),
            Ended::Broken => Err(stop),
            Ended::GivenUp(why, after) => {
                let missing: Vec<_> =
                    self.near_ranks().filter(|&rank| !self.has_heard_all(rank)).collect();
                if missing.is_empty() { Ok(()) } else { Err(Stop::GivenUp { why, after, missing }) }
            }
        }
    }

    /// The rank of this host that hears from `source`, of another one, for all of them.
    pub(super) fn hearer(&self, source: usize) -> Option<usize> {
        self.relays.as_ref()?.peers.get(source).map(|peer| peer.hearer)
    }

    /// Whether the hearer of `source` has received its arrival at the last barrier of the sequence, and so what `source` has sent it
    /// before.
    fn has_landed(&self, source: usize) -> bool {
        self.hearer(source).is_none_or(|hearer| {
            // Acquire: pairs with the release in `store_arrival`.
            self.is_flagged(hearer, self.sequence(), source, self.epoch())
        })
    }

    /// Whether nothing is awaited of a rank in [`Signals::await_landed`].
    pub(crate) fn has_heard_all(&self, rank: usize) -> bool {
        let mut heard = self.far_peers().filter(|&source| self.hearer(source) == Some(rank));
        heard.all(|source| self.has_landed(source))
    }

    /// Whether all ranks of this host have reached the barrier of the sequence before `epoch`.
    pub(crate) fn have_all_left(&self, epoch: u32) -> bool {
        let (channel, before) = (self.sequence(), epoch.wrapping_sub(1));
        self.near_ranks().all(|rank| self.has_reached(channel, rank, before))
    }

    /// Goes on from the barrier that all ranks have agreed on in a resynchronisation. Nobody is in a call.
    pub(super) fn reset_relays(&self, relays: &Relays) {
        let mut early = relays.early.lock().unwrap_or_else(PoisonError::into_inner);
        early.fill(None);
        for rank in self.peers() {
            let flag = self.pads.word(self.rank, self.layout.epoch(self.sequence(), rank));
            flag.store(self.epoch(), Ordering::Relaxed);
        }
    }
}
