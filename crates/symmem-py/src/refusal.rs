//! A call that one rank refuses before it starts: the others are notified, and do not wait.

use symmem::Error;

/// The error of a rank whose peer refused a collective: see [`symmem::Group::refuse`].
pub(crate) fn of_a_peer(error: &Error) -> Option<Error> {
    let Error::Mismatch { op, what: "operation", rank, theirs, .. } = error else { return None };
    (theirs == "refuse")
        .then(|| Error::peer_failed(op, *rank, "it refused the call, and its own error says why"))
}
