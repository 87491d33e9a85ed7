//! The tests that stable Rust runs: the whole workspace, loom, the long failure soak, and random programs with faults.

use std::process::Command;

use anyhow::Result;

use crate::command::{cargo, root, run, target_dir};
use crate::gpu::built;
use crate::{Arguments, Outcome};

/// Many tests start several processes each; more of them at once would only starve one another.
const TEST_THREADS: &str = "2";

/// Everything a fresh machine can run: tests, doc tests; `cargo test` also builds the examples.
pub(crate) fn test(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    let mut command = cargo(["test", "--workspace"]);
    // Not `--test-threads`: tests with a harness of their own would get the argument too.
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        command.env("RUST_TEST_THREADS", TEST_THREADS);
    }
    run(&mut command)?;
    Ok(Outcome::Done)
}

/// Explores the orderings with bounded preemptions.
pub(crate) fn loom(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    if let Some(missing) = missing_test("loom") {
        return Ok(missing);
    }
    let mut command = cargo(["test", "-p", "symmem", "--release", "--test", "loom"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target_dir("loom"));
    if std::env::var_os("LOOM_MAX_PREEMPTIONS").is_none() {
        command.env("LOOM_MAX_PREEMPTIONS", "3");
    }
    run(&mut command)?;
    Ok(Outcome::Done)
}

/// The long version of the failure soak.
pub(crate) fn soak(mut arguments: Arguments) -> Result<Outcome> {
    let rounds: u64 = arguments.take("--rounds")?.unwrap_or(1000);
    arguments.finish()?;
    if let Some(missing) = missing_test("soak") {
        return Ok(missing);
    }
    let mut command = cargo(["test", "-p", "symmem", "--release", "--test", "soak"]);
    command.args(["--", "--ignored", "--nocapture"]);
    run(command.env("SYMMEM_SOAK_ROUNDS", rounds.to_string()))?;
    Ok(Outcome::Done)
}

/// Another user of the machine against running jobs.
pub(crate) fn hostile(mut arguments: Arguments) -> Result<Outcome> {
    let seconds: u64 = arguments.take("--seconds")?.unwrap_or(10);
    arguments.finish()?;
    // Its tests load the machine as much as they can: one at a time.
    let mut command = cargo(["test", "-p", "symmem", "--release", "--test", "hostile"]);
    command.args(["--", "--nocapture", "--test-threads=1"]);
    run(command.env("SYMMEM_HOSTILE_SECONDS", seconds.to_string()))?;
    Ok(Outcome::Done)
}

/// Random programs with faults, judged call by call. For minutes, optimised; to compile that takes minutes, too.
pub(crate) fn chaos(mut arguments: Arguments) -> Result<Outcome> {
    let minutes = arguments.take::<String>("--minutes")?;
    let profile = if minutes.is_some() { "chaos" } else { "dev" };
    // The Python module is named too: what it needs is then built here as it needs it, and not again.
    let mut build = cargo(["build", "--profile", profile, "-p", "symmem-chaos", "-p", "symmem-py"]);
    let mut command = Command::new(built(build.args(["--bins", "--message-format=json"]))?);
    command.current_dir(root());
    command.args(minutes.iter().flat_map(|minutes| ["--minutes", minutes]));
    let options =
        ["--seconds", "--seed", "--ranks", "--mode", "--program", "--times", "--agree", "--reduce"];
    for option in options {
        if let Some(value) = arguments.take::<String>(option)? {
            command.args([option, &value]);
        }
    }
    arguments.finish()?;
    run(&mut command)?;
    Ok(Outcome::Done)
}

/// The reason to skip where the library has no such test program.
pub(crate) fn missing_test(name: &str) -> Option<Outcome> {
    let path = format!("crates/symmem/tests/{name}.rs");
    (!root().join(&path).exists()).then(|| Outcome::Skipped(format!("{path} does not exist")))
}
