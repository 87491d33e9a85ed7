//! Ending a thread's waits from outside: for languages that handle signals such as Ctrl-C themselves.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How often the callback is asked whether to end a wait.
const EVERY: Duration = Duration::from_millis(50);

thread_local! {
    static ASKED: Cell<Option<Asked>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Asked {
    ask: fn() -> bool,
    /// When it was asked last, or a wait of this call began: most calls wait for nothing, and need no clock.
    last: Option<Instant>,
    /// The answer was yes: nothing of this call waits any more.
    ended: bool,
}

/// Runs `f`; its blocking waits call `end` at least ten times a second and stop once it returns true. That wait and all
/// later waits of `f` then fail with [`Interrupted`](crate::Error::Interrupted); otherwise they behave as at their deadlines.
///
/// `end` may itself wait; it is not called again while it runs. If it panics in a collective call, that call is given up, and the group is
/// out of step until all ranks [`resync`](crate::Group::resync).
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// static STOP: AtomicBool = AtomicBool::new(true); // set by a signal handler, for instance
/// let told = symmem::World::threads(1, |world| {
///     let late = std::time::Duration::from_secs(60);
///     symmem::interruptible(|| STOP.load(Ordering::Relaxed), || world.wait_signal(0, 0, late))
/// })?;
/// assert_eq!(told[0].as_ref().unwrap_err().kind(), symmem::ErrorKind::Interrupted);
/// # Ok::<(), symmem::Error>(())
/// ```
pub fn interruptible<R>(end: fn() -> bool, f: impl FnOnce() -> R) -> R {
    struct Before(Option<Asked>);
    impl Drop for Before {
        fn drop(&mut self) {
            ASKED.set(self.0);
        }
    }
    let now = Asked { ask: end, last: None, ended: false };
    let _before = Before(ASKED.replace(Some(now)));
    f()
}

/// Whether the waits of this thread should end.
pub(crate) fn interrupted() -> bool {
    let Some(asked) = ASKED.get() else { return false };
    if asked.ended || asked.last.is_some_and(|last| last.elapsed() < EVERY) {
        return asked.ended;
    }
    // Taken away while it runs: a callback that waits would otherwise be asked by its own wait, without end.
    ASKED.set(None);
    let ended = asked.last.is_some() && (asked.ask)();
    ASKED.set(Some(Asked { last: Some(Instant::now()), ended, ..asked }));
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Deadline;

    #[test]
    fn a_wait_without_a_deadline_ends_when_it_shall() {
        let start = Instant::now();
        interruptible(|| true, || while !Deadline::NEVER.expired() {});
        assert!(start.elapsed() >= EVERY);
        assert!(!Deadline::NEVER.expired(), "it outlived its call");
    }

    #[test]
    fn a_callback_that_waits_is_not_asked_by_its_own_wait() {
        thread_local!(static DEPTH: Cell<u32> = const { Cell::new(0) });
        fn waits() -> bool {
            DEPTH.set(DEPTH.get() + 1);
            assert_eq!(DEPTH.get(), 1, "asked while it runs");
            let until = Deadline::after(3 * EVERY);
            while !until.expired() {
                std::thread::sleep(Duration::from_millis(1));
            }
            DEPTH.set(0);
            true
        }
        interruptible(waits, || while !Deadline::NEVER.expired() {});
    }

    #[test]
    fn what_is_asked_may_wait_itself() {
        fn nested() -> bool {
            interruptible(|| true, || while !Deadline::NEVER.expired() {});
            true
        }
        interruptible(nested, || while !Deadline::NEVER.expired() {});
    }
}
