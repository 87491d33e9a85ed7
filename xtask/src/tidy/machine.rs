//! Nothing of the machine that a change was made on: its paths, its package registries.

use crate::tidy::File;
use crate::tidy::rust::is_word;

/// Directories that exist on one machine only. Split, so that this file passes its own check.
const DIRECTORIES: &[&str] =
    &[concat!("/", "work/"), concat!("/", "tmp/"), concat!("/", "root/"), concat!("/", "home/")];
/// Settings that name a registry.
const SETTINGS: &[&str] =
    &[concat!("index", "-url"), concat!("replace", "-with"), concat!("sparse", "+http")];
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(super) fn check(files: &[File]) -> Vec<String> {
    files.iter().flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<String> {
    let is_lock = file.path.ends_with("Cargo.lock");
    let find = |line| {
        if is_lock { foreign_source(line) } else { machine_path(line).or_else(|| registry(line)) }
    };
    let lines = file.text.lines().enumerate();
    let found = lines.filter_map(|(number, line)| Some((number + 1, find(line)?)));
    found.map(|(number, what)| format!("{}:{number}: {what}", file.path)).collect()
}

/// A directory that starts a path, and a name within it.
fn machine_path(line: &str) -> Option<String> {
    let starts = |directory: &str| {
        line.match_indices(directory).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            let after = line[at + directory.len()..].chars().next();
            !before.is_some_and(|c| is_word(c) || "./}>-".contains(c)) && after.is_some_and(is_word)
        })
    };
    let directory = DIRECTORIES.iter().find(|directory| starts(directory))?;
    Some(format!("a path of one machine ({directory}...)"))
}

fn registry(line: &str) -> Option<String> {
    let setting = SETTINGS.iter().find(|setting| line.contains(**setting))?;
    Some(format!("names a package registry ({setting})"))
}

fn foreign_source(line: &str) -> Option<String> {
    let source = line.strip_prefix("source = \"")?.strip_suffix('"')?;
    (source != CRATES_IO).then(|| "a package that is not from crates.io".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    fn count(path: &str, text: &str) -> usize {
        check(&[file(path, text)]).len()
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        assert_eq!(count("a.rs", concat!("open(\"/", "tmp/build\")")), 1);
        assert_eq!(count("a.md", concat!("see /", "work/notes.md")), 1);
        assert_eq!(
            count("a.md", concat!("the default is `/", "tmp`; ./", "work/x; a/", "work/x")),
            0
        );
    }

    #[test]
    fn registries_are_found() {
        assert_eq!(count("pip.conf", concat!("index", "-url = x")), 1);
        assert_eq!(count("Cargo.lock", &format!("source = \"{CRATES_IO}\"")), 0);
        assert_eq!(count("Cargo.lock", "source = \"registry+https://example.org/index\""), 1);
    }
}
