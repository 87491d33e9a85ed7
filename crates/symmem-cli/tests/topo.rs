//! `symmem topo` on whatever machine this is.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::process::{Command, Output};

fn topo(args: &[&str]) -> Output {
    let output =
        Command::new(env!("CARGO_BIN_EXE_symmem")).arg("topo").args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

#[test]
fn topo_shows_the_devices_or_says_why_there_are_none() {
    let text = String::from_utf8(topo(&[]).stdout).unwrap();
    assert!(text.contains("cuda:0") || text.starts_with("There is no GPU to show: "), "{text}");
}

#[test]
fn topo_speaks_json() {
    let json: serde_json::Value = serde_json::from_slice(&topo(&["--json"]).stdout).unwrap();
    let devices = json["devices"].as_array().unwrap();
    if devices.is_empty() {
        assert!(json["why"].as_str().unwrap().contains("driver"), "{json}");
    } else {
        assert_eq!(json["nvlinks"].as_array().unwrap().len(), devices.len());
        assert!(devices[0]["uuid"].as_str().unwrap().starts_with("GPU-"), "{json}");
    }
}
