//! The rows of the table: what there is to measure. A further one is a file here and its name in [`ROWS`].

mod barrier;
pub(super) mod between;
mod collectives;
mod data;
mod devices;
mod floor;
mod limits;
mod put_signal;
mod rendezvous;
mod send;
mod startup;

use std::time::Duration;

use anyhow::Result;
use symmem::Group;

use super::board::Board;
use super::measure::Case;
use super::settings::{Backend, Settings};

/// In the order in which they are measured, in every round.
pub(super) const ROWS: &[Row] = &[
    floor::ROW,
    barrier::ROW,
    put_signal::ROW,
    send::ROW,
    between::PUT,
    collectives::ALL_REDUCE,
    collectives::REDUCE_SCATTER,
    collectives::ALL_GATHER,
    collectives::BROADCAST,
    collectives::ALL_TO_ALL,
    collectives::REDUCE,
    collectives::GATHER,
    collectives::SCATTER,
    rendezvous::ROW,
    startup::ROW,
];

/// What a user can ask for by name.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// How many ranks measure it, unless the user says otherwise.
    pub(super) ranks: usize,
    pub(super) how: How,
    /// Whether it can be done on private slices too, or has to do with no memory at all.
    pub(super) on_slices: bool,
    /// Whether it can be done on memory of devices.
    pub(super) on_devices: bool,
    pub(super) measures: Measures,
}

impl Row {
    /// The measures that those of this row are compared with.
    pub(super) fn floors(&self) -> impl Iterator<Item = &'static str> {
        self.fixed().iter().filter_map(|measure| measure.floor)
    }

    /// The lines of the table that it always has.
    pub(super) fn fixed(&self) -> &'static [Measure] {
        match self.measures {
            Measures::Fixed(measures) => measures,
            Measures::BySize(_) => &[],
        }
    }

    /// All that is to be measured.
    pub(super) fn measures(&self, settings: &Settings) -> Vec<Measure> {
        if settings.backend == Backend::Cuda {
            return devices::measures(self.name, settings);
        }
        if settings.shape().is_some() {
            return between::measures(self.name, settings);
        }
        match self.measures {
            Measures::Fixed(measures) => measures.to_vec(),
            Measures::BySize(measures) => measures(self.name, settings),
        }
    }
}

/// The lines of a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Measures {
    Fixed(&'static [Measure]),
    /// By the name of the row and what the user has set.
    BySize(fn(&'static str, &Settings) -> Vec<Measure>),
}

/// Who measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// The ranks themselves, in rounds with other rows.
    InRanks,
    /// The launcher.
    FromOutside,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub(super) struct Measure {
    /// `symmem`, or `limits` for what the machine itself allows, `sockets` for what its network does.
    pub(super) system: &'static str,
    pub(super) collective: &'static str,
    pub(super) bytes: usize,
    /// Of bare sockets: how many bytes pass instead.
    pub(super) wire: usize,
    pub(super) dtype: &'static str,
    /// `symmetric` or `slices`.
    pub(super) memory: &'static str,
    pub(super) algorithm: &'static str,
    /// On which device, if on one, and how.
    pub(super) on: Option<OnDevice>,
    /// Calls in one sample.
    pub(super) batch: usize,
    /// Whether the reading of the result is timed too, as a figure of its own.
    pub(super) read: bool,
    /// Whether it begins with rank 0, which sends, and not with the last rank.
    pub(super) one_way: bool,
    /// Samples in one round, if there is time for so many.
    pub(super) samples: usize,
    /// Samples in one round in any case.
    pub(super) least: usize,
    /// How long the samples of one round may take.
    pub(super) time: Duration,
    /// How long calls are made before, to warm up.
    pub(super) warm: Duration,
    /// The measure that this one is compared with.
    pub(super) floor: Option<&'static str>,
    pub(super) target: Option<Target>,
    /// How a rank does it.
    pub(super) make: Option<Make>,
}

impl Measure {
    /// Twenty calls a sample, no data; what a measure does not say otherwise.
    const TINY: Self = Self {
        system: "symmem",
        collective: "",
        bytes: 0,
        wire: 0,
        dtype: "-",
        memory: "-",
        algorithm: "-",
        on: None,
        batch: 20,
        read: false,
        one_way: false,
        samples: 300,
        least: 20,
        time: Duration::from_millis(700),
        warm: Duration::from_millis(20),
        floor: None,
        target: None,
        make: None,
    };
}

/// How calls on devices are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnDevice {
    /// Whether they are captured and replayed.
    pub(super) graph: bool,
    /// The one that the user named.
    pub(super) device: Option<u32>,
}

/// Makes what one rank does.
pub(super) type Make = for<'a> fn(&Measure, &'a Group, &'a Board<'a>) -> Result<Box<dyn Case + 'a>>;

/// What is good enough.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    TimesFloor(f64),
    Within(Duration),
}

/// The measure of this name.
pub(super) fn measure(collective: &str) -> Option<&'static Measure> {
    ROWS.iter().flat_map(Row::fixed).find(|measure| measure.collective == collective)
}

/// Whether there are several measures of this name, for different sizes.
pub(super) fn has_sizes(collective: &str) -> bool {
    let measures = ROWS.iter().flat_map(Row::fixed);
    measures.filter(|measure| measure.collective == collective).count() > 1
}

/// How many ranks a measure's target is for.
pub(super) fn ranks_of(measure: &Measure) -> usize {
    let has = |row: &&Row| row.fixed().iter().any(|m| m.collective == measure.collective);
    ROWS.iter().find(has).map_or(0, |row| row.ranks)
}

/// The list for `--help`.
pub(super) fn help() -> String {
    let line = |row: &Row| format!("  {:14} {}, {} ranks\n", row.name, row.about, row.ranks);
    format!("Rows:\n{}", ROWS.iter().map(line).collect::<String>())
}
