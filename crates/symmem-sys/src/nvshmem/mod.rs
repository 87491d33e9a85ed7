//! NVSHMEM, the host library: a heap that all processes of a job allocate from together, and operations on it in streams.
//!
//! Only the host library is used, loaded at run time. Every function that is called is exported by 3.4 and by 3.8 alike
//! (read from their symbol tables); what their headers define inline is not needed. A process is one PE ("processing
//! element") and can be initialised once.
#![allow(unsafe_code)] // S4: what tests ask the fake library

mod calls;
mod raw;

use std::fmt;
use std::path::Path;

use self::raw::Functions;
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
    fn status(call: &'static str, status: i32) -> Self {
        Self { call, status: Some(status), why: format!("status {status}") }
    }

    fn missing_symbol(call: &'static str) -> Self {
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

/// What a wait for a word waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Compare {
    /// That value.
    Equal = 0,
    /// Another value.
    NotEqual = 1,
    /// More.
    Greater = 2,
    /// That or less.
    LessOrEqual = 3,
    /// Less.
    Less = 4,
    /// That or more.
    GreaterOrEqual = 5,
}

/// NVSHMEM's host library.
pub struct Nvshmem {
    /// C's side.
    c: Functions,
    library: Loaded,
}

impl fmt::Debug for Nvshmem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Nvshmem").field(&self.library).finish()
    }
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
        let calls = unsafe { self.library.function::<Calls>("symmem_fake_nvshmem_calls") }?;
        // SAFETY: likewise.
        let live = unsafe { self.library.function::<Live>("symmem_fake_nvshmem_live") }?;
        // SAFETY: a C string.
        let calls = unsafe { calls(function.as_ptr()) };
        // SAFETY: it takes nothing.
        Some((calls, unsafe { live() }))
    }

    fn of(library: Loaded) -> Self {
        Self { c: Functions::new(&library), library }
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
