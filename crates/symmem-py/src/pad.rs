//! Signals and barriers in the signal pad of a handle's memory.

use std::time::Duration;

use pyo3::prelude::*;
use symmem::cuda::{self, Stream};
use symmem::{Deadline, Result, SignalPad};

use crate::handle::Handle;
use crate::wait::detached;

impl Handle {
    /// Does `on_host`, or puts `on_device` into a stream. The timeout is in milliseconds, as in PyTorch; 0 is the group's.
    pub(crate) fn in_pad(
        &self,
        py: Python<'_>,
        op: &'static str,
        (timeout_ms, stream): (u64, usize),
        on_host: impl FnOnce(SignalPad<'_>, Deadline) -> Result<()> + Send,
        on_device: impl FnOnce(&cuda::Symmetric<u8>, Duration, &Stream) -> Result<()> + Send,
    ) -> PyResult<()> {
        self.check_open(py, op)?;
        let limit = Duration::from_millis(timeout_ms);
        detached(py, || match self.cuda() {
            Some(device) => on_device(device, limit, &self.stream(device, stream)),
            None if limit.is_zero() => {
                on_host(self.raw().signal_pad(), self.raw().group().deadline())
            }
            None => on_host(self.raw().signal_pad(), Deadline::within(limit)),
        })
    }
}

/// The default size of signal pads, in bytes.
#[pyfunction]
pub(crate) fn signal_pad_size() -> usize {
    symmem::internals::signal_pad_size()
}

/// Sets the default size of signal pads, in bytes; 0 restores the built-in default. All ranks must set the same.
#[pyfunction]
pub(crate) fn set_signal_pad_size(py: Python<'_>, bytes: usize) -> PyResult<()> {
    detached(py, || symmem::internals::set_signal_pad_size(bytes))
}
