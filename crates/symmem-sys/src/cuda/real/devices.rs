//! Devices and contexts.
#![allow(unsafe_code)] // S4

use std::ffi::c_int;

use super::Cuda;
use crate::cuda::driver::{Devices, refuse};
use crate::cuda::{Attribute, Context, Device, MemoryInfo, P2pAttribute, Result, code};
use crate::table::{written, written_text};

impl Devices for Cuda {
    fn init(&self) -> Result<()> {
        // SAFETY: may be called at any time, and again.
        unsafe { self.c.cuInit(0) }
    }

    fn version(&self) -> Result<i32> {
        // SAFETY: it only writes the number.
        written(|version| unsafe { self.c.cuDriverGetVersion(version) })
    }

    fn device_count(&self) -> Result<usize> {
        // SAFETY: it only writes the number.
        let count = written(|count| unsafe { self.c.cuDeviceGetCount(count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn device(&self, ordinal: usize) -> Result<Device> {
        let Ok(ordinal) = c_int::try_from(ordinal) else {
            return refuse("cuDeviceGet", code::INVALID_DEVICE, "no device has such a number");
        };
        // SAFETY: it only writes the number.
        written(|device| unsafe { self.c.cuDeviceGet(device, ordinal) }).map(Device)
    }

    fn device_name(&self, device: Device) -> Result<String> {
        // SAFETY: it writes at most 256 bytes.
        written_text::<256, _>(|name| unsafe { self.c.cuDeviceGetName(name, 256, device.0) })
    }

    fn device_uuid(&self, device: Device) -> Result<[u8; 16]> {
        // SAFETY: it writes 16 bytes.
        written(|uuid| unsafe { self.c.cuDeviceGetUuid(uuid, device.0) })
    }

    fn pci_bus_id(&self, device: Device) -> Result<String> {
        // SAFETY: it writes at most 32 bytes.
        let id =
            written_text::<32, _>(|id| unsafe { self.c.cuDeviceGetPCIBusId(id, 32, device.0) });
        id.map(|id| id.to_lowercase())
    }

    fn total_memory(&self, device: Device) -> Result<usize> {
        // SAFETY: it only writes the number.
        written(|bytes| unsafe { self.c.cuDeviceTotalMem(bytes, device.0) })
    }

    fn attribute(&self, attribute: Attribute, device: Device) -> Result<i32> {
        // SAFETY: it only writes the number.
        written(|value| unsafe { self.c.cuDeviceGetAttribute(value, attribute as c_int, device.0) })
    }

    fn can_access_peer(&self, device: Device, peer: Device) -> Result<bool> {
        // SAFETY: it only writes the number.
        let can = written(|can| unsafe { self.c.cuDeviceCanAccessPeer(can, device.0, peer.0) })?;
        Ok(can != 0)
    }

    fn p2p_attribute(&self, which: P2pAttribute, device: Device, peer: Device) -> Result<i32> {
        let which = which as c_int;
        // SAFETY: it only writes the number.
        written(|value| unsafe { self.c.cuDeviceGetP2PAttribute(value, which, device.0, peer.0) })
    }

    fn context_retain(&self, device: Device) -> Result<Context> {
        // SAFETY: it only writes the handle.
        written(|context| unsafe { self.c.cuDevicePrimaryCtxRetain(context, device.0) })
            .map(Context::new)
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
        // SAFETY: it only writes the handle.
        let context = written(|context| unsafe { self.c.cuCtxGetCurrent(context) })?;
        Ok((context != 0).then(|| Context::new(context)))
    }

    fn context_push(&self, context: Context) -> Result<()> {
        // SAFETY: the handle is live.
        unsafe { self.c.cuCtxPushCurrent(context.raw()) }
    }

    fn context_pop(&self) -> Result<Context> {
        // SAFETY: it only writes the handle.
        written(|context| unsafe { self.c.cuCtxPopCurrent(context) }).map(Context::new)
    }

    fn context_device(&self) -> Result<Device> {
        // SAFETY: it only writes the number.
        written(|device| unsafe { self.c.cuCtxGetDevice(device) }).map(Device)
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
