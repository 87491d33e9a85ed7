//! What users hold: memory of one rank ([`Buffer`]), memory that all ranks have mapped ([`Symmetric`]), and that memory
//! in the phase in which every rank may read every part ([`Shared`]).
//!
//! A value of one of these types gives the right to do what its phase allows. Changing the phase takes the value and
//! gives the next, after a barrier, so safe code cannot read a peer's memory while the peer may write it.
#![doc = include_str!("phases.md")]
#![allow(unsafe_code)] // S1 (the handle keeps every mapping), S2 (slices only as the phase allows), S6 (the `open` mark)

mod atomic;
mod handle;
mod memory;
mod open;
mod pad;
mod part;
mod paused;
mod persistent;
mod pool;
mod words;

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

pub use atomic::Atomic;
use atomic::load;
pub use handle::Handle;
pub(crate) use memory::{Memory, Phase};
pub use open::Open;
pub use pad::SignalPad;
pub use paused::Paused;
pub use pool::Pool;
pub(crate) use words::{check_elements, check_word_exists, fill_range};

use crate::dtype::{DType, Element};
use crate::error::{Failed, Result};
use crate::group::{Group, check_pad_size};
use crate::memory::Backend;
use crate::memory::block::Access;
use crate::memory::block::{Block, Segment, Shape};
use handle::keeping;
pub(crate) use handle::{Far, Offer, Ownership};

/// Memory of this rank alone, not yet mapped by anyone else. Zeroed.
pub struct Buffer<T> {
    block: Arc<Block>,
    len: usize,
    elements: PhantomData<T>,
}

impl Group {
    /// Allocates `len` elements of symmetric memory, zeroed. Not collective. `len` may be 0.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut buffer = world.alloc::<f32>(1024)?;
    /// buffer.local_mut().fill(1.0);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.alloc_with_pad(len, self.context().pad_size())
    }

    /// As [`Group::alloc`], with a signal pad of `pad` bytes, which is the same on all ranks of a rendezvous.
    pub fn alloc_with_pad<T: Element>(&self, len: usize, pad: usize) -> Result<Buffer<T>> {
        let block = self.block_with_pad(Arc::clone(self.backend()), len, T::DTYPE, pad)?;
        Ok(Buffer { block, len, elements: PhantomData })
    }

    /// A block for `len` elements in a segment of its own, from any backend.
    pub(crate) fn block_of(
        &self,
        backend: Arc<dyn Backend>,
        len: usize,
        dtype: DType,
    ) -> Result<Arc<Block>> {
        self.block_with_pad(backend, len, dtype, self.context().pad_size())
    }

    pub(crate) fn block_with_pad(
        &self,
        backend: Arc<dyn Backend>,
        len: usize,
        dtype: DType,
        pad: usize,
    ) -> Result<Arc<Block>> {
        check_pad_size("alloc", Some(self.rank()), pad, 1)?;
        self.shaped(backend, Shape { pad, ..self.shape(len, dtype)? })
    }

    fn shaped(&self, backend: Arc<dyn Backend>, shape: Shape) -> Result<Arc<Block>> {
        self.check_free("alloc", &*backend)?;
        let id = crate::mesh::endpoint::random()?;
        let total = shape.total().unwrap_or(usize::MAX);
        let segment = Arc::new(Segment::allocate(backend, total, id)?);
        let block = Arc::new(Block::new(segment, 0, shape, None)?);
        self.context().table.insert(&block);
        Ok(block)
    }

    /// Fails if the backend is busy with something that an allocation or mapping would disturb.
    pub(crate) fn check_free(&self, op: &'static str, backend: &dyn Backend) -> Result<()> {
        let Some(occupation) = backend.occupation()? else { return Ok(()) };
        Err(self.usage(
            op,
            "no operation in progress that this call would disturb".into(),
            occupation,
        ))
    }

    /// The parts of a block for `len` elements.
    fn shape(&self, len: usize, dtype: DType) -> Result<Shape> {
        let pad = self.context().pad_size();
        let shape = len.checked_mul(dtype.size()).map(|bytes| Shape { bytes, pad });
        shape.filter(|s| s.total().is_some()).ok_or_else(|| {
            let expected = "a length that fits the address space".to_owned();
            self.usage("alloc", expected, format!("{len} elements of {dtype}"))
        })
    }
}

