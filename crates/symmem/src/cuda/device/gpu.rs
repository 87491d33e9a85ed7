//! One device: its primary context, and what the library keeps for it.
#![allow(unsafe_code)] // S4

use std::any::Any;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use symmem_sys::Missing;
use symmem_sys::cuda::{
    self, Attribute, Capture, CaptureMode, Context, Device, Driver, Event, Failure, Stream,
};

use crate::cuda::device::kernels::Kernels;
use crate::cuda::device::occupancy::Occupancy;
use crate::cuda::failed;
use crate::cuda::group::failures::Failures;
use crate::cuda::nvshmem::Heap;
use crate::cuda::stream::graph::is_capturing;
use crate::error::{Error, Result};
use crate::memory::NvshmemMemory;
use crate::memory::cuda::{DeviceBackend, DriverMemory};
use crate::sync::lock;

/// A device that this process uses, and the backend of symmetric memory on it. Cheap to clone.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) opened: Arc<Opened>,
    /// The driver's memory without it.
    backend: Option<Arc<dyn DeviceBackend>>,
}

/// An open device, as all values for it share it.
pub(crate) struct Opened {
    driver: Arc<dyn Driver>,
    device: Device,
    number: u32,
    uuid: [u8; 16],
    context: Context,
    pub(in crate::cuda) multiprocessors: u32,
    pub(in crate::cuda) capability: (i32, i32),
    /// Bytes of the cache that all multiprocessors share.
    pub(in crate::cuda) cache: usize,
    /// It has fabric handles, once that was asked.
    pub(crate) fabric: OnceLock<bool>,
    pub(in crate::cuda) kernels: Kernels,
    pub(in crate::cuda) occupancy: Occupancy,
    pub(in crate::cuda) failures: Failures,
    retired: Mutex<Retired>,
}

/// What identifies a stream: the driver may reuse the address of one that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    pub(crate) raw: Stream,
    /// Of ours; 0 for those that somebody else has made.
    number: u64,
}

/// What is released once no work that may use it is running.
///
/// Nobody waits for that: ranks that are threads share a context, and the kernel of one may be waiting for another rank,
/// which would then wait for that kernel.
#[derive(Default)]
struct Retired {
    /// The streams that there are, and how many were made here.
    streams: Vec<StreamId>,
    made: u64,
    /// Those of them that somebody else has made, and may capture.
    foreign: Vec<Stream>,
    /// The ends of streams that are gone, or were captured.
    ends: Vec<Event>,
    /// Things, and the events that they outlive, besides those of the things before them.
    things: VecDeque<(Box<dyn Send + Sync>, Vec<Event>)>,
}

/// A thing that kernels and copies may still use when its owner drops it: it is dropped when they are done.
#[derive(Debug)]
pub(crate) struct InUse<T: Send + Sync + 'static> {
    by: Gpu,
    thing: ManuallyDrop<T>,
}

impl<T: Send + Sync> Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.thing
    }
}

impl<T: Send + Sync> Drop for InUse<T> {
    fn drop(&mut self) {
        // SAFETY: S4: taken once, here.
        let thing = unsafe { ManuallyDrop::take(&mut self.thing) };
        self.by.retire(Box::new(thing));
    }
}

/// The devices that are open, so that each has its kernels loaded once.
static OPEN: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

impl Gpu {
    /// The device of this number among those that this process sees.
    pub fn open(number: u32) -> Result<Self> {
        let mut open = lock(&OPEN);
        open.retain(|gpu| gpu.strong_count() > 0);
        let mut living = open.iter().filter_map(Weak::upgrade);
        if let Some(gpu) = living.find(|gpu| gpu.number == number) {
            return Ok(Self { opened: gpu, backend: None });
        }
        let missing = |why: Missing| Error::unavailable("the CUDA driver", why.to_string());
        let driver = cuda::load().map_err(missing)?;
        let gpu = Self::with_driver(driver, number)?;
        open.push(Arc::downgrade(&gpu.opened));
        Ok(gpu)
    }

