//! The parts of the library's interface that are new: everything that depends on them asks here.
//!
//! Where a part is missing, what needs it is left out of the programs.

use std::time::Duration;

use symmem::{Element, Error, Failed, Group, Open, Paused, Symmetric};

use crate::record::Kind;

/// Whether a group can be brought back in step, and a call on one that is not says so.
pub const RESYNC: bool = true;

/// Brings a group back in step, on all its ranks.
pub fn resync(group: &Group, limit: Duration) -> symmem::Result<()> {
    group.resync_by(limit)
}

/// The kind of an error, the ranks of the group that it names, and how long it says to have waited.
pub fn kind(error: &Error) -> (Kind, Vec<usize>, Option<Duration>) {
    match error {
        Error::Mismatch { rank, ours, theirs, .. } => {
            let said = !ours.is_empty() && !theirs.is_empty();
            (if said { Kind::Mismatch } else { Kind::Other }, vec![*rank], None)
        }
        Error::PeerLost { rank, .. } => (Kind::PeerLost, vec![*rank], None),
        Error::PeerFailed { rank, .. } => (Kind::PeerFailed, vec![*rank], None),
        Error::Timeout { waiting_for, after, .. } => {
            (Kind::Timeout, waiting_for.clone(), Some(*after))
        }
        Error::Interrupted { waiting_for, after, .. } => {
            (Kind::Interrupted, waiting_for.clone(), Some(*after))
        }
        Error::OutOfStep { rank, .. } => (Kind::OutOfStep, vec![*rank], None),
        Error::Usage { .. } => (Kind::Usage, Vec::new(), None),
        _ => (Kind::Other, Vec::new(), None),
    }
}

/// What is left of memory whose phase did not change to open: it is dropped or goes on.
pub fn not_opened<T: Element>(failed: Failed<Paused<Open<T>>>) -> (Error, Option<Symmetric<T>>) {
    (failed.error, failed.kept.give_up().ok())
}

/// What is left of memory whose phase did not change back.
pub fn not_closed<T: Element>(
    failed: Failed<Paused<Symmetric<T>>>,
) -> (Error, Option<Symmetric<T>>) {
    (failed.error, None)
}
