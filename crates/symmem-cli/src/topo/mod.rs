//! `symmem topo`: the devices of this machine, what they can do, and the links between them.
//!
//! [`survey::look`] finds out, over traits, so that tests ask fake machines; the rest shows it.

mod links;
mod show;
mod survey;
#[cfg(test)]
mod tests;
mod trial;

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use symmem_sys::{cuda, nvml};

pub use trial::{Trial, can_be_shared};

/// Shows the GPUs of this machine, what they can do, and the links between them
#[derive(clap::Args)]
pub struct Args {
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// What there is on a machine.
#[derive(Debug, Serialize)]
struct Topology {
    /// The CUDA version that the driver supports.
    cuda: String,
    devices: Vec<Device>,
    /// `nvlinks[i][j]`: NVLinks between devices i and j, those through switches included.
    nvlinks: Vec<Vec<u32>>,
    /// `pairs[i][j]`: what else is known of the way from device i to device j; nothing of a device and itself.
    pairs: Vec<Vec<Option<Pair>>>,
    /// What could not be found out.
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Device {
    /// Its number among those that this process sees.
    number: usize,
    name: String,
    uuid: String,
    pci: String,
    /// Bytes.
    memory: usize,
    capability: String,
    multiprocessors: i32,
    /// The nearest NUMA node of the host.
    numa: Option<u32>,
    /// The nearest cores.
    cores: Vec<usize>,
    /// Memory that other processes can map, by a descriptor.
    descriptors: Trial,
    /// Memory that other machines on the fabric can map.
    fabric: Trial,
    /// Addresses that reach several devices at once.
    multicast: Trial,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Pair {
    /// How near they are on the PCI tree.
    ancestor: Option<Ancestor>,
    /// Loads and stores reach the other's memory.
    access: bool,
    /// Atomics do so as well.
    atomics: bool,
}

/// Where the ways to two devices part, as `nvidia-smi topo` calls it; nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Ancestor {
    Board,
    Pix,
    Pxb,
    Phb,
    Node,
    Sys,
}

impl Args {
    /// Prints what there is. A machine without a device is no failure.
    pub fn run(&self) -> Result<ExitCode> {
        let found = here();
        let text = match (&found, self.json) {
            (Ok(topology), true) => serde_json::to_string_pretty(topology)? + "\n",
            (Err(why), true) => {
                let none = serde_json::json!({ "devices": [], "why": why });
                serde_json::to_string_pretty(&none)? + "\n"
            }
            (Ok(topology), false) => show::text(topology),
            (Err(why), false) => format!("There is no GPU to show: {why}\n"),
        };
        match std::io::stdout().write_all(text.as_bytes()) {
            // Who closes the pipe has seen enough.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(error).context("cannot print")
            }
            _ => Ok(ExitCode::SUCCESS),
        }
    }
}

/// This machine's, or why it has none.
fn here() -> Result<Topology, String> {
    let driver = cuda::load().map_err(|missing| missing.to_string())?;
    driver.init().map_err(|failure| failure.to_string())?;
    let nvml = nvml::load();
    let nvml = nvml.as_deref().map_err(ToString::to_string);
    let topology = survey::look(&*driver, nvml, Path::new("/sys")).map_err(|e| e.to_string())?;
    if topology.devices.is_empty() {
        return Err("the driver works, but this process sees no device".to_owned());
    }
    Ok(topology)
}
