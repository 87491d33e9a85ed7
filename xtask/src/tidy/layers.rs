//! Modules of the library lie in layers: each uses only those above it.

use std::collections::BTreeMap;

use crate::tidy::File;
use crate::tidy::rust::{Source, is_word, line_of, use_paths};

/// The modules of `symmem`, each may use those before it.
#[rustfmt::skip]
const LAYERS: &[&str] = &[
    "error", "private", "interrupt", "sync", "machine", "dtype", "store", "memory", "signal", "mesh", "wire", "p2p", "group", "symmetric", "collectives",
    "queue", "cuda", "nccl",
];
/// Backends that need more than the others: they may use what the module of this name may, and itself.
const BACKENDS: &[(&str, &str)] = &[
    ("memory/cuda/", "nccl"),
    ("memory/nccl.rs", "nccl"),
    ("memory/nvshmem.rs", "nccl"),
    ("memory/registry.rs", "nccl"),
];
const LIBRARY: &str = "crates/symmem/src/";

pub(super) fn check(files: &[File]) -> Vec<String> {
    let library = files.iter().filter(|file| file.is_rust() && !file.is_test());
    let library: Vec<_> =
        library.filter_map(|file| Some((file.path.strip_prefix(LIBRARY)?, file))).collect();
    let root = library.iter().find(|(path, _)| *path == "lib.rs");
    let exports = root.map(|(_, file)| exports(&file.text)).unwrap_or_default();
    let modules = library.iter().filter(|(path, _)| *path != "lib.rs");
    modules.flat_map(|(path, file)| check_module(path, file, &exports)).collect()
}

fn check_module(path: &str, file: &File, exports: &BTreeMap<String, String>) -> Vec<String> {
    let backend = BACKENDS.iter().find(|(backend, _)| path.starts_with(backend));
    let module = backend.map_or(path.split(['/', '.']).next().unwrap_or(path), |(_, last)| last);
    let Some(own) = LAYERS.iter().position(|layer| *layer == module) else {
        return vec![format!("{}: module {module} has no place in the order of layers", file.path)];
    };
    let code = Source::new(&file.text).without_tests();
    let below = used(&code).into_iter().filter_map(|(at, name)| {
        let name = exports.get(&name).unwrap_or(&name).clone();
        let place = LAYERS.iter().position(|layer| *layer == name)?;
        (place > own)
            .then(|| format!("{}:{}: {module} may not use {name}", file.path, line_of(&code, at)))
    });
    below.collect()
}

/// The first names behind `crate::`, with their places.
fn used(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, start) in code.match_indices("crate::") {
        let rest = &code[at + start.len()..];
        let end = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        if rest.starts_with('{') {
            let tree = &rest[..rest.find(';').unwrap_or(rest.len())];
            let names = use_paths(tree).into_iter();
            found.extend(names.map(|path| (at, path.split("::").next().unwrap_or("").to_owned())));
        } else {
            found.push((at, rest[..end].to_owned()));
        }
    }
    found
}

/// What the root re-exports: name to module.
fn exports(root: &str) -> BTreeMap<String, String> {
    let code = Source::new(root).without_tests();
    let trees = code.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let paths = trees.flat_map(use_paths);
    let pairs = paths.filter_map(|path| {
        let (module, name) = path.strip_prefix("crate::").unwrap_or(&path).split_once("::")?;
        Some((name.rsplit("::").next()?.to_owned(), module.to_owned()))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let root = file(
            "crates/symmem/src/lib.rs",
            "pub use error::{Error, Result};\npub use group::World;",
        );
        check(&[root, file(&format!("crates/symmem/src/{path}"), text)])
    }

    #[test]
    fn a_module_may_use_itself_and_those_above() {
        let text = "use crate::{Result, error::Error, sync};\nuse crate::store::Store;";
        assert!(findings("store/tcp.rs", text).is_empty());
    }

    #[test]
    fn a_module_may_not_use_those_below() {
        let found =
            findings("sync.rs", "use crate::error;\nuse crate::{error::Error, group::Group};");
        assert_eq!(found, ["crates/symmem/src/sync.rs:2: sync may not use group"]);
        assert_eq!(findings("sync.rs", "fn f() { crate::signal::x() }").len(), 1);
    }

    #[test]
    fn a_name_from_the_root_counts_as_its_module() {
        assert_eq!(findings("store/mod.rs", "use crate::World;").len(), 1);
    }

    #[test]
    fn tests_and_comments_may_use_anything() {
        let text =
            "/// See [`crate::group`].\n#[cfg(test)]\nmod tests { use crate::group::Group; }";
        assert!(findings("sync.rs", text).is_empty());
        assert!(findings("sync/tests.rs", "use crate::group::Group;").is_empty());
    }

    #[test]
    fn a_new_module_must_get_a_place() {
        assert_eq!(findings("stranger.rs", "").len(), 1);
    }
}
