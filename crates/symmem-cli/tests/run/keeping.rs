//! `--on-failure keep`: the survivors of a lost rank decide for themselves.

use super::super::*;

const KEEP: [&str; 2] = ["--on-failure", "keep"];

#[test]
fn survivors_that_finish_make_the_job_a_success() {
    for (how, told) in [
        ("kill -KILL $$", "rank 1 was killed by SIGKILL"),
        ("exit 3", "rank 1 failed with exit code 3"),
    ] {
        // Longer than the second after which `kill` ends them.
        let script =
            format!("[ $RANK = 1 ] && {how}; trap 'exit 9' TERM; sleep 2; echo finished $RANK");
        let output = job(3, &KEEP, &script).output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{err}");
        assert_eq!(sorted_lines(&output.stdout), ["[0] finished 0", "[2] finished 2"], "{out}");
        assert!(err.contains(told), "{err}");
        assert!(err.contains("symmem: rank 1 was lost; ranks 0, 2 finished\n"), "{err}");
        assert!(!err.contains("ending"), "{err}");
    }
}

#[test]
fn the_code_is_that_of_the_first_survivor_that_fails() {
    let script = "case $RANK in 0) kill -KILL $$;; 1) sleep 0.6; exit 5;; 2) sleep 0.2; exit 4;; esac; \
                  sleep 1; exit 0";
    let output = job(4, &KEEP, script).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("rank 0 was killed by SIGKILL"), "{err}");
    assert!(err.contains("rank 2 failed with exit code 4"), "{err}");
    assert!(err.contains("rank 1 failed with exit code 5"), "{err}");
}

#[test]
fn several_ranks_may_be_lost() {
    let script = "case $RANK in 0) kill -KILL $$;; 2) sleep 0.3; kill -SEGV $$;; esac; sleep 1";
    let output = job(4, &KEEP, script).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("symmem: ranks 0, 2 were lost; ranks 1, 3 finished\n"), "{err}");
}

#[test]
fn a_job_whose_ranks_are_all_lost_has_failed() {
    let output = job(3, &KEEP, "kill -KILL $$").output().unwrap();
    assert_eq!(output.status.code(), Some(137), "{}", text(&output.stderr));
    let output = job(1, &KEEP, "exit 3").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
}

#[test]
fn survivors_end_when_the_launcher_is_told_to() {
    let script = "echo ready; [ $RANK = 0 ] && kill -KILL $$; exec sleep 1000";
    let (mut launched, _out) = Launched::ready(job(3, &KEEP, script), 3);
    // The survivors have been left alone for longer than `kill` would leave them.
    sleep(Duration::from_millis(1500));
    assert!(launched.0.try_wait().unwrap().is_none());
    launched.send(Signal::TERM);
    let (code, err) = launched.end();
    assert_eq!(code, Some(143), "{err}");
}

#[test]
fn kill_is_the_default_and_can_be_asked_for() {
    for options in [&[][..], &["--on-failure", "kill"], &["--on-failure=kill"]] {
        let output = job(2, options, "[ $RANK = 0 ] && exit 3; exec sleep 1000").output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{err}");
        assert!(err.contains("ending rank 1"), "{err}");
    }
}
