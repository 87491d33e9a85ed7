//! Releasing the GIL while the library works or waits, and handling Ctrl-C.

use std::cell::RefCell;

use pyo3::prelude::*;

use crate::error::exception;

thread_local! {
    /// The exception that a signal handler raised during a wait of this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs `f` with the GIL released. A signal whose handler raises, such as Ctrl-C, interrupts its waits: the caller gets the
/// handler's exception, and the state afterwards is as after a timeout.
pub(crate) fn detached<R: Send>(
    py: Python<'_>,
    f: impl FnOnce() -> symmem::Result<R> + Send,
) -> PyResult<R> {
    let result = py.detach(|| symmem::interruptible(signalled, f));
    match raised() {
        Some(raised) => Err(raised),
        None => result.map_err(|e| exception(py, e)),
    }
}

/// Takes the exception that a signal handler raised while this thread waited, if one did.
pub(crate) fn raised() -> Option<PyErr> {
    RAISED.take()
}

/// Runs pending signal handlers, and returns whether one raised. Only Python's main thread runs them.
pub(crate) fn signalled() -> bool {
    // An interpreter that is shutting down cannot be entered; stop waiting.
    let Some(checked) = Python::try_attach(|py| py.check_signals()) else { return true };
    checked.is_err_and(|raised| {
        RAISED.set(Some(raised));
        true
    })
}
