//! The Python package: its wheel, which carries the `symmem` program, and its tests over the installed wheel.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, root, run, target_dir};
use crate::dist::{ABI3AUDIT, source};
use crate::{Arguments, Outcome};

const PACKAGE: &str = "crates/symmem-py";
/// Builds the wheel, with the program inside.
const BACKEND: &str = "crates/symmem-py/backend.py";
/// What of PyPI the tasks need.
pub(crate) const MATURIN: &str = "maturin>=1.9,<2";
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
    if let Some(missing) = missing_python() {
        return Ok(Err(missing));
    }
    let Ok(tools) = environment("tools", false).and_then(|python| {
        pip(&python, &[MATURIN, ABI3AUDIT])?;
        Ok(python)
    }) else {
        return Ok(Err(format!("no {MATURIN} and {ABI3AUDIT} from PyPI")));
    };
    if wheels.exists() {
        std::fs::remove_dir_all(wheels).context("could not remove old wheels")?;
    }
    let mut build = Command::new(&tools);
    build.arg(BACKEND).args(["--profile", profile, "--out"]).arg(wheels);
    with_path(&mut build, &tools)?;
    run(build.current_dir(root()))?;
    check_sources(&tools)?;
    let wheel = newest(wheels, ".whl")?;
    run(Command::new(&tools).args(["-m", "abi3audit", "--strict"]).arg(&wheel))?;
    Ok(Ok(wheel))
}

/// Fails unless the source distribution has every file that git tracks: what builds in a clone then builds from it.
fn check_sources(tools: &Path) -> Result<()> {
    let archive = source(tools, &target_dir("python").join("sdist"))?;
    let list = output(Command::new("tar").arg("-tf").arg(archive))?;
    let packed: BTreeSet<_> =
        list.lines().filter_map(|path| Some(path.split_once('/')?.1)).collect();
    let tracked = output(Command::new("git").args(["ls-files", "--cached"]).current_dir(root()))?;
    let missing: Vec<_> = tracked.lines().filter(|path| !packed.contains(path)).collect();
    if !missing.is_empty() {
        bail!("not in the source distribution: {}", missing.join(", "));
    }
    Ok(())
}

/// The file with this ending that was made last.
pub(crate) fn newest(directory: &Path, ending: &str) -> Result<PathBuf> {
    let entries = std::fs::read_dir(directory).context("nothing was made")?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let ours = paths.filter(|path| path.to_string_lossy().ends_with(ending));
    let made = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    ours.max_by_key(made).with_context(|| format!("no {ending} was made"))
}

/// Makes the programs of an environment found first.
pub(crate) fn with_path(command: &mut Command, python: &Path) -> Result<()> {
    let own = python.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env("PATH", std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)))?);
    Ok(())
}

/// What is wrong with this machine's Python.
pub(crate) fn missing_python() -> Option<String> {
    let recent = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    let found = output(Command::new(interpreter()).args(["-c", recent])).is_ok();
    (!found).then(|| "no Python 3.10 or later with venv; SYMMEM_TEST_PYTHON names one".into())
}

fn interpreter() -> String {
    std::env::var("SYMMEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// The Python of a virtual environment of this task's own.
pub(crate) fn environment(name: &str, anew: bool) -> Result<PathBuf> {
    let directory = target_dir("python").join(name);
    let python = directory.join("bin/python");
    if anew || !python.exists() {
        run(Command::new(interpreter()).args(["-m", "venv", "--clear"]).arg(&directory))?;
    }
    Ok(python)
}

pub(crate) fn pip(python: &Path, packages: &[&str]) -> Result<()> {
    let options = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    // What pip builds, it builds from nothing: an archive has no times by which cargo could tell old from new.
    run(Command::new(python).args(options).args(packages).env_remove("CARGO_TARGET_DIR"))
}
