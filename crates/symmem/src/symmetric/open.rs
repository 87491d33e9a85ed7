//! One-sided access: a phase in which every rank may read and write every part, and no rank has slices of it.
//!
//! Elements are read and written as relaxed atomics of their size, so a read that races with a write gets the old or the new
//! element and never half of each. Signals and barriers order them, as with any other memory.

use crate::dtype::Element;
use crate::error::{Failed, Result};
use crate::group::{Group, Request};
use crate::memory::block::Access;
use crate::sync::shared::AtomicU32;
use crate::sync::{Deadline, Ordering};

use super::atomic::{Atomic, load, store};
use super::words::{check_elements, check_word_exists, fill_range};
use super::{Buffer, Handle, Memory, Paused, Phase, Symmetric};

/// Memory that all ranks of a group have mapped, in the phase in which every rank may put to and get from every part.
///
/// Dropping it is local and safe at any time, even while peers still put.
///
/// ```compile_fail,E0599
/// # use symmem::Open;
/// fn first(x: &Open<f32>) -> f32 {
///     x.local()[0] // a peer may be writing
/// }
/// ```
#[must_use = "dropping it gives the memory up while peers may use it"]
pub struct Open<T: Element>(Symmetric<T>);

impl<T: Element> Phase for Open<T> {
    const PEERS: Access = Access::Write;

    fn memory(&self) -> &Memory {
        self.0.memory()
    }
}

impl<T: Element> Symmetric<T> {
    /// A barrier after which every rank may put and get. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let open = world.alloc::<u32>(8)?.rendezvous(&world)?.open()?;
    /// open.put(1 - world.rank(), 3, &[7])?;
    /// let x = open.close()?; // all puts have arrived
    /// assert_eq!(x.local(), [0, 0, 0, 7, 0, 0, 0, 0]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn open(self) -> Result<Open<T>, Failed<Paused<Open<T>>>> {
        Paused::new(Open(self), "open").resume()
    }

    /// As [`Symmetric::open`], without the barrier.
    ///
    /// # Safety
    /// As long as the value lives, all ranks access these elements only through such values, except where the
    /// caller's own signals and barriers order the access with all puts and gets.
    pub unsafe fn assume_open(self) -> Open<T> {
        self.handle().block().set_raw();
        Open(self)
    }
}

impl<T: Element> Paused<Open<T>> {
    /// Continues to wait for the phase to begin.
    pub fn resume(self) -> Result<Open<T>, Failed<Self>> {
        self.advance()
    }

    /// Returns the memory to its former phase, if the change has failed on all ranks.
    pub fn give_up(self) -> Result<Symmetric<T>, Self> {
        self.go_back().map(|open| open.0)
    }

    /// See [`Open::rendezvous`].
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        self.to(|open| open.0).rendezvous(group)
    }
}

impl<T: Element> Paused<Symmetric<T>> {
    /// Returns to putting and getting, after an [`Open::close`] that has failed on all ranks.
    pub fn reopen(self) -> Result<Open<T>, Self> {
        if self.op() != "close" || !self.is_void() {
            return Err(self);
        }
        Ok(Open(self.into_phase()))
    }
}

impl<T: Element> Open<T> {
    /// How many elements each rank has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The group that mapped it.
    pub fn group(&self) -> &Group {
        self.0.group()
    }

    /// The handle: raw pointers, signal pad, sizes.
    pub fn handle(&self) -> &Handle {
        self.0.handle()
    }

    /// Relaxed: writes `data` to rank `rank`'s part, from its element `at` on. A later signal or barrier of this rank
    /// makes it visible to the ranks that wait for that.
    pub fn put(&self, rank: usize, at: usize, data: &[T]) -> Result<()> {
        let Some(to) = self.place("put", rank, at, data.len())? else {
            return self.0.memory().put_far("put", rank, at, data);
        };
        // SAFETY: within the part; in this phase everyone touches it by atomics of the elements' size only.
        unsafe { store(data, to) };
        Ok(())
    }

