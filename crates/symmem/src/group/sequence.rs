//! The sequence of a group's collective calls: each has a number, and ranks compare their calls exactly.
//!
//! A call is described by 64 bytes, far more than fit next to a flag. The first time that all ranks make a call they compare
//! it in full and give it a number, the same on all ranks, because all have made the same calls so far. From then on the
//! number stands for the call, and equal numbers are equal calls.
//!
//! | state of a rank | next call | becomes |
//! |---|---|---|
//! | in step | any; all ranks make the same | in step |
//! | in step | any; ranks make different ones | in step: `Mismatch` on all of them |
//! | in step | a barrier, a change of phase or a rendezvous that gives up | pending |
//! | in step | another call that gives up | out of step, on every rank |
//! | pending | the same | as if it had not given up |
//! | pending | another | in step: waits for the pending one first, whatever comes of that, then does its own |
//! | pending | another that gives up while it waits for that | put off; out of step, on every rank, if it has data |
//! | put off | the same | as if it had not given up |
//! | put off | another | out of step, on every rank |
//! | out of step | any but `resync` | out of step: `OutOfStep` |
//! | any | `resync`, by all ranks | in step |

use std::sync::Arc;

use super::Group;
use super::call::{Call, PLAIN, RENDEZVOUS};
use super::form::Formed;
use super::given_up::InPanic;
use super::hosts::Span;
use super::numbering::{CONTINUED, Sequence, Ticket, load, pack, store};
use super::staging::{RegionPads, Staging};
use super::waiting::Waiting;
use crate::error::{Error, Result};
use crate::machine::DefaultFloats;
use crate::signal::{BARRIER, ChannelGuard, IN_FULL, Stop, Tiny};
use crate::sync::{Deadline, pause, pause_for_flag};

/// A call of the sequence in progress. Other threads of this rank wait until it is dropped.
///
/// It borrows the call: copying its words would take as long as a flag takes to arrive.
pub(crate) struct Running<'a, 'c> {
    guard: ChannelGuard<'a, RegionPads>,
    made: Made<'a, 'c>,
    /// In which it computes.
    floats: DefaultFloats,
}

/// A call as far as it was made, for the holder of the guard.
#[derive(Clone, Copy)]
struct Made<'a, 'c> {
    group: &'a Group,
    formed: &'a Formed,
    call: &'c Call,
    word: u32,
    /// Starts with the first long wait, and covers all waits of the call.
    deadline: Deadline,
}

