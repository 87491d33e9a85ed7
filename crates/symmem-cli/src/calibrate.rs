//! `symmem calibrate`: measures what passing flags and lines costs on this machine, for the choice of algorithms.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use symmem::internals::{Costs, Measured, costs_path, measure};

/// Measures the costs by which algorithms are chosen on this machine, and saves them in a file
///
/// The file is the one that SYMMEM_COSTS names, or symmem/costs in the user's cache. A group uses the costs that its rank 0 reads.
#[derive(clap::Args)]
pub struct Args {
    /// Save the result even if the two cores were two threads of one core
    #[arg(long)]
    force: bool,
    /// Only show what was measured
    #[arg(long)]
    dry_run: bool,
}

impl Args {
    /// Measures, prints the table, and writes the file.
    pub fn run(&self) -> Result<ExitCode> {
        let found = measure()?;
        let (said, code) = self.keep(&found)?;
        let text = format!("{}\n{}{said}\n", table(&found.costs), measured(&found));
        match std::io::stdout().write_all(text.as_bytes()) {
            // Who closes the pipe has seen enough.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(error).context("cannot print")
            }
            _ => Ok(code),
        }
    }

    /// What became of it.
    fn keep(&self, found: &Measured) -> Result<(String, ExitCode)> {
        if self.dry_run {
            return Ok(("Nothing was written.".to_owned(), ExitCode::SUCCESS));
        }
        if found.near && !self.force {
            let said =
                "Nothing was written: try again later, or write it all the same with --force.";
            return Ok((said.to_owned(), ExitCode::FAILURE));
        }
        let path = costs_path().context("nowhere to write to: set SYMMEM_COSTS or HOME")?;
        found.costs.write(&path)?;
        Ok((format!("Written to {}.", path.display()), ExitCode::SUCCESS))
    }
}

fn measured(found: &Measured) -> String {
    let [first, second] = found.cores;
    let trip = f64::from(found.round_trip) / 1000.0;
    let mut said = format!(
        "Measured on cores {first} and {second}; a flag takes {trip:.0} ns there and back.\n"
    );
    if found.near {
        said +=
            "That fast it travels between cores that share a cache; a host may part them again.\n";
    }
    said
}

fn table(found: &Costs) -> Table {
    let nanoseconds = |picoseconds: u32| format!("{:.1}", f64::from(picoseconds) / 1000.0);
    let rows = Costs::BUILT_IN.named().into_iter().zip(found.named());
    let rows = rows.zip(MEANINGS).map(|(((name, built_in), (_, found)), meaning)| {
        [name.to_owned(), nanoseconds(built_in), nanoseconds(found), meaning.to_owned()]
    });
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["cost", "built in, ns", "measured, ns", "of"]).add_rows(rows);
    table.column_iter_mut().skip(1).take(2).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    table
}

/// In the order of the costs.
const MEANINGS: [&str; 7] = [
    "all ranks telling each other that they are there",
    "more of that for each rank",
    "ranks that share a core handing it on",
    "a line written that peers have read",
    "a line read that a peer has just written",
    "a line read that a peer wrote a while ago",
    "a line of a peer read and written back",
];
