//! Memory into which the rest of a message is received, so that it need not be copied there.
#![allow(unsafe_code)] // S1 (the mapping is held, or as the maker promises), S2 (as the maker promises)

use std::ptr::NonNull;

use crate::memory::region::Region;

/// The place of the rest of a message, of which the beginning has come.
pub(crate) struct Landing {
    first: NonNull<u8>,
    bytes: usize,
    filled: usize,
    memory: Memory,
}

/// Where a place lies.
enum Memory {
    /// The mapping is held.
    Mapped { _region: Region },
    /// The maker says when it is over: see [`Landing::lent`].
    Lent,
    /// Nobody looks at it.
    Nowhere { _bytes: Vec<u8> },
}

// SAFETY: whoever has the place may write there, on any thread, as its maker has promised.
unsafe impl Send for Landing {}

impl Landing {
    /// Nothing if this process does not reach it.
    ///
    /// # Safety
    /// Until the place is full or this is dropped, nobody else reads or writes it. That includes safe code, to which it may never
    /// have been lent: the sender says when the bytes come, or whether.
    pub(crate) unsafe fn new(place: Region) -> Option<Self> {
        let (first, bytes) = (place.at::<u8>(0, place.bytes()).ok()?, place.bytes());
        Some(Self { first, bytes, filled: 0, memory: Memory::Mapped { _region: place } })
    }

    /// # Safety
    /// As of `new`; and the place is there until this is full or dropped, or [`Landing::end_loan`] has been called.
    pub(crate) unsafe fn lent(first: NonNull<u8>, bytes: usize) -> Self {
        Self { first, bytes, filled: 0, memory: Memory::Lent }
    }

    /// If the place is lent: what has not come goes nowhere.
    pub(super) fn end_loan(&mut self) {
        if matches!(self.memory, Memory::Lent) {
            let mut bytes = vec![0; self.room().max(1)];
            if let Some(first) = NonNull::new(bytes.as_mut_ptr()) {
                let (room, memory) = (self.room(), Memory::Nowhere { _bytes: bytes });
                *self = Self { first, bytes: room, filled: 0, memory };
            }
        }
    }

    /// The place of the bytes that have not come.
    pub(super) fn space(&mut self) -> &mut [u8] {
        let rest = self.first.as_ptr().wrapping_add(self.filled);
        // SAFETY: within the place, which is there; nobody else touches it, as the maker promised.
        unsafe { std::slice::from_raw_parts_mut(rest, self.room()) }
    }

    /// This many of them were put there.
    pub(super) fn fill(&mut self, bytes: usize) {
        self.filled = self.filled.saturating_add(bytes).min(self.bytes);
    }

    /// How many bytes have not come.
    pub(super) fn room(&self) -> usize {
        self.bytes - self.filled
    }

    /// Puts bytes there that have come already. Those that do not fit are dropped.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let space = self.space();
        let len = bytes.len().min(space.len());
        if let Some((to, from)) = space.get_mut(..len).zip(bytes.get(..len)) {
            to.copy_from_slice(from);
        }
        self.fill(len);
    }
}

#[cfg(any(test, fuzzing))]
pub(super) mod trial {
    use super::*;

    /// A place of memory that nobody else has, and a view of it for when the place is gone.
    pub(in super::super) fn place(bytes: usize) -> (Landing, Region) {
        let memory = Region::anonymous(bytes.max(1)).and_then(|memory| memory.part(0, bytes));
        let Ok(memory) = memory else { unreachable!("no memory") };
        // SAFETY: the view is read only where no bytes come meanwhile.
        let Some(place) = (unsafe { Landing::new(memory.clone()) }) else {
            unreachable!("a region")
        };
        (place, memory)
    }

    /// The same, lent.
    #[cfg(test)]
    pub(in super::super) fn lent(bytes: usize) -> (Landing, Region) {
        let (mut place, memory) = place(bytes);
        let first = NonNull::from(place.space()).cast();
        // SAFETY: as in `place`; the memory is kept by whoever gets it.
        (unsafe { Landing::lent(first, bytes) }, memory)
    }

    /// What lies there.
    pub(in super::super) fn read(memory: &Region) -> Vec<u8> {
        let Ok(first) = memory.at::<u8>(0, memory.bytes()) else { unreachable!("a region") };
        // SAFETY: within the region; nobody writes it meanwhile.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), memory.bytes()) }.to_vec()
    }
}