impl Group {
    /// Begins a call, or resumes the same one that gave up.
    #[inline(always)] // as all of a small message's way: what it returns is large to hand over
    pub(crate) fn begin_call<'c>(
        &self,
        call: &'c Call,
        deadline: Deadline,
    ) -> Result<Running<'_, 'c>> {
        let formed = match self.0.health.formed.get() {
            Some(formed) => formed,
            None => self.form_for(call, deadline)?,
        };
        let signals = &formed.signals;
        // Before the channel is locked, so that no time is lost after that.
        let words = call.words();
        let place = Sequence::place(&words);
        let guard = match signals.try_lock_channel(signals.sequence()) {
            Some(guard) => guard,
            None => self.await_turn(formed, call, deadline)?,
        };
        if self.0.health.is_troubled() || signals.is_troubled() {
            self.check_in_step(&guard, call.op.name())?;
        }
        let deadline = match guard.is_done() {
            true => deadline,
            false => self.finish_earlier(formed, &guard, call, deadline)?,
        };
        let word = match call.op {
            PLAIN => BARRIER,
            _ => formed.sequence.number(&words, place),
        };
        let made = Made { group: self, formed, call, word, deadline };
        Ok(Running { guard, made, floats: DefaultFloats::default() })
    }

    /// Whether all other ranks have made their next call already, so that this rank's would not wait for any of them to come.
    #[doc(hidden)]
    pub fn is_awaited(&self) -> bool {
        let Some(formed) = self.0.health.formed.get() else { return false };
        let signals = &formed.signals;
        let Some(guard) = signals.try_lock_channel(signals.sequence()) else { return false };
        let mut others = (0..self.size()).filter(|rank| *rank != self.rank());
        guard.is_done() && others.all(|rank| guard.has_come(rank))
    }

    /// Waits until no other thread of this rank is in a call.
    #[cold]
    fn await_turn<'a>(
        &self,
        formed: &'a Formed,
        call: &Call,
        deadline: Deadline,
    ) -> Result<ChannelGuard<'a, RegionPads>> {
        let signals = &formed.signals;
        let in_panic = InPanic(|| formed.give_up(call));
        let guard = signals.lock_channel(signals.sequence(), deadline);
        std::mem::forget(in_panic);
        guard.map_err(|stop| self.not_in_turn(formed, call, stop))
    }

    /// A call that gave up while another thread of this rank was in one. Peers make it, so the next one of this rank must not be taken
    /// for it.
    fn not_in_turn(&self, formed: &Formed, call: &Call, stop: Stop) -> Error {
        let error = self.stopped(stop, call.op.name(), None, &|_| false);
        if !call.is_resumable() {
            formed.give_up(call);
        }
        error
    }

    /// Fails if a rank was lost, gave up a call, or has left without making this one. Then no rank may make the call: if a rank
    /// left one out, its next call would be taken for it.
    #[cold]
    fn check_in_step(&self, guard: &ChannelGuard<'_, RegionPads>, op: &'static str) -> Result<()> {
        self.check_whole(op)?;
        if let Some(rank) = self.find_out_of_step() {
            return Err(self.out_of_step(op, rank));
        }
        let left = self.explained_loss(&|rank| !guard.has_come(rank));
        left.map_or(Ok(()), |(rank, how)| Err(Error::PeerLost { rank, during: op, how }))
    }

    /// Forms the group for a call, if it has not been formed. How its ranks are spread over hosts, where they are on several.
    #[inline]
    pub(crate) fn span_for(&self, call: &Call) -> Result<Option<&Span>> {
        if self.0.health.formed.get().is_none() {
            self.form_for(call, self.deadline())?;
        }
        Ok(self.span())
    }

    /// Forms the group for a call.
    #[cold]
    fn form_for(&self, call: &Call, deadline: Deadline) -> Result<&Formed> {
        let in_panic = InPanic(|| self.note_not_made(call));
        let formed = self.formed_by(deadline);
        std::mem::forget(in_panic);
        let gave_up = |e: &Error| matches!(e, Error::Timeout { .. } | Error::Interrupted { .. });
        formed.map(|formed| &**formed).inspect_err(|e| {
            if gave_up(e) {
                self.note_not_made(call);
            }
        })
    }

    /// Waits for the call that gave up, as all ranks did, unless it is this one, which goes on with it. What is left of the
    /// deadline.
    #[cold]
    fn finish_earlier(
        &self,
        formed: &Formed,
        guard: &ChannelGuard<'_, RegionPads>,
        call: &Call,
        deadline: Deadline,
    ) -> Result<Deadline> {
        if let Some(left_out) = formed.sequence.take_put_off().filter(|put_off| put_off != call) {
            formed.give_up(&left_out);
            let rank = formed.signals.decided_out_of_step().unwrap_or(self.rank());
            return Err(self.out_of_step(call.op.name(), rank));
        }
        if guard.is_unfinished() && Call::from_words(&load(&formed.sequence.pending)) == *call {
            return Ok(deadline);
        }
        formed.signals.announce_next(true);
        let in_panic = InPanic(|| formed.give_up(call));
        let finished = self.await_earlier(formed, guard, call, deadline);
        std::mem::forget(in_panic);
        finished.inspect_err(|_| formed.signals.announce_next(false))
    }

    /// Waits for the calls before `call`: for one that gave up, and for late ranks of one that was left early, which that may
    /// have become meanwhile.
    fn await_earlier(
        &self,
        formed: &Formed,
        guard: &ChannelGuard<'_, RegionPads>,
        call: &Call,
        mut deadline: Deadline,
    ) -> Result<Deadline> {
        if guard.is_unfinished() {
            let pending = Call::from_words(&load(&formed.sequence.pending));
            let word = formed.sequence.word(&pending);
            let mut other = Made { group: self, formed, call: &pending, word, deadline };
            match other.exchange(guard) {
                Ok(_) => self.settle(formed, &pending, true),
                // It failed here when it gave up, and now it is over on all ranks, which go on to this one.
                Err(Error::Mismatch { .. }) => self.settle(formed, &pending, false),
                Err(error) => {
                    if matches!(error, Error::Timeout { .. } | Error::Interrupted { .. }) {
                        formed.put_off(call);
                    }
                    return Err(error);
                }
            }
            deadline = other.deadline;
        }
        let mut made = Made { group: self, formed, call, word: BARRIER, deadline };
        let mut waiting = Waiting::new(self, call.op.name(), None);
        let late = guard.await_late(&mut made.deadline, |arrived| waiting.is_hopeless(arrived));
        late.map_or_else(|stop| Err(made.failed(guard, stop)), |()| Ok(made.deadline))
    }

    /// Notes the outcome of a call that had given up. If it was a rendezvous that all ranks have reached, tells the others that
    /// this rank does not wait for it. Otherwise their messages would be kept here for ever.
    fn settle(&self, formed: &Formed, call: &Call, completed: bool) {
        let now = (formed.signals.generation(), formed.signals.epoch());
        let ticket = formed.sequence.awaited().take();
        if let Some(ticket) = ticket.filter(|ticket| (ticket.generation, ticket.epoch) == now) {
            let _ = ticket.outcome.set(completed); // settled once
        }
        if completed && call.op == RENDEZVOUS {
            self.decline_rendezvous(formed.sequence.count_rendezvous());
        }
    }

    /// Resets the sequence, while no thread is in a call.
    pub(super) fn reset_sequence(&self, formed: &Formed) {
        let (signals, sequence) = (&formed.signals, &formed.sequence);
        if signals.is_unfinished() {
            let call = Call::from_words(&load(&sequence.pending));
            self.settle(formed, &call, signals.was_completed());
        }
        sequence.forget_all();
        sequence.take_put_off();
        sequence.common_failure().take();
        signals.reset();
    }

    /// The barrier that a change of phase has just given up, for [`Group::outcome`].
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        let formed = self.0.health.formed.get()?;
        let (generation, epoch) = (formed.signals.generation(), formed.signals.epoch());
        let mut awaited = formed.sequence.awaited();
        let known = awaited.take().filter(|t| (t.generation, t.epoch) == (generation, epoch));
        let ticket = known.unwrap_or(Ticket { generation, epoch, outcome: Arc::default() });
        formed.signals.is_unfinished().then(|| awaited.insert(ticket).clone())
    }

    /// Whether a change of phase that gave up has completed on all ranks; `None` if that is not decided yet.
    pub(crate) fn outcome(&self, ticket: &Ticket) -> Option<bool> {
        let over = || (self.generation() != ticket.generation).then_some(false);
        ticket.outcome.get().copied().or_else(over)
    }

    /// How often the group was resynchronised.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        self.0.health.formed.get().map_or(0, |formed| formed.signals.generation())
    }

    /// The last call of the sequence that `rank` has reached, as far as this rank knows.
    pub(super) fn last_call(&self, rank: usize) -> Option<(u32, Call)> {
        let formed = self.0.health.formed.get()?;
        let (epoch, word) = formed.signals.last_call(rank);
        (epoch != 0).then(|| (epoch, formed.sequence.call(&formed.signals, rank, word, epoch)))
    }
}

