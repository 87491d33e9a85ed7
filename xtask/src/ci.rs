//! Everything that a change must pass, step by step.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::command::{cargo, run, target_dir};
use crate::{Arguments, Outcome};

const STEPS: &[&str] = &[
    "fmt", "deny", "clippy", "test", "chaos", "python", "loom", "tsan", "fuzz", "kernels", "tidy",
    "doc", "package", "msrv", "aarch64",
];

/// Runs the steps in order and stops at the first failure.
pub(crate) fn ci(mut arguments: Arguments) -> Result<Outcome> {
    let mut skip: Vec<String> = Vec::new();
    while let Some(name) = arguments.take::<String>("--skip")? {
        if !STEPS.contains(&name.as_str()) {
            bail!("--skip {name}: the steps are {}", STEPS.join(", "));
        }
        skip.push(name);
    }
    arguments.finish()?;
    let mut summary = Vec::new();
    for &name in STEPS.iter().filter(|name| !skip.iter().any(|skip| skip == *name)) {
        eprintln!("\n=== {name}");
        let start = Instant::now();
        let outcome = crate::run(name, arguments_of(name));
        let line = summary_line(name, &outcome, start.elapsed());
        eprintln!("=== {line}");
        summary.push(line);
        if let Err(error) = outcome {
            print_summary(&summary);
            return Err(error.context(format!("{name} failed")));
        }
    }
    print_summary(&summary);
    Ok(Outcome::Done)
}

/// Steps change no files.
fn arguments_of(step: &str) -> Arguments {
    let words: &[&str] = match step {
        "kernels" => &["--check"],
        "chaos" => &["--seconds", "40", "--seed", "1"],
        "fuzz" => &["--seconds", "8"],
        _ => &[],
    };
    Arguments::new(words.iter().map(ToString::to_string))
}

/// Checks the formatting.
pub(crate) fn fmt(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    run(&mut cargo(["fmt", "--all", "--check"]))?;
    Ok(Outcome::Done)
}

/// Lints everything.
pub(crate) fn clippy(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    run(&mut cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    Ok(Outcome::Done)
}

/// Builds the documentation.
pub(crate) fn doc(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    run(cargo(["doc", "--no-deps", "--workspace"]).env("RUSTDOCFLAGS", "-Dwarnings"))?;
    Ok(Outcome::Done)
}

/// Packages the crates that users need, and builds each from its package alone; and the library without devices.
pub(crate) fn package(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    run(&mut cargo(["check", "--package", "symmem", "--no-default-features"]))?;
    let crates = ["symmem-sys", "symmem", "symmem-launch", "symmem-bench", "symmem-cli"];
    let mut command = cargo(["package", "--allow-dirty"]);
    crates.iter().for_each(|name| {
        command.args(["--package", name]);
    });
    let packaged = run(&mut command);
    forget_packages();
    packaged?;
    Ok(Outcome::Done)
}

/// Has cargo build our crates anew: to it, what was once built from a package of a version stays as it is.
fn forget_packages() {
    let built = std::fs::read_dir(target_dir("debug/.fingerprint"));
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let unpacked = home.and_then(|home| std::fs::read_dir(home.join("registry/src")).ok());
    // Registries without a host: the one in which cargo puts packages that it verifies.
    let local = unpacked.into_iter().flatten().flatten().map(|dir| dir.path());
    let local =
        local.filter(|dir| dir.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"-")));
    let unpacked = local.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
    for entry in built.into_iter().flatten().chain(unpacked).flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"symmem") {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn summary_line(name: &str, outcome: &Result<Outcome>, time: Duration) -> String {
    let verdict = match outcome {
        Ok(Outcome::Done) => "passed".to_owned(),
        Ok(Outcome::Skipped(why)) => format!("skipped: {why}"),
        Err(_) => "FAILED".to_owned(),
    };
    format!("{name:8} {:7.1} s  {verdict}", time.as_secs_f64())
}

fn print_summary(lines: &[String]) {
    eprintln!("\nsummary");
    lines.iter().for_each(|line| eprintln!("  {line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_a_task() {
        assert!(STEPS.iter().all(|step| crate::TASKS.iter().any(|task| task.name == *step)));
    }

    #[test]
    fn only_steps_can_be_skipped() {
        let arguments = Arguments::new(["--skip".to_owned(), "nothing".to_owned()]);
        assert!(ci(arguments).is_err());
    }

    #[test]
    fn a_skipped_step_says_why() {
        let outcome = Ok(Outcome::Skipped("no nightly".into()));
        let line = summary_line("tsan", &outcome, Duration::from_millis(1500));
        assert_eq!(line, "tsan         1.5 s  skipped: no nightly");
    }
}
