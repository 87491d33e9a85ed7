//! Deadlines, and attempts that are repeated until one passes.

use std::sync::Mutex as StdMutex;
use std::time::{Duration, Instant};

use super::yield_now;
use crate::error::Error;
use crate::interrupt::interrupted;

/// The time limit of a wait.
///
/// Two numbers, so that it travels in registers: it is part of every small message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// In nanoseconds.
    limit: u64,
    /// When the time began to count, on this process's [`clock`]; 0 until a wait turns slow, so that a wait that
    /// succeeds at once never reads the clock.
    start: u64,
}

/// No limit.
const FOR_EVER: u64 = u64::MAX;

/// Nanoseconds since some moment of this process, and never 0.
fn clock() -> u64 {
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    nanoseconds(BEGIN.get_or_init(Instant::now).elapsed()).saturating_add(1)
}

/// Centuries are for ever.
const fn nanoseconds(time: Duration) -> u64 {
    let nanoseconds = time.as_nanos();
    if nanoseconds < FOR_EVER as u128 { nanoseconds as u64 } else { FOR_EVER }
}

impl Deadline {
    /// Waits for ever (but still ends when a peer is lost).
    pub const NEVER: Self = Self { limit: FOR_EVER, start: 0 };

    /// Each wait that gets this deadline may take `limit`; 0 means for ever.
    pub const fn within(limit: Duration) -> Self {
        Self::within_nanoseconds(nanoseconds(limit))
    }

    /// Likewise, in nanoseconds.
    #[inline]
    pub(crate) const fn within_nanoseconds(limit: u64) -> Self {
        Self { limit: if limit == 0 { FOR_EVER } else { limit }, start: 0 }
    }

    /// All waits that get this deadline together may take `limit`, counted from now. With 0, calls take what has
    /// arrived and do not wait.
    pub fn after(limit: Duration) -> Self {
        Self { limit: nanoseconds(limit), start: 0 }.start()
    }

    /// Starts the clock: the limit counts from now on.
    pub fn start(self) -> Self {
        if self.start != 0 || self.limit == FOR_EVER {
            return self;
        }
        Self { start: clock(), ..self }
    }

    /// Time left: `None` for ever, zero when expired.
    pub fn remaining(self) -> Option<Duration> {
        match self {
            Self { limit: FOR_EVER, .. } => None,
            Self { limit, start: 0 } => Some(Duration::from_nanos(limit)),
            Self { limit, start } => {
                let passed = clock().saturating_sub(start);
                Some(Duration::from_nanos(limit.saturating_sub(passed)))
            }
        }
    }

    /// Whether no time is left, or this thread's waits are being ended: see [`interruptible`](crate::interruptible).
    pub fn expired(self) -> bool {
        self.expiry().is_some()
    }

    /// Why a wait with this deadline has to end now, if it has to.
    pub(crate) fn expiry(self) -> Option<Expiry> {
        if self.remaining() == Some(Duration::ZERO) {
            Some(Expiry::Deadline)
        } else {
            interrupted().then_some(Expiry::Interrupted)
        }
    }

    /// Time passed since the deadline started counting.
    pub fn elapsed(self) -> Duration {
        if self.start == 0 {
            return Duration::ZERO;
        }
        Duration::from_nanos(clock().saturating_sub(self.start))
    }

    /// The time to sleep now if at most `cap` is wanted.
    pub(crate) fn nap(self, cap: Duration) -> Duration {
        self.remaining().map_or(cap, |left| left.min(cap))
    }
}

impl std::fmt::Debug for Deadline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.remaining() {
            None => f.write_str("Deadline(never)"),
            Some(left) if self.start == 0 => write!(f, "Deadline(within {left:?})"),
            Some(left) => write!(f, "Deadline(in {left:?})"),
        }
    }
}

impl From<Duration> for Deadline {
    fn from(limit: Duration) -> Self {
        Self::within(limit)
    }
}

/// Why a wait was given up although nothing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Its deadline passed.
    Deadline,
    /// Its caller ended it: see [`interruptible`](crate::interruptible).
    Interrupted,
}

impl Expiry {
    /// The error of an operation whose wait was given up.
    pub(crate) fn error(self, op: &'static str, waiting_for: Vec<usize>, after: Duration) -> Error {
        match self {
            Self::Deadline => {
                Error::Timeout { op, channel: None, waiting_for, after, doing: Vec::new() }
            }
            Self::Interrupted => Error::Interrupted { op, channel: None, waiting_for, after },
        }
    }
}

/// Locks `mutex`. What such locks guard is whole at every moment, so a panic under one does no harm.
pub(crate) fn lock<T>(mutex: &StdMutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks `mutex` before the deadline; otherwise says why it could not.
///
/// The holder may itself be waiting for a peer, so this polls and never blocks in the kernel.
pub(crate) fn lock_by<T>(
    mutex: &StdMutex<T>,
    deadline: Deadline,
) -> Result<std::sync::MutexGuard<'_, T>, (Expiry, Duration)> {
    use std::sync::TryLockError;
    let mut attempt = || match mutex.try_lock() {
        Ok(guard) => Some(guard),
        // What these locks guard is whole at every moment.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    poll_by(deadline, &mut attempt)
}

/// Repeats `attempt` until it succeeds, with pauses that grow to a millisecond, or until the deadline, after which it is made once more.
pub(crate) fn poll_by<R>(
    deadline: Deadline,
    attempt: &mut dyn FnMut() -> Option<R>,
) -> Result<R, (Expiry, Duration)> {
    if let Some(done) = attempt() {
        return Ok(done);
    }
    let deadline = deadline.start();
    let mut pause = Duration::from_micros(1);
    loop {
        if let Some(why) = deadline.expiry() {
            let after = deadline.elapsed();
            return attempt().ok_or((why, after)); // this thread may have had no core since the last one
        }
        if pause < Duration::from_micros(50) {
            yield_now()
        } else {
            std::thread::sleep(deadline.nap(pause))
        }
        pause = (pause * 2).min(Duration::from_millis(1));
        if let Some(done) = attempt() {
            return Ok(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_for_ever() {
        assert_eq!(Deadline::within(Duration::ZERO), Deadline::NEVER);
        assert_eq!(Deadline::NEVER.start().remaining(), None);
        assert!(!Deadline::NEVER.expired());
    }

    #[test]
    fn a_budget_that_is_used_up_is_no_licence_to_wait() {
        assert!(Deadline::after(Duration::ZERO).expired());
    }

    #[test]
    fn a_limit_the_clock_cannot_hold_is_no_limit() {
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
        assert_eq!(Deadline::within(Duration::MAX), Deadline::NEVER);
    }

    #[test]
    fn a_relative_deadline_counts_only_once_started() {
        let d = Deadline::within(Duration::from_millis(5));
        std::thread::sleep(Duration::from_millis(10));
        assert!(!d.expired());
        let d = d.start();
        std::thread::sleep(Duration::from_millis(10));
        assert!(d.expired());
        assert!(d.elapsed() >= Duration::from_millis(10));
    }
}
