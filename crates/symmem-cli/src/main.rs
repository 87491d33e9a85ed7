//! The `symmem` program: starts ranks, measures, and says what works on this machine.
#![deny(unsafe_code)]

mod bench;
mod calibrate;
mod descendants;
mod doctor;
mod explain;
mod guard;
mod run;
mod topo;

use std::io::{Write, stderr};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Symmetric memory: ranks load, store and signal in each other's buffers
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Launching(Launching),
    Explain(explain::Args),
    Calibrate(calibrate::Args),
    /// Says what works on this machine, and what is missing for the rest
    Doctor,
    Topo(topo::Args),
    #[command(subcommand, name = guard::SUBCOMMAND, hide = true)]
    Guarded(Launching),
    #[command(name = bench::RANK, hide = true)]
    BenchRank(bench::RankArgs),
}

/// What starts processes, and is guarded for that.
#[derive(Subcommand)]
enum Launching {
    Run(run::Args),
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).init();
    execute(Cli::parse().command).unwrap_or_else(|error| {
        // `eprintln` would panic where nobody reads.
        let _ = writeln!(stderr(), "symmem: {error:#}");
        let code = error.downcast_ref().map_or(1, run::NotStarted::code);
        ExitCode::from(code)
    })
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::Launching(Launching::Run(args)) => guard::watch(args.grace()),
        Command::Launching(Launching::Bench(_)) => guard::watch(run::GRACE),
        Command::Guarded(launching) => {
            guard::obey()?;
            match launching {
                Launching::Run(args) => args.run(),
                Launching::Bench(args) => args.run(),
            }
        }
        Command::Explain(args) => args.run(),
        Command::Calibrate(args) => args.run(),
        Command::BenchRank(args) => args.run(),
        Command::Doctor => doctor::run(),
        Command::Topo(args) => args.run(),
    }
}
