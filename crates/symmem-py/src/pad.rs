//! Signals and barriers in the pad of a handle's memory: words that no other memory has.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use symmem::{Deadline, Error, SignalPad};

use crate::handle::Handle;
use crate::wait::detached;

/// Barriers on the host that ended before all had come, by channel: the next one there goes on with it.
#[derive(Default)]
pub(crate) struct Unfinished(Mutex<BTreeMap<usize, Progress>>);

/// Whom a barrier has signalled, and whose signals it has taken.
struct Progress {
    put: Vec<bool>,
    taken: Vec<bool>,
}

impl Unfinished {
    fn take(&self, channel: usize, ranks: usize) -> Progress {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Progress { put: vec![false; ranks], taken: vec![false; ranks] };
        all.remove(&channel).unwrap_or_else(new)
    }

    fn keep(&self, channel: usize, progress: Progress) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(channel, progress);
    }
}

impl Progress {
    /// Signals to all and takes all signals, as PyTorch's kernel does, from where it was. Of those who do not come, all are
    /// named.
    fn go_on(&mut self, pad: &SignalPad<'_>, channel: usize, deadline: Deadline) -> symmem::Result<()> {
        let deadline = deadline.start();
        let (mut late, mut after) = (Vec::new(), Duration::ZERO);
        for (done, signal) in [(&mut self.put, true), (&mut self.taken, false)] {
            for (peer, done) in done.iter_mut().enumerate().filter(|(_, done)| !**done) {
                // What is there is taken, even if time is up.
                let left = if late.is_empty() { deadline } else { Deadline::after(Duration::ZERO) };
                let ended = if signal { pad.put(peer, channel, left) } else { pad.wait(peer, channel, left) };
                match ended {
                    Err(Error::Timeout { after: waited, .. }) => {
                        late.push(peer);
                        after = after.max(waited);
                    }
                    other => {
                        other?;
                        *done = true;
                    }
                }
            }
        }
        late.sort_unstable();
        late.dedup();
        if late.is_empty() {
            return Ok(());
        }
        Err(Error::Timeout { op: "barrier", channel: Some(channel), waiting_for: late, after })
    }
}

impl Handle {
    /// The limit of a call: the caller's in milliseconds, or for 0 the group's.
    fn limit(&self, timeout_ms: u64) -> Deadline {
        match timeout_ms {
            0 => self.raw().group().deadline(),
            given => Deadline::within(Duration::from_millis(given)),
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
            Some(device) => device.put_signal(to, channel, &self.stream(device, stream)),
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
            Some(device) => device.wait_signal(from, channel, &self.stream(device, stream)),
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
            None => self.pad_barrier(channel, self.limit(timeout_ms)),
            Some(device) => device.barrier_on_channel(channel, &self.stream(device, stream)),
        })
    }

    /// All ranks on a channel of this memory's pad.
    fn pad_barrier(&self, channel: usize, deadline: Deadline) -> symmem::Result<()> {
        let (pad, unfinished) = (self.raw().signal_pad(), &self.mapped().unfinished);
        let mut progress = unfinished.take(channel, self.raw().world_size());
        // Nobody waits for himself.
        progress.put[self.raw().rank()] = true;
        progress.taken[self.raw().rank()] = true;
        let done = progress.go_on(&pad, channel, deadline);
        let begun = progress.put.iter().filter(|put| **put).count() > 1;
        if done.is_err() && begun {
            unfinished.keep(channel, progress);
        }
        done
    }
}
