//! The one error type. `docs/errors.md` says for each variant who gets it, and what still works after it.

use std::time::Duration;

/// The result of every fallible call in this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong: which operation, which rank, what was expected and what came instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something this call needs does not exist on this machine.
    #[error("{what} is not available: {why}")]
    Unavailable {
        /// The missing thing.
        what: String,
        /// Why it cannot be had, and the remedy where there is one.
        why: String,
    },

    /// A call into the operating system failed.
    #[error("{call}: {source}")]
    System {
        /// The system call and what it was for.
        call: String,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// A call into a device's driver, or into a library for devices, failed.
    #[error("{why}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's answer, which names the function too.
        why: String,
    },

    /// The ranks called the same operation with arguments that do not fit together. Every rank gets this.
    #[error("{op}: ranks disagree on the {what}: here {ours}, on rank {rank} {theirs}")]
    Mismatch {
        /// The collective operation.
        op: &'static str,
        /// The argument that differs.
        what: &'static str,
        /// The lowest rank whose value differs from ours, of those that had made their call by then.
        rank: usize,
        /// Our value.
        ours: String,
        /// That rank's value.
        theirs: String,
    },

    /// A peer died or left while we needed it. The group can go on without it: see `Group::shrink`.
    #[error("{during}: rank {rank} is gone: {how}")]
    PeerLost {
        /// The lost rank, as numbered in the group (in the world, before a group exists).
        rank: usize,
        /// The operation that noticed.
        during: &'static str,
        /// How it went: connection closed, left, refused.
        how: String,
    },

    /// A peer is alive but could not do its part of a collective operation; it has its own error.
    #[error("{op}: rank {rank} could not do its part: {reason}")]
    PeerFailed {
        /// The collective operation.
        op: &'static str,
        /// The rank that failed.
        rank: usize,
        /// That rank's error.
        reason: String,
    },

    /// A wait ended at its deadline.
    #[error("{op}{}: no answer from {} after {after:.1?}{}", on_channel(.channel), ranks(.waiting_for), detail(.doing))]
    Timeout {
        /// The operation that waited.
        op: &'static str,
        /// The channel, for operations that have one.
        channel: Option<usize>,
        /// The ranks that had not answered; empty when the wait was for the store.
        waiting_for: Vec<usize>,
        /// How long the wait lasted.
        after: Duration,
        /// What each of these ranks is doing, by what it left in shared memory; empty where nothing is known.
        doing: Vec<String>,
    },

    /// The caller ended a wait: see [`interruptible`](crate::interruptible). Otherwise as at a deadline.
    #[error("{op}: interrupted after {after:.1?} while waiting for {}", ranks(.waiting_for))]
    Interrupted {
        /// The operation that waited.
        op: &'static str,
        /// The ranks that had not answered; empty when the wait was for the store.
        waiting_for: Vec<usize>,
        /// How long the wait lasted.
        after: Duration,
    },

    /// A rank gave up a collective call that the others may have finished, so calls no longer pair up. Every rank gets
    /// this from every collective call of the group until all ranks have called `Group::resync`.
    #[error("{op}: the group is out of step: rank {rank} {what}; all ranks must call resync")]
    OutOfStep {
        /// The operation called.
        op: &'static str,
        /// The rank after which calls no longer pair up.
        rank: usize,
        /// What it did: the call that it gave up.
        what: String,
    },

    /// The other end of a connection did not keep to the protocol, or ended it.
    #[error("{with}: expected {expected}, got {got}")]
    Protocol {
        /// The other end.
        with: String,
        /// What the protocol asks for.
        expected: String,
        /// What came.
        got: String,
    },

    /// The call itself is wrong; nothing was done.
    #[error("{}{op}: expected {expected}, got {got}", at_rank(.rank))]
    Usage {
        /// The operation called.
        op: &'static str,
        /// The calling rank, once it has one.
        rank: Option<usize>,
        /// What the operation takes.
        expected: String,
        /// What it was given.
        got: String,
    },
}

impl Error {
    /// For `map_err`: names the system call that failed.
    pub(crate) fn system<E: Into<std::io::Error>>(
        call: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::System { call: call.into(), source: source.into() }
    }
}

fn on_channel(channel: &Option<usize>) -> String {
    channel.map_or(String::new(), |c| format!(" on channel {c}"))
}

fn detail(doing: &[String]) -> String {
    if doing.is_empty() { String::new() } else { format!(" ({})", doing.join("; ")) }
}

fn at_rank(rank: &Option<usize>) -> String {
    rank.map_or(String::new(), |r| format!("rank {r}: "))
}

fn ranks(waiting_for: &[usize]) -> String {
    match waiting_for {
        [] => "the store".to_owned(),
        [one] => format!("rank {one}"),
        many => {
            format!("ranks {}", many.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Why a call failed, and what it had taken from the caller. The question mark turns it into the plain [`Error`].
pub struct Failed<K> {
    /// The cause.
    pub error: Error,
    /// What the call took.
    pub kept: K,
}

impl<K> From<Failed<K>> for Error {
    fn from(failed: Failed<K>) -> Self {
        failed.error
    }
}

impl<K> std::fmt::Debug for Failed<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<K> std::fmt::Display for Failed<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl<K> std::error::Error for Failed<K> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_operation_channel_ranks_and_time() {
        let e = Error::Timeout {
            op: "barrier",
            channel: Some(3),
            waiting_for: vec![1, 4],
            after: Duration::from_millis(1500),
            doing: vec![
                "rank 1 is in wait_signal".into(),
                "rank 4 is outside of the library".into(),
            ],
        };
        assert_eq!(
            e.to_string(),
            "barrier on channel 3: no answer from ranks 1, 4 after 1.5s \
             (rank 1 is in wait_signal; rank 4 is outside of the library)"
        );
    }

    #[test]
    fn a_usage_error_names_rank_operation_expectation_and_value() {
        let e = Error::Usage {
            op: "put_signal",
            rank: Some(2),
            expected: "a rank in [0, 4)".into(),
            got: "7".into(),
        };
        assert_eq!(e.to_string(), "rank 2: put_signal: expected a rank in [0, 4), got 7");
    }
}
