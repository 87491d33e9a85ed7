//! What users hold: memory of their own ([`Buffer`]), the same on all ranks ([`Symmetric`]), and the phase in
//! which everyone may read everyone ([`Shared`]).
//!
//! A value of one of these types is the right to do what its phase allows. Changing the phase takes the value and
//! gives the next, after a barrier, so safe code cannot read a peer's memory while the peer may write it.
#![doc = include_str!("phases.md")]
#![allow(unsafe_code)] // S1 (the handle keeps every mapping), S2 (slices only as the phase allows), S6 (the `open` mark)

mod atomic;
mod failed;
mod handle;
mod pad;
mod part;
mod persistent;
mod pool;

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

pub(crate) use atomic::{load, store};
pub use failed::Failed;
pub use handle::Handle;
pub use pad::SignalPad;
pub use pool::Pool;

use crate::backend::Backend;
use crate::block::{Block, Segment, Shape};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::{Call, Group, check_pad_size};
use crate::region::Region;
use handle::{Bringing, keeping};

/// Memory of this rank alone, not yet mapped by anyone else. Zeroed.
pub struct Buffer<T> {
    block: Arc<Block>,
    len: usize,
    elements: PhantomData<T>,
}

impl Group {
    /// Allocates `len` elements of symmetric memory, zeroed. Not collective. A length of 0 is a length like any other.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.alloc_with_pad(len, self.context().pad_size())
    }

    /// As [`Group::alloc`], with a signal pad of `pad` bytes, which is the same on all ranks of a rendezvous.
    pub fn alloc_with_pad<T: Element>(&self, len: usize, pad: usize) -> Result<Buffer<T>> {
        let block = self.block_with_pad::<T>(Arc::clone(self.backend()), len, pad)?;
        Ok(Buffer { block, len, elements: PhantomData })
    }

    /// A block for `len` elements in a segment of its own, from any backend.
    pub(crate) fn block_of<T: Element>(
        &self,
        backend: Arc<dyn Backend>,
        len: usize,
    ) -> Result<Arc<Block>> {
        self.block_with_pad::<T>(backend, len, self.context().pad_size())
    }

    pub(crate) fn block_with_pad<T: Element>(
        &self,
        backend: Arc<dyn Backend>,
        len: usize,
        pad: usize,
    ) -> Result<Arc<Block>> {
        check_pad_size("alloc", Some(self.rank()), pad, 1)?;
        self.shaped(backend, Shape { pad, ..self.shape::<T>(len)? })
    }

    fn shaped(&self, backend: Arc<dyn Backend>, shape: Shape) -> Result<Arc<Block>> {
        self.check_free("alloc", &*backend)?;
        let id = crate::mesh::endpoint::random()?;
        let total = shape.total().unwrap_or(usize::MAX);
        let segment = Arc::new(Segment::allocate(backend, total, id)?);
        let block = Arc::new(Block::new(segment, 0, shape, None)?);
        self.context().register(&block);
        Ok(block)
    }

    /// Refuses to begin what would disturb something else that the backend is in the middle of.
    pub(crate) fn check_free(&self, op: &'static str, backend: &dyn Backend) -> Result<()> {
        let Some(occupation) = backend.occupation()? else { return Ok(()) };
        Err(self.usage(op, "nothing under way that it would disturb".into(), occupation))
    }

    /// The parts of a block for `len` elements.
    fn shape<T: Element>(&self, len: usize) -> Result<Shape> {
        let pad = self.context().pad_size();
        let shape = len.checked_mul(size_of::<T>()).map(|bytes| Shape { bytes, pad });
        shape.filter(|s| s.total().is_some()).ok_or_else(|| {
            let expected = "a length that fits the address space".to_owned();
            self.usage("alloc", expected, format!("{len} elements of {}", T::DTYPE))
        })
    }
}

