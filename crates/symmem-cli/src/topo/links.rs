//! The matrix of NVLinks, counted as PyTorch does.

use symmem_sys::nvml::{Device, Failure, LinkEnd, MAX_LINKS, Nvml};

/// Where the links of one device lead to.
struct Ends {
    /// Bus ids, once for each link.
    devices: Vec<String>,
    switches: u32,
}

/// `matrix[i][j]`: links between the devices with these bus ids.
///
/// A link that leads to another of these devices counts for that pair. Links to switches count for every pair, as
/// many as the one of the two has that has fewer: all switches of a machine are connected with each other. What the
/// library does not know counts for nothing, and is a warning.
pub(super) fn matrix(nvml: &dyn Nvml, ids: &[String], warnings: &mut Vec<String>) -> Vec<Vec<u32>> {
    let mut ends_of = |id: &String| {
        ends(nvml, id).unwrap_or_else(|failure| {
            warnings.push(format!("{id}: {failure}: it counts as without NVLinks"));
            Ends { devices: Vec::new(), switches: 0 }
        })
    };
    let all: Vec<Ends> = ids.iter().map(&mut ends_of).collect();
    let row = |(i, ours): (usize, &Ends)| {
        let between = |(j, theirs): (usize, &Ends)| {
            if i == j {
                return 0;
            }
            let direct = ours.devices.iter().filter(|end| **end == ids[j]).count() as u32;
            direct + ours.switches.min(theirs.switches)
        };
        all.iter().enumerate().map(between).collect()
    };
    all.iter().enumerate().map(row).collect()
}

/// Asks for all links that are up. The first that the device does not have ends the list.
fn ends(nvml: &dyn Nvml, id: &str) -> Result<Ends, Failure> {
    let device = nvml.device_by_pci(id)?;
    let mut ends = Ends { devices: Vec::new(), switches: 0 };
    for link in 0..MAX_LINKS {
        match nvml.link_active(device, link) {
            Ok(true) => count(nvml, device, link, &mut ends)?,
            Ok(false) => {}
            Err(_) => break,
        }
    }
    Ok(ends)
}

fn count(nvml: &dyn Nvml, device: Device, link: u32, ends: &mut Ends) -> Result<(), Failure> {
    match nvml.link_end(device, link)? {
        LinkEnd::Gpu => ends.devices.push(nvml.link_remote(device, link)?),
        LinkEnd::Switch => ends.switches += 1,
        LinkEnd::Other => {}
    }
    Ok(())
}