impl<T: Element> Buffer<T> {
    /// Maps all ranks' buffers into each. Collective over `group`, the first time for this allocation and group.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let x = world.alloc::<f32>(1024)?.rendezvous(&world)?;
    /// assert_eq!(x.len(), 1024);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Self>> {
        let handle = Handle::offer(&self.block, group, &Offer::new(T::DTYPE));
        let memory = handle.and_then(|handle| Memory::new::<T>(handle, self.len));
        keeping(memory, self).map(|(memory, _)| Symmetric::of(memory))
    }

    /// As [`Buffer::rendezvous`], for raw pointers only: the caller keeps this value, and must not use both at
    /// once. The group may be of another world than the one in which the memory was allocated.
    pub fn handle(&self, group: &Group) -> Result<Handle> {
        let ownership = Ownership::Address;
        Handle::offer(&self.block, group, &Offer { ownership, ..Offer::new(T::DTYPE) })
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the value that [`Group::owner_at`] gives for addresses in this memory.
    #[doc(hidden)]
    pub fn set_owner(&self, owner: std::sync::Weak<dyn std::any::Any + Send + Sync>) {
        self.block.set_owner(owner);
    }

    /// Byte offset within the allocation that this buffer was cut from; 0 except for buffers of a pool.
    pub fn offset(&self) -> usize {
        self.block.offset()
    }

    fn first(&self) -> NonNull<T> {
        self.block.region().at(0, self.len).unwrap_or(NonNull::dangling())
    }

    /// The elements.
    pub fn local(&self) -> &[T] {
        // SAFETY: S1 by the block; S2: no peer may touch a buffer, and `self` is borrowed; `Element`s have no invalid bits.
        unsafe { std::slice::from_raw_parts(self.first().as_ptr(), self.len) }
    }

    /// The elements, to write.
    pub fn local_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `local`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.first().as_ptr(), self.len) }
    }
}

/// Memory that all ranks of a group have mapped, in the phase in which each rank owns its part.
pub struct Symmetric<T: Element>(Memory, PhantomData<T>);

impl<T: Element> Phase for Symmetric<T> {
    const PEERS: Access = Access::Nothing;

    fn memory(&self) -> &Memory {
        &self.0
    }
}

impl<T: Element> Symmetric<T> {
    fn of(memory: Memory) -> Self {
        Self(memory, PhantomData)
    }

    /// How many elements each rank has.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The group that mapped it.
    pub fn group(&self) -> &Group {
        self.0.handle.group()
    }

    /// The handle: raw pointers, signal pad, sizes.
    pub fn handle(&self) -> &Handle {
        &self.0.handle
    }

    /// This rank's part.
    ///
    /// Empty while peers may still be working on it, after a collective that failed here: until [`Group::resync`], or
    /// a [`Symmetric::rendezvous`] with the survivors.
    pub fn local(&self) -> &[T] {
        let (own, len) = self.0.local::<T>();
        // SAFETY: S1 by the handle; S2: in this phase no peer touches our part, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts(own, len) }
    }

    /// This rank's part, to write; empty where [`Symmetric::local`] is.
    pub fn local_mut(&mut self) -> &mut [T] {
        let (own, len) = self.0.local::<T>();
        // SAFETY: as in `local`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(own, len) }
    }

    /// A pointer to rank `rank`'s part, for your own protocols.
    pub fn peer_ptr(&self, rank: usize) -> Result<*mut T> {
        self.0.peer(rank).map(NonNull::as_ptr)
    }

    /// A barrier after which every rank may read every part. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(1)?.rendezvous(&world)?;
    /// x.local_mut()[0] = world.rank();
    /// let shared = x.share()?; // nobody may write now
    /// assert_eq!(shared.peer(1)?, [1]);
    /// let x = shared.release()?; // each rank may write its own part again
    /// # drop(x);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn share(self) -> Result<Shared<T>, Failed<Paused<Shared<T>>>> {
        Paused::new(Shared::of(self.0), "share").resume()
    }

    /// The same memory in another group. Collective over `group`, the first time for it.
    ///
    /// If a collective on it has failed halfway, `group` must contain all living members of the old group.
    pub fn rendezvous(self, group: &Group) -> Result<Self, Failed<Self>> {
        let memory = if self.0.is_suspended() {
            self.0.regroup_survivors::<T>(group)
        } else {
            self.0.regroup::<T>(group)
        };
        keeping(memory, self).map(|(memory, _)| Self::of(memory))
    }

    /// A copy of this rank's part while every rank may put into it.
    pub(crate) fn copy_of_open(&self) -> Result<Buffer<T>> {
        let mut copy = self.group().alloc::<T>(self.len())?;
        let (own, _) = self.0.local::<T>();
        // SAFETY: S1 by the handle; in that phase everyone touches it by atomics of the elements' size only.
        unsafe { load(own, copy.local_mut()) };
        Ok(copy)
    }
}

