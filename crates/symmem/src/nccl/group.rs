//! Calls that are begun together: what several devices of one thread do with each other must be.

use std::cell::{Cell, RefCell};

use symmem_sys::nccl::Failure;

use super::communicator::Communicator;
use super::{Nccl, failed};
use crate::error::{Error, Result};

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Who has taken part in the group that is open.
    static JOINED: RefCell<Vec<Communicator>> = const { RefCell::new(Vec::new()) };
}

impl Nccl {
    /// Begins together what this thread calls in `f`, when that returns; then waits until the library has put it into the
    /// streams. Sends and receives between the same ranks need that, and all calls of a thread with several communicators.
    pub fn group<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        const OP: &str = "group";
        self.0.group_start().map_err(|failure| failed(OP, None, &failure))?;
        DEPTH.set(DEPTH.get() + 1);
        let open = Open(self);
        let done = f();
        let (ended, joined) = open.end();
        if is_open() {
            return done;
        }
        // What was called before the failure is under way now: the other ranks wait for it, so it is seen to its end.
        let settled = joined.iter().map(|communicator| communicator.settle(OP));
        let settled = settled.fold(Ok(()), Result::and);
        let ended = match ended {
            Err(failure) if !failure.is_in_progress() => Err(failed(OP, None, &failure)),
            _ => Ok(()),
        };
        let done = done?;
        ended?;
        settled?;
        Ok(done)
    }
}

/// A group, which is ended even if what is done in it panics.
struct Open<'a>(&'a Nccl);

impl Open<'_> {
    /// The library's answer, and who has taken part, where no other group is around this one.
    fn end(self) -> (Result<(), Failure>, Vec<Communicator>) {
        let ended = self.leave();
        std::mem::forget(self);
        ended
    }

    fn leave(&self) -> (Result<(), Failure>, Vec<Communicator>) {
        DEPTH.set(DEPTH.get() - 1);
        let ended = self.0.0.group_end();
        (ended, if is_open() { Vec::new() } else { JOINED.take() })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

/// Whether a group is open on this thread.
pub(super) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Takes part in the group that is open, if one is.
pub(super) fn join(communicator: &Communicator) -> bool {
    if !is_open() {
        return false;
    }
    JOINED.with_borrow_mut(|joined| {
        if !joined.contains(communicator) {
            joined.push(communicator.clone());
        }
    });
    true
}

/// Refuses what has to be waited for.
pub(super) fn check_closed(op: &'static str, rank: usize) -> Result<()> {
    if !is_open() {
        return Ok(());
    }
    let expected = "a call outside of a group".to_owned();
    Err(Error::usage(op, expected, "one within").at_rank(rank))
}
