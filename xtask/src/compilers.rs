//! Builds with other compilers than the tests use: the oldest Rust that is promised, and for another architecture.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{cargo, output, root, run};
use crate::{Arguments, Outcome};

/// With all that they need, these are all that users build.
const SHIPPED: [&str; 6] =
    ["--package", "symmem", "--package", "symmem-cli", "--package", "symmem-py"];
const OTHER: &str = "aarch64-unknown-linux-gnu";

/// Checks with the Rust that `Cargo.toml` names.
pub(crate) fn msrv(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).context("no Cargo.toml")?;
    let version = promised(&manifest).context("Cargo.toml names no rust-version")?;
    if !has_toolchain(version) {
        return Ok(Outcome::Skipped(format!(
            "no Rust {version} (rustup toolchain install {version})"
        )));
    }
    let mut check = cargo([format!("+{version}").as_str(), "check", "--locked"]);
    run(check.args(SHIPPED))?;
    Ok(Outcome::Done)
}

/// Checks for the other architecture that wheels are made for.
pub(crate) fn aarch64(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    if !has_target(OTHER) {
        return Ok(Outcome::Skipped(format!(
            "Rust has no {OTHER} here (rustup target add {OTHER})"
        )));
    }
    run(cargo(["check", "--target", OTHER]).args(SHIPPED))?;
    Ok(Outcome::Done)
}

/// Whether programs can be built for this target.
pub(crate) fn has_target(target: &str) -> bool {
    let mut rustc = Command::new("rustc");
    let said = output(rustc.args(["--print", "target-libdir", "--target", target]));
    said.is_ok_and(|directory| Path::new(directory.trim()).exists())
}

/// Asks rustup, because `cargo +VERSION` might install one.
fn has_toolchain(version: &str) -> bool {
    let list = output(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    let is_ours = |name: &str| name == version || name.starts_with(&format!("{version}-"));
    list.split_whitespace().any(is_ours)
}

fn promised(manifest: &str) -> Option<&str> {
    let rest = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \""))?;
    rest.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_names_a_version() {
        let manifest = "[workspace.package]\nedition = \"2024\"\nrust-version = \"1.89\"\n";
        assert_eq!(promised(manifest), Some("1.89"));
        assert_eq!(promised("[package]\n"), None);
    }

    #[test]
    fn what_nobody_has_is_not_there() {
        assert!(!has_toolchain("0.1"));
        assert!(!has_target("no-such-target"));
        assert!(has_target(&format!("{}-unknown-linux-gnu", std::env::consts::ARCH)));
    }
}
