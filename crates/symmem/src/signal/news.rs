//! Ranks on other hosts: what a rank would store in the pad of such a peer, it tells the peer instead, which stores it itself.
//! Waits do not change: a rank waits on words of its own pad, wherever its peers are.
//!
//! In place of a far peer's pad a rank has a mirror, which nobody else maps:
//!
//! | word of the mirror of rank r's pad | holds |
//! |------------------------------------|-------|
//! | what r writes in its own pad for others to read | what r has told of it last |
//! | `signal(c, s)` of our own          | 1 from our signal until r tells that it was taken: it has no place for another |
//!
//! News arrive in the order in which they were told. Each checks what it is told: a far peer cannot be trusted with a pad.

use serde::{Deserialize, Serialize};

use super::slots::{GROUP, Slot};
use super::{Layout, Pads, Signals, Tiny};
use crate::sync::{Ordering, Word, before_ringing};

/// What one rank tells another, on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum News {
    /// It has reached barrier `epoch` of `channel`, as [`ChannelGuard::arrive`](super::ChannelGuard) says to peers of its own host.
    Arrived {
        /// Whose barrier.
        channel: usize,
        /// Its number.
        epoch: u32,
        /// What it calls.
        call: u32,
        /// What travels along.
        tiny: Option<Tiny>,
    },
    /// It has written words of its own pad, from `first` on.
    Says {
        /// The place of the first.
        first: usize,
        /// The words.
        words: Vec<u32>,
    },
    /// What it does with the word between the two ranks on `channel` of a pad.
    Slot {
        /// The group's own, or the number of the rendezvous whose memory it belongs to.
        pad: u64,
        /// Which of its words.
        channel: usize,
        /// What it does.
        act: SlotAct,
    },
    /// It has reached a round of resynchronisation.
    InRound(u32),
    /// A rank gave up a call.
    Out {
        /// What the word `out` says.
        out: u32,
        /// Which barriers the one who tells has left, by channel.
        left: Vec<(usize, u32)>,
    },
}

/// What is done with a word of a pad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotAct {
    /// A signal is put.
    Put,
    /// The signal of the one who is told was taken.
    Taken,
    /// The word gets a value.
    Set(u32),
}

/// News that no rank of the group tells.
#[derive(Debug, PartialEq, Eq)]
pub struct Nonsense;

impl<P: Pads> Signals<P> {
    /// Whether some ranks are on other hosts.
    pub fn spans(&self) -> bool {
        self.spans
    }

    pub(super) fn far_peers(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.ranks).filter(|&rank| self.pads.is_far(rank))
    }

    /// The ranks whose pads are mapped here.
    pub(super) fn near_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.ranks).filter(|&rank| !self.pads.is_far(rank))
    }

    pub(super) fn tell_far(&self, news: &News) {
        self.far_peers().for_each(|peer| self.pads.tell(peer, news));
    }

    /// Tells the peer at a slot what was done there, if it is on another host.
    #[inline]
    pub(super) fn tell_slot(&self, slot: &Slot<'_, P::Word>, peer: usize, act: SlotAct) {
        if self.spans && self.pads.is_far(peer) {
            self.pads.tell(peer, &News::Slot { pad: slot.pad, channel: slot.channel, act });
        }
    }

    /// Sets a word of a peer's pad, whatever it was: release.
    pub fn set(&self, slot: &Slot<'_, P::Word>, to: usize, value: u32) {
        slot.word.store(value, Ordering::Release);
        before_ringing();
        self.bell(to).ring_if_asleep();
        self.tell_slot(slot, to, SlotAct::Set(value));
    }

    /// Does what rank `from`, on another host, would have done in our pad, but for news of other pads.
    pub fn hear(&self, from: usize, news: &News) -> Result<(), Nonsense> {
        let channels = self.layout.channels;
        match news {
            News::Arrived { channel, epoch, call, tiny } if *channel <= channels => {
                self.hear_arrival(from, (*channel, *epoch, *call), tiny.as_ref())?;
            }
            News::Says { first, words } => {
                let end = first.checked_add(words.len()).ok_or(Nonsense)?;
                if !Layout::is_said((*first, end)) {
                    return Err(Nonsense);
                }
                for (i, word) in words.iter().enumerate() {
                    self.pads.word(from, first + i).store(*word, Ordering::Relaxed);
                }
                return Ok(()); // nobody waits for that
            }
            News::Slot { pad: GROUP, channel, act } if *channel < channels => {
                let (ours, theirs) = (self.slot_of(from, *channel), self.slot_on(from, *channel));
                self.hear_slot(ours.word, theirs.word, *act);
            }
            News::InRound(round) => {
                let word = self.pads.word(self.rank, self.layout.resync(from));
                word.store(*round, Ordering::Release);
            }
            News::Out { out, left } => self.hear_out(from, *out, left)?,
            News::Arrived { .. } | News::Slot { .. } => return Err(Nonsense),
        }
        self.ring_own();
        Ok(())
    }

    /// Does `act` of a far peer with the word of our pad for its signals, and that of its mirror for ours.
    pub fn hear_slot(&self, ours: &P::Word, theirs: &P::Word, act: SlotAct) {
        // Release: pairs with the acquire of the wait, for all that the peer told before.
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

    fn hear_arrival(
        &self,
        from: usize,
        (channel, epoch, call): (usize, u32, u32),
        tiny: Option<&Tiny>,
    ) -> Result<(), Nonsense> {
        let flag = self.pads.word(self.rank, self.layout.epoch(channel, from));
        let forward = epoch.wrapping_sub(flag.load(Ordering::Relaxed)) as i32 > 0;
        if !forward || (tiny.is_some() && channel != self.sequence()) {
            return Err(Nonsense);
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
