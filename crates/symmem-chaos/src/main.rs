//! Runs random programs with faults and says which promises were not kept: `cargo xtask chaos`.
//!
//! `chaos [--minutes M | --seconds S] [--seed N] [--ranks A-B] [--mode threads|processes|both] [--program SPEC]`

mod campaign;
mod generate;
mod judge;
mod names;
mod pool;
mod reduce;
mod report;
mod steps;
mod times;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.first().map(String::as_str) {
        Some("worker") => worker::serve().map(|()| true),
        _ => campaign::Options::parse(&arguments).and_then(|options| campaign::run(&options)),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("chaos: {e:#}");
            ExitCode::from(2)
        }
    }
}
