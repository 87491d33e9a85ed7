//! A call that one rank refuses before it begins: the others are told, and none waits for it.

use symmem::Error;

/// What a rank gets whose peer has refused the call that they were to make together: see [`symmem::Group::refuse`].
pub(crate) fn of_a_peer(error: &Error) -> Option<Error> {
    let Error::Mismatch { op, what: "operation", rank, theirs, .. } = error else { return None };
    (theirs == "refuse")
        .then(|| Error::peer_failed(op, *rank, "it refused the call, and its own error says why"))
}
