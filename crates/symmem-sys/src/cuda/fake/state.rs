//! What the fake driver has given out and not got back.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use super::pages::Span;
use super::work::Work;
use super::{Config, Launched, Ptx};
use crate::cuda::{
    Access, CaptureMode, Context, Device, Failure, HandleType, Result, Stream, code,
};

#[derive(Default)]
pub(super) struct State {
    pub(super) devices: Vec<Config>,
    /// The call that is being made, for its failures.
    pub(super) call: &'static str,
    initialised: bool,
    last: usize,
    counts: BTreeMap<String, usize>,
    pub(super) history: Vec<&'static str>,
    planned: Vec<Planned>,
    /// How often the primary context of a device is retained.
    pub(super) contexts: BTreeMap<i32, usize>,
    current: HashMap<ThreadId, Vec<Context>>,
    pub(super) memories: BTreeMap<u64, Physical>,
    pub(super) reservations: BTreeMap<u64, Reservation>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    pub(super) hosts: BTreeMap<u64, Span>,
    /// What another library of the process has mapped, from and to, and whose it is: all devices reach it.
    pub(super) adopted: Vec<(u64, u64, Device)>,
    pub(super) streams: BTreeMap<usize, StreamState>,
    /// Addresses of those that were destroyed.
    pub(super) gone_streams: Vec<usize>,
    /// What threads may call while they capture; those that have said so.
    pub(super) modes: HashMap<ThreadId, CaptureMode>,
    pub(super) events: BTreeMap<usize, EventState>,
    pub(super) modules: BTreeMap<usize, Ptx>,
    pub(super) functions: BTreeMap<usize, FunctionState>,
    pub(super) graphs: BTreeMap<usize, Vec<Work>>,
    pub(super) execs: BTreeMap<usize, Vec<Work>>,
    pub(super) launches: Vec<Launched>,
    pub(super) kernels: BTreeMap<String, Kernel>,
}

/// A failure to come: at this count, or always.
struct Planned {
    call: String,
    at: Option<usize>,
    code: i32,
}

/// Physical memory, or a multicast object.
pub(super) struct Physical {
    pub(super) file: OwnedFd,
    pub(super) bytes: usize,
    pub(super) device: Device,
    pub(super) handle: HandleType,
    /// Whether it was created here, and counts as this device's memory.
    pub(super) created: bool,
    /// Whether network cards may reach it.
    pub(super) rdma: bool,
    /// How often it has to be released.
    pub(super) handles: usize,
    pub(super) mappings: usize,
    pub(super) bindings: usize,
    pub(super) multicast: Option<Multicast>,
}

#[derive(Default)]
pub(super) struct Multicast {
    /// How many devices it is for; 0 where it was imported, and others may have added some.
    pub(super) devices: usize,
    pub(super) added: BTreeSet<i32>,
    pub(super) bound: Vec<Binding>,
}

pub(super) struct Binding {
    pub(super) device: Device,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) memory: u64,
}

pub(super) struct Reservation {
    pub(super) bytes: usize,
    /// What was taken from the system, for the alignment's sake.
    pub(super) whole: Span,
}

pub(super) struct Mapping {
    pub(super) bytes: usize,
    pub(super) memory: u64,
    pub(super) access: BTreeMap<i32, Access>,
}

pub(super) struct StreamState {
    pub(super) context: Context,
    pub(super) capture: Option<Noting>,
}

/// A capture that is under way, in thread-local mode.
pub(super) struct Noting {
    pub(super) id: u64,
    pub(super) noted: Vec<Work>,
    /// A call that the thread may not make meanwhile has ended it.
    pub(super) invalidated: bool,
    thread: ThreadId,
}

impl Noting {
    pub(super) fn new(id: u64) -> Self {
        let thread = std::thread::current().id();
        Self { id, noted: Vec::new(), invalidated: false, thread }
    }
}

/// What could touch a capture, for all the driver knows, and therefore ends those of the calling thread.
const UNSAFE_IN_CAPTURE: [&str; 13] = [
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventSynchronize",
    "cuEventQuery",
];