impl<T: Element> Buffer<T> {
    /// Maps all ranks' buffers into each. Collective over `group`, the first time for this allocation and group.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Self>> {
        let handle = Handle::rendezvous(&self.block, group, T::DTYPE, 0, Bringing::Owned);
        let memory = handle.and_then(|handle| Memory::new(handle, self.len));
        keeping(memory, self).map(|(memory, _)| Symmetric(memory))
    }

    /// As [`Buffer::rendezvous`], for raw pointers alone: this value stays with the caller, who sees to it that nothing
    /// is done through both at once. The group may be of another world than that in which the memory was allocated.
    pub fn handle(&self, group: &Group) -> Result<Handle> {
        Handle::rendezvous(&self.block, group, T::DTYPE, 0, Bringing::Address)
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Byte offset within the allocation that this buffer was cut from; not 0 only for buffers of a pool.
    pub fn offset(&self) -> usize {
        self.block.offset()
    }

    /// Copies the data of another block, which others may be writing meanwhile: see "A race that remains" in
    /// `docs/safety.md`.
    fn fill_from(&mut self, other: &Block) {
        if let Ok(from) = other.region().at::<T>(0, self.len) {
            // SAFETY: S1 by the block, S3 by `at`; what else touches it and how is said there.
            unsafe { load(from.as_ptr(), self.local_mut()) };
        }
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

/// A handle with pointers of the right type, whatever the phase.
struct Memory<T> {
    handle: Handle,
    /// By rank, each to `len` elements.
    data: Vec<NonNull<T>>,
    len: usize,
    /// Nobody else has the addresses of this rank's part, as users of [`Handle::part`] do.
    owned: bool,
    severed: Severed<T>,
}

/// Whether a collective failed halfway, after which peers may still touch what they had mapped.
enum Severed<T> {
    No,
    /// This rank goes on with a copy of its part.
    Copy(Buffer<T>),
    /// There was no memory for a copy; nothing is left.
    Lost,
}

// SAFETY: pointers into mappings that the handle keeps; access through them is governed by the phase types.
unsafe impl<T: Element> Send for Memory<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Memory<T> {}

impl<T: Element> Memory<T> {
    fn new(handle: Handle, len: usize) -> Result<Self> {
        let first = |data: Region| data.check_host().and_then(|()| data.at::<T>(0, len));
        let ranks = 0..handle.world_size();
        let data: Result<Vec<_>> =
            ranks.map(|r| handle.data("rendezvous", r).and_then(first)).collect();
        Ok(Self { data: data?, handle, len, owned: true, severed: Severed::No })
    }

    #[inline]
    fn check_whole(&self, op: &'static str) -> Result<()> {
        match &self.severed {
            Severed::No => Ok(()),
            severed => Err(self.not_whole(op, severed)),
        }
    }

    #[cold]
    fn not_whole(&self, op: &'static str, severed: &Severed<T>) -> Error {
        let got = match severed {
            Severed::No | Severed::Copy(_) => {
                "what is left after a collective that failed; rendezvous it again"
            }
            Severed::Lost => "memory that was given up in a collective that failed",
        };
        let expected = "memory that peers have mapped".to_owned();
        self.handle.group().usage(op, expected, got.to_owned())
    }

    fn meet(&self, call: Call) -> Result<()> {
        self.check_whole(call.name())?;
        let group = self.handle.group();
        group.meet_for(call, group.deadline())
    }

    /// The same memory in another group.
    fn regroup(&self, group: &Group) -> Result<Self> {
        let (block, offset) = (self.handle.block(), self.handle.offset());
        let handle = Handle::rendezvous(block, group, T::DTYPE, offset, Bringing::Owned)?;
        Self::new(handle, self.len)
    }

    /// As `regroup`, from a phase in which peers may read: all of them that still live must come along.
    fn regroup_survivors(&self, group: &Group) -> Result<Self> {
        let old = self.handle.group();
        let gone = |w: usize| old.context().mesh.inbox().gone(w).is_some();
        let comes = |w: &usize| group.world_ranks().contains(w) || gone(*w);
        if !Arc::ptr_eq(old.context(), group.context()) {
            let expected = "a group of the world in which this memory may be read".to_owned();
            return Err(old.usage("rendezvous", expected, "one of another world".into()));
        }
        if let Some(left_out) = old.world_ranks().iter().find(|w| !comes(w)) {
            return Err(old.usage(
                "rendezvous",
                "a group of all living ranks that may be reading this memory".into(),
                format!("one without world rank {left_out}"),
            ));
        }
        let (block, offset) = (self.handle.block(), self.handle.offset());
        let bringing = Bringing::Read(old.id()?, self.handle.number());
        let handle = Handle::rendezvous(block, group, T::DTYPE, offset, bringing)?;
        // Everyone of the new group has given up its right to read this memory before any of them got past that.
        block.set_open(false);
        Self::new(handle, self.len)
    }

    fn local(&self) -> NonNull<T> {
        if let Severed::Copy(own) = &self.severed {
            return own.first();
        }
        self.data.get(self.handle.rank()).copied().unwrap_or(NonNull::dangling())
    }

    fn peer(&self, rank: usize) -> Result<NonNull<T>> {
        self.handle.group().check_rank("peer", rank)?;
        Ok(self.data.get(rank).copied().unwrap_or(NonNull::dangling()))
    }
}

/// Memory that all ranks of a group have mapped, in the phase in which each owns its part.
pub struct Symmetric<T: Element>(Memory<T>);

impl<T: Element> Symmetric<T> {
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
    pub fn local(&self) -> &[T] {
        // SAFETY: S1 by the handle; S2: in this phase no peer touches our part, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.0.local().as_ptr(), self.0.len) }
    }

    /// This rank's part, to write.
    pub fn local_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `local`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.local().as_ptr(), self.0.len) }
    }

    /// Whether peers have this memory mapped.
    pub(crate) fn check_whole(&self, op: &'static str) -> Result<()> {
        self.0.check_whole(op)
    }

    /// All ranks' parts, by rank, each of `len` elements.
    pub(crate) fn parts(&self) -> &[NonNull<T>] {
        &self.0.data
    }

    /// A pointer to rank `rank`'s part, for protocols of the caller's own.
    pub fn peer_ptr(&self, rank: usize) -> Result<*mut T> {
        self.0.peer(rank).map(NonNull::as_ptr)
    }

    /// A barrier, after which everyone may read everyone. Collective.
    pub fn share(self) -> Result<Shared<T>, Failed<Paused<Shared<T>>>> {
        Paused(Shared(self.0)).resume()
    }

    /// The same memory in another group. Collective over `group`, the first time for it.
    pub fn rendezvous(mut self, group: &Group) -> Result<Self, Failed<Self>> {
        match std::mem::replace(&mut self.0.severed, Severed::No) {
            Severed::No => keeping(self.0.regroup(group), self).map(|(memory, _)| Self(memory)),
            Severed::Copy(own) => own.rendezvous(group).map_err(|failed| {
                self.0.severed = Severed::Copy(failed.kept);
                Failed { error: failed.error, kept: self }
            }),
            Severed::Lost => {
                self.0.severed = Severed::Lost;
                keeping(self.0.check_whole("rendezvous"), self).map(|((), own)| own)
            }
        }
    }

    /// Goes on with a copy of this rank's part that no peer has: they may still touch the one that they have mapped.
    pub(crate) fn sever(&mut self) {
        if !self.0.owned {
            return self.0.give_up();
        }
        let own = self.group().alloc::<T>(self.len()).map(|mut copy| {
            copy.fill_from(self.0.handle.block());
            copy
        });
        match own {
            Ok(own) => {
                // From here on this rank reads nothing by right of its rendezvous.
                self.group().context().unregister(self.0.handle.block());
                self.0.severed = Severed::Copy(own);
            }
            Err(e) => {
                tracing::warn!("memory that peers may be writing is given up, without a copy: {e}");
                self.0.severed = Severed::Lost;
                self.0.len = 0;
            }
        }
    }
}

