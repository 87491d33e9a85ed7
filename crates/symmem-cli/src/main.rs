//! The `symmem` program: starts ranks, measures, and says what works on this machine.
#![deny(unsafe_code)]

mod calibrate;
mod doctor;
mod explain;
mod topo;

use std::io::{Write, stderr};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use symmem_launch::guard;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Symmetric memory: ranks load, store and signal in each other's buffers
#[derive(Parser)]
#[command(name = "symmem", version)]
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
    Doctor(doctor::Args),
    Topo(topo::Args),
    #[command(subcommand, name = guard::SUBCOMMAND, hide = true)]
    Guarded(Launching),
    #[command(name = symmem_bench::RANK, hide = true)]
    BenchRank(symmem_bench::RankArgs),
}

/// What starts processes, and is guarded for that.
#[derive(Subcommand)]
enum Launching {
    Run(symmem_launch::Args),
    Bench(symmem_bench::Args),
}

fn main() -> ExitCode {
    let wanted = std::env::var("RUST_LOG").ok().and_then(|text| text.parse().ok());
    let filter = wanted.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    tracing_subscriber::registry().with(layer().with_writer(stderr).with_filter(filter)).init();
    execute(Cli::parse().command).unwrap_or_else(|error| {
        // `eprintln` would panic where nobody reads.
        let _ = writeln!(stderr(), "symmem: {error:#}");
        let code = error.downcast_ref().map_or(1, symmem_launch::NotStarted::code);
        ExitCode::from(code)
    })
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::Launching(Launching::Run(args)) => guard::watch(args.grace()),
        Command::Launching(Launching::Bench(_)) => guard::watch(symmem_launch::GRACE),
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
        Command::Doctor(args) => args.run(),
        Command::Topo(args) => args.run(),
    }
}
