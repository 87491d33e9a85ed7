//! What a release puts on PyPI: the source distribution and a wheel for each architecture, each tried as its user will.
//! The wheels are linked with zig, which has the C library of older systems and of other machines.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{output, root, run, target_dir};
use crate::compilers::has_target;
use crate::python::{MATURIN, environment, missing_python, newest, pip, with_path};
use crate::{Arguments, Outcome};

/// Of fixed versions, so that a release can be made again.
const TOOLS: &[&str] =
    &[MATURIN, "ziglang==0.17.0", "cargo-zigbuild==0.24.0", "auditwheel==6.8.2", ABI3AUDIT];
/// Finds what is not in the stable ABI of Python.
pub(crate) const ABI3AUDIT: &str = "abi3audit==0.0.26";
/// The oldest GNU C library that wheels work with: 2.28, which RHEL 8 and Debian 10 have.
const GLIBC: u32 = 28;
const SDIST: &str = "sdist";
/// Two ranks add up.
const TRIAL: &str = "import symmem; w = symmem.World.from_env(); \
    x = symmem.rendezvous(symmem.empty(4, 'float32', w), w); \
    x.local[:] = w.rank + 1; x.all_reduce('sum'); assert list(x.local) == [3] * 4, x.local; \
    print('the sum is', x.local)";

struct Architecture {
    name: &'static str,
    /// In the header of its programs.
    machine: u8,
}

const ARCHITECTURES: [Architecture; 2] =
    [Architecture { name: "x86_64", machine: 62 }, Architecture { name: "aarch64", machine: 183 }];

impl Architecture {
    fn target(&self) -> String {
        format!("{}-unknown-linux-gnu", self.name)
    }
}

/// Makes all of it, or one part, in `target/dist`.
pub(crate) fn dist(mut arguments: Arguments) -> Result<Outcome> {
    let only: Option<String> = arguments.take("--only")?;
    arguments.finish()?;
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    if !wanted(SDIST) && !ARCHITECTURES.iter().any(|one| wanted(one.name)) {
        bail!("--only takes {SDIST}, x86_64 or aarch64");
    }
    if let Some(missing) = missing_python() {
        bail!("{missing}");
    }
    let python = environment("dist-tools", false)?;
    pip(&python, TOOLS).context("the tools cannot be had from PyPI")?;
    let made = target_dir("dist");
    std::fs::create_dir_all(&made).context("could not create the directory")?;
    if wanted(SDIST) {
        let sdist = source(&python, &made)?;
        install(&sdist)?;
    }
    for architecture in ARCHITECTURES.iter().filter(|one| wanted(one.name)) {
        let wheel = wheel(&python, architecture, &made)?;
        audit(&python, architecture, &wheel)?;
        if architecture.name == std::env::consts::ARCH {
            install(&wheel)
        } else {
            emulate(architecture, &wheel)
        }?;
    }
    Ok(Outcome::Done)
}

/// The source distribution: what git tracks.
pub(crate) fn source(python: &Path, to: &Path) -> Result<PathBuf> {
    let mut maturin = Command::new(python);
    maturin.args(["-m", "maturin", "sdist", "--out"]).arg(to).current_dir(root());
    run(&mut maturin)?;
    newest(to, ".tar.gz")
}

fn wheel(python: &Path, architecture: &Architecture, to: &Path) -> Result<PathBuf> {
    let target = architecture.target();
    if !has_target(&target) {
        bail!("Rust has no {target} here (rustup target add {target})");
    }
    let mut build = Command::new(python);
    build.arg("crates/symmem-py/backend.py").args([
        "--profile",
        "release",
        "--zig",
        "--target",
        &target,
    ]);
    build.args(["--compatibility", &format!("manylinux_2_{GLIBC}"), "--out"]).arg(to);
    build.env("CARGO_ENCODED_RUSTFLAGS", without_paths().join("\x1f"));
    with_path(&mut build, python)?;
    run(build.current_dir(root()))?;
    newest(to, &format!("_{}.whl", architecture.name))
}

/// What keeps directories of this machine out of messages.
fn without_paths() -> Vec<String> {
    let names = ["symmem", "cargo"];
    names
        .iter()
        .zip(directories())
        .map(|(name, path)| format!("--remap-path-prefix={}={name}", path.display()))
        .collect()
}

/// Where sources are: of this repository, and of packages.
fn directories() -> [PathBuf; 2] {
    let home = || std::env::home_dir().unwrap_or_default().join(".cargo");
    let cargo = std::env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from);
    [root().to_path_buf(), cargo.join("registry/src")]
}

