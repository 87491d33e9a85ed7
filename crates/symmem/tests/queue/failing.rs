//! Jobs that fail, and what happens to later ones.

use std::sync::atomic::{AtomicBool, Ordering};

use symmem::{Error, ErrorKind, Group, ReduceOp, interruptible};

use super::{SHORT, SOON, a_job_that_runs, impatient, kind, out_of_step, ranks, soon};

#[test]
fn jobs_in_different_orders_mismatch_on_all_ranks_and_leave_them_in_step() {
    ranks(3, |world| {
        let queue = world.queue().unwrap();
        let reduce = || queue.submit(|group| group.all_reduce(&mut [1_u32], ReduceOp::Sum));
        let copy = || queue.submit(|group| group.broadcast(&mut [1_u32], 0));
        let pending = match world.rank() {
            1 => [copy(), reduce()],
            _ => [reduce(), copy()],
        };
        for job in pending {
            match job.wait() {
                Err(Error::Mismatch { what: "operation", rank, .. }) => {
                    assert_eq!(rank == 1, world.rank() != 1);
                }
                other => panic!("expected a mismatch, got {other:?}"),
            }
        }
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [3]);
    });
}

#[test]
fn after_a_timeout_all_ranks_are_out_of_step_until_resync() {
    ranks(2, |world| {
        let queue = impatient(world, world.rank() == 0);
        if world.rank() == 0 {
            let late = queue.submit(|group| group.barrier());
            let later = queue.all_reduce(vec![1], ReduceOp::Sum);
            match late.wait() {
                Err(Error::Timeout { op: "barrier", waiting_for, .. }) => {
                    assert_eq!(waiting_for, [1])
                }
                other => panic!("expected a timeout, got {other:?}"),
            }
            // A barrier could be resumed, but its job is over.
            let (rank, what) = out_of_step(soon(|| later.wait()));
            assert_eq!((rank, what.as_str()), (0, "has a queued job that failed or was aborted"));
        }
        world.barrier().unwrap();
        assert_eq!(out_of_step(soon(|| queue.submit(|group| group.barrier()).wait())).0, 0);
        queue.resync().done_by(SOON).unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}

/// Rank 0 leaves out a call that rank 1 makes. Its next one is equal, and must not be taken for that.
#[test]
fn a_job_that_leaves_out_its_call_does_not_shift_later_ones() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let rank = world.rank();
        for round in 0..20_u64 {
            let submit = |job: u64| {
                queue.submit(move |group| {
                    if (rank, job) == (0, 1) {
                        return Err(Error::usage("load", "a batch", "nothing"));
                    }
                    let mut data = [100 * round + job];
                    group.all_reduce(&mut data, ReduceOp::Sum)?;
                    Ok(data[0])
                })
            };
            let pending: Vec<_> = (0..4).map(submit).collect();
            for (job, pending) in pending.into_iter().enumerate() {
                match (job as u64, pending.wait()) {
                    (0, Ok(sum)) => assert_eq!(sum, 200 * round),
                    // It may be told of the failure before it has left the call.
                    (0, Err(e)) => assert_eq!((e.kind(), rank), (ErrorKind::OutOfStep, 1)),
                    (1, result) if rank == 0 => assert_eq!(kind(result), ErrorKind::Usage),
                    (_, result) => assert_eq!(out_of_step(result).0, 0),
                }
            }
            queue.resync().wait().unwrap();
        }
    });
}

/// The later jobs of the ranks that fail must not be taken for the calls that they have left out.
#[test]
fn a_mismatch_that_not_all_ranks_have_puts_them_out_of_step() {
    ranks(3, |world| {
        let rank = world.rank();
        let message = move |group: &Group| match rank {
            0 => group.recv(&mut [0_u32], 1, 5),
            1 => group.send(&[1_u32, 2], 0, 5),
            _ => Ok(()),
        };
        let pair = (rank < 2).then(|| world.subgroup(&[0, 1]).unwrap());
        let other_group = move |_: &Group| {
            let data = &mut vec![1_u32; 1 + rank];
            pair.as_ref().map_or(Ok(()), |pair| pair.all_reduce(data, ReduceOp::Sum))
        };
        type Before = Box<dyn Fn(&Group) -> symmem::Result<()> + Send>;
        let before: [(Before, bool); 2] =
            [(Box::new(message), rank == 0), (Box::new(other_group), rank < 2)];
        for (before, differs) in before {
            let queue = world.queue().unwrap();
            let first = queue.submit(move |group| {
                before(group)?;
                group.all_reduce(&mut [100], ReduceOp::Sum)
            });
            let second = queue.all_reduce(vec![1], ReduceOp::Sum);
            match first.wait() {
                Err(Error::Mismatch { .. }) => assert!(differs),
                other => drop((assert!(!differs), out_of_step(other))),
            }
            assert!(out_of_step(second.wait()).0 < 2);
            queue.resync().wait().unwrap();
            assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [3]);
        }
    });
}

