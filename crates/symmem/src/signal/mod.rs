//! The protocols of barrier and signals over the pads of a group.
//!
//! Each rank has one pad, which all ranks of the group map. A rank waits only on words of its own pad
//! (except in a `put` whose slot is still full, and between hosts: `relay.rs`). The code is generic over the word type, so that loom
//! explores the production code: see `tests/loom.rs`.
//!
//! Barriers are numbered per channel. The library's own channel is the sequence of a group's collective calls: each
//! of its barriers carries the rank's call. A call may consist of several barriers.

mod absent;
mod agreement;
mod far;
mod guard;
mod layout;
mod relay;
mod slots;

use std::cell::Cell;
use std::time::Duration;

use crate::sync::atomic::{AtomicBool, AtomicU32};
use crate::sync::{
    Bell, Deadline, Ended, Expiry, Mutex, Ordering, Patience, Word, pause, poll_by, yield_now,
};
pub use far::{InvalidMessage, PadUpdate, SlotAct};
pub use guard::ChannelGuard;
pub use layout::Layout;
use relay::Relays;
pub use slots::{GROUP, Slot};

/// The pads of all ranks of a group, as one of them sees them.
pub trait Pads: Send + Sync {
    /// What a pad consists of.
    type Word: Word;
    /// Word `index` (from [`Layout`]) of the pad of rank `owner`.
    fn word(&self, owner: usize, index: usize) -> &Self::Word;

    /// Writes the words that travel with a flag, from `index` on. The flag publishes them.
    fn write_tiny(&self, owner: usize, index: usize, tiny: &Tiny) {
        for (i, value) in tiny.iter().enumerate() {
            let (low, high) = (*value as u32, (*value >> 32) as u32);
            self.word(owner, index + 2 * i).store(low, Ordering::Relaxed);
            self.word(owner, index + 2 * i + 1).store(high, Ordering::Relaxed);
        }
    }

    /// Whether rank `owner` is on another host, and its pad here a mirror: see [`PadUpdate`].
    fn is_far(&self, _owner: usize) -> bool {
        false
    }

    /// The number of a rank's host.
    fn host(&self, _rank: usize) -> usize {
        0
    }

    /// How many messages rank `to`, on another host, has been sent by this process that an arrival of this rank must not overtake.
    fn sent(&self, _to: usize) -> u64 {
        0
    }

    /// Sends an update to rank `to`, on another host, without waiting. Updates to a lost rank are dropped.
    fn send(&self, _to: usize, _update: &PadUpdate) {}

    /// As `send`, of this rank's arrival at a barrier of the sequence, by the thread that makes it: with what it has staged for `to`.
    fn send_arrival(&self, to: usize, arrival: &PadUpdate) {
        self.send(to, arrival);
    }

    /// All ranks of other hosts that have to be told of this rank's arrival have been sent it.
    fn has_arrived(&self) {}

    /// Receives messages of ranks on other hosts, at least of these. A waiting thread calls this between polls.
    fn progress(&self, _from: &[usize]) {}
}

/// What travels in the line of a flag.
pub type Tiny = [u64; Layout::PAYLOAD / 8];

/// Why a wait ended without success.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// A peer was lost, or the group is poisoned.
    Lost,
    /// The deadline passed, or the caller ended the wait.
    GivenUp {
        /// Which of the two it was.
        why: Expiry,
        /// How long the wait took.
        after: Duration,
        /// The ranks that had not arrived.
        missing: Vec<usize>,
    },
    /// A rank made a different call.
    Differs {
        /// Which one.
        rank: usize,
    },
    /// A rank gave up a call, so that calls no longer pair up.
    OutOfStep {
        /// Which one.
        rank: usize,
    },
}

/// The call of a plain barrier.
pub const BARRIER: u32 = 0;
/// A call that peers do not know by a number: they find it in full in the caller's pad, see [`ChannelGuard::describe`].
pub const IN_FULL: u32 = 1;

/// We have left the last barrier, and all have reached it.
const DONE: u32 = 0;
/// We have not left it: the next exchange resumes it.
const UNFINISHED: u32 = 1;
/// We have left it because calls differ, and not all ranks have reached it. They must have before our next one: a rank two
/// barriers ahead would overwrite what the others have not read.
const LEFT_EARLY: u32 = 2;

