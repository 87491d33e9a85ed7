//! One-sided operations in a stream: signals through an allocation's own pad, and puts, gets and fills of any rank's part.
//!
//! Nothing here is collective or ordered with the group's kernels in other streams. Failures in a stream are reported as for
//! collectives: by every later call on the group, and by every call that takes results off the device.
#![allow(unsafe_code)] // S1, S3: ranks, channels and ranges are checked here; S4

use std::time::Duration;

use super::nvshmem::Nvshmem;
use super::symmetric::{Symmetric, View, ViewMut};
use crate::cuda::device::kernels::parameters;
use crate::cuda::device::module::Parameter;
use crate::cuda::group::comm::out_of_reach;
use crate::cuda::group::layout::DeviceHandle;
use crate::cuda::memory::Memory;
use crate::cuda::stream::Stream;
use crate::dtype::Element;
use crate::error::Result;
use crate::group::op_code;
use crate::symmetric::{check_elements, check_word_exists, fill_range};

/// What a wait for a value waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Until {
    /// This value.
    Equal(u64),
    /// This value or more.
    AtLeast(u64),
}

impl Until {
    fn parts(self) -> (u64, u32) {
        match self {
            Self::Equal(value) => (value, 0),
            Self::AtLeast(value) => (value, 1),
        }
    }
}

impl<T: Element> Symmetric<T> {
    /// Release: sets our word of `channel` in rank `to`'s pad of this memory, in `stream`. What follows
    /// the [`Symmetric::wait_signal`] that consumes it sees everything before this in the stream.
    ///
    /// The stream waits while an earlier signal there is not consumed. A rank may signal itself.
    ///
    /// ```no_run
    /// # use symmem::{World, cuda::Gpu};
    /// # let world = World::from_env()?;
    /// # let gpu = Gpu::open(0)?;
    /// # let stream = gpu.stream()?;
    /// # let x = gpu.alloc::<f32>(&world, 1024)?.rendezvous(&world)?;
    /// if world.rank() == 0 {
    ///     x.put_signal(1, 0, &stream)?;
    /// } else {
    ///     x.wait_signal(0, 0, &stream)?;
    /// }
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn put_signal(&self, to: usize, channel: usize, stream: &Stream) -> Result<()> {
        self.put_signal_within(to, channel, Duration::ZERO, stream)
    }

    /// As [`Symmetric::put_signal`], waiting for no longer than `limit`; 0 is the group's.
    pub fn put_signal_within(
        &self,
        to: usize,
        channel: usize,
        limit: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.signal("put_signal", to, channel, limit, stream)
    }

    /// Acquire: makes `stream` wait until rank `from` has set its word of `channel` in our pad, and clears it.
    pub fn wait_signal(&self, from: usize, channel: usize, stream: &Stream) -> Result<()> {
        self.wait_signal_within(from, channel, Duration::ZERO, stream)
    }

    /// As [`Symmetric::wait_signal`], waiting for no longer than `limit`; 0 is the group's.
    pub fn wait_signal_within(
        &self,
        from: usize,
        channel: usize,
        limit: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.signal("wait_signal", from, channel, limit, stream)
    }

    /// Release and acquire: signals to all ranks and from all ranks on `channel` of this memory's pad, in `stream`.
    ///
    /// After a failure it is unknown which of the channel's words are set.
    pub fn barrier_on_channel(&self, channel: usize, stream: &Stream) -> Result<()> {
        self.barrier_on_channel_within(channel, Duration::ZERO, stream)
    }

    /// As [`Symmetric::barrier_on_channel`], waiting for no longer than `limit`; 0 is the group's.
    pub fn barrier_on_channel_within(
        &self,
        channel: usize,
        limit: Duration,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "barrier_on_channel";
        self.memory.comm.check_together(self.group(), NAME)?;
        let channel = self.memory.check_channel(NAME, channel)?;
        let handle = self.memory.handle_within(op_code(NAME), limit);
        let (threads, list) = (handle.size.next_multiple_of(32), parameters![handle, channel]);
        // SAFETY: the kernel's parameters in order; it touches the words of a channel that all pads have.
        unsafe { self.memory.run_one(NAME, threads, stream, list) }
    }

    /// Relaxed: copies `data` to rank `rank`'s part, from its element `at` on, in `stream`. A later signal or barrier in
    /// the stream makes it visible to the ranks that wait for that. Uses the network if nothing else connects the two.
    pub fn put(&self, rank: usize, at: usize, data: View<'_, T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "put";
        let to = self.memory.part_at(NAME, rank, at, data.len)?;
        if !self.memory.reaches(rank) {
            return self.over_network(NAME, rank)?.put(rank, at, data, stream);
        }
        self.memory.copied(NAME, to, data.address, data.len, stream)
    }

