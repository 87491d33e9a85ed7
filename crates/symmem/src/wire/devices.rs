//! Which of this host's network devices UCX uses: that by whose address the mesh talks.

use std::net::IpAddr;
use std::path::Path;

use symmem_sys::ucx::Version;

use crate::mesh::interface_of;

const INTERFACES: &str = "/sys/class/net";

/// As `UCX_NET_DEVICES` names them; nothing if all may be used.
pub(super) fn of_address(address: Option<IpAddr>, version: Version) -> Option<String> {
    let address = address?;
    // These do not connect by the loopback device alone.
    let no_loopback = Version::new(1, 20, 0)..Version::new(1, 22, 0);
    if address.is_loopback() && no_loopback.contains(&version) {
        return None;
    }
    let interface = interface_of(address)?;
    let adapters = adapters_of(Path::new(INTERFACES), &interface);
    Some([interface].into_iter().chain(adapters).collect::<Vec<_>>().join(","))
}

/// Whether the interface of the address has an RDMA device.
pub(super) fn has_adapter(address: Option<IpAddr>) -> bool {
    let interface = address.and_then(interface_of);
    interface.is_some_and(|name| !adapters_of(Path::new(INTERFACES), &name).is_empty())
}

/// The RDMA device behind an interface, with its port: `mlx5_0:1`.
fn adapters_of(interfaces: &Path, interface: &str) -> Vec<String> {
    let interface = interfaces.join(interface);
    let port = std::fs::read_to_string(interface.join("dev_port")).unwrap_or_default();
    let port = port.trim().parse().unwrap_or(0_u32) + 1;
    let devices = std::fs::read_dir(interface.join("device/infiniband"));
    let names = devices.into_iter().flatten().flatten().map(|device| device.file_name());
    let mut adapters: Vec<String> =
        names.map(|name| format!("{}:{port}", name.to_string_lossy())).collect();
    adapters.sort();
    adapters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_of_an_address_is_its_interface() {
        let here: IpAddr = "127.0.0.1".parse().unwrap();
        assert_eq!(of_address(Some(here), Version::new(1, 13, 1)).as_deref(), Some("lo"));
        assert_eq!(of_address(Some(here), Version::new(1, 20, 1)), None);
        assert_eq!(of_address(None, Version::new(1, 13, 1)), None);
        let nobodys: IpAddr = "203.0.113.1".parse().unwrap();
        assert_eq!(of_address(Some(nobodys), Version::new(1, 13, 1)), None);
    }

    #[test]
    fn an_rdma_device_is_used_with_its_interface() {
        let directory = std::env::temp_dir().join(format!("symmem-net-{}", std::process::id()));
        let interface = directory.join("ib0");
        std::fs::create_dir_all(interface.join("device/infiniband/mlx5_0")).unwrap();
        std::fs::write(interface.join("dev_port"), "1\n").unwrap();
        assert_eq!(adapters_of(&directory, "ib0"), ["mlx5_0:2"]);
        assert!(adapters_of(&directory, "lo").is_empty());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