    /// As [`Gpu::open`], through another driver: for tests with a fake one.
    #[doc(hidden)]
    pub fn with_driver(driver: Arc<dyn Driver>, number: u32) -> Result<Self> {
        driver.init().map_err(failed)?;
        let count = driver.device_count().map_err(failed)?;
        if number as usize >= count {
            let why = format!("this process sees {count} devices");
            return Err(Error::unavailable(format!("cuda:{number}"), why));
        }
        let device = driver.device(number as usize).map_err(failed)?;
        for (attribute, what) in [
            (Attribute::VirtualMemory, "virtual memory management"),
            (Attribute::FdHandles, "memory that can be exported as a descriptor"),
        ] {
            if !driver.has(attribute, device) {
                let name = driver.device_name(device).unwrap_or_default();
                let why = format!("cuda:{number} ({name}) does not have it");
                return Err(Error::unavailable(what, why));
            }
        }
        let number_of = |attribute| driver.attribute(attribute, device).map_err(failed);
        let multiprocessors = number_of(Attribute::SmCount)?;
        let capability = (number_of(Attribute::ComputeMajor)?, number_of(Attribute::ComputeMinor)?);
        let cache = number_of(Attribute::L2Bytes).unwrap_or(0);
        let uuid = driver.device_uuid(device).map_err(failed)?;
        let context = driver.context_retain(device).map_err(failed)?;
        let opened = Arc::new(Opened {
            driver,
            device,
            number,
            uuid,
            context,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1),
            capability,
            cache: usize::try_from(cache).unwrap_or(0),
            fabric: OnceLock::new(),
            kernels: Kernels::default(),
            occupancy: Occupancy::new(),
            failures: Failures::default(),
            retired: Mutex::default(),
        });
        Ok(Self { opened, backend: None })
    }

    /// The same device, with memory of this backend.
    pub(crate) fn with(&self, backend: Arc<dyn DeviceBackend>) -> Self {
        Self { backend: Some(backend), ..self.clone() }
    }

    /// The same device, with the driver's memory.
    pub(crate) fn of_driver(&self) -> Self {
        Self { backend: None, ..self.clone() }
    }

    /// The backend that allocates symmetric memory.
    pub(crate) fn backend(&self) -> Arc<dyn DeviceBackend> {
        self.backend.clone().unwrap_or_else(|| Arc::new(DriverMemory(self.clone())))
    }

    /// NVSHMEM's heap, where it is the backend.
    pub(crate) fn heap(&self) -> Result<Arc<Heap>> {
        let backend = self.backend();
        let nvshmem = (&*backend as &dyn Any).downcast_ref::<NvshmemMemory>();
        nvshmem.map(|memory| Arc::clone(&memory.0)).ok_or_else(|| {
            let why = format!("its backend is {}", backend.name());
            Error::unavailable("NVSHMEM for this memory", why)
        })
    }

    /// The name of that.
    pub fn backend_name(&self) -> &'static str {
        self.backend().name()
    }

    /// Its number among those that this process sees.
    pub fn number(&self) -> u32 {
        self.opened.number
    }

    /// The device's UUID, the same in all processes.
    pub fn uuid(&self) -> [u8; 16] {
        self.opened.uuid
    }

    pub(crate) fn device(&self) -> Device {
        self.opened.device
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.opened.driver
    }

    /// Remembers a stream, whose work things that are given back outlive.
    pub(crate) fn adopt(&self, raw: Stream, ours: bool) -> StreamId {
        let mut retired = lock(&self.opened.retired);
        let number = if ours {
            retired.made += 1;
            retired.made
        } else {
            retired.foreign.push(raw);
            0
        };
        let stream = StreamId { raw, number };
        retired.streams.push(stream);
        stream
    }

    /// Forgets a stream, but for what is still in it.
    pub(crate) fn part_from(&self, stream: StreamId) {
        let mut retired = lock(&self.opened.retired);
        if let Some(at) = retired.streams.iter().position(|known| *known == stream) {
            retired.streams.swap_remove(at);
        }
        let foreign = retired.foreign.iter().position(|known| *known == stream.raw);
        if let Some(at) = foreign.filter(|_| stream.number == 0) {
            retired.foreign.swap_remove(at);
        }
        self.note_end(&mut retired, stream.raw);
    }

    /// Remembers what is in a stream that is about to be captured: until that is over, its end cannot be told.
    pub(crate) fn before_capture(&self, stream: Stream) {
        self.note_end(&mut lock(&self.opened.retired), stream);
    }

    fn note_end(&self, retired: &mut Retired, stream: Stream) {
        self.at_liberty(|| {
            retired.ends.retain(|end| !self.is_over(*end));
            retired.ends.extend(self.ends(&[stream]));
        });
    }

    /// Whether the driver would end a capture if this thread allocated or waited: one of its own, or one of a stream that
    /// somebody else has made, of which nothing else is known.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let foreign = lock(&self.opened.retired).foreign.clone();
        let captured = |stream: &Stream| {
            let capture = self.call(|driver| driver.stream_capture(*stream))?;
            Ok(capture != Capture::None)
        };
        let captured: Result<Vec<bool>> = foreign.iter().map(captured).collect();
        Ok(is_capturing() || captured?.contains(&true))
    }

    /// Does what the driver refuses to a thread that captures, but which touches no stream that is being captured: else
    /// dropping something would end the capture.
    pub(crate) fn at_liberty<R>(&self, f: impl FnOnce() -> R) -> R {
        let had = self.driver().capture_mode(CaptureMode::Relaxed);
        let done = f();
        let back = had.and_then(|had| self.driver().capture_mode(had));
        back.map(drop).unwrap_or_else(|e| tracing::warn!("{e}"));
        done
    }

    /// Whether it is a stream that is still there.
    pub(crate) fn knows(&self, stream: StreamId) -> bool {
        lock(&self.opened.retired).streams.contains(&stream)
    }

    /// Whether there are streams besides the caller's.
    pub(crate) fn has_several_streams(&self) -> bool {
        lock(&self.opened.retired).streams.len() > 1
    }

    /// Waits for all work of this process on the device, also in streams that the library has never seen: before memory is freed
    /// that was passed to another library. Not during a capture, which it would end.
    pub fn settle(&self) -> Result<()> {
        if self.is_capturing()? {
            return Ok(());
        }
        self.call(|driver| driver.context_synchronize())
    }

    /// Whether a stream is done with the group's last operation in it, which `event` follows if it was `recorded`; or whether
    /// the capture that noted the operation is over. No, where that cannot be told.
    pub(crate) fn is_done(
        &self,
        (stream, capture): (StreamId, Option<u64>),
        event: Option<Event>,
    ) -> Result<bool> {
        let is_known = self.knows(stream);
        self.at_liberty(|| {
            self.call(|driver| match (capture, event) {
                (None, Some(event)) => driver.event_query(event),
                // Nothing more is captured in a stream that is gone; of what ran there nothing is known.
                _ if !is_known => Ok(capture.is_some()),
                (Some(number), _) => {
                    Ok(driver.stream_capture(stream.raw)? != Capture::Active(number))
                }
                (None, None) => driver.stream_query(stream.raw),
            })
        })
    }

    /// Whether all is done in these streams, in those that are gone, and in those of somebody else. What is captured does not
    /// run.
    pub(crate) fn are_idle(&self, streams: &[Stream]) -> Result<bool> {
        let retired = lock(&self.opened.retired);
        let ends = retired.ends.iter().chain(retired.things.iter().flat_map(|(_, ends)| ends));
        let mut streams = streams.iter().chain(&retired.foreign);
        self.call(|driver| {
            let is_idle = |stream: &Stream| {
                Ok(driver.stream_capture(*stream)? != Capture::None
                    || driver.stream_query(*stream)?)
            };
            for end in ends {
                if !driver.event_query(*end)? {
                    return Ok(false);
                }
            }
            streams.try_fold(true, |idle, stream| Ok(idle && is_idle(stream)?))
        })
    }

    /// Has each end that streams left behind when they went pass by `each`, and so what was in them.
    pub(crate) fn for_gone(
        &self,
        each: impl Fn(&dyn Driver, Event) -> Result<(), Failure>,
    ) -> Result<()> {
        let retired = lock(&self.opened.retired);
        let ends = retired.ends.iter().chain(retired.things.iter().flat_map(|(_, ends)| ends));
        self.call(|driver| ends.copied().try_for_each(|end| each(driver, end)))
    }

    /// Drops `thing` when all is done that is in any stream now: at once, where nothing is.
    pub(crate) fn retire(&self, thing: Box<dyn Send + Sync>) {
        let mut retired = lock(&self.opened.retired);
        let streams: Vec<Stream> = retired.streams.iter().map(|stream| stream.raw).collect();
        let mut events = self.at_liberty(|| self.ends(&streams));
        events.append(&mut retired.ends);
        retired.things.push_back((thing, events));
        drop(retired);
        self.collect();
    }

    /// Drops what may be dropped.
    pub(crate) fn collect(&self) {
        self.at_liberty(|| self.drop_done());
    }

    fn drop_done(&self) {
        let mut retired = lock(&self.opened.retired);
        let mut done = Vec::new();
        while let Some((_, events)) = retired.things.front_mut() {
            events.retain(|event| !self.is_over(*event));
            if !events.is_empty() {
                break;
            }
            done.extend(retired.things.pop_front());
        }
        drop(retired); // what is dropped now may come back here
        drop(done);
    }

    /// An event at the end of each of the streams that has something in it. What a capture notes does not run now.
    fn ends(&self, streams: &[Stream]) -> Vec<Event> {
        let end = |stream: &Stream| {
            let end = self.call(|driver| {
                if driver.stream_capture(*stream)? != Capture::None
                    || driver.stream_query(*stream)?
                {
                    return Ok(None);
                }
                let event = driver.event_create(false)?;
                driver.event_record(event, *stream).map(|()| Some(event)).inspect_err(|_| {
                    // SAFETY: S4: made just now, and not used again.
                    let _ = unsafe { driver.event_destroy(event) };
                })
            });
            end.inspect_err(|e| tracing::warn!("{e}")).ok().flatten()
        };
        streams.iter().filter_map(end).collect()
    }

    /// Whether an event of ours has happened; it is destroyed then.
    fn is_over(&self, event: Event) -> bool {
        let over = self.call(|driver| driver.event_query(event));
        let over = over.unwrap_or(true); // a context that has failed runs nothing
        if over {
            // SAFETY: S4: made in `ends`, and not used again.
            self.give_back(|driver| unsafe { driver.event_destroy(event) });
        }
        over
    }

    /// A thing that streams may be using, dropped when they are done.
    pub(crate) fn in_use<T: Send + Sync>(&self, thing: T) -> InUse<T> {
        InUse { by: self.clone(), thing: ManuallyDrop::new(thing) }
    }

    /// Runs `f`, which calls a library that works in the current context, with this device's.
    pub(crate) fn within<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        self.call(|_| Ok(f()))
    }

    /// Has the driver take something back. If it cannot, only the log says so.
    pub(crate) fn give_back(&self, f: impl FnOnce(&dyn Driver) -> Result<(), Failure>) {
        self.call(f).unwrap_or_else(|e| tracing::warn!("{e}"));
    }

    /// Calls the driver with this device's context current, and leaves the thread with the one it had.
    pub(crate) fn call<R>(&self, f: impl FnOnce(&dyn Driver) -> Result<R, Failure>) -> Result<R> {
        let driver = self.driver();
        if driver.context_current().map_err(failed)? == Some(self.opened.context) {
            return f(driver).map_err(failed);
        }
        driver.context_push(self.opened.context).map_err(failed)?;
        let done = f(driver);
        let popped = driver.context_pop();
        let done = done.map_err(failed)?;
        popped.map_err(failed)?;
        Ok(done)
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.opened, &other.opened)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.number())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let retired = self.retired.get_mut().unwrap_or_else(PoisonError::into_inner);
        for end in retired.ends.drain(..) {
            // SAFETY: S4: made in `ends`, and not used again; the driver keeps it for as long as it needs it.
            unsafe { self.driver.event_destroy(end) }.unwrap_or_else(|e| tracing::warn!("{e}"));
        }
        self.kernels.unload(&*self.driver, self.context);
        // SAFETY: S4: retained once, in `with_driver`; whatever uses the context keeps this alive.
        unsafe { self.driver.context_release(self.device) }
            .unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}
