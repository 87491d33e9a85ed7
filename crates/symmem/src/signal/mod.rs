//! The protocols of barrier and signals over the pads of a group.
//!
//! Each rank has one pad, which all ranks of the group map. A rank waits only on words of its own pad
//! (but for a `put` whose slot is still full). The code is generic over the word type, so that loom
//! explores the very code that runs: see `tests/loom.rs`.

mod layout;

use std::cell::Cell;
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::atomic::{AtomicBool, AtomicU32, fence};
use crate::sync::{
    Bell, Deadline, Ended, Mutex, Ordering, Patience, Word, current_core, fence_after_replace,
    yield_now,
};
pub use layout::Layout;

/// The pads of all ranks of a group, as one of them sees them.
pub trait Pads: Send + Sync {
    /// What a pad consists of.
    type Word: Word;
    /// Word `index` (from [`Layout`]) of the pad of rank `owner`.
    fn word(&self, owner: usize, index: usize) -> &Self::Word;
}

/// Why a wait ended without success.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// A peer was lost, or the group is poisoned.
    Interrupted,
    /// The deadline came first.
    Expired {
        /// How long the wait took.
        after: Duration,
        /// Who had not come.
        missing: Vec<usize>,
    },
    /// A rank made another call than we.
    Differs {
        /// Which one.
        rank: usize,
        /// Its call.
        theirs: u32,
    },
}

/// A rank's own count of barriers on one channel.
struct Channel {
    epoch: AtomicU32,
    /// What we called when we reached it.
    call: AtomicU32,
    /// On which core that was, where ranks outnumber the cores.
    core: AtomicU32,
    /// The last barrier was left by a deadline: the next call goes on with it.
    unfinished: AtomicBool,
    /// One thread at a time.
    busy: AtomicBool,
}

/// Barrier and signals of one rank over its group's pads.
pub struct Signals<P> {
    pads: P,
    rank: usize,
    layout: Layout,
    patience: Patience,
    channels: Vec<Channel>,
    /// One thread at a time makes this rank's proposal.
    deciding: Mutex<()>,
}

impl<P: Pads> Signals<P> {
    pub(crate) fn new(pads: P, rank: usize, layout: Layout, patience: Patience) -> Self {
        let channel = || Channel {
            epoch: AtomicU32::new(0),
            call: AtomicU32::new(0),
            core: AtomicU32::new(0),
            unfinished: AtomicBool::new(false),
            busy: AtomicBool::new(false),
        };
        let channels = std::iter::repeat_with(channel).take(layout.channels + 1).collect();
        Self { pads, rank, layout, patience, channels, deciding: Mutex::new(()) }
    }

    /// One rank that has held `epoch` barriers on every channel, and sleeps when `looks` looks were in vain.
    /// All ranks of a group are made alike, before any of them begins.
    #[cfg(any(test, loom))]
    pub fn modelled(pads: P, rank: usize, layout: Layout, epoch: u32, looks: u32) -> Self {
        let signals = Self::new(pads, rank, layout, Patience::looks(looks));
        for (channel, state) in signals.channels.iter().enumerate() {
            state.epoch.store(epoch, Ordering::Relaxed);
            for owner in 0..layout.ranks {
                let slot = signals.pads.word(owner, layout.epoch(channel, rank));
                slot.store(epoch, Ordering::Relaxed);
            }
        }
        signals
    }

