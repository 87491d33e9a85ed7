//! A call that one rank refuses before it begins: the others are told, and none waits for it.
//!
//! The rank takes its place in the group's calls with one that nothing else makes. Whoever makes another call finds that out at
//! once, and all ranks stay in step.

use symmem::{Error, ReduceOp};

/// What stands for a refusal: a reduction of this many elements of this type for each rank, which no operator makes.
const OP: &str = "reduce_scatter";
const TYPE: &str = "u16";
const ELEMENTS: usize = 61;

/// Takes part in the call that this rank refuses. Collective: it succeeds where all ranks refuse; ranks that make the call fail.
pub(crate) fn refuse(group: &symmem::Group) -> symmem::Result<()> {
    let data = vec![0_u16; ELEMENTS * group.size()];
    match group.reduce_scatter(&data, ReduceOp::Xor, &mut [0; ELEMENTS]) {
        Err(Error::Mismatch { .. }) => Ok(()), // they know
        other => other,
    }
}

/// What a rank gets whose peer has refused the call that they were to make together.
pub(crate) fn of_a_peer(error: &Error) -> Option<Error> {
    let Error::Mismatch { op, what, rank, ours, theirs } = error else { return None };
    let is_refusal = |call: &str| call.starts_with(OP) && call.contains(TYPE);
    let of_another_op = is_refusal(theirs) && !is_refusal(ours);
    let of_another_type = *op == OP && *what == "element type" && theirs == TYPE;
    (of_another_op || of_another_type).then(|| Error::PeerFailed {
        op,
        rank: *rank,
        reason: "it refused the call, and its own error says why".to_owned(),
    })
}
