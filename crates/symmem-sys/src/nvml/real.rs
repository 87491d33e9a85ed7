//! The real library: `libnvidia-ml.so.1` through a table of its functions.
#![allow(unsafe_code)] // S4

use std::ffi::{CString, c_char, c_int, c_uint, c_ulong};

use super::{Absent, Ancestor, Device, Fabric, Failure, LinkEnd, Nvml, P2p, P2pStatus, Result};
use crate::Library;
use crate::table::{functions, written, written_text};

/// NVML of this machine. Implements [`Nvml`].
#[derive(Debug)]
pub struct Management {
    /// C's side.
    c: Functions,
}

/// `nvmlPciInfo_t`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: c_uint,
    subsystem: c_uint,
    bus_id: [u8; 32],
}

/// `nvmlGpuFabricInfo_v2_t`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct FabricInfo {
    version: c_uint,
    cluster: [u8; 16],
    status: c_int,
    clique: c_uint,
    state: u8,
    health: c_uint,
}

impl FabricInfo {
    /// `nvmlGpuFabricInfo_v2`: the size of the structure, and its version in the highest byte.
    const VERSION: c_uint = 36 | 2 << 24;
}

functions! {
    /// The library's functions, from `nvml.h`. A device is a pointer, here as a wide integer.
    struct Functions, Failure;
    nvmlInit = "nvmlInit_v2"();
    nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint);
    nvmlDeviceGetCount = "nvmlDeviceGetCount_v2"(count: *mut c_uint);
    nvmlDeviceGetHandleByIndex = "nvmlDeviceGetHandleByIndex_v2"(index: c_uint, device: *mut usize);
    nvmlDeviceGetHandleByPciBusId = "nvmlDeviceGetHandleByPciBusId_v2"(
        id: *const c_char, device: *mut usize);
    nvmlDeviceGetName(device: usize, name: *mut c_char, length: c_uint);
    nvmlDeviceGetUUID(device: usize, uuid: *mut c_char, length: c_uint);
    nvmlDeviceGetPciInfo = "nvmlDeviceGetPciInfo_v3"(device: usize, info: *mut PciInfo);
    nvmlDeviceGetP2PStatus(device: usize, peer: usize, what: c_int, status: *mut c_int);
    nvmlDeviceGetNvLinkState(device: usize, link: c_uint, active: *mut c_int);
    nvmlDeviceGetNvLinkRemoteDeviceType(device: usize, link: c_uint, kind: *mut c_int);
    nvmlDeviceGetNvLinkRemotePciInfo = "nvmlDeviceGetNvLinkRemotePciInfo_v2"(
        device: usize, link: c_uint, info: *mut PciInfo);
    nvmlDeviceGetTopologyCommonAncestor(device: usize, peer: usize, level: *mut c_int);
    nvmlDeviceGetCpuAffinity(device: usize, words: c_uint, set: *mut c_ulong);
    nvmlDeviceGetGpuFabricInfoV(device: usize, info: *mut FabricInfo);
}

impl Functions {
    /// A code in words. The library has some too, but not before it is initialised.
    fn failure(&self, call: &'static str, code: c_int) -> Failure {
        let text = match code {
            1 => "not initialised",
            2 => "invalid argument",
            3 => "not supported",
            4 => "no permission",
            6 => "not found",
            9 => "the driver is not loaded",
            13 => "function not found",
            15 => "the device has fallen off the bus",
            18 => "library and driver do not fit",
            25 => "version of an argument not supported",
            999 => "unknown error",
            _ => "see nvmlReturn_t",
        };
        Failure { call, code, text: text.to_owned() }
    }
}

impl Management {
    pub(super) fn open() -> std::result::Result<Self, Absent> {
        let found = Self { c: Functions::new(crate::load(Library::Nvml)?) };
        // SAFETY: may be called at any time, and again.
        unsafe { found.c.nvmlInit() }?;
        Ok(found)
    }
}

impl Nvml for Management {
    fn driver_version(&self) -> Result<String> {
        // SAFETY: it writes at most 80 bytes.
        written_text::<80, _>(|version| unsafe { self.c.nvmlSystemGetDriverVersion(version, 80) })
    }

    fn device_count(&self) -> Result<u32> {
        // SAFETY: it only writes the number.
        written(|count| unsafe { self.c.nvmlDeviceGetCount(count) })
    }

    fn device_by_index(&self, index: u32) -> Result<Device> {
        // SAFETY: it only writes the handle.
        written(|device| unsafe { self.c.nvmlDeviceGetHandleByIndex(index, device) }).map(Device)
    }

    fn device_by_pci(&self, bus_id: &str) -> Result<Device> {
        let id = CString::new(bus_id).unwrap_or_default();
        // SAFETY: it reads up to the zero, and writes the handle.
        written(|device| unsafe { self.c.nvmlDeviceGetHandleByPciBusId(id.as_ptr(), device) })
            .map(Device)
    }

    fn name(&self, device: Device) -> Result<String> {
        // SAFETY: it writes at most 96 bytes.
        written_text::<96, _>(|name| unsafe { self.c.nvmlDeviceGetName(device.0, name, 96) })
    }