    /// Relaxed: copies rank `rank`'s part to `out`, from its element `at` on, in `stream`. Sees what was put before a
    /// signal or barrier that precedes this in the stream.
    pub fn get(&self, rank: usize, at: usize, out: ViewMut<'_, T>, stream: &Stream) -> Result<()> {
        const NAME: &str = "get";
        let from = self.memory.part_at(NAME, rank, at, out.len)?;
        if !self.memory.reaches(rank) {
            return self.over_network(NAME, rank)?.get(rank, at, out, stream);
        }
        self.memory.copied(NAME, out.address, from, out.len, stream)
    }

    /// Release: as [`Symmetric::put`], and then [`Symmetric::put_signal`] to the same rank.
    pub fn put_with_signal(
        &self,
        rank: usize,
        at: usize,
        data: View<'_, T>,
        channel: usize,
        stream: &Stream,
    ) -> Result<()> {
        self.memory.check_channel("put_signal", channel)?; // before anything is copied
        self.memory.check_reach("put_signal", rank)?;
        self.put(rank, at, data, stream)?;
        self.put_signal(rank, channel, stream)
    }

    /// Release: sets word `word`, of 8 bytes, of rank `to`'s pad of this memory to `value`, in `stream`, whatever it was. What
    /// follows the [`Symmetric::wait_value`] that finds it sees everything before this in the stream.
    ///
    /// A word is used for values or for signals, not for both at once.
    pub fn put_value(&self, to: usize, word: usize, value: u64, stream: &Stream) -> Result<()> {
        const NAME: &str = "put_value";
        self.memory.check_reach(NAME, to)?;
        let (to, word) = (to as u32, self.memory.check_word(NAME, word)?);
        let handle = self.memory.device_handle_about(op_code(NAME));
        // SAFETY: the kernel's parameters in order; it touches one word of a pad that there is.
        unsafe { self.memory.run_one(NAME, 32, stream, parameters![handle, to, word, value]) }
    }

    /// As [`Symmetric::put`], and then [`Symmetric::put_value`] to the same rank.
    pub fn put_with_value(
        &self,
        rank: usize,
        at: usize,
        data: View<'_, T>,
        (word, value): (usize, u64),
        stream: &Stream,
    ) -> Result<()> {
        self.memory.check_word("put_value", word)?; // before anything is copied
        self.memory.check_reach("put_value", rank)?;
        self.put(rank, at, data, stream)?;
        self.put_value(rank, word, value, stream)
    }

    /// Acquire: makes `stream` wait until word `word`, of 8 bytes, of our pad, which rank `from` sets, is as `until` says.
    pub fn wait_value(
        &self,
        from: usize,
        word: usize,
        until: Until,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "wait_value";
        self.memory.check_reach(NAME, from)?;
        let word = self.memory.check_word(NAME, word)?;
        let (from, (value, least)) = (from as u32, until.parts());
        let handle = self.memory.device_handle_about(op_code(NAME));
        // SAFETY: the kernel's parameters in order; it reads one word of our pad.
        unsafe {
            self.memory.run_one(NAME, 32, stream, parameters![handle, from, word, value, least])
        }
    }

    /// What reaches a rank that only the network connects.
    fn over_network(&self, name: &'static str, rank: usize) -> Result<Nvshmem<'_, T>> {
        self.nvshmem().map_err(|_| out_of_reach(self.group(), name, rank))
    }
}

impl Memory {
    /// A word of 8 bytes of the pads, as kernels count them.
    pub(in crate::cuda) fn check_word(&self, name: &'static str, word: usize) -> Result<u32> {
        let words = self.handle.signal_pad_size() / 8;
        match u32::try_from(word) {
            Ok(number) if word < words => Ok(number),
            _ => {
                let expected = format!("a word of 8 bytes among the {words} of the signal pad");
                Err(self.group().usage(name, expected, word.to_string()))
            }
        }
    }

    /// Runs the kernel `name` on our word of `channel` in `peer`'s pad, or on its in ours.
    fn signal(
        &self,
        name: &'static str,
        peer: usize,
        channel: usize,
        limit: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.check_reach(name, peer)?;
        let (peer, channel) = (peer as u32, self.check_channel(name, channel)?);
        let handle = self.handle_within(op_code(name), limit);
        // SAFETY: the kernel's parameters in order; it touches one word, of a rank and a channel that there are.
        unsafe { self.run_one(name, 32, stream, parameters![handle, peer, channel]) }
    }

