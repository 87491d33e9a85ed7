//! What was found, as tables.

use comfy_table::{ContentArrangement, Table, presets};

use super::{Ancestor, Device, Pair, Topology, Trial};

/// All of it.
pub(super) fn text(topology: &Topology) -> String {
    let devices = &topology.devices;
    let mut text =
        format!("CUDA {}\n{}\n", topology.cuda, table(DEVICES, devices.iter().map(device)));
    text += &format!("{}\n", table(ABILITIES, devices.iter().map(abilities)));
    for why in reasons(devices) {
        text += &format!("{why}\n");
    }
    if devices.len() > 1 {
        text += &format!("{}\n{WAYS}\n", matrix(topology, "way", way));
        text += &format!("{}\n{ACCESS}\n", matrix(topology, "access", |_, pair| access(pair)));
    }
    for warning in &topology.warnings {
        text += &format!("warning: {warning}\n");
    }
    text
}

const DEVICES: [&str; 8] =
    ["device", "name", "memory", "SMs", "capability", "PCI", "NUMA node", "nearest cores"];
const ABILITIES: [&str; 5] = ["device", "uuid", "descriptors", "fabric", "multicast"];
const WAYS: &str = "way: NV and the number of NVLinks; else where the ways part: BOARD, PIX (one PCI switch),\n     \
                    PXB (several), PHB (host bridge), NODE (NUMA node), SYS (beyond it), ? (not known)";
const ACCESS: &str = "access: atomics (loads and stores as well), loads (and stores), or no";

fn device(device: &Device) -> Vec<String> {
    vec![
        format!("cuda:{}", device.number),
        device.name.clone(),
        format!("{:.1} GiB", device.memory as f64 / (1_u64 << 30) as f64),
        device.multiprocessors.to_string(),
        device.capability.clone(),
        device.pci.clone(),
        device.numa.map_or_else(|| "?".to_owned(), |node| node.to_string()),
        ranges(&device.cores),
    ]
}

fn abilities(device: &Device) -> Vec<String> {
    let word = |trial: &Trial| if trial.works() { "yes" } else { "no" }.to_owned();
    let (number, uuid) = (format!("cuda:{}", device.number), device.uuid.clone());
    vec![number, uuid, word(&device.descriptors), word(&device.fabric), word(&device.multicast)]
}

/// Why something does not work, once for all devices with the same reason.
fn reasons(devices: &[Device]) -> Vec<String> {
    let mut reasons: Vec<(&str, &str, Vec<usize>)> = Vec::new();
    for device in devices {
        let Device { number, descriptors, fabric, multicast, .. } = device;
        let tried = [("descriptors", descriptors), ("fabric", fabric), ("multicast", multicast)];
        for (what, trial) in tried.into_iter().filter(|(_, trial)| !trial.works()) {
            let known = reasons.iter_mut().find(|known| (known.0, known.1) == (what, trial.why()));
            match known {
                Some((_, _, numbers)) => numbers.push(*number),
                None => reasons.push((what, trial.why(), vec![*number])),
            }
        }
    }
    let line = |(what, why, numbers): (&str, &str, Vec<usize>)| {
        format!("no {what} on cuda:{}: {why}", ranges(&numbers))
    };
    reasons.into_iter().map(line).collect()
}

fn way(nvlinks: u32, pair: Pair) -> String {
    match (nvlinks, pair.ancestor) {
        (1.., _) => format!("NV{nvlinks}"),
        (0, None) => "?".to_owned(),
        (0, Some(ancestor)) => match ancestor {
            Ancestor::Board => "BOARD",
            Ancestor::Pix => "PIX",
            Ancestor::Pxb => "PXB",
            Ancestor::Phb => "PHB",
            Ancestor::Node => "NODE",
            Ancestor::Sys => "SYS",
        }
        .to_owned(),
    }
}

fn access(pair: Pair) -> String {
    match (pair.access, pair.atomics) {
        (true, true) => "atomics",
        (true, false) => "loads",
        (false, _) => "no",
    }
    .to_owned()
}

fn matrix(topology: &Topology, name: &str, cell: impl Fn(u32, Pair) -> String) -> Table {
    let names = topology.devices.iter().map(|device| format!("cuda:{}", device.number));
    let header: Vec<String> = std::iter::once(name.to_owned()).chain(names.clone()).collect();
    let row = |(name, (links, pairs)): (String, (&Vec<u32>, &Vec<Option<Pair>>))| {
        let cells = links.iter().zip(pairs).map(|(&links, pair)| match pair {
            Some(pair) => cell(links, *pair),
            None => "—".to_owned(),
        });
        std::iter::once(name).chain(cells).collect::<Vec<_>>()
    };
    let rows = topology.nvlinks.iter().zip(&topology.pairs);
    table(header, names.zip(rows).map(row))
}

fn table<T: Into<String>>(
    header: impl IntoIterator<Item = T>,
    rows: impl Iterator<Item = Vec<String>>,
) -> Table {
    let header: Vec<String> = header.into_iter().map(Into::into).collect();
    let mut table = Table::new();
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(110);
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    table
}

/// `0-3,8` for 0, 1, 2, 3 and 8.
pub(super) fn ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let spell = |(first, last): (usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(spell).collect::<Vec<_>>().join(",")
}
