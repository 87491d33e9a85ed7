//! No process outlives the launcher, however far it has gone from its rank and however the launcher ends.

use super::super::*;

/// Starts, from a rank, processes that have left its process group and its session, the second as an orphan, and waits
/// until both run. They close what they inherited, ignore what can be ignored, and one is stopped.
const FUGITIVES: &str = "\
    setsid sh -c 'trap \"\" HUP INT TERM; : > $DIR/$RANK-a; while :; do sleep 0.1; done' >/dev/null 2>&1 & \
    setsid sh -c 'setsid sh -c \": > $DIR/$RANK-b; kill -STOP \\$\\$\" &' >/dev/null 2>&1 & \
    while [ ! -e $DIR/$RANK-a ] || [ ! -e $DIR/$RANK-b ]; do sleep 0.01; done; ";

/// A job of two ranks that start fugitives and go on as `then` says.
fn fugitives(test: &str, options: &[&str], then: &str) -> (Command, String, std::path::PathBuf) {
    let (mark, dir) = (mark(test), scratch(test));
    let mut command = job(2, options, &format!("{FUGITIVES}{then}"));
    command.env("MARK", &mark).env("DIR", &dir);
    (command, mark, dir)
}

#[test]
fn processes_in_sessions_of_their_own_end_with_the_job() {
    for (then, code) in [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)] {
        let (command, mark, dir) = fugitives("sessions", &[], then);
        let (ended, err) = Launched::start(command).end();
        assert_eq!(ended, Some(code), "{err}");
        assert_eq!(alive(&mark), [""; 0], "{then}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn processes_in_sessions_of_their_own_end_when_the_launcher_is_told_to() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let (command, mark, dir) = fugitives("told", &[], "echo ready; exec sleep 1000");
        let (mut launched, _out) = Launched::ready(command, 2);
        launched.send(signal);
        let (code, err) = launched.end();
        assert_eq!(code, Some(128 + signal.as_raw()), "{err}");
        assert_eq!(alive(&mark), [""; 0]);
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn processes_in_sessions_of_their_own_end_when_the_launcher_is_killed() {
    let (command, mark, dir) = fugitives("killed", &[], "echo ready; exec sleep 1000");
    let (mut launched, _out) = Launched::ready(command, 2);
    launched.send(Signal::KILL);
    launched.0.wait().unwrap();
    until("all processes gone", || alive(&mark).is_empty());
    std::fs::remove_dir_all(dir).unwrap();
}

/// The launcher is two processes, and each ends the job when the other is killed.
#[test]
fn processes_in_sessions_of_their_own_end_when_the_launchers_worker_is_killed() {
    let (command, mark, dir) = fugitives("worker-killed", &[], "echo ready; exec sleep 1000");
    let (mut launched, _out) = Launched::ready(command, 2);
    for pid in children(launched.0.id()) {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    }
    let (code, err) = launched.end();
    assert_eq!(code, Some(137), "{err}");
    assert_eq!(alive(&mark), [""; 0]);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn nothing_is_left_when_the_worker_is_stopped_and_the_launcher_killed() {
    let (command, mark, dir) = fugitives("both", &[], "echo ready; exec sleep 1000");
    let (mut launched, _out) = Launched::ready(command, 2);
    for pid in children(launched.0.id()) {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
    }
    launched.send(Signal::KILL);
    launched.0.wait().unwrap();
    until("all processes gone", || alive(&mark).is_empty());
    std::fs::remove_dir_all(dir).unwrap();
}

/// Its number is another one before a signal to the old one can arrive. It gives up after a while if nobody else helps.
#[test]
fn a_process_that_forks_and_exits_all_the_time_is_caught() {
    let perl = Command::new("perl").args(["-MPOSIX", "-e", "1"]).output();
    if !perl.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no perl");
        return;
    }
    let mark = mark("runner");
    let script = "perl -MPOSIX -e 'open STDOUT, q(>/dev/null); open STDERR, q(>/dev/null); \
                  for (1..100000) { fork and POSIX::_exit(0); POSIX::setsid() }' & sleep 0.3";
    let mut command = job(1, &[], script);
    command.env("MARK", &mark);
    let (code, err) = Launched::start(command).end();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(alive(&mark), [""; 0]);
}

#[test]
fn orphans_that_end_during_the_job_are_reaped() {
    // The launcher is the rank's parent, and that of orphans.
    let script = "i=0; while [ $i -lt 30 ]; do sh -c 'sleep 0.05 &'; i=$((i+1)); done; sleep 0.5; \
                  echo children $(wc -w < /proc/$PPID/task/$PPID/children)";
    let output = run(1, script);
    assert_eq!(text(&output.stdout), "[0] children 1\n", "{}", text(&output.stderr));
}

/// The processes in it hold the pipe to the launcher open.
#[test]
fn a_fugitive_that_holds_the_output_open_does_not_hold_the_launcher() {
    let mark = mark("held");
    let mut command = job(2, &[], "setsid sleep 1000 & echo done");
    command.env("MARK", &mark);
    let mut launched = Launched::start(command);
    let (code, err) = launched.end();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(alive(&mark), [""; 0]);
}
