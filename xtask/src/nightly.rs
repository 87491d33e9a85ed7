//! The tests that need a nightly compiler: thread sanitizer and fuzzing. Without one they are skipped.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{cargo, output, root, run, target_dir};
use crate::suites::missing_test;
use crate::{Arguments, Outcome};

/// The standard library is not rebuilt with the sanitizer, hence the allowed mismatch.
const TSAN_FLAGS: &str = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";

/// What cargo-fuzz passes, so that it need not be installed.
const FUZZ_FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cdebug-assertions -Zsanitizer=address";

/// Runs the protocols under the thread sanitizer.
pub(crate) fn tsan(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    if let Some(skipped) = missing_test("tsan").or_else(missing_nightly) {
        return Ok(skipped);
    }
    let host = host()?;
    let mut command = cargo(["+nightly", "test", "-p", "symmem", "--test", "tsan"]);
    command.args(["--target", &host]);
    command.env("RUSTFLAGS", TSAN_FLAGS).env("CARGO_TARGET_DIR", target_dir("tsan"));
    let unseen = root().join("crates/symmem/tests/tsan.supp");
    command.env("TSAN_OPTIONS", format!("suppressions={}", unseen.display()));
    run(&mut command)?;
    Ok(Outcome::Done)
}

/// Runs every fuzz target for a while, from the corpus that earlier runs left.
pub(crate) fn fuzz(mut arguments: Arguments) -> Result<Outcome> {
    let seconds: u64 = arguments.take("--seconds")?.unwrap_or(20);
    arguments.finish()?;
    let manifest = "fuzz/Cargo.toml";
    if !root().join(manifest).exists() {
        return Ok(Outcome::Skipped(format!("{manifest} does not exist")));
    }
    if let Some(skipped) = missing_nightly().or_else(missing_cxx) {
        return Ok(skipped);
    }
    let (host, target_dir) = (host()?, target_dir("fuzz"));
    let mut build = cargo(["+nightly", "build", "--release", "--manifest-path", manifest]);
    build.args(["--bins", "--target", &host]);
    run(build.env("RUSTFLAGS", FUZZ_FLAGS).env("CARGO_TARGET_DIR", &target_dir))?;
    for target in fuzz_targets(&root().join("fuzz/fuzz_targets"))? {
        fuzz_one(&target_dir.join(&host).join("release").join(&target), &target, seconds)?;
    }
    Ok(Outcome::Done)
}

fn fuzz_one(program: &Path, target: &str, seconds: u64) -> Result<()> {
    let corpus = root().join("fuzz/corpus").join(target);
    let artifacts = root().join("fuzz/artifacts").join(target);
    for directory in [&corpus, &artifacts] {
        std::fs::create_dir_all(directory).context("could not create the corpus")?;
    }
    let mut command = Command::new(program);
    command.arg(&corpus).arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    run(command.current_dir(root()))
}

/// The names of the fuzz targets: one file each.
fn fuzz_targets(directory: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(directory).context("could not list the fuzz targets")?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let rust = paths.iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let mut names: Vec<_> =
        rust.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}

/// The reason to skip where no nightly compiler is installed. Asks rustup, because `cargo +nightly`
/// might install one.
fn missing_nightly() -> Option<Outcome> {
    let list = output(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    let toolchain = format!("nightly-{}", host().unwrap_or_default());
    let installed = list.split_whitespace().any(|word| word == toolchain);
    (!installed).then(|| Outcome::Skipped("no nightly toolchain (rustup install nightly)".into()))
}

/// The reason to skip where libFuzzer, which is C++, cannot be built.
fn missing_cxx() -> Option<Outcome> {
    let found = output(Command::new("c++").arg("--version")).is_ok();
    (!found).then(|| Outcome::Skipped("no C++ compiler".into()))
}

/// The target triple of this machine; sanitizers want it said.
fn host() -> Result<String> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_a_triple() {
        assert!(host().unwrap().split('-').count() >= 3);
    }

    #[test]
    fn a_directory_that_is_not_there_has_no_targets() {
        assert!(fuzz_targets(&root().join("no-such-directory")).is_err());
        assert!(fuzz_targets(&root().join("xtask/src")).unwrap().contains(&"nightly".into()));
    }
}