/// How long a wait continues after its deadline if every rank has made the call, and the last one came only just before it.
const GRACE: Duration = Duration::from_millis(50);

/// A rank's own count of barriers on one channel.
struct Channel {
    epoch: AtomicU32,
    /// Our call at that barrier.
    call: AtomicU32,
    /// The core that we were on, if ranks outnumber the cores.
    core: AtomicU32,
    /// The state of the last barrier that we have reached: see below.
    state: AtomicU32,
    /// One thread at a time.
    busy: AtomicBool,
}

/// Barrier and signals of one rank over its group's pads.
pub struct Signals<P> {
    pads: P,
    rank: usize,
    layout: Layout,
    patience: Patience,
    /// Some ranks are on other hosts.
    spans: bool,
    /// Those.
    far: Vec<usize>,
    /// How arrivals reach other hosts, if a host has several ranks.
    relays: Option<Relays>,
    /// An arrival is more than a flag: peers also get the core that it was on, or a message.
    tells_more: bool,
    /// The rank whose pad decides what the ranks of this host decide together: the first of them.
    arbiter: usize,
    /// The users', and behind them the sequence of calls.
    channels: Vec<Channel>,
    /// How often the group was resynchronised.
    generation: AtomicU32,
    /// How many rounds of resynchronisation we have reached: two for each.
    rounds: AtomicU32,
    /// One thread at a time makes this rank's proposal.
    deciding: Mutex<()>,
}

impl<P: Pads> Signals<P> {
    pub(crate) fn new(pads: P, rank: usize, layout: Layout, mut patience: Patience) -> Self {
        let channel = || Channel {
            epoch: AtomicU32::new(0),
            call: AtomicU32::new(0),
            core: AtomicU32::new(0),
            state: AtomicU32::new(DONE),
            busy: AtomicBool::new(false),
        };
        let near = (0..layout.ranks).filter(|&rank| !pads.is_far(rank));
        let (arbiter, spans) = (near.clone().min().unwrap_or(rank), near.count() < layout.ranks);
        let relays = Relays::new(&pads, rank, layout.ranks);
        if spans {
            patience = patience.between_hosts();
        }
        let far = (0..layout.ranks).filter(|&rank| pads.is_far(rank)).collect();
        Self {
            pads,
            rank,
            layout,
            patience,
            spans,
            far,
            relays,
            tells_more: spans || patience.oversubscribed,
            arbiter,
            channels: std::iter::repeat_with(channel).take(layout.channels + 1).collect(),
            generation: AtomicU32::new(0),
            rounds: AtomicU32::new(0),
            deciding: Mutex::new(()),
        }
    }

    /// One rank that has passed `epoch` barriers on every channel, and sleeps after `looks` polls.
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

    pub(crate) fn pads(&self) -> (&P, Layout) {
        (&self.pads, self.layout)
    }

    /// This rank's number.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Whether `epoch` is what rank `from` reaches next in the sequence of calls, and no peer's staging for it is in use here.
    pub(crate) fn is_next_of(&self, from: usize, epoch: u32) -> bool {
        let reached = self.pads.word(self.rank, self.layout.epoch(self.sequence(), from));
        let ahead = epoch.wrapping_sub(self.epoch()) as i32;
        epoch.wrapping_sub(reached.load(Ordering::Relaxed)) as i32 > 0 && ahead <= 1
    }

    /// The number of spin-loop hints between two polls of a flag that comes with data.
    #[inline]
    pub(crate) fn hints(&self) -> u32 {
        self.patience.hints
    }

    /// The number of the channel that carries the sequence of calls.
    pub fn sequence(&self) -> usize {
        self.layout.channels
    }

    fn peers(&self) -> impl Iterator<Item = usize> + Clone + use<P> {
        let own = self.rank;
        (0..self.layout.ranks).filter(move |&r| r != own)
    }

    /// All that any rank wrote before its call is seen by every rank after it.
    ///
    /// `lost` is called with a function that says which ranks have arrived, and returns whether the others can still arrive. After `GivenUp` the
    /// next barrier on the channel resumes this one.
    pub fn barrier(
        &self,
        channel: usize,
        deadline: &mut Deadline,
        lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        let guard = self.lock_channel(channel, *deadline)?;
        if let Some(rank) = self.out_of_step() {
            return Err(Stop::OutOfStep { rank });
        }
        guard.exchange(BARRIER, None, deadline, lost).map(drop)
    }

