//! Machines that are not there.

use std::path::Path;
use std::sync::Arc;

use symmem_sys::cuda::fake::{Config, Fabric, Fake};
use symmem_sys::cuda::{Devices, code};
use symmem_sys::nvml::{
    Ancestor as Near, Device as Known, Fabric as FabricInfo, Failure, LinkEnd, Nvml, P2p,
    P2pStatus, Result,
};

use super::*;

/// A link of a device of the fake NVML.
#[derive(Clone)]
enum Link {
    Down,
    Switch,
    To(usize),
}

/// As many devices as the fake driver has, with the same bus ids, and their links.
struct Links(Vec<Vec<Link>>);

fn bus_id(device: usize) -> String {
    format!("0000:{:02x}:00.0", device + 1)
}

fn failure<T>(code: i32) -> Result<T> {
    Err(Failure { call: "of a fake", code, text: "no".to_owned() })
}

impl Links {
    fn number(&self, device: Known) -> usize {
        (0..self.0.len()).find(|number| Known::fake(*number) == device).unwrap()
    }

    fn link(&self, device: Known, link: u32) -> Result<Link> {
        let found = self.0[self.number(device)].get(link as usize).cloned();
        found.map_or_else(|| failure(2), Ok)
    }
}

impl Nvml for Links {
    fn driver_version(&self) -> Result<String> {
        Ok("580.00".to_owned())
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.0.len() as u32)
    }

    fn device_by_index(&self, index: u32) -> Result<Known> {
        Ok(Known::fake(index as usize))
    }

    fn device_by_pci(&self, id: &str) -> Result<Known> {
        let found = (0..self.0.len()).find(|device| bus_id(*device) == id);
        found.map_or_else(|| failure(6), |device| Ok(Known::fake(device)))
    }

    fn name(&self, _: Known) -> Result<String> {
        failure(Failure::NOT_SUPPORTED)
    }

    fn uuid(&self, _: Known) -> Result<String> {
        failure(Failure::NOT_SUPPORTED)
    }

    fn pci_bus_id(&self, device: Known) -> Result<String> {
        Ok(bus_id(self.number(device)))
    }

    fn p2p_status(&self, _: Known, _: Known, _: P2p) -> Result<P2pStatus> {
        Ok(P2pStatus::Ok)
    }

    fn link_active(&self, device: Known, link: u32) -> Result<bool> {
        Ok(!matches!(self.link(device, link)?, Link::Down))
    }

    fn link_end(&self, device: Known, link: u32) -> Result<LinkEnd> {
        match self.link(device, link)? {
            Link::Down => failure(Failure::NOT_SUPPORTED),
            Link::Switch => Ok(LinkEnd::Switch),
            Link::To(_) => Ok(LinkEnd::Gpu),
        }
    }

    fn link_remote(&self, device: Known, link: u32) -> Result<String> {
        match self.link(device, link)? {
            Link::To(other) => Ok(bus_id(other)),
            Link::Down | Link::Switch => failure(2),
        }
    }

    fn common_ancestor(&self, device: Known, peer: Known) -> Result<Near> {
        let same_node = self.number(device) / 4 == self.number(peer) / 4;
        Ok(if same_node { Near::Node } else { Near::System })
    }

    fn cpu_affinity(&self, device: Known) -> Result<Vec<usize>> {
        let first = self.number(device) / 4 * 48;
        Ok((first..first + 48).collect())
    }

    fn fabric(&self, _: Known) -> Result<FabricInfo> {
        failure(Failure::NOT_SUPPORTED)
    }
}

fn look(driver: &Arc<Fake>, nvml: std::result::Result<&Links, &str>) -> Topology {
    driver.init().unwrap();
    let nvml = nvml.map(|links| links as &dyn Nvml).map_err(str::to_owned);
    survey::look(&**driver, nvml, Path::new("/nowhere")).unwrap()
}

