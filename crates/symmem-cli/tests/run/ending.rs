//! A launcher that is told to end does so in bounded time, whatever its ranks and its reader do.

use super::super::*;

const ENDING: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

/// The state of a process: `R`, `S`, `T` …
fn state(pid: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Waits until `count` of the processes with `mark` are stopped.
fn until_stopped(mark: &str, count: usize) {
    let stopped = |pid: &&String| state(pid) == Some('T');
    until("stopped", || alive(mark).iter().filter(stopped).count() >= count);
}

#[test]
fn a_stopped_rank_ends_with_the_launcher() {
    for signal in ENDING {
        let mark = mark("stopped");
        let script = "echo ready; [ $RANK = 1 ] && kill -STOP $$; exec sleep 1000";
        let mut command = job(3, &["--grace", "1000"], script);
        command.env("MARK", &mark);
        let (mut launched, _out) = Launched::ready(command, 3);
        until_stopped(&mark, 1);
        launched.send(signal);
        let (code, err) = launched.end();
        assert_eq!(code, Some(128 + signal.as_raw()), "{err}");
        until("all processes gone", || alive(&mark).is_empty());
    }
}

#[test]
fn a_stopped_rank_is_ended_when_another_fails() {
    let dir = scratch("stopped-survivor");
    let script = "if [ $RANK = 0 ]; then : > $DIR/stopped; kill -STOP $$; exit 0; fi; \
                  while [ ! -e $DIR/stopped ]; do sleep 0.01; done; exit 3";
    let mut command = job(2, &["--grace", "1000"], script);
    command.env("DIR", &dir);
    let mut launched = Launched::start(command);
    let (code, err) = launched.end();
    assert_eq!(code, Some(3), "{err}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn ranks_that_ignore_every_signal_are_killed_after_the_grace_period() {
    for signal in ENDING {
        let mark = mark("deaf");
        let script =
            "trap '' INT TERM HUP QUIT USR1 PIPE; echo ready; while :; do sleep 0.05; done";
        let mut command = job(2, &["--grace", "0.3"], script);
        command.env("MARK", &mark);
        let (mut launched, _out) = Launched::ready(command, 2);
        launched.send(signal);
        let (code, err) = launched.end();
        assert_eq!(code, Some(137), "{err}");
        assert!(err.contains("killing ranks 0, 1: no end 300ms after SIG"), "{err}");
        until("all processes gone", || alive(&mark).is_empty());
    }
}

#[test]
fn ranks_that_stop_themselves_when_told_to_end_are_killed() {
    let script = "trap 'kill -STOP $$' INT TERM; echo ready; while :; do sleep 0.05; done";
    let (mut launched, _out) = Launched::ready(job(2, &["--grace", "0.3"], script), 2);
    launched.send(Signal::TERM);
    let (code, err) = launched.end();
    assert_eq!(code, Some(137), "{err}");
}

#[test]
fn a_second_request_kills_ranks_that_are_stopped_and_deaf() {
    for signal in [Signal::INT, Signal::TERM] {
        let mark = mark("stopped-deaf");
        let script = "trap '' INT TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done";
        let mut command = job(2, &["--grace", "1000"], script);
        command.env("MARK", &mark);
        let (mut launched, _out) = Launched::ready(command, 2);
        until_stopped(&mark, 2);
        launched.send(signal);
        sleep(Duration::from_millis(300));
        assert!(launched.0.try_wait().unwrap().is_none());
        launched.send(signal);
        let (code, err) = launched.end();
        assert_eq!(code, Some(137), "{err}");
        until("all processes gone", || alive(&mark).is_empty());
    }
}

/// As `timeout` does: it signals its child, and then the process group in which the child is.
#[test]
fn one_request_that_comes_twice_leaves_the_ranks_time_to_end() {
    let script =
        "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let (mut launched, mut out) = Launched::ready(job(2, &[], script), 2);
    launched.send(Signal::TERM);
    sleep(Duration::from_millis(10));
    launched.send(Signal::TERM);
    read_until(&mut out, "saved", 2);
    assert_eq!(launched.end().0, Some(0));
}

#[test]
fn a_rank_that_saves_its_work_has_the_whole_grace_period() {
    let script = "[ $RANK = 0 ] && { echo ready; exec sleep 1000; }; \
                  trap 'sleep 2; echo saved; exit 0' INT; echo ready; while :; do sleep 0.02; done";
    let (mut launched, mut out) = Launched::ready(job(2, &["--grace", "1000"], script), 2);
    launched.send(Signal::INT);
    read_until(&mut out, "saved", 1);
    assert_eq!(launched.end().0, Some(130));
}

#[test]
fn a_reader_that_takes_nothing_holds_nobody_for_a_long_grace_period() {
    let script = "echo ready; while :; do echo 0123456789; done";
    let (mut launched, _out) = Launched::ready(job(2, &["--grace", "1000"], script), 2);
    sleep(Duration::from_millis(300));
    launched.send(Signal::TERM);
    let (code, err) = launched.end();
    assert_eq!(code, Some(143), "{err}");
}

/// A terminal says that it takes bytes when there is room for one, and then blocks who writes more.
#[test]
fn a_terminal_that_takes_nothing_does_not_hold_the_launcher() {
    let script = "\
import os, pty, signal, subprocess, sys, time
ours, theirs = pty.openpty()
work = 'trap \"\" TERM; while :; do echo 0123456789; done'
args = [sys.argv[1], 'run', '-n', '2', '--grace', '0.3', '--', 'sh', '-c', work]
child = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
os.read(ours, 1)
time.sleep(1)
child.send_signal(signal.SIGTERM)
try:
    print('ended', child.wait(40))
except subprocess.TimeoutExpired:
    child.kill()
    print('hangs')
";
    let mut python = Command::new("python3");
    python.args(["-c", script, env!("CARGO_BIN_EXE_symmem")]);
    match python.output() {
        Ok(output) if output.status.success() => assert_eq!(text(&output.stdout), "ended 137\n"),
        other => eprintln!("skipped: no python3 or no terminals: {other:?}"),
    }
}

#[test]
fn a_launcher_whose_worker_is_stopped_ends() {
    let mark = mark("worker");
    let mut command = job(2, &[], "echo ready; exec sleep 1000");
    command.env("MARK", &mark);
    let (mut launched, _out) = Launched::ready(command, 2);
    let stop = |pid: &u32| kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::STOP).unwrap();
    children(launched.0.id()).iter().for_each(stop);
    launched.send(Signal::TERM);
    let (code, err) = launched.end();
    assert_eq!(code, Some(143), "{err}");
    until("all processes gone", || alive(&mark).is_empty());
}

/// Ctrl-Z and `fg`: the ranks' output stops and goes on.
#[test]
fn a_launcher_that_is_suspended_goes_on_when_it_is_continued() {
    let script = "echo ready; while :; do echo tick; sleep 0.02; done";
    let (mut launched, mut out) = Launched::ready(job(1, &[], script), 1);
    let worker = children(launched.0.id());
    launched.send(Signal::TSTP);
    let is_stopped = |pid: u32| state(&pid.to_string()) == Some('T');
    until("stopped", || is_stopped(launched.0.id()) && worker.iter().all(|&pid| is_stopped(pid)));
    launched.send(Signal::CONT);
    read_until(&mut out, "tick", 50);
    launched.send(Signal::TERM);
    assert_eq!(launched.end().0, Some(143));
}

#[test]
fn a_rank_that_has_joined_another_process_group_is_told_to_end() {
    let perl = "$| = 1; my $c = fork; if (!$c) { setpgrp(0, 0); sleep 1000; exit } \
                until (setpgrp(0, $c) and getpgrp(0) == $c) { } print qq(ready\\n); sleep 1000";
    let mark = mark("joined");
    let mut command = symmem(&["run", "-n", "2", "--grace", "1000", "--", "perl", "-e", perl]);
    command.env("MARK", &mark);
    if !Command::new("perl").args(["-e", "1"]).output().is_ok_and(|perl| perl.status.success()) {
        eprintln!("skipped: no perl");
        return;
    }
    let (mut launched, _out) = Launched::ready(command, 2);
    launched.send(Signal::TERM);
    let (code, err) = launched.end();
    assert_eq!(code, Some(143), "{err}");
    until("all processes gone", || alive(&mark).is_empty());
}

/// Messages about ranks never block the launcher, but an error that ends it is written like that of any program.
#[test]
fn a_launcher_that_cannot_even_say_why_it_fails_ends_when_told_twice() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while std::io::Write::write(&mut writer, &[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut command = symmem(&["run", "-n", "1", "--grace", "1000", "--", "/no/such/program"]);
    command.stderr(writer);
    let mut launched = Launched::start(command);
    sleep(Duration::from_millis(500));
    assert!(launched.0.try_wait().unwrap().is_none());
    launched.send(Signal::TERM);
    sleep(Duration::from_millis(300));
    launched.send(Signal::TERM);
    until("the launcher ended", || launched.0.try_wait().unwrap().is_some());
    assert_eq!(launched.0.wait().unwrap().code(), Some(137));
    drop(reader);
}
