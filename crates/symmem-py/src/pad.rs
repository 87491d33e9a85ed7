//! Signals and barriers in the signal pad of a handle's memory.

use std::time::Duration;

use pyo3::prelude::*;
use symmem::Deadline;

use crate::handle::Handle;
use crate::wait::detached;

/// A timeout as in PyTorch; 0 is the group's.
fn milliseconds(timeout_ms: u64) -> Duration {
    Duration::from_millis(timeout_ms)
}

impl Handle {
    /// The deadline of a call: the caller's in milliseconds, or for 0 the group's.
    fn limit(&self, timeout_ms: u64) -> Deadline {
        match timeout_ms {
            0 => self.raw().group().deadline(),
            given => Deadline::within(milliseconds(given)),
        }
    }

    pub(crate) fn do_put_signal(
        &self,
        py: Python<'_>,
        (to, channel): (usize, usize),
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.check_open(py, "put_signal")?;
        detached(py, || match self.cuda() {
            None => self.raw().signal_pad().put(to, channel, self.limit(timeout_ms)),
            Some(device) => device.put_signal_within(
                to,
                channel,
                milliseconds(timeout_ms),
                &self.stream(device, stream),
            ),
        })
    }

    pub(crate) fn do_wait_signal(
        &self,
        py: Python<'_>,
        (from, channel): (usize, usize),
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.check_open(py, "wait_signal")?;
        detached(py, || match self.cuda() {
            None => self.raw().signal_pad().wait(from, channel, self.limit(timeout_ms)),
            Some(device) => device.wait_signal_within(
                from,
                channel,
                milliseconds(timeout_ms),
                &self.stream(device, stream),
            ),
        })
    }

    pub(crate) fn do_barrier(
        &self,
        py: Python<'_>,
        channel: usize,
        timeout_ms: u64,
        stream: usize,
    ) -> PyResult<()> {
        self.check_open(py, "barrier")?;
        detached(py, || match self.cuda() {
            None => self.raw().signal_pad().barrier(channel, self.limit(timeout_ms)),
            Some(device) => device.barrier_on_channel_within(
                channel,
                milliseconds(timeout_ms),
                &self.stream(device, stream),
            ),
        })
    }
}
