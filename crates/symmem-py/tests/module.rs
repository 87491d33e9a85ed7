//! The module builds and, where a Python is at hand, loads.

use std::path::PathBuf;
use std::process::Command;

/// The module that cargo built for this test.
fn library() -> PathBuf {
    std::env::current_exe().unwrap_or_default().with_file_name("libsymmem_py.so")
}

#[test]
fn the_module_exports_its_entry_point() {
    let bytes = std::fs::read(library()).expect("cargo builds the module before its tests");
    let name = b"PyInit__native";
    assert!(bytes.windows(name.len()).any(|window| window == name));
}

#[test]
fn python_imports_the_module_and_sees_the_version() {
    let python = std::env::var("SYMMEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let recent = "import sys; sys.exit(sys.version_info < (3, 10))";
    if !Command::new(&python).args(["-c", recent]).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no Python 3.10 or later here");
        return;
    }
    let load = "import sys, importlib.util as u
spec = u.spec_from_file_location('_native', sys.argv[1])
module = u.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.__version__)";
    let run =
        Command::new(&python).args(["-c", load]).arg(library()).output().expect("it ran above");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(String::from_utf8_lossy(&run.stdout).trim(), env!("CARGO_PKG_VERSION"));
}