    /// The right to use a channel, unless another thread of this rank has it.
    #[inline]
    pub(crate) fn try_lock_channel(&self, channel: usize) -> Option<ChannelGuard<'_, P>> {
        let count = &self.channels[channel];
        // Acquire: pairs with the release of the thread before us, whose counts we read.
        let is_free = !count.busy.swap(true, Ordering::Acquire);
        is_free.then(|| ChannelGuard { signals: self, channel, count })
    }

    /// The right to use a channel, once no other thread of this rank has it.
    #[inline]
    pub fn lock_channel(
        &self,
        channel: usize,
        deadline: Deadline,
    ) -> Result<ChannelGuard<'_, P>, Stop> {
        self.try_lock_channel(channel).map_or_else(|| self.await_channel(channel, deadline), Ok)
    }

    #[cold]
    fn await_channel(
        &self,
        channel: usize,
        deadline: Deadline,
    ) -> Result<ChannelGuard<'_, P>, Stop> {
        poll_by(deadline, &mut || self.try_lock_channel(channel)).map_err(|(why, after)| {
            let missing = vec![self.rank]; // another thread of our own holds the channel
            Stop::GivenUp { why, after, missing }
        })
    }

    /// Prefetches the cache lines of our next flags on `channel` for writing. That takes as long as preparing an exchange, and the
    /// two overlap.
    #[inline]
    pub(crate) fn reach_out(&self, channel: usize) {
        for peer in self.peers() {
            self.pads.word(peer, self.layout.epoch(channel, self.rank)).fetch_to_write();
        }
    }

    /// A wait on words of our own pad: see [`Bell::wait`].
    #[inline]
    fn wait(
        &self,
        deadline: &mut Deadline,
        mut ready: impl FnMut() -> bool,
        broken: impl FnMut() -> bool,
        in_the_way: impl FnMut() -> bool,
    ) -> Ended {
        let mut look = 0_u32;
        let ready = || {
            if self.spans {
                self.progress(look);
                look = look.wrapping_add(1);
            }
            ready()
        };
        self.bell(self.rank).wait(self.patience, deadline, ready, broken, in_the_way)
    }

    /// Waits until all have reached the epoch that we have reached, with the same call.
    fn await_all(
        &self,
        channel: usize,
        epoch: u32,
        deadline: &mut Deadline,
        mut lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        let (next, ranks) = (Cell::new(0), self.layout.ranks);
        let all_here = || {
            while next.get() < ranks && self.has_come(channel, next.get(), epoch) {
                next.set(next.get() + 1);
            }
            next.get() == ranks
        };
        let in_the_way = || self.is_in_the_way(channel, next.get(), epoch);
        let mut stop = None;
        let mut broken = || {
            self.ask_missing(channel, epoch);
            let arrived = |rank| self.has_come(channel, rank, epoch);
            stop = match self.differing(channel, epoch, arrived) {
                Some(rank) => Some(Stop::Differs { rank }),
                None if lost(&arrived) => Some(Stop::Lost),
                None if self.was_left(channel, epoch) => None,
                None => self.out_of_step().map(|rank| Stop::OutOfStep { rank }),
            };
            stop.is_some()
        };
        let mut wait =
            |deadline: &mut Deadline| self.wait(deadline, all_here, &mut broken, in_the_way);
        let mut ended = wait(deadline);
        if let Ended::GivenUp(Expiry::Deadline, _) = ended {
            self.await_answers(channel, epoch);
        }
        if let Ended::GivenUp(Expiry::Deadline, after) = ended
            && self.are_all_coming(channel, epoch)
        {
            ended = match wait(&mut Deadline::after(GRACE)) {
                Ended::GivenUp(why, more) => Ended::GivenUp(why, after + more),
                other => other,
            };
        }
        match ended {
            Ended::Ready => Ok(()),
            Ended::Broken => Err(stop.unwrap_or(Stop::Lost)),
            Ended::GivenUp(why, after) => match self.absent(channel, epoch) {
                missing if missing.is_empty() => Ok(()), // they have arrived since the last poll
                missing => Err(Stop::GivenUp { why, after, missing }),
            },
        }
    }

    /// Lets ranks that are awaited have our core, if they may want it.
    #[inline(never)]
    fn give_way(&self, channel: usize, first: usize, epoch: u32) {
        if self.is_in_the_way(channel, first, epoch) {
            yield_now();
        } else {
            pause(self.patience.hints);
        }
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
    fn has_reached(&self, channel: usize, source: usize, epoch: u32) -> bool {
        source == self.rank || self.is_flagged(self.rank, channel, source, epoch)
    }

    /// Whether the pad of `owner` says that `source` has reached `epoch`.
    #[inline]
    fn is_flagged(&self, owner: usize, channel: usize, source: usize, epoch: u32) -> bool {
        let slot = self.pads.word(owner, self.layout.epoch(channel, source));
        // Acquire: pairs with the release in `arrive`. The difference is at most 1 either way.
        slot.load(Ordering::Acquire).wrapping_sub(epoch) as i32 >= 0
    }

    /// A rank that has arrived with a different call. Each rank compares all calls with its own, so either all agree or all find a
    /// difference.
    #[inline]
    fn differing(
        &self,
        channel: usize,
        epoch: u32,
        arrived: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let call = self.channels[channel].call.load(Ordering::Relaxed);
        self.peers().filter(|&rank| arrived(rank)).find(|&rank| {
            let theirs = self.call_at(channel, rank, epoch);
            theirs != call || (call == IN_FULL && !self.describes_the_same(rank, epoch))
        })
    }

    /// The call of `rank` at `epoch`, which it has reached.
    #[inline]
    fn call_at(&self, channel: usize, rank: usize, epoch: u32) -> u32 {
        let word = self.pads.word(self.rank, self.layout.call(channel, rank, epoch));
        word.load(Ordering::Relaxed) // ordered by `has_reached`
    }

    #[cold]
    fn describes_the_same(&self, rank: usize, epoch: u32) -> bool {
        self.description(rank, epoch) == self.description(self.rank, epoch)
    }

    /// The full description of the call of `rank` at `epoch`, if it wrote one.
    pub(crate) fn description(&self, rank: usize, epoch: u32) -> [u32; Layout::DESCRIPTION] {
        self.load_words(rank, Layout::description(epoch))
    }

    pub(crate) fn load_words<const N: usize>(&self, rank: usize, first: usize) -> [u32; N] {
        std::array::from_fn(|i| self.pads.word(rank, first + i).load(Ordering::Relaxed))
    }

    pub(crate) fn store_words(&self, first: usize, words: &[u32]) {
        for (i, word) in words.iter().enumerate() {
            self.pads.word(self.rank, first + i).store(*word, Ordering::Relaxed);
        }
        if self.spans {
            self.send_to_far(&PadUpdate::Words { first, words: words.to_vec() });
        }
    }

    /// How many calls of the sequence `rank` has reached, as far as this rank knows, and the word of the last.
    pub(crate) fn last_call(&self, rank: usize) -> (u32, u32) {
        let channel = self.sequence();
        let epoch = self.pads.word(self.rank, self.layout.epoch(channel, rank));
        let epoch = epoch.load(Ordering::Acquire); // pairs with the release in `arrive`
        let word = self.pads.word(self.rank, self.layout.call(channel, rank, epoch));
        (epoch, word.load(Ordering::Relaxed))
    }

    /// The word of `rank`'s call at the barrier of the sequence that we have reached; `rank` has reached it too.
    pub(crate) fn call_of(&self, rank: usize) -> u32 {
        self.call_at(self.sequence(), rank, self.epoch())
    }

    /// Whether we have reached a barrier of the sequence and not left it.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.channels[self.sequence()].state.load(Ordering::Relaxed) == UNFINISHED
    }

    /// Makes the next call of the sequence check whether a call was put off.
    #[cold]
    pub(crate) fn look_before_next(&self) {
        let state = &self.channels[self.sequence()].state;
        if state.load(Ordering::Relaxed) == DONE {
            state.store(LEFT_EARLY, Ordering::Relaxed);
        }
    }

    /// How many calls of the sequence this rank has reached.
    pub(crate) fn epoch(&self) -> u32 {
        self.channels[self.sequence()].epoch.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod far_tests;
#[cfg(test)]
mod tests;