    fn uuid(&self, device: Device) -> Result<String> {
        // SAFETY: it writes at most 96 bytes.
        written_text::<96, _>(|uuid| unsafe { self.c.nvmlDeviceGetUUID(device.0, uuid, 96) })
    }

    fn pci_bus_id(&self, device: Device) -> Result<String> {
        // SAFETY: it fills the structure.
        written(|info| unsafe { self.c.nvmlDeviceGetPciInfo(device.0, info) })
            .map(|info| bus_id(&info))
    }

    fn p2p_status(&self, device: Device, peer: Device, what: P2p) -> Result<P2pStatus> {
        // SAFETY: it only writes the number.
        let status = written(|status| unsafe {
            self.c.nvmlDeviceGetP2PStatus(device.0, peer.0, what as c_int, status)
        })?;
        Ok(match status {
            0 => P2pStatus::Ok,
            1 => P2pStatus::Chipset,
            2 => P2pStatus::Gpu,
            3 => P2pStatus::Topology,
            4 => P2pStatus::Disabled,
            5 => P2pStatus::NotSupported,
            _ => P2pStatus::Unknown,
        })
    }

    fn link_active(&self, device: Device, link: u32) -> Result<bool> {
        // SAFETY: it only writes the number.
        let active =
            written(|active| unsafe { self.c.nvmlDeviceGetNvLinkState(device.0, link, active) })?;
        Ok(active != 0)
    }

    fn link_end(&self, device: Device, link: u32) -> Result<LinkEnd> {
        // SAFETY: it only writes the number.
        let kind = written(|kind| unsafe {
            self.c.nvmlDeviceGetNvLinkRemoteDeviceType(device.0, link, kind)
        })?;
        Ok(match kind {
            0 => LinkEnd::Gpu,
            2 => LinkEnd::Switch,
            _ => LinkEnd::Other,
        })
    }

    fn link_remote(&self, device: Device, link: u32) -> Result<String> {
        // SAFETY: it fills the structure.
        written(|info| unsafe { self.c.nvmlDeviceGetNvLinkRemotePciInfo(device.0, link, info) })
            .map(|info| bus_id(&info))
    }

    fn common_ancestor(&self, device: Device, peer: Device) -> Result<Ancestor> {
        // SAFETY: it only writes the number.
        let level = written(|level| unsafe {
            self.c.nvmlDeviceGetTopologyCommonAncestor(device.0, peer.0, level)
        })?;
        Ok(match level {
            0 => Ancestor::Internal,
            1..=10 => Ancestor::Single,
            11..=20 => Ancestor::Multiple,
            21..=30 => Ancestor::HostBridge,
            31..=40 => Ancestor::Node,
            _ => Ancestor::System,
        })
    }

    fn cpu_affinity(&self, device: Device) -> Result<Vec<usize>> {
        let mut words: [c_ulong; 64] = [0; 64];
        // SAFETY: it writes at most 64 words.
        unsafe { self.c.nvmlDeviceGetCpuAffinity(device.0, 64, words.as_mut_ptr()) }?;
        Ok(cores(&words))
    }

    fn fabric(&self, device: Device) -> Result<Fabric> {
        let mut info = FabricInfo { version: FabricInfo::VERSION, ..FabricInfo::default() };
        // SAFETY: it fills the structure, whose version says how long it is.
        unsafe { self.c.nvmlDeviceGetGpuFabricInfoV(device.0, &mut info) }?;
        let FabricInfo { cluster, status, clique, state, health, .. } = info;
        Ok(Fabric { cluster, clique, state, status, health })
    }
}

/// As the kernel and the CUDA driver write it; the library writes more zeros, in capitals.
fn bus_id(info: &PciInfo) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", info.domain, info.bus, info.device)
}

/// The numbers of the bits that are set.
fn cores(words: &[c_ulong]) -> Vec<usize> {
    let width = c_ulong::BITS as usize;
    (0..words.len() * width).filter(|core| words[core / width] >> (core % width) & 1 == 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    // The numbers were printed by a C program with sizeof and offsetof from nvml.h of CUDA 12.9 and of 13.4.
    #[test]
    fn structures_are_laid_out_as_in_the_header() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(offset_of!(PciInfo, domain), 16);
        assert_eq!(offset_of!(PciInfo, bus_id), 36);
        assert_eq!(size_of::<FabricInfo>(), 36);
        assert_eq!(offset_of!(FabricInfo, cluster), 4);
        assert_eq!(offset_of!(FabricInfo, status), 20);
        assert_eq!(offset_of!(FabricInfo, clique), 24);
        assert_eq!(offset_of!(FabricInfo, state), 28);
        assert_eq!(offset_of!(FabricInfo, health), 32);
        assert_eq!(FabricInfo::VERSION, 33_554_468);
    }

    #[test]
    fn a_bus_id_is_written_as_the_kernel_does() {
        let info = PciInfo { domain: 0, bus: 0x8d, device: 0, ..PciInfo::default() };
        assert_eq!(bus_id(&info), "0000:8d:00.0");
    }

    #[test]
    fn cores_are_the_bits_of_the_set() {
        assert_eq!(cores(&[0b101, 1]), [0, 2, 64]);
    }
}
