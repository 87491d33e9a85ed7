//! What the user may set about the collectives: the launcher takes it, and hands it on to its ranks.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use symmem::cuda::Algorithm;

use super::rows::between::Shape;
use super::value::DTYPES;

/// The sizes that are measured unless the user names others; 128 MiB and more on request.
const SIZES: &[usize] = &[8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 16 << 20];
/// Those of a run that only checks.
const FEW_SIZES: &[usize] = &[8, 16 << 10];

/// Of the collectives alone; the other rows have nothing to choose.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct Settings {
    /// Sizes of one rank's block, such as 8,16K,1M [default: 8,1K,16K,128K,1M,16M]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = size)]
    bytes: Vec<usize>,

    /// The elements' type, or several, such as f32,bf16
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "f32")]
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(DTYPES))]
    dtype: Vec<String>,

    /// Where the memory lies: between processes, between threads of one, or on devices between processes
    #[arg(long, value_enum, default_value_t = Backend::Host)]
    pub(super) backend: Backend,

    /// What the collectives work on: symmetric memory, or private slices through the group's workspace
    #[arg(long, value_enum, default_value_t = Memory::Symmetric)]
    pub(super) memory: Memory,

    /// How an all-reduce is done; the last two also of what else has them
    #[arg(long, value_enum, default_value_t = How::Auto)]
    algorithm: How,

    /// With `--backend cuda`: measures calls that are captured and replayed, twenty in a graph
    #[arg(long)]
    pub(super) graph: bool,

    /// With `--backend cuda`: the device that all ranks use [default: one after the other]
    #[arg(long, value_name = "N")]
    pub(super) device: Option<u32>,

    /// Spreads the ranks over so many hosts, all on this machine: as root in network namespaces, else in name only
    #[arg(long, value_name = "H", value_parser = clap::value_parser!(u16).range(2..))]
    pub(super) hosts: Option<u16>,

    /// With --hosts, as root: what passes each way, as tc writes it
    #[arg(long, value_name = "1gbit", requires = "hosts", value_parser = rate)]
    pub(super) rate: Option<String>,

    /// With --hosts: how many ranks there are
    #[arg(skip)]
    pub(super) ranks: Option<usize>,

    /// A few samples of each: checks the results, measures nothing worth telling
    #[arg(long, hide = true)]
    pub(super) quick: bool,

    /// Milliseconds for the samples of one figure in one round
    #[arg(long, value_name = "MS", hide = true, value_parser = clap::value_parser!(u16).range(1..))]
    time: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    Host,
    Process,
    Cuda,
}

impl Backend {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Process => "process",
            Self::Cuda => "cuda",
        }
    }

    /// That of the world: ranks on devices synchronise in the host's memory.
    pub(super) fn of_world(self) -> &'static str {
        if self == Self::Cuda { Self::Host.name() } else { self.name() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Memory {
    Symmetric,
    Slices,
}

impl Memory {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Symmetric => "symmetric",
            Self::Slices => "slices",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum How {
    Auto,
    /// On devices: data goes with its flags
    Flagged,
    OneShot,
    TwoShot,
    /// On devices with multicast: the switch adds up
    Multimem,
    /// On devices: all-gather and reduce-scatter by copies of the driver's
    CopyEngine,
}

impl How {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Flagged => "flagged",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::Multimem => "multimem",
            Self::CopyEngine => "copy-engine",
        }
    }

    /// Whether host memory has it not.
    fn is_of_devices(self) -> bool {
        matches!(self, Self::Flagged | Self::Multimem | Self::CopyEngine)
    }
}

/// The algorithm of this name.
pub(super) fn algorithm(name: &str) -> Algorithm {
    match name {
        "flagged" => Algorithm::Staged,
        "one-shot" => Algorithm::OneShot,
        "two-shot" => Algorithm::TwoShot,
        "multimem" => Algorithm::Multimem,
        "copy-engine" => Algorithm::CopyEngine,
        _ => Algorithm::Auto,
    }
}

impl Settings {
    /// The sizes, each at least one element.
    pub(super) fn sizes(&self) -> Vec<usize> {
        match (self.bytes.is_empty(), self.quick) {
            (false, _) => self.bytes.clone(),
            (true, true) => FEW_SIZES.to_vec(),
            (true, false) => SIZES.to_vec(),
        }
    }