pub(super) struct EventState {
    pub(super) timing: bool,
    pub(super) recorded: Option<Instant>,
}

#[derive(Clone)]
pub(super) struct FunctionState {
    pub(super) module: usize,
    pub(super) name: String,
}

/// What a kernel does.
#[derive(Clone)]
pub(super) struct Kernel {
    pub(super) sizes: Vec<usize>,
    pub(super) run: Arc<dyn Fn(&Launched) + Send + Sync>,
}

impl State {
    pub(super) fn new(devices: Vec<Config>) -> Self {
        Self { devices, ..Self::default() }
    }

    /// The failure of the call, in words of one's own.
    pub(super) fn failure(&self, code: i32, why: impl Into<String>) -> Failure {
        Failure::new(self.call, code, why)
    }

    pub(super) fn refuse<T>(&self, code: i32, why: impl Into<String>) -> Result<T> {
        Err(self.failure(code, why))
    }

    pub(super) fn config(&self, device: Device) -> Result<&Config> {
        let found = usize::try_from(device.0).ok().and_then(|ordinal| self.devices.get(ordinal));
        let none = || self.failure(code::INVALID_DEVICE, format!("there is no {device:?}"));
        found.ok_or_else(none)
    }

    /// A number that was not given out before.
    pub(super) fn number(&mut self) -> usize {
        self.last += 1;
        self.last
    }

    pub(super) fn plan(&mut self, call: &str, nth: Option<usize>, code: i32) {
        let at = nth.map(|nth| self.calls(call) + nth);
        self.planned.push(Planned { call: call.to_owned(), at, code });
    }

    pub(super) fn calls(&self, call: &str) -> usize {
        self.counts.get(call).copied().unwrap_or(0)
    }

    /// Counts a call, and fails it if that was asked for.
    pub(super) fn enter(&mut self, call: &'static str) -> Result<()> {
        self.history.push(call);
        let count = self.counts.entry(call.to_owned()).or_default();
        *count += 1;
        let hit = |plan: &&Planned| plan.call == call && plan.at.is_none_or(|at| at == *count);
        if let Some(plan) = self.planned.iter().find(hit) {
            return Err(Failure::new(call, plan.code, "as the test has asked"));
        }
        match call {
            "cuInit" => self.initialised = true,
            "cuDriverGetVersion" => {}
            _ if self.initialised => {}
            _ => return self.refuse(code::NOT_INITIALIZED, "cuInit was not called"),
        }
        if UNSAFE_IN_CAPTURE.contains(&call) && self.end_captures() {
            return self.refuse(code::STREAM_CAPTURE_UNSUPPORTED, "this thread is capturing");
        }
        Ok(())
    }