    /// What a kernel gets that waits for no longer than `limit`; 0 is the group's.
    fn handle_within(&self, op: u32, limit: Duration) -> DeviceHandle {
        let handle = self.device_handle_about(op);
        if limit.is_zero() {
            return handle;
        }
        DeviceHandle { timeout: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), ..handle }
    }

    /// Puts one block of the kernel `name` into `stream`.
    ///
    /// # Safety
    /// See [`Gpu::launch`](super::Gpu).
    unsafe fn run_one(
        &self,
        name: &'static str,
        threads: u32,
        stream: &Stream,
        parameters: &[Parameter<'_>],
    ) -> Result<()> {
        self.comm.enqueue_unordered(self.group(), name, stream, || {
            let (kernel, target) = (self.gpu.kernel("move", name, threads)?, stream.target()?);
            self.comm.mark_before(target);
            // SAFETY: as the caller promises.
            unsafe { self.launch(kernel, 1, target, parameters) }
        })
    }

    /// Whether rank `rank`'s part has an address here.
    fn reaches(&self, rank: usize) -> bool {
        self.parts.0.get(rank).is_some_and(|&part| part != 0)
    }

    /// Refuses a rank that there is not, or that only the network connects.
    fn check_reach(&self, name: &'static str, rank: usize) -> Result<()> {
        self.group().check_rank(name, rank)?;
        if self.reaches(rank) { Ok(()) } else { Err(out_of_reach(self.group(), name, rank)) }
    }

    /// A channel of the pads, as kernels count them.
    fn check_channel(&self, name: &'static str, channel: usize) -> Result<u32> {
        let channels = self.channels();
        tracing::trace!(op = name, channel, group = self.group().name());
        match u32::try_from(channel) {
            Ok(channel) if channel < channels => Ok(channel),
            _ => {
                let last = i64::from(channels) - 1;
                let expected = format!("a channel up to {last}, the maximum supported channel");
                Err(self.group().usage(name, expected, channel.to_string()))
            }
        }
    }

    /// Where `len` elements of rank `rank`'s part lie.
    fn part_at(&self, name: &'static str, rank: usize, at: usize, len: usize) -> Result<u64> {
        check_elements(self.group(), name, (rank, self.len()), at, len)?;
        let part = self.parts.0.get(rank).copied().unwrap_or(0);
        Ok(part + (at * self.size()) as u64)
    }

    fn copied(
        &self,
        name: &'static str,
        to: u64,
        from: u64,
        len: usize,
        stream: &Stream,
    ) -> Result<()> {
        let bytes = len * self.size();
        if to.abs_diff(from) < bytes as u64 {
            let expected = "elements that do not overlap".to_owned();
            return Err(self.group().usage(name, expected, "some that do".to_owned()));
        }
        self.comm.enqueue_unordered(self.group(), name, stream, || {
            if bytes == 0 {
                return Ok(());
            }
            self.gpu.call(|driver| {
                // SAFETY: S3: within a part and the caller's view; S1: neither is unmapped while the stream may use it.
                unsafe { driver.copy(to, from, bytes, stream.raw()) }
            })
        })
    }
}

impl Symmetric<u32> {
    /// Relaxed: sets `count` words of rank `rank`'s part, from word `offset` on, to `value`, in `stream`.
    pub fn memset32(
        &self,
        rank: usize,
        offset: usize,
        value: u32,
        count: usize,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "memset32";
        let range = fill_range(self.group(), self.len(), offset, count)?;
        self.memory.check_reach(NAME, rank)?;
        let to = self.memory.part_at(NAME, rank, range.start, range.len())?;
        self.memory.comm.enqueue_unordered(self.group(), NAME, stream, || {
            self.memory.gpu.call(|driver| {
                // SAFETY: S3: within a part; S1: it is not unmapped while the stream may use it.
                unsafe { driver.memset32(to, value, range.len(), stream.raw()) }
            })
        })
    }

    /// Release: sets word `offset` of rank `rank`'s part to `value`, after everything before it in `stream`. A rank
    /// that reads it sees that too. If a driver cannot capture it, use [`Symmetric::memset32`].
    pub fn write_value32(
        &self,
        rank: usize,
        offset: usize,
        value: u32,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "write_value32";
        check_word_exists(self.group(), self.len(), offset)?;
        self.memory.check_reach(NAME, rank)?;
        let to = self.memory.part_at(NAME, rank, offset, 1)?;
        self.memory.comm.enqueue_unordered(self.group(), NAME, stream, || {
            self.memory.gpu.call(|driver| {
                // SAFETY: S3: a word of a part; S1: it is not unmapped while the stream may use it.
                unsafe { driver.write32(stream.raw(), to, value) }
            })
        })
    }
}
