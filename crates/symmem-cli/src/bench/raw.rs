//! Writing and reading eight bytes of symmetric memory through a pointer, as a user's own protocol does;
//! and the fence that the clock needs.
#![allow(unsafe_code)] // S1 (the memory is borrowed with the pointers), S2 (volatile access, ordered by signals)

use anyhow::Result;
use symmem::Symmetric;

/// What follows does not begin before what precedes has ended.
pub(super) fn load_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, which touches no memory.
    unsafe {
        core::arch::x86_64::_mm_lfence();
    }
}

/// The first word of each rank's part. What is written is for whoever is signalled afterwards.
pub(super) struct Words<'a> {
    memory: &'a Symmetric<u64>,
    peer: *mut u64,
    own: *const u64,
}

impl<'a> Words<'a> {
    /// Of this rank and of `peer`.
    pub(super) fn new(memory: &'a Symmetric<u64>, peer: usize) -> Result<Self> {
        anyhow::ensure!(!memory.is_empty(), "there is no first word");
        let own = memory.peer_ptr(memory.group().rank())?;
        Ok(Self { memory, peer: memory.peer_ptr(peer)?, own })
    }

    /// Writes into the peer's part.
    pub(super) fn write(&self, value: u64) {
        debug_assert!(!self.memory.is_empty());
        // SAFETY: S1: `memory` is borrowed and has a first element; S2: volatile, and nobody holds a reference to it.
        unsafe { self.peer.write_volatile(value) }
    }

    /// Reads from our own part.
    pub(super) fn read(&self) -> u64 {
        // SAFETY: as in `write`.
        unsafe { self.own.read_volatile() }
    }
}
