//! What ranks decide together without waiting for each other: who is lost, who goes on, whether calls still pair up; and how
//! a group comes back in step.

use std::sync::PoisonError;

use super::{InvalidMessage, Layout, PadUpdate, Pads, Signals, Stop};
use crate::sync::{Deadline, Ended, Ordering, Word, atomic, before_ringing};

/// Low bits of the `out` word: the rank that gave up, and one. Above them, the generation.
const RANK_BITS: u32 = 16;

/// How many channels fit into one message.
const CHANNELS_AT_ONCE: usize = 1000;

impl<P: Pads> Signals<P> {
    /// The rank whose loss was noted in our pad, by us or by a peer.
    #[inline]
    pub fn poisoned(&self) -> Option<usize> {
        // Acquire: pairs with the release in `poison`; what the lost rank wrote before is seen.
        let poison = self.pads.word(self.rank, Layout::POISON).load(Ordering::Acquire);
        (poison as usize).checked_sub(1)
    }

    /// Notes the loss of a rank in every pad and wakes everyone; the first loss noted stays, and is the same in all pads.
    pub fn poison(&self, lost: usize) {
        // The arbiter's pad decides; the memory is there whether or not the arbiter is.
        let first = self.pads.word(self.arbiter, Layout::POISON);
        first.replace(0, lost as u32 + 1, Ordering::AcqRel);
        let lost = first.load(Ordering::Acquire);
        // Ranks of other hosts find out for themselves.
        let all = || self.near_ranks();
        // Writes to all pads before it wakes any rank: a rank that wakes up may leave, and a rank whose pad was not written would
        // then blame that one.
        for rank in all() {
            self.pads.word(rank, Layout::POISON).replace(0, lost, Ordering::Release);
        }
        all().for_each(|rank| self.bell(rank).ring());
    }

    /// Notes that a rank was lost, after all that were noted before: the same order for all who ask.
    pub fn note_loss(&self, rank: usize) {
        let entries =
            (0..self.layout.ranks).map(|i| self.pads.word(self.arbiter, self.layout.loss(i)));
        for entry in entries {
            entry.replace(0, rank as u32 + 1, Ordering::AcqRel);
            if entry.load(Ordering::Acquire) == rank as u32 + 1 {
                return;
            }
        }
    }

    /// The ranks that were lost, in the order in which that was noted.
    pub fn losses(&self) -> impl Iterator<Item = usize> {
        let entry = |i| self.pads.word(self.arbiter, self.layout.loss(i)).load(Ordering::Acquire);
        (0..self.layout.ranks).map_while(move |i| (entry(i) as usize).checked_sub(1))
    }

    /// The rank that gave up a call, if calls no longer pair up.
    #[inline]
    pub fn out_of_step(&self) -> Option<usize> {
        // Acquire: pairs with the release in `give_up`; what the rank says of its call is seen.
        let out = self.pads.word(self.rank, Layout::OUT).load(Ordering::Acquire);
        if out == 0 { None } else { self.who_gave_up(out) }
    }

    /// As `out_of_step`, for a rank that has seen all flags of a barrier and is about to go on: see [`Signals::is_void`].
    #[inline]
    pub fn given_up_meanwhile(&self) -> Option<usize> {
        atomic::fence(Ordering::SeqCst); // pairs with that in `is_void`
        self.out_of_step()
    }

    /// Whether our pad says that a rank was lost, or that one gave up a call: what a healthy group looks at.
    #[inline]
    pub fn is_troubled(&self) -> bool {
        let word = |index| self.pads.word(self.rank, index).load(Ordering::Acquire);
        (word(Layout::POISON) | word(Layout::OUT)) != 0
    }

    #[cold]
    fn who_gave_up(&self, out: u32) -> Option<usize> {
        let (generation, rank) = (out >> RANK_BITS, out & ((1 << RANK_BITS) - 1));
        (generation == self.generation_bits()).then_some(rank as usize - 1)
    }

    fn generation_bits(&self) -> u32 {
        self.generation.load(Ordering::Relaxed) & (u32::MAX >> RANK_BITS)
    }

    /// How often the group was resynchronised.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// As `out_of_step`, by the word that decides: it may not have come to our pad yet.
    pub fn decided_out_of_step(&self) -> Option<usize> {
        let out = self.pads.word(self.arbiter, Layout::OUT).load(Ordering::Acquire);
        if out == 0 { None } else { self.who_gave_up(out) }
    }

