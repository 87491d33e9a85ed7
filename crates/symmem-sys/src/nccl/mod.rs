//! NCCL, NVIDIA's collectives, from 2.19 on: communicators, collectives, registered memory, windows and signals.
//!
//! The functions are the library's own, with its rules: a communicator belongs to the device whose context is current when
//! it is made, and what goes wrong later is asked for by [`Nccl::async_error`]. A function that the loaded version lacks is a
//! [`Failure`] that says which version has it. `symmem-fake-nccl` stands in for the library where there is no device.
#![allow(unsafe_code)] // S4

mod begun;
mod collectives;
mod communicators;
mod failure;
mod types;
mod windows;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use begun::Begun;
pub use collectives::Span;
pub use failure::Failure;
pub use types::*;

use self::types::RawConfig;
use crate::table::{functions, written};
use crate::{Library, Loaded, Missing};

/// What a call answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// The oldest version that is used: the first that gives and registers memory.
pub const OLDEST: Version = Version::new(2, 19, 0);
/// The first with element types of 8-bit floats.
pub const FLOAT8: Version = Version::new(2, 24, 0);
/// The first with windows, and with communicators that shrink.
pub const WINDOWS: Version = Version::new(2, 27, 0);
/// The first with access to windows by kernels.
pub const DEVICE_ACCESS: Version = Version::new(2, 28, 0);
/// The first with signals, and with addresses of peers for the host.
pub const SIGNALS: Version = Version::new(2, 29, 0);
/// The first that tells the host the endpoints of windows.
pub const ENDPOINTS: Version = Version::new(2, 31, 2);

functions! {
    /// The library's functions, from `nccl.h`. Handles are pointers, here as wide integers, and so are addresses of devices.
    struct Functions, Failure;
    ncclGetVersion(version: *mut c_int);
    ncclGetUniqueId(id: *mut UniqueId);
    ncclCommInitRank(comm: *mut usize, ranks: c_int, id: UniqueId, rank: c_int);
    ncclCommInitRankConfig(
        comm: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, config: *mut RawConfig);
    ncclCommInitAll(comms: *mut usize, count: c_int, devices: *const c_int);
    ncclCommFinalize(comm: usize);
    ncclCommDestroy(comm: usize);
    ncclCommAbort(comm: usize);
    ncclCommSplit(comm: usize, color: c_int, key: c_int, new: *mut usize, config: *mut RawConfig);
    ncclCommShrink(
        comm: usize, excluded: *mut c_int, count: c_int, new: *mut usize, config: *mut RawConfig,
        flags: c_int);
    ncclCommGetAsyncError(comm: usize, error: *mut c_int);
    ncclCommCount(comm: usize, count: *mut c_int);
    ncclCommCuDevice(comm: usize, device: *mut c_int);
    ncclCommUserRank(comm: usize, rank: *mut c_int);
    ncclRedOpCreatePreMulSum(
        op: *mut c_int, scalar: *const c_void, kind: c_int, residence: c_int, comm: usize);
    ncclRedOpDestroy(op: c_int, comm: usize);
    ncclGroupStart();
    ncclGroupEnd();
    ncclAllReduce(
        from: u64, to: u64, count: usize, kind: c_int, op: c_int, comm: usize, stream: usize);
    ncclReduce(
        from: u64, to: u64, count: usize, kind: c_int, op: c_int, root: c_int, comm: usize,
        stream: usize);
    ncclBroadcast(
        from: u64, to: u64, count: usize, kind: c_int, root: c_int, comm: usize, stream: usize);
    ncclAllGather(from: u64, to: u64, count: usize, kind: c_int, comm: usize, stream: usize);
    ncclReduceScatter(
        from: u64, to: u64, count: usize, kind: c_int, op: c_int, comm: usize, stream: usize);
    ncclSend(from: u64, count: usize, kind: c_int, peer: c_int, comm: usize, stream: usize);
    ncclRecv(to: u64, count: usize, kind: c_int, peer: c_int, comm: usize, stream: usize);
    ncclMemAlloc(address: *mut u64, bytes: usize);
    ncclMemFree(address: u64);
    ncclCommRegister(comm: usize, address: u64, bytes: usize, handle: *mut usize);
    ncclCommDeregister(comm: usize, handle: usize);
    ncclCommWindowRegister(
        comm: usize, address: u64, bytes: usize, window: *mut usize, flags: c_int);
    ncclCommWindowDeregister(comm: usize, window: usize);
    ncclWinGetUserPtr(comm: usize, window: usize, address: *mut u64);
    ncclGetPeerDevicePointer(window: usize, offset: usize, peer: c_int, address: *mut u64);
    ncclGetLsaDevicePointer(window: usize, offset: usize, rank: c_int, address: *mut u64);
    ncclGetLsaMultimemDevicePointer(window: usize, offset: usize, address: *mut u64);
    ncclGetPeerDeviceLeInfo(
        window: usize, offset: usize, peer: c_int, endpoint: *mut c_uint, at: *mut usize);
    ncclGetMultimemDeviceLeInfo(
        window: usize, offset: usize, endpoint: *mut c_uint, at: *mut usize);
    ncclPutSignal(
        from: u64, count: usize, kind: c_int, peer: c_int, window: usize, offset: usize,
        signal: c_int, context: c_int, flags: c_uint, comm: usize, stream: usize);
    ncclSignal(
        peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: usize, stream: usize);
    ncclWaitSignal(count: c_int, signals: *mut WaitSignal, comm: usize, stream: usize);
}