impl Running<'_, '_> {
    /// The staging buffers of the next exchange. They are free: nobody reads what they held.
    #[inline]
    pub(crate) fn staging(&self) -> Staging<'_> {
        self.made.staging(self.guard.next_epoch())
    }

    /// Whether some ranks are on other hosts.
    #[inline]
    pub(crate) fn spans_hosts(&self) -> bool {
        self.made.formed.signals.spans()
    }

    pub(crate) fn group(&self) -> &Group {
        self.made.group
    }

    /// A barrier with data: after it, all ranks see `tiny` and what this rank wrote to the next staging buffers. Returns the
    /// staging buffers of all ranks, which do not change until the next exchange. From here on the call computes in the default
    /// floating-point environment. Long waits use the caller's environment, because they may run the caller's code.
    #[inline(always)]
    pub(crate) fn exchange(&mut self, tiny: Option<&Tiny>) -> Result<Staging<'_>> {
        let hints = self.made.formed.signals.hints();
        let epoch = self.made.arrive(&self.guard, tiny);
        self.floats.enter(); // costs nothing while the flags travel
        if !self.guard.all_agree_soon(self.made.word, epoch, |_| pause(hints)) {
            self.floats.leave();
            self.made.deadline = self.made.await_agreement(&self.guard, epoch)?;
            self.floats.enter();
        }
        self.made.all_agreed();
        Ok(self.made.staging(epoch))
    }

    /// After an exchange, where hosts have as many ranks each: waits until what the ranks of other hosts have sent to those of this one
    /// is there, see [`Staging::relayed`].
    pub(crate) fn await_landed(&mut self) -> Result<Staging<'_>> {
        let Made { group, formed, call, .. } = self.made;
        self.floats.leave();
        let mut waiting = Waiting::new(group, call.op.name(), None);
        let lost = |done: &dyn Fn(usize) -> bool| waiting.is_hopeless(done);
        let in_panic = InPanic(|| formed.give_up(call));
        let done = formed.signals.await_landed(&mut self.made.deadline, lost);
        std::mem::forget(in_panic);
        drop(waiting);
        done.map_err(|stop| match stop {
            Stop::Lost => group
                .stopped(stop, call.op.name(), None, &|rank| formed.signals.has_heard_all(rank)),
            stop => self.made.failed(&self.guard, stop),
        })?;
        self.floats.enter();
        Ok(self.made.staging(formed.signals.epoch()))
    }

    /// A barrier of the call: after it, all ranks see what each wrote before it.
    #[inline(always)]
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.made.exchange(&self.guard)
    }

    /// Whether, after the call has failed with `error`, no rank works in it or ever will: see [`Signals::is_void`].
    #[cold]
    pub(crate) fn is_void(&self, error: &Error) -> bool {
        let Made { formed, call, word, .. } = self.made;
        match error {
            _ if !self.made.has_arrived(&self.guard) => true,
            _ if word & CONTINUED != 0 => false,
            Error::Mismatch { .. } => true,
            // What ranks of other hosts have seen is not known here.
            Error::PeerLost { .. } if formed.signals.spans() => false,
            // A dead rank never arrives, so no rank passes.
            Error::PeerLost { rank, .. } => !formed.signals.has_arrived(*rank),
            _ => {
                formed.give_up(call);
                !formed.signals.spans() && formed.signals.is_void()
            }
        }
    }

    /// Fails if a rank gave the call up while the last rank arrived: then that rank has its memory back.
    #[inline]
    pub(crate) fn check_not_given_up(&self) -> Result<()> {
        match self.made.formed.signals.given_up_meanwhile() {
            None => Ok(()),
            Some(rank) => Err(self.made.group.out_of_step(self.made.call.op.name(), rank)),
        }
    }
}

