//! The mailbox: a few words of host memory in which kernels of a group note what went wrong, and find that a rank was lost.
#![allow(unsafe_code)] // S1, S4

use std::ptr::NonNull;

use symmem_sys::cuda::HostMemory;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::group::layout::MailboxWords;
use crate::error::Result;
use crate::sync::Ordering;

/// What `poison` holds while the group's ranks put it back in step: kernels that wait give up.
pub(in crate::cuda) const RESYNC: u32 = u32::MAX;

/// The kind of a note that a peer has given up.
pub(in crate::cuda) const TOLD: u32 = 4;

/// What a kernel noted.
pub(in crate::cuda) struct Note {
    pub(in crate::cuda) kind: u32,
    pub(in crate::cuda) op: u32,
    pub(in crate::cuda) channel: u32,
    pub(in crate::cuda) rank: u32,
    pub(in crate::cuda) ours: u32,
    pub(in crate::cuda) theirs: u32,
}

pub(in crate::cuda) struct Mailbox {
    gpu: Gpu,
    pub(in crate::cuda) memory: HostMemory,
}

// SAFETY: atomics in memory that lives as long as this; they may be shared with anyone.
unsafe impl Send for Mailbox {}
// SAFETY: as above.
unsafe impl Sync for Mailbox {}

impl Mailbox {
    pub(in crate::cuda) fn new(gpu: &Gpu) -> Result<Self> {
        let memory = gpu.call(|driver| driver.host_alloc(size_of::<MailboxWords>()))?;
        let mailbox = Self { gpu: gpu.clone(), memory };
        mailbox.words().poison.store(0, Ordering::Relaxed);
        mailbox.words().left.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        mailbox.clear();
        Ok(mailbox)
    }

    pub(in crate::cuda) fn words(&self) -> &MailboxWords {
        let words: NonNull<MailboxWords> = self.memory.host.cast();
        // SAFETY: S1: pinned memory of that size, page-aligned, which goes with `self`; atomics have no invalid values.
        unsafe { words.as_ref() }
    }

    pub(in crate::cuda) fn read(&self) -> Option<Note> {
        let words = self.words();
        // Acquire: pairs with the fence before the kernel's last store.
        if words.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let [kind, op, channel, rank, ours, theirs] =
            words.note().map(|word| word.load(Ordering::Relaxed));
        Some(Note { kind, op, channel, rank, ours, theirs })
    }

    /// Whether a rank was lost, a kernel noted something, or the group is being put back in step.
    #[inline]
    pub(in crate::cuda) fn is_marked(&self) -> bool {
        let words = self.words();
        words.state.load(Ordering::Relaxed) != 0 || words.poison.load(Ordering::Relaxed) != 0
    }

    /// 0, the lost rank and one, or [`RESYNC`].
    pub(in crate::cuda) fn poison(&self) -> u32 {
        self.words().poison.load(Ordering::Relaxed)
    }

    /// Ends all waits of this rank's kernels: that of a lost rank is for good.
    pub(in crate::cuda) fn mark_lost(&self, rank: usize) {
        self.words().poison.store(rank as u32 + 1, Ordering::Relaxed);
    }

    /// Ends the waits of this rank's kernels for a rank that has left in order, once they find that it did not come before.
    pub(in crate::cuda) fn mark_left(&self, rank: usize) {
        if let Some(word) = self.words().left.get(rank / 32) {
            word.fetch_or(1 << (rank % 32), Ordering::Release);
        }
    }

    /// Ends all waits, until [`Mailbox::clear`].
    pub(in crate::cuda) fn begin_resync(&self) {
        let (from, to) = (0, RESYNC);
        let _ =
            self.words().poison.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Notes something as a kernel does, unless something is noted.
    pub(in crate::cuda) fn note(&self, note: &Note) {
        let words = self.words();
        let (order, failed) = (Ordering::Acquire, Ordering::Relaxed);
        if words.state.compare_exchange(0, 1, order, failed).is_err() {
            return;
        }
        let Note { kind, op, channel, rank, ours, theirs } = *note;
        for (word, value) in words.note().into_iter().zip([kind, op, channel, rank, ours, theirs]) {
            word.store(value, Ordering::Relaxed);
        }
        words.state.store(2, Ordering::Release);
    }

    /// Forgets everything but a lost rank.
    pub(in crate::cuda) fn clear(&self) {
        let words = self.words();
        words.state.store(0, Ordering::Release);
        let _ = words.poison.compare_exchange(RESYNC, 0, Ordering::Release, Ordering::Relaxed);
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // SAFETY: S4: from one `host_alloc`; kernels that look into it are done.
        self.gpu.give_back(|driver| unsafe { driver.host_free(self.memory.host) });
    }
}
