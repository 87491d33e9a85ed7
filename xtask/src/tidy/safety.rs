//! Every file that allows unsafe code is listed in `docs/safety.md`.

use crate::tidy::File;
use crate::tidy::rust::Source;

const LIST: &str = "docs/safety.md";

pub(super) fn check(files: &[File]) -> Vec<String> {
    let list = files.iter().find(|file| file.path == LIST).map_or("", |file| file.text.as_str());
    let rust = files.iter().filter(|file| file.is_rust());
    let allowing = rust.filter(|file| allows_unsafe(&file.text));
    let missing = allowing.filter(|file| !is_listed(list, &file.path));
    missing
        .map(|file| format!("{}: allows unsafe code but {LIST} does not list it", file.path))
        .collect()
}

fn allows_unsafe(text: &str) -> bool {
    let code: String = Source::new(text).code.split_whitespace().collect();
    code.match_indices("allow(").any(|(at, _)| {
        let lints = code[at + 6..].split(')').next().unwrap_or("");
        lints.split(',').any(|lint| lint == "unsafe_code")
    })
}

/// Listed by its whole path, or by the path within the library.
fn is_listed(list: &str, path: &str) -> bool {
    let short = path.strip_prefix("crates/symmem/src/").unwrap_or(path);
    [path, short].iter().any(|name| list.contains(&format!("`{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    #[test]
    fn a_file_that_allows_unsafe_code_must_be_listed() {
        let sync = || file("crates/symmem/src/sync.rs", "#![allow(unsafe_code)] // why");
        let sys = || file("crates/symmem-sys/src/lib.rs", "#![allow(dead_code, unsafe_code)]");
        assert_eq!(check(&[sync(), sys()]).len(), 2);
        let list = file(LIST, "| `sync.rs` | `crates/symmem-sys/src/lib.rs` |");
        assert!(check(&[sync(), sys(), list]).is_empty());
    }

    #[test]
    fn denying_it_or_speaking_of_it_is_no_matter() {
        let text = "#![deny(unsafe_code)] // not allow(unsafe_code)";
        assert!(check(&[file("a.rs", text)]).is_empty());
    }
}
