//! The signal pad of an allocation: words for the user's own protocols, with PyTorch's layout.

use crate::error::{Error, Result};
use crate::group::{Act, Group, no_descriptor};
use crate::memory::block::Mapping;
use crate::signal::Slot;
use crate::sync::{Deadline, Expiry, SharedWord, lock_by};

/// The pads of all ranks for one allocation. Zero at first; the library itself touches them only in these methods.
///
/// Word `ws · channel + source` of a rank's pad is where `source` signals to it: 0 → 1 by the sender
/// with release, 1 → 0 by the receiver with acquire, zero at rest. [`SignalPad::put`] and [`SignalPad::wait`]
/// keep to that, so that they can be mixed with the user's own code, also on a GPU. [`SignalPad::barrier`] is made of them.
///
/// An allocation has one pad, whatever groups it is rendezvoused with, as in PyTorch. Two groups that use it at the same time
/// need channels whose words are different: channel 1 of two ranks and channel 0 of four are both words 2 and 3.
pub struct SignalPad<'a> {
    group: &'a Group,
    mapping: &'a Mapping,
    bytes: usize,
}

impl<'a> SignalPad<'a> {
    pub(super) fn new(group: &'a Group, mapping: &'a Mapping, bytes: usize) -> Self {
        Self { group, mapping, bytes }
    }

    /// How many channels fit.
    pub fn channels(&self) -> usize {
        self.bytes / (4 * self.group.size())
    }

    /// The words of rank `rank`'s pad, if it is on this host.
    pub fn words(&self, rank: usize) -> Result<&'a [SharedWord]> {
        let words = self.pad("signal_pad", rank)?;
        if self.group.is_local(rank) { Ok(words) } else { Err(self.group.out_of_reach(rank)) }
    }

    /// The words of rank `rank`'s pad, or of their mirror.
    #[inline]
    fn pad(&self, op: &'static str, rank: usize) -> Result<&'a [SharedWord]> {
        self.group.check_rank(op, rank)?;
        self.mapping.pad(rank).ok_or_else(|| self.no_pad(rank))
    }

    #[cold]
    fn no_pad(&self, rank: usize) -> Error {
        let of_device = self.mapping.pad_region(rank).and_then(|pad| pad.check_host().err());
        of_device.unwrap_or_else(no_descriptor)
    }

    /// Release: sets our word of `channel` in rank `to`'s pad; waits while the last signal there is not consumed.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let soon = Duration::from_secs(5);
    /// let x = world.alloc::<u8>(1)?.rendezvous(&world)?;
    /// let pad = x.handle().signal_pad();
    /// if world.rank() == 0 {
    ///     pad.put(1, 0, soon)?;
    /// } else {
    ///     pad.wait(0, 0, soon)?;
    /// }
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn put(&self, to: usize, channel: usize, deadline: impl Into<Deadline>) -> Result<()> {
        self.put_for("signal_pad.put", to, channel, deadline.into())
    }

    #[inline]
    fn put_for(&self, op: &'static str, to: usize, channel: usize, by: Deadline) -> Result<()> {
        let act = Act { op, peer: to, channel: Some(channel) };
        let slot = self.slot(op, to, channel, self.group.rank())?;
        self.group.put_in(&slot, act, by)
    }

    /// Acquire: waits until rank `from` has set its word of `channel` in our pad, and clears it.
    pub fn wait(&self, from: usize, channel: usize, deadline: impl Into<Deadline>) -> Result<()> {
        self.wait_for("signal_pad.wait", from, channel, deadline.into())
    }

    #[inline]
    fn wait_for(&self, op: &'static str, from: usize, channel: usize, by: Deadline) -> Result<()> {
        let act = Act { op, peer: from, channel: Some(channel) };
        self.group.check_rank(op, from)?;
        let slot = self.slot(op, self.group.rank(), channel, from)?;
        self.group.take_in(&slot, act, by)
    }

    /// Waits for all ranks, over the words of `channel`: each rank signals to every peer and waits for their signals. Everything
    /// that any rank wrote before it is visible to every rank after it. After a [`Timeout`](crate::Error::Timeout), the next call
    /// resumes it.
    pub fn barrier(&self, channel: usize, deadline: impl Into<Deadline>) -> Result<()> {
        const OP: &str = "signal_pad.barrier";
        self.slot(OP, self.group.rank(), channel, 0)?;
        let deadline = deadline.into().start();
        let busy = |(why, after): (Expiry, _)| why.error(OP, vec![self.group.rank()], after);
        let progress = self.mapping.barrier_on(channel);
        let mut progress = lock_by(&progress, deadline).map_err(busy)?;
        let (put, taken) = &mut *progress;
        let peers = (0..self.group.size()).filter(|&rank| rank != self.group.rank());
        for peer in peers.clone().skip(*put) {
            self.put_for(OP, peer, channel, deadline)?;
            *put += 1;
        }
        for peer in peers.skip(*taken) {
            self.wait_for(OP, peer, channel, deadline)?;
            *taken += 1;
        }
        *progress = (0, 0);
        Ok(())
    }

    /// Release: sets our word of `channel` in rank `to`'s pad to `value`, whatever it was, without waiting. A word is
    /// used for values or for [`SignalPad::put`], not for both at once.
    pub fn set(&self, to: usize, channel: usize, value: u32) -> Result<()> {
        let slot = self.slot("signal_pad.set", to, channel, self.group.rank())?;
        self.group.set_in(&slot, to, value)
    }

    /// Acquire: waits until rank `from` has set its word of `channel` in our pad to `value`, and leaves it so.
    pub fn wait_value(
        &self,
        from: usize,
        channel: usize,
        value: u32,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        let act = Act { op: "signal_pad.wait_value", peer: from, channel: Some(channel) };
        self.group.check_rank(act.op, from)?;
        let slot = self.slot(act.op, self.group.rank(), channel, from)?;
        self.group.await_in(&slot, value, act, deadline.into())
    }

    #[inline]
    fn slot(
        &self,
        op: &'static str,
        owner: usize,
        channel: usize,
        source: usize,
    ) -> Result<Slot<'a, SharedWord>> {
        let words = self.pad(op, owner)?;
        // All words of the channel, or there would be one that only some ranks have. Without a division, which takes as long as a signal.
        let size = self.group.size();
        let first = channel.checked_mul(size);
        let of_channel = first.and_then(|first| words.get(first..first.checked_add(size)?));
        let word = of_channel.and_then(|words| words.get(source));
        let word = word.ok_or_else(|| self.bad_channel(op, channel))?;
        Ok(Slot { word, pad: self.mapping.number, channel })
    }

    #[cold]
    fn bad_channel(&self, op: &'static str, channel: usize) -> Error {
        let expected = format!("a channel in [0, {})", self.channels());
        self.group.usage(op, expected, channel.to_string())
    }
}

impl std::fmt::Debug for SignalPad<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignalPad")
            .field("group", &self.group)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
