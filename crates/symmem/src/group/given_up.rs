//! Calls that were given up: what the ranks are told of them, and what the rank itself remembers.

use std::sync::PoisonError;
use std::time::Duration;

use super::Group;
use super::call::Call;
use super::form::Formed;
use super::numbering::{pack, store, unpack};
use crate::error::Error;
use crate::signal::Layout;
use crate::sync::Deadline;

/// How long a failed job waits for others to tell them.
const BRIEFLY: Duration = Duration::from_millis(100);

/// Does something if a panic of the callback of `interruptible` ends a wait. To be forgotten otherwise, which costs nothing.
pub(super) struct InPanic<F: FnMut()>(pub(super) F);

impl<F: FnMut()> Drop for InPanic<F> {
    #[cold]
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Group {
    /// A call that gave up before its group was formed: peers make it, as in [`Formed::put_off`].
    pub(super) fn note_not_made(&self, call: &Call) {
        let mut not_made = self.0.not_made.lock().unwrap_or_else(PoisonError::into_inner);
        not_made.get_or_insert(*call);
    }

    /// The rank that gave up a call, if calls no longer pair up.
    pub(super) fn find_out_of_step(&self) -> Option<usize> {
        self.0.health.formed.get()?.signals.out_of_step()
    }

    #[cold]
    pub(super) fn out_of_step(&self, op: &'static str, rank: usize) -> Error {
        let what = match self.0.health.formed.get() {
            Some(formed) => {
                formed.signals.pass_on_out();
                let words = formed.signals.load_words(rank, Layout::given_up());
                match Call::from_words(&unpack(&words)) {
                    call if call.op.name() == "resync" => "called resync".to_owned(),
                    Call::JOB => "has a queued job that failed or was aborted".to_owned(),
                    call => format!("gave up {call}"),
                }
            }
            None => "gave up a call".to_owned(),
        };
        Error::OutOfStep { op, rank, what }
    }

    /// Puts the group out of step, unless it is: a job of this rank failed, and may have left out calls that peers make.
    #[cold]
    pub(crate) fn give_up_job(&self) {
        let Some(formed) = self.0.health.formed.get() else {
            self.note_not_made(&Call::JOB);
            let _ = self.ready_by(Deadline::after(BRIEFLY)); // or later, with the next job
            return;
        };
        if self.find_out_of_step().is_none() {
            let signals = &formed.signals;
            // A thread that holds it longer is in a call, which ends when the group is out of step.
            let _guard = signals.lock_channel(signals.sequence(), Deadline::after(BRIEFLY));
            formed.give_up(&Call::JOB);
        }
    }

    /// Notes that the last call has failed on all ranks, with `Mismatch` or `PeerFailed`, if it has.
    #[cold]
    pub(crate) fn note_common(&self, error: Error) -> Error {
        if let Error::Mismatch { op, .. } | Error::PeerFailed { op, .. } = error
            && let Some(formed) = self.0.health.formed.get()
        {
            *formed.sequence.common_failure() = Some((formed.signals.epoch(), op));
        }
        error
    }

    /// Whether this is the error of the group's last call, which has failed on all ranks. Messages and calls of other groups fail with
    /// such errors too, but not on all ranks of this one.
    pub(crate) fn is_common(&self, error: &Error) -> bool {
        let (Error::Mismatch { op, .. } | Error::PeerFailed { op, .. }) = error else {
            return false;
        };
        self.0.health.formed.get().is_some_and(|formed| {
            let failed = formed.sequence.common_failure().take();
            failed == Some((formed.signals.epoch(), *op))
        })
    }
}

impl Formed {
    /// Tells all ranks that this one has given up a call.
    #[cold]
    pub(super) fn give_up(&self, call: &Call) {
        self.signals.store_words(Layout::given_up(), &pack(&call.words()));
        self.signals.give_up();
    }

    /// Notes that this rank gave up a call before it reached it. Peers make the call, so this rank must make it again. Otherwise
    /// they would take its next call for it.
    #[cold]
    pub(super) fn put_off(&self, call: &Call) {
        self.signals.look_before_next();
        if call.is_resumable() {
            let [a, b, c, d, e, f, g, _] = call.words();
            store(&self.sequence.put_off, &[a, b, c, d, e, f, g, 1]);
        } else {
            self.give_up(call);
        }
    }
}
