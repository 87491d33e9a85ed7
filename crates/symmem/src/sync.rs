//! Atomics (std's, or loom's under `--cfg loom`), deadlines, and waiting: spin, then yield, then sleep on a futex.
//!
//! Nothing in this library waits in any other way.
#![allow(unsafe_code)] // one prefetch instruction; relies on none of the S-invariants

use std::sync::Mutex as StdMutex;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::interrupt::interrupted;

pub use atomic::Ordering;
#[cfg(loom)]
pub(crate) use loom::sync::Mutex;
#[cfg(not(loom))]
pub(crate) use std::sync::Mutex;

/// The atomics of process-local state: loom's when loom explores the protocol, std's otherwise.
pub(crate) mod atomic {
    #[cfg(loom)]
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, fence};
    pub(crate) use std::sync::atomic::AtomicUsize; // of `machine`, where all threads find the same: nothing to explore
    pub use std::sync::atomic::Ordering;
    #[cfg(not(loom))]
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, fence};
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

/// When a wait gives up.
///
/// Two numbers, so that it travels in registers: it is part of every small message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// In nanoseconds.
    limit: u64,
    /// When the time began to count, on this process's [`clock`]; 0 until a wait turns slow, so that a wait that is met at
    /// once never reads the clock.
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

    /// All waits that get this deadline together may take `limit`, counted from now. 0 has passed already: what has
    /// come is taken, and nothing is waited for.
    pub fn after(limit: Duration) -> Self {
        Self { limit: nanoseconds(limit), start: 0 }.start()
    }

    /// Fixes the moment of expiry: from here on the time is counted.
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

    /// Whether no time is left, or this thread's waits shall end: see [`interruptible`](crate::interruptible).
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
            Self::Interrupted => Error::Interrupted { op, waiting_for, after },
        }
    }
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

/// Repeats `attempt` until it succeeds, with pauses that grow to a millisecond, or until the deadline.
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
            return Err((why, deadline.elapsed()));
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

/// The fence between a successful `replace` (`SeqCst`) and `ring_if_asleep`. Where an exchange is a full fence by
/// itself and a `SeqCst` load plain, as on x86, the two are in order without it.
#[inline(always)]
pub(crate) fn fence_after_replace() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    atomic::fence(Ordering::SeqCst);
}

/// The fence between two loads, which pairs with one between a store and a load elsewhere. Where loads are in order, and what
/// one core sees all cores see, as on x86, the two are in order without it.
#[inline(always)]
pub(crate) fn fence_between_looks() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    atomic::fence(Ordering::SeqCst);
}

/// After so many looks, some microseconds, a wait yields once.
const YIELD_EVERY: u32 = 256;

/// How long a wait spins and yields before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Looks before the clock is read for the first time, which costs as much as a flag takes to arrive.
    looks: u32,
    /// From then on, how long to spin, and how long to yield after that.
    spin: Duration,
    yielding: Duration,
    /// How many of the looks come before anything else is prepared for a longer wait.
    pub(crate) soon: u32,
    /// There are more ranks than cores: whoever spins may keep the awaited rank from running.
    pub(crate) oversubscribed: bool,
}

impl Patience {
    /// Sleeps after so many looks: for models, which explore every schedule and read no clock.
    #[cfg(any(test, loom))]
    pub(crate) const fn looks(looks: u32) -> Self {
        let (spin, yielding) = (Duration::ZERO, Duration::ZERO);
        Self { looks, soon: looks, spin, yielding, oversubscribed: false }
    }

    /// For a rank among `ranks` on `cores`.
    pub(crate) fn among(ranks: usize, cores: usize) -> Self {
        let oversubscribed = ranks > cores;
        Self {
            looks: if oversubscribed { 100 } else { 2000 },
            soon: if oversubscribed { 1 } else { YIELD_EVERY },
            spin: Duration::from_micros(50),
            yielding: Duration::from_micros(500),
            oversubscribed,
        }
    }
}

/// The core that this thread runs on, counted from one. It may have moved when the caller reads this.
pub(crate) fn current_core() -> u32 {
    rustix::thread::sched_getcpu() as u32 + 1
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Ready,
    /// What was waited for can no longer come.
    Broken,
    GivenUp(Expiry, Duration),
}

/// The longest sleep between two looks, for those who change a word without ringing (a user's own code).
const NAP: Duration = Duration::from_millis(20);

/// Where one rank sleeps: whoever changes a word that this rank may wait for rings afterwards.
///
/// | word       | written by | meaning |
/// |------------|------------|---------|
/// | `rings`    | ringers    | counts rings; the futex that the rank sleeps on |
/// | `sleepers` | the rank   | threads of the rank that sleep or are about to |
///
/// A ringer publishes, fences, then reads `sleepers`; a sleeper raises `sleepers`, fences, then looks
/// again. One of the two fences comes first in the single order of fences, so either the ringer sees
/// the sleeper or the sleeper sees what was published.
pub(crate) struct Bell<'a, W> {
    pub(crate) rings: &'a W,
    pub(crate) sleepers: &'a W,
}