    /// The types' names, as long as the program runs.
    pub(super) fn dtypes(&self) -> Vec<&'static str> {
        let asked = |name: &&str| self.dtype.iter().any(|asked| asked == name);
        DTYPES.into_iter().filter(asked).collect()
    }

    pub(super) fn algorithm(&self) -> &'static str {
        self.algorithm.name()
    }

    /// That of a collective on devices; `-` where it has no such.
    pub(super) fn algorithm_of(&self, collective: &str) -> &'static str {
        let has = match collective {
            "all_reduce" => self.algorithm != How::CopyEngine,
            "reduce_scatter" => matches!(self.algorithm, How::Multimem | How::CopyEngine),
            "all_gather" => self.algorithm == How::CopyEngine,
            _ => false,
        };
        if has { self.algorithm.name() } else { "-" }
    }

    /// With several hosts, how many ranks are on each of how many.
    pub(super) fn shape(&self) -> Option<Shape> {
        let hosts = usize::from(self.hosts?);
        Some(((self.ranks.unwrap_or(hosts) / hosts).max(1), hosts))
    }

    /// How long the samples of one figure may take in one round.
    pub(super) fn time(&self) -> Duration {
        Duration::from_millis(self.time.unwrap_or(200).into())
    }

    /// For a run through everything, which nobody waits long for.
    pub(super) fn hurry(&mut self) {
        self.time.get_or_insert(35);
    }

    /// Whether the sizes are whole elements, and an algorithm can be chosen.
    pub(super) fn check(&self) -> Result<()> {
        for (name, &bytes) in
            self.dtypes().iter().flat_map(|n| self.bytes.iter().map(move |b| (n, b)))
        {
            let element = super::value::size_of(name);
            let whole = bytes >= element && bytes.is_multiple_of(element);
            ensure!(whole, "{bytes} bytes are not whole elements of {name}");
        }
        let chosen = self.memory == Memory::Slices && self.algorithm != How::Auto;
        ensure!(!chosen, "on slices there is one algorithm: leave out --algorithm or --memory");
        if self.hosts.is_some() {
            ensure!(self.backend == Backend::Host, "--hosts needs --backend host");
        }
        if self.backend == Backend::Cuda {
            ensure!(self.memory == Memory::Symmetric, "on devices the memory is symmetric");
            return super::device::check(self.device);
        }
        let asked = self.graph || self.device.is_some() || self.algorithm.is_of_devices();
        ensure!(
            !asked,
            "--graph, --device and --algorithm flagged, multimem or copy-engine need --backend cuda"
        );
        Ok(())
    }

    /// The same, as options of a rank.
    pub(super) fn options(&self) -> Vec<String> {
        let sizes: Vec<_> = self.sizes().iter().map(ToString::to_string).collect();
        let mut options = vec![
            format!("--bytes={}", sizes.join(",")),
            format!("--dtype={}", self.dtypes().join(",")),
            format!("--backend={}", self.backend.name()),
            format!("--memory={}", self.memory.name()),
            format!("--algorithm={}", self.algorithm.name()),
            format!("--time={}", self.time().as_millis()),
        ];
        options.extend(self.device.map(|device| format!("--device={device}")));
        options.extend(self.hosts.map(|hosts| format!("--hosts={hosts}")));
        options.extend(self.rate.as_ref().map(|rate| format!("--rate={rate}")));
        options.extend(self.graph.then(|| "--graph".to_owned()));
        options.extend(self.quick.then(|| "--quick".to_owned()));
        options
    }
}

/// A number with a unit of `tc`.
fn rate(text: &str) -> Result<String> {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let known = ["bit", "kbit", "mbit", "gbit"].contains(&unit.to_ascii_lowercase().as_str());
    ensure!(known && unit.len() < text.len(), "a rate is a number with bit, kbit, mbit or gbit");
    Ok(text.to_ascii_lowercase())
}

/// 16K, 1M, 2G or a plain number of bytes.
fn size(text: &str) -> Result<usize> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let unit = unit.trim_end_matches('b').trim_end_matches('i');
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => anyhow::bail!("the units are K, M and G"),
    };
    let number: usize = digits.parse().context("a size is a number with K, M, G or nothing")?;
    let bytes = number.checked_mul(1 << shift).filter(|&bytes| bytes > 0 && bytes <= 1 << 36);
    bytes.context("a size is from 1 byte to 64 GiB")
}

/// Bytes for people: 8 B, 16 KiB, 1 MiB.
pub(super) fn human(bytes: usize) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("8", 8), ("16K", 16 << 10), ("1m", 1 << 20), ("128 MiB", 128 << 20)]
        {
            let text: String = text.split(' ').collect();
            assert_eq!(size(&text).unwrap(), bytes);
        }
        for bad in ["", "K", "0", "1T", "-1", "99999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!([8, 1 << 10, 3 << 20, 1025].map(human), ["8 B", "1 KiB", "3 MiB", "1025 B"]);
    }
}
