//! `symmem doctor`: what works on this machine, what is missing for the rest, and every setting that is read.
//!
//! It only looks: it starts nothing, and makes no context on a GPU. With another node it tries the network between them.

mod backends;
mod hosts;
mod machine;
mod reach;
mod variables;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use comfy_table::{ContentArrangement, Table, presets};

/// Says what works on this machine, and what is missing for the rest
#[derive(clap::Args)]
pub struct Args {
    /// Waits for `symmem doctor --peer` on another node, to test the network between the two [default port: a free one]
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "0", conflicts_with = "peer")]
    listen: Option<u16>,

    /// Tests the network to a node on which `symmem doctor --listen` waits
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
}

impl Args {
    /// Looks at this machine, or at the network to another.
    pub fn run(self) -> Result<ExitCode> {
        match (self.listen, &self.peer) {
            (Some(port), _) => reach::listen(port),
            (None, Some(peer)) => {
                print(&[table(["network", "result", "details"], reach::peer(peer)?)])
            }
            (None, None) => look(),
        }
    }
}

fn look() -> Result<ExitCode> {
    print(&[
        table(["backend", "works", "details"], backends::rows()),
        table(["between hosts", "here", "details"], hosts::rows()),
        table(["machine", "here", "details"], machine::rows()),
        table(["variable", "value", "meaning"], variables::rows()),
    ])
}

fn print(tables: &[Table]) -> Result<ExitCode> {
    let text: String = tables.iter().map(|table| format!("{table}\n")).collect();
    match std::io::stdout().write_all(text.as_bytes()) {
        // Who closes the pipe has seen enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot print"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// A name, a short verdict or value, and an explanation.
type Row = [String; 3];

fn row(name: &str, verdict: &str, details: impl Into<String>) -> Row {
    [name.to_owned(), verdict.to_owned(), details.into()]
}

/// A row for something that works or says why it does not.
fn checked(name: &str, result: Result<String, String>) -> Row {
    match result {
        Ok(details) => row(name, "yes", details),
        Err(missing) => row(name, "no", missing),
    }
}

fn table(header: [&str; 3], rows: Vec<Row>) -> Table {
    let mut table = Table::new();
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(110);
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    table
}
