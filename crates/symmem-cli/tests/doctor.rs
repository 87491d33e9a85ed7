//! `symmem doctor` on whatever machine this is.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::process::Command;

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
        "ucx",
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
