//! Physical memory, addresses, mappings, multicast objects, and memory of the host.
#![allow(unsafe_code)] // S1, S3

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::pages::{self, Label, Span};
use super::state::{Binding, Mapping, Multicast, Physical, Reservation, State};
use super::{Fabric, Fake};
use crate::cuda::driver::{VirtualMemory, refuse};
use crate::cuda::{
    Access, Device, FabricHandle, Failure, Granularity, HandleType, HostMemory, Memory,
    MemoryProperties, MulticastProperties, PointerInfo, Result, code,
};

/// What tells handles of the fabric from descriptors, for which the driver has the same calls.
const EXPORT_FABRIC: &str = "export_fabric";
const IMPORT_FABRIC: &str = "import_fabric";

impl VirtualMemory for Fake {
    fn granularity(&self, properties: &MemoryProperties, _: Granularity) -> Result<usize> {
        let call = "cuMemGetAllocationGranularity";
        self.count(call)?;
        Ok(self.config(call, properties.device)?.granularity)
    }

    fn create(&self, bytes: usize, properties: &MemoryProperties) -> Result<Memory> {
        let call = "cuMemCreate";
        let mut state = self.enter(call)?;
        let &MemoryProperties { device, handle, rdma } = properties;
        let config = self.config(call, device)?;
        if !config.virtual_memory || (rdma && !config.rdma) {
            return refuse(call, code::NOT_SUPPORTED, "the device cannot");
        }
        match config.fabric {
            Fabric::No if handle.allows(HandleType::Fabric) => {
                return refuse(call, code::NOT_SUPPORTED, "no fabric handles");
            }
            Fabric::NotPermitted if handle.allows(HandleType::Fabric) => {
                return refuse(call, code::NOT_PERMITTED, "the fabric is not set up");
            }
            _ => {}
        }
        check_size(call, bytes, config.granularity)?;
        if state.used(device) + bytes > config.bytes {
            return refuse(call, code::OUT_OF_MEMORY, "the device is full");
        }
        let label = Label { device, handle, multicast: false };
        let file = pages::file(bytes, label).map_err(|error| system(call, error))?;
        let memory = Physical { rdma, ..physical(file, bytes, label, true) };
        Ok(insert(&mut state, memory))
    }

    unsafe fn release(&self, memory: Memory) -> Result<()> {
        let call = "cuMemRelease";
        let mut state = self.enter(call)?;
        state.memory(call, memory.raw())?.handles -= 1;
        state.sweep();
        Ok(())
    }