/// Memory that all ranks of a group have mapped, in the phase in which everyone may read everyone.
///
/// Dropping it is local and safe at any time, even while peers still read.
#[must_use = "dropping it gives the memory up while peers may use it"]
pub struct Shared<T: Element>(Memory<T>);

impl<T: Element> Shared<T> {
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
        unsafe { std::slice::from_raw_parts(self.0.local().as_ptr(), self.0.len) }
    }

    /// Rank `rank`'s part.
    pub fn peer(&self, rank: usize) -> Result<&[T]> {
        let first = self.0.peer(rank)?;
        // SAFETY: as in `local`.
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), self.0.len) })
    }

    /// All ranks' parts, by rank, this rank's own among them.
    pub fn peers(&self) -> Vec<&[T]> {
        // SAFETY: as in `local`.
        let part =
            |first: &NonNull<T>| unsafe { std::slice::from_raw_parts(first.as_ptr(), self.0.len) };
        self.0.data.iter().map(part).collect()
    }

    /// `len` elements of any type in rank `rank`'s part, `offset` of them from its start.
    pub fn view<U: Element>(&self, rank: usize, offset: usize, len: usize) -> Result<&[U]> {
        let first = self.0.handle.view::<U>(rank, offset, len)?;
        // SAFETY: as in `local`; bounds and alignment were checked, and every bit pattern is a valid `U`.
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), len) })
    }

    /// A barrier, after which each rank owns its part again. Collective.
    pub fn release(self) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused(Symmetric(self.0)).resume()
    }

    /// The same memory in the group of the survivors, each owning its part again. Collective over `group`,
    /// which must have all members of the old one that still live.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused(Symmetric(self.0)).rendezvous(group)
    }
}

