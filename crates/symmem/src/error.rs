//! The one error type. `docs/errors.md` says for each variant who gets it, and what still works after it.

use std::time::Duration;

/// The result of every fallible call in this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong: which operation, which rank, what was expected and what came instead.
///
/// Its `Debug` output is its message as well, so that `fn main() -> symmem::Result<()>` prints that.
///
/// ```
/// use symmem::{ErrorKind, World};
///
/// let told = World::threads(1, |world| world.subgroup(&[7]).unwrap_err())?;
/// assert_eq!(told[0].kind(), ErrorKind::Usage);
/// assert_eq!(
///     format!("{:?}", told[0]),
///     "rank 0: subgroup: expected different ranks in [0, 1), with this one, got [7]"
/// );
/// # Ok::<(), symmem::Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something this call needs does not exist on this machine.
    #[error("{what} is not available: {why}")]
    #[non_exhaustive]
    Unavailable {
        /// The missing thing.
        what: String,
        /// Why it is missing, and what helps, if anything does.
        why: String,
    },

    /// A call into the operating system failed.
    #[error("{call}: {source}")]
    #[non_exhaustive]
    System {
        /// The system call and what it was for.
        call: String,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// A call into a device's driver, or into a library for devices, failed.
    #[error("{why}")]
    #[non_exhaustive]
    Driver {
        /// The library: `CUDA`, `NCCL` or `NVSHMEM`.
        library: &'static str,
        /// The function.
        call: &'static str,
        /// The library's code, if it gave one.
        code: Option<i32>,
        /// The answer in words, which name the function and the code too.
        why: String,
    },

    /// The ranks called the same operation with arguments that do not fit together. Every rank gets this; of a message, only its
    /// receiver.
    #[error("{op}: ranks disagree on the {what}: here {ours}, on rank {rank} {theirs}")]
    #[non_exhaustive]
    Mismatch {
        /// The collective operation, or `recv`.
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

    /// A peer died or left while we needed it. The group can continue without it: see `Group::shrink`.
    #[error("{during}: rank {rank} is gone: {how}")]
    #[non_exhaustive]
    PeerLost {
        /// The lost rank, as numbered in the group (in the world, before a group exists).
        rank: usize,
        /// The operation that noticed.
        during: &'static str,
        /// How it was lost: connection closed, left, refused.
        how: String,
    },

    /// A peer is alive but could not do its part of a collective operation; it has its own error.
    #[error("{op}: rank {rank} could not do its part: {reason}")]
    #[non_exhaustive]
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
    #[non_exhaustive]
    Timeout {
        /// The operation that waited.
        op: &'static str,
        /// The channel, for operations that have one.
        channel: Option<usize>,
        /// The ranks that had not answered; empty when the wait was for the store.
        waiting_for: Vec<usize>,
        /// How long the wait lasted.
        after: Duration,
        /// What each of these ranks is doing, from its notes in shared memory; empty if nothing is known.
        doing: Vec<String>,
    },

    /// The caller ended a wait: see [`interruptible`](crate::interruptible). Otherwise as at a deadline.
    #[error("{op}{}: interrupted after {after:.1?} while waiting for {}", on_channel(.channel), ranks(.waiting_for))]
    #[non_exhaustive]
    Interrupted {
        /// The operation that waited.
        op: &'static str,
        /// The channel, for operations that have one.
        channel: Option<usize>,
        /// The ranks that had not answered; empty when the wait was for the store.
        waiting_for: Vec<usize>,
        /// How long the wait lasted.
        after: Duration,
    },

    /// A rank gave up a collective call that the others may have finished, so calls no longer pair up. Every rank gets
    /// this from every collective call of the group until all ranks have called `Group::resync`.
    #[error("{op}: the group is out of step: rank {rank} {what}; all ranks must call resync")]
    #[non_exhaustive]
    OutOfStep {
        /// The operation called.
        op: &'static str,
        /// The rank after which calls no longer pair up.
        rank: usize,
        /// What it did: the call that it gave up.
        what: String,
    },

    /// [`Queue::abort`](crate::Queue::abort) ended a job before it was done.
    #[error("rank {rank}: the queue was aborted: {what}")]
    #[non_exhaustive]
    Aborted {
        /// The rank whose queue it is.
        rank: usize,
        /// What the job was doing.
        what: String,
    },

    /// A job of a queue panicked.
    #[error("rank {rank}: a job of the queue panicked: {what}")]
    #[non_exhaustive]
    Panicked {
        /// The rank whose queue it is.
        rank: usize,
        /// The message of the panic.
        what: String,
    },

    /// The other end of a connection did not keep to the protocol, or ended it.
    #[error("{with}: expected {expected}, got {got}")]
    #[non_exhaustive]
    Protocol {
        /// The other end.
        with: String,
        /// What the protocol requires.
        expected: String,
        /// What was received.
        got: String,
    },

    /// The call itself is wrong; nothing was done.
    #[error("{}{op}: expected {expected}, got {got}", at_rank(.rank))]
    #[non_exhaustive]
    Usage {
        /// The operation called.
        op: &'static str,
        /// The calling rank, once it has one.
        rank: Option<usize>,
        /// What the operation takes.
        expected: String,
        /// What was passed.
        got: String,
    },
}

/// The variants of [`Error`] without their fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// See [`Error::Unavailable`].
    Unavailable,
    /// See [`Error::System`].
    System,
    /// See [`Error::Driver`].
    Driver,
    /// See [`Error::Mismatch`].
    Mismatch,
    /// See [`Error::PeerLost`].
    PeerLost,
    /// See [`Error::PeerFailed`].
    PeerFailed,
    /// See [`Error::Timeout`].
    Timeout,
    /// See [`Error::Interrupted`].
    Interrupted,
    /// See [`Error::OutOfStep`].
    OutOfStep,
    /// See [`Error::Aborted`].
    Aborted,
    /// See [`Error::Panicked`].
    Panicked,
    /// See [`Error::Protocol`].
    Protocol,
    /// See [`Error::Usage`].
    Usage,
}