#[test]
fn a_rendezvous_that_differs_leaves_all_ranks_in_step() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let len = 10 + world.rank();
        let differs = queue.submit(move |group| Ok(group.alloc::<u8>(len)?.rendezvous(group)?));
        let next = queue.all_reduce(vec![1], ReduceOp::Sum);
        assert_eq!(kind(differs.wait()), ErrorKind::Mismatch);
        assert_eq!(next.wait().unwrap(), [2]);
    });
}

#[test]
fn a_panic_is_an_error_of_its_waiter_and_known_to_all_ranks() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let rank = world.rank();
        let job = queue.submit(move |group| match rank {
            0 => panic!("by {}", "design"),
            _ => group.barrier(),
        });
        match soon(|| job.wait()) {
            Err(Error::Panicked { rank: 0, what, .. }) if rank == 0 => {
                assert_eq!(what, "by design")
            }
            result => assert_eq!(out_of_step(result).0, 0),
        }
        assert_eq!(out_of_step(queue.submit(|group| group.barrier()).wait()).0, 0);
        queue.resync().wait().unwrap();
        queue.submit(|group| group.barrier()).wait().unwrap();
    });
}

/// A value whose drop panics, as what a job owns and as its result that nobody takes.
#[test]
fn a_panic_in_a_drop_does_not_end_the_queue() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("by design");
        }
    }
    ranks(1, |world| {
        let queue = world.queue().unwrap();
        let (go, runs) = a_job_that_runs(&queue);
        drop(queue.submit(|_| Ok(Bomb)));
        go.send(()).unwrap();
        runs.wait().unwrap();
        queue.submit(|_| Ok(())).wait().unwrap();
        let (go, runs) = a_job_that_runs(&queue);
        let bomb = Bomb;
        let aborted = queue.submit(move |_| {
            std::mem::forget(bomb);
            Ok(())
        });
        queue.abort();
        assert_eq!(kind(aborted.wait()), ErrorKind::Panicked);
        go.send(()).unwrap();
        runs.wait().unwrap();
        queue.resync().wait().unwrap();
    });
}

#[test]
fn a_wait_that_ends_early_leaves_its_job_as_it_is() {
    static STOP: AtomicBool = AtomicBool::new(false);
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            STOP.store(true, Ordering::Relaxed);
            let pending = queue.all_reduce(vec![1], ReduceOp::Sum);
            // Once the job waits, a timeout says for whom.
            let doing = soon(|| {
                loop {
                    match pending.done_by(SHORT) {
                        Err(Error::Timeout { op: "wait", waiting_for, doing, .. }) => {
                            assert_eq!(waiting_for, [0]);
                            if doing[0].contains("all_reduce") {
                                break doing;
                            }
                        }
                        other => panic!("expected a timeout, got {other:?}"),
                    }
                }
            });
            assert!(doing[0].contains("all_reduce of group \"queue of"), "{doing:?}");
            assert!(doing[0].contains("waiting for rank 1"), "{doing:?}");
            let waiting = interruptible(|| STOP.load(Ordering::Relaxed), || pending.done_by(SOON));
            assert_eq!(kind(waiting), ErrorKind::Interrupted);
            world.barrier().unwrap();
            assert_eq!(pending.wait().unwrap(), [2]);
        } else {
            world.barrier().unwrap();
            assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
        }
    });
}

#[test]
fn a_rank_that_fails_before_it_was_first_needed_is_named() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let failed = queue.submit(|_| Err::<(), _>(Error::usage("load", "a file", "nothing")));
            assert_eq!(kind(failed.wait()), ErrorKind::Usage);
        } else {
            let told = soon(|| queue.all_reduce(vec![1], ReduceOp::Sum).wait());
            assert_eq!(out_of_step(told).0, 0);
        }
        world.barrier().unwrap();
        queue.resync().wait().unwrap();
    });
}