    /// Relaxed: reads rank `rank`'s part into `out`, from its element `at` on. Sees what was put before a signal or
    /// barrier for which this rank has waited.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(2)?.rendezvous(&world)?;
    /// x.local_mut().fill(world.rank());
    /// let open = x.open()?;
    /// let mut out = [9; 2];
    /// open.get(1, 0, &mut out)?;
    /// assert_eq!(out, [1; 2]);
    /// open.close()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn get(&self, rank: usize, at: usize, out: &mut [T]) -> Result<()> {
        let Some(from) = self.place("get", rank, at, out.len())? else {
            return self.0.memory().get_far("get", rank, at, out);
        };
        // SAFETY: as in `put`.
        unsafe { load(from, out) };
        Ok(())
    }

    /// Release: as [`Open::put`], and then a signal in this memory's pad. The [`Open::wait_signal`] that consumes it sees the
    /// data, and everything that this rank wrote before. Waits while an earlier signal of ours on the channel is not consumed.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let soon = Duration::from_secs(5);
    /// let open = world.alloc::<f32>(4)?.rendezvous(&world)?.open()?;
    /// if world.rank() == 0 {
    ///     open.put_signal(1, 0, &[1.0, 2.0], 0, soon)?;
    /// } else {
    ///     open.wait_signal(0, 0, soon)?;
    ///     let mut got = [0.0; 2];
    ///     open.get(1, 0, &mut got)?;
    ///     assert_eq!(got, [1.0, 2.0]);
    /// }
    /// open.close()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn put_signal(
        &self,
        rank: usize,
        at: usize,
        data: &[T],
        channel: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        self.put(rank, at, data)?;
        self.handle().signal_pad().put(rank, channel, deadline)
    }

    /// Acquire: waits for the signal of an [`Open::put_signal`] of rank `from` to this memory, and consumes it.
    pub fn wait_signal(
        &self,
        from: usize,
        channel: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        self.handle().signal_pad().wait(from, channel, deadline)
    }

    /// Release: as [`Open::put`], and then sets our word of `channel` in `rank`'s pad of this memory to `value`. The
    /// [`Open::wait_value`] that finds it there sees the data, and everything that this rank wrote before.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let open = world.alloc::<f32>(4)?.rendezvous(&world)?.open()?;
    /// if world.rank() == 0 {
    ///     open.put_value(1, 0, &[1.0], 0, 42)?;
    /// } else {
    ///     open.wait_value(0, 0, 42, Duration::from_secs(5))?; // the value stays
    /// }
    /// open.close()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn put_value(
        &self,
        rank: usize,
        at: usize,
        data: &[T],
        channel: usize,
        value: u32,
    ) -> Result<()> {
        self.put(rank, at, data)?;
        self.handle().signal_pad().set(rank, channel, value)
    }

    /// Acquire: waits until an [`Open::put_value`] of rank `from` on `channel` has stored `value`, which stays there.
    pub fn wait_value(
        &self,
        from: usize,
        channel: usize,
        value: u32,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        self.handle().signal_pad().wait_value(from, channel, value, deadline)
    }

    /// A barrier after which each rank owns its part again, with everything that was put into it. Collective.
    pub fn close(self) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused::new(self.0, "close").resume()
    }

    /// A copy of this rank's part, which can be used again after a [`Buffer::rendezvous`]. Not collective: peers may still
    /// put into the memory itself, which is not reused.
    pub fn give_up(self) -> Result<Buffer<T>> {
        self.0.copy_of_open()
    }

    /// The same memory in the group of the survivors, where each owns its part again. Collective over `group`,
    /// which must contain all living members of the old group.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused::new(self.0, "close").rendezvous(group)
    }

    /// `len` elements of rank `rank`'s part; nothing if that is on another host.
    fn place(
        &self,
        op: &'static str,
        rank: usize,
        at: usize,
        len: usize,
    ) -> Result<Option<*mut T>> {
        check_elements(self.group(), op, (rank, self.len()), at, len)?;
        Ok(self.0.memory().part_of(rank).map(|part| part.as_ptr().cast::<T>().wrapping_add(at)))
    }
}

