//! Memory of a CUDA device, from the driver: physical memory, handed to peers as a descriptor or fabric handle, and its mapping
//! at addresses of this process. And what all backends for devices have besides: [`DeviceBackend`].
//!
//! Given back in the order of the driver's rules: unmapped once nothing runs that may use it, then the addresses, then
//! the memory, which lives on for as long as a peer has it mapped.
#![allow(unsafe_code)] // S1 (regions keep their mappings), S4

mod fabric;
mod multicast;

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::Arc;

use symmem_sys::cuda::{
    self as sys, Access, Attribute, Granularity, HandleType, Memory, MemoryProperties,
};

pub(crate) use fabric::{Way, map_pads};
pub(crate) use multicast::agreed;

use crate::cuda::{Gpu, failed};
use crate::error::{Error, Result};
use crate::group::{Group, no_descriptor};
use crate::memory::region::Region;
use crate::memory::{Allocation, Backend, Exported};
use crate::symmetric::Handle;

/// A backend whose memory lies on a device.
pub(crate) trait DeviceBackend: Backend + Any {
    /// A rank of the group that not all others reach by an address. The same on all ranks.
    fn unreached(&self, _group: &Group) -> Option<usize> {
        None
    }

    /// Whether ranks that have no address of each other's memory reach it by what the backend's library does.
    fn has_network(&self) -> bool {
        false
    }

    /// The address at which a store reaches all ranks' segments, if there is one. Collective.
    fn multicast(&self, gpu: &Gpu, handle: &Handle, over_fabric: bool) -> Result<Option<Region>> {
        multicast::set_up(gpu, handle, over_fabric)
    }

    /// Does what is left to do once all ranks' memory is mapped. Collective.
    fn mapped(&self, _handle: &Handle) -> Result<()> {
        Ok(())
    }
}

/// The driver's own memory.
pub(crate) struct DriverMemory(pub(crate) Gpu);

impl DeviceBackend for DriverMemory {}

/// Physical memory, ours or imported.
pub(crate) struct Physical {
    pub(crate) gpu: Gpu,
    pub(crate) memory: Memory,
}

impl Physical {
    /// What a call of the driver has given.
    fn new(gpu: &Gpu, given: sys::Result<Memory>) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), memory: given.map_err(failed)? })
    }

    /// What was exported, here or by a peer.
    pub(crate) fn import(gpu: &Gpu, exported: &Exported) -> Result<Self> {
        let driver = gpu.driver();
        match exported {
            Exported::Descriptor(fd) => Self::new(gpu, driver.import_fd(fd.as_fd())),
            Exported::Bytes(handle) => Self::new(gpu, driver.import_fabric(handle)),
            Exported::Mapping(_) => Err(no_descriptor()),
        }
    }

    /// What is mapped at an address, by whomever.
    pub(crate) fn at(gpu: &Gpu, address: u64) -> Result<Self> {
        Self::new(gpu, gpu.driver().retain(address))
    }

    /// A descriptor of it, or a fabric handle, where it has one.
    pub(crate) fn export(&self, over_fabric: bool) -> Result<Exported> {
        let exported = match over_fabric {
            false => self.gpu.driver().export_fd(self.memory).map(Exported::Descriptor),
            true => self.gpu.driver().export_fabric(self.memory).map(Exported::Bytes),
        };
        exported.map_err(failed)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: S4: ours, from one create or import, and not used again.
        unsafe { self.gpu.driver().release(self.memory) }.unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}

/// Addresses of this process.
struct Reserved {
    gpu: Gpu,
    address: u64,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: S4: exactly what one reserve gave; the mapping there went before.
        unsafe { self.gpu.driver().free_address(self.address, self.bytes) }
            .unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}

/// Memory at addresses. The fields go in this order.
pub(crate) struct Mapped {
    at: Reserved,
    _memory: Arc<Physical>,
}

impl Mapped {
    pub(crate) fn new(memory: Arc<Physical>, bytes: usize) -> Result<Self> {
        let gpu = memory.gpu.clone();
        let address = gpu.driver().reserve(bytes, 0).map_err(failed)?;
        let at = Reserved { gpu: gpu.clone(), address, bytes };
        // SAFETY: S4: our own reservation, as long as the memory.
        unsafe { gpu.driver().map(address, bytes, 0, memory.memory) }.map_err(failed)?;
        let mapped = Self { at, _memory: memory };
        // SAFETY: S4: our own mapping, which nobody uses yet.
        unsafe { gpu.driver().set_access(address, bytes, &[gpu.device()], Access::ReadWrite) }
            .map_err(failed)?;
        Ok(mapped)
    }

