//! Signals and values that one rank sets in a word and another waits for.

use super::Group;
use super::form::Formed;
use super::waiting::Waiting;
use crate::error::Result;
use crate::signal::{Slot, Stop};
use crate::sync::{Deadline, Ordering, SharedWord};

/// What is done with a word, for errors.
#[derive(Clone, Copy)]
pub(crate) struct Act {
    pub(crate) op: &'static str,
    pub(crate) peer: usize,
    /// None for what is not a signal.
    pub(crate) channel: Option<usize>,
}

impl Group {
    /// Sends a signal to rank `to`, whose `wait_signal` then sees everything written before. Waits while an
    /// earlier signal of ours on the channel is not consumed. A rank may signal itself.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let soon = Duration::from_secs(5);
    /// if world.rank() == 0 {
    ///     world.put_signal(1, 0, soon)?;
    /// } else {
    ///     world.wait_signal(0, 0, soon)?; // sees all that rank 0 wrote before
    /// }
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    #[inline]
    pub fn put_signal(
        &self,
        to: usize,
        channel: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        let act = Act { op: "put_signal", peer: to, channel: Some(channel) };
        let deadline = deadline.into();
        let formed = self.begin_act(act, channel, deadline)?;
        let slot = formed.signals.slot_on(to, channel);
        self.finish_put(formed, &slot, act, deadline)
    }

    /// Waits for a signal from rank `from` and consumes it. Everything that `from` wrote before it is visible then.
    #[inline]
    pub fn wait_signal(
        &self,
        from: usize,
        channel: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        let act = Act { op: "wait_signal", peer: from, channel: Some(channel) };
        let deadline = deadline.into();
        let formed = self.begin_act(act, channel, deadline)?;
        let slot = formed.signals.slot_of(from, channel);
        self.finish_take(formed, &slot, act, deadline)
    }

    #[inline]
    fn begin_act(&self, act: Act, channel: usize, deadline: Deadline) -> Result<&Formed> {
        let Act { op, peer, .. } = act;
        self.check_rank(op, peer)?;
        self.check_channel(op, channel)?;
        tracing::trace!(op, rank = peer, channel, group = self.name());
        self.check_whole(op)?;
        self.formed_by(deadline).map(|formed| &**formed)
    }

    /// As `put_signal`, in a word of the caller's choice that the peer takes by [`Group::take_in`].
    #[inline]
    pub(crate) fn put_in(
        &self,
        slot: &Slot<'_, SharedWord>,
        act: Act,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_whole(act.op)?;
        self.finish_put(self.formed_by(deadline)?, slot, act, deadline)
    }

    /// As `wait_signal`, on a word of our own.
    #[inline]
    pub(crate) fn take_in(
        &self,
        slot: &Slot<'_, SharedWord>,
        act: Act,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_whole(act.op)?;
        self.finish_take(self.formed_by(deadline)?, slot, act, deadline)
    }

    #[inline]
    fn finish_put(
        &self,
        formed: &Formed,
        slot: &Slot<'_, SharedWord>,
        act: Act,
        deadline: Deadline,
    ) -> Result<()> {
        let signals = &formed.signals;
        if signals.put_now(slot, act.peer) {
            return Ok(());
        }
        self.slow_act(act, |lost| signals.put(slot, act.peer, deadline, lost))
    }

    #[inline]
    fn finish_take(
        &self,
        formed: &Formed,
        slot: &Slot<'_, SharedWord>,
        act: Act,
        deadline: Deadline,
    ) -> Result<()> {
        let signals = &formed.signals;
        if signals.take_soon(slot, act.peer) {
            return Ok(());
        }
        self.slow_act(act, |lost| signals.take(slot, act.peer, deadline, lost))
    }

    /// Sets a word that the peer awaits by [`Group::await_in`], whatever it was: release.
    pub(crate) fn set_in(&self, slot: &Slot<'_, SharedWord>, to: usize, value: u32) -> Result<()> {
        self.check_whole("set")?;
        self.formed()?.signals.set(slot, to, value); // pairs with the acquire in `await_in`
        Ok(())
    }

    /// Waits until a word of our own is `value`, and leaves it so: acquire.
    pub(crate) fn await_in(
        &self,
        slot: &Slot<'_, SharedWord>,
        value: u32,
        act: Act,
        deadline: Deadline,
    ) -> Result<()> {
        self.check_whole(act.op)?;
        // Acquire: pairs with the release in `set_in`.
        let reached = || slot.word.load(Ordering::Acquire) == value;
        self.await_act(act, deadline, reached)
    }

    /// Waits until `ready`, which the peer of `act` alone can bring about.
    pub(super) fn await_act(
        &self,
        act: Act,
        deadline: Deadline,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        let signals = &self.formed_by(deadline)?.signals;
        self.slow_act(act, |lost| signals.wait_for(act.peer, deadline, ready, lost))
    }

    /// What may wait for the peer of `act`, which alone can end it.
    #[cold]
    fn slow_act(
        &self,
        act: Act,
        wait: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<(), Stop>,
    ) -> Result<()> {
        let Act { op, peer, channel } = act;
        let mut waiting = Waiting::new(self, op, channel);
        let ended = wait(&mut || waiting.is_hopeless(&|rank| rank != peer));
        ended.map_err(|stop| self.stopped(stop, op, channel, &|rank| rank != peer))
    }
}
