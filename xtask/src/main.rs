//! The tasks of this repository, in plain Rust: `cargo xtask` lists them.

mod arguments;
mod ci;
mod command;
mod compilers;
mod deny;
mod dist;
mod gpu;
mod kernels;
mod nightly;
mod python;
mod scale;
mod suites;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::arguments::Arguments;

/// How a task ended that did not fail.
enum Outcome {
    Done,
    /// Something this machine lacks, or that the repository does not have yet.
    Skipped(String),
}

struct Task {
    name: &'static str,
    options: &'static str,
    about: &'static str,
    run: fn(Arguments) -> Result<Outcome>,
}

#[rustfmt::skip]
const TASKS: &[Task] = &[
    Task { name: "test", options: "", about: "all tests, doc tests and examples; needs only Rust and a C compiler", run: suites::test },
    Task { name: "ci", options: "[--skip TASK]...", about: "fmt, deny, clippy, test, chaos, python, loom, tsan, fuzz, kernels, tidy, doc, package, msrv, aarch64; stops at the first failure", run: ci::ci },
    Task { name: "fmt", options: "", about: "checks the formatting", run: ci::fmt },
    Task { name: "clippy", options: "", about: "lints everything; a warning is a failure", run: ci::clippy },
    Task { name: "msrv", options: "", about: "checks with the oldest Rust that Cargo.toml promises", run: compilers::msrv },
    Task { name: "aarch64", options: "", about: "checks for aarch64", run: compilers::aarch64 },
    Task { name: "doc", options: "", about: "builds the documentation; a warning is a failure", run: ci::doc },
    Task { name: "package", options: "", about: "packages the crates that users need, and builds each from its package alone", run: ci::package },
    Task { name: "tidy", options: "", about: "sizes, layers, unsafe list, leftovers, links, parity table", run: tidy::tidy },
    Task { name: "deny", options: "", about: "checks the licences of all packages against deny.toml", run: deny::deny },
    Task { name: "loom", options: "", about: "explores the memory orderings of the signal protocol", run: suites::loom },
    Task { name: "soak", options: "[--rounds N]", about: "kills ranks over and over (default 1000 rounds)", run: suites::soak },
    Task { name: "hostile", options: "[--seconds N]", about: "attacks running jobs as another user (default 10 seconds a test; needs root)", run: suites::hostile },
    Task { name: "chaos", options: "[--minutes M | --seconds S] [--seed N] [--ranks A-B] [--mode threads|processes|both] [--program SPEC]", about: "runs random programs with faults and judges every call (default 60 seconds)", run: suites::chaos },
    Task { name: "tsan", options: "", about: "looks for data races with the thread sanitizer (nightly)", run: nightly::tsan },
    Task { name: "kernels", options: "[--check]", about: "makes the archive of PTX; --check: compares it, and assembles it for each architecture", run: kernels::kernels },
    Task { name: "gpu", options: "[--bundle DIR]", about: "builds what wants a CUDA device into target/gpu (or DIR), and runs it where there is one", run: gpu::gpu },
    Task { name: "wheel", options: "", about: "builds the Python package, with the symmem program, into target/wheels (maturin from PyPI)", run: python::wheel },
    Task { name: "dist", options: "[--only sdist|x86_64|aarch64]", about: "what PyPI gets, into target/dist: the source distribution and the manylinux wheels, each checked and tried", run: dist::dist },
    Task { name: "python", options: "[--site DIR] [--profile NAME]", about: "tests the wheel in a clean environment; --site: where torch is, unless SYMMEM_TEST_PYTHON has it; --profile: how it is built (dev)", run: python::python },
    Task { name: "scale", options: "[--check]", about: "simulates barriers and all-reduces on many hosts: the tables of docs/scale.md; --check: compares them", run: scale::scale },
    Task { name: "fuzz", options: "[--seconds N]", about: "fuzzes each target (default 20 seconds; nightly)", run: nightly::fuzz },
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(name) = arguments.next() else {
        print_tasks();
        return ExitCode::SUCCESS;
    };
    match run(&name, Arguments::new(arguments)) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Skipped(why)) => {
            eprintln!("{name}: skipped: {why}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: &str, arguments: Arguments) -> Result<Outcome> {
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        print_tasks();
        bail!("no such task");
    };
    (task.run)(arguments)
}

fn print_tasks() {
    println!("usage: cargo xtask TASK\n");
    for task in TASKS {
        println!("  {:24} {}", format!("{} {}", task.name, task.options), task.about);
    }
}
