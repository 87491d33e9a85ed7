//! `symmem run` with real processes.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A launcher that a failing test does not leave behind.
struct Launched(Child);

impl Launched {
    fn start(mut command: Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Starts it and waits until every rank has written `ready` to standard output, which nobody reads afterwards.
    fn ready(command: Command, ranks: usize) -> (Self, BufReader<ChildStdout>) {
        let mut launched = Self::start(command);
        let mut out = BufReader::new(launched.0.stdout.take().unwrap());
        read_until(&mut out, "ready", ranks);
        (launched, out)
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// How it ended, and what it wrote to standard error.
    fn end(&mut self) -> (Option<i32>, String) {
        until("the launcher ended", || self.0.try_wait().unwrap().is_some());
        let mut err = Vec::new();
        self.0.stderr.take().unwrap().read_to_end(&mut err).unwrap();
        (self.0.wait().unwrap().code(), text(&err))
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

mod run {
    mod ending;
    mod failing;
    mod keeping;
    mod nodes;
    mod nothing_left;
    mod output;
}

/// Long enough for a loaded machine, short enough to notice a hang.
const LIMIT: Duration = Duration::from_secs(60);

fn symmem(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmem"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `symmem run -n ranks OPTIONS -- sh -c script`.
fn job(ranks: usize, options: &[&str], script: &str) -> Command {
    let ranks = ranks.to_string();
    let mut command = symmem(&["run", "-n", &ranks]);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

fn run(ranks: usize, script: &str) -> Output {
    job(ranks, &[], script).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// A word that only the processes of one test have in their command lines.
fn mark(test: &str) -> String {
    format!("mark-{test}-{}", std::process::id())
}

/// The living processes with `mark` in their command line or environment, other than the launcher's caller.
fn alive(mark: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter(|e| e.file_name().to_string_lossy().parse::<u32>().is_ok());
    let marked = pids.filter(|entry| {
        let has = |file| {
            let bytes = std::fs::read(entry.path().join(file)).unwrap_or_default();
            text(&bytes).contains(mark)
        };
        has("cmdline") || has("environ")
    });
    marked.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The children of a process with one thread.
fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Reads lines until `count` of them contain `word`.
fn read_until(out: &mut impl BufRead, word: &str, count: usize) {
    let mut seen = 0;
    let mut line = Vec::new();
    while seen < count {
        line.clear();
        assert!(out.read_until(b'\n', &mut line).unwrap() > 0, "only {seen} times {word}");
        seen += usize::from(text(&line).contains(word));
    }
}

#[test]
fn every_rank_gets_torchruns_variables() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK \
                 ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RESTART_COUNT \
                 TORCHELASTIC_MAX_RESTARTS PYTHONUNBUFFERED";
    let script = format!("for n in {names}; do eval echo $n=\\$$n; done");
    let output = run(3, &script);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: HashSet<_> = sorted_lines(&output.stdout).into_iter().collect();
    for rank in 0..3 {
        for expected in [
            format!("RANK={rank}"),
            format!("LOCAL_RANK={rank}"),
            "WORLD_SIZE=3".to_owned(),
            "LOCAL_WORLD_SIZE=3".to_owned(),
            "GROUP_RANK=0".to_owned(),
            "GROUP_WORLD_SIZE=1".to_owned(),
            format!("ROLE_RANK={rank}"),
            "ROLE_WORLD_SIZE=3".to_owned(),
            "MASTER_ADDR=127.0.0.1".to_owned(),
            "TORCHELASTIC_USE_AGENT_STORE=True".to_owned(),
            "TORCHELASTIC_RESTART_COUNT=0".to_owned(),
            "TORCHELASTIC_MAX_RESTARTS=0".to_owned(),
            "PYTHONUNBUFFERED=1".to_owned(),
        ] {
            assert!(lines.contains(&format!("[{rank}] {expected}")), "rank {rank}: {expected}");
        }
    }
}

#[test]
fn port_and_run_id_are_the_same_for_all_ranks() {
    let output = run(4, "echo port=$MASTER_PORT id=$TORCHELASTIC_RUN_ID");
    let lines: HashSet<_> = text(&output.stdout).lines().map(|line| line[4..].to_owned()).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains("port= ") && !line.ends_with("id=")));
}

#[test]
fn variables_of_other_launchers_are_removed() {
    let mut command = job(1, &[], "env");
    command.env("OMPI_COMM_WORLD_RANK", "7").env("PMI_RANK", "7").env("SLURM_PROCID", "7");
    command.env("SLURM_JOB_ID", "42").env("RANK", "7").env("PYTHONUNBUFFERED", "x");
    let output = text(&command.output().unwrap().stdout);
    for gone in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK=7"] {
        assert!(!output.contains(gone), "{gone} in {output}");
    }
    assert!(output.contains("SLURM_JOB_ID=42") && output.contains("PYTHONUNBUFFERED=x"));
}

#[test]
fn node_0_keeps_the_store_until_the_other_nodes_have_ended() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let node = |rank: &str, script: &str| {
        let port = port.to_string();
        let options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", &port];
        let mut command = job(1, &[&options[..], &["--node-rank", rank]].concat(), script);
        command.env("SYMMEM_SECRET", "correct horse battery staple").spawn().unwrap()
    };
    let first = node("0", "exit 0");
    let late = "sleep 0.5; exec bash -c ': < /dev/tcp/$MASTER_ADDR/$MASTER_PORT'";
    let second = node("1", late).wait_with_output().unwrap();
    let first = first.wait_with_output().unwrap();
    assert!(second.status.success(), "{}", text(&second.stderr));
    assert!(first.status.success() && first.stderr.is_empty(), "{}", text(&first.stderr));
}

#[test]
fn an_interrupted_job_does_not_wait_for_a_reader() {
    let script = "echo ready >&2; while :; do echo 0123456789; done";
    let mut child = job(2, &["--grace", "0.3"], script).spawn().unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    read_until(&mut err, "ready", 2);
    sleep(Duration::from_millis(300));
    signal(&child, Signal::TERM);
    until("the launcher ended", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_node_of_several_numbers_its_ranks_after_those_of_the_earlier_nodes() {
    let options =
        ["--nnodes", "3", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "9"];
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE \
                  $MASTER_ADDR:$MASTER_PORT";
    let output = job(2, &options, script).output().unwrap();
    assert_eq!(
        sorted_lines(&output.stdout),
        ["[2] 2/6 0/2 1/3 127.0.0.1:9", "[3] 3/6 1/2 1/3 127.0.0.1:9"]
    );
}

#[test]
fn a_store_answers_at_the_given_address() {
    let output = run(
        2,
        "command -v bash >/dev/null || exit 0; \
                         exec bash -c ': < /dev/tcp/$MASTER_ADDR/$MASTER_PORT'",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn standard_output_and_error_stay_apart_and_carry_the_rank() {
    let output = run(2, "echo out; echo err >&2; printf 'no newline'");
    assert!(output.status.success());
    let out = ["[0] no newline", "[0] out", "[1] no newline", "[1] out"];
    assert_eq!(sorted_lines(&output.stdout), out);
    assert_eq!(sorted_lines(&output.stderr), ["[0] err", "[1] err"]);
}

#[test]
fn bytes_that_are_not_text_pass_unchanged() {
    let output = run(1, r"printf 'a\377\376b\n\n\000c'");
    assert_eq!(output.stdout, b"[0] a\xff\xfeb\n[0] \n[0] \0c\n");
}

#[test]
fn standard_input_is_empty() {
    let mut command = job(2, &[], "cat; echo end");
    command.stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let _held_open = child.stdin.take();
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(sorted_lines(out.as_bytes()), ["[0] end", "[1] end"]);
}

#[test]
fn lines_of_many_ranks_are_never_mixed() {
    // Both streams into one pipe, each line written in two pieces.
    let script = "i=0; while [ $i -lt 300 ]; do printf 'a%s-' $RANK$RANK$RANK$RANK; \
                  echo $RANK$RANK$RANK$RANK-$i; echo e$RANK$RANK-$i >&2; i=$((i+1)); done";
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut command = job(8, &[], script);
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut out = String::new();
    reader.read_to_string(&mut out).unwrap();
    assert!(child.wait().unwrap().success());
    let mut next = [[0; 2]; 8];
    for line in out.lines() {
        let rank: usize = line[1..2].parse().unwrap();
        let stream = usize::from(line[4..].starts_with('e'));
        let i = next[rank][stream];
        next[rank][stream] += 1;
        let expected = match stream {
            0 => format!("[{rank}] a{r}-{r}-{i}", r = rank.to_string().repeat(4)),
            _ => format!("[{rank}] e{rank}{rank}-{i}"),
        };
        assert_eq!(line, expected);
    }
    assert_eq!(next, [[300; 2]; 8]);
}

#[test]
fn a_long_output_reaches_a_slow_reader_whole() {
    let script = "head -c 3000000 /dev/zero | tr '\\0' x | fold -w 100";
    let mut child = job(2, &[], script).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    sleep(Duration::from_millis(300));
    let mut bytes = Vec::new();
    out.read_to_end(&mut bytes).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(bytes.iter().filter(|&&byte| byte == b'x').count(), 2 * 3_000_000);
    assert!(text(&bytes).lines().all(|line| line.len() == 104));
}

#[test]
fn ranks_that_write_to_a_closed_pipe_get_sigpipe() {
    let mut child = job(2, &["--grace", "0.2"], "while :; do echo x; done").spawn().unwrap();
    drop(child.stdout.take());
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 13), "{err}");
}

#[test]
fn signals_are_passed_on_to_every_rank() {
    for (number, name) in [
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
    ] {
        let script = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.02; done"
        );
        let mut child = job(3, &[], &script).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        read_until(&mut out, "ready", 3);
        signal(&child, number);
        read_until(&mut out, &format!("got {name}"), 3);
        assert!(child.wait().unwrap().success(), "{name}");
    }
}

#[test]
fn a_signal_that_ends_the_ranks_is_the_exit_code() {
    let mut child = job(3, &[], "echo ready; exec sleep 1000").spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    read_until(&mut out, "ready", 3);
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert!(!err.contains("last lines"), "{err}");
}

#[test]
fn a_job_under_nohup_survives_its_terminal() {
    let mut command = Command::new("nohup");
    command.args([env!("CARGO_BIN_EXE_symmem"), "run", "-n", "2", "--", "sh", "-c"]);
    command.arg("echo ready; sleep 0.3; echo survived");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    read_until(&mut out, "ready", 2);
    signal(&child, Signal::HUP);
    read_until(&mut out, "survived", 2);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let mark = mark("second");
    let script = format!("trap '' INT TERM; echo ready; while :; do sleep 0.1; done # {mark}");
    let mut child = job(2, &["--grace", "1000"], &script).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    read_until(&mut out, "ready", 2);
    signal(&child, Signal::INT);
    sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(137));
    until("all processes gone", || alive(&mark).is_empty());
}

#[test]
fn a_killed_launcher_leaves_no_process() {
    let mark = mark("orphans");
    // Each rank ignores what it can and has a child and a grandchild.
    let script = "trap '' TERM HUP INT; sh -c 'sleep 1000 & echo ready; wait' & wait";
    let mut child = job(4, &[], script).env("MARK", &mark).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    read_until(&mut out, "ready", 4);
    // The launcher, the guard, and three processes per rank.
    assert!(alive(&mark).len() >= 2 + 4 * 3, "{:?}", alive(&mark));
    child.kill().unwrap();
    child.wait().unwrap();
    until("all processes gone", || alive(&mark).is_empty());
}

#[test]
fn nothing_is_left_when_ranks_leave_children_behind() {
    let mark = mark("left");
    let mut command = job(3, &[], "sleep 1000 & echo done");
    let output = command.env("MARK", &mark).output().unwrap();
    assert!(output.status.success());
    assert_eq!(sorted_lines(&output.stdout), ["[0] done", "[1] done", "[2] done"]);
    until("all processes gone", || alive(&mark).is_empty());
}

#[test]
fn a_program_that_is_not_there_is_a_clear_error() {
    let mark = mark("notfound");
    let mut command = symmem(&["run", "-n", "4", "--", "/no/such/program"]);
    let output = command.env("MARK", &mark).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert_eq!(
        text(&output.stderr),
        "symmem: cannot start /no/such/program: No such file or directory (os error 2)\n"
    );
    assert_eq!(alive(&mark), [""; 0]);
}

#[test]
fn a_file_that_cannot_be_run_is_a_clear_error() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = symmem(&["run", "-n", "2", "--", file]).output().unwrap();
    assert_eq!(output.status.code(), Some(126));
    let error = format!("cannot start {file}: Permission denied");
    assert!(text(&output.stderr).contains(&error), "{}", text(&output.stderr));
}

#[test]
fn wrong_arguments_are_refused() {
    for (args, word) in [
        (&["run", "--", "true"][..], "--ranks"),
        (&["run", "-n", "0", "--", "true"], "0 is not in"),
        (&["run", "-n", "two", "--", "true"], "two"),
        (&["run", "-n", "2"], "PROGRAM"),
        (&["run", "-n", "2", "--grace=-1", "--", "true"], "grace"),
        (&["run", "-n", "2", "--on-failure", "pray", "--", "true"], "keep"),
        (&["run", "-n", "2", "--nnodes", "2", "--", "true"], "--master-addr"),
        (&["run", "-n", "2", "--nnodes", "2", "--master-addr", "x", "--", "true"], "--master-port"),
        (&["run", "-n", "2", "--node-rank", "1", "--", "true"], "node rank 1"),
    ] {
        let output = symmem(args).output().unwrap();
        let err = text(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}: {err}");
        assert!(err.contains(word), "{args:?}: {err}");
    }
}

#[test]
fn a_port_that_is_taken_is_a_clear_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = job(1, &["--master-port", &port], "true").output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains(&port) && err.contains("in use"), "{err}");
}

#[test]
fn sixty_four_ranks_run() {
    let output = run(64, "echo $RANK of $WORLD_SIZE");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: HashSet<_> = sorted_lines(&output.stdout).into_iter().collect();
    let expected: HashSet<_> = (0..64).map(|rank| format!("[{rank}] {rank} of 64")).collect();
    assert_eq!(lines, expected);
}

#[test]
fn more_ranks_than_descriptors_allowed_at_first() {
    let mut command = Command::new("sh");
    let script = "ulimit -Sn 64; exec \"$0\" run -n 64 -- sh -c 'ulimit -Sn'";
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_symmem")]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).lines().all(|line| line.ends_with(" 64")));
    assert_eq!(text(&output.stdout).lines().count(), 64);
}

#[test]
fn python_ranks_show_their_lines_at_once() {
    let works = Command::new("python3").arg("-c").arg("pass").output();
    if !works.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no python3");
        return;
    }
    let script = "import os, time; print('ready', os.environ['RANK']); time.sleep(1000)";
    let mut child = symmem(&["run", "-n", "2", "--", "python3", "-c", script]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    read_until(&mut out, "ready", 2);
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// A directory of this test alone.
fn scratch(test: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(mark(test));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}