/// Memory whose change to phase `P` did not come to its end: nobody may touch it until it does.
#[must_use = "dropping it gives the memory up while peers may use it"]
pub struct Paused<P>(P);

impl<T: Element> Paused<Shared<T>> {
    /// Goes on waiting for the phase to begin.
    pub fn resume(self) -> Result<Shared<T>, Failed<Self>> {
        let memory = &self.0.0;
        if let Err(error) = memory.check_whole("share") {
            return Err(Failed { error, kept: self });
        }
        let block = memory.handle.block();
        let first = !block.is_open();
        block.set_open(true);
        let met = memory.meet(Call::Share(memory.handle.number()));
        // What fails so fails on all ranks alike, and nobody reads; unless an earlier attempt has arrived, in whose
        // barrier the others may have been since.
        if let (true, Err(Error::Mismatch { .. } | Error::Usage { .. })) = (first, &met) {
            block.set_open(false);
        }
        keeping(met, self).map(|((), paused)| paused.0)
    }

    /// The memory back in its former phase, if the change has failed on all ranks alike.
    pub fn give_up(self) -> Result<Symmetric<T>, Self> {
        let memory = &self.0.0;
        let apart = !matches!(memory.severed, Severed::No);
        if apart || !memory.handle.block().is_open() { Ok(Symmetric(self.0.0)) } else { Err(self) }
    }

    /// See [`Shared::rendezvous`]. The right to read is given up with the call, whatever comes of it: a peer may have
    /// seen it succeed.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        Paused(Symmetric(self.0.0)).rendezvous(group)
    }
}

impl<T: Element> Paused<Symmetric<T>> {
    /// Goes on waiting for all to let go.
    pub fn resume(self) -> Result<Symmetric<T>, Failed<Self>> {
        let memory = &self.0.0;
        let met = memory.meet(Call::Release(memory.handle.number()));
        if met.is_ok() {
            memory.handle.block().set_open(false);
        }
        keeping(met, self).map(|((), paused)| paused.0)
    }

    /// See [`Shared::rendezvous`].
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Self>> {
        if matches!(self.0.0.severed, Severed::No) {
            return keeping(self.0.0.regroup_survivors(group), self).map(|(m, _)| Symmetric(m));
        }
        let again = self.0.rendezvous(group);
        again.map_err(|failed| Failed { error: failed.error, kept: Paused(failed.kept) })
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

impl<P: std::fmt::Debug> std::fmt::Debug for Paused<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Paused(on the way to {:?})", self.0)
    }
}
