//! The rows of the table: what there is to measure. A further one is a file here and its name in [`ROWS`].

mod barrier;
mod floor;
mod put_signal;
mod rendezvous;
mod startup;

use std::time::Duration;

use anyhow::Result;
use symmem::Group;

use super::board::Board;
use super::measure::Case;

/// In the order in which they are measured, in every round anew.
pub(super) const ROWS: &[Row] =
    &[floor::ROW, barrier::ROW, put_signal::ROW, rendezvous::ROW, startup::ROW];

/// What a user can ask for by name.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// How many ranks measure it, unless the user says otherwise.
    pub(super) ranks: usize,
    pub(super) how: How,
    pub(super) measures: &'static [Measure],
}

impl Row {
    /// The measures that those of this row are compared with.
    pub(super) fn floors(&self) -> impl Iterator<Item = &'static str> {
        self.measures.iter().filter_map(|measure| measure.floor)
    }
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
#[derive(Debug)]
pub(super) struct Measure {
    /// `symmem`, or `limits` for what the machine itself allows.
    pub(super) system: &'static str,
    pub(super) collective: &'static str,
    pub(super) bytes: usize,
    /// Calls in one sample.
    pub(super) batch: usize,
    /// Samples in one round, if there is time for so many.
    pub(super) samples: usize,
    /// The measure that this one is compared with.
    pub(super) floor: Option<&'static str>,
    pub(super) target: Option<Target>,
    /// How a rank does it.
    pub(super) make: Option<Make>,
}

/// Makes what one rank does.
pub(super) type Make = for<'a> fn(&'a Group, &'a Board<'a>) -> Result<Box<dyn Case + 'a>>;

/// What is good enough.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    TimesFloor(f64),
    Within(Duration),
}

/// The measure of this name.
pub(super) fn measure(collective: &str) -> Option<&'static Measure> {
    ROWS.iter().flat_map(|row| row.measures).find(|measure| measure.collective == collective)
}

/// How many ranks a measure's target is for.
pub(super) fn ranks_of(measure: &Measure) -> usize {
    let has = |row: &&Row| row.measures.iter().any(|m| m.collective == measure.collective);
    ROWS.iter().find(has).map_or(0, |row| row.ranks)
}

/// The list for `--help`.
pub(super) fn help() -> String {
    let line = |row: &Row| format!("  {:12} {}, {} ranks\n", row.name, row.about, row.ranks);
    format!("Rows:\n{}", ROWS.iter().map(line).collect::<String>())
}
