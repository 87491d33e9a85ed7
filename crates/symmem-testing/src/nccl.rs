//! The shared object that stands in for NCCL: where it is, and what it is told.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library;
use symmem::nccl::Nccl;

/// One test at a time: the library has one state.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The fake library, answering as at the beginning; other tests wait until it is dropped.
pub struct FakeNccl {
    library: Library,
    path: PathBuf,
    _held: MutexGuard<'static, ()>,
}

/// How many things of the library there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Live {
    pub communicators: i32,
    pub windows: i32,
    pub allocations: i32,
    pub registrations: i32,
    pub operators: i32,
}

impl FakeNccl {
    /// The library that was built next to this program.
    #[allow(clippy::new_without_default, reason = "it waits")]
    pub fn new() -> Self {
        let held = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let program = std::env::current_exe().unwrap();
        let path = program.parent().unwrap().join("libsymmem_fake_nccl.so");
        // SAFETY: it has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let fake = Self { library, path, _held: held };
        fake.call::<extern "C" fn()>("fakeNcclReset")();
        fake
    }

    /// Its file, for `SYMMEM_NCCL`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The library, as users have it.
    pub fn nccl(&self) -> Nccl {
        Nccl::open(&self.path).unwrap()
    }

    /// As [`FakeNccl::nccl`], of a version such as 22809.
    pub fn of_version(&self, code: i32) -> Nccl {
        self.call::<extern "C" fn(c_int)>("fakeNcclVersion")(code);
        self.nccl()
    }

    /// Has the next `times` calls of a function answer `code`.
    pub fn fail(&self, call: &str, code: i32, times: i32) {
        type F = extern "C" fn(*const c_char, c_int, c_int);
        let name = CString::new(call).unwrap();
        self.call::<F>("fakeNcclFail")(name.as_ptr(), code, times);
    }

    /// Breaks the communicators of a rank, or of all where it is negative.
    pub fn async_error(&self, rank: i32, code: i32) {
        self.call::<extern "C" fn(c_int, c_int)>("fakeNcclAsyncError")(rank, code);
    }

    /// Whether windows are supported, have an address that reaches all, and how many ranks reach each other by addresses.
    pub fn windows(&self, supported: bool, multicast: bool, reach: Option<usize>) {
        type F = extern "C" fn(c_int, c_int, c_int);
        let reach = reach.map_or(-1, |reach| reach as c_int);
        self.call::<F>("fakeNcclWindows")(supported.into(), multicast.into(), reach);
    }

    /// Has its memory come from these functions.
    pub fn allocator(
        &self,
        allocate: unsafe extern "C" fn(usize) -> u64,
        free: unsafe extern "C" fn(u64),
    ) {
        type Allocate = Option<unsafe extern "C" fn(usize) -> u64>;
        type F = extern "C" fn(Allocate, Option<unsafe extern "C" fn(u64)>);
        self.call::<F>("fakeNcclAllocator")(Some(allocate), Some(free));
    }

    /// How often a function was called.
    pub fn calls(&self, call: &str) -> i32 {
        let name = CString::new(call).unwrap();
        self.call::<extern "C" fn(*const c_char) -> c_int>("fakeNcclCalls")(name.as_ptr())
    }

    /// What there is of it now.
    pub fn live(&self) -> Live {
        let count = self.call::<extern "C" fn(c_int) -> c_int>("fakeNcclLive");
        Live {
            communicators: count(0),
            windows: count(1),
            allocations: count(2),
            registrations: count(3),
            operators: count(4),
        }
    }

    fn call<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the types stand in `symmem-fake-nccl`, in `script.rs`.
        *unsafe { self.library.get::<F>(name) }.unwrap()
    }
}
