//! A call that one rank refuses before it begins: the others are told, and none waits for it.
//!
//! The rank takes its place in the group's calls with one that nothing else makes. Whoever makes another finds that out at
//! once, and all ranks stay in step.

use symmem::{Error, ReduceOp};

/// What stands for a refusal: a reduction of so many elements of this type, which no operator makes for itself.
const ELEMENTS: usize = 61;
const IN_WORDS: &str = "u16";

/// Takes part in the call that this rank refuses. Collective: ranks that refuse as well are done with it, others fail.
pub(crate) fn refuse(group: &symmem::Group) -> symmem::Result<()> {
    match group.all_reduce(&mut [0_u16; ELEMENTS], ReduceOp::Xor) {
        Err(Error::Mismatch { .. }) => Ok(()), // they know
        other => other,
    }
}

/// What a rank gets whose peer has refused the call that they were to make together.
pub(crate) fn of_a_peer(error: &Error) -> Option<Error> {
    let Error::Mismatch { op, rank, ours, theirs, .. } = error else { return None };
    let refused = |call: &str| call.starts_with("all_reduce") && call.contains(IN_WORDS);
    (refused(theirs) && !refused(ours)).then(|| Error::PeerFailed {
        op,
        rank: *rank,
        reason: "it refused the call, and its own error says why".to_owned(),
    })
}
