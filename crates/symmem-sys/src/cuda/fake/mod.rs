//! A CUDA driver in plain Rust, for tests on machines without a GPU.
//!
//! - Memory is a file in memory. An exported descriptor works in other processes, and a "device" address is one of this
//!   process: a reservation is an inaccessible mapping, mapping puts the file there, setting access makes it accessible.
//! - What is put into a stream is done at once, or noted if the stream is being captured. A wait really waits, for at
//!   most [`PATIENCE`].
//! - A launch is noted, and calls the Rust function that [`Fake::kernel`] has set for the kernel.
//! - Calls are counted and can be made to fail; what is not given back is listed by [`Fake::live`].
//!
//! It is strict: what the real driver refuses, and some of what it only documents, is a failure here. It does not do
//! multicast stores: memory mapped from a multicast object is memory of its own. Waiting for an event that was recorded
//! in a capture does not bring the other stream into the capture.

#![allow(unsafe_code)] // S3

mod devices;
mod kernels;
mod memory;
mod pages;
mod state;
mod streams;
mod work;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::state::{Kernel, State};
use super::driver::{Devices, VirtualMemory};
use super::{
    Access, Device, Failure, Granularity, HandleType, MemoryProperties, Result, Stream, code,
};

/// How long a wait in a stream waits before it fails with [`code::LAUNCH_TIMEOUT`].
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What a device says about fabric handles, and does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// No, and it cannot.
    No,
    /// Yes, and it can.
    Yes,
    /// Yes, but creating memory is not permitted, as on a machine whose fabric is not set up.
    NotPermitted,
}

/// A device of the fake driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Its name.
    pub name: String,
    /// All its memory.
    pub bytes: usize,
    /// What sizes must be multiples of.
    pub granularity: usize,
    /// Multiprocessors.
    pub sms: i32,
    /// Bytes of the cache that they share.
    pub cache: i32,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Whether it has virtual memory management and descriptors.
    pub virtual_memory: bool,
    /// Whether it can be added to multicast objects.
    pub multicast: bool,
    /// Fabric handles.
    pub fabric: Fabric,
    /// Whether network cards reach its memory.
    pub rdma: bool,
    /// Whether the other devices can access its memory.
    pub peers: bool,
    /// The host's NUMA node nearest to it.
    pub host_numa: i32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: "Fake GPU".to_owned(),
            bytes: 1 << 30,
            granularity: 2 << 20,
            sms: 8,
            cache: 50 << 20,
            capability: (9, 0),
            virtual_memory: true,
            multicast: false,
            fabric: Fabric::No,
            rdma: false,
            peers: true,
            host_numa: 0,
        }
    }
}

/// The text of a module.
#[derive(Clone, PartialEq, Eq)]
pub struct Ptx(pub Arc<str>);

impl fmt::Debug for Ptx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of PTX", self.0.len())
    }
}

/// A launch that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The kernel's name.
    pub function: String,
    /// The module that it is from.
    pub module: Ptx,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// In which stream.
    pub stream: Stream,
    /// Whether all blocks had to be there at once.
    pub cooperative: bool,
    /// Whether it could start early.
    pub programmatic: bool,
    /// How many parameters there were.
    pub count: usize,
    /// Their bytes as of the launch, where [`Fake::kernel`] has told how long they are; else empty.
    pub parameters: Vec<Vec<u8>>,
}

impl Launched {
    /// The parameter as a number of 8 bytes, such as an address.
    pub fn u64(&self, index: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(self.parameters.get(index)?.as_slice().try_into().ok()?))
    }

    /// The parameter as a number of 4 bytes.
    pub fn u32(&self, index: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(self.parameters.get(index)?.as_slice().try_into().ok()?))
    }
}

/// The fake driver. Implements [`Driver`](super::Driver).
pub struct Fake {
    state: Mutex<State>,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Fake")
            .field("devices", &state.devices)
            .field("live", &state.live())
            .finish()
    }
}

