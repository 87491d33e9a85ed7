//! Pads of ranks on other hosts. Instead of storing to the pad of such a *far* peer, a rank sends it a [`PadUpdate`], and the peer
//! stores it. Waits do not change: a rank waits on words of its own pad, wherever its peers are.
//!
//! In place of a far peer's pad a rank has a *mirror*, which nobody else maps:
//!
//! | word of the mirror of rank r's pad | holds |
//! |------------------------------------|-------|
//! | what r writes in its own pad for others to read | what r last sent of it |
//! | `signal(c, s)` of our own          | 1 from our signal until r acknowledges it: until then its slot is full |
//!
//! Updates arrive in the order in which they were sent. The receiver checks each one: a far peer is not trusted with a pad.

use serde::{Deserialize, Serialize};

use super::slots::{GROUP, Slot};
use super::{Layout, Pads, Signals, Tiny};
use crate::sync::{Ordering, Word, before_ringing};

/// A change to a pad, sent to a rank on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PadUpdate {
    /// The sender has reached barrier `epoch` of `channel`. [`ChannelGuard::arrive`](super::ChannelGuard) stores this in pads of its own
    /// host.
    Arrived {
        /// The channel of the barrier.
        channel: usize,
        /// The number of the barrier.
        epoch: u32,
        /// The call that the sender makes there.
        call: u32,
        /// Data that travels with the flag.
        tiny: Option<Tiny>,
        /// All ranks of the receiver's host may take it from the receiver's pad.
        for_host: bool,
    },
    /// The sender waits for the receiver at this barrier of the sequence.
    Awaited(u32),
    /// The sender, which was awaited at this barrier, has not reached it. It says so when it does.
    NotArrived(u32),
    /// The sender has written words of its own pad.
    Words {
        /// The index of the first word.
        first: usize,
        /// Their values.
        words: Vec<u32>,
    },
    /// An operation on the signal slot between the two ranks on `channel` of a pad.
    Slot {
        /// The group's pad, or the number of the rendezvous to whose memory the pad belongs.
        pad: u64,
        /// The channel of the slot.
        channel: usize,
        /// The operation.
        act: SlotAct,
    },
    /// The sender has reached this round of resynchronisation.
    Round(u32),
    /// A rank gave up a call.
    GaveUp {
        /// The value of the word `out`.
        out: u32,
        /// By channel: the barriers that the sender has left.
        left: Vec<(usize, u32)>,
    },
}

impl PadUpdate {
    /// Whether it only says who has reached a barrier.
    pub(crate) fn is_arrival(&self) -> bool {
        matches!(self, Self::Arrived { .. } | Self::Awaited(_) | Self::NotArrived(_))
    }
}

/// An operation on a signal slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotAct {
    /// The sender puts a signal.
    Put,
    /// The sender has consumed the receiver's signal.
    Taken,
    /// The sender sets the word to a value.
    Set(u32),
}

/// A message that no correct rank of the group sends.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidMessage;

impl<P: Pads> Signals<P> {
    /// Whether some ranks are on other hosts.
    pub fn spans(&self) -> bool {
        self.spans
    }

    pub(super) fn far_peers(&self) -> impl Iterator<Item = usize> {
        self.far.iter().copied()
    }

