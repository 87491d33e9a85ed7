//! What wants a CUDA device, in one directory that can be taken to a machine that has one; it is run here if this one has.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::command::{cargo, output, root, run, target_dir};
use crate::{Arguments, Outcome};

/// Test programs: package, test, and the name in the bundle.
const TESTS: [(&str, &str, &str); 5] = [
    ("symmem", "cuda", "cuda-tests"),
    ("symmem", "nccl", "nccl-tests"),
    ("symmem", "nccl_memory", "nccl-memory-tests"),
    ("symmem", "nvshmem", "nvshmem-tests"),
    ("symmem-sys", "gpu", "sys-tests"),
];
/// Files that are taken along as they are.
const FILES: [&str; 2] = ["xtask/gpu/run.sh", "benches/peers/bench_symm_mem.py"];

/// Builds the bundle and, where there is a device, runs it.
pub(crate) fn gpu(mut arguments: Arguments) -> Result<Outcome> {
    let given: Option<PathBuf> = arguments.take("--bundle")?;
    arguments.finish()?;
    let bundle = given.map_or_else(|| target_dir("gpu"), |given| root().join(given));
    std::fs::create_dir_all(&bundle).context("could not create the bundle")?;
    let mut build = cargo(["build", "--release", "--package", "symmem-cli"]);
    strip(&built(build.arg("--message-format=json"))?, &bundle.join("symmem"))?;
    for (package, test, name) in TESTS {
        let mut build = cargo(["test", "--release", "--no-run", "--package", package]);
        let program = built(build.args(["--test", test, "--message-format=json"]))?;
        strip(&program, &bundle.join(name))?;
    }
    for file in FILES {
        let name = Path::new(file).file_name().unwrap_or_default();
        std::fs::copy(root().join(file), bundle.join(name))
            .with_context(|| format!("could not copy {file}"))?;
    }
    let script = bundle.join("run.sh");
    println!("to run it on a machine with a CUDA device: bash {}", script.display());
    if let Err(why) = device() {
        return Ok(Outcome::Skipped(format!("built, but not run here: {why:#}")));
    }
    run(Command::new("bash").arg(&script))?;
    Ok(Outcome::Done)
}

/// Whether this machine has a device.
fn device() -> Result<()> {
    let driver = symmem_sys::cuda::load()?;
    driver.init()?;
    driver.device(0)?;
    Ok(())
}

/// The program that a build makes, as cargo says.
pub(crate) fn built(build: &mut Command) -> Result<PathBuf> {
    let said = output(build.stderr(Stdio::inherit()))?;
    executable(&said).map(PathBuf::from).context("the build made no program")
}

/// The last program in cargo's messages.
fn executable(messages: &str) -> Option<&str> {
    let (_, rest) = messages.rsplit_once("\"executable\":\"")?;
    rest.split('"').next()
}

/// Copies a program without what only a debugger reads; where there is no `strip`, with it.
pub(crate) fn strip(program: &Path, to: &Path) -> Result<()> {
    if output(Command::new("strip").arg("-o").arg(to).arg(program)).is_ok() {
        return Ok(());
    }
    std::fs::copy(program, to)
        .with_context(|| format!("could not copy {}", program.display()))
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_last_that_cargo_names() {
        let said =
            "{\"executable\":null}\n{\"executable\":\"/a/b\",\"fresh\":true}\n{\"success\":true}";
        assert_eq!(executable(said), Some("/a/b"));
        assert_eq!(executable("{\"executable\":null}"), None);
    }

    #[test]
    fn what_is_taken_along_is_there() {
        for file in FILES {
            assert!(root().join(file).is_file(), "{file}");
        }
        for (package, test, _) in TESTS {
            let test = format!("crates/{package}/tests/{test}.rs");
            assert!(root().join(&test).is_file(), "{test}");
        }
    }

    #[test]
    fn the_script_is_one_that_a_shell_understands() {
        output(Command::new("bash").arg("-n").arg(root().join(FILES[0]))).unwrap();
    }
}
