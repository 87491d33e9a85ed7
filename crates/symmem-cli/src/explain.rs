//! `symmem explain`: which way a collective would go on this machine, and why.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use symmem::internals::InUse;
use symmem::internals::plan::{self, Across, Spread};
use symmem::{DType, ReduceOp};

/// Shows which algorithm a collective uses for a size, and the estimated time of each
#[derive(clap::Args)]
pub struct Args {
    /// The collective
    #[arg(value_parser = COLLECTIVES)]
    collective: String,
    /// Bytes of each rank's part
    #[arg(long)]
    bytes: usize,
    /// Ranks of the group
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Hosts that the ranks are on: as many on each, one host after the other
    #[arg(long, default_value_t = 1)]
    hosts: usize,
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
        let Self { collective, bytes, ranks, hosts, dtype } = self;
        ensure!(*ranks > 0, "--ranks must be at least 1: a group has at least one rank");
        ensure!(
            *hosts > 0 && ranks.is_multiple_of(*hosts),
            "--hosts must divide --ranks: {ranks} ranks cannot be spread evenly over {hosts} hosts"
        );
        ensure!(bytes.is_multiple_of(dtype.size()), "{bytes} bytes are no whole number of {dtype}");
        let elements = bytes / dtype.size();
        let place = if *hosts > 1 { format!(" on {hosts} hosts") } else { String::new() };
        let subject =
            format!("{collective} of {elements} {dtype} ({bytes} bytes), {ranks} ranks{place}");
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
        if self.hosts > 1 {
            return self.verdict_between_hosts();
        }
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

impl Args {
    fn verdict_between_hosts(&self) -> String {
        let can_chain = plan::is_passed_on(self.dtype, ReduceOp::Sum);
        let (ranks, hosts, is_even, stage) = (self.ranks, self.hosts, true, plan::PIECE);
        let spread = Spread { ranks, hosts, is_even, can_chain, stage };
        let crosses = |times: &str| format!("  staged: what all ranks read crosses {times}\n");
        match self.collective.as_str() {
            "all_reduce" => {}
            "all_gather" | "broadcast" => {
                return match plan::crosses_once(self.bytes, &spread) {
                    true => crosses("to each host once, and all its ranks read it there"),
                    false => crosses("to each rank of other hosts"),
                };
            }
            _ => return "  staged: each rank sends each other rank what it reads\n".to_owned(),
        }
        let ways = plan::across(self.bytes, &spread);
        let lines = ways.iter().enumerate().map(|(i, (way, nanoseconds))| {
            let (mark, name) = (if i == 0 { "*" } else { " " }, format!("{way:?}"));
            format!("{mark} {name:<14} {:>12.3} us\n", *nanoseconds as f64 / 1000.0)
        });
        let mut text: String = lines.collect();
        if let Some((chosen, _)) = ways.first() {
            text +=
                &format!("{chosen:?} is chosen: it should be the fastest. Times are estimates.\n");
        }
        if ways.iter().all(|(way, _)| *way != Across::Chain) {
            text += match can_chain {
                true => "Chain needs several ranks on each host.\n",
                false => "Chain is not possible: this type is computed in a wider one.\n",
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(collective: &str, bytes: usize) -> String {
        on(collective, bytes, (2, 1), DType::F32)
    }

    fn on(collective: &str, bytes: usize, (ranks, hosts): (usize, usize), dtype: DType) -> String {
        Args { collective: collective.to_owned(), bytes, ranks, hosts, dtype }.verdict()
    }

    #[test]
    fn between_hosts_ranks_go_other_ways() {
        assert!(on("all_reduce", 64, (4, 2), DType::F32).contains("* Raw"));
        assert!(on("all_reduce", 1 << 20, (4, 2), DType::F32).contains("* Chain"));
        let narrow = on("all_reduce", 1 << 20, (4, 2), DType::BF16);
        assert!(narrow.contains("* TwoHopsRelayed") && narrow.contains("wider"), "{narrow}");
        let alone = on("all_reduce", 1 << 20, (2, 2), DType::F32);
        assert!(alone.contains("several ranks on each") && alone.contains("* TwoHops"), "{alone}");
        assert!(on("broadcast", 1 << 20, (4, 2), DType::F32).contains("to each host once"));
        assert!(on("all_gather", 64, (4, 2), DType::F32).contains("to each host once"));
        assert!(on("all_gather", 16, (4, 2), DType::F32).contains("to each rank"));
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