#[test]
fn eight_devices_on_a_switch_have_all_their_links_to_each_other() {
    let mut links = vec![vec![Link::Switch; 18]; 8];
    links[7].truncate(16); // two of its links are not there
    links[6][0] = Link::Down;
    let topology = look(&Fake::plain(8), Ok(&Links(links)));
    for (i, row) in topology.nvlinks.iter().enumerate() {
        for (j, &count) in row.iter().enumerate() {
            let expected = match (i, j) {
                _ if i == j => 0,
                (7, _) | (_, 7) => 16,
                (6, _) | (_, 6) => 17,
                _ => 18,
            };
            assert_eq!(count, expected, "{i} {j}");
        }
    }
    let near = Pair { ancestor: Some(Ancestor::Node), access: true, atomics: true };
    assert_eq!(topology.pairs[0][3], Some(near));
    assert_eq!(topology.pairs[0][4], Some(Pair { ancestor: Some(Ancestor::Sys), ..near }));
    assert_eq!(topology.pairs[0][0], None);
    assert_eq!(topology.devices[5].cores, (48..96).collect::<Vec<_>>());
    assert_eq!(topology.warnings, Vec::<String>::new());
    let text = show::text(&topology);
    assert!(text.contains("NV18") && text.contains("48-95"), "{text}");
    assert!(text.contains("no multicast on cuda:0-7: the device has no multicast"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
}

#[test]
fn four_devices_in_pairs_have_links_only_within_their_pair() {
    let links = [1, 0, 3, 2].map(|other| vec![Link::To(other); 4]).to_vec();
    let topology = look(&Fake::plain(4), Ok(&Links(links)));
    let expected = [[0, 4, 0, 0], [4, 0, 0, 0], [0, 0, 0, 4], [0, 0, 4, 0]];
    assert_eq!(topology.nvlinks, expected);
    let text = show::text(&topology);
    assert!(text.contains("NV4") && text.contains("NODE"), "{text}");
}

#[test]
fn devices_without_links_are_joined_by_pci_alone() {
    let devices = vec![Config { peers: false, ..Config::default() }; 2];
    let topology = look(&Fake::new(devices), Ok(&Links(vec![Vec::new(); 2])));
    assert_eq!(topology.nvlinks, [[0, 0], [0, 0]]);
    let pair = topology.pairs[0][1].unwrap();
    assert!(!pair.access && !pair.atomics);
    assert!(show::text(&topology).contains("access"));
}

#[test]
fn links_to_devices_that_this_process_does_not_see_count_for_nobody() {
    let links = vec![vec![Link::To(1), Link::To(7)], vec![Link::To(0)]];
    let topology = look(&Fake::plain(2), Ok(&Links(links)));
    assert_eq!(topology.nvlinks, [[0, 1], [1, 0]]);
}

#[test]
fn without_nvml_there_is_a_warning_and_no_links() {
    let topology = look(&Fake::plain(2), Err("NVML could not be loaded: no"));
    assert_eq!(topology.nvlinks, [[0, 0], [0, 0]]);
    assert!(topology.warnings[0].contains("NVML could not be loaded"), "{topology:?}");
    assert!(topology.pairs[0][1].is_some_and(|pair| pair.access && pair.ancestor.is_none()));
    assert!(show::text(&topology).contains("warning: NVML could not"));

    // It is there, but knows nothing of the second device.
    let topology = look(&Fake::plain(2), Ok(&Links(vec![vec![Link::Switch]])));
    assert_eq!(topology.nvlinks, [[0, 0], [0, 0]]);
    assert!(topology.warnings[0].contains("0000:02:00.0"), "{topology:?}");
}

#[test]
fn what_a_device_can_do_is_found_out_by_trying() {
    let able = Config { multicast: true, fabric: Fabric::Yes, ..Config::default() };
    let liar = Config { fabric: Fabric::NotPermitted, ..Config::default() };
    let old = Config { virtual_memory: false, ..Config::default() };
    let driver = Fake::new(vec![able, liar, old]);
    let topology = look(&driver, Err("no"));
    let [able, liar, old] = topology.devices.as_slice() else { unreachable!("three devices") };
    assert!(able.descriptors.works() && able.fabric.works() && able.multicast.works(), "{able:?}");
    assert!(liar.descriptors.works() && !liar.fabric.works() && !liar.multicast.works());
    assert!(liar.fabric.why().contains("CUDA_ERROR_NOT_PERMITTED"), "{liar:?}");
    assert!(old.descriptors.why().contains("no virtual memory management"), "{old:?}");
    assert_eq!(driver.live(), Vec::<String>::new());

    driver.fail_always("cuMemExportToShareableHandle", code::NOT_SUPPORTED);
    let trial = can_be_shared(&*driver, driver.device(0).unwrap());
    assert!(trial.why().contains("cuMemExportToShareableHandle failed"), "{trial:?}");
    assert_eq!(driver.live(), Vec::<String>::new());
}

#[test]
fn a_device_is_described_in_json() {
    let topology = look(&Fake::plain(2), Err("no"));
    let json = serde_json::to_value(&topology).unwrap();
    assert_eq!(json["cuda"], "13.0");
    let device = &json["devices"][1];
    assert_eq!(device["number"], 1);
    assert_eq!(device["uuid"], "GPU-73796d6d-656d-2d66-616b-650000000001");
    assert_eq!(device["pci"], "0000:02:00.0");
    assert_eq!(device["capability"], "9.0");
    assert_eq!(device["memory"], 1 << 30);
    assert_eq!(device["numa"], 0);
    assert_eq!(device["descriptors"], serde_json::json!({ "works": true }));
    assert_eq!(device["multicast"]["works"], false);
    assert_eq!(device["multicast"]["why"], "the device has no multicast");
    assert_eq!(json["pairs"][0][1]["access"], true);
    assert!(json["pairs"][0][0].is_null());
}

#[test]
fn where_only_the_kernel_knows_it_is_asked() {
    let directory = std::env::temp_dir().join(format!("symmem-topo-{}", std::process::id()));
    let place = directory.join("bus/pci/devices/0000:01:00.0");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("numa_node"), "1\n").unwrap();
    std::fs::write(place.join("local_cpulist"), "4-6,9\n").unwrap();
    let driver = Fake::new(vec![Config { host_numa: -1, ..Config::default() }]);
    driver.init().unwrap();
    let topology = survey::look(&*driver, Err("no".to_owned()), &directory).unwrap();
    std::fs::remove_dir_all(directory).unwrap();
    assert_eq!(topology.devices[0].numa, Some(1));
    assert_eq!(topology.devices[0].cores, [4, 5, 6, 9]);
    assert_eq!(show::ranges(&topology.devices[0].cores), "4-6,9");
}