impl Error {
    /// Which variant it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::System { .. } => ErrorKind::System,
            Self::Driver { .. } => ErrorKind::Driver,
            Self::Mismatch { .. } => ErrorKind::Mismatch,
            Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::PeerFailed { .. } => ErrorKind::PeerFailed,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
            Self::OutOfStep { .. } => ErrorKind::OutOfStep,
            Self::Aborted { .. } => ErrorKind::Aborted,
            Self::Panicked { .. } => ErrorKind::Panicked,
            Self::Protocol { .. } => ErrorKind::Protocol,
            Self::Usage { .. } => ErrorKind::Usage,
        }
    }

    /// The code of the operating system, or of the library that failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } => source.raw_os_error(),
            Self::Driver { code, .. } => *code,
            _ => None,
        }
    }

    /// An [`Error::Unavailable`], for stores and other code of your own.
    pub fn unavailable(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into(), why: why.into() }
    }

    /// An [`Error::Usage`].
    pub fn usage(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Usage { op, rank: None, expected: expected.into(), got: got.into() }
    }

    /// As an error of the given rank, if it is an [`Error::Usage`].
    pub fn at_rank(mut self, caller: usize) -> Self {
        if let Self::Usage { rank, .. } = &mut self {
            *rank = Some(caller);
        }
        self
    }

    /// An [`Error::Protocol`].
    pub fn protocol(
        with: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Self::Protocol { with: with.into(), expected: expected.into(), got: got.into() }
    }

    /// An [`Error::PeerFailed`].
    pub fn peer_failed(op: &'static str, rank: usize, reason: impl Into<String>) -> Self {
        Self::PeerFailed { op, rank, reason: reason.into() }
    }

    /// An [`Error::Timeout`]; of the store, if no ranks are given.
    pub fn timeout(op: &'static str, waiting_for: Vec<usize>, after: Duration) -> Self {
        Self::Timeout { op, channel: None, waiting_for, after, doing: Vec::new() }
    }

    /// For `map_err`: names the system call that failed.
    pub(crate) fn system<E: Into<std::io::Error>>(
        call: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::System { call: call.into(), source: source.into() }
    }
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
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

/// Why a call failed, and the value that it had taken from the caller. `?` turns it into the plain [`Error`].
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
