//! Physical memory, addresses, mappings, multicast objects, and pinned memory of the host.
#![allow(unsafe_code)] // S4

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use super::Cuda;
use crate::cuda::driver::{VirtualMemory, refuse};
use crate::cuda::raw::{self, AccessDesc};
use crate::cuda::{
    Access, Context, Device, FabricHandle, Granularity, HandleType, HostMemory, Memory,
    MemoryProperties, MulticastProperties, PointerInfo, Result, code,
};
use crate::table::{methods, written};

impl VirtualMemory for Cuda {
    methods! {
        // It reads the properties and writes the number.
        fn granularity(properties: &MemoryProperties, which: Granularity) -> usize = |bytes|
            cuMemGetAllocationGranularity(bytes, &properties.into(), which as c_int);
        // It reads the properties and writes the handle.
        fn create(bytes: usize, properties: &MemoryProperties) -> Memory =
            |handle| cuMemCreate(handle, bytes, &properties.into(), 0) => Memory::new;
        // The handle is live, and the caller does not use it again.
        unsafe fn release(memory: Memory) = cuMemRelease(memory.raw());
        // It only writes the address.
        fn reserve(bytes: usize, alignment: usize) -> u64 =
            |address| cuMemAddressReserve(address, bytes, alignment, 0, 0);
        // The addresses are the caller's.
        unsafe fn free_address(address: u64, bytes: usize) = cuMemAddressFree(address, bytes);
        // The addresses are the caller's.
        unsafe fn map(address: u64, bytes: usize, offset: usize, memory: Memory) =
            cuMemMap(address, bytes, offset, memory.raw(), 0);
        // The mapping is the caller's, and nobody uses it.
        unsafe fn unmap(address: u64, bytes: usize) = cuMemUnmap(address, bytes);
        // The driver only looks the address up.
        fn retain(address: u64) -> Memory =
            |handle| cuMemRetainAllocationHandle(handle, address) => Memory::new;
        // It reads the properties and writes the number.
        fn multicast_granularity(properties: &MulticastProperties, which: Granularity) -> usize =
            |bytes| cuMulticastGetGranularity(bytes, &properties.into(), which as c_int);
        // It reads the properties and writes the handle.
        fn multicast_create(properties: &MulticastProperties) -> Memory =
            |handle| cuMulticastCreate(handle, &properties.into()) => Memory::new;
        // The handle is live.
        fn multicast_add(multicast: Memory, device: Device) =
            cuMulticastAddDevice(multicast.raw(), device.0);
        // Both handles are live and the caller's.
        unsafe fn multicast_bind(
            multicast: Memory, offset: usize, memory: Memory, memory_offset: usize, bytes: usize,
        ) = cuMulticastBindMem(multicast.raw(), offset, memory.raw(), memory_offset, bytes, 0);
        // The handle is live, and nobody uses the multicast address.
        unsafe fn multicast_unbind(
            multicast: Memory, device: Device, offset: usize, bytes: usize,
        ) = cuMulticastUnbind(multicast.raw(), device.0, offset, bytes);
        // The caller has it from `host_alloc` and no more use for it.
        unsafe fn host_free(host: NonNull<u8>) = cuMemFreeHost(host.as_ptr().cast());
    }

    unsafe fn set_access(
        &self,
        address: u64,
        bytes: usize,
        devices: &[Device],
        access: Access,
    ) -> Result<()> {
        let flags = access as c_int;
        let describe = |&device: &Device| AccessDesc { location: device.into(), flags };
        let list: Vec<_> = devices.iter().map(describe).collect();
        // SAFETY: the mapping is the caller's; the list is read during the call.
        unsafe { self.c.cuMemSetAccess(address, bytes, list.as_ptr(), list.len()) }
    }

    fn export_fd(&self, memory: Memory) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        let (to, kind) = ((&raw mut fd).cast(), HandleType::Fd as c_int);
        // SAFETY: a descriptor is an int, which it writes.
        unsafe { self.c.cuMemExportToShareableHandle(to, memory.raw(), kind, 0) }?;
        // SAFETY: the descriptor is new, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Memory> {
        // The descriptor itself travels in the place of a pointer to a handle.
        let from = std::ptr::without_provenance_mut(fd.as_raw_fd().cast_unsigned() as usize);
        let kind = HandleType::Fd as c_int;
        // SAFETY: the descriptor is open, and the driver checks what it is.
        written(|handle| unsafe { self.c.cuMemImportFromShareableHandle(handle, from, kind) })
            .map(Memory::new)
    }

    fn export_fabric(&self, memory: Memory) -> Result<FabricHandle> {
        let mut bytes = [0; 64];
        let (to, kind) = ((&raw mut bytes).cast(), HandleType::Fabric as c_int);
        // SAFETY: a fabric handle is 64 bytes, which it writes.
        unsafe { self.c.cuMemExportToShareableHandle(to, memory.raw(), kind, 0) }?;
        Ok(bytes)
    }

    fn import_fabric(&self, handle: &FabricHandle) -> Result<Memory> {
        let mut bytes = *handle;
        let (from, kind) = ((&raw mut bytes).cast(), HandleType::Fabric as c_int);
        // SAFETY: it reads the 64 bytes, and checks them.
        written(|handle| unsafe { self.c.cuMemImportFromShareableHandle(handle, from, kind) })
            .map(Memory::new)
    }

    fn pointer_info(&self, address: u64) -> Result<PointerInfo> {
        let (mut device, mut context, mut memory_type) = (-1_i32, 0_usize, 0_u32);
        let (mut base, mut bytes) = (0_u64, 0_usize);
        let ask = |value: *mut c_void, which: c_int| {
            // SAFETY: each of the five answers is as wide as the variable it goes to.
            unsafe { self.c.cuPointerGetAttribute(value, which, address) }
        };
        ask((&raw mut device).cast(), raw::POINTER_DEVICE)?;
        ask((&raw mut memory_type).cast(), raw::POINTER_MEMORY_TYPE)?;
        ask((&raw mut base).cast(), raw::POINTER_RANGE_START)?;
        ask((&raw mut bytes).cast(), raw::POINTER_RANGE_SIZE)?;
        // Memory that was mapped has no context, and some drivers call the question an error then.
        let known = ask((&raw mut context).cast(), raw::POINTER_CONTEXT).is_ok();
        Ok(PointerInfo {
            device: Device(device),
            context: (known && context != 0).then(|| Context::new(context)),
            host: memory_type == raw::MEMORY_TYPE_HOST,
            base,
            bytes,
        })
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostMemory> {
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = raw::HOST_PORTABLE | raw::HOST_MAPPED;
        // SAFETY: it only writes the pointer.
        unsafe { self.c.cuMemHostAlloc(&mut host, bytes, flags) }?;
        let Some(found) = NonNull::new(host.cast::<u8>()) else {
            return refuse("cuMemHostAlloc", code::INVALID_VALUE, "no bytes were asked for");
        };
        // SAFETY: the memory is the one just allocated.
        let device = written(|at| unsafe { self.c.cuMemHostGetDevicePointer(at, host, 0) });
        let device = device.inspect_err(|_| {
            // SAFETY: nobody has seen it yet. The first failure is the one to report.
            let _ = unsafe { self.c.cuMemFreeHost(host) };
        })?;
        Ok(HostMemory { host: found, device })
    }
}
