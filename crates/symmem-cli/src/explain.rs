//! `symmem explain`: which way a collective would go on this machine, and why.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use symmem::DType;
use symmem::internals::InUse;
use symmem::internals::plan;

/// Shows which algorithm a collective uses for a size, and the estimated time of each
#[derive(clap::Args)]
pub struct Args {
    /// The collective
    #[arg(value_parser = COLLECTIVES)]
    collective: String,
    /// Bytes of each rank's part
    #[arg(long)]
    bytes: usize,
    /// Ranks of the group, all on this machine
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Type of the elements
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DType,
}

const COLLECTIVES: [&str; 8] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
];

fn dtype(name: &str) -> Result<DType, String> {
    let names = || DType::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    DType::by_name(name).ok_or_else(|| format!("one of {}", names()))
}

impl Args {
    /// Prints the choice.
    pub fn run(&self) -> Result<ExitCode> {
        let Self { collective, bytes, ranks, dtype } = self;
        ensure!(*ranks > 0, "a group has at least one rank");
        ensure!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are no whole number of {dtype}");
        let elements = bytes / dtype.size();
        let subject = format!("{collective} of {elements} {dtype} ({bytes} bytes), {ranks} ranks");
        let text = format!("{subject}\n{}Costs: {}.\n", self.verdict(), InUse::find().origin);
        match std::io::stdout().write_all(text.as_bytes()) {
            // Who closes the pipe has seen enough.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(error).context("cannot print")
            }
            _ => Ok(ExitCode::SUCCESS),
        }
    }

    fn verdict(&self) -> String {
        if self.collective != "all_reduce" {
            let way = if plan::is_small(self.bytes, self.ranks) {
                "staged: each part travels with its flag, one barrier"
            } else {
                "direct: each part is read where it lies, two barriers"
            };
            return format!("  {way}\n");
        }
        let chosen = plan::choose(self.bytes, self.ranks);
        let line = |e: plan::Estimate| {
            let mark = if e.algorithm == chosen { "*" } else { " " };
            let name = format!("{:?}", e.algorithm);
            format!("{mark} {name:<8} {:>12.3} us\n", e.nanoseconds as f64 / 1000.0)
        };
        let lines: String = plan::all_reduce(self.bytes, self.ranks).map(line).concat();
        format!("{lines}{chosen:?} is chosen: it should be the fastest. Times are estimates.\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(collective: &str, bytes: usize) -> String {
        let collective = collective.to_owned();
        Args { collective, bytes, ranks: 2, dtype: DType::F32 }.verdict()
    }

    #[test]
    fn exactly_one_algorithm_is_marked() {
        for bytes in [0, 8, 1024, 16_384, 1 << 27] {
            assert_eq!(verdict("all_reduce", bytes).matches('*').count(), 1);
        }
        assert!(verdict("all_reduce", 1 << 20).contains("* TwoShot"));
    }

    #[test]
    fn small_parts_travel_beside_their_flags() {
        assert!(verdict("broadcast", 8).contains("staged"));
        assert!(verdict("broadcast", 1 << 20).contains("direct"));
    }

    #[test]
    fn every_type_is_known_by_its_name() {
        assert!(DType::ALL.iter().all(|t| dtype(t.name()) == Ok(*t)));
        assert!(dtype("f80").unwrap_err().contains("bf16"));
    }
}
