//! Streams: the caller's, or made here.
#![allow(unsafe_code)] // S4

pub(in crate::cuda) mod graph;
pub(in crate::cuda) mod order;
pub(in crate::cuda) mod replays;

use symmem_sys::cuda::{self as sys, Capture};

use crate::cuda::device::gpu::{Gpu, StreamId};
use crate::cuda::stream::graph::is_capturing;
use crate::error::{Error, Result};

/// A stream: work on a device that is done in order.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    id: StreamId,
    ours: bool,
}

/// Where work is put: into a stream, or into the capture that records it.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) stream: &'a Stream,
    /// The number of the capture.
    pub(crate) capture: Option<u64>,
}

impl Gpu {
    /// A new stream, which does not wait for the default one.
    pub fn stream(&self) -> Result<Stream> {
        let raw = self.call(|driver| driver.stream_create())?;
        Ok(Stream { gpu: self.clone(), id: self.adopt(raw, true), ours: true })
    }
}

impl Stream {
    /// An existing stream (`CUstream`), which outlives this value.
    ///
    /// # Safety
    /// It belongs to the primary context of `gpu`, and lives for as long as this value does.
    pub unsafe fn from_raw(gpu: &Gpu, raw: usize) -> Self {
        // SAFETY: as the caller promises.
        let raw = unsafe { sys::Stream::from_raw(raw) };
        Self { gpu: gpu.clone(), id: gpu.adopt(raw, false), ours: false }
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn raw(&self) -> sys::Stream {
        self.id.raw
    }

    pub(crate) fn id(&self) -> StreamId {
        self.id
    }

    /// Refuses the stream of another device than this.
    pub(crate) fn check_gpu(&self, op: &'static str, gpu: &Gpu) -> Result<()> {
        if self.gpu == *gpu {
            return Ok(());
        }
        Err(Error::usage(op, format!("a stream of {gpu:?}"), format!("one of {:?}", self.gpu)))
    }

    /// Waits until everything in it is done. Fails if a group on the device has failed: see
    /// [`Gpu::check_failures`].
    pub fn synchronize(&self) -> Result<()> {
        const OP: &str = "synchronize";
        self.check_runs(OP)?;
        self.gpu.call(|driver| driver.stream_synchronize(self.raw()))?;
        self.gpu.collect();
        self.gpu.check_failures_in(OP)
    }

    /// Whether everything in it is done. Fails as [`Stream::synchronize`] does.
    pub fn is_idle(&self) -> Result<bool> {
        let is_idle = self.gpu.call(|driver| driver.stream_query(self.raw()))?;
        self.gpu.check_failures_in("is_idle").map(|()| is_idle)
    }

    /// Refuses to wait during a capture, before the driver does so by ending the capture.
    pub(crate) fn check_runs(&self, op: &'static str) -> Result<()> {
        if !is_capturing() && self.captured_by()?.is_none() {
            return Ok(());
        }
        let expected = "a stream that can be waited for".to_owned();
        Err(Error::usage(op, expected, "one while capturing a graph"))
    }

    /// Where what is put into it goes now.
    pub(crate) fn target(&self) -> Result<Target<'_>> {
        Ok(Target { stream: self, capture: self.captured_by()? })
    }

    /// The number of the capture that notes what is put into it, if one does.
    pub(crate) fn captured_by(&self) -> Result<Option<u64>> {
        Ok(match self.gpu.call(|driver| driver.stream_capture(self.raw()))? {
            Capture::Active(number) => Some(number),
            Capture::None | Capture::Invalidated => None,
        })
    }
}

/// An event, without the time.
pub(crate) struct Event {
    gpu: Gpu,
    pub(crate) raw: sys::Event,
}

impl Event {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let raw = gpu.call(|driver| driver.event_create(false))?;
        Ok(Self { gpu: gpu.clone(), raw })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: S4: made in `new`, and not used again.
        self.gpu.give_back(|driver| unsafe { driver.event_destroy(self.raw) });
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.gpu.part_from(self.id);
        if self.ours {
            // SAFETY: S4: made here, and not used again; what is in it is still done.
            self.gpu.give_back(|driver| unsafe { driver.stream_destroy(self.raw()) });
        }
        self.gpu.collect();
    }
}
