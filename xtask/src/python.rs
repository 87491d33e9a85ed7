//! The Python package: its wheel, which carries the `symmem` program, and its tests over the installed wheel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{cargo, output, root, run, target_dir};
use crate::gpu::{built, strip};
use crate::{Arguments, Outcome};

const PACKAGE: &str = "crates/symmem-py";
/// What of PyPI the tasks need.
const MATURIN: &str = "maturin>=1.9,<2";
const TEST_PACKAGES: [&str; 2] = ["numpy", "pytest"];

/// Builds the wheel into `target/wheels`.
pub(crate) fn wheel(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    Ok(match build_wheel("release", &target_dir("wheels"))? {
        Ok(wheel) => {
            println!("pip install {}", wheel.display());
            Outcome::Done
        }
        Err(missing) => Outcome::Skipped(missing),
    })
}

/// Installs the wheel into an environment that has nothing else, and runs the tests there. Unless told otherwise, it is a
/// wheel that is built as the tests are: in less time, and with its assertions.
pub(crate) fn python(mut arguments: Arguments) -> Result<Outcome> {
    let site: Option<PathBuf> = arguments.take("--site")?;
    let profile: Option<String> = arguments.take("--profile")?;
    arguments.finish()?;
    let site = site.or_else(torch_site);
    let profile = profile.as_deref().unwrap_or("dev");
    let wheel = match build_wheel(profile, &target_dir("python").join("wheels"))? {
        Ok(wheel) => wheel,
        Err(missing) => return Ok(Outcome::Skipped(missing)),
    };
    let Ok(python) = environment("test", true).and_then(|python| {
        pip(&python, &TEST_PACKAGES)?;
        Ok(python)
    }) else {
        return Ok(Outcome::Skipped(format!("no {} from PyPI", TEST_PACKAGES.join(" and "))));
    };
    pip(&python, &[wheel.to_string_lossy().as_ref()])?;
    // Stand in for NCCL, for NVSHMEM and for a driver.
    let fakes = ["symmem-fake-nccl", "symmem-fake-nvshmem"];
    run(&mut cargo(["build", "--package", fakes[0], "--package", fakes[1]]))?;
    let mut test = Command::new(&python);
    test.args(["-m", "pytest", "-q", "-rs", "tests"]).current_dir(root().join(PACKAGE));
    test.env("SYMMEM_FAKE_NCCL", target_dir("debug").join("libsymmem_fake_nccl.so"));
    test.env("SYMMEM_FAKE_NVSHMEM", target_dir("debug").join("libsymmem_fake_nvshmem.so"));
    if let Some(site) = site {
        test.env("PYTHONPATH", site);
    }
    run(&mut test)?;
    Ok(Outcome::Done)
}

/// Where the interpreter that the tests may use has torch, if it has.
fn torch_site() -> Option<PathBuf> {
    let ask = "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))";
    let said = output(Command::new(interpreter()).args(["-c", ask])).ok()?;
    said.lines().last().map(PathBuf::from)
}

/// The wheel, alone in `wheels`, or what this machine lacks for it.
fn build_wheel(profile: &str, wheels: &Path) -> Result<Result<PathBuf, String>> {
    let recent = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    if output(Command::new(interpreter()).args(["-c", recent])).is_err() {
        return Ok(Err("no Python 3.10 or later with venv; SYMMEM_TEST_PYTHON names one".into()));
    }
    let Ok(tools) = environment("tools", false).and_then(|python| {
        pip(&python, &[MATURIN])?;
        Ok(python)
    }) else {
        return Ok(Err("no maturin from PyPI".into()));
    };
    let mut build = cargo(["build", "--profile", profile, "--package", "symmem-cli"]);
    let program = root().join(PACKAGE).join("python/symmem/bin/symmem");
    std::fs::create_dir_all(program.parent().unwrap_or(root()))?;
    strip(&built(build.arg("--message-format=json"))?, &program)?;
    if wheels.exists() {
        std::fs::remove_dir_all(wheels).context("could not remove old wheels")?;
    }
    let mut maturin = Command::new(tools);
    maturin.args(["-m", "maturin", "build", "--profile", profile, "--strip", "--out"]).arg(wheels);
    let built = run(maturin.current_dir(root().join(PACKAGE)));
    // What is left there would be in the next wheel, however old.
    std::fs::remove_file(&program)?;
    built?;
    only_file(wheels).map(Ok)
}

fn only_file(directory: &Path) -> Result<PathBuf> {
    let first = std::fs::read_dir(directory)?.next().context("maturin made no wheel")?;
    Ok(first?.path())
}

fn interpreter() -> String {
    std::env::var("SYMMEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// The Python of a virtual environment of this task's own.
fn environment(name: &str, anew: bool) -> Result<PathBuf> {
    let directory = target_dir("python").join(name);
    let python = directory.join("bin/python");
    if anew || !python.exists() {
        run(Command::new(interpreter()).args(["-m", "venv", "--clear"]).arg(&directory))?;
    }
    Ok(python)
}

fn pip(python: &Path, packages: &[&str]) -> Result<()> {
    let options = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    run(Command::new(python).args(options).args(packages))
}
