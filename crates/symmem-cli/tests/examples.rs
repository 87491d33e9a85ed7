//! The examples, alone and as ranks of `symmem run`, as their first lines say.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

const SYMMEM: &str = env!("CARGO_BIN_EXE_symmem");

/// The built example. Builds all of them first: `cargo test` of this package alone does not.
fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).join("examples").join(name)
}

/// Builds the examples where this test was built, with the same profile, and says where that is.
fn build() -> PathBuf {
    let directory = Path::new(SYMMEM).parent().unwrap();
    let profile = match directory.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        other => other,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--workspace", "--examples", "--profile", profile]);
    cargo.arg("--target-dir").arg(directory.parent().unwrap());
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    directory.to_owned()
}

fn output(mut command: Command) -> Output {
    // A hang would end by itself, and say who waited for whom.
    command.env("SYMMEM_TIMEOUT", "20").stdin(Stdio::null()).output().unwrap()
}

fn alone(name: &str) -> Vec<String> {
    let output = output(Command::new(example(name)));
    assert!(output.status.success(), "{output:?}");
    lines(&output.stdout)
}

fn three_ranks(options: &[&str], name: &str) -> Output {
    let mut command = Command::new(SYMMEM);
    command.args(["run", "-n", "3"]).args(options).arg("--").arg(example(name));
    output(command)
}

/// What three ranks wrote, if all was well.
fn together(name: &str) -> Vec<String> {
    let output = three_ranks(&[], name);
    assert!(output.status.success(), "{output:?}");
    lines(&output.stdout)
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// One line per rank.
fn for_each_of_three(line: impl Fn(usize) -> String) -> Vec<String> {
    (0..3).map(|rank| format!("[{rank}] {}", line(rank))).collect()
}

#[test]
fn hello_reads_every_ranks_memory() {
    assert_eq!(alone("01_hello"), ["hello from rank 0 of 1: all ranks together hold 1"]);
    let line = |rank| format!("hello from rank {rank} of 3: all ranks together hold 6");
    assert_eq!(together("01_hello"), for_each_of_three(line));
}

#[test]
fn the_ring_carries_every_value_round() {
    let name = "02_ring_signals";
    assert_eq!(alone(name), ["rank 0 of 1: the sum that went round the ring is 0"]);
    let line = |rank| format!("rank {rank} of 3: the sum that went round the ring is 3");
    assert_eq!(together(name), for_each_of_three(line));
}

#[test]
fn the_heat_of_the_rod_stays_in_it() {
    let name = "03_shared_phases";
    let all = "1.000 in all after 400 rounds";
    assert_eq!(alone(name), [format!("rank 0 of 1: 1.000 of the heat is here, {all}")]);
    let lines = together(name);
    assert_eq!(lines.len(), 3);
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("[{rank}] rank {rank} of 3: 0.")), "{line}");
        assert!(line.ends_with(all), "{line}");
    }
}

#[test]
fn the_survivors_of_a_lost_rank_finish() {
    let name = "04_survive_a_lost_rank";
    assert!(alone(name)[0].contains("start several ranks"));
    let output = three_ranks(&["--on-failure", "keep"], name);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("rank 2 was lost; ranks 0, 1 finished"), "{told}");
    let lines = lines(&output.stdout);
    assert_eq!(lines.len(), 4, "{output:?}");
    for rank in 0..2 {
        let told = format!("[{rank}] rank {rank}: share: rank 2 is gone: ");
        assert!(lines.iter().any(|line| line.starts_with(&told)), "{lines:?}");
        let done = format!("[{rank}] rank {rank}: counted to 1000 with 2 of 3 ranks");
        assert!(lines.contains(&done), "{lines:?}");
    }
}

#[test]
fn every_rank_has_the_sum_of_all() {
    let name = "05_all_reduce";
    assert_eq!(alone(name), ["rank 0 of 1: 1000000 sums, the last is 999.0"]);
    let line = |rank| format!("rank {rank} of 3: 1000000 sums, the last is 2997.3");
    assert_eq!(together(name), for_each_of_three(line));
}

#[test]
fn every_token_comes_back_from_its_expert() {
    let name = "06_all_to_all";
    let alone = alone(name);
    assert_eq!(alone, ["rank 0 of 1: 50 tokens came back, 50 were worked on here"]);
    let lines = together(name);
    assert_eq!(lines.len(), 3);
    for (rank, line) in lines.iter().enumerate() {
        let begin = format!("[{rank}] rank {rank} of 3: 50 tokens came back, ");
        assert!(line.starts_with(&begin), "{line}");
    }
}

#[test]
fn a_network_in_pieces_gives_what_it_gives_in_one() {
    let name = "07_tensor_parallel";
    let same = "of 100 hidden units, same result as in one piece";
    assert_eq!(alone(name), [format!("rank 0 of 1: 100 {same}")]);
    let line = |rank: usize| format!("rank {rank} of 3: {} {same}", [33, 33, 34][rank]);
    assert_eq!(together(name), for_each_of_three(line));
}

#[test]
fn a_kernel_of_the_users_runs_or_says_what_it_lacks() {
    let name = "08_custom_kernel";
    let good = |line: &str| line.contains(" sums with ") || line.contains(": not run: ");
    let (alone, together) = (alone(name), together(name));
    assert!(alone.len() == 1 && good(&alone[0]), "{alone:?}");
    assert!(together.len() == 3 && together.iter().all(|line| good(line)), "{together:?}");
}

#[test]
fn sums_in_the_background_are_those_of_calls() {
    let name = "09_overlap";
    assert_eq!(alone(name), ["rank 0 of 1: 8 layers, the last sum is 4.7139997"]);
    let lines = together(name);
    assert_eq!(lines.len(), 3);
    for (rank, line) in lines.iter().enumerate() {
        assert!(
            line.starts_with(&format!("[{rank}] rank {rank} of 3: 8 layers, the last sum is ")),
            "{line}"
        );
    }
}
