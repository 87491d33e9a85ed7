//! Giving memory back that clients have made the server hold for a while.
//!
//! The allocator keeps what is freed, and after many values of all sizes much of that is in pieces. Honest jobs are far
//! from that; somebody who floods the store would have its process grow to twice what the limits allow.
#![allow(unsafe_code)] // one call into the allocator; relies on none of the S-invariants

use std::time::{Duration, Instant};

/// After so many bytes were freed there may be much to give back.
const ENOUGH: usize = 8 << 20;
/// It walks through all free memory of the process.
const EVERY: Duration = Duration::from_millis(100);

/// What has been freed since memory was last given back.
pub(super) struct Trim {
    freed: usize,
    last: Instant,
}

impl Trim {
    pub(super) fn new() -> Self {
        Self { freed: 0, last: Instant::now() }
    }

    pub(super) fn freed(&mut self, bytes: usize) {
        self.freed = self.freed.saturating_add(bytes);
    }

    /// Gives memory back to the system if there may be enough of it.
    pub(super) fn trim(&mut self) {
        if self.freed < ENOUGH || self.last.elapsed() < EVERY {
            return;
        }
        #[cfg(target_env = "gnu")]
        // SAFETY: it may be called at any time.
        unsafe {
            libc::malloc_trim(0);
        }
        *self = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_kept_and_much_is_given_back_once_it_is_time() {
        let long_ago = Instant::now().checked_sub(EVERY).unwrap();
        let mut trim = Trim { freed: ENOUGH - 1, last: long_ago };
        trim.trim();
        assert_eq!(trim.freed, ENOUGH - 1);
        trim.freed(usize::MAX);
        trim.trim();
        assert_eq!(trim.freed, 0);
        trim.freed(ENOUGH);
        trim.last = Instant::now() + EVERY;
        trim.trim();
        assert_eq!(trim.freed, ENOUGH, "not again so soon");
    }
}
