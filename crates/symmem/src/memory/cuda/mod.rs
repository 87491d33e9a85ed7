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

use symmem_sys::cuda::{Access, Attribute, Granularity, HandleType, Memory, MemoryProperties};

pub(crate) use fabric::map_pads;
pub(crate) use multicast::agreed;

use crate::cuda::{Gpu, InUse, failed};
use crate::error::{Error, Result};
use crate::group::{Group, no_descriptor};
use crate::memory::region::Region;
use crate::memory::{Allocation, Backend, Device, Exported};
use crate::symmetric::Handle;

/// A backend whose memory lies on a device.
pub(crate) trait DeviceBackend: Backend + Any {
    /// A rank of the group that not all others reach by an address. The same on all ranks.
    fn unreached(&self, _group: &Group) -> Option<usize> {
        None
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
    /// What was exported, here or by a peer.
    pub(crate) fn import(gpu: &Gpu, exported: &Exported) -> Result<Self> {
        let memory = match exported {
            Exported::Descriptor(fd) => gpu.driver().import_fd(fd.as_fd()),
            Exported::Bytes(handle) => gpu.driver().import_fabric(handle),
            Exported::Mapping(_) => return Err(no_descriptor()),
        };
        Ok(Self { gpu: gpu.clone(), memory: memory.map_err(failed)? })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: S4: ours, from one create or import, and not used again.
        if let Err(e) = unsafe { self.gpu.driver().release(self.memory) } {
            tracing::warn!("{e}");
        }
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
        if let Err(e) = unsafe { self.gpu.driver().free_address(self.address, self.bytes) } {
            tracing::warn!("{e}");
        }
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
        Region::of_device(address, whole, Box::new(InUse::new(gpu, self)))?.part(0, bytes)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: S4: our own mapping; S1: nobody has a region of it any more, and nothing runs: see `InUse`.
        if let Err(e) = unsafe { self.at.gpu.driver().unmap(self.at.address, self.at.bytes) } {
            tracing::warn!("{e}");
        }
    }
}

/// Memory that another library of this process has allocated by the driver, for a peer.
impl Gpu {
    /// A descriptor of what is mapped at `address`.
    pub(crate) fn export_at(&self, address: u64) -> Result<Exported> {
        let memory = self.mapped_at(address)?;
        self.driver().export_fd(memory.memory).map(Exported::Descriptor).map_err(failed)
    }

    /// A fabric handle of it, where it has one.
    pub(crate) fn export_fabric_at(&self, address: u64) -> Result<Exported> {
        let memory = self.mapped_at(address)?;
        self.driver().export_fabric(memory.memory).map(Exported::Bytes).map_err(failed)
    }

    /// Bytes of the range in which `address` is the first.
    pub(crate) fn range_at(&self, address: u64) -> Result<usize> {
        let info = self.call(|driver| driver.pointer_info(address))?;
        Ok((info.base + info.bytes as u64).saturating_sub(address) as usize)
    }

    fn mapped_at(&self, address: u64) -> Result<Physical> {
        let memory = self.driver().retain(address).map_err(failed)?;
        Ok(Physical { gpu: self.clone(), memory })
    }
}

struct Allocated {
    memory: Arc<Physical>,
    region: Region,
}

impl Allocation for Allocated {
    fn region(&self) -> &Region {
        &self.region
    }

    fn export(&self) -> Result<Exported> {
        let driver = self.memory.gpu.driver();
        driver.export_fd(self.memory.memory).map(Exported::Descriptor).map_err(failed)
    }

    fn export_fabric(&self) -> Result<Exported> {
        let driver = self.memory.gpu.driver();
        driver.export_fabric(self.memory.memory).map(Exported::Bytes).map_err(failed)
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
        bytes.checked_next_multiple_of(granularity).ok_or_else(|| Error::Unavailable {
            what: format!("{bytes} bytes of {self:?}"),
            why: "they do not fit the address space".into(),
        })
    }
}

impl Backend for DriverMemory {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> Device {
        Device::Cuda(self.0.number())
    }

    fn probe(&self) -> Result<()> {
        self.allocate(1).map(drop)
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<dyn Allocation>> {
        let gpu = &self.0;
        gpu.collect();
        let whole = gpu.whole(bytes)?;
        let properties = gpu.properties(gpu.handle_type());
        let memory = gpu.driver().create(whole, &properties).map_err(failed)?;
        let memory = Arc::new(Physical { gpu: gpu.clone(), memory });
        let region = Mapped::new(Arc::clone(&memory), whole)?.region(bytes)?;
        gpu.clear(&region, 0, bytes)?;
        Ok(Arc::new(Allocated { memory, region }))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        self.0.import(exported, bytes)
    }

    fn clear(&self, region: &Region, offset: usize, bytes: usize) -> Result<()> {
        self.0.clear(region, offset, bytes)
    }

    fn occupation(&self) -> Result<Option<String>> {
        self.0.occupation()
    }

    fn after_use(&self, then: Box<dyn FnOnce() + Send + Sync>) {
        self.0.after_use(then);
    }
}

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
        let stream = self.service()?;
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
