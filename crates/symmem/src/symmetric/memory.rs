//! Memory that all ranks of a group have mapped, whatever its phase and the type of its elements.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Atomic, Handle, Offer, Ownership};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::group::{FarAddress, Group, Request};
use crate::memory::Reach;
use crate::memory::block::Access;
use crate::memory::region::Region;
use crate::memory::units::unit;
use crate::sync::Ordering;
use crate::sync::shared::AtomicU64;

/// One allocation of all ranks, and how many elements of which type it holds.
pub struct Memory {
    pub(super) handle: Handle,
    /// By rank, each to `len` elements; nothing for ranks of other hosts.
    parts: Vec<Option<NonNull<u8>>>,
    pub(super) len: usize,
    pub(super) dtype: DType,
    /// Bytes of an element.
    size: usize,
    /// Nobody else has the addresses of this rank's part, as users of [`Handle::part`] do.
    pub(super) owned: bool,
    /// The generation of the group's calls in which a collective failed halfway, and one: peers may be at work on our part.
    suspended: AtomicU64,
}

// SAFETY: pointers into mappings that the handle keeps; access through them is governed by the phase types.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(super) fn new<T: Element>(handle: Handle, len: usize) -> Result<Self> {
        Self::of_type(handle, len, T::DTYPE, align_of::<T>())
    }

    fn of_type(handle: Handle, len: usize, dtype: DType, align: usize) -> Result<Self> {
        let first = |data: Region| data.place(0, (len, dtype.size()), align);
        let first = |data: Region| match data.reach() {
            Reach::Wire => Ok(None),
            Reach::Host | Reach::Device => data.check_host().and_then(|()| first(data)).map(Some),
        };
        let ranks = 0..handle.size();
        let parts: Result<Vec<_>> =
            ranks.map(|r| handle.data("rendezvous", r).and_then(first)).collect();
        Ok(Self {
            parts: parts?,
            handle,
            len,
            dtype,
            size: dtype.size(),
            owned: true,
            suspended: AtomicU64::new(0),
        })
    }

    #[inline]
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    #[inline]
    pub(crate) fn group(&self) -> &Group {
        self.handle.group()
    }

    /// Elements of each rank.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of an element.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Bytes of each rank.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.size
    }

    /// Rank `rank`'s part from element `at` on, of a rank on this host.
    #[inline]
    pub(crate) fn part(&self, rank: usize, at: usize) -> *mut u8 {
        self.part_of(rank)
            .map_or(std::ptr::null_mut(), NonNull::as_ptr)
            .wrapping_add(at * self.size)
    }

    /// Nothing for a rank that is on another host, or not in the group.
    #[inline]
    pub(super) fn part_of(&self, rank: usize) -> Option<NonNull<u8>> {
        self.parts.get(rank).copied().flatten()
    }

    /// Our own part from element `at` on.
    #[inline]
    pub(crate) fn own(&self, at: usize) -> *mut u8 {
        self.part(self.handle.rank(), at)
    }

    /// Whether peers may be at work on our part, in a collective that failed here. No longer once all ranks have left it.
    #[inline]
    pub(super) fn is_suspended(&self) -> bool {
        match self.suspended.load(Ordering::Relaxed) {
            0 => false,
            then => then == u64::from(self.group().generation()) + 1,
        }
    }

    /// Takes note that a collective failed while peers may be at work on our part.
    pub(crate) fn suspend(&self) {
        let generation = self.group().generation();
        if self.owned {
            self.suspended.store(u64::from(generation) + 1, Ordering::Relaxed);
        } else {
            self.handle.mapping().suspend(generation);
        }
    }

    /// Our part, and how many of its elements may be touched now: none while peers may be at work on it.
    #[inline]
    pub(super) fn local<T: Element>(&self) -> (*mut T, usize) {
        let own = self.part_of(self.handle.rank()).unwrap_or(NonNull::dangling());
        (own.as_ptr().cast(), if self.is_suspended() { 0 } else { self.len })
    }

    /// Rank `rank`'s part.
    pub(super) fn peer<T: Element>(&self, rank: usize) -> Result<NonNull<T>> {
        self.group().check_rank("peer", rank)?;
        let part = self.part_of(rank).map(NonNull::cast);
        part.ok_or_else(|| self.group().out_of_reach(rank))
    }

    /// Element `at` of the part of a rank on another host.
    fn far_address(&self, rank: usize, at: usize) -> FarAddress {
        let at = self.handle.offset() + at * self.size;
        FarAddress { rank, memory: self.handle.number(), at, unit: unit(self.size) }
    }

    /// Relaxed: writes elements there, from element `at` on, in a phase in which all do by atomics.
    pub(super) fn put_far<T: Element>(
        &self,
        op: &'static str,
        rank: usize,
        at: usize,
        data: &[T],
    ) -> Result<()> {
        let bytes = data.as_ptr().cast::<u8>();
        // SAFETY: none of the elements' bits are undefined.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, size_of_val(data)) };
        self.group().put_far(op, self.far_address(rank, at), bytes)
    }

    /// Relaxed: reads elements from there.
    pub(super) fn get_far<T: Element>(
        &self,
        op: &'static str,
        rank: usize,
        at: usize,
        out: &mut [T],
    ) -> Result<()> {
        let bytes = out.as_mut_ptr().cast::<u8>();
        // SAFETY: every pattern of bits is a value of an element.
        let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, size_of_val(out)) };
        self.group().get_far(op, self.far_address(rank, at), bytes)
    }

    /// Changes element `at` there; what it was before.
    pub(super) fn change_far<T: Atomic>(
        &self,
        op: &'static str,
        rank: usize,
        at: usize,
        ask: Request,
    ) -> Result<T> {
        self.group().change_far(op, self.far_address(rank, at), ask).map(T::of_bits)
    }

    /// The same memory in another group.
    pub(super) fn regroup<T: Element>(&self, group: &Group) -> Result<Self> {
        let (block, offset) = (self.handle.block(), self.handle.offset());
        let handle = Handle::offer(block, group, &Offer { offset, ..Offer::new(T::DTYPE) })?;
        Self::new::<T>(handle, self.len)
    }

    /// As `regroup`, from a phase in which peers may read: all of them that still live must come along.
    pub(super) fn regroup_survivors<T: Element>(&self, group: &Group) -> Result<Self> {
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
        let ownership = Ownership::Read(old.id()?, self.handle.number());
        let offer = Offer { offset, ownership, ..Offer::new(T::DTYPE) };
        let handle = Handle::offer(block, group, &offer)?;
        // Everyone of the new group has given up its right to read this memory before any of them got past that.
        block.set_access(Access::Nothing);
        Self::new::<T>(handle, self.len)
    }
}

/// A phase of memory: [`Symmetric`](super::Symmetric), [`Shared`](super::Shared) or [`Open`](super::Open).
pub trait Phase {
    /// What peers may do in it.
    #[doc(hidden)]
    const PEERS: Access;

    #[doc(hidden)]
    fn memory(&self) -> &Memory;
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("handle", &self.handle)
            .field("dtype", &self.dtype)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
