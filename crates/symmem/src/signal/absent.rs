//! Who is missing at a barrier, and who of them is to blame.

use super::{Layout, Pads, Signals};
use crate::sync::{Ordering, Word};

impl<P: Pads> Signals<P> {
    /// Announces to all that we have made the next call, and reach it as soon as earlier ones are over; or withdraws that.
    #[cold]
    pub(crate) fn announce_next(&self, is_coming: bool) {
        let next = if is_coming { self.epoch().wrapping_add(1) } else { 0 };
        self.store_words(Layout::COMING, &[next]); // a hint
    }

    /// Whether a rank that has not reached `epoch` has announced it.
    fn is_coming(&self, channel: usize, rank: usize, epoch: u32) -> bool {
        let word = self.pads.word(rank, Layout::COMING);
        channel == self.sequence() && word.load(Ordering::Relaxed) == epoch
    }

    /// Whether every rank has made the call, and only has to finish earlier ones.
    #[cold]
    pub(super) fn are_all_coming(&self, channel: usize, epoch: u32) -> bool {
        self.missing(channel, epoch).iter().all(|&rank| self.is_coming(channel, rank, epoch))
    }

    /// The ranks to blame for a timeout: those that have not made the call, or else those that have not reached it.
    #[cold]
    pub(super) fn absent(&self, channel: usize, epoch: u32) -> Vec<usize> {
        let missing = self.missing(channel, epoch);
        let is_absent = |rank: &usize| !self.is_coming(channel, *rank, epoch);
        let absent: Vec<usize> = missing.iter().copied().filter(is_absent).collect();
        if absent.is_empty() { missing } else { absent }
    }

    #[cold]
    pub(super) fn missing(&self, channel: usize, epoch: u32) -> Vec<usize> {
        (0..self.layout.ranks).filter(|&r| !self.has_come(channel, r, epoch)).collect()
    }
}