/// Memory that all ranks of a group have mapped, in the phase in which every rank may read every part.
///
/// Dropping it is local and safe at any time, even while peers still read.
#[must_use = "dropping it gives the memory up while peers may use it"]
pub struct Shared<T: Element>(Memory, PhantomData<T>);

impl<T: Element> Phase for Shared<T> {
    const PEERS: Access = Access::Read;

    fn memory(&self) -> &Memory {
        &self.0
    }
}

impl<T: Element> Shared<T> {
    fn of(memory: Memory) -> Self {
        Self(memory, PhantomData)
    }

    /// How many elements each rank has.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The group that mapped it.
    pub fn group(&self) -> &Group {
        self.0.handle.group()
    }

    /// This rank's part.
    pub fn local(&self) -> &[T] {
        // SAFETY: S1 by the handle; S2: in this phase nobody writes.
        unsafe { std::slice::from_raw_parts(self.0.local::<T>().0, self.0.len) }
    }

    /// Rank `rank`'s part.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let shared = world.alloc::<u8>(4)?.rendezvous(&world)?.share()?;
    /// let other = shared.peer(1 - world.rank())?; // a plain slice of that rank's memory
    /// assert_eq!(other, [0; 4]);
    /// shared.release()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn peer(&self, rank: usize) -> Result<&[T]> {
        let first = self.0.peer(rank)?;
        // SAFETY: as in `local`.
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), self.0.len) })
    }

    /// Reads rank `rank`'s part into `out`, from its element `at` on, wherever that rank is.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(2)?.rendezvous(&world)?;
    /// x.local_mut().fill(world.rank());
    /// let shared = x.share()?;
    /// let mut out = [9];
    /// shared.get(1, 1, &mut out)?;
    /// assert_eq!(out, [1]);
    /// shared.release()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn get(&self, rank: usize, at: usize, out: &mut [T]) -> Result<()> {
        check_elements(self.group(), "get", (rank, self.len()), at, out.len())?;
        if !self.group().is_local(rank) {
            return self.0.get_far("get", rank, at, out);
        }
        out.copy_from_slice(self.peer(rank)?.get(at..at + out.len()).unwrap_or_default());
        Ok(())
    }

    /// All ranks' parts, by rank, including this rank's. Fails where some ranks are on other hosts.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(1)?.rendezvous(&world)?;
    /// x.local_mut()[0] = world.rank();
    /// let shared = x.share()?;
    /// assert_eq!(shared.peers()?.concat(), [0, 1, 2]);
    /// shared.release()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn peers(&self) -> Result<Vec<&[T]>> {
        (0..self.group().size()).map(|rank| self.peer(rank)).collect()
    }

    /// `len` elements of any type in rank `rank`'s part, `offset` of them from its start.
    pub fn view<U: Element>(&self, rank: usize, offset: usize, len: usize) -> Result<&[U]> {
        let first = self.0.handle.view::<U>(rank, offset, len)?;
        // SAFETY: as in `local`; bounds and alignment were checked, and every bit pattern is a valid `U`.
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), len) })
    }

    /// A barrier after which each rank owns its part again. Collective.
    pub fn release(self) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused::new(Symmetric::of(self.0), "release").resume()
    }

    /// The same memory in the group of the survivors, where each owns its part again. Collective over `group`,
    /// which must contain all living members of the old group.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused::new(Symmetric::of(self.0), "release").rendezvous(group)
    }
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} × {})", self.len, T::DTYPE)
    }
}

impl<T: Element> std::fmt::Debug for Symmetric<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Symmetric({} × {} on {:?})", self.len(), T::DTYPE, self.group())
    }
}

impl<T: Element> std::fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({} × {} on {:?})", self.len(), T::DTYPE, self.group())
    }
}