impl<W: Word> Bell<'_, W> {
    /// Wakes the rank if it sleeps. The caller has fenced (`SeqCst`) between its store and this call.
    #[inline]
    pub(crate) fn ring_if_asleep(&self) {
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.ring();
        }
    }

    /// Wakes the rank.
    pub(crate) fn ring(&self) {
        self.rings.increment();
        self.rings.wake();
    }

    /// Waits until `ready`, or `broken` while not ready, or the deadline, whose time counts from the moment at which the
    /// wait turns slow; `deadline` is set to that, so that later waits of the same call share it.
    ///
    /// What was stored before a loss is still seen: `ready` has the last word. Where ranks outnumber the cores,
    /// `in_the_way` says whether a rank that is awaited may want our core.
    #[inline]
    pub(crate) fn wait(
        &self,
        patience: Patience,
        deadline: &mut Deadline,
        mut ready: impl FnMut() -> bool,
        mut broken: impl FnMut() -> bool,
        mut in_the_way: impl FnMut() -> bool,
    ) -> Ended {
        for look in 1..=patience.looks {
            if ready() {
                return Ended::Ready;
            }
            if !patience.oversubscribed {
                // Now and then, in case the kernel has put the rank that is awaited on our core.
                if look % YIELD_EVERY == 0 { yield_now() } else { std::hint::spin_loop() }
            } else if in_the_way() {
                yield_now();
            } else {
                (0..2).for_each(|_| std::hint::spin_loop());
            }
        }
        self.wait_long(patience, deadline, &mut ready, &mut broken, &mut in_the_way)
    }

    #[cold]
    fn wait_long(
        &self,
        patience: Patience,
        deadline: &mut Deadline,
        ready: &mut dyn FnMut() -> bool,
        broken: &mut dyn FnMut() -> bool,
        in_the_way: &mut dyn FnMut() -> bool,
    ) -> Ended {
        *deadline = deadline.start();
        let deadline = *deadline;
        let mut verdict = || {
            if ready() {
                Some(Ended::Ready)
            } else if broken() {
                Some(if ready() { Ended::Ready } else { Ended::Broken })
            } else {
                deadline.expiry().map(|why| Ended::GivenUp(why, deadline.elapsed()))
            }
        };
        let begin = Instant::now();
        while begin.elapsed() < patience.spin + patience.yielding {
            if let Some(end) = verdict() {
                return end;
            }
            if begin.elapsed() < patience.spin && !(patience.oversubscribed && in_the_way()) {
                (0..64).for_each(|_| std::hint::spin_loop());
            } else {
                yield_now();
            }
        }
        self.sleepers.increment();
        atomic::fence(Ordering::SeqCst); // pairs with the fence of whoever calls `ring_if_asleep`
        let end = loop {
            let seen = self.rings.load(Ordering::Acquire);
            if let Some(end) = verdict() {
                break end;
            }
            self.rings.sleep(seen, deadline.nap(NAP));
        };
        self.sleepers.decrement();
        end
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

    fn passed() -> Deadline {
        let deadline = Deadline::after(Duration::from_nanos(1));
        std::thread::sleep(Duration::from_millis(1));
        deadline
    }

    /// How a wait at a fresh bell ends, by what its looks say.
    fn ended(
        mut deadline: Deadline,
        ready: impl FnMut() -> bool,
        broken: impl FnMut() -> bool,
    ) -> Ended {
        let (rings, sleepers) = (SharedWord::new(0), SharedWord::new(0));
        let bell = Bell { rings: &rings, sleepers: &sleepers };
        let end = bell.wait(Patience::looks(0), &mut deadline, ready, broken, || true);
        assert_eq!(sleepers.load(Ordering::Relaxed), 0, "it left its bell as if asleep");
        end
    }

    #[test]
    fn what_is_ready_counts_whatever_else_happened() {
        assert_eq!(ended(passed(), || true, || true), Ended::Ready);
    }

    #[test]
    fn a_loss_comes_before_the_deadline() {
        assert_eq!(ended(passed(), || false, || true), Ended::Broken);
    }

    #[test]
    fn what_became_ready_before_the_loss_was_seen_counts() {
        let mut looks = 0;
        let ready = || {
            looks += 1;
            looks == 2
        };
        assert_eq!(ended(Deadline::NEVER, ready, || true), Ended::Ready);
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_not_before() {
        let limit = Duration::from_millis(30);
        let end = ended(Deadline::within(limit), || false, || false);
        assert!(
            matches!(end, Ended::GivenUp(Expiry::Deadline, after) if after >= limit),
            "{end:?}"
        );
        assert!(matches!(ended(passed(), || false, || false), Ended::GivenUp(..)));
    }

    #[test]
    fn a_sleeper_sees_what_changes_without_a_ring() {
        let mut looks = 0;
        let ready = || {
            looks += 1;
            looks == 3
        };
        assert_eq!(ended(Deadline::within(Duration::from_secs(20)), ready, || false), Ended::Ready);
    }

    #[test]
    fn a_word_puts_to_sleep_only_while_it_holds_what_was_seen() {
        let word = SharedWord::new(1);
        let (start, long) = (Instant::now(), Duration::from_secs(20));
        Word::sleep(&word, 0, long);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while Word::load(&word, Ordering::Acquire) == 1 {
                    Word::sleep(&word, 1, long);
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            word.increment();
            word.wake();
        });
        assert!(start.elapsed() < long);
    }
}
