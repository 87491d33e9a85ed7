//! Collectives, and sending and receiving.
#![allow(unsafe_code)] // only names

use std::ffi::c_int;

use crate::code::{Code, INVALID_ARGUMENT};
use crate::group::{Job, submit};
use crate::state;
use crate::work::{Part, What};

/// What a call is given, besides what it is.
struct Given {
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
}

/// Checks a call as NCCL does, and does it.
fn call(name: &str, comm: usize, given: Given, what: What) -> c_int {
    let mut state = state::lock();
    let checked = state.enter(name).and_then(|()| {
        let comm = state.ready(comm)?;
        let size = state.cliques.get(&comm.clique).map_or(0, |clique| clique.size);
        let types = if state.version >= 22400 { 12 } else { 10 };
        if !(0..types).contains(&given.kind) {
            return Err(state.say(INVALID_ARGUMENT, &format!("{name}: invalid type")));
        }
        let factor = check(&what, size, &comm.factors)
            .map_err(|words| state.say(INVALID_ARGUMENT, &format!("{name}: {words}")))?;
        Ok::<_, Code>((comm.rank, factor))
    });
    let (rank, factor) = match checked {
        Ok(checked) => checked,
        Err(code) => return code,
    };
    let Given { from, to, count, kind } = given;
    let part = Part { from, to, count, kind, factor, ..Part::new(comm, rank, what) };
    submit(state, Job::Bring(part))
}

/// The factor of an operator that the communicator has made.
fn check(
    what: &What,
    size: usize,
    factors: &std::collections::BTreeMap<i32, f64>,
) -> Result<Option<f64>, &'static str> {
    match *what {
        What::Reduce { root, .. } | What::Broadcast { root } if root >= size => Err("invalid root"),
        What::Send { peer } | What::Recv { peer } if peer >= size => Err("invalid peer"),
        What::AllReduce { op } | What::Reduce { op, .. } | What::ReduceScatter { op } => {
            match (op, factors.get(&op)) {
                (0..5, _) => Ok(None),
                (_, Some(factor)) => Ok(Some(*factor)),
                _ => Err("invalid operator"),
            }
        }
        _ => Ok(None),
    }
}

/// A rank; one that nobody has where it is negative.
pub(crate) fn rank(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
    op: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    call("ncclAllReduce", comm, Given { from, to, count, kind }, What::AllReduce { op })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
    op: c_int,
    root: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    let what = What::Reduce { op, root: rank(root) };
    call("ncclReduce", comm, Given { from, to, count, kind }, what)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
    root: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    let what = What::Broadcast { root: rank(root) };
    call("ncclBroadcast", comm, Given { from, to, count, kind }, what)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    call("ncclAllGather", comm, Given { from, to, count, kind }, What::AllGather)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    count: usize,
    kind: c_int,
    op: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    call("ncclReduceScatter", comm, Given { from, to, count, kind }, What::ReduceScatter { op })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    from: u64,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    let what = What::Send { peer: rank(peer) };
    call("ncclSend", comm, Given { from, to: 0, count, kind }, what)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    kind: c_int,
    peer: c_int,
    comm: usize,
    _stream: usize,
) -> c_int {
    let what = What::Recv { peer: rank(peer) };
    call("ncclRecv", comm, Given { from: 0, to, count, kind }, what)
}
