//! What compilers and linters do not check: sizes, layers, the list of unsafe files, leftovers, links,
//! and the parity table. Reads the files that git tracks or would track.

mod facade;
mod layers;
mod leftovers;
mod links;
mod machine;
mod parity;
mod rust;
mod safety;
mod sizes;

use std::process::Command;

use anyhow::{Result, bail};

use crate::command::{output, root};
use crate::{Arguments, Outcome};

/// A text file of the repository.
pub(crate) struct File {
    /// Relative to the root.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the whole file is tests.
    fn is_test(&self) -> bool {
        self.path.split('/').any(|part| part == "tests" || part == "tests.rs")
    }
}

/// Looks at all files and says what is wrong.
type Check = fn(&[File]) -> Vec<String>;

/// The parity check comes last: its findings are the longest-lived.
const CHECKS: &[Check] = &[
    sizes::check,
    layers::check,
    facade::check,
    safety::check,
    leftovers::check,
    links::check,
    machine::check,
    parity::check,
];

/// Runs all checks and prints every finding.
pub(crate) fn tidy(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    let files = files()?;
    let findings: Vec<String> = CHECKS.iter().flat_map(|check| check(&files)).collect();
    findings.iter().for_each(|finding| eprintln!("{finding}"));
    if !findings.is_empty() {
        bail!("{} findings in {} files", findings.len(), files.len());
    }
    Ok(Outcome::Done)
}

/// All text files that are tracked, or would be with `git add --all`.
fn files() -> Result<Vec<File>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(root());
    let list = output(&mut git)?;
    let paths = list.lines().filter(|path| root().join(path).is_file());
    // What is not UTF-8 is not text.
    let read = |path: &str| std::fs::read_to_string(root().join(path)).ok();
    Ok(paths.filter_map(|path| Some(File { path: path.to_owned(), text: read(path)? })).collect())
}

#[cfg(test)]
fn file(path: &str, text: &str) -> File {
    File { path: path.to_owned(), text: text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_very_file_is_found() {
        assert!(files().unwrap().iter().any(|file| file.path == "xtask/src/tidy/mod.rs"));
    }

    #[test]
    fn tests_are_told_by_their_path() {
        assert!(file("crates/symmem/tests/failure.rs", "").is_test());
        assert!(file("crates/symmem/src/signal/tests.rs", "").is_test());
        assert!(!file("crates/symmem-testing/src/lib.rs", "").is_test());
    }
}