/// What a wheel must be, whatever machine it is for.
fn audit(python: &Path, architecture: &Architecture, wheel: &Path) -> Result<()> {
    let mut auditwheel = Command::new(python);
    let said = output(auditwheel.args(["-m", "auditwheel", "show", "--json"]).arg(wheel))?;
    let tag = field(&said, "overall_tag").context("auditwheel names no tag")?;
    if oldest(tag, architecture.name).is_none_or(|minor| minor > GLIBC) {
        bail!("{} works with {tag} only:\n{said}", wheel.display());
    }
    println!("auditwheel: {tag}");
    run(Command::new(python).args(["-m", "abi3audit", "--strict", "--summary"]).arg(wheel))?;
    let unpacked = unpacked(python, wheel)?;
    for name in ["symmem/_native.abi3.so", "symmem/bin/symmem"] {
        let bytes = std::fs::read(unpacked.join(name))
            .with_context(|| format!("no {name} in the wheel"))?;
        if bytes.get(18) != Some(&architecture.machine) {
            bail!("{name} is not for {}", architecture.name);
        }
        let named = |path: &PathBuf| memmem(&bytes, path.to_string_lossy().as_bytes());
        if let Some(path) = directories().iter().find(|path| named(path)) {
            bail!("{name} names a directory of this machine ({})", path.display());
        }
    }
    Ok(())
}

fn unpacked(python: &Path, wheel: &Path) -> Result<PathBuf> {
    let to = target_dir("dist").join("unpacked");
    run(Command::new(python).args(["-m", "zipfile", "--extract"]).arg(wheel).arg(&to))?;
    Ok(to)
}

/// Installs a file into an environment that has nothing else but numpy, and starts two ranks there.
fn install(file: &Path) -> Result<()> {
    let python = environment("dist-trial", true)?;
    pip(&python, &["--no-cache-dir", &format!("{}[numpy]", file.display())])?;
    let program = python.with_file_name("symmem");
    run(Command::new(&program).arg("--version"))?;
    run(Command::new(&program).args(["run", "-n", "2", "--"]).arg(&python).args(["-c", TRIAL]))
}

/// Starts a program of another architecture, where there is an emulator and a C library for it.
fn emulate(architecture: &Architecture, wheel: &Path) -> Result<()> {
    let emulator = format!("qemu-{}-static", architecture.name);
    let libraries = format!("/usr/{}-linux-gnu", architecture.name);
    if output(Command::new(&emulator).arg("--version")).is_err() || !Path::new(&libraries).exists()
    {
        eprintln!("{} was not started: there is no {emulator}, or no {libraries}", wheel.display());
        return Ok(());
    }
    let program = target_dir("dist").join("unpacked/symmem/bin/symmem");
    run(Command::new("chmod").arg("+x").arg(&program))?;
    run(Command::new(emulator).args(["-L", &libraries]).arg(program).arg("--version"))
}

/// The text in a field of JSON as `auditwheel` writes it.
fn field<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{name}\": \""))?;
    rest.split('"').next()
}

/// The minor version of the oldest C library that a tag of this architecture allows.
fn oldest(tag: &str, architecture: &str) -> Option<u32> {
    let version = tag.strip_prefix("manylinux_2_")?.strip_suffix(architecture)?;
    version.strip_suffix('_')?.parse().ok()
}

fn memmem(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len().max(1)).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_says_how_old_a_system_may_be() {
        assert_eq!(oldest("manylinux_2_28_aarch64", "aarch64"), Some(28));
        assert_eq!(oldest("manylinux_2_5_x86_64", "x86_64"), Some(5));
        assert_eq!(oldest("manylinux_2_28_aarch64", "x86_64"), None);
        assert_eq!(oldest("linux_x86_64", "x86_64"), None);
    }

    #[test]
    fn what_auditwheel_says_is_read() {
        let said = "{\n  \"pure\": false,\n  \"overall_tag\": \"manylinux_2_28_x86_64\",\n  \"sym_tag\": \"x\"\n}";
        assert_eq!(field(said, "overall_tag"), Some("manylinux_2_28_x86_64"));
        assert_eq!(field(said, "tag"), None);
    }

    #[test]
    fn names_of_directories_are_found_in_programs() {
        assert!(memmem(b"\0\x01the/root/src\0", b"/root"));
        assert!(!memmem(b"\0the\0", b"/root"));
    }

    #[test]
    fn only_parts_can_be_made() {
        assert!(dist(Arguments::new(["--only".to_owned(), "riscv".to_owned()])).is_err());
    }
}