impl<T: Atomic> Open<T> {
    /// Acquire and release: adds `value` to element `at` of rank `rank`'s part, wrapping around, and returns what it was
    /// before. Additions of several ranks at the same time all count.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let tickets = world.alloc::<u64>(1)?.rendezvous(&world)?.open()?;
    /// let ticket = tickets.fetch_add(0, 0, 1)?; // each rank draws another
    /// assert!(ticket < 3);
    /// assert_eq!(tickets.close()?.local()[0], if world.rank() == 0 { 3 } else { 0 });
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn fetch_add(&self, rank: usize, at: usize, value: T) -> Result<T> {
        const OP: &str = "fetch_add";
        let Some(element) = self.place(OP, rank, at, 1)? else {
            return self.0.memory().change_far(OP, rank, at, Request::Add(value.bits()));
        };
        // SAFETY: S1 by the memory that `self` holds, S3 by `place`; in this phase it is touched by atomics only.
        Ok(unsafe { T::fetch_add(element, value) })
    }

    /// Acquire and release: sets element `at` of rank `rank`'s part to `new` if it is `expected`, and returns what it was
    /// before: `expected`, if it was set.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let lock = world.alloc::<u32>(1)?.rendezvous(&world)?.open()?;
    /// let holder = lock.compare_swap(0, 0, 0, world.rank() as u32 + 1)?; // 0 on one rank alone
    /// # let mut winners = [u32::from(holder == 0)];
    /// # world.all_reduce(&mut winners, symmem::ReduceOp::Sum)?;
    /// # assert_eq!(winners, [1]);
    /// # lock.close()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn compare_swap(&self, rank: usize, at: usize, expected: T, new: T) -> Result<T> {
        const OP: &str = "compare_swap";
        let Some(element) = self.place(OP, rank, at, 1)? else {
            let ask = Request::Swap { expected: expected.bits(), new: new.bits() };
            return self.0.memory().change_far(OP, rank, at, ask);
        };
        // SAFETY: as in `fetch_add`.
        Ok(unsafe { T::compare_swap(element, expected, new) })
    }
}

impl Open<u32> {
    /// Relaxed: sets `count` words of rank `rank`'s part, from word `offset` on, to `value`.
    pub fn memset32(&self, rank: usize, offset: usize, value: u32, count: usize) -> Result<()> {
        let words = fill_range(self.group(), self.len(), offset, count)?;
        self.put(rank, words.start, &vec![value; words.len()])
    }

    /// Release: sets word `offset` of rank `rank`'s part to `value`. A rank that reads it with [`Open::read_value32`] sees
    /// everything that this rank wrote before.
    pub fn write_value32(&self, rank: usize, offset: usize, value: u32) -> Result<()> {
        const OP: &str = "write_value32";
        check_word_exists(self.group(), self.len(), offset)?;
        match self.word(OP, rank, offset)? {
            // Release: pairs with the acquire in `read_value32`.
            Some(word) => word.store(value, Ordering::Release),
            None => self.0.memory().put_far(OP, rank, offset, &[value])?,
        }
        Ok(())
    }

    /// Acquire: word `at` of rank `rank`'s part.
    pub fn read_value32(&self, rank: usize, at: usize) -> Result<u32> {
        const OP: &str = "read_value32";
        match self.word(OP, rank, at)? {
            // Acquire: pairs with the release in `write_value32`.
            Some(word) => Ok(word.load(Ordering::Acquire)),
            None => {
                let mut word = [0];
                self.0.memory().get_far(OP, rank, at, &mut word)?;
                Ok(word[0])
            }
        }
    }

    fn word(&self, op: &'static str, rank: usize, at: usize) -> Result<Option<&AtomicU32>> {
        let word = self.place(op, rank, at, 1)?;
        // SAFETY: S1 by the memory that `self` holds, S3 by `place`; in this phase it is touched by atomics only.
        Ok(word.map(|word| unsafe { AtomicU32::from_ptr(word) }))
    }
}

impl<T: Element> std::fmt::Debug for Open<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Open").field(&self.0).finish()
    }
}
