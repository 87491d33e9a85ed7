//! Words in memory that several processes share, and hints for them.
#![allow(unsafe_code)] // one prefetch instruction; relies on none of the S-invariants

use std::time::Duration;

use super::{Ordering, SharedWord};

/// What the signal protocol needs of a word: `SharedWord` in life, a loom model in the checks.
pub trait Word: Sync {
    /// Reads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Writes the word.
    fn store(&self, value: u32, order: Ordering);
    /// Replaces `current` by `new`; whether it did.
    fn replace(&self, current: u32, new: u32, order: Ordering) -> bool;
    /// Adds one, wrapping.
    fn increment(&self);
    /// Subtracts one.
    fn decrement(&self);
    /// Sleeps while the word holds `seen`, until woken or `limit` has passed; may return early.
    fn sleep(&self, seen: u32, limit: Duration);
    /// Wakes everyone who sleeps on the word.
    fn wake(&self);
    /// A hint that this core is about to write the word.
    fn fetch_to_write(&self) {}
}

impl Word for SharedWord {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline(always)]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline(always)]
    fn replace(&self, current: u32, new: u32, order: Ordering) -> bool {
        self.compare_exchange(current, new, order, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    fn increment(&self) {
        self.fetch_add(1, Ordering::SeqCst);
    }

    #[inline(always)]
    fn decrement(&self) {
        self.fetch_sub(1, Ordering::SeqCst);
    }

    fn sleep(&self, seen: u32, limit: Duration) {
        use rustix::thread::futex;
        let limit = rustix::time::Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // Not PRIVATE: peers in other processes wake us. Every outcome means "look again".
        let _ = futex::wait(self, futex::Flags::empty(), seen, Some(&limit));
    }

    fn wake(&self) {
        use rustix::thread::futex;
        // Fails only for an address that is not a futex, which `&self` rules out.
        let _ = futex::wake(self, futex::Flags::empty(), i32::MAX as u32);
    }

    #[inline(always)]
    fn fetch_to_write(&self) {
        fetch_to_write(std::ptr::from_ref(self).cast());
    }
}

/// A hint that this core is about to write the line of `address`; any address will do.
#[inline(always)]
pub(crate) fn fetch_to_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing and cannot fault; on processors without it, it is a no-op.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// A hint that this core is about to read the line of `address`; any address will do.
#[inline(always)]
pub(crate) fn fetch_to_read(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
