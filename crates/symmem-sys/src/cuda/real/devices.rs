//! Devices and contexts.
#![allow(unsafe_code)] // S4

use std::ffi::c_int;

use super::Cuda;
use crate::cuda::driver::{Devices, refuse};
use crate::cuda::{Attribute, Context, Device, MemoryInfo, P2pAttribute, Result, code};
use crate::table::{methods, number, written, written_text};

impl Devices for Cuda {
    methods! {
        // May be called at any time, and again.
        fn init() = cuInit(0);
        // It only writes the number.
        fn version() -> i32 = |version| cuDriverGetVersion(version);
        // It only writes the number.
        fn device_count() -> usize = |count| cuDeviceGetCount(count) => number;
        // It writes 16 bytes.
        fn device_uuid(device: Device) -> [u8; 16] = |uuid| cuDeviceGetUuid(uuid, device.0);
        // It only writes the number.
        fn total_memory(device: Device) -> usize = |bytes| cuDeviceTotalMem(bytes, device.0);
        // It only writes the number.
        fn attribute(attribute: Attribute, device: Device) -> i32 =
            |value| cuDeviceGetAttribute(value, attribute as c_int, device.0);
        // It only writes the number.
        fn can_access_peer(device: Device, peer: Device) -> bool =
            |can| cuDeviceCanAccessPeer(can, device.0, peer.0) => |can| can != 0;
        // It only writes the number.
        fn p2p_attribute(which: P2pAttribute, device: Device, peer: Device) -> i32 =
            |value| cuDeviceGetP2PAttribute(value, which as c_int, device.0, peer.0);
        // It only writes the handle.
        fn context_retain(device: Device) -> Context =
            |context| cuDevicePrimaryCtxRetain(context, device.0) => Context::new;
        // The caller has no more use for the context.
        unsafe fn context_release(device: Device) = cuDevicePrimaryCtxRelease(device.0);
        // The handle is live.
        fn context_set(context: Option<Context>) =
            cuCtxSetCurrent(context.map_or(0, Context::raw));
        // It only writes the handle.
        fn context_current() -> Option<Context> = |context| cuCtxGetCurrent(context)
            => |context| (context != 0).then(|| Context::new(context));
        // The handle is live.
        fn context_push(context: Context) = cuCtxPushCurrent(context.raw());
        // It only writes the handle.
        fn context_pop() -> Context = |context| cuCtxPopCurrent(context) => Context::new;
        // It only writes the number.
        fn context_device() -> Device = |device| cuCtxGetDevice(device) => Device;
        // It only waits.
        fn context_synchronize() = cuCtxSynchronize();
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

    fn pci_bus_id(&self, device: Device) -> Result<String> {
        // SAFETY: it writes at most 32 bytes.
        let id =
            written_text::<32, _>(|id| unsafe { self.c.cuDeviceGetPCIBusId(id, 32, device.0) });
        id.map(|id| id.to_lowercase())
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it only writes the numbers.
        unsafe { self.c.cuMemGetInfo(&mut free, &mut total) }?;
        Ok(MemoryInfo { free, total })
    }
}
