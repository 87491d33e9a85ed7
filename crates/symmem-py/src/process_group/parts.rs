//! The memory of a call in pieces, as torch has it: lists of tensors.
#![allow(unsafe_code)] // S2 (as for all arguments of the package), S3 (bytes of tensors, which the caller has measured)

use crate::argument::Slice;

/// Memory in pieces, by address and bytes. The caller keeps it alive.
#[derive(Clone, Default)]
pub(super) struct Parts(Vec<(usize, usize)>);

/// Aligned for every type of elements.
pub(super) type Room = Vec<u128>;

/// The most that is kept for later calls.
const KEPT: usize = (64 << 20) / size_of::<u128>();

impl Parts {
    /// Addresses and numbers of elements, one after the other.
    pub(super) fn new(given: &[usize], size: usize) -> Self {
        Self(given.chunks_exact(2).map(|part| (part[0], part[1].saturating_mul(size))).collect())
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Elements in each piece.
    pub(super) fn counts(&self, size: usize) -> Vec<usize> {
        self.0.iter().map(|(_, bytes)| bytes / size).collect()
    }

    pub(super) fn are_equal(&self) -> bool {
        self.0.windows(2).all(|pair| pair[0].1 == pair[1].1)
    }

    pub(super) fn each(&self) -> impl Iterator<Item = Self> + '_ {
        self.0.iter().map(|part| Self(vec![*part]))
    }

    /// The memory, if the pieces lie one behind the other, and are aligned to their elements of `size` bytes. Tensors over a buffer of
    /// bytes need not be.
    pub(super) fn whole(&self, size: usize) -> Option<Slice> {
        let first = self.0.first().map_or(0, |(address, _)| *address);
        let adjoin = self.0.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0);
        let is_aligned = first.is_multiple_of(size.clamp(1, 8));
        (adjoin && is_aligned).then(|| Slice::raw(first, self.bytes()))
    }

    /// Copies the pieces to one memory, which lives until `room` is used again.
    pub(super) fn gathered(&self, room: &mut Room) -> Slice {
        let slice = self.like(room);
        let mut to = room.as_mut_ptr().cast::<u8>();
        for &(address, bytes) in &self.0 {
            // SAFETY: S3: the room has as many bytes as all pieces; S2 as documented for users.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to, bytes) };
            to = to.wrapping_add(bytes);
        }
        slice
    }

    /// One memory of this size, which lives until `room` is used again.
    pub(super) fn like(&self, room: &mut Room) -> Slice {
        let units = self.bytes().div_ceil(size_of::<u128>());
        if room.len() < units {
            room.resize(units, 0);
        }
        Slice::raw(room.as_mut_ptr() as usize, self.bytes())
    }

    /// Copies to the pieces what one memory has.
    ///
    /// # Safety
    /// `from` points to as many bytes as all pieces have, apart from them.
    pub(super) unsafe fn fill(&self, mut from: *const u8) {
        for &(address, bytes) in &self.0 {
            // SAFETY: S3 as the caller promises; S2 as documented for users.
            unsafe { std::ptr::copy_nonoverlapping(from, address as *mut u8, bytes) };
            from = from.wrapping_add(bytes);
        }
    }
}

/// Frees memory that is too large to be kept.
pub(super) fn trim(room: &mut Room) {
    if room.len() > KEPT {
        *room = Room::new();
    }
}
