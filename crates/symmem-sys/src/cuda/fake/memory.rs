//! Physical memory, addresses, mappings, multicast objects, and memory of the host.
#![allow(unsafe_code)] // S1, S3

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::pages::{self, Label, Span};
use super::state::{Binding, Mapping, Multicast, Physical, Reservation, State};
use super::{Fabric, Fake};
use crate::cuda::driver::VirtualMemory;
use crate::cuda::{
    Access, Device, FabricHandle, Failure, Granularity, HandleType, HostMemory, Memory,
    MemoryProperties, MulticastProperties, PointerInfo, Result, code,
};

/// What tells handles of the fabric from descriptors, for which the driver has the same calls.
const EXPORT_FABRIC: &str = "export_fabric";
const IMPORT_FABRIC: &str = "import_fabric";

impl VirtualMemory for Fake {
    fn granularity(&self, properties: &MemoryProperties, _: Granularity) -> Result<usize> {
        let state = self.enter("cuMemGetAllocationGranularity")?;
        state.config(properties.device).map(|config| config.granularity)
    }

    fn create(&self, bytes: usize, properties: &MemoryProperties) -> Result<Memory> {
        let mut state = self.enter("cuMemCreate")?;
        let &MemoryProperties { device, handle, rdma } = properties;
        let config = state.config(device)?;
        if !config.virtual_memory || (rdma && !config.rdma) {
            return state.refuse(code::NOT_SUPPORTED, "the device cannot");
        }
        match config.fabric {
            Fabric::No if handle.allows(HandleType::Fabric) => {
                return state.refuse(code::NOT_SUPPORTED, "no fabric handles");
            }
            Fabric::NotPermitted if handle.allows(HandleType::Fabric) => {
                return state.refuse(code::NOT_PERMITTED, "the fabric is not set up");
            }
            _ => {}
        }
        state.check_size(bytes, config.granularity)?;
        if state.used(device) + bytes > config.bytes {
            return state.refuse(code::OUT_OF_MEMORY, "the device is full");
        }
        let label = Label { device, handle, multicast: false };
        let file = pages::file(bytes, label).map_err(|error| state.system(error))?;
        let memory = Physical { rdma, ..physical(file, bytes, label, true) };
        Ok(state.keep(memory))
    }

    unsafe fn release(&self, memory: Memory) -> Result<()> {
        let mut state = self.enter("cuMemRelease")?;
        state.memory(memory.raw())?.handles -= 1;
        state.sweep();
        Ok(())
    }

