//! Signals: one rank sets a word, and the rank that waits for it clears it.

use super::{Pads, Signals, SlotAct, Stop};
use crate::sync::{Deadline, Ended, Ordering, Word, before_ringing, pause, yield_now};

/// A word by which one rank signals to another, and where peers on other hosts find it.
#[derive(Debug)]
pub struct Slot<'a, W> {
    /// The word, in the pad of the one who is signalled, or in the mirror of that pad.
    pub word: &'a W,
    /// The pad: [`GROUP`], or the number of the rendezvous whose memory it belongs to.
    pub pad: u64,
    /// The channel.
    pub channel: usize,
}

/// The group's own pad. No rendezvous has the number.
pub const GROUP: u64 = 0;

impl<P: Pads> Signals<P> {
    /// Our slot for signals on rank `to`.
    #[inline]
    pub fn slot_on(&self, to: usize, channel: usize) -> Slot<'_, P::Word> {
        let word = self.pads.word(to, self.layout.signal(channel, self.rank));
        Slot { word, pad: GROUP, channel }
    }

    /// The slot of our own for signals of rank `from`.
    #[inline]
    pub fn slot_of(&self, from: usize, channel: usize) -> Slot<'_, P::Word> {
        let word = self.pads.word(self.rank, self.layout.signal(channel, from));
        Slot { word, pad: GROUP, channel }
    }

    /// Puts a signal into a slot that rank `to` takes it from: 0 → 1, release. Not while the last one is unconsumed.
    #[inline(always)] // as long as the call would take
    pub fn put_now(&self, slot: &Slot<'_, P::Word>, to: usize) -> bool {
        // While data stores are on their way, the line can be as well: an exchange would wait for them first.
        slot.word.fetch_to_write();
        // Release: pairs with the acquire in `take_now`. Without looking first: it brings the line over for writing at once.
        if !slot.word.replace(0, 1, Ordering::SeqCst) {
            return false;
        }
        before_ringing();
        self.bell(to).ring_if_asleep();
        self.send_slot(slot, to, SlotAct::Put);
        true
    }

    /// Takes the signal from a slot of our own into which rank `from` puts it: 1 → 0, acquire. Not if there is none.
    #[inline(always)] // as long as the call would take
    pub fn take_now(&self, slot: &Slot<'_, P::Word>, from: usize) -> bool {
        // The line comes over for writing in one go instead of first for reading.
        slot.word.fetch_to_write();
        // Acquire: pairs with the release in `put_now`.
        if slot.word.load(Ordering::Relaxed) != 1 || !slot.word.replace(1, 0, Ordering::SeqCst) {
            return false;
        }
        before_ringing(); // a putter may sleep until the slot is free
        self.bell(from).ring_if_asleep();
        self.send_slot(slot, from, SlotAct::Taken);
        true
    }

    /// As [`Signals::take_now`], if the signal comes within a short while.
    #[inline]
    pub fn take_soon(&self, slot: &Slot<'_, P::Word>, from: usize) -> bool {
        for look in 0..self.patience.soon + self.patience.turns {
            if look >= self.patience.soon {
                yield_now(); // ranks outnumber the cores: the putter may want this one
            } else if look > 0 {
                pause(self.patience.hints);
            }
            if self.take_now(slot, from) {
                return true;
            }
        }
        false
    }

    /// Puts a signal into a slot; waits while the last one is unconsumed.
    pub fn put(
        &self,
        slot: &Slot<'_, P::Word>,
        to: usize,
        deadline: Deadline,
        lost: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        if self.put_now(slot, to) {
            return Ok(());
        }
        // Later attempts look first, and leave the line with its owner.
        let put = || slot.word.load(Ordering::Relaxed) == 0 && self.put_now(slot, to);
        self.wait_for(to, deadline, put, lost)
    }

    /// Takes the signal from a slot; waits until there is one.
    pub fn take(
        &self,
        slot: &Slot<'_, P::Word>,
        from: usize,
        deadline: Deadline,
        lost: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.wait_for(from, deadline, || self.take_now(slot, from), lost)
    }

    /// Waits until `ready`, which only `peer` can bring about.
    pub fn wait_for(
        &self,
        peer: usize,
        deadline: Deadline,
        ready: impl FnMut() -> bool,
        lost: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.wait_for_any(|| vec![peer], deadline, ready, lost)
    }

    /// Waits until `ready`, which any of `peers` can bring about.
    pub(crate) fn wait_for_any(
        &self,
        peers: impl FnOnce() -> Vec<usize>,
        mut deadline: Deadline,
        ready: impl FnMut() -> bool,
        lost: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        match self.wait(&mut deadline, ready, lost, || true) {
            Ended::Ready => Ok(()),
            Ended::Broken => Err(Stop::Lost),
            Ended::GivenUp(why, after) => Err(Stop::GivenUp { why, after, missing: peers() }),
        }
    }

    /// Says that rank `to`, on this host, has been sent the memory of our ring.
    pub(crate) fn announce_ring(&self, to: usize) {
        // Release: pairs with the acquire in `has_ring`.
        self.pads.word(to, self.layout.ring(self.rank)).store(1, Ordering::Release);
        self.wake(to);
    }

    /// Whether rank `from` has sent the memory of its ring.
    #[inline]
    pub(crate) fn has_ring(&self, from: usize) -> bool {
        self.pads.word(self.rank, self.layout.ring(from)).load(Ordering::Acquire) != 0
    }

    /// Wakes a rank of this host that may wait for what this one has just stored.
    #[inline]
    pub fn wake(&self, rank: usize) {
        before_ringing();
        self.bell(rank).ring_if_asleep();
    }
}