impl Functions {
    /// A code in the library's own words. That a call goes on needs none.
    fn failure(&self, call: &'static str, code: c_int) -> Failure {
        if code == Failure::IN_PROGRESS {
            return Failure::new(call, code, failure::words(code));
        }
        Failure { call, code, text: self.error_string(code), last: self.last_error() }
    }

    fn error_string(&self, code: c_int) -> String {
        // SAFETY: of this type.
        let function = unsafe { self.library.function::<ErrorString>("ncclGetErrorString") };
        // SAFETY: it takes any number.
        let words = function.and_then(|function| text(unsafe { function(code) }));
        words.unwrap_or_else(|| failure::words(code).to_owned())
    }

    fn last_error(&self) -> String {
        // SAFETY: of this type.
        let function = unsafe { self.library.function::<LastError>("ncclGetLastError") };
        // SAFETY: it does not look at the communicator, which may be none.
        let words = function.and_then(|function| text(unsafe { function(0) }));
        words.unwrap_or_default().trim().to_owned()
    }
}

/// `const char *ncclGetErrorString(ncclResult_t)`
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
/// `const char *ncclGetLastError(ncclComm_t)`
type LastError = unsafe extern "C" fn(usize) -> *const c_char;

/// NCCL. Its functions are grouped as in `nccl.h`.
pub struct Nccl {
    /// C's side.
    c: Functions,
    version: Version,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The library of this machine; looked for once in a process.
pub fn load() -> std::result::Result<Arc<Nccl>, Missing> {
    static LOADED: OnceLock<std::result::Result<Arc<Nccl>, Missing>> = OnceLock::new();
    LOADED.get_or_init(|| Nccl::new(crate::load(Library::Nccl)?).map(Arc::new)).clone()
}

impl Nccl {
    /// The library in this file.
    pub fn open(file: &Path) -> std::result::Result<Self, Missing> {
        Self::new(crate::load_file(Library::Nccl, file)?)
    }

    fn new(library: Loaded) -> std::result::Result<Self, Missing> {
        let missing = |why| Library::Nccl.missing(why);
        let c = Functions::new(library);
        // SAFETY: it only writes the number, and may be called at any time.
        let code = written(|code| unsafe { c.ncclGetVersion(code) });
        let version = Version::from_code(code.map_err(|failure| missing(failure.to_string()))?);
        if version < OLDEST {
            return Err(missing(format!("{version} is loaded, but {OLDEST} or later is needed")));
        }
        Ok(Self { c, version })
    }

    /// `ncclGetVersion`
    pub fn version(&self) -> Version {
        self.version
    }

    /// The library's file.
    pub fn path(&self) -> Option<PathBuf> {
        self.c.library.path()
    }

    /// Whether it is of this version or later.
    pub fn has(&self, version: Version) -> bool {
        self.version >= version
    }

    /// Refuses a function of a later version.
    fn needs(&self, call: &'static str, version: Version) -> Result<()> {
        if self.has(version) {
            return Ok(());
        }
        let Version { major, minor, patch } = version;
        let patch = if patch == 0 { String::new() } else { format!(".{patch}") };
        let text = format!("{call} needs NCCL {major}.{minor}{patch}, {} is loaded", self.version);
        Err(Failure::new(call, Failure::MISSING, text))
    }
}

/// A text of the library, which it keeps.
fn text(words: *const c_char) -> Option<String> {
    if words.is_null() {
        return None;
    }
    // SAFETY: the library's texts end with a zero and stay; what it said last it may overwrite, but never beyond its end.
    Some(unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
}

/// A number for C.
fn int(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_is_told_so() {
        match load() {
            Ok(nccl) => assert!(nccl.version() >= OLDEST),
            Err(missing) => {
                assert!(missing.to_string().contains("NCCL could not be loaded"), "{missing}");
            }
        }
    }

    #[test]
    fn a_library_that_is_something_else_is_missing() {
        let missing = Nccl::new(Loaded::without_functions()).unwrap_err();
        assert!(missing.why.contains("this NCCL has no ncclGetVersion"), "{missing}");
    }

    #[test]
    fn a_function_of_a_later_version_says_which() {
        let c = Functions::new(Loaded::without_functions());
        let nccl = Nccl { c, version: Version::new(2, 21, 5) };
        let failure = nccl.mem_window_gate().unwrap_err();
        let expected = "ncclCommWindowRegister needs NCCL 2.27, 2.21.5 is loaded";
        assert_eq!(failure.to_string(), expected);
        assert!(failure.is_unsupported());
        let failure = nccl.unique_id().unwrap_err();
        assert_eq!(failure.to_string(), "this NCCL has no ncclGetUniqueId");
    }

    impl Nccl {
        fn mem_window_gate(&self) -> Result<()> {
            // SAFETY: this version refuses before anything is called.
            let comm = unsafe { Comm::from_raw(1) };
            // SAFETY: likewise.
            unsafe { self.window_register(comm, 0, 0, WindowFlags::Default) }.map(|_| ())
        }
    }
}