    pub(crate) fn bell(&self, rank: usize) -> Bell<'_, P::Word> {
        Bell {
            rings: self.pads.word(rank, Layout::RINGS),
            sleepers: self.pads.word(rank, Layout::SLEEPERS),
        }
    }

    /// All that any rank wrote before its call is seen by every rank after it.
    ///
    /// `call` says what the caller is about; ranks that call different things are told so, all of them.
    /// After `Expired` the same call goes on waiting for the same barrier; another one waits for it first.
    #[cfg(any(test, loom))]
    pub fn barrier(
        &self,
        channel: usize,
        call: u32,
        deadline: Deadline,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.exchange(channel, call, deadline, interrupted, |_, _| (), |_| ())
    }

    /// As `barrier`, with data: `write(r, e)` lays out what rank r shall find at epoch e, for ourselves first and for
    /// each peer just before its flag; `read(e)` takes up what all have laid out.
    ///
    /// What was laid out for e may be overwritten for e + 2 and not before: whoever writes for e + 2 has passed e + 1,
    /// which all ranks reach only when they have read e. A call that goes on with an expired one writes nothing: what
    /// it had laid out then still counts, for all ranks.
    #[inline]
    pub fn exchange<R>(
        &self,
        channel: usize,
        call: u32,
        deadline: Deadline,
        mut interrupted: impl FnMut() -> bool,
        write: impl FnMut(usize, u32),
        read: impl FnOnce(u32) -> R,
    ) -> Result<R, Stop> {
        let state = &self.channels[channel];
        let _turn = self.take_turn(state, deadline)?;
        if state.unfinished.load(Ordering::Relaxed) && state.call.load(Ordering::Relaxed) != call {
            self.finish_other(channel, deadline, &mut interrupted)?;
        }
        let epoch = self.arrive(channel, call, write);
        self.await_all(channel, epoch, deadline, &mut interrupted)?;
        self.same_call(channel, call, epoch)?;
        Ok(read(epoch)) // while it is our turn: another thread of ours would let peers go on and overwrite it
    }

    /// Has the lines brought over in which peers will look for our next flag on `channel`. That takes as long as an
    /// exchange has to be prepared, and the two need not wait for each other.
    #[inline]
    pub(crate) fn reach_out(&self, channel: usize) {
        for peer in (0..self.layout.ranks).filter(|&r| r != self.rank) {
            self.pads.word(peer, self.layout.epoch(channel, self.rank)).fetch_to_write();
        }
    }

    pub(crate) fn pads(&self) -> (&P, Layout) {
        (&self.pads, self.layout)
    }

    /// Waits for the barrier of an earlier call. Whoever made it has given up on it; our peers have not, and are counting.
    #[cold]
    fn finish_other(
        &self,
        channel: usize,
        deadline: Deadline,
        interrupted: &mut impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let epoch = self.channels[channel].epoch.load(Ordering::Relaxed);
        self.await_all(channel, epoch, deadline, interrupted)
    }

    /// Waits until all have reached the epoch that we have reached.
    #[inline(always)] // what comes after the last flag is what the peers wait for next
    fn await_all(
        &self,
        channel: usize,
        epoch: u32,
        deadline: Deadline,
        interrupted: &mut impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let (next, ranks) = (Cell::new(0), self.layout.ranks);
        let all_here = || {
            while next.get() < ranks && self.has_reached(channel, next.get(), epoch) {
                next.set(next.get() + 1);
            }
            next.get() == ranks
        };
        let in_the_way = || self.is_in_the_way(channel, next.get(), epoch);
        let bell = self.bell(self.rank);
        match bell.wait(self.patience, deadline, all_here, interrupted, in_the_way) {
            Ended::Ready => {
                self.channels[channel].unfinished.store(false, Ordering::Relaxed);
                Ok(())
            }
            Ended::Interrupted => Err(Stop::Interrupted),
            Ended::Expired(after) => {
                Err(Stop::Expired { after, missing: self.missing(channel, epoch) })
            }
        }
    }

    #[cold]
    fn missing(&self, channel: usize, epoch: u32) -> Vec<usize> {
        (0..self.layout.ranks).filter(|&r| !self.has_reached(channel, r, epoch)).collect()
    }

    /// Whether one of the ranks from `first` on that have not reached `epoch` was last seen on our core.
    fn is_in_the_way(&self, channel: usize, first: usize, epoch: u32) -> bool {
        let core = self.channels[channel].core.load(Ordering::Relaxed);
        (first..self.layout.ranks).filter(|&r| !self.has_reached(channel, r, epoch)).any(|r| {
            let theirs = self.pads.word(self.rank, self.layout.core(channel, r));
            [0, core].contains(&theirs.load(Ordering::Relaxed)) // a hint; zero before its first barrier
        })
    }

    #[inline]
    fn take_turn<'a>(&self, state: &'a Channel, deadline: Deadline) -> Result<Turn<'a>, Stop> {
        // Acquire: pairs with the release of the thread before us, whose counts we read.
        if state.busy.swap(true, Ordering::Acquire) {
            self.await_turn(state, deadline)?;
        }
        Ok(Turn(&state.busy))
    }

    #[cold]
    fn await_turn(&self, state: &Channel, deadline: Deadline) -> Result<(), Stop> {
        let deadline = deadline.start();
        while state.busy.swap(true, Ordering::Acquire) {
            if deadline.expired() {
                let missing = vec![self.rank]; // another thread of our own holds the channel
                return Err(Stop::Expired { after: deadline.elapsed(), missing });
            }
            yield_now();
        }
        Ok(())
    }

    /// Publishes our arrival, or finds that we have arrived already in an earlier, expired call.
    #[inline]
    fn arrive(&self, channel: usize, call: u32, mut write: impl FnMut(usize, u32)) -> u32 {
        let state = &self.channels[channel];
        let epoch = state.epoch.load(Ordering::Relaxed);
        if state.unfinished.load(Ordering::Relaxed) {
            return epoch;
        }
        let epoch = epoch.wrapping_add(1);
        state.epoch.store(epoch, Ordering::Relaxed);
        state.call.store(call, Ordering::Relaxed);
        state.unfinished.store(true, Ordering::Relaxed);
        // By value: whatever the stores below touch, these need not be read again.
        let (rank, layout, crowded) = (self.rank, self.layout, self.patience.crowded);
        let peers = || (0..layout.ranks).filter(|&r| r != rank);
        let core = if crowded { current_core() } else { 0 };
        state.core.store(core, Ordering::Relaxed);
        write(rank, epoch);
        for peer in peers() {
            write(peer, epoch);
            if crowded {
                let word = self.pads.word(peer, layout.core(channel, rank));
                word.store(core, Ordering::Relaxed);
            }
            let call_word = self.pads.word(peer, layout.call(channel, rank, epoch));
            call_word.store(call, Ordering::Relaxed);
            // Release: pairs with the acquire in `has_reached` and publishes `call`, the payload and all data.
            let slot = self.pads.word(peer, layout.epoch(channel, rank));
            slot.store(epoch, Ordering::Release);
        }
        fence(Ordering::SeqCst); // pairs with the fence of a peer about to sleep, see `Bell`
        for peer in peers() {
            self.bell(peer).ring_if_asleep();
        }
        epoch
    }

    #[inline]
    fn has_reached(&self, channel: usize, source: usize, epoch: u32) -> bool {
        if source == self.rank {
            return true;
        }
        let slot = self.pads.word(self.rank, self.layout.epoch(channel, source));
        // Acquire: pairs with the release in `arrive`. The difference is at most 1 either way.
        slot.load(Ordering::Acquire).wrapping_sub(epoch) as i32 >= 0
    }

    /// Whether all made the same call. Each rank compares all with its own, so either all agree or all find out.
    fn same_call(&self, channel: usize, call: u32, epoch: u32) -> Result<(), Stop> {
        for rank in (0..self.layout.ranks).filter(|&r| r != self.rank) {
            let word = self.pads.word(self.rank, self.layout.call(channel, rank, epoch));
            let theirs = word.load(Ordering::Relaxed); // ordered by `has_reached`
            if theirs != call {
                return Err(Stop::Differs { rank, theirs });
            }
        }
        Ok(())
    }

    /// Puts a signal into our slot on rank `to`; waits while the last one is unconsumed.
    #[inline]
    pub fn put(
        &self,
        to: usize,
        channel: usize,
        deadline: Deadline,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let slot = self.pads.word(to, self.layout.signal(channel, self.rank));
        self.put_in(slot, to, deadline, interrupted)
    }

    /// Takes the signal that rank `from` put for us; waits until there is one.
    #[inline]
    pub fn wait(
        &self,
        from: usize,
        channel: usize,
        deadline: Deadline,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let slot = self.pads.word(self.rank, self.layout.signal(channel, from));
        self.take_from(slot, from, deadline, interrupted)
    }

    /// As `put`, in any word that rank `to` waits on by [`Signals::take_from`]: 0 → 1, release.
    #[inline]
    pub fn put_in(
        &self,
        slot: &P::Word,
        to: usize,
        deadline: Deadline,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        // Release: pairs with the acquire in `take_from`. One attempt without looking first: it brings the
        // line over for writing at once. Later attempts look first, and leave the line with its owner.
        let put = || slot.replace(0, 1, Ordering::SeqCst);
        // While data stores are on their way, the line can be as well: an exchange would wait for them first.
        slot.fetch_to_write();
        if !put() {
            self.wait_for(
                to,
                deadline,
                || slot.load(Ordering::Relaxed) == 0 && put(),
                interrupted,
            )?;
        }
        fence_after_replace(); // pairs with the fence of a peer about to sleep, see `Bell`
        self.bell(to).ring_if_asleep();
        Ok(())
    }

    /// As `wait`, on any word of our own: 1 → 0, acquire.
    #[inline]
    pub fn take_from(
        &self,
        slot: &P::Word,
        from: usize,
        deadline: Deadline,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let take = || {
            // The line comes over for writing in one go instead of first for reading.
            slot.fetch_to_write();
            // Acquire: pairs with the release in `put_in`.
            slot.load(Ordering::Relaxed) == 1 && slot.replace(1, 0, Ordering::SeqCst)
        };
        self.wait_for(from, deadline, take, interrupted)?;
        fence_after_replace(); // pairs with the fence of a putter about to sleep until the slot is free
        self.bell(from).ring_if_asleep();
        Ok(())
    }

    pub(crate) fn wait_for(
        &self,
        peer: usize,
        deadline: Deadline,
        ready: impl FnMut() -> bool,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        match self.bell(self.rank).wait(self.patience, deadline, ready, interrupted, || true) {
            Ended::Ready => Ok(()),
            Ended::Interrupted => Err(Stop::Interrupted),
            Ended::Expired(after) => Err(Stop::Expired { after, missing: vec![peer] }),
        }
    }

    /// The rank whose loss was noted in our pad, by us or by a peer.
    #[inline]
    pub fn poisoned(&self) -> Option<usize> {
        // Acquire: pairs with the release in `poison`; what the lost rank wrote before is seen.
        let poison = self.pads.word(self.rank, Layout::POISON).load(Ordering::Acquire);
        (poison as usize).checked_sub(1)
    }

    /// Notes the loss of a rank in every pad and wakes everyone; the first loss noted stays.
    pub fn poison(&self, lost: usize) {
        let others = || (0..self.layout.ranks).filter(|&r| r != lost);
        // All are told before one is woken: it might leave because of this, and be missed by one not told yet.
        for rank in others() {
            self.pads.word(rank, Layout::POISON).replace(0, lost as u32 + 1, Ordering::Release);
        }
        others().for_each(|rank| self.bell(rank).ring());
    }

    /// Agrees on who takes part in a generation of the group: all ranks that ask get the same answer.
    ///
    /// A single compare-and-swap decides. The memory outlives whoever dies on the way, so nobody waits for anybody.
    pub fn decide(&self, generation: usize, taking_part: impl Fn(usize) -> bool) -> Vec<usize> {
        let _turn = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let decision = self.pads.word(0, self.layout.decision(generation));
        // Once decided, a proposal may be the winning one and must stay as it is.
        let open = decision.load(Ordering::Acquire) == 0;
        for i in (0..self.layout.bitmap()).filter(|_| open) {
            let bits = (0..32)
                .filter(|b| 32 * i + b < self.layout.ranks && taking_part(32 * i + b))
                .fold(0, |bits, b| bits | 1 << b);
            let word = self.pads.word(self.rank, self.layout.proposal(generation, i));
            word.store(bits, Ordering::Relaxed);
        }
        // Release publishes our proposal if it wins; acquire reads the winner's.
        decision.replace(0, self.rank as u32 + 1, Ordering::AcqRel);
        let winner = decision.load(Ordering::Acquire) as usize - 1;
        let takes_part = |&rank: &usize| {
            let word = self.pads.word(winner, self.layout.proposal(generation, rank / 32));
            word.load(Ordering::Relaxed) & 1 << (rank % 32) != 0
        };
        (0..self.layout.ranks).filter(takes_part).collect()
    }
}

/// The right to use a channel, until dropped.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
