//! What a test tells the fake, and asks of it: functions of C, so that Python's `ctypes` can call them too.
#![allow(unsafe_code)] // texts and functions of the caller's

use std::ffi::{CStr, c_char, c_int};

use crate::state::{self, Allocator};

/// Answers as at the beginning. What is live stays so.
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclReset() {
    state::lock().reset();
}

/// The version to claim, such as 22809.
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclVersion(code: c_int) {
    state::lock().version = code;
}

/// Has the next `times` calls of a function answer `code`, without doing anything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakeNcclFail(call: *const c_char, code: c_int, times: c_int) {
    // SAFETY: the caller gives a text that ends with a zero.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy().into_owned();
    state::lock().failures.insert(call, (code, usize::try_from(times).unwrap_or(0)));
}

/// Breaks the communicators of a rank, or all where it is negative: `code` is what they answer from here on.
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclAsyncError(rank: c_int, code: c_int) {
    let mut state = state::lock();
    let broken = |of: usize| usize::try_from(rank).is_err() || usize::try_from(rank) == Ok(of);
    for comm in state.comms.values_mut().filter(|comm| broken(comm.rank)) {
        comm.error = code;
    }
    state::changed();
}

/// How many there are: 0 communicators, 1 windows, 2 allocations, 3 registrations, 4 operators.
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclLive(what: c_int) -> c_int {
    let state = state::lock();
    let count = match what {
        0 => state.comms.len(),
        1 => state.windows.len(),
        2 => state.allocations.len(),
        3 => state.registrations.len(),
        4 => state.comms.values().map(|comm| comm.factors.len()).sum(),
        _ => return -1,
    };
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// How often a function was called since the beginning or the last [`fakeNcclReset`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakeNcclCalls(call: *const c_char) -> c_int {
    // SAFETY: the caller gives a text that ends with a zero.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy().into_owned();
    let count = state::lock().counts.get(&call).copied().unwrap_or(0);
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// Whether windows exist, whether they have an address that reaches all, and how many ranks loads and stores reach (all
/// where negative).
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclWindows(supported: c_int, multicast: c_int, reach: c_int) {
    let mut state = state::lock();
    state.windows_supported = supported != 0;
    state.multicast = multicast != 0;
    state.reach = usize::try_from(reach).ok();
}

/// Where memory comes from instead of the heap, such as a fake driver.
#[unsafe(no_mangle)]
pub extern "C" fn fakeNcclAllocator(
    allocate: Option<unsafe extern "C" fn(usize) -> u64>,
    free: Option<unsafe extern "C" fn(u64)>,
) {
    let allocator = allocate.zip(free);
    state::lock().allocator = allocator.map(|(allocate, free)| Allocator { allocate, free });
}
