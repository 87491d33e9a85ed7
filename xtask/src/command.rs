//! Running programs from the root of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};

/// The root of the repository: as cargo says now, because clones may share a target directory.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let said = std::env::var_os("CARGO_MANIFEST_DIR");
        let xtask = said.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        xtask.parent().map_or_else(PathBuf::new, Path::to_path_buf)
    });
    &ROOT
}

/// Where a build with flags of its own puts its files, so that it does not evict the plain build.
pub(crate) fn target_dir(name: &str) -> PathBuf {
    let base = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    root().join(base).join(name)
}

/// `cargo` with these arguments, in the root.
pub(crate) fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(root());
    command
}

/// Runs to the end; an exit status other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("could not start: {shown}"))?;
    if !status.success() {
        bail!("{status}: {shown}");
    }
    Ok(())
}

/// What the command prints.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command.output().with_context(|| format!("could not start: {shown}"))?;
    if !output.status.success() {
        bail!("{}: {shown}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("not UTF-8: {shown}"))
}

/// The command as one would type it.
fn shown(command: &Command) -> String {
    let set = command.get_envs().filter_map(|(name, value)| {
        Some(format!("{}={}", name.to_string_lossy(), quoted(&value?.to_string_lossy())))
    });
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| quoted(&word.to_string_lossy()));
    set.chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    if word.contains([' ', '"', '$']) { format!("'{word}'") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_it_is_typed() {
        let mut command = cargo(["test", "--workspace"]);
        command.env("RUSTFLAGS", "--cfg loom");
        assert_eq!(shown(&command), "RUSTFLAGS='--cfg loom' cargo test --workspace");
    }

    #[test]
    fn a_program_that_fails_is_an_error() {
        assert!(run(&mut Command::new("false")).is_err());
        assert!(output(&mut Command::new("no-such-program-here")).is_err());
        assert_eq!(output(Command::new("echo").arg("x")).unwrap(), "x\n");
    }
}