    /// Tells all ranks that this one gave up a call: from here on, calls do not pair up. The first one counts, on all
    /// ranks.
    pub fn give_up(&self) {
        let ours = self.generation_bits() << RANK_BITS | (self.rank as u32 + 1);
        let left = if self.spans { self.left() } else { Vec::new() };
        self.note_left(self.rank, &left);
        // The arbiter's pad decides, as in `poison`. A word of an earlier generation is as good as none.
        let first = self.set_out(self.arbiter, ours);
        self.spread(first);
        if self.spans {
            // The first message includes the sequence, which is the last channel.
            let mut parts = left.rchunks(CHANNELS_AT_ONCE).map(<[_]>::to_vec);
            self.send_to_far(&PadUpdate::GaveUp {
                out: first,
                left: parts.next().unwrap_or_default(),
            });
            parts.for_each(|left| self.send_to_far(&PadUpdate::GaveUp { out: first, left }));
        }
    }

    /// Which barriers this rank has left, by channel.
    fn left(&self) -> Vec<(usize, u32)> {
        let left = |(channel, count): (usize, &super::Channel)| {
            let epoch = count.epoch.load(Ordering::Acquire); // pairs with the release in `arrive`
            let is_left = count.state.load(Ordering::Relaxed) == super::DONE;
            (channel, if is_left { epoch } else { epoch.wrapping_sub(1) })
        };
        self.channels.iter().enumerate().map(left).filter(|(_, epoch)| *epoch != 0).collect()
    }

    /// Says on this host which barriers `rank`, which gives up a call, has left: all ranks have reached those, and their
    /// flags may still be under way from other hosts. The word `out` publishes it.
    fn note_left(&self, rank: usize, left: &[(usize, u32)]) {
        for (channel, epoch) in left {
            for owner in self.near_ranks() {
                let word = self.pads.word(owner, self.layout.left(*channel, rank));
                if epoch.wrapping_sub(word.load(Ordering::Relaxed)) as i32 > 0 {
                    word.store(*epoch, Ordering::Relaxed);
                }
            }
        }
    }

    /// Whether a rank that gave up a call had left this barrier before.
    pub(super) fn was_left(&self, channel: usize, epoch: u32) -> bool {
        let left = |rank| self.pads.word(self.rank, self.layout.left(channel, rank));
        let is_later = |rank| left(rank).load(Ordering::Relaxed).wrapping_sub(epoch) as i32 >= 0;
        self.spans && (0..self.layout.ranks).any(is_later)
    }

    /// Applies the message of `from`, on another host, that a rank gave up a call.
    pub(super) fn apply_give_up(
        &self,
        from: usize,
        out: u32,
        left: &[(usize, u32)],
    ) -> Result<(), InvalidMessage> {
        let who = (out & ((1 << RANK_BITS) - 1)) as usize;
        let exists = |(channel, _): &(usize, u32)| *channel < self.channels.len();
        if !(1..=self.layout.ranks).contains(&who) || !left.iter().all(exists) {
            return Err(InvalidMessage);
        }
        self.note_left(from, left);
        let first = self.set_out(self.arbiter, out);
        self.spread(first);
        Ok(())
    }

    /// Repeats to all that another rank gave up a call. That rank may have been stopped before it wrote to all pads.
    pub fn pass_on_out(&self) {
        let first = self.pads.word(self.arbiter, Layout::OUT).load(Ordering::Acquire);
        if first != 0 && self.who_gave_up(first).is_some() {
            self.spread(first);
        }
    }

    fn spread(&self, first: u32) {
        for rank in self.near_ranks().filter(|&rank| rank != self.arbiter) {
            self.set_out(rank, first);
        }
        self.near_ranks().for_each(|rank| self.bell(rank).ring());
    }

    /// Sets the word of one pad, unless it says already who gave up a call of this generation; what it says then.
    fn set_out(&self, owner: usize, value: u32) -> u32 {
        let word = self.pads.word(owner, Layout::OUT);
        loop {
            let now = word.load(Ordering::Acquire);
            // Never over a word of the same generation, or of a newer one.
            let newer = (value >> RANK_BITS).wrapping_sub(now >> RANK_BITS) as u16 as i16 > 0;
            if now != 0 && !newer {
                return now;
            }
            // Release: publishes what we gave up; pairs with the acquire in `out_of_step`.
            if word.replace(now, value, Ordering::AcqRel) {
                return value;
            }
        }
    }

    /// Whether nobody has passed, or will pass, the barrier of the sequence that we have reached and gave up. The caller
    /// has called `give_up`, and whoever passes asks `given_up_meanwhile` after it has seen all flags.
    ///
    /// A rank that passes publishes its flags, sees all flags in its pad, fences, and then finds no `out` word. So its fence
    /// came before ours, and we see the flags that it published and those that it saw.
    pub fn is_void(&self) -> bool {
        atomic::fence(Ordering::SeqCst); // pairs with that in `given_up_meanwhile`
        let (channel, epoch) = (self.sequence(), self.epoch());
        let others = |rank: usize| (0..self.layout.ranks).filter(move |&r| r != rank);
        let sees_all = |rank| others(rank).all(|s| self.is_flagged(rank, channel, s, epoch));
        !(0..self.layout.ranks).any(|rank| self.has_arrived(rank) && sees_all(rank))
    }