    pub(crate) fn address(&self) -> u64 {
        self.at.address
    }

    /// The first `bytes`, which keep the mapping.
    fn region(self, bytes: usize) -> Result<Region> {
        let (address, whole) = (self.at.address, self.at.bytes);
        let gpu = self.at.gpu.clone();
        Region::of_device(address, whole, gpu.in_use(self))?.part(0, bytes)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: S4: our own mapping; S1: nobody has a region of it any more, and nothing runs: see `Gpu::in_use`.
        unsafe { self.at.gpu.driver().unmap(self.at.address, self.at.bytes) }
            .unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}

impl Gpu {
    /// Of memory that can be handed on by `handle`.
    pub(crate) fn properties(&self, handle: HandleType) -> MemoryProperties {
        let rdma = self.driver().has(Attribute::RdmaMemory, self.device());
        MemoryProperties { device: self.device(), handle, rdma }
    }

    /// Sizes are multiples of the driver's granularity; peers compute the same.
    pub(crate) fn whole(&self, bytes: usize) -> Result<usize> {
        let properties = self.properties(self.handle_type());
        let granularity = self.driver().granularity(&properties, Granularity::Recommended);
        let granularity = granularity.map_err(failed)?;
        let what = || format!("{bytes} bytes of {self:?}");
        let none = || Error::unavailable(what(), "they do not fit the address space");
        bytes.checked_next_multiple_of(granularity).ok_or_else(none)
    }
}

impl Backend for DriverMemory {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn probe(&self) -> Result<()> {
        self.allocate(1).map(drop)
    }

    fn allocate(&self, bytes: usize) -> Result<Allocation> {
        let gpu = &self.0;
        gpu.collect();
        let whole = gpu.whole(bytes)?;
        let properties = gpu.properties(gpu.handle_type());
        let memory = Arc::new(Physical::new(gpu, gpu.driver().create(whole, &properties))?);
        let region = Mapped::new(Arc::clone(&memory), whole)?.region(bytes)?;
        gpu.clear(&region, 0, bytes)?;
        Ok(Allocation::new(region, move |over_fabric| memory.export(over_fabric)))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        self.0.import(exported, bytes)
    }

    as_its_gpu!(|self| self.0);
}

/// The methods of `Backend` in which all backends for a device do as the device.
macro_rules! as_its_gpu {
    (|$this:ident| $gpu:expr) => {
        fn device(&$this) -> $crate::memory::Device {
            $crate::memory::Device::Cuda($gpu.number())
        }

        fn clear(&$this, region: &Region, offset: usize, bytes: usize) -> Result<()> {
            $gpu.clear(region, offset, bytes)
        }

        fn occupation(&$this) -> Result<Option<String>> {
            $gpu.occupation()
        }

        fn after_use(&$this, then: Box<dyn FnOnce() + Send + Sync>) {
            $gpu.after_use(then);
        }
    };
}
pub(crate) use as_its_gpu;

/// What all backends for a device do alike.
impl Gpu {
    /// Maps what a peer exported by the driver.
    pub(crate) fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        if let Exported::Mapping(region) = exported {
            return region.part(0, bytes);
        }
        let memory = Physical::import(self, &exported)?;
        Mapped::new(Arc::new(memory), self.whole(bytes)?)?.region(bytes)
    }

    /// Zeroes memory that nobody else has yet.
    pub(crate) fn clear(&self, region: &Region, offset: usize, bytes: usize) -> Result<()> {
        let region = region.part(offset, bytes)?;
        let stream = self.stream()?;
        self.call(|driver| {
            // SAFETY: S3: within the region, which lives until the stream is empty; nobody else has it yet.
            unsafe { driver.memset8(region.address() as u64, 0, bytes, stream.raw()) }?;
            driver.stream_synchronize(stream.raw())
        })
    }

    pub(crate) fn occupation(&self) -> Result<Option<String>> {
        Ok(self.is_capturing()?.then(|| "a stream that is capturing a graph".to_owned()))
    }

    /// Refuses what would disturb the capture of a graph.
    pub(crate) fn check_free(&self, group: &Group, op: &'static str) -> Result<()> {
        group.check_free(op, &DriverMemory(self.clone()))
    }

    pub(crate) fn after_use(&self, then: Box<dyn FnOnce() + Send + Sync>) {
        self.retire(Box::new(Last(Some(then))));
    }
}

/// What is done when it goes.
struct Last(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}
