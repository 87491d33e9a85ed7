//! Devices and contexts.
#![allow(unsafe_code)] // S4

use super::{Fabric, Fake};
use crate::cuda::driver::Devices;
use crate::cuda::{Attribute, Context, Device, MemoryInfo, P2pAttribute, Result, code};

/// What the contexts' handles count from.
const CONTEXTS: usize = 0x1000;

/// The device of a context.
pub(super) const fn device_of(context: Context) -> Device {
    Device((context.raw() - CONTEXTS) as i32)
}

impl Devices for Fake {
    fn init(&self) -> Result<()> {
        self.enter("cuInit").map(drop)
    }

    fn version(&self) -> Result<i32> {
        self.enter("cuDriverGetVersion").map(|_| 13000)
    }

    fn device_count(&self) -> Result<usize> {
        self.enter("cuDeviceGetCount").map(|state| state.devices.len())
    }

    fn device(&self, ordinal: usize) -> Result<Device> {
        let device = Device(i32::try_from(ordinal).unwrap_or(-1));
        self.enter("cuDeviceGet")?.config(device).map(|_| device)
    }

    fn device_name(&self, device: Device) -> Result<String> {
        Ok(self.enter("cuDeviceGetName")?.config(device)?.name.clone())
    }

    fn device_uuid(&self, device: Device) -> Result<[u8; 16]> {
        self.enter("cuDeviceGetUuid")?.config(device)?;
        let mut uuid = *b"symmem-fake\0\0\0\0\0";
        uuid[12..].copy_from_slice(&device.0.to_be_bytes());
        Ok(uuid)
    }

    fn pci_bus_id(&self, device: Device) -> Result<String> {
        self.enter("cuDeviceGetPCIBusId")?.config(device)?;
        Ok(format!("0000:{:02x}:00.0", device.0 + 1))
    }

    fn total_memory(&self, device: Device) -> Result<usize> {
        Ok(self.enter("cuDeviceTotalMem")?.config(device)?.bytes)
    }

    fn attribute(&self, attribute: Attribute, device: Device) -> Result<i32> {
        let state = self.enter("cuDeviceGetAttribute")?;
        let config = state.config(device)?;
        Ok(match attribute {
            Attribute::SmCount => config.sms,
            Attribute::L2Bytes => config.cache,
            Attribute::ComputeMajor => config.capability.0,
            Attribute::ComputeMinor => config.capability.1,
            Attribute::VirtualMemory | Attribute::FdHandles => config.virtual_memory.into(),
            Attribute::RdmaMemory => config.rdma.into(),
            Attribute::FabricHandles => (config.fabric != Fabric::No).into(),
            Attribute::Multicast => config.multicast.into(),
            Attribute::HostNumaId => config.host_numa,
        })
    }

    fn can_access_peer(&self, device: Device, peer: Device) -> Result<bool> {
        let state = self.enter("cuDeviceCanAccessPeer")?;
        state.config(device)?;
        Ok(state.config(peer)?.peers && device != peer)
    }

    fn p2p_attribute(&self, which: P2pAttribute, device: Device, peer: Device) -> Result<i32> {
        let state = self.enter("cuDeviceGetP2PAttribute")?;
        state.config(device)?;
        let peers = state.config(peer)?.peers;
        if device == peer {
            return state.refuse(code::INVALID_DEVICE, "a device is no peer of itself");
        }
        Ok(match which {
            P2pAttribute::Access | P2pAttribute::NativeAtomics => peers.into(),
        })
    }

    fn context_retain(&self, device: Device) -> Result<Context> {
        let mut state = self.enter("cuDevicePrimaryCtxRetain")?;
        state.config(device)?;
        *state.contexts.entry(device.0).or_default() += 1;
        Ok(Context::new(CONTEXTS + device.0.unsigned_abs() as usize))
    }

    unsafe fn context_release(&self, device: Device) -> Result<()> {
        let mut state = self.enter("cuDevicePrimaryCtxRelease")?;
        match state.contexts.get_mut(&device.0).filter(|count| **count > 0) {
            Some(count) => *count -= 1,
            None => return state.refuse(code::INVALID_CONTEXT, "it is not retained"),
        }
        Ok(())
    }

    fn context_set(&self, context: Option<Context>) -> Result<()> {
        let mut state = self.enter("cuCtxSetCurrent")?;
        let stack = state.stack();
        stack.pop();
        stack.extend(context);
        Ok(())
    }

    fn context_current(&self) -> Result<Option<Context>> {
        Ok(self.enter("cuCtxGetCurrent")?.current().ok())
    }

    fn context_push(&self, context: Context) -> Result<()> {
        self.enter("cuCtxPushCurrent")?.stack().push(context);
        Ok(())
    }

    fn context_pop(&self) -> Result<Context> {
        let mut state = self.enter("cuCtxPopCurrent")?;
        let popped = state.stack().pop();
        popped.ok_or_else(|| state.failure(code::INVALID_CONTEXT, "nothing was pushed"))
    }

    fn context_device(&self) -> Result<Device> {
        self.enter("cuCtxGetDevice")?.current().map(device_of)
    }

    fn context_synchronize(&self) -> Result<()> {
        self.enter("cuCtxSynchronize")?.current().map(drop)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let state = self.enter("cuMemGetInfo")?;
        let device = device_of(state.current()?);
        let total = state.config(device)?.bytes;
        Ok(MemoryInfo { free: total.saturating_sub(state.used(device)), total })
    }
}
