//! Values in words of the caller's choice: set by one rank, awaited by another, never cleared.

use super::Group;
use super::waiting::Waiting;
use crate::error::Result;
use crate::sync::atomic::fence;
use crate::sync::{Deadline, Ordering, SharedWord};

impl Group {
    /// Sets a word that `to` awaits by [`Group::await_in`], whatever it was: release.
    pub(crate) fn set_in(&self, slot: &SharedWord, to: usize, value: u32) -> Result<()> {
        self.check_whole("set")?;
        let signals = &self.formed()?.signals;
        // Release: pairs with the acquire in `await_in`.
        slot.store(value, Ordering::Release);
        fence(Ordering::SeqCst); // pairs with the fence of a peer about to sleep, see `Bell`
        signals.bell(to).ring_if_asleep();
        Ok(())
    }

    /// Waits until a word of our own is `value`, and leaves it so: acquire.
    pub(crate) fn await_in(
        &self,
        slot: &SharedWord,
        from: usize,
        value: u32,
        deadline: Deadline,
    ) -> Result<()> {
        const OP: &str = "wait_value";
        self.check_whole(OP)?;
        // Acquire: pairs with the release in `set_in`.
        let reached = || slot.load(Ordering::Acquire) == value;
        let mut waiting = Waiting::new(self, OP);
        let lost = || waiting.is_hopeless(&|rank| rank != from);
        let stopped = self.formed_by(deadline)?.signals.wait_for(from, deadline, reached, lost);
        stopped.map_err(|stop| self.stopped(stop, OP, None, |r| r != from))
    }
}
