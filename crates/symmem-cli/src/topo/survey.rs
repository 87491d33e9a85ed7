//! Finding out what there is.

use std::path::Path;

use symmem_sys::cuda::{Attribute, Driver, Failure, P2pAttribute};
use symmem_sys::nvml::{self, Nvml};

use super::{Ancestor, Device, Pair, Topology, links, trial};

/// Looks at everything. The driver is initialised; without NVML, of which only the reason is left, links and cores are
/// what the driver and the kernel (`sysfs`, where `/sys` is) know.
pub(super) fn look(
    driver: &dyn Driver,
    nvml: Result<&dyn Nvml, String>,
    sysfs: &Path,
) -> Result<Topology, Failure> {
    let version = driver.version()?;
    let mut warnings = Vec::new();
    if let Err(why) = &nvml {
        warnings.push(format!("{why}: whether there are NVLinks is not known, 0 are shown"));
    }
    let nvml = nvml.ok();
    let count = driver.device_count()?;
    let devices = (0..count).map(|number| device(driver, nvml, sysfs, number));
    let devices = devices.collect::<Result<Vec<Device>, _>>()?;
    let ids: Vec<String> = devices.iter().map(|device| device.pci.clone()).collect();
    let nvlinks = match nvml {
        Some(nvml) => links::matrix(nvml, &ids, &mut warnings),
        None => vec![vec![0; count]; count],
    };
    Ok(Topology {
        cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
        pairs: pairs(driver, nvml, &ids)?,
        devices,
        nvlinks,
        warnings,
    })
}

fn device(
    driver: &dyn Driver,
    nvml: Option<&dyn Nvml>,
    sysfs: &Path,
    number: usize,
) -> Result<Device, Failure> {
    let device = driver.device(number)?;
    let pci = driver.pci_bus_id(device)?;
    let place = sysfs.join("bus/pci/devices").join(&pci);
    let read = |file: &str| std::fs::read_to_string(place.join(file)).ok();
    let numa = driver.attribute(Attribute::HostNumaId, device).ok();
    let numa = numa.and_then(|node| u32::try_from(node).ok());
    let known = nvml.and_then(|nvml| nvml.cpu_affinity(nvml.device_by_pci(&pci).ok()?).ok());
    let cores = known.or_else(|| Some(cores(&read("local_cpulist")?)));
    let attribute = |which| driver.attribute(which, device);
    Ok(Device {
        number,
        name: driver.device_name(device)?,
        uuid: uuid(driver.device_uuid(device)?),
        memory: driver.total_memory(device)?,
        capability: format!(
            "{}.{}",
            attribute(Attribute::ComputeMajor)?,
            attribute(Attribute::ComputeMinor)?
        ),
        multiprocessors: attribute(Attribute::SmCount)?,
        numa: numa.or_else(|| read("numa_node")?.trim().parse().ok()),
        cores: cores.unwrap_or_default(),
        descriptors: trial::can_be_shared(driver, device),
        fabric: trial::fabric(driver, device),
        multicast: trial::multicast(driver, device),
        pci,
    })
}

fn pairs(
    driver: &dyn Driver,
    nvml: Option<&dyn Nvml>,
    ids: &[String],
) -> Result<Vec<Vec<Option<Pair>>>, Failure> {
    let pair = |i: usize, j: usize| {
        if i == j {
            return Ok(None);
        }
        let (ours, theirs) = (driver.device(i)?, driver.device(j)?);
        let atomics = driver.p2p_attribute(P2pAttribute::NativeAtomics, ours, theirs);
        Ok(Some(Pair {
            ancestor: nvml.and_then(|nvml| ancestor(nvml, &ids[i], &ids[j])),
            access: driver.can_access_peer(ours, theirs)?,
            atomics: atomics.is_ok_and(|answer| answer == 1),
        }))
    };
    (0..ids.len()).map(|i| (0..ids.len()).map(|j| pair(i, j)).collect()).collect()
}

fn ancestor(nvml: &dyn Nvml, ours: &str, theirs: &str) -> Option<Ancestor> {
    let (ours, theirs) = (nvml.device_by_pci(ours).ok()?, nvml.device_by_pci(theirs).ok()?);
    Some(match nvml.common_ancestor(ours, theirs).ok()? {
        nvml::Ancestor::Internal => Ancestor::Board,
        nvml::Ancestor::Single => Ancestor::Pix,
        nvml::Ancestor::Multiple => Ancestor::Pxb,
        nvml::Ancestor::HostBridge => Ancestor::Phb,
        nvml::Ancestor::Node => Ancestor::Node,
        nvml::Ancestor::System => Ancestor::Sys,
    })
}

/// As `nvidia-smi -L` writes it.
fn uuid(bytes: [u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
    format!("GPU-{}", parts.join("-"))
}

/// The numbers in a list such as `0-3,8`.
fn cores(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}
