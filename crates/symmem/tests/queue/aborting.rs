//! `Queue::abort`.

use std::time::Duration;

use symmem::{Error, ErrorKind, ReduceOp};

use super::{a_job_that_runs, kind, out_of_step, ranks, soon};

#[test]
fn abort_ends_the_job_that_runs_and_those_behind_it() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let pending: Vec<_> =
                (0..5).map(|_| queue.all_reduce(vec![1], ReduceOp::Sum)).collect();
            std::thread::sleep(Duration::from_millis(30)); // the first one waits, most likely
            queue.abort();
            for job in pending {
                match soon(|| job.wait()) {
                    Err(Error::Aborted { rank: 0, what, .. }) => println!("{what}"),
                    other => panic!("expected an abort, got {other:?}"),
                }
            }
            let later = queue.all_reduce(vec![1], ReduceOp::Sum);
            world.barrier().unwrap();
            assert_eq!(out_of_step(soon(|| later.wait())).0, 0);
        } else {
            world.barrier().unwrap();
            // Nobody pairs with what rank 0 submits afterwards.
            let told = soon(|| queue.all_reduce(vec![1], ReduceOp::Sum).wait());
            assert_eq!(out_of_step(told).0, 0);
        }
        queue.resync().wait().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}

/// The job that runs succeeds in spite of the abort, because it does not wait. Those behind it are left out.
#[test]
fn jobs_that_were_left_out_are_not_paired_with_later_ones() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let (go, runs) = a_job_that_runs(&queue);
            let left_out = queue.all_reduce(vec![1], ReduceOp::Sum);
            queue.abort();
            let later = queue.all_reduce(vec![100], ReduceOp::Sum);
            assert_eq!(kind(left_out.wait()), ErrorKind::Aborted);
            go.send(()).unwrap();
            runs.wait().unwrap();
            assert_eq!(out_of_step(later.wait()).0, 0);
        } else {
            let told = soon(|| queue.all_reduce(vec![2], ReduceOp::Sum).wait());
            assert_eq!(out_of_step(told).0, 0);
        }
        queue.resync().wait().unwrap();
    });
}

#[test]
fn abort_of_an_idle_queue_does_nothing() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        queue.abort();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
        queue.abort();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}

#[test]
fn abort_and_submit_from_many_threads_lose_no_job() {
    ranks(1, |world| {
        let queue = &world.queue().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for _ in 0..200 {
                        match soon(|| queue.submit(|group| group.barrier()).wait()) {
                            Ok(()) | Err(Error::Aborted { .. } | Error::OutOfStep { .. }) => {}
                            Err(other) => panic!("{other}"),
                        }
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..100 {
                    queue.abort();
                    std::thread::yield_now();
                }
            });
        });
        queue.resync().wait().unwrap();
        queue.submit(|group| group.barrier()).wait().unwrap();
    });
}
