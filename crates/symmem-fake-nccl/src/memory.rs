//! Memory, registrations, windows and signals.
#![allow(unsafe_code)] // pointers of the caller's, as NCCL takes them

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_uint};

use crate::arithmetic;
use crate::calls::rank;
use crate::code::{Code, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};
use crate::driver;
use crate::group::{Job, submit};
use crate::state::{self, State};
use crate::work::{Part, What, fill, read, write};

/// What addresses and sizes of windows are multiples of.
const ALIGNMENT: usize = 4096;

fn answer(done: Result<(), Code>) -> c_int {
    done.err().unwrap_or(SUCCESS)
}

/// The layout of an allocation of `bytes` bytes from the heap.
fn layout(bytes: usize) -> Result<Layout, Code> {
    let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
    Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(address: *mut u64, bytes: usize) -> c_int {
    let mut state = state::lock();
    let made = state.enter("ncclMemAlloc").and_then(|()| {
        let made = match state.allocator {
            // SAFETY: the test vouches for its function.
            Some(allocator) => unsafe { (allocator.allocate)(bytes) },
            None => match (driver::allocate(bytes), layout(bytes)?) {
                (Some(made), _) => made,
                // SAFETY: the layout has a size.
                (None, layout) => unsafe { alloc_zeroed(layout) }.expose_provenance() as u64,
            },
        };
        if made == 0 {
            return Err(state.say(1, "no memory"));
        }
        state.allocations.insert(made, bytes);
        // SAFETY: the caller gives a pointer to write through.
        unsafe { address.write(made) };
        Ok(())
    });
    answer(made)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(address: u64) -> c_int {
    let mut state = state::lock();
    let freed = state.enter("ncclMemFree").and_then(|()| {
        let windows = state.windows.values();
        if windows.into_iter().any(|window| window.parts[window.rank].0 == address) {
            return Err(state.say(INVALID_USAGE, "the memory still has a window"));
        }
        let Some(bytes) = state.allocations.remove(&address) else {
            return Err(state.say(INVALID_ARGUMENT, "that is no memory of this library"));
        };
        match state.allocator {
            // SAFETY: the test vouches for its function.
            Some(allocator) => unsafe { (allocator.free)(address) },
            None if driver::free(address) => {}
            None => {
                let memory = std::ptr::with_exposed_provenance_mut(address as usize);
                let layout = layout(bytes)?;
                // SAFETY: allocated so in `ncclMemAlloc`, and the caller does not use it again.
                unsafe { dealloc(memory, layout) };
            }
        }
        Ok(())
    });
    answer(freed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: usize,
    address: u64,
    bytes: usize,
    handle: *mut usize,
) -> c_int {
    let mut state = state::lock();
    let made = state.enter("ncclCommRegister").and_then(|()| {
        state.ready(comm)?;
        if address == 0 || bytes == 0 {
            return Err(INVALID_ARGUMENT);
        }
        let made = state.fresh();
        state.registrations.insert(made, comm);
        // SAFETY: the caller gives a pointer to write through.
        unsafe { handle.write(made) };
        Ok(())
    });
    answer(made)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: usize, handle: usize) -> c_int {
    let mut state = state::lock();
    let gone = state.enter("ncclCommDeregister").and_then(|()| {
        state.comm(comm)?;
        match state.registrations.remove(&handle) {
            Some(owner) if owner == comm => Ok(()),
            _ => Err(state.say(INVALID_ARGUMENT, "that is no registration of the communicator")),
        }
    });
    answer(gone)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowRegister(
    comm: usize,
    address: u64,
    bytes: usize,
    window: *mut usize,
    _flags: c_int,
) -> c_int {
    let mut state = state::lock();
    let checked = state.enter("ncclCommWindowRegister").and_then(|()| {
        let comm = state.ready(comm)?;
        if address == 0 || bytes == 0 || !(address as usize).is_multiple_of(ALIGNMENT) {
            return Err(state.say(INVALID_ARGUMENT, "no memory, or not at a multiple of 4096"));
        }
        Ok(comm.rank)
    });
    let slot = window.expose_provenance();
    fill(slot, 0);
    match checked {
        Err(code) => code,
        Ok(_) if !state.windows_supported => SUCCESS,
        Ok(rank) => {
            let part = Part::new(comm, rank, What::Window { bytes });
            submit(state, Job::Bring(Part { slot, from: address, count: bytes, ..part }))
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(comm: usize, window: usize) -> c_int {
    let mut state = state::lock();
    let gone = state.enter("ncclCommWindowDeregister").and_then(|()| {
        state.comm(comm)?;
        match state.windows.remove(&window) {
            Some(found) if found.comm == comm => Ok(()),
            _ => Err(state.say(INVALID_ARGUMENT, "that is no window of the communicator")),
        }
    });
    answer(gone)
}

/// Where a window of a rank lies; 0 where it cannot be reached.
fn place(
    call: &str,
    window: usize,
    offset: usize,
    to: *mut u64,
    of: impl FnOnce(&State, usize) -> Result<Option<usize>, Code>,
) -> c_int {
    let mut state = state::lock();
    let found = state.enter(call).and_then(|()| {
        let Some(found) = state.windows.get(&window).cloned() else {
            return Err(state.say(INVALID_ARGUMENT, "that is no live window"));
        };
        let peer = of(&state, found.rank)?;
        let part = peer.map(|peer| found.parts.get(peer).copied().ok_or(INVALID_ARGUMENT));
        let address = part.transpose()?.map_or(0, |(address, _)| address + offset as u64);
        // SAFETY: the caller gives a pointer to write through.
        unsafe { to.write(address) };
        Ok(())
    });
    answer(found)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclWinGetUserPtr(_comm: usize, window: usize, address: *mut u64) -> c_int {
    place("ncclWinGetUserPtr", window, 0, address, |_, own| Ok(Some(own)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDevicePointer(
    window: usize,
    offset: usize,
    peer: c_int,
    address: *mut u64,
) -> c_int {
    let peer = rank(peer);
    place("ncclGetPeerDevicePointer", window, offset, address, |state, own| {
        let far = |peer| state.reach.is_some_and(|reach| peer >= reach);
        let apart = peer != own && (far(peer) || far(own));
        Ok((!apart).then_some(peer))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaDevicePointer(
    window: usize,
    offset: usize,
    peer: c_int,
    address: *mut u64,
) -> c_int {
    let peer = rank(peer);
    place("ncclGetLsaDevicePointer", window, offset, address, |_, _| Ok(Some(peer)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaMultimemDevicePointer(
    window: usize,
    offset: usize,
    address: *mut u64,
) -> c_int {
    // There is no memory that reaches all: the address is the own part's, as a number that is not 0.
    place("ncclGetLsaMultimemDevicePointer", window, offset, address, |state, own| {
        Ok(state.multicast.then_some(own))
    })
}

/// The endpoint of a peer is its number and one; offsets are the window's own.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDeviceLeInfo(
    window: usize,
    offset: usize,
    peer: c_int,
    endpoint: *mut c_uint,
    at: *mut usize,
) -> c_int {
    let number = c_uint::try_from(peer).map_or(0, |peer| peer + 1);
    endpoint_of("ncclGetPeerDeviceLeInfo", window, offset, (endpoint, at), number)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetMultimemDeviceLeInfo(
    window: usize,
    offset: usize,
    endpoint: *mut c_uint,
    at: *mut usize,
) -> c_int {
    endpoint_of("ncclGetMultimemDeviceLeInfo", window, offset, (endpoint, at), c_uint::MAX)
}

fn endpoint_of(
    call: &str,
    window: usize,
    offset: usize,
    (endpoint, at): (*mut c_uint, *mut usize),
    number: c_uint,
) -> c_int {
    let mut address = 0;
    let known = place(call, window, offset, &mut address, |_, own| Ok(Some(own)));
    if known == SUCCESS {
        // SAFETY: the caller gives a pointer to write through.
        unsafe { endpoint.write(number) };
        // SAFETY: likewise.
        unsafe { at.write(offset) };
    }
    known
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclPutSignal(
    from: u64,
    count: usize,
    kind: c_int,
    peer: c_int,
    window: usize,
    offset: usize,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: usize,
    _stream: usize,
) -> c_int {
    let mut state = state::lock();
    let put = state.enter("ncclPutSignal").and_then(|()| {
        let bytes = count * arithmetic::size(kind);
        let found = state.windows.get(&window).filter(|window| window.comm == comm);
        let part = found.and_then(|window| window.parts.get(rank(peer)).copied());
        let Some((address, length)) = part else {
            return Err(
                state.say(INVALID_ARGUMENT, "no window of the communicator, or no such peer")
            );
        };
        if offset + bytes > length || (signal, context, flags) != (0, 0, 0) {
            return Err(state.say(INVALID_ARGUMENT, "beyond the window, or a signal that is not 0"));
        }
        write(address + offset as u64, &read(from, bytes));
        send_signal(&mut state, comm, peer)
    });
    answer(put)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSignal(
    peer: c_int,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: usize,
    _stream: usize,
) -> c_int {
    let mut state = state::lock();
    let sent = state.enter("ncclSignal").and_then(|()| {
        if (signal, context, flags) != (0, 0, 0) {
            return Err(state.say(INVALID_ARGUMENT, "a signal that is not 0"));
        }
        send_signal(&mut state, comm, peer)
    });
    answer(sent)
}

fn send_signal(state: &mut State, comm: usize, peer: c_int) -> Result<(), Code> {
    let comm = state.ready(comm)?;
    let Some(clique) = state.cliques.get_mut(&comm.clique) else { return Err(INVALID_ARGUMENT) };
    if rank(peer) >= clique.size {
        return Err(state.say(INVALID_ARGUMENT, "invalid peer"));
    }
    *clique.signals.entry((comm.rank, rank(peer))).or_default() += 1;
    state.hear(comm.clique);
    state::changed();
    Ok(())
}

/// `ncclWaitSignalDesc_t`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct WaitSignal {
    count: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWaitSignal(
    count: c_int,
    signals: *const WaitSignal,
    comm: usize,
    _stream: usize,
) -> c_int {
    let mut last = SUCCESS;
    // SAFETY: the caller gives so many descriptions.
    let all = unsafe { std::slice::from_raw_parts(signals, usize::try_from(count).unwrap_or(0)) };
    for (at, wanted) in all.iter().enumerate() {
        let mut state = state::lock();
        let ready = state.enter("ncclWaitSignal").and_then(|()| match at {
            0 => state.ready(comm),
            _ => state.comm(comm).cloned(),
        });
        let waiter = match ready {
            Ok(waiter) => waiter,
            Err(code) => return code,
        };
        let size = state.cliques.get(&waiter.clique).map_or(0, |clique| clique.size);
        let WaitSignal { count, peer, signal, context } = *wanted;
        if rank(peer) >= size || (signal, context) != (0, 0) {
            return state.say(INVALID_ARGUMENT, "invalid peer, or a signal that is not 0");
        }
        let what = What::WaitSignal { peer: rank(peer), signals: i64::from(count) };
        last = submit(state, Job::Bring(Part::new(comm, waiter.rank, what)));
    }
    last
}
