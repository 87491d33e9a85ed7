//! Atomics (std's, or loom's under `--cfg loom`), deadlines, and waiting: spin, then yield, then sleep on a futex.
//!
//! Nothing in this library waits in any other way.

mod bell;
mod deadline;
mod word;

pub use atomic::Ordering;
#[cfg(loom)]
pub use bell::LATE_STORES;
pub(crate) use bell::{Bell, Ended, Patience, before_ringing, current_core, pause, pause_for_flag};
pub use deadline::{Deadline, Expiry};
pub(crate) use deadline::{lock, lock_by, poll_by};
pub use word::Word;
pub(crate) use word::fetch_to_read;

#[cfg(loom)]
pub(crate) use loom::sync::Mutex;
#[cfg(not(loom))]
pub(crate) use std::sync::Mutex;

/// The atomics of process-local state: loom's when loom explores the protocol, std's otherwise.
pub(crate) mod atomic {
    #[cfg(loom)]
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, fence};
    pub use std::sync::atomic::Ordering;
    #[cfg(not(loom))]
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, fence};
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize}; // counts, which order nothing
}

/// Lets other threads run: those of the model when loom explores it.
pub(crate) fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Elements in memory that several processes share, by size. Always std's, because they lie in a mapping.
pub(crate) mod shared {
    pub(crate) use std::sync::atomic::{
        AtomicI32, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64,
    };
}

/// A setting of the whole process. Always std's, because it is a static, and orders nothing.
pub(crate) type Setting = std::sync::atomic::AtomicUsize;

/// A 32-bit word in memory that several processes share. Always std's, because it lies in a mapping.
pub type SharedWord = std::sync::atomic::AtomicU32;
