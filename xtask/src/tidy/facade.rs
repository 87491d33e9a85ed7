//! Every atomic of the library comes from its `sync` module, so that loom checks the very code that runs.

use crate::tidy::File;
use crate::tidy::rust::{Source, line_of};

const LIBRARY: &str = "crates/symmem/src/";
const FACADE: &str = "crates/symmem/src/sync/";

pub(super) fn check(files: &[File]) -> Vec<String> {
    let is_checked = |path: &str| path.starts_with(LIBRARY) && !path.starts_with(FACADE);
    let library = files.iter().filter(|f| is_checked(&f.path));
    library.filter(|f| f.is_rust()).flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<String> {
    let code = Source::new(&file.text).without_tests();
    let finding = |(at, name): (usize, &str)| {
        format!("{}:{}: {name} comes from crate::sync", file.path, line_of(&code, at))
    };
    ["std::sync::atomic", "core::sync::atomic", "loom::"]
        .iter()
        .flat_map(|name| code.match_indices(name).map(finding).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        check(&[File { path: path.to_owned(), text: text.to_owned() }]).len()
    }

    #[test]
    fn an_atomic_from_elsewhere_is_found() {
        let text = "use std::sync::atomic::AtomicU32;";
        assert_eq!(findings("crates/symmem/src/group/mod.rs", text), 1);
        assert_eq!(findings("crates/symmem/src/sync/word.rs", text), 0);
        assert_eq!(findings("crates/symmem/src/group/mod.rs", "// std::sync::atomic"), 0);
    }
}