impl<'a> Made<'a, '_> {
    /// A barrier of the call.
    #[inline(always)]
    fn exchange(&mut self, guard: &ChannelGuard<'_, RegionPads>) -> Result<()> {
        let epoch = self.arrive(guard, None);
        if !guard.all_agree_soon(self.word, epoch, pause_for_flag) {
            self.deadline = self.await_agreement(guard, epoch)?;
        }
        self.all_agreed();
        Ok(())
    }

    /// Tells all ranks that this one has arrived, with data if there is any. Returns the barrier's number.
    #[inline(always)]
    fn arrive(&self, guard: &ChannelGuard<'_, RegionPads>, tiny: Option<&Tiny>) -> u32 {
        if self.word == IN_FULL && !guard.is_unfinished() {
            guard.describe(&pack(&self.call.words()));
        }
        guard.arrive(self.word, tiny)
    }

    #[inline]
    fn staging(&self, epoch: u32) -> Staging<'a> {
        let (pads, layout) = self.formed.signals.pads();
        Staging { pads, layout, rank: self.group.rank(), epoch }
    }

    /// The wait of a barrier that takes longer. What is left of the deadline.
    #[cold]
    #[inline(never)]
    fn await_agreement(self, guard: &ChannelGuard<'_, RegionPads>, epoch: u32) -> Result<Deadline> {
        let mut deadline = self.deadline;
        let mut waiting = Waiting::new(self.group, self.call.op.name(), None);
        let lost = |arrived: &dyn Fn(usize) -> bool| waiting.is_hopeless(arrived);
        // No later call may resume it.
        let in_panic = InPanic(|| self.formed.give_up(self.call));
        let agreed = guard.await_agreement(epoch, &mut deadline, lost);
        std::mem::forget(in_panic);
        drop(waiting);
        agreed.map_or_else(|stop| Err(self.failed(guard, stop)), |()| Ok(deadline))
    }

    /// All ranks have made this call.
    #[inline(always)]
    fn all_agreed(&mut self) {
        if self.word & CONTINUED == 0 {
            self.know_call();
        }
    }

    /// The call has a number from here on, and peers compare that its barriers are not its first.
    #[inline]
    fn know_call(&mut self) {
        if self.word == IN_FULL {
            let words = self.call.words();
            self.formed.sequence.learn(&words);
            self.word = self.formed.sequence.number(&words, Sequence::place(&words));
        }
        self.word |= CONTINUED;
    }

    #[cold]
    fn failed(self, guard: &ChannelGuard<'_, RegionPads>, stop: Stop) -> Error {
        let (group, signals, op) = (self.group, &self.formed.signals, self.call.op.name());
        store(&self.formed.sequence.pending, &self.call.words());
        match stop {
            Stop::Differs { rank } => {
                let (word, epoch) = (signals.call_of(rank), signals.epoch());
                let theirs = self.formed.sequence.call(signals, rank, word, epoch);
                let (what, ours, theirs) = self.call.difference(&theirs);
                group.note_common(Error::Mismatch { op, what, rank, ours, theirs })
            }
            Stop::GivenUp { .. } => {
                // The rank that gave up a call first is to blame for what others give up afterwards.
                if !self.has_arrived(guard) {
                    self.formed.put_off(self.call);
                } else if !self.call.is_resumable() {
                    self.formed.give_up(self.call);
                }
                match signals.decided_out_of_step().filter(|&rank| rank != group.rank()) {
                    Some(rank) => group.out_of_step(op, rank),
                    None => group.stopped(stop, op, None, &|_| false),
                }
            }
            stop => group.stopped(stop, op, None, &|rank| signals.has_arrived(rank)),
        }
    }

    /// Whether peers can know that this rank makes the call.
    fn has_arrived(&self, guard: &ChannelGuard<'_, RegionPads>) -> bool {
        self.word & CONTINUED != 0 || guard.is_unfinished()
    }
}