    fn reserve(&self, bytes: usize, alignment: usize) -> Result<u64> {
        let mut state = self.enter("cuMemAddressReserve")?;
        let step = state.step();
        state.check_size(bytes, step)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            return state.refuse(code::INVALID_VALUE, "the alignment is no power of two");
        }
        let alignment = alignment.max(step);
        let whole = Span::reserve(bytes + alignment).map_err(|error| state.system(error))?;
        let address = whole.address.next_multiple_of(alignment as u64);
        state.reservations.insert(address, Reservation { bytes, whole });
        Ok(address)
    }

    unsafe fn free_address(&self, address: u64, bytes: usize) -> Result<()> {
        let mut state = self.enter("cuMemAddressFree")?;
        let Some(found) = state.reservations.get(&address).filter(|found| found.bytes == bytes)
        else {
            return state.refuse(code::INVALID_VALUE, "that is no whole reservation");
        };
        let whole = found.whole;
        if state.mappings.range(address..address + bytes as u64).next().is_some() {
            return state.refuse(code::INVALID_VALUE, "something is still mapped there");
        }
        state.reservations.remove(&address);
        // SAFETY: nothing is mapped there, and the caller does not use the addresses.
        unsafe { whole.free() }.map_err(|error| state.system(error))
    }

    unsafe fn map(&self, address: u64, bytes: usize, offset: usize, memory: Memory) -> Result<()> {
        let mut state = self.enter("cuMemMap")?;
        let step = state.step();
        state.check_size(bytes, step)?;
        let id = memory.raw();
        let found = state.memory(id)?;
        if !offset.is_multiple_of(step) || offset.saturating_add(bytes) > found.bytes {
            return state.refuse(code::INVALID_VALUE, "that is not within the memory");
        }
        if found.multicast.as_ref().is_some_and(|multicast| !multicast.is_complete()) {
            return state.refuse(code::INVALID_VALUE, "devices are still to be added");
        }
        state.check_free(address, bytes)?;
        let (file, span) = (state.memory(id)?.file.as_fd(), Span { address, bytes });
        // SAFETY: the addresses lie in a reservation of the caller's, and nothing is mapped there.
        let put = unsafe { span.put(file, offset) };
        put.map_err(|error| state.system(error))?;
        state.memory(id)?.mappings += 1;
        state.mappings.insert(address, Mapping { bytes, memory: id, access: BTreeMap::new() });
        Ok(())
    }

    unsafe fn unmap(&self, address: u64, bytes: usize) -> Result<()> {
        let mut state = self.enter("cuMemUnmap")?;
        for start in state.covering(address, bytes)? {
            let Some(mapping) = state.mappings.remove(&start) else { continue };
            if let Some(memory) = state.memories.get_mut(&mapping.memory) {
                memory.mappings -= 1;
            }
        }
        state.sweep();
        // SAFETY: the addresses were mapped, and the caller does not use them.
        unsafe { Span { address, bytes }.clear() }.map_err(|error| state.system(error))
    }

    unsafe fn set_access(
        &self,
        address: u64,
        bytes: usize,
        devices: &[Device],
        access: Access,
    ) -> Result<()> {
        let mut state = self.enter("cuMemSetAccess")?;
        for start in state.covering(address, bytes)? {
            let owner =
                state.mappings.get(&start).and_then(|found| state.memories.get(&found.memory));
            let owner = owner.map_or(Device(-1), |memory| memory.device);
            for &device in devices {
                state.config(device)?;
                let peers = state.config(owner).is_ok_and(|config| config.peers);
                if device != owner && owner.0 >= 0 && !peers {
                    return state.refuse(code::INVALID_DEVICE, "the devices are no peers");
                }
            }
            let Some(mapping) = state.mappings.get_mut(&start) else { continue };
            mapping.access.extend(devices.iter().map(|device| (device.0, access)));
            let most = mapping.access.values().copied().max_by_key(|access| *access as i32);
            let span = Span { address: start, bytes: mapping.bytes };
            // SAFETY: it is mapped, and the caller does not use what is taken away.
            unsafe { span.allow(most.unwrap_or(Access::None)) }
                .map_err(|error| state.system(error))?;
        }
        Ok(())
    }

    fn export_fd(&self, memory: Memory) -> Result<OwnedFd> {
        let mut state = self.enter("cuMemExportToShareableHandle")?;
        let found = state.memory(memory.raw())?;
        if !found.handle.allows(HandleType::Fd) {
            return state.refuse(code::INVALID_VALUE, "it was not created for descriptors");
        }
        let file = found.file.try_clone();
        file.map_err(|error| state.failure(code::UNKNOWN, error.to_string()))
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Memory> {
        let mut state = self.enter("cuMemImportFromShareableHandle")?;
        let file = fd.try_clone_to_owned();
        let file = file.map_err(|error| state.failure(code::UNKNOWN, error.to_string()))?;
        state.import(file, HandleType::Fd)
    }

    fn export_fabric(&self, memory: Memory) -> Result<FabricHandle> {
        let mut state = self.enter("cuMemExportToShareableHandle")?;
        let found = state.memory(memory.raw())?;
        if !found.handle.allows(HandleType::Fabric) {
            return state.refuse(code::INVALID_VALUE, "it was not created for the fabric");
        }
        let handle = pages::fabric_handle(found.file.as_fd());
        state.enter(EXPORT_FABRIC)?;
        Ok(handle)
    }

    fn import_fabric(&self, handle: &FabricHandle) -> Result<Memory> {
        let mut state = self.enter("cuMemImportFromShareableHandle")?;
        state.enter(IMPORT_FABRIC)?;
        let Some(file) = pages::follow(handle) else {
            return state.refuse(code::INVALID_VALUE, "the handle leads nowhere");
        };
        state.import(file, HandleType::Fabric)
    }

    fn retain(&self, address: u64) -> Result<Memory> {
        let mut state = self.enter("cuMemRetainAllocationHandle")?;
        let Some(id) = state.mapping_of(address).map(|(_, mapping)| mapping.memory) else {
            return state.refuse(code::INVALID_VALUE, "nothing is mapped there");
        };
        if let Some(memory) = state.memories.get_mut(&id) {
            memory.handles += 1;
        }
        Ok(Memory::new(id))
    }

    fn pointer_info(&self, address: u64) -> Result<PointerInfo> {
        let state = self.enter("cuPointerGetAttribute")?;
        let host = state.hosts.range(..=address).next_back();
        if let Some((_, span)) = host.filter(|(start, span)| address < **start + span.bytes as u64)
        {
            let (base, bytes) = (span.address, span.bytes);
            return Ok(PointerInfo { device: Device(0), context: None, host: true, base, bytes });
        }
        let theirs = |&&(from, to, device): &&(u64, u64, Device)| {
            (from..to).contains(&address) && device.0 >= 0
        };
        if let Some(&(base, end, device)) = state.adopted.iter().find(theirs) {
            let bytes = (end - base) as usize;
            return Ok(PointerInfo { device, context: None, host: false, base, bytes });
        }
        let found = state.mapping_of(address);
        let owner = found.and_then(|(_, mapping)| state.memories.get(&mapping.memory));
        match (found, owner) {
            (Some((base, mapping)), Some(memory)) => Ok(PointerInfo {
                device: memory.device,
                context: None,
                host: false,
                base,
                bytes: mapping.bytes,
            }),
            _ => state.refuse(code::INVALID_VALUE, "the driver does not know the address"),
        }
    }

    fn multicast_granularity(&self, _: &MulticastProperties, _: Granularity) -> Result<usize> {
        let state = self.enter("cuMulticastGetGranularity")?;
        state.some_multicast()?;
        Ok(state.step())
    }

    fn multicast_create(&self, properties: &MulticastProperties) -> Result<Memory> {
        let mut state = self.enter("cuMulticastCreate")?;
        state.some_multicast()?;
        let &MulticastProperties { devices, bytes, handle } = properties;
        state.check_size(bytes, state.step())?;
        let label = Label { device: Device(-1), handle, multicast: true };
        let file = pages::file(bytes, label).map_err(|error| state.system(error))?;
        let mut object = physical(file, bytes, label, false);
        object.multicast = Some(Multicast { devices: devices as usize, ..Multicast::default() });
        Ok(state.keep(object))
    }

    fn multicast_add(&self, multicast: Memory, device: Device) -> Result<()> {
        let mut state = self.enter("cuMulticastAddDevice")?;
        if !state.config(device)?.multicast {
            return state.refuse(code::NOT_SUPPORTED, "the device cannot");
        }
        let object = state.multicast_of(multicast)?;
        if object.devices != 0 && object.added.len() >= object.devices {
            return state.refuse(code::INVALID_VALUE, "all devices were added already");
        }
        if !object.added.insert(device.0) {
            return state.refuse(code::INVALID_VALUE, "the device was added already");
        }
        Ok(())
    }

    unsafe fn multicast_bind(
        &self,
        multicast: Memory,
        offset: usize,
        memory: Memory,
        memory_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let mut state = self.enter("cuMulticastBindMem")?;
        state.check_size(bytes, state.step())?;
        let bound = state.memory(memory.raw())?;
        let (device, id) = (bound.device, memory.raw());
        if bound.multicast.is_some() || memory_offset.saturating_add(bytes) > bound.bytes {
            return state.refuse(code::INVALID_VALUE, "that is not within the memory");
        }
        let size = state.memory(multicast.raw())?.bytes;
        let object = state.multicast_of(multicast)?;
        if !object.is_complete() || !object.added.contains(&device.0) {
            return state.refuse(code::INVALID_VALUE, "devices are still to be added");
        }
        let end = offset.saturating_add(bytes);
        let overlaps = |other: &Binding| {
            other.device == device && offset < other.offset + other.bytes && other.offset < end
        };
        if end > size || object.bound.iter().any(overlaps) {
            return state.refuse(code::INVALID_VALUE, "that part is not free");
        }
        object.bound.push(Binding { device, offset, bytes, memory: id });
        state.memory(id)?.bindings += 1;
        Ok(())
    }

    unsafe fn multicast_unbind(
        &self,
        multicast: Memory,
        device: Device,
        offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let mut state = self.enter("cuMulticastUnbind")?;
        let object = state.multicast_of(multicast)?;
        let is_it =
            |found: &Binding| (found.device, found.offset, found.bytes) == (device, offset, bytes);
        let Some(at) = object.bound.iter().position(is_it) else {
            return state.refuse(code::INVALID_VALUE, "nothing is bound just there");
        };
        let memory = object.bound.swap_remove(at).memory;
        if let Some(memory) = state.memories.get_mut(&memory) {
            memory.bindings -= 1;
        }
        state.sweep();
        Ok(())
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostMemory> {
        let mut state = self.enter("cuMemHostAlloc")?;
        state.current()?;
        if bytes == 0 {
            return state.refuse(code::INVALID_VALUE, "no bytes were asked for");
        }
        let (span, pointer) = Span::allocate(bytes).map_err(|error| state.system(error))?;
        let Some(host) = pointer else {
            return state.refuse(code::OUT_OF_MEMORY, "the system gave address 0");
        };
        state.hosts.insert(span.address, span);
        Ok(HostMemory { host, device: span.address })
    }

    unsafe fn host_free(&self, host: NonNull<u8>) -> Result<()> {
        let mut state = self.enter("cuMemFreeHost")?;
        let Some(span) = state.hosts.remove(&(host.as_ptr().expose_provenance() as u64)) else {
            return state.refuse(code::INVALID_VALUE, "it is not from cuMemHostAlloc");
        };
        // SAFETY: it is from `allocate`, and the caller does not use it.
        unsafe { span.free() }.map_err(|error| state.system(error))
    }
}

impl Multicast {
    /// Whether all devices were added, as far as this process knows.
    fn is_complete(&self) -> bool {
        self.added.len() >= self.devices
    }
}

impl State {
    /// What all sizes must be multiples of.
    fn step(&self) -> usize {
        self.devices.iter().map(|config| config.granularity).max().unwrap_or(4096)
    }

    fn some_multicast(&self) -> Result<()> {
        if self.devices.iter().any(|config| config.multicast) {
            return Ok(());
        }
        self.refuse(code::NOT_SUPPORTED, "no device can")
    }

    fn system(&self, error: rustix::io::Errno) -> Failure {
        self.failure(code::OUT_OF_MEMORY, error.to_string())
    }

    fn check_size(&self, bytes: usize, granularity: usize) -> Result<()> {
        if bytes > 0 && bytes.is_multiple_of(granularity) {
            return Ok(());
        }
        self.refuse(code::INVALID_VALUE, format!("{bytes} is no multiple of {granularity}"))
    }

    /// The addresses lie in one reservation, and nothing is mapped there.
    fn check_free(&self, address: u64, bytes: usize) -> Result<()> {
        let Some(end) = address.checked_add(bytes as u64) else {
            return self.refuse(code::INVALID_VALUE, "the addresses wrap around");
        };
        let reserved = self.reservations.range(..=address).next_back();
        if reserved.is_none_or(|(start, found)| end > start + found.bytes as u64) {
            return self.refuse(code::INVALID_VALUE, "the addresses are not reserved");
        }
        let taken = self.mappings.range(..end).next_back();
        if taken.is_some_and(|(start, found)| start + found.bytes as u64 > address) {
            return self.refuse(code::INVALID_VALUE, "something is mapped there");
        }
        Ok(())
    }

    /// The starts of the mappings that make up exactly these addresses.
    fn covering(&self, address: u64, bytes: usize) -> Result<Vec<u64>> {
        let (mut at, end, mut starts) = (address, address.saturating_add(bytes as u64), Vec::new());
        while let Some(mapping) = self.mappings.get(&at).filter(|_| at < end) {
            starts.push(at);
            at += mapping.bytes as u64;
        }
        if at == end && !starts.is_empty() {
            return Ok(starts);
        }
        self.refuse(code::INVALID_VALUE, "those are no whole mappings")
    }

    fn keep(&mut self, memory: Physical) -> Memory {
        let id = self.number() as u64;
        self.memories.insert(id, memory);
        Memory::new(id)
    }

    fn import(&mut self, file: OwnedFd, by: HandleType) -> Result<Memory> {
        match pages::recognise(file.as_fd()) {
            Some((label, bytes)) if label.handle.allows(by) => {
                Ok(self.keep(physical(file, bytes, label, false)))
            }
            _ => self.refuse(code::INVALID_VALUE, "that is no exported memory"),
        }
    }

    fn multicast_of(&mut self, handle: Memory) -> Result<&mut Multicast> {
        let call = self.call;
        let none = || Failure::new(call, code::INVALID_VALUE, "that is no multicast object");
        self.memory(handle.raw())?.multicast.as_mut().ok_or_else(none)
    }
}

fn physical(file: OwnedFd, bytes: usize, label: Label, created: bool) -> Physical {
    let Label { device, handle, multicast } = label;
    let multicast = multicast.then(Multicast::default);
    Physical {
        file,
        bytes,
        device,
        handle,
        created,
        rdma: false,
        handles: 1,
        mappings: 0,
        bindings: 0,
        multicast,
    }
}
