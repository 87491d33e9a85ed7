//! Waiting for a device in destructors, which run with or without the GIL.
#![allow(unsafe_code)] // S4: a function of the interpreter's that its stable interface does not name

use std::ffi::c_int;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::os::unix::Library;
use pyo3::prelude::*;

/// Runs `f` with the GIL released, if this thread holds it.
pub(crate) fn unlocked(f: impl FnOnce() + Send) {
    if !is_locked() {
        return f();
    }
    let waiting = Mutex::new(Some(f));
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
    let done = Python::try_attach(|py| py.detach(|| take().map(|f| f()))).flatten();
    // While the interpreter shuts down, no other thread needs the GIL.
    if done.is_none()
        && let Some(f) = take()
    {
        f();
    }
}

/// Whether this thread holds the GIL; false if that is unknown.
fn is_locked() -> bool {
    type Check = unsafe extern "C" fn() -> c_int;
    static CHECK: OnceLock<Option<Check>> = OnceLock::new();
    let check = CHECK.get_or_init(|| {
        // SAFETY: the interpreter's own function since 3.4, of this type.
        unsafe { Library::this().get::<Check>(b"PyGILState_Check\0") }.ok().map(|found| *found)
    });
    // SAFETY: it looks at this thread's own state, and may be called at any time.
    check.is_some_and(|check| unsafe { check() } == 1)
}
