//! Devices and contexts.
#![allow(unsafe_code)] // S4

use std::ffi::c_int;

use super::{Cuda, text};
use crate::cuda::driver::{Devices, refuse};
use crate::cuda::{Attribute, Context, Device, MemoryInfo, P2pAttribute, Result, code};

impl Devices for Cuda {
    fn init(&self) -> Result<()> {
        // SAFETY: may be called at any time, and again.
        unsafe { self.c.cuInit(0) }
    }

    fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDriverGetVersion(&mut version) }?;
        Ok(version)
    }

    fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceGetCount(&mut count) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn device(&self, ordinal: usize) -> Result<Device> {
        let Ok(ordinal) = c_int::try_from(ordinal) else {
            return refuse("cuDeviceGet", code::INVALID_DEVICE, "no device has such a number");
        };
        let mut device = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceGet(&mut device, ordinal) }?;
        Ok(Device(device))
    }

    fn device_name(&self, device: Device) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: it writes at most 256 bytes.
        unsafe { self.c.cuDeviceGetName(name.as_mut_ptr().cast(), 256, device.0) }?;
        Ok(text(&name))
    }

    fn device_uuid(&self, device: Device) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: it writes 16 bytes.
        unsafe { self.c.cuDeviceGetUuid(&mut uuid, device.0) }?;
        Ok(uuid)
    }

    fn pci_bus_id(&self, device: Device) -> Result<String> {
        let mut id = [0_u8; 32];
        // SAFETY: it writes at most 32 bytes.
        unsafe { self.c.cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 32, device.0) }?;
        Ok(text(&id).to_lowercase())
    }

    fn total_memory(&self, device: Device) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceTotalMem(&mut bytes, device.0) }?;
        Ok(bytes)
    }

    fn attribute(&self, attribute: Attribute, device: Device) -> Result<i32> {
        let mut value = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceGetAttribute(&mut value, attribute as c_int, device.0) }?;
        Ok(value)
    }

    fn can_access_peer(&self, device: Device, peer: Device) -> Result<bool> {
        let mut can = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceCanAccessPeer(&mut can, device.0, peer.0) }?;
        Ok(can != 0)
    }

    fn p2p_attribute(&self, which: P2pAttribute, device: Device, peer: Device) -> Result<i32> {
        let mut value = 0;
        let which = which as c_int;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuDeviceGetP2PAttribute(&mut value, which, device.0, peer.0) }?;
        Ok(value)
    }

    fn context_retain(&self, device: Device) -> Result<Context> {
        let mut context = 0;
        // SAFETY: it only writes the handle.
        unsafe { self.c.cuDevicePrimaryCtxRetain(&mut context, device.0) }?;
        Ok(Context::new(context))
    }

    unsafe fn context_release(&self, device: Device) -> Result<()> {
        // SAFETY: the caller has no more use for the context.
        unsafe { self.c.cuDevicePrimaryCtxRelease(device.0) }
    }

    fn context_set(&self, context: Option<Context>) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuCtxSetCurrent(context.map_or(0, Context::raw)) }
    }

    fn context_current(&self) -> Result<Option<Context>> {
        let mut context = 0;
        // SAFETY: it only writes the handle.
        unsafe { self.c.cuCtxGetCurrent(&mut context) }?;
        Ok((context != 0).then(|| Context::new(context)))
    }

    fn context_push(&self, context: Context) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuCtxPushCurrent(context.raw()) }
    }

    fn context_pop(&self) -> Result<Context> {
        let mut context = 0;
        // SAFETY: it only writes the handle.
        unsafe { self.c.cuCtxPopCurrent(&mut context) }?;
        Ok(Context::new(context))
    }

    fn context_device(&self) -> Result<Device> {
        let mut device = 0;
        // SAFETY: it only writes the number.
        unsafe { self.c.cuCtxGetDevice(&mut device) }?;
        Ok(Device(device))
    }

    fn context_synchronize(&self) -> Result<()> {
        // SAFETY: it only waits.
        unsafe { self.c.cuCtxSynchronize() }
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it only writes the numbers.
        unsafe { self.c.cuMemGetInfo(&mut free, &mut total) }?;
        Ok(MemoryInfo { free, total })
    }
}
