//! A barrier with data, by the one thread of a rank that holds a channel.

use super::{
    Channel, DONE, IN_FULL, LEFT_EARLY, Layout, PadUpdate, Pads, Signals, Stop, Tiny, UNFINISHED,
};
use crate::sync::{Deadline, Ended, Ordering, Word, before_ringing, current_core, pause_for_flag};

/// The right to use a channel, until dropped.
pub struct ChannelGuard<'a, P: Pads> {
    pub(super) signals: &'a Signals<P>,
    pub(super) channel: usize,
    /// Our count of the channel's barriers.
    pub(super) count: &'a Channel,
}

impl<P: Pads> Drop for ChannelGuard<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.count.busy.store(false, Ordering::Release);
    }
}

impl<P: Pads> ChannelGuard<'_, P> {
    /// Whether we have reached a barrier and not left it, which the next exchange resumes.
    #[inline]
    pub fn is_unfinished(&self) -> bool {
        self.count.state.load(Ordering::Relaxed) == UNFINISHED
    }

    /// Whether all have reached the last barrier, and we have left it.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.count.state.load(Ordering::Relaxed) == DONE
    }

    /// The number of the barrier that [`ChannelGuard::exchange`] reaches, or has reached and resumes.
    #[inline]
    pub fn next_epoch(&self) -> u32 {
        let epoch = self.count.epoch.load(Ordering::Relaxed);
        if self.is_unfinished() { epoch } else { epoch.wrapping_add(1) }
    }

    /// Whether a rank has reached that barrier.
    pub(crate) fn has_come(&self, rank: usize) -> bool {
        self.signals.has_come(self.channel, rank, self.next_epoch())
    }

    /// Says in full what an exchange with [`IN_FULL`] is about, before it begins.
    #[cold]
    pub(crate) fn describe(&self, words: &[u32; Layout::DESCRIPTION]) {
        self.signals.store_words(Layout::description(self.next_epoch()), words);
    }

    /// A barrier with data: what this rank wrote before, and `tiny`, is seen by all ranks after it. Its number.
    ///
    /// `call` says what the caller is about; ranks that call different things are told so, all of them, as soon as two
    /// of them have come. After `GivenUp` the next exchange resumes this one.
    ///
    /// What a rank writes for epoch e it may overwrite for e + 2 and not before: whoever writes for e + 2 has passed e + 1,
    /// which all ranks reach only when they have read e. So data is read while we hold the channel: another thread of ours
    /// would let peers go on.
    pub fn exchange(
        &self,
        call: u32,
        tiny: Option<&Tiny>,
        deadline: &mut Deadline,
        mut lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<u32, Stop> {
        self.await_late(deadline, &mut lost)?;
        let epoch = self.arrive(call, tiny);
        if !self.all_agree_soon(call, epoch, pause_for_flag) {
            self.await_agreement(epoch, deadline, &mut lost)?;
        }
        Ok(epoch)
    }

    /// Waits for those who had not come when this rank left the last barrier early.
    #[cold]
    pub(crate) fn await_late(
        &self,
        deadline: &mut Deadline,
        mut lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        if self.count.state.load(Ordering::Relaxed) != LEFT_EARLY {
            return Ok(());
        }
        let (signals, channel) = (self.signals, self.channel);
        let epoch = self.count.epoch.load(Ordering::Relaxed);
        let arrived = |rank| signals.has_come(channel, rank, epoch);
        let all_here = || signals.missing(channel, epoch).is_empty();
        let broken = || {
            signals.ask_missing(channel, epoch);
            lost(&arrived) || signals.out_of_step().is_some()
        };
        match signals.wait(deadline, all_here, broken, || true) {
            Ended::Ready => Ok(()),
            Ended::Broken => {
                Err(signals.out_of_step().map_or(Stop::Lost, |rank| Stop::OutOfStep { rank }))
            }
            Ended::GivenUp(why, after) => match signals.absent(channel, epoch) {
                missing if missing.is_empty() => Ok(()), // they came since the last look
                missing => Err(Stop::GivenUp { why, after, missing }),
            },
        }
    }

    /// Publishes our arrival, or finds that we have arrived already in an earlier call that gave up. The barrier's number.
    #[inline(always)] // as all of a small message's way
    pub(crate) fn arrive(&self, call: u32, tiny: Option<&Tiny>) -> u32 {
        let (signals, count) = (self.signals, self.count);
        let epoch = count.epoch.load(Ordering::Relaxed);
        if count.state.load(Ordering::Relaxed) == UNFINISHED {
            return epoch;
        }
        let epoch = epoch.wrapping_add(1);
        count.call.store(call, Ordering::Relaxed);
        count.state.store(UNFINISHED, Ordering::Relaxed);
        // Release: pairs with the acquire in `left`, which another thread may call. It must not take this barrier for left.
        count.epoch.store(epoch, Ordering::Release);
        if signals.tells_more {
            self.publish_more(call, tiny, epoch);
        } else {
            self.publish(signals.peers(), call, tiny, epoch);
        }
        epoch
    }

    #[inline(always)]
    fn publish(
        &self,
        peers: impl Iterator<Item = usize> + Clone,
        call: u32,
        tiny: Option<&Tiny>,
        epoch: u32,
    ) {
        // By value: whatever the stores below touch, these need not be read again.
        let (signals, channel) = (self.signals, self.channel);
        let (rank, layout) = (signals.rank, signals.layout);
        for peer in peers.clone() {
            if let Some(tiny) = tiny {
                signals.pads.write_tiny(peer, layout.payload(rank, epoch), tiny);
            }
            let call_word = signals.pads.word(peer, layout.call(channel, rank, epoch));
            call_word.store(call, Ordering::Relaxed);
            // Release: pairs with the acquire in `is_flagged` and publishes `call`, the payload and all data.
            let slot = signals.pads.word(peer, layout.epoch(channel, rank));
            slot.store(epoch, Ordering::Release);
        }
        before_ringing();
        for peer in peers {
            signals.bell(peer).ring_if_asleep();
        }
    }

    /// Where ranks outnumber the cores, tells on which core we are; and ranks on other hosts that we have arrived.
    #[inline(never)]
    fn publish_more(&self, call: u32, tiny: Option<&Tiny>, epoch: u32) {
        let (signals, channel) = (self.signals, self.channel);
        let core = current_core();
        self.count.core.store(core, Ordering::Relaxed);
        let peers = || signals.peers().filter(|&peer| !signals.pads.is_far(peer));
        for peer in peers() {
            let word = signals.pads.word(peer, signals.layout.core(channel, signals.rank));
            word.store(core, Ordering::Relaxed);
        }
        self.publish(peers(), call, tiny, epoch);
        if let Some(relays) = signals.relays_on(channel) {
            signals.send_arrival(relays, (epoch, call), tiny);
        } else if signals.spans {
            let (tiny, for_host) = (tiny.copied(), false);
            let arrival = PadUpdate::Arrived { channel, epoch, call, tiny, for_host };
            match channel == signals.sequence() {
                true => signals.far_peers().for_each(|to| signals.pads.send_arrival(to, &arrival)),
                false => signals.send_to_far(&arrival),
            }
        }
        if signals.spans && channel == signals.sequence() {
            signals.pads.has_arrived();
        }
    }

    /// Whether all reach `epoch` within a short while, with the same `call`; then the barrier is done. Otherwise
    /// [`ChannelGuard::await_agreement`] says what comes of it. `pause` passes the time before each look but the first.
    #[inline(always)] // what comes after the last flag is what the peers wait for next
    pub(crate) fn all_agree_soon(&self, call: u32, epoch: u32, pause: impl Fn(u32)) -> bool {
        let (signals, channel) = (self.signals, self.channel);
        if call == IN_FULL {
            return false; // more to compare than fits with the flags
        }
        let (mut rank, mut difference) = (0, 0);
        for look in 0..signals.patience.soon + signals.patience.turns {
            if look >= signals.patience.soon {
                signals.give_way(channel, rank, epoch);
            } else if look > 0 {
                pause(look);
            }
            while rank == signals.rank || signals.has_reached(channel, rank, epoch) {
                if rank != signals.rank {
                    difference |= signals.call_at(channel, rank, epoch) ^ call;
                }
                rank += 1;
                if rank == signals.layout.ranks {
                    if difference == 0 {
                        self.count.state.store(DONE, Ordering::Relaxed);
                    }
                    return difference == 0;
                }
            }
        }
        false
    }

    /// Waits until all have reached `epoch`, which we have reached, and compares their calls.
    #[cold]
    pub(crate) fn await_agreement(
        &self,
        epoch: u32,
        deadline: &mut Deadline,
        lost: impl FnMut(&dyn Fn(usize) -> bool) -> bool,
    ) -> Result<(), Stop> {
        let (signals, channel) = (self.signals, self.channel);
        let all_here = signals.await_all(channel, epoch, deadline, lost);
        let agreed = all_here.and_then(|()| match signals.differing(channel, epoch, |_| true) {
            None => Ok(()),
            Some(rank) => Err(Stop::Differs { rank }),
        });
        match agreed {
            Ok(()) => self.count.state.store(DONE, Ordering::Relaxed),
            // Ranks that disagree are done with this barrier, whoever has not come yet included.
            Err(Stop::Differs { .. }) => self.count.state.store(LEFT_EARLY, Ordering::Relaxed),
            Err(_) => {}
        }
        agreed
    }
}
