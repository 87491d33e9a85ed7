//! Waiting for a word to change: spin, then yield, then sleep on a futex.

use std::time::{Duration, Instant};

#[cfg(any(loom, not(target_arch = "x86_64")))]
use super::atomic;
use super::{Deadline, Expiry, Ordering, Word, yield_now};

/// After so many looks, some microseconds, a wait yields once. A power of two.
const YIELD_EVERY: u32 = 256;
/// The same where each look asks the kernel what has come, which takes about as long as yielding.
const YIELD_EVERY_FAR: u32 = 4;
/// How many looks there are then before the clock is read. On a machine with much else to do, each yield may take milliseconds.
const LOOKS_FAR: u32 = 400;

/// How long a wait spins and yields before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Looks before the clock is read for the first time, which costs as much as a flag takes to arrive.
    looks: u32,
    /// From then on, how long to spin, and how long to yield after that.
    spin: Duration,
    yielding: Duration,
    /// How long to look once more after saying that the rank sleeps: see [`Bell`].
    settle: Duration,
    /// After so many looks a wait yields once.
    yield_every: u32,
    /// How many of the looks come before anything else is prepared for a longer wait.
    pub(crate) soon: u32,
    /// How many looks come after those, each once ranks that want this core had it: nothing else is prepared before these
    /// either, where a wait is one for the core.
    pub(crate) turns: u32,
    /// How many spin-loop hints go between two looks at a flag that data comes with: its writer needs the line for longer.
    pub(crate) hints: u32,
    /// There are more ranks than cores: whoever spins may keep the awaited rank from running.
    pub(crate) oversubscribed: bool,
}

impl Patience {
    /// Sleeps after so many looks: for models, which explore every schedule and read no clock.
    #[cfg(any(test, loom))]
    pub(crate) const fn looks(looks: u32) -> Self {
        let (spin, yielding, settle) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let yield_every = YIELD_EVERY;
        let (soon, turns, hints, oversubscribed) = (looks, 0, 1, false);
        Self { looks, soon, turns, spin, yielding, settle, yield_every, hints, oversubscribed }
    }

    /// The same where ranks are on several hosts: what is looked for has to be taken in first. So there are no quick looks, and
    /// ranks that want this core, whose number here says nothing of those of other hosts, get it soon.
    pub(crate) fn between_hosts(self) -> Self {
        let looks = self.looks.min(LOOKS_FAR);
        Self { looks, soon: 0, turns: 0, yield_every: YIELD_EVERY_FAR, ..self }
    }

    /// For a rank among `ranks` on `cores`, which leaves `hints` between two looks.
    pub(crate) fn among(ranks: usize, cores: usize, hints: u32) -> Self {
        let oversubscribed = ranks > cores;
        Self {
            looks: if oversubscribed { 100 } else { 2000 },
            soon: if oversubscribed { 1 } else { YIELD_EVERY },
            turns: if oversubscribed { 6 } else { 0 },
            spin: Duration::from_micros(50),
            yielding: Duration::from_micros(500),
            settle: Duration::from_micros(10),
            yield_every: YIELD_EVERY,
            hints,
            oversubscribed,
        }
    }
}

/// Passes the time between two looks.
#[inline(always)]
pub(crate) fn pause(hints: u32) {
    (0..hints).for_each(|_| std::hint::spin_loop());
}

/// Passes the time before look number `look` at a flag that comes alone. A spin-loop hint takes up to 60 ns, and a flag that
/// comes meanwhile waits for its end, so the first looks, for about 100 ns, follow each other more closely.
#[inline(always)]
pub(crate) fn pause_for_flag(look: u32) {
    if look <= 16 {
        (0..6).for_each(|i| {
            std::hint::black_box(i);
        });
    } else {
        pause(1);
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

/// The first sleep, in case what a ringer published was under way for longer than `settle`.
const FIRST_NAP: Duration = Duration::from_millis(1);

/// Goes between a store or exchange and [`Bell::ring_if_asleep`]: keeps the compiler, and processors that reorder more than a
/// store and the next load, from exchanging the two.
#[inline(always)]
pub(crate) fn before_ringing() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(any(target_arch = "x86_64", loom)))]
    atomic::fence(Ordering::SeqCst);
    // In a model no time passes in which stores could arrive.
    #[cfg(loom)]
    if !LATE_STORES.get() {
        atomic::fence(Ordering::SeqCst);
    }
}

#[cfg(loom)]
thread_local! {
    /// Whether stores of a model may stay under way for as long as they like. All its threads run on one thread of the system.
    pub static LATE_STORES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Where one rank sleeps: whoever changes a word that this rank may wait for rings afterwards.
///
/// | word       | written by | meaning |
/// |------------|------------|---------|
/// | `rings`    | ringers    | counts rings; the futex that the rank sleeps on |
/// | `sleepers` | the rank   | threads of the rank that sleep or are about to |
///
/// A ringer publishes and then reads `sleepers`; a sleeper raises `sleepers` and then looks again. If neither saw the other,
/// the ringer read `sleepers` while what it published was still on its way: a store waits in its core until the cache line has
/// come over, and a fence in every small message would hold up all that comes after it for as long. So the sleeper waits
/// instead: it looks on for far longer than any store is under way, and naps only shortly the first time.
pub(crate) struct Bell<'a, W> {
    pub(crate) rings: &'a W,
    pub(crate) sleepers: &'a W,
}

impl<W: Word> Bell<'_, W> {
    /// Wakes the rank if it sleeps. The caller has called [`before_ringing`] after its store.
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
                if look & (patience.yield_every - 1) == 0 {
                    yield_now();
                } else {
                    pause(patience.hints);
                }
            } else if in_the_way() {
                yield_now();
            } else {
                pause(patience.hints);
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
                // The thread may have had no core since its look, and what it waits for may have come before the deadline.
                let given_up = deadline.expiry().map(|why| Ended::GivenUp(why, deadline.elapsed()));
                given_up.map(|end| if ready() { Ended::Ready } else { end })
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
        #[cfg(any(loom, not(target_arch = "x86_64")))]
        atomic::fence(Ordering::SeqCst); // on x86 the exchange is one
        let asleep = Instant::now();
        let mut nap = FIRST_NAP;
        let end = loop {
            // Before the look: this thread may lose its core at any moment, and one look must come after that time.
            let has_settled = asleep.elapsed() >= patience.settle;
            let seen = self.rings.load(Ordering::Acquire);
            if let Some(end) = verdict() {
                break end;
            }
            if !has_settled {
                pause(16);
            } else {
                self.rings.sleep(seen, deadline.nap(nap));
                nap = NAP;
            }
        };
        self.sleepers.decrement();
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::SharedWord;

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
    fn what_became_ready_before_the_deadline_was_seen_counts() {
        let mut looks = 0;
        let ready = || {
            looks += 1;
            looks == 2
        };
        assert_eq!(ended(passed(), ready, || false), Ended::Ready);
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