    /// The ranks whose pads are mapped here.
    pub(super) fn near_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.ranks).filter(|&rank| !self.pads.is_far(rank))
    }

    pub(super) fn send_to_far(&self, update: &PadUpdate) {
        self.far_peers().for_each(|peer| self.pads.send(peer, update));
    }

    /// Sends an operation on a slot to the peer, if that is on another host.
    #[inline]
    pub(super) fn send_slot(&self, slot: &Slot<'_, P::Word>, peer: usize, act: SlotAct) {
        if self.spans && self.pads.is_far(peer) {
            self.pads.send(peer, &PadUpdate::Slot { pad: slot.pad, channel: slot.channel, act });
        }
    }

    /// Sets a word of a peer's pad, whatever it was: release.
    pub fn set(&self, slot: &Slot<'_, P::Word>, to: usize, value: u32) {
        slot.word.store(value, Ordering::Release);
        before_ringing();
        self.bell(to).ring_if_asleep();
        self.send_slot(slot, to, SlotAct::Set(value));
    }

    /// Applies an update by rank `from`, on another host, to the group's pads.
    pub fn apply(&self, from: usize, update: &PadUpdate) -> Result<(), InvalidMessage> {
        let channels = self.layout.channels;
        match update {
            PadUpdate::Arrived { channel, epoch, call, tiny, for_host } if *channel <= channels => {
                let arrived = (*channel, *epoch, *call);
                match self.relays_on(*channel) {
                    Some(relays) => {
                        self.store_arrival(relays, from, arrived, tiny.as_ref(), *for_host)?;
                    }
                    None if *for_host => return Err(InvalidMessage),
                    None => self.apply_arrival(from, arrived, tiny.as_ref())?,
                }
                if *for_host || self.relays_on(*channel).is_some() {
                    self.ring_near(); // others of this host may take it from here, or wait for what came before it
                }
            }
            PadUpdate::Awaited(epoch) => return self.apply_awaited(from, *epoch),
            PadUpdate::NotArrived(epoch) => self.apply_not_arrived(from, *epoch)?,
            PadUpdate::Words { first, words } => {
                let end = first.checked_add(words.len()).ok_or(InvalidMessage)?;
                if !Layout::is_said((*first, end)) {
                    return Err(InvalidMessage);
                }
                for (i, word) in words.iter().enumerate() {
                    self.pads.word(from, first + i).store(*word, Ordering::Relaxed);
                }
                return Ok(()); // nobody waits for these words
            }
            PadUpdate::Slot { pad: GROUP, channel, act } if *channel < channels => {
                let (ours, theirs) = (self.slot_of(from, *channel), self.slot_on(from, *channel));
                self.apply_slot(ours.word, theirs.word, *act);
            }
            PadUpdate::Round(round) => {
                let word = self.pads.word(self.rank, self.layout.resync(from));
                word.store(*round, Ordering::Release);
            }
            PadUpdate::GaveUp { out, left } => self.apply_give_up(from, *out, left)?,
            PadUpdate::Arrived { .. } | PadUpdate::Slot { .. } => return Err(InvalidMessage),
        }
        self.ring_own();
        Ok(())
    }

    /// Applies `act` of a far peer: `ours` is the word of our pad for its signals, `theirs` that of its mirror for our signals.
    pub fn apply_slot(&self, ours: &P::Word, theirs: &P::Word, act: SlotAct) {
        // Release: pairs with the acquire of the wait, for all earlier messages of the peer.
        match act {
            SlotAct::Put => ours.store(1, Ordering::Release),
            SlotAct::Taken => theirs.store(0, Ordering::Release),
            SlotAct::Set(value) => ours.store(value, Ordering::Release),
        }
    }

    /// Wakes threads of this rank that wait.
    pub fn ring_own(&self) {
        before_ringing();
        self.bell(self.rank).ring_if_asleep();
    }

    /// Wakes ranks of this host that wait.
    pub(super) fn ring_near(&self) {
        before_ringing();
        self.near_ranks().for_each(|rank| self.bell(rank).ring_if_asleep());
    }

    fn apply_arrival(
        &self,
        from: usize,
        (channel, epoch, call): (usize, u32, u32),
        tiny: Option<&Tiny>,
    ) -> Result<(), InvalidMessage> {
        let flag = self.pads.word(self.rank, self.layout.epoch(channel, from));
        let forward = epoch.wrapping_sub(flag.load(Ordering::Relaxed)) as i32 > 0;
        if !forward || (tiny.is_some() && channel != self.sequence()) {
            return Err(InvalidMessage);
        }
        if let Some(tiny) = tiny {
            self.pads.write_tiny(self.rank, self.layout.payload(from, epoch), tiny);
        }
        let word = self.pads.word(self.rank, self.layout.call(channel, from, epoch));
        word.store(call, Ordering::Relaxed);
        // Release: pairs with the acquire in `is_flagged`, as in `arrive`.
        flag.store(epoch, Ordering::Release);
        Ok(())
    }
}