    fn reserve(&self, bytes: usize, alignment: usize) -> Result<u64> {
        let call = "cuMemAddressReserve";
        let mut state = self.enter(call)?;
        let step = self.step();
        check_size(call, bytes, step)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            return refuse(call, code::INVALID_VALUE, "the alignment is no power of two");
        }
        let alignment = alignment.max(step);
        let whole = Span::reserve(bytes + alignment).map_err(|error| system(call, error))?;
        let address = whole.address.next_multiple_of(alignment as u64);
        state.reservations.insert(address, Reservation { bytes, whole });
        Ok(address)
    }

    unsafe fn free_address(&self, address: u64, bytes: usize) -> Result<()> {
        let call = "cuMemAddressFree";
        let mut state = self.enter(call)?;
        let Some(found) = state.reservations.get(&address).filter(|found| found.bytes == bytes)
        else {
            return refuse(call, code::INVALID_VALUE, "that is no whole reservation");
        };
        let whole = found.whole;
        if state.mappings.range(address..address + bytes as u64).next().is_some() {
            return refuse(call, code::INVALID_VALUE, "something is still mapped there");
        }
        state.reservations.remove(&address);
        // SAFETY: nothing is mapped there, and the caller does not use the addresses.
        unsafe { whole.free() }.map_err(|error| system(call, error))
    }

    unsafe fn map(&self, address: u64, bytes: usize, offset: usize, memory: Memory) -> Result<()> {
        let call = "cuMemMap";
        let mut state = self.enter(call)?;
        let step = self.step();
        check_size(call, bytes, step)?;
        let id = memory.raw();
        let found = state.memory(call, id)?;
        if !offset.is_multiple_of(step) || offset.saturating_add(bytes) > found.bytes {
            return refuse(call, code::INVALID_VALUE, "that is not within the memory");
        }
        if found.multicast.as_ref().is_some_and(|multicast| !multicast.is_complete()) {
            return refuse(call, code::INVALID_VALUE, "devices are still to be added");
        }
        check_free(call, &state, address, bytes)?;
        let found = state.memory(call, id)?;
        let span = Span { address, bytes };
        // SAFETY: the addresses lie in a reservation of the caller's, and nothing is mapped there.
        unsafe { span.put(found.file.as_fd(), offset) }.map_err(|error| system(call, error))?;
        found.mappings += 1;
        state.mappings.insert(address, Mapping { bytes, memory: id, access: BTreeMap::new() });
        Ok(())
    }

    unsafe fn unmap(&self, address: u64, bytes: usize) -> Result<()> {
        let call = "cuMemUnmap";
        let mut state = self.enter(call)?;
        for start in covering(call, &state, address, bytes)? {
            let Some(mapping) = state.mappings.remove(&start) else { continue };
            if let Some(memory) = state.memories.get_mut(&mapping.memory) {
                memory.mappings -= 1;
            }
        }
        state.sweep();
        // SAFETY: the addresses were mapped, and the caller does not use them.
        unsafe { Span { address, bytes }.clear() }.map_err(|error| system(call, error))
    }

    unsafe fn set_access(
        &self,
        address: u64,
        bytes: usize,
        devices: &[Device],
        access: Access,
    ) -> Result<()> {
        let call = "cuMemSetAccess";
        let mut state = self.enter(call)?;
        for start in covering(call, &state, address, bytes)? {
            let owner =
                state.mappings.get(&start).and_then(|found| state.memories.get(&found.memory));
            let owner = owner.map_or(Device(-1), |memory| memory.device);
            for &device in devices {
                self.config(call, device)?;
                let peers = self.config(call, owner).is_ok_and(|config| config.peers);
                if device != owner && owner.0 >= 0 && !peers {
                    return refuse(call, code::INVALID_DEVICE, "the devices are no peers");
                }
            }
            let Some(mapping) = state.mappings.get_mut(&start) else { continue };
            mapping.access.extend(devices.iter().map(|device| (device.0, access)));
            let most = mapping.access.values().copied().max_by_key(|access| *access as i32);
            let span = Span { address: start, bytes: mapping.bytes };
            // SAFETY: it is mapped, and the caller does not use what is taken away.
            unsafe { span.allow(most.unwrap_or(Access::None)) }
                .map_err(|error| system(call, error))?;
        }
        Ok(())
    }

    fn export_fd(&self, memory: Memory) -> Result<OwnedFd> {
        let call = "cuMemExportToShareableHandle";
        let mut state = self.enter(call)?;
        let found = state.memory(call, memory.raw())?;
        if !found.handle.allows(HandleType::Fd) {
            return refuse(call, code::INVALID_VALUE, "it was not created for descriptors");
        }
        found.file.try_clone().or_else(|error| refuse(call, code::UNKNOWN, error.to_string()))
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Memory> {
        let call = "cuMemImportFromShareableHandle";
        let mut state = self.enter(call)?;
        let file = fd.try_clone_to_owned();
        let file = file.or_else(|error| refuse(call, code::UNKNOWN, error.to_string()))?;
        import(call, &mut state, file, HandleType::Fd)
    }

    fn export_fabric(&self, memory: Memory) -> Result<FabricHandle> {
        let call = "cuMemExportToShareableHandle";
        let mut state = self.enter(call)?;
        let found = state.memory(call, memory.raw())?;
        if !found.handle.allows(HandleType::Fabric) {
            return refuse(call, code::INVALID_VALUE, "it was not created for the fabric");
        }
        let handle = pages::fabric_handle(found.file.as_fd());
        state.enter(EXPORT_FABRIC)?;
        Ok(handle)
    }

    fn import_fabric(&self, handle: &FabricHandle) -> Result<Memory> {
        let call = "cuMemImportFromShareableHandle";
        let mut state = self.enter(call)?;
        state.enter(IMPORT_FABRIC)?;
        let Some(file) = pages::follow(handle) else {
            return refuse(call, code::INVALID_VALUE, "the handle leads nowhere");
        };
        import(call, &mut state, file, HandleType::Fabric)
    }

    fn retain(&self, address: u64) -> Result<Memory> {
        let call = "cuMemRetainAllocationHandle";
        let mut state = self.enter(call)?;
        let Some(id) = state.mapping_of(address).map(|(_, mapping)| mapping.memory) else {
            return refuse(call, code::INVALID_VALUE, "nothing is mapped there");
        };
        if let Some(memory) = state.memories.get_mut(&id) {
            memory.handles += 1;
        }
        Ok(Memory::new(id))
    }

    fn pointer_info(&self, address: u64) -> Result<PointerInfo> {
        let call = "cuPointerGetAttribute";
        let state = self.enter(call)?;
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
            _ => refuse(call, code::INVALID_VALUE, "the driver does not know the address"),
        }
    }

    fn multicast_granularity(&self, _: &MulticastProperties, _: Granularity) -> Result<usize> {
        let call = "cuMulticastGetGranularity";
        self.count(call)?;
        self.some_multicast(call)?;
        Ok(self.step())
    }

    fn multicast_create(&self, properties: &MulticastProperties) -> Result<Memory> {
        let call = "cuMulticastCreate";
        let mut state = self.enter(call)?;
        self.some_multicast(call)?;
        let &MulticastProperties { devices, bytes, handle } = properties;
        check_size(call, bytes, self.step())?;
        let label = Label { device: Device(-1), handle, multicast: true };
        let file = pages::file(bytes, label).map_err(|error| system(call, error))?;
        let mut object = physical(file, bytes, label, false);
        object.multicast = Some(Multicast { devices: devices as usize, ..Multicast::default() });
        Ok(insert(&mut state, object))
    }

    fn multicast_add(&self, multicast: Memory, device: Device) -> Result<()> {
        let call = "cuMulticastAddDevice";
        let mut state = self.enter(call)?;
        if !self.config(call, device)?.multicast {
            return refuse(call, code::NOT_SUPPORTED, "the device cannot");
        }
        let object = multicast_of(call, &mut state, multicast)?;
        if object.devices != 0 && object.added.len() >= object.devices {
            return refuse(call, code::INVALID_VALUE, "all devices were added already");
        }
        if !object.added.insert(device.0) {
            return refuse(call, code::INVALID_VALUE, "the device was added already");
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
        let call = "cuMulticastBindMem";
        let mut state = self.enter(call)?;
        check_size(call, bytes, self.step())?;
        let bound = state.memory(call, memory.raw())?;
        let (device, id) = (bound.device, memory.raw());
        if bound.multicast.is_some() || memory_offset.saturating_add(bytes) > bound.bytes {
            return refuse(call, code::INVALID_VALUE, "that is not within the memory");
        }
        let size = state.memory(call, multicast.raw())?.bytes;
        let object = multicast_of(call, &mut state, multicast)?;
        if !object.is_complete() || !object.added.contains(&device.0) {
            return refuse(call, code::INVALID_VALUE, "devices are still to be added");
        }
        let end = offset.saturating_add(bytes);
        let overlaps = |other: &Binding| {
            other.device == device && offset < other.offset + other.bytes && other.offset < end
        };
        if end > size || object.bound.iter().any(overlaps) {
            return refuse(call, code::INVALID_VALUE, "that part is not free");
        }
        object.bound.push(Binding { device, offset, bytes, memory: id });
        state.memory(call, id)?.bindings += 1;
        Ok(())
    }

    unsafe fn multicast_unbind(
        &self,
        multicast: Memory,
        device: Device,
        offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let call = "cuMulticastUnbind";
        let mut state = self.enter(call)?;
        let object = multicast_of(call, &mut state, multicast)?;
        let is_it =
            |found: &Binding| (found.device, found.offset, found.bytes) == (device, offset, bytes);
        let Some(at) = object.bound.iter().position(is_it) else {
            return refuse(call, code::INVALID_VALUE, "nothing is bound just there");
        };
        let memory = object.bound.swap_remove(at).memory;
        if let Some(memory) = state.memories.get_mut(&memory) {
            memory.bindings -= 1;
        }
        state.sweep();
        Ok(())
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostMemory> {
        let call = "cuMemHostAlloc";
        let mut state = self.enter(call)?;
        state.current(call)?;
        if bytes == 0 {
            return refuse(call, code::INVALID_VALUE, "no bytes were asked for");
        }
        let (span, pointer) = Span::allocate(bytes).map_err(|error| system(call, error))?;
        let Some(host) = pointer else {
            return refuse(call, code::OUT_OF_MEMORY, "the system gave address 0");
        };
        state.hosts.insert(span.address, span);
        Ok(HostMemory { host, device: span.address })
    }

    unsafe fn host_free(&self, host: NonNull<u8>) -> Result<()> {
        let call = "cuMemFreeHost";
        let mut state = self.enter(call)?;
        let Some(span) = state.hosts.remove(&(host.as_ptr().expose_provenance() as u64)) else {
            return refuse(call, code::INVALID_VALUE, "it is not from cuMemHostAlloc");
        };
        // SAFETY: it is from `allocate`, and the caller does not use it.
        unsafe { span.free() }.map_err(|error| system(call, error))
    }
}

impl Multicast {
    /// Whether all devices were added, as far as this process knows.
    fn is_complete(&self) -> bool {
        self.added.len() >= self.devices
    }
}

impl Fake {
    /// What all sizes must be multiples of.
    fn step(&self) -> usize {
        self.devices.iter().map(|config| config.granularity).max().unwrap_or(4096)
    }

    fn some_multicast(&self, call: &'static str) -> Result<()> {
        if self.devices.iter().any(|config| config.multicast) {
            return Ok(());
        }
        refuse(call, code::NOT_SUPPORTED, "no device can")
    }
}

fn system(call: &'static str, error: rustix::io::Errno) -> Failure {
    Failure::new(call, code::OUT_OF_MEMORY, error.to_string())
}

fn check_size(call: &'static str, bytes: usize, granularity: usize) -> Result<()> {
    if bytes > 0 && bytes.is_multiple_of(granularity) {
        return Ok(());
    }
    refuse(call, code::INVALID_VALUE, format!("{bytes} is no multiple of {granularity}"))
}

/// The addresses lie in one reservation, and nothing is mapped there.
fn check_free(call: &'static str, state: &State, address: u64, bytes: usize) -> Result<()> {
    let Some(end) = address.checked_add(bytes as u64) else {
        return refuse(call, code::INVALID_VALUE, "the addresses wrap around");
    };
    let reserved = state.reservations.range(..=address).next_back();
    if reserved.is_none_or(|(start, found)| end > start + found.bytes as u64) {
        return refuse(call, code::INVALID_VALUE, "the addresses are not reserved");
    }
    let taken = state.mappings.range(..end).next_back();
    if taken.is_some_and(|(start, found)| start + found.bytes as u64 > address) {
        return refuse(call, code::INVALID_VALUE, "something is mapped there");
    }
    Ok(())
}

/// The starts of the mappings that make up exactly these addresses.
fn covering(call: &'static str, state: &State, address: u64, bytes: usize) -> Result<Vec<u64>> {
    let (mut at, end, mut starts) = (address, address.saturating_add(bytes as u64), Vec::new());
    while at < end {
        let Some(mapping) = state.mappings.get(&at) else {
            return refuse(call, code::INVALID_VALUE, "those are no whole mappings");
        };
        starts.push(at);
        at += mapping.bytes as u64;
    }
    if at == end && !starts.is_empty() {
        return Ok(starts);
    }
    refuse(call, code::INVALID_VALUE, "those are no whole mappings")
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

fn insert(state: &mut State, memory: Physical) -> Memory {
    let id = state.number() as u64;
    state.memories.insert(id, memory);
    Memory::new(id)
}

fn import(call: &'static str, state: &mut State, file: OwnedFd, by: HandleType) -> Result<Memory> {
    match pages::recognise(file.as_fd()) {
        Some((label, bytes)) if label.handle.allows(by) => {
            Ok(insert(state, physical(file, bytes, label, false)))
        }
        _ => refuse(call, code::INVALID_VALUE, "that is no exported memory"),
    }
}

fn multicast_of<'a>(
    call: &'static str,
    state: &'a mut State,
    handle: Memory,
) -> Result<&'a mut Multicast> {
    match state.memory(call, handle.raw())?.multicast.as_mut() {
        Some(object) => Ok(object),
        None => refuse(call, code::INVALID_VALUE, "that is no multicast object"),
    }
}