    /// Whether any pad says that `rank` has reached the barrier of the sequence that we have reached.
    pub fn has_arrived(&self, rank: usize) -> bool {
        let (channel, epoch) = (self.sequence(), self.epoch());
        let mut others = (0..self.layout.ranks).filter(|&r| r != rank);
        rank == self.rank || others.any(|owner| self.is_flagged(owner, channel, rank, epoch))
    }

    /// Whether the barrier of the sequence that we have reached and not left was reached by all, with the same call. Asked
    /// while nobody is in a call.
    pub fn was_completed(&self) -> bool {
        let (channel, epoch) = (self.sequence(), self.epoch());
        self.missing(channel, epoch).is_empty()
            && self.differing(channel, epoch, |_| true).is_none()
    }

    /// One round of resynchronisation: waits until all ranks have reached it. After `GivenUp` the next call resumes it.
    ///
    /// Between its two rounds nobody is in a call; after the second, all have called [`Signals::reset`].
    pub fn resync_round(
        &self,
        round: u32,
        deadline: &mut Deadline,
        mut lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        if self.rounds.load(Ordering::Relaxed) != round {
            self.rounds.store(round, Ordering::Relaxed);
            for peer in self.peers() {
                // Release: pairs with the acquire in `is_in_round`; all that we did in calls is done.
                let word = self.pads.word(peer, self.layout.resync(self.rank));
                word.store(round, Ordering::Release);
            }
            before_ringing();
            self.peers().for_each(|peer| self.bell(peer).ring_if_asleep());
            if self.spans {
                self.tell_of_arrivals();
                self.send_to_far(&PadUpdate::Round(round));
            }
        }
        let is_in_round = |rank: usize| self.is_in_round(rank, round);
        let all_here = || (0..self.layout.ranks).all(is_in_round);
        let broken = || lost(&is_in_round);
        match self.wait(deadline, all_here, broken, || true) {
            Ended::Ready => Ok(()),
            Ended::Broken => Err(Stop::Lost),
            Ended::GivenUp(why, after) => {
                let missing: Vec<_> = (0..self.layout.ranks).filter(|&r| !is_in_round(r)).collect();
                if missing.is_empty() { Ok(()) } else { Err(Stop::GivenUp { why, after, missing }) }
            }
        }
    }

    /// Whether `rank` has reached a round of resynchronisation.
    pub fn is_in_round(&self, rank: usize, round: u32) -> bool {
        let word = self.pads.word(self.rank, self.layout.resync(rank));
        // Acquire: pairs with the release in `resync_round`.
        rank == self.rank || word.load(Ordering::Acquire).wrapping_sub(round) as i32 >= 0
    }

    /// The round of resynchronisation that this rank has reached: twice the generation between resynchronisations.
    pub fn round(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Brings our counts to where the furthest rank is. Nobody is in a call.
    pub fn reset(&self) {
        for (channel, state) in self.channels.iter().enumerate() {
            let own = state.epoch.load(Ordering::Relaxed);
            let flags = self.peers().map(|rank| {
                let word = self.pads.word(self.rank, self.layout.epoch(channel, rank));
                word.load(Ordering::Relaxed) // ordered by the round before
            });
            let ahead = flags.map(|flag| flag.wrapping_sub(own) as i32).max();
            let ahead = ahead.unwrap_or(0).max(0);
            state.epoch.store(own.wrapping_add(ahead as u32), Ordering::Relaxed);
            state.state.store(super::DONE, Ordering::Relaxed);
        }
        if let Some(relays) = &self.relays {
            self.reset_relays(relays);
        }
    }

    /// Begins the next generation of calls, in which all ranks are in step.
    pub fn begin_generation(&self) {
        let word = self.pads.word(self.rank, Layout::OUT);
        self.generation.store(self.generation().wrapping_add(1), Ordering::Relaxed);
        // It would count again when generations come round. A word of the new one stays.
        let now = word.load(Ordering::Relaxed);
        if now >> RANK_BITS != self.generation_bits() {
            word.replace(now, 0, Ordering::Relaxed);
        }
    }

    /// Agrees on who takes part in a generation of the group: all ranks that ask get the same answer.
    ///
    /// A single compare-and-swap decides. The memory outlives whoever dies on the way, so nobody waits for anybody.
    pub fn decide(&self, generation: usize, taking_part: impl Fn(usize) -> bool) -> Vec<usize> {
        let _turn = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
        let decision = self.pads.word(self.arbiter, self.layout.decision(generation));
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
