//! `symmem doctor` on whatever machine this is.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn doctor_prints_every_row() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output = command.arg("doctor").env("SYMMEM_TIMEOUT", "17").output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for name in [
        "process",
        "host",
        "cuda",
        "nccl",
        "nvshmem",
        "between hosts",
        "address",
        "MTU",
        "secret",
        "congestion control",
        "UCX",
        "trial over loopback",
        "kernel",
        "cores",
        "memory",
        "memfd_create",
        "directory for sockets",
        "descriptors",
        "huge pages",
        "transparent huge pages",
        "NVRTC",
        "user namespaces",
        "/dev/shm",
        "SYMMEM_TIMEOUT",
        "SYMMEM_DEVICE_TIMEOUT",
        "SYMMEM_SOCKET_DIR",
        "SYMMEM_HOST",
        "SYMMEM_ADDR",
        "SYMMEM_IFACE",
        "SYMMEM_PORTS",
        "SYMMEM_SECRET",
        "SYMMEM_SECRET_FILE",
        "SYMMEM_SIGNAL_PAD_SIZE",
        "SYMMEM_CUDA_BACKEND",
        "SYMMEM_NVRTC",
        "SYMMEM_NCCL",
        "SYMMEM_NVSHMEM",
        "SYMMEM_STRICT_DEVICES",
        "SYMMEM_RANKS_PER_DEVICE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "RUST_LOG",
    ] {
        let is_row = |line: &str| line.trim_start_matches(['│', ' ']).starts_with(name);
        assert!(text.lines().any(is_row), "no {name} in\n{text}");
    }
    let timeout = text.lines().find(|line| line.contains("SYMMEM_TIMEOUT")).unwrap();
    assert!(timeout.contains(" 17 "), "{timeout}");
    assert!(output.stderr.is_empty());
}

#[test]
fn doctor_does_not_tell_the_secret() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output = command.arg("doctor").env("SYMMEM_SECRET", "correct horse battery").output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let secret = text.lines().find(|line| line.contains(" SYMMEM_SECRET ")).unwrap();
    assert!(secret.contains(" set "), "{secret}");
    assert!(!text.contains("horse"), "{text}");
}

#[test]
fn a_compiler_that_is_not_where_it_is_said_to_be_is_missing() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output =
        command.arg("doctor").env("SYMMEM_NVRTC", "/nowhere/libnvrtc.so").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let row = text.lines().find(|line| line.contains("NVRTC could not be loaded")).unwrap();
    assert!(row.contains(" no ") && row.contains("/nowhere/libnvrtc.so"), "{row}");
}

#[test]
fn what_a_version_of_nccl_has_is_listed() {
    let fake = symmem_testing::FakeNccl::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output = command.arg("doctor").env("SYMMEM_NCCL", fake.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // The table breaks long lines wherever it likes to.
    let words: Vec<&str> = text.split(['│', '┆', ' ', '\n']).filter(|w| !w.is_empty()).collect();
    let row = words.join(" ");
    assert!(row.contains("NCCL 2.32.3"), "{row}");
    assert!(row.contains("communicators, windows, device access, signals"), "{row}");
}

#[test]
fn the_version_of_nvshmem_is_told_without_initialising_it() {
    let own = std::env::current_exe().unwrap();
    let library = own.parent().unwrap().join("libsymmem_fake_nvshmem.so");
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    let output = command.arg("doctor").env("SYMMEM_NVSHMEM", &library).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // The table breaks long lines wherever it likes to.
    let words: Vec<&str> = text.split(['│', '┆', ' ', '\n']).filter(|w| !w.is_empty()).collect();
    let row = words.join(" ");
    assert!(row.contains("NVSHMEM 3.99.0"), "{row}");
    assert!(row.contains("a heap, teams, operations in streams"), "{row}");
}

/// The words of a table, whose lines are broken wherever it likes to.
fn words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text).into_owned();
    let words: Vec<&str> = text.split(['│', '┆', ' ', '\n']).filter(|w| !w.is_empty()).collect();
    words.join(" ")
}

fn doctor(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.arg("doctor").args(args).stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    command
}

#[test]
fn what_ranks_of_other_hosts_would_find_is_told() {
    let look = |name: &str, value: &str| {
        let mut command = doctor(&[]);
        command.env("SYMMEM_HOST", "node-7").env("MASTER_ADDR", "127.0.0.1");
        words(&command.env(name, value).output().unwrap().stdout)
    };
    let text = look("MASTER_PORT", "29511");
    assert!(text.contains("host node-7 SYMMEM_HOST"), "{text}");
    assert!(text.contains("address 127.0.0.1 lo; the address by which"), "{text}");
    assert!(text.contains("at 127.0.0.1:29511"), "{text}");
    assert!(text.contains("trial over loopback yes round trip"), "{text}");
    assert!(look("SYMMEM_IFACE", "lo").contains("address 127.0.0.1 lo; SYMMEM_IFACE=lo"));
    let text = look("SYMMEM_IFACE", "wan9");
    assert!(text.contains("address no") && text.contains("wan9"), "{text}");
    assert!(look("SYMMEM_ADDR", "8.8.8.8").contains("no interface of this host has it"));
    assert!(look("SYMMEM_SECRET", "correct horse battery").contains("secret set"), "{text}");
}

/// A doctor that listens, and is not left behind.
struct Listening {
    child: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Listening {
    fn start() -> Self {
        let mut child = doctor(&["--listen"]).env("SYMMEM_HOST", "there").spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let port = line.trim().rsplit(':').next().unwrap();
        Self { child, out, address: format!("127.0.0.1:{port}") }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    fn end(mut self) -> String {
        let limit = Instant::now() + Duration::from_secs(30);
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "it listens on");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut text = String::new();
        self.out.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn two_nodes_try_the_network_between_them() {
    let listening = Listening::start();
    let output =
        doctor(&["--peer", &listening.address]).env("SYMMEM_HOST", "here").output().unwrap();
    let text = words(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for part in [
        "reach yes 127.0.0.1 to 127.0.0.1",
        "round trip",
        "messages of 8 bytes",
        "bytes a second to that node",
        "MTU 65",
        "congestion control",
        "host another there there, here here",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(listening.end().contains("127.0.0.1 has tried the network"));
}

#[test]
fn strangers_are_sent_away_and_do_not_end_the_listening() {
    let mut listening = Listening::start();
    for (said, answer) in [
        (&b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"[..], "no symmem doctor of this version"),
        (b"symmem doctor 1\nt\xff\xff\xff\xff\xff\xff\xff\xff", "an order that there is not"),
    ] {
        let mut stranger = std::net::TcpStream::connect(&listening.address).unwrap();
        stranger.write_all(said).unwrap();
        let line = listening.line();
        assert!(line.contains("sent away") && line.contains(answer), "{line}");
    }
    let mut command = doctor(&["--peer", &listening.address]);
    let text = words(&command.env("SYMMEM_HOST", "there").output().unwrap().stdout);
    assert!(text.contains("host the same both nodes"), "{text}");
    listening.end();
}

#[test]
fn a_node_that_is_not_reached_is_a_clear_error() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for (peer, word) in [
        (format!("127.0.0.1:{port}"), "symmem doctor --listen on that node"),
        ("no-port".to_owned(), "host:port"),
    ] {
        let output = doctor(&["--peer", &peer]).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && err.contains(word), "{err}");
    }
}