    /// Ends the captures of this thread, unless it may do everything; whether there were any.
    fn end_captures(&mut self) -> bool {
        let thread = std::thread::current().id();
        if self.modes.get(&thread) == Some(&CaptureMode::Relaxed) {
            return false;
        }
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut());
        let own = captures.filter(|capture| capture.thread == thread);
        own.map(|capture| capture.invalidated = true).count() > 0
    }

    /// The contexts of this thread; the last is current.
    pub(super) fn stack(&mut self) -> &mut Vec<Context> {
        self.current.entry(std::thread::current().id()).or_default()
    }

    /// The context that is current for this thread.
    pub(super) fn current(&self) -> Result<Context> {
        let stack = self.current.get(&std::thread::current().id());
        let none = || self.failure(code::INVALID_CONTEXT, "no context is current");
        stack.and_then(|stack| stack.last()).copied().ok_or_else(none)
    }

    /// The context of a stream; that of the default stream is the current one.
    pub(super) fn context_of(&self, stream: Stream) -> Result<Context> {
        if stream == Stream::DEFAULT {
            return self.current();
        }
        let none = || self.failure(code::INVALID_HANDLE, format!("{stream:?} is no stream"));
        self.streams.get(&stream.raw()).map(|found| found.context).ok_or_else(none)
    }

    /// Physical memory of which the caller has a handle.
    pub(super) fn memory(&mut self, handle: u64) -> Result<&mut Physical> {
        let (call, why) = (self.call, || format!("{handle} is no handle of memory"));
        let found = self.memories.get_mut(&handle).filter(|memory| memory.handles > 0);
        found.ok_or_else(|| Failure::new(call, code::INVALID_VALUE, why()))
    }

    /// Bytes of a device's memory that are in use.
    pub(super) fn used(&self, device: Device) -> usize {
        let created = self.memories.values().filter(|memory| memory.created);
        created.filter(|memory| memory.device == device).map(|memory| memory.bytes).sum()
    }

    /// Forgets memory that nothing holds any more.
    pub(super) fn sweep(&mut self) {
        loop {
            let free = |memory: &Physical| {
                memory.handles == 0 && memory.mappings == 0 && memory.bindings == 0
            };
            let Some(&id) = self.memories.iter().find(|(_, memory)| free(memory)).map(|(id, _)| id)
            else {
                return;
            };
            // A multicast object that goes lets go of what is bound to it.
            let gone = self.memories.remove(&id).and_then(|memory| memory.multicast);
            for binding in gone.into_iter().flat_map(|multicast| multicast.bound) {
                if let Some(memory) = self.memories.get_mut(&binding.memory) {
                    memory.bindings -= 1;
                }
            }
        }
    }

    /// Whether `bytes` at `address` are there, and `device` may read, or else write, them.
    pub(super) fn reachable(&self, address: u64, bytes: usize, device: i32, write: bool) -> bool {
        let Some(end) = address.checked_add(bytes as u64) else { return false };
        let host = self.hosts.range(..=address).next_back();
        if host.is_some_and(|(&start, span)| end <= start + span.bytes as u64)
            || self.adopted.iter().any(|&(from, to, _)| from <= address && end <= to)
        {
            return true;
        }
        let mut at = address;
        while at < end {
            let Some((start, mapping)) = self.mapping_of(at) else { return false };
            let allowed = match mapping.access.get(&device) {
                Some(Access::ReadWrite) => true,
                Some(Access::Read) => !write,
                _ => false,
            };
            if !allowed {
                return false;
            }
            at = start + mapping.bytes as u64;
        }
        true
    }

    /// The mapping that an address lies in, and where it starts.
    pub(super) fn mapping_of(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes as u64).then_some((start, mapping))
    }

    pub(super) fn live(&self) -> Vec<String> {
        let mut list = Vec::new();
        for (device, count) in self.contexts.iter().filter(|(_, count)| **count > 0) {
            list.push(format!("context of device {device}, to be released {count} times"));
        }
        for (id, memory) in &self.memories {
            let what = if memory.multicast.is_some() { "multicast object" } else { "memory" };
            let Physical { bytes, handles, mappings, bindings, .. } = memory;
            let rdma = if memory.rdma { ", for RDMA" } else { "" };
            list.push(format!(
                "{what} {id}: {bytes} bytes of {:?}{rdma}, {handles} handles, {mappings} mappings, {bindings} bindings",
                memory.device
            ));
        }
        let at = |what: &str, address: &u64| format!("{what} at {address:#x}");
        list.extend(self.reservations.keys().map(|address| at("addresses", address)));
        list.extend(self.mappings.keys().map(|address| at("mapping", address)));
        list.extend(self.hosts.keys().map(|address| at("memory of the host", address)));
        let numbered = |what: &str, number: &usize| format!("{what} {number}");
        list.extend(self.streams.keys().map(|number| numbered("stream", number)));
        list.extend(self.events.keys().map(|number| numbered("event", number)));
        list.extend(self.modules.keys().map(|number| numbered("module", number)));
        list.extend(self.graphs.keys().map(|number| numbered("graph", number)));
        list.extend(self.execs.keys().map(|number| numbered("executable graph", number)));
        list
    }
}
