//! NVIDIA's management library: what it knows of devices and of the links between them.
//!
//! A container may have the driver without this library. Then [`load`] says so, and topology is what the CUDA driver
//! alone can tell.

mod real;

use std::sync::{Arc, OnceLock};

pub use real::Management;

use crate::Missing;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {text} ({code})")]
pub struct Failure {
    /// The function, without the suffix of its version.
    pub call: &'static str,
    /// The library's code; [`MISSING_SYMBOL`](Self::MISSING_SYMBOL) where it does not have the function.
    pub code: i32,
    /// The library's explanation, or `missing symbol`.
    pub text: String,
}

impl Failure {
    /// Not the library's: the function is not in it.
    pub const MISSING_SYMBOL: i32 = -1;
    /// The device does not have this.
    pub const NOT_SUPPORTED: i32 = 3;

    fn missing_symbol(call: &'static str, _symbol: &str) -> Self {
        Self { call, code: Self::MISSING_SYMBOL, text: "missing symbol".to_owned() }
    }
}

/// What a call answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// `nvmlDevice_t`: a device of this machine, whether this process may use it or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device(usize);

#[cfg(feature = "fake")]
impl Device {
    /// A device of an [`Nvml`] that a test has made, which no other may be asked about.
    pub const fn fake(number: usize) -> Self {
        Self(number)
    }
}

/// NVLinks that a device can have, as of CUDA 13; asking for more than there are is a [`Failure`].
pub const MAX_LINKS: u32 = 36;

/// What two devices may be able to do: `nvmlGpuP2PCapsIndex_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum P2p {
    /// Loads from the other's memory.
    Read = 0,
    /// Stores to it.
    Write = 1,
    /// Over NVLink.
    NvLink = 2,
    /// Atomics on it.
    Atomics = 3,
    /// Over PCI.
    Pci = 4,
}

/// Whether they are: `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum P2pStatus {
    /// They can.
    Ok,
    /// The chipset cannot.
    Chipset,
    /// The device cannot.
    Gpu,
    /// The way between them cannot.
    Topology,
    /// Somebody has switched it off.
    Disabled,
    /// They cannot.
    NotSupported,
    /// The library does not know.
    Unknown,
}

/// How near two devices are on the PCI tree, nearest first: `nvmlGpuTopologyLevel_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ancestor {
    /// Two devices on one board.
    Internal,
    /// One PCI switch.
    Single,
    /// Several PCI switches, but no host bridge.
    Multiple,
    /// One host bridge.
    HostBridge,
    /// One NUMA node.
    Node,
    /// Only the link between NUMA nodes.
    System,
}

/// What is at the other end of an NVLink: `nvmlIntNvLinkDeviceType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkEnd {
    /// Another device.
    Gpu,
    /// A switch.
    Switch,
    /// Something else.
    Other,
}

/// Which NVLink fabric a device belongs to: `nvmlGpuFabricInfo_v2_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fabric {
    /// The fabric; all zero where there is none.
    pub cluster: [u8; 16],
    /// The part of the fabric within which memory can be shared.
    pub clique: u32,
    /// 0: no fabric, 1: not started, 2: under way, 3: ready.
    pub state: u8,
    /// The code of how that went, when the state is 3.
    pub status: i32,
    /// Bits of what is wrong with it.
    pub health: u32,
}

impl Fabric {
    /// Whether memory can be shared over it.
    pub const fn is_ready(&self) -> bool {
        self.state == 3 && self.status == 0
    }
}

/// What topology needs of the library. The first line of each method names the C function.
pub trait Nvml: Send + Sync {
    /// `nvmlSystemGetDriverVersion`: such as `580.159.03`.
    fn driver_version(&self) -> Result<String>;

    /// `nvmlDeviceGetCount`: devices of the machine.
    fn device_count(&self) -> Result<u32>;

    /// `nvmlDeviceGetHandleByIndex`: not in the CUDA driver's order.
    fn device_by_index(&self, index: u32) -> Result<Device>;

    /// `nvmlDeviceGetHandleByPciBusId`: by what [`pci_bus_id`](crate::cuda::Devices::pci_bus_id) says.
    fn device_by_pci(&self, bus_id: &str) -> Result<Device>;

    /// `nvmlDeviceGetName`
    fn name(&self, device: Device) -> Result<String>;

    /// `nvmlDeviceGetUUID`: such as `GPU-` and 32 digits with dashes.
    fn uuid(&self, device: Device) -> Result<String>;

    /// `nvmlDeviceGetPciInfo`: such as `0000:8d:00.0`.
    fn pci_bus_id(&self, device: Device) -> Result<String>;

    /// `nvmlDeviceGetP2PStatus`: one element of the matrix.
    fn p2p_status(&self, device: Device, peer: Device, what: P2p) -> Result<P2pStatus>;

    /// `nvmlDeviceGetNvLinkState`: whether the link of this number is up.
    fn link_active(&self, device: Device, link: u32) -> Result<bool>;

    /// `nvmlDeviceGetNvLinkRemoteDeviceType`: what the link leads to.
    fn link_end(&self, device: Device, link: u32) -> Result<LinkEnd>;

    /// `nvmlDeviceGetNvLinkRemotePciInfo`: the bus id of what the link leads to.
    fn link_remote(&self, device: Device, link: u32) -> Result<String>;

    /// `nvmlDeviceGetTopologyCommonAncestor`: how near two devices are.
    fn common_ancestor(&self, device: Device, peer: Device) -> Result<Ancestor>;

    /// `nvmlDeviceGetCpuAffinity`: the nearest cores, ascending.
    fn cpu_affinity(&self, device: Device) -> Result<Vec<usize>>;

    /// `nvmlDeviceGetGpuFabricInfoV`: the fabric.
    fn fabric(&self, device: Device) -> Result<Fabric>;
}

/// Why there is no [`Nvml`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// There is no such library.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// The library is there but does not start: `nvmlInit`.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// The library of this machine, initialised; looked for once in a process.
pub fn load() -> std::result::Result<Arc<dyn Nvml>, Absent> {
    static LOADED: OnceLock<std::result::Result<Arc<Management>, Absent>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| Management::open().map(Arc::new));
    loaded.clone().map(|nvml| nvml as Arc<dyn Nvml>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_is_told_so() {
        match load() {
            Ok(nvml) => assert!(nvml.device_count().is_ok()),
            Err(absent) => assert!(absent.to_string().contains("NVML could not be loaded")),
        }
    }

    #[test]
    fn only_a_fabric_that_came_up_well_is_ready() {
        let fabric = Fabric { cluster: [0; 16], clique: 0, state: 3, status: 0, health: 0 };
        assert!(fabric.is_ready());
        assert!(!Fabric { state: 2, ..fabric }.is_ready());
        assert!(!Fabric { status: 999, ..fabric }.is_ready());
    }
}
