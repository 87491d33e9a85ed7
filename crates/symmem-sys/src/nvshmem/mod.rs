//! NVSHMEM, the host library: a heap that all processes of a job allocate from together, and operations on it in streams.
//!
//! Only the host library is used, loaded at run time. Every function that is called is exported by 3.4 and by 3.8 alike
//! (read from their symbol tables); what their headers define inline is not needed. A process is one PE ("processing
//! element") and can be initialised once.
#![allow(unsafe_code)] // S4: what tests ask the fake library

mod calls;
mod raw;

use std::ffi::{c_int, c_long, c_uint};
use std::fmt;
use std::path::Path;

use self::raw::{InitAttr, RawUniqueId};
use crate::table::functions;
use crate::{Library, Loaded, Missing, load, load_file};

/// What a call answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// A call of NVSHMEM that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {why}")]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// The library's status; none where it does not have the function.
    pub status: Option<i32>,
    /// The same in words.
    pub why: String,
}

impl Failure {
    fn missing_symbol(call: &'static str, _symbol: &str) -> Self {
        let why = "this version of NVSHMEM does not have it".to_owned();
        Self { call, status: None, why }
    }
}

/// By which processes find each other: made by one of them, and handed to all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

/// Some PEs, a constant stride apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Team(pub(super) i32);

impl Team {
    /// All of them.
    pub const WORLD: Self = Self(0);
}

/// How far the library is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// `init` was not called.
    NotInitialised,
    /// The processes know each other; nothing else works yet.
    Bootstrapped,
    /// Each PE has a device of its own.
    Initialised,
    /// PEs share a device without a service that lets them run at once: no barrier, no collective.
    SharedInTurns,
    /// PEs share a device and run on it at once.
    Shared,
    /// Something that this version of ours does not know.
    Other(i32),
}

/// What a signal does to its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum SignalOp {
    /// Sets it.
    Set = 9,
    /// Adds to it.
    Add = 10,
}

functions! {
    /// The library's functions, from `nvshmem_host.h`. Addresses are of device memory, so numbers.
    struct Functions, Failure;
    nvshmemx_vendor_get_version_info(major: *mut c_int, minor: *mut c_int, patch: *mut c_int) -> ();
    nvshmemx_init_status() -> c_int;
    nvshmemx_get_uniqueid(id: *mut RawUniqueId);
    nvshmemx_hostlib_init_attr(flags: c_uint, attributes: *mut InitAttr);
    nvshmemx_hostlib_finalize() -> ();
    nvshmem_malloc(bytes: usize) -> u64;
    nvshmem_align(alignment: usize, bytes: usize) -> u64;
    nvshmem_free(address: u64) -> ();
    nvshmem_ptr(address: u64, pe: c_int) -> u64;
    nvshmemx_mc_ptr(team: c_int, address: u64) -> u64;
    nvshmem_team_split_strided(
        parent: c_int, start: c_int, stride: c_int, size: c_int, config: *const u8, mask: c_long,
        team: *mut c_int);
    nvshmem_team_destroy(team: c_int) -> ();
    nvshmem_team_my_pe(team: c_int) -> c_int;
    nvshmem_team_n_pes(team: c_int) -> c_int;
    nvshmem_team_translate_pe(from: c_int, pe: c_int, to: c_int) -> c_int;
    nvshmemx_cumodule_init(module: usize);
    nvshmemx_cumodule_finalize(module: usize);
    nvshmemx_putmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, stream: usize) -> ();
    nvshmemx_getmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, stream: usize) -> ();
    nvshmemx_putmem_signal_on_stream(
        to: u64, from: u64, bytes: usize, signal: u64, value: u64, op: c_int, pe: c_int,
        stream: usize) -> ();
    nvshmemx_signal_op_on_stream(
        signal: u64, value: u64, op: c_int, pe: c_int, stream: usize) -> ();
    nvshmemx_signal_wait_until_on_stream(
        signal: u64, compare: c_int, value: u64, stream: usize) -> ();
    nvshmemx_quiet_on_stream(stream: usize) -> ();
    nvshmemx_barrier_on_stream(team: c_int, stream: usize);
    nvshmemx_team_sync_on_stream(team: c_int, stream: usize);
    nvshmemx_broadcastmem_on_stream(
        team: c_int, to: u64, from: u64, bytes: usize, root: c_int, stream: usize);
    nvshmemx_alltoallmem_on_stream(team: c_int, to: u64, from: u64, bytes: usize, stream: usize);
    nvshmemx_fcollectmem_on_stream(team: c_int, to: u64, from: u64, bytes: usize, stream: usize);
}

impl Functions {
    fn failure(&self, call: &'static str, status: c_int) -> Failure {
        Failure { call, status: Some(status), why: format!("status {status}") }
    }
}

/// NVSHMEM's host library.
#[derive(Debug)]
pub struct Nvshmem {
    /// C's side.
    c: Functions,
}

impl Nvshmem {
    /// The library of this machine, or of `SYMMEM_NVSHMEM`. It is not initialised.
    pub fn open() -> std::result::Result<Self, Missing> {
        load(Library::Nvshmem).map(Self::of)
    }

    /// The library in this file.
    pub fn open_file(file: &Path) -> std::result::Result<Self, Missing> {
        load_file(Library::Nvshmem, file).map(Self::of)
    }

    /// How often the fake library was asked for `function`, and how much this PE has not given back; nothing of the real one.
    #[cfg(feature = "fake")]
    pub fn fake_counts(&self, function: &std::ffi::CStr) -> Option<(i32, i32)> {
        type Calls = unsafe extern "C" fn(*const std::ffi::c_char) -> i32;
        type Live = unsafe extern "C" fn() -> i32;
        // SAFETY: the fake library declares it so.
        let calls = unsafe { self.c.library.function::<Calls>("symmem_fake_nvshmem_calls") }?;
        // SAFETY: likewise.
        let live = unsafe { self.c.library.function::<Live>("symmem_fake_nvshmem_live") }?;
        // SAFETY: a C string.
        let calls = unsafe { calls(function.as_ptr()) };
        // SAFETY: it takes nothing.
        Some((calls, unsafe { live() }))
    }

    fn of(library: Loaded) -> Self {
        Self { c: Functions::new(library) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_not_there_is_a_failure_of_its_call() {
        let nvshmem = Nvshmem::of(Loaded::without_functions());
        let failure = nvshmem.version().unwrap_err();
        assert_eq!(failure.call, "nvshmemx_vendor_get_version_info");
        assert!(failure.to_string().contains("does not have it"), "{failure}");
        assert!(nvshmem.malloc(64).unwrap_err().to_string().starts_with("nvshmem_malloc failed"));
    }

    #[test]
    fn the_machines_library_has_all_functions_or_is_not_there() {
        match Nvshmem::open() {
            Ok(nvshmem) => assert_eq!(nvshmem.missing(), [""; 0]),
            Err(missing) => assert_eq!(missing.library, Library::Nvshmem),
        }
    }
}
