//! `symmem bench` with real ranks and few samples. No timing is asserted.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.arg("bench").args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> (Output, String, String) {
    let output = bench(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

fn json_file(test: &str) -> PathBuf {
    std::env::temp_dir().join(format!("symmem-bench-{test}-{}.json", std::process::id()))
}

fn records(path: &PathBuf) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_table_has_every_row() {
    let (output, out, err) = run(&["--quick", "--rounds", "1"]);
    assert!(output.status.success(), "{out}{err}");
    for row in [
        "floor: flag exchange",
        "floor: flag round trip",
        "floor: put flag round trip",
        "barrier",
        "put signal",
        "rendezvous",
        "startup",
    ] {
        let is_row = |line: &str| line.trim_start_matches(['│', ' ']).starts_with(row);
        assert!(out.lines().any(is_row), "no {row} in\n{out}");
    }
    for column in ["ranks", "samples", "median", "p10", "p90", "unit", "× floor", "target", "met"]
    {
        assert!(out.contains(column), "no {column} in\n{out}");
    }
}

#[test]
fn progress_is_plain_lines_where_there_is_no_terminal() {
    let (output, out, err) = run(&["barrier", "--quick", "--rounds", "2"]);
    assert!(output.status.success(), "{out}{err}");
    assert!(err.lines().any(|line| line == "barrier, round 2 of 2"), "{err}");
    assert!(!out.contains('\x1b') && !err.contains('\x1b'), "{out}{err}");
    assert!(!out.contains("round 2"), "{out}");
}

#[test]
fn every_figure_is_a_line_of_json() {
    let path = json_file("lines");
    let rounds = ["--quick", "--rounds", "2", "--json", path.to_str().unwrap()];
    let (output, out, err) = run(&rounds);
    assert!(output.status.success(), "{out}{err}");
    let records = records(&path);
    for (collective, system, ranks, lines) in [
        ("flag_exchange", "limits", 2, 2),
        ("flag_round_trip", "limits", 2, 2),
        ("barrier", "symmem", 2, 2),
        ("put_signal", "symmem", 2, 2),
        ("send", "symmem", 2, 8),
        ("rendezvous", "symmem", 4, 2),
        ("startup", "symmem", 16, 1),
    ] {
        let of: Vec<_> = records.iter().filter(|r| r["collective"] == collective).collect();
        assert_eq!(of.len(), lines, "{collective}");
        assert!(of.iter().all(|r| r["system"] == system && r["ranks"] == ranks), "{of:?}");
    }
    for record in &records {
        assert_eq!(record["verified"], true, "{record}");
        for field in ["bytes", "samples", "median_us", "p10_us", "p90_us", "near", "round"] {
            assert!(record[field].is_number(), "{field} in {record}");
        }
        for field in ["dtype", "backend", "memory", "algorithm"] {
            assert!(record[field].is_string(), "{field} in {record}");
        }
    }
}

#[test]
fn a_row_can_be_measured_with_more_ranks_than_cores() {
    let path = json_file("ranks");
    let args = ["barrier", "-n", "5", "--quick", "--rounds", "1", "--json"];
    let (output, out, err) = run(&[&args[..], &[path.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{out}{err}");
    let records = records(&path);
    assert!(records.iter().all(|record| record["ranks"] == 5));
    assert!(records.iter().any(|record| record["collective"] == "barrier"));
}

const COLLECTIVES: [&str; 8] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
];

#[test]
fn every_collective_has_its_floor_and_its_reading() {
    let path = json_file("collectives");
    let args = ["--bytes", "8,16K", "--quick", "--rounds", "1", "--json", path.to_str().unwrap()];
    let (output, out, err) = run(&[&COLLECTIVES[..], &args].concat());
    assert!(output.status.success(), "{out}{err}");
    let records = records(&path);
    for collective in COLLECTIVES {
        assert!(out.contains(collective), "{out}");
        for (name, bytes) in [("", 8), ("", 16384), ("+read", 16384)] {
            for system in ["symmem", "limits"] {
                let is = |r: &&serde_json::Value| {
                    r["collective"] == format!("{collective}{name}")
                        && (&r["system"], &r["bytes"]) == (&system.into(), &bytes.into())
                };
                let found: Vec<_> = records.iter().filter(is).collect();
                assert_eq!(found.len(), 1, "{system} {collective}{name} {bytes}");
                assert!(found[0]["verified"] == true && found[0]["dtype"] == "f32");
            }
        }
    }
}

#[test]
fn the_page_has_its_parts_and_needs_no_others() {
    let path = json_file("page");
    let args = ["all_reduce", "barrier", "--bytes", "8,16K", "--quick", "--rounds", "1", "--html"];
    let (output, out, err) = run(&[&args[..], &[path.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{out}{err}");
    let page = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for part in [
        "<!doctype html>",
        "name=\"viewport\"",
        "prefers-color-scheme: dark",
        "symmem bench all_reduce barrier --bytes 8,16K",
        "id=\"machine\"",
        "<th>× floor</th>",
        "all_reduce of f32, 2 ranks: time",
        "all_reduce of f32, 2 ranks: bandwidth",
        "class=\"floor\"",
        "class=\"system\"",
        "</html>",
    ] {
        assert!(page.contains(part), "no {part}");
    }
    // Time and bandwidth, without the reading of the result and with it.
    assert_eq!(page.matches("<svg").count(), 4);
    for outside in ["http:", "https:", "<script", "<link", "<img", "NaN"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn collectives_on_slices_are_right_in_several_types_and_others_are_named() {
    let path = json_file("slices");
    let options = ["--memory", "slices", "--dtype", "f32,bf16", "--bytes", "8,16K"];
    let few = ["--quick", "--rounds", "1", "--json", path.to_str().unwrap()];
    let (output, out, err) = run(&[&COLLECTIVES[..], &options, &few].concat());
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("no form on slices: reduce, gather, scatter"), "{out}");
    let records = records(&path);
    for dtype in ["f32", "bf16"] {
        for collective in &COLLECTIVES[..5] {
            let is = |r: &&serde_json::Value| {
                r["collective"] == *collective && r["dtype"] == dtype && r["system"] == "symmem"
            };
            assert_eq!(records.iter().filter(is).count(), 2, "{collective} of {dtype}");
        }
        assert!(out.contains(dtype), "{out}");
    }
    for record in &records {
        let memory = if record["system"] == "symmem" { "slices" } else { "symmetric" };
        assert!(record["verified"] == true && record["memory"] == memory, "{record}");
    }
}

#[test]
fn every_type_and_algorithm_is_right_between_threads_too() {
    for dtype in ["f64", "bf16", "f16", "i32", "i64", "u32", "u8"] {
        let path = json_file(dtype);
        let options = ["--dtype", dtype, "--bytes", "64,1000,4K", "--backend", "process"];
        let few = ["--algorithm", "one-shot", "-n", "3", "--quick", "--rounds", "1", "--json"];
        let args = [&COLLECTIVES[..], &options, &few, &[path.to_str().unwrap()]].concat();
        let (output, out, err) = run(&args);
        assert!(output.status.success(), "{out}{err}");
        let records = records(&path);
        assert!(records.iter().all(|r| r["dtype"] == dtype && r["backend"] == "process"));
        assert!(records.iter().any(|r| r["algorithm"] == "one-shot"));
    }
}

#[test]
fn a_bad_row_is_answered_with_the_rows() {
    let (output, out, err) = run(&["barier"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(out.is_empty(), "{out}");
    assert!(err.contains("\"barier\""), "{err}");
    assert!(err.contains("floor, barrier, put_signal, send, put, all_reduce, "), "{err}");
}

#[test]
fn bad_arguments_are_refused_before_anything_starts() {
    for (args, said) in [
        (&["-n", "1"][..], "2.."),
        (&["--rounds", "0"], "1.."),
        (&["--bytes", "1T"], "the units are K, M and G"),
        (&["--bytes", "6"], "6 bytes are not whole elements of f32"),
        (&["--dtype", "f31"], "bf16"),
        (&["--algorithm", "three-shot"], "two-shot"),
        (&["--algorithm", "one-shot", "--memory", "slices"], "on slices there is one algorithm"),
        (&["gather", "--memory", "slices"], "on slices there is no gather"),
        (&["--dtype", "f32,f64", "--bytes", "4"], "4 bytes are not whole elements of f64"),
        (&["--json", "/nowhere/at/all"], "cannot write /nowhere/at/all"),
        (&["--graph"], "need --backend cuda"),
        (&["--device", "0"], "need --backend cuda"),
        (&["--algorithm", "flagged"], "need --backend cuda"),
        (&["--algorithm", "multimem"], "need --backend cuda"),
        (&["--algorithm", "copy-engine"], "need --backend cuda"),
        (&["--backend", "cuda", "--memory", "slices"], "on devices the memory is symmetric"),
    ] {
        let (output, out, err) = run(args);
        assert!(!output.status.success() && out.is_empty(), "{args:?}: {out}");
        assert!(err.contains(said), "{args:?}: {err}");
        assert!(!err.contains(", round"), "{args:?}: {err}");
    }
}

#[test]
fn without_a_device_the_error_says_so_before_anything_starts() {
    let path = json_file("no-device");
    for more in [&[][..], &["--graph", "--device", "0", "--peers"], &["all_reduce", "--graph"]] {
        let args = [&["--backend", "cuda", "--json", path.to_str().unwrap()], more].concat();
        let output = bench(&args).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("--backend cuda needs a CUDA device and its driver: "), "{err}");
        assert!(output.stdout.is_empty() && err.lines().count() == 1 && !path.exists(), "{err}");
    }
}

#[test]
fn an_interrupt_ends_everything() {
    let mut child = bench(&["barrier", "--rounds", "1000"]).spawn().unwrap();
    sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "no end after SIGINT");
        sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(130));
}

/// The rows between hosts, of `ranks` ranks on `hosts` hosts.
fn between(
    test: &str,
    hosts: &str,
    ranks: &str,
    more: &[&str],
) -> (String, Vec<serde_json::Value>) {
    let path = json_file(test);
    let args = ["barrier", "put_signal", "put", "all_reduce", "--hosts", hosts, "-n", ranks];
    let args = [&args[..], more, &["--quick", "--rounds", "1", "--json", path.to_str().unwrap()]];
    let (output, out, err) = run(&args.concat());
    assert!(output.status.success(), "{out}{err}");
    (out, records(&path))
}

#[test]
fn rows_between_hosts_are_compared_with_bare_sockets() {
    let (out, records) = between("hosts", "2", "2", &[]);
    assert!(out.starts_with("2 hosts: "), "{out}");
    assert!(out.contains("× sockets"), "{out}");
    for (collective, bytes) in [
        ("barrier", 0),
        ("put_signal", 8),
        ("put", 16384),
        ("all_reduce", 8),
        ("all_reduce", 16384),
    ] {
        for system in ["sockets", "symmem"] {
            let is = |r: &&serde_json::Value| {
                (&r["collective"], &r["bytes"], &r["system"])
                    == (&collective.into(), &bytes.into(), &system.into())
            };
            let found: Vec<_> = records.iter().filter(is).collect();
            assert_eq!(found.len(), 1, "{system} {collective} {bytes}");
            assert!(found[0]["verified"] == true && found[0]["hosts"] == 2, "{found:?}");
            assert!(["namespaces", "loopback"].iter().any(|n| found[0]["network"] == *n));
        }
    }
}

/// As it is where namespaces cannot be made.
#[test]
fn without_the_tool_for_namespaces_hosts_are_told_apart_over_loopback() {
    let mut command = bench(&["barrier", "--hosts", "2", "--quick", "--rounds", "1"]);
    let output = command.env("PATH", "/nonexistent").output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}");
    assert!(out.contains("loopback") && out.contains("SYMMEM_HOST"), "{out}");
    let mut command = bench(&["barrier", "--hosts", "2", "--rate", "1gbit", "--quick"]);
    let output = command.env("PATH", "/nonexistent").output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && err.contains("--rate needs network namespaces"), "{err}");
}

#[test]
fn three_hosts_are_joined_by_a_bridge_with_a_limited_rate() {
    let can = Command::new("unshare").args(["-n", "tc", "qdisc"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: network namespaces need root, ip and tc");
        return;
    }
    let (out, records) = between("bridge", "3", "6", &["--rate", "1gbit"]);
    assert!(out.starts_with("3 hosts: network namespaces"), "{out}");
    assert!(out.contains("at 1gbit each way"), "{out}");
    assert!(records.iter().all(|r| r["rate"] == "1gbit" && r["network"] == "namespaces"));
}

#[test]
fn what_makes_no_sense_between_hosts_is_refused() {
    for (args, word) in [
        (&["barrier", "--hosts", "2", "-n", "3"][..], "3 ranks"),
        (&["barrier", "--hosts", "1"], "1 is not in"),
        (&["floor", "--hosts", "2"], "between hosts there is no floor"),
        (&["put"], "without --hosts there is no put"),
        (&["barrier", "--hosts", "2", "--backend", "process"], "--backend host"),
        (&["barrier", "--hosts", "2", "--rate", "fast"], "gbit"),
        (&["barrier", "--rate", "1gbit"], "--hosts"),
    ] {
        let (output, _, err) = run(args);
        assert!(!output.status.success() && err.contains(word), "{args:?}: {err}");
    }
}
