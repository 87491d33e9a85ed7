//! NVSHMEM's host library in plain Rust, for tests on machines without a GPU: what the real one exports and symmem calls.
//!
//! - A process is one PE. The heaps of all of them lie in one file in memory, which each maps at the same addresses, from
//!   [`BASE`] on: "device" addresses are those of the process, as in the fake driver, which has to adopt them.
//! - What is put into a stream is done at once. Waits really wait, for at most [`PATIENCE`].
//! - New memory is not zeroed: it holds [`RUBBISH`].
//! - It is strict: what the real library leaves undefined ends the process with a message.
//!
//! | variable | says |
//! |---|---|
//! | `NVSHMEM_SYMMETRIC_SIZE` | bytes of a heap; default 16 MiB, at most 64 |
//! | `SYMMEM_FAKE_NVSHMEM_UNREACHABLE` | PEs that only the network connects with the others: `1,3` |
//! | `SYMMEM_FAKE_NVSHMEM_MULTICAST` | there are multicast addresses |
//! | `SYMMEM_FAKE_NVSHMEM_STATUS` | what `nvshmemx_init_status` says after initialisation; default 2 |
//! | `SYMMEM_FAKE_NVSHMEM_FAIL` | the n-th call of a function that fails: `nvshmem_malloc:2` |
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "only tests use this crate"
)]
#![allow(clippy::missing_safety_doc, reason = "the functions are those of NVSHMEM's documentation")]
#![allow(unsafe_code)] // S4, S5: it is the other side of the table

mod calls;
mod shared;
mod streams;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use calls::*;
use shared::Job;
pub use shared::{BASE, HEAP, PES};
pub use streams::*;

/// How long a wait waits.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// What new memory holds.
pub const RUBBISH: u8 = 0xa5;

static JOB: Mutex<Option<Arc<Job>>> = Mutex::new(None);
static CALLS: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);

/// The job, which `call` needs.
fn job(call: &str) -> Arc<Job> {
    let job = JOB.lock().unwrap_or_else(PoisonError::into_inner).clone();
    job.unwrap_or_else(|| panic!("{call} before nvshmemx_hostlib_init_attr"))
}

/// Counts a call; whether it is one that should fail.
fn fails(call: &str) -> bool {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.get_or_insert_default().entry(call.to_owned()).or_default();
    *count += 1;
    let planned = std::env::var("SYMMEM_FAKE_NVSHMEM_FAIL").unwrap_or_default();
    planned.split(',').any(|plan| {
        plan.split_once(':').is_some_and(|(name, nth)| name == call && nth.parse() == Ok(*count))
    })
}

/// How often a function was called: for tests.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmem_fake_nvshmem_calls(name: *const c_char) -> c_int {
    // SAFETY: as the caller promises.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.as_ref().and_then(|calls| calls.get(name)).map_or(0, |&count| count as c_int)
}

/// How many allocations and teams of this PE were not given back: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn symmem_fake_nvshmem_live() -> c_int {
    let job = JOB.lock().unwrap_or_else(PoisonError::into_inner).clone();
    job.map_or(0, |job| job.live() as c_int)
}
