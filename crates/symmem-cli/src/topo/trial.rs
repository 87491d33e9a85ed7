//! What a device can do, found out by doing it: attributes say yes where it is not permitted.
#![allow(unsafe_code)] // S4, S5

use serde::Serialize;
use symmem_sys::cuda::{
    Attribute, Device, Driver, Failure, Granularity, HandleType, Memory, MemoryProperties,
    MulticastProperties,
};

/// Whether something works, or why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trial {
    works: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl Trial {
    fn of(done: Result<(), String>) -> Self {
        Self { works: done.is_ok(), why: done.err() }
    }

    /// Whether it does.
    pub fn works(&self) -> bool {
        self.works
    }

    /// Why it does not.
    pub fn why(&self) -> &str {
        self.why.as_deref().unwrap_or_default()
    }
}

/// Whether memory of the device can be created and exported as a descriptor, which is all that the backend needs.
pub fn can_be_shared(driver: &dyn Driver, device: Device) -> Trial {
    let needed = [
        (Attribute::VirtualMemory, "the device has no virtual memory management"),
        (Attribute::FdHandles, "the device cannot export memory as a descriptor"),
    ];
    let lacking = needed.into_iter().find(|(attribute, _)| !driver.has(*attribute, device));
    Trial::of(match lacking {
        Some((_, why)) => Err(why.to_owned()),
        None => {
            with_memory(driver, device, HandleType::Fd, |memory| driver.export_fd(memory).map(drop))
        }
    })
}

/// Whether memory of the device can be exported to other machines on its fabric.
pub(super) fn fabric(driver: &dyn Driver, device: Device) -> Trial {
    if !driver.has(Attribute::FabricHandles, device) {
        return Trial::of(Err("the device has no fabric handles".to_owned()));
    }
    Trial::of(with_memory(driver, device, HandleType::Fabric, |memory| {
        driver.export_fabric(memory).map(drop)
    }))
}

/// Whether the device can be in a multicast object.
pub(super) fn multicast(driver: &dyn Driver, device: Device) -> Trial {
    if !driver.has(Attribute::Multicast, device) {
        return Trial::of(Err("the device has no multicast".to_owned()));
    }
    let mut properties = MulticastProperties { devices: 2, bytes: 0, handle: HandleType::Fd };
    let done = driver.multicast_granularity(&properties, Granularity::Minimum).and_then(|bytes| {
        properties.bytes = bytes;
        let multicast = driver.multicast_create(&properties)?;
        let added = driver.multicast_add(multicast, device);
        // SAFETY: S4: just made here, and not used again.
        let released = unsafe { driver.release(multicast) };
        added.and(released)
    });
    Trial::of(done.map_err(|failure| failure.to_string()))
}

/// Does something with the smallest piece of memory, and gives it back.
fn with_memory(
    driver: &dyn Driver,
    device: Device,
    handle: HandleType,
    trial: impl FnOnce(Memory) -> Result<(), Failure>,
) -> Result<(), String> {
    let properties = MemoryProperties { device, handle, rdma: false };
    let done = driver.granularity(&properties, Granularity::Minimum).and_then(|bytes| {
        let memory = driver.create(bytes, &properties)?;
        let done = trial(memory);
        // SAFETY: S4: just made here, and not used again.
        let released = unsafe { driver.release(memory) };
        done.and(released)
    });
    done.map_err(|failure| failure.to_string())
}
