//! `symmem calibrate`, and how the other commands speak of what it leaves.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const COSTS: [&str; 7] = ["exchange", "flag", "switch", "staged", "fresh", "settled", "moved"];

/// A directory for one test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("symmem-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn symmem(arguments: &[&str], costs: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(arguments).env("SYMMEM_COSTS", costs).env_remove("RUST_LOG").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Whether there are two cores to measure on; if not, `output` says so.
fn measured(output: &Output) -> bool {
    if std::thread::available_parallelism().unwrap().get() > 1 {
        return true;
    }
    assert!(!output.status.success() && text(&output.stderr).contains("one core only"));
    false
}

#[test]
fn a_dry_run_shows_every_cost_and_writes_nothing() {
    let scratch = Scratch::new("dry-run");
    let path = scratch.0.join("costs");
    let output = symmem(&["calibrate", "--dry-run"], &path);
    if measured(&output) {
        assert!(output.status.success(), "{output:?}");
        let shown = text(&output.stdout);
        for name in COSTS.iter().chain(&["cost "]) {
            let is_row = |line: &str| line.trim_start_matches(['│', ' ']).starts_with(name);
            assert!(shown.lines().any(is_row), "no {name} in\n{shown}");
        }
        assert!(shown.contains("there and back") && shown.contains("Nothing was written."));
    }
    assert!(!path.exists());
}

#[test]
fn what_was_measured_is_kept_and_used() {
    let scratch = Scratch::new("calibrate");
    let path = scratch.0.join("below").join("costs");
    let output = symmem(&["calibrate", "--force"], &path);
    if !measured(&output) {
        return;
    }
    assert!(text(&output.stdout).contains(&format!("Written to {}.", path.display())));
    let file = std::fs::read_to_string(&path).unwrap();
    assert!(COSTS.iter().all(|name| file.lines().any(|line| line.starts_with(name))), "{file}");
    let explained = symmem(&["explain", "all_reduce", "--bytes", "2048"], &path);
    let said = text(&explained.stdout);
    assert!(said.contains(&format!("Costs: measured, from {}.", path.display())), "{said}");
    assert!(explained.stderr.is_empty());
    let doctor = text(&symmem(&["doctor"], &path).stdout);
    let row = doctor.lines().find(|line| line.contains("│ costs ")).unwrap();
    assert!(row.contains(" measured "), "{row}");
}

#[test]
fn a_damaged_file_is_told_and_does_no_harm() {
    let scratch = Scratch::new("damaged");
    let path = scratch.0.join("costs");
    std::fs::write(&path, "version 1\nprocessor").unwrap();
    let explained = symmem(&["explain", "all_reduce", "--bytes", "2048"], &path);
    let (said, warned) = (text(&explained.stdout), text(&explained.stderr));
    assert!(explained.status.success() && said.contains("* "), "{said}");
    assert!(said.contains("Costs: built in; ") && said.contains("is ignored"), "{said}");
    assert_eq!(warned.matches("is ignored").count(), 1, "{warned}");
    let doctor = symmem(&["doctor"], &path);
    assert!(doctor.status.success() && text(&doctor.stdout).contains("ignored"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "version 1\nprocessor");
}
