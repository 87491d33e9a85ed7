//! Leaving Python while the library works or waits, and coming back for Ctrl-C.

use std::cell::RefCell;

use pyo3::prelude::*;

use crate::error::exception;

thread_local! {
    /// What a signal's handler raised during a wait of this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs `f` without the interpreter's lock. A signal whose handler raises, as Ctrl-C does, ends its waits.
///
/// The library then sees a wait that ended at its deadline, with all that holds after that; the caller gets what the
/// handler raised.
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

/// What a signal's handler raised while this thread waited, if one did; once.
pub(crate) fn raised() -> Option<PyErr> {
    RAISED.take()
}

/// Runs the handlers of signals that came; whether one raised. Only Python's main thread has any.
pub(crate) fn signalled() -> bool {
    // An interpreter that is going away cannot be entered any more, and nothing shall wait for it.
    let Some(checked) = Python::try_attach(|py| py.check_signals()) else { return true };
    checked.is_err_and(|raised| {
        RAISED.set(Some(raised));
        true
    })
}