impl Fake {
    /// A driver with these devices.
    pub fn new(devices: Vec<Config>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::new(devices)) })
    }

    /// A driver with so many plain devices.
    pub fn plain(devices: usize) -> Arc<Self> {
        Self::new(vec![Config::default(); devices])
    }

    /// Makes the `nth` call of `call` from now on fail with `code`; 1 is the next. Calls have the names of
    /// [`Failure::call`](super::Failure::call).
    pub fn fail(&self, call: &str, nth: usize, code: i32) {
        self.lock().plan(call, Some(nth), code);
    }

    /// Makes every call of `call` from now on fail with `code`.
    pub fn fail_always(&self, call: &str, code: i32) {
        self.lock().plan(call, None, code);
    }

    /// How often `call` was called, failures included. Where the handle is one of the fabric, an export counts as
    /// `export_fabric` as well, and an import as `import_fabric`.
    pub fn calls(&self, call: &str) -> usize {
        self.lock().calls(call)
    }

    /// All calls so far, in their order, failures included.
    pub fn history(&self) -> Vec<&'static str> {
        self.lock().history.clone()
    }

    /// Everything that was made and not given back, one line each.
    pub fn live(&self) -> Vec<String> {
        self.lock().live()
    }

    /// All launches so far, those from graphs included.
    pub fn launches(&self) -> Vec<Launched> {
        self.lock().launches.clone()
    }

    /// Has devices reach what another library of this process has mapped, such as a heap of its own.
    pub fn adopt(&self, from: u64, bytes: u64) {
        self.adopt_for(Device(-1), from, bytes);
    }

    /// Likewise, and it is known as memory of this device.
    pub fn adopt_for(&self, device: Device, from: u64, bytes: u64) {
        self.lock().adopted.push((from, from + bytes, device));
    }

    /// Memory of the current device that all devices reach and that can be exported, as libraries allocate theirs.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        let device = self.context_device()?;
        let fabric = self.lock().config(device)?.fabric == Fabric::Yes;
        let handle = if fabric { HandleType::FdOrFabric } else { HandleType::Fd };
        let properties = MemoryProperties { device, handle, rdma: false };
        let granule = self.granularity(&properties, Granularity::Recommended)?;
        let bytes = bytes.max(1).next_multiple_of(granule);
        let memory = self.create(bytes, &properties)?;
        let address = self.reserve(bytes, 0)?;
        let all: Vec<Device> = (0..self.lock().devices.len() as i32).map(Device).collect();
        // SAFETY: our own reservation.
        unsafe { self.map(address, bytes, 0, memory) }?;
        // SAFETY: nobody uses it yet.
        unsafe { self.set_access(address, bytes, &all, Access::ReadWrite) }?;
        // SAFETY: our own handle; the mapping keeps the memory.
        unsafe { self.release(memory) }?;
        Ok(address)
    }

    /// Gives back what [`Fake::allocate`] gave.
    ///
    /// # Safety
    ///
    /// Nobody uses it any more.
    pub unsafe fn free(&self, address: u64) -> Result<()> {
        let found = self.lock().mappings.get(&address).map(|mapping| mapping.bytes);
        let none = || Failure::new("cuMemUnmap", code::INVALID_VALUE, "nothing is mapped there");
        let bytes = found.ok_or_else(none)?;
        // SAFETY: all of one mapping, which nobody uses.
        unsafe { self.unmap(address, bytes) }?;
        // SAFETY: likewise, of its reservation.
        unsafe { self.free_address(address, bytes) }
    }

    /// Lets launches of the kernel `name` call `run`, with copies of the parameters, which are `sizes` long. A launch
    /// with another number of parameters fails.
    pub fn kernel(
        &self,
        name: &str,
        sizes: &[usize],
        run: impl Fn(&Launched) + Send + Sync + 'static,
    ) {
        let kernel = Kernel { sizes: sizes.to_vec(), run: Arc::new(run) };
        self.lock().kernels.insert(name.to_owned(), kernel);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state for a call that is not counted yet.
    fn begin(&self, call: &'static str) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.call = call;
        state
    }

    /// Counts a call, and fails it if that was asked for.
    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        let mut state = self.begin(call);
        state.enter(call)?;
        Ok(state)
    }
}
