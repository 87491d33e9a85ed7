//! Ranks that fail, and what becomes of the others.

use std::time::{Duration, Instant};

use super::super::*;

#[test]
fn a_rank_that_exits_with_a_code_is_named_with_its_last_lines() {
    let script = "if [ $RANK = 2 ]; then i=0; while [ $i -lt 30 ]; do echo line $i; i=$((i+1)); done; \
                  printf 'the reason' >&2; exit 3; fi; exec sleep 1000";
    let output = run(4, script);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(err.contains("symmem: rank 2 failed with exit code 3\n"), "{err}");
    let quoted: Vec<_> = err.lines().filter(|line| line.starts_with("symmem:   | ")).collect();
    assert_eq!(quoted.len(), 10, "{err}");
    assert!(quoted.contains(&"symmem:   | the reason"), "{err}");
    assert!(quoted.contains(&"symmem:   | line 29"), "{err}");
    assert!(!err.contains("also failed"), "{err}");
}

#[test]
fn a_rank_that_is_killed_is_named_with_the_signal() {
    for (signal, code) in [("KILL", 137), ("SEGV", 139), ("ABRT", 134)] {
        let script = format!("[ $RANK = 1 ] && kill -{signal} $$; exec sleep 1000");
        let output = run(3, &script);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{err}");
        assert!(err.contains(&format!("rank 1 was killed by SIG{signal}")), "{err}");
    }
}

/// As those do that were waiting for the lost rank: Python takes a moment to print an exception.
#[test]
fn ranks_that_end_soon_after_a_failure_are_heard_out() {
    let dir = scratch("words");
    let script = "if [ $RANK = 0 ]; then : > $DIR/gone; kill -KILL $$; fi; \
                  while [ ! -e $DIR/gone ]; do sleep 0.01; done; sleep 0.1; echo rank 0 is gone; exit 3";
    let output = job(2, &[], script).env("DIR", &dir).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(137), "{err}");
    assert!(out.contains("rank 0 is gone"), "{out}{err}");
    assert!(!err.contains("ending"), "{err}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let mark = mark("stubborn");
    let script = format!(
        "if [ $RANK = 0 ]; then while [ ! -e $DIR/ready ]; do sleep 0.01; done; exit 9; fi; \
         trap '' TERM; : > $DIR/ready; while :; do sleep 0.1; done # {mark}"
    );
    let dir = scratch("stubborn");
    let begin = Instant::now();
    let output = job(2, &["--grace", "0.5"], &script).env("DIR", &dir).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(9), "{err}");
    assert!(err.contains("killing rank 1: no end 500ms after SIGTERM"), "{err}");
    assert!(begin.elapsed() >= Duration::from_millis(500));
    until("all processes gone", || alive(&mark).is_empty());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn ranks_that_fail_later_are_listed_in_one_line() {
    let dir = scratch("together");
    let script = "if [ $RANK = 1 ]; then \
                  while [ ! -e $DIR/0 ] || [ ! -e $DIR/2 ]; do sleep 0.01; done; exit 5; fi; \
                  trap '' TERM; : > $DIR/$RANK; sleep 0.3; [ $RANK = 2 ] && kill -SEGV $$; exit 6";
    let output = job(3, &[], script).env("DIR", &dir).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{err}");
    assert!(err.contains("symmem: rank 1 failed with exit code 5\n"), "{err}");
    let others = err.lines().find(|line| line.starts_with("symmem: also failed: ")).unwrap();
    assert!(others.contains("rank 0 (exit code 6)"), "{err}");
    assert!(others.contains("rank 2 (killed by SIGSEGV"), "{err}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn of_ranks_that_fail_together_one_is_named() {
    let output = run(3, "exit $((RANK + 1))");
    let (err, code) = (text(&output.stderr), output.status.code().unwrap());
    assert_eq!(err.matches("failed with").count(), 1, "{err}");
    assert!(err.contains(&format!("rank {} failed with exit code {code}", code - 1)), "{err}");
}
