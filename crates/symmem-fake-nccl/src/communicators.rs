//! Making, asking and closing communicators.
#![allow(unsafe_code)] // pointers of the caller's, as NCCL takes them

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::code::{Code, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};
use crate::driver;
use crate::group::{Job, submit};
use crate::state::{self, Comm, State};
use crate::work::{Part, What, fill};

/// What an id begins with.
const MAGIC: [u8; 8] = *b"fakeNCCL";

#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

/// As much of `ncclConfig_t` as is looked at.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// Returns the code of what went wrong, or success.
fn answer(done: Result<(), Code>) -> c_int {
    done.err().unwrap_or(SUCCESS)
}

/// Writes through a pointer of the caller's.
fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller gives a pointer to write through, or none.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let mut state = state::lock();
    answer(state.enter("ncclGetVersion").and_then(|()| put(version, state.version)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let words = match code {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    words.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: usize) -> *const c_char {
    state::lock().said.unwrap_or(c"").as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    let mut state = state::lock();
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&(state.fresh() as u64).to_ne_bytes());
    answer(state.enter("ncclGetUniqueId").and_then(|()| put(id, UniqueId(bytes))))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(
    comm: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    init("ncclCommInitRank", comm, ranks, &id, rank, Ok(true))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    comm: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    init("ncclCommInitRankConfig", comm, ranks, &id, rank, blocks(config, true))
}

/// What a configuration says of blocking; `inherited` where there is none, or where it does not say.
fn blocks(config: *const Config, inherited: bool) -> Result<bool, Code> {
    if config.is_null() {
        return Ok(inherited);
    }
    // SAFETY: the caller gives a configuration or none.
    let config = unsafe { config.read() };
    let version = state::lock().version;
    let known = u32::try_from(version).unwrap_or(0);
    let least = if config.version >= 22700 { 72 } else { 48 };
    if config.magic != 0xcafe_beef || config.version > known || config.size < least {
        return Err(INVALID_ARGUMENT);
    }
    Ok(if config.blocking == c_int::MIN { inherited } else { config.blocking != 0 })
}

fn init(
    call: &str,
    slot: *mut usize,
    ranks: c_int,
    id: &UniqueId,
    rank: c_int,
    blocking: Result<bool, Code>,
) -> c_int {
    let mut state = state::lock();
    let made = state.enter(call).and(blocking).and_then(|blocking| {
        if id.0[..8] != MAGIC {
            return Err(state.say(INVALID_ARGUMENT, "that is no id of this library"));
        }
        let mut number = [0; 8];
        number.copy_from_slice(&id.0[8..16]);
        let device = driver::current().unwrap_or(rank);
        join(&mut state, u64::from_ne_bytes(number), (ranks, rank), blocking, device)
    });
    match made {
        Ok(handle) => {
            fill(slot.expose_provenance(), handle);
            submit(state, Job::Arrive(handle))
        }
        Err(code) => code,
    }
}

/// A member of a clique, who is not there yet for the others.
fn join(
    state: &mut State,
    id: u64,
    (ranks, rank): (c_int, c_int),
    blocking: bool,
    device: c_int,
) -> Result<usize, Code> {
    let (Ok(size), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return Err(state.say(INVALID_ARGUMENT, "negative"));
    };
    if rank >= size {
        return Err(state.say(INVALID_ARGUMENT, "invalid rank requested"));
    }
    let clique = state.cliques.entry(id).or_default();
    let taken = clique.members.contains_key(&rank);
    if taken || (clique.size != 0 && clique.size != size) {
        return Err(state.say(INVALID_USAGE, "the rank is taken, or the sizes differ"));
    }
    clique.size = size;
    let handle = state.fresh();
    let comm = Comm { clique: id, rank, device, blocking, pending: 1, ..Comm::default() };
    state.comms.insert(handle, comm);
    Ok(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(
    comms: *mut usize,
    count: c_int,
    devices: *const c_int,
) -> c_int {
    let mut state = state::lock();
    let count = usize::try_from(count).unwrap_or(0);
    let numbers: Vec<c_int> = match devices.is_null() {
        true => (0..).take(count).collect(),
        // SAFETY: the caller gives so many numbers.
        false => unsafe { std::slice::from_raw_parts(devices, count) }.to_vec(),
    };
    let made = state.enter("ncclCommInitAll").and_then(|()| {
        if (1..count).any(|at| numbers[..at].contains(&numbers[at])) {
            return Err(state.say(INVALID_USAGE, "Duplicate GPU detected"));
        }
        let id = state.fresh() as u64;
        let ranks = count as c_int;
        let all = numbers
            .iter()
            .zip(0..)
            .map(|(device, rank)| join(&mut state, id, (ranks, rank), true, *device));
        all.collect::<Result<Vec<usize>, Code>>()
    });
    let made = match made {
        Ok(made) => made,
        Err(code) => return code,
    };
    // SAFETY: the caller gives room for so many handles.
    unsafe { std::slice::from_raw_parts_mut(comms, count) }.copy_from_slice(&made);
    for (at, handle) in made.iter().enumerate() {
        let Some(clique) = state.comms.get_mut(handle).map(|comm| {
            comm.pending = 0;
            comm.clique
        }) else {
            continue;
        };
        if let Some(clique) = state.cliques.get_mut(&clique) {
            clique.members.insert(at, *handle);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: usize) -> c_int {
    let mut state = state::lock();
    let done = state.enter("ncclCommFinalize").and_then(|()| state.ready(comm).map(|_| ()));
    if done.is_ok()
        && let Ok(comm) = state.comm(comm)
    {
        comm.finalized = true;
    }
    answer(done)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: usize) -> c_int {
    let mut state = state::lock();
    let done = state.enter("ncclCommDestroy").and_then(|()| {
        if state.comm(comm)?.pending > 0 {
            return Err(state.say(INVALID_USAGE, "destroyed while a call goes on"));
        }
        state.forget(comm)
    });
    answer(done)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: usize) -> c_int {
    let mut state = state::lock();
    let done = state.enter("ncclCommAbort").and_then(|()| state.forget(comm));
    state::changed();
    answer(done)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    comm: usize,
    color: c_int,
    key: c_int,
    new: *mut usize,
    config: *const Config,
) -> c_int {
    let parent = match entered("ncclCommSplit", comm) {
        Ok(parent) => parent,
        Err(code) => return code,
    };
    let blocking = match blocks(config, parent.blocking) {
        Ok(blocking) => blocking,
        Err(code) => return code,
    };
    fill(new.expose_provenance(), 0);
    let slot = new.expose_provenance();
    let part = Part::new(comm, parent.rank, What::Split);
    submit(state::lock(), Job::Bring(Part { slot, color, key, blocking, ..part }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: usize,
    excluded: *const c_int,
    count: c_int,
    new: *mut usize,
    config: *const Config,
    flags: c_int,
) -> c_int {
    if flags & 1 != 0
        && let Ok(comm) = state::lock().comm(comm)
    {
        (comm.error, comm.pending) = (SUCCESS, 0); // it ends what goes on
    }
    let parent = match entered("ncclCommShrink", comm) {
        Ok(parent) => parent,
        Err(code) => return code,
    };
    let blocking = match blocks(config, parent.blocking) {
        Ok(blocking) => blocking,
        Err(code) => return code,
    };
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller gives so many numbers.
    let listed = unsafe { std::slice::from_raw_parts(excluded, count) };
    let ranks: Vec<usize> = listed.iter().filter_map(|rank| usize::try_from(*rank).ok()).collect();
    if ranks.is_empty() || ranks.contains(&parent.rank) {
        return state::lock().say(INVALID_ARGUMENT, "nobody is left out, or the caller is");
    }
    let slot = new.expose_provenance();
    let part = Part::new(comm, parent.rank, What::Shrink);
    submit(state::lock(), Job::Bring(Part { slot, blocking, excluded: ranks, ..part }))
}

/// The communicator of a call that the script lets be.
fn entered(call: &str, comm: usize) -> Result<Comm, Code> {
    let mut state = state::lock();
    state.enter(call)?;
    state.ready(comm)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: usize, error: *mut c_int) -> c_int {
    let mut state = state::lock();
    let asked = state.enter("ncclCommGetAsyncError").and_then(|()| {
        let comm = state.comm(comm)?;
        let going_on = comm.pending > 0 && !comm.blocking;
        Ok(if comm.error == SUCCESS && going_on { IN_PROGRESS } else { comm.error })
    });
    answer(asked.and_then(|code| put(error, code)))
}

/// A number of a communicator.
fn ask(call: &str, comm: usize, to: *mut c_int, number: impl Fn(&State, &Comm) -> usize) -> c_int {
    let mut state = state::lock();
    let asked = state.enter(call).and_then(|()| {
        let comm = state.comm(comm)?.clone();
        put(to, c_int::try_from(number(&state, &comm)).unwrap_or(c_int::MAX))
    });
    answer(asked)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: usize, count: *mut c_int) -> c_int {
    ask("ncclCommCount", comm, count, |state, comm| {
        state.cliques.get(&comm.clique).map_or(0, |clique| clique.size)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: usize, rank: *mut c_int) -> c_int {
    ask("ncclCommUserRank", comm, rank, |_, comm| comm.rank)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: usize, device: *mut c_int) -> c_int {
    ask("ncclCommCuDevice", comm, device, |_, comm| usize::try_from(comm.device).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *const c_void,
    kind: c_int,
    _residence: c_int,
    comm: usize,
) -> c_int {
    let mut state = state::lock();
    let made = state.enter("ncclRedOpCreatePreMulSum").and_then(|()| {
        let factor = match kind {
            // SAFETY: the caller gives one element of this type.
            7 => f64::from(unsafe { scalar.cast::<f32>().read_unaligned() }),
            // SAFETY: likewise.
            8 => unsafe { scalar.cast::<f64>().read_unaligned() },
            // SAFETY: likewise.
            2 => f64::from(unsafe { scalar.cast::<i32>().read_unaligned() }),
            _ => return Err(INVALID_ARGUMENT),
        };
        let factors = &mut state.comm(comm)?.factors;
        let number = factors.last_key_value().map_or(5, |(last, _)| last + 1);
        factors.insert(number, factor);
        put(op, number)
    });
    answer(made)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(op: c_int, comm: usize) -> c_int {
    let mut state = state::lock();
    let gone = state
        .enter("ncclRedOpDestroy")
        .and_then(|()| state.comm(comm)?.factors.remove(&op).map(|_| ()).ok_or(INVALID_ARGUMENT));
    answer(gone)
}
