//! Jobs that borrow.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use symmem::{ErrorKind, ReduceOp, interruptible};

use super::{kind, ranks, soon};

#[test]
fn a_job_reduces_a_borrowed_slice_while_the_caller_writes_the_rest() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let mut data = vec![1_u64; 20_000];
        for round in 0..20 {
            let (left, right) = data.split_at_mut(10_000);
            left.fill(round);
            let result = queue.scope(|scope| {
                let pending = scope.submit(|group| group.all_reduce(left, ReduceOp::Sum));
                right.fill(round + 100);
                pending.wait()
            });
            result.unwrap();
            assert!(data[..10_000].iter().all(|sum| *sum == 2 * round));
            assert!(data[10_000..].iter().all(|own| *own == round + 100));
        }
    });
}

#[test]
fn a_scope_waits_for_jobs_that_nobody_has_waited_for() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let mut data = [[1_u32; 100]; 10];
        queue.scope(|scope| {
            for part in &mut data {
                drop(scope.submit(|group| {
                    std::thread::sleep(Duration::from_millis(2));
                    group.all_reduce(part, ReduceOp::Sum)
                }));
            }
        });
        assert_eq!(data, [[2; 100]; 10]);
    });
}

/// What it borrows is gone when the scope ends, and so must be every result that nobody took.
#[test]
fn results_that_borrow_are_dropped_before_the_scope_ends() {
    struct Counts<'a>(&'a AtomicUsize);
    impl Drop for Counts<'_> {
        fn drop(&mut self) {
            std::thread::sleep(Duration::from_millis(20));
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        for _ in 0..5 {
            let dropped = AtomicUsize::new(0);
            queue.scope(|scope| {
                let captured = Counts(&dropped);
                let counts = &dropped;
                drop(scope.submit(move |group| {
                    group.barrier()?;
                    let _captured = captured;
                    Ok(Counts(counts))
                }));
            });
            assert_eq!(dropped.into_inner(), 2);
        }
    });
}

#[test]
fn jobs_are_aborted_when_the_scope_panics() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let mut data = [0_u32; 10];
        if world.rank() == 0 {
            let scope = catch_unwind(AssertUnwindSafe(|| {
                queue.scope(|scope| {
                    drop(scope.submit(|group| group.all_reduce(&mut data, ReduceOp::Sum)));
                    panic!("by design");
                })
            }));
            soon(|| assert!(scope.is_err()));
        }
        world.barrier().unwrap(); // rank 1 submits nothing before the scope is over
        queue.resync().wait().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}

#[test]
fn the_end_of_a_scope_can_be_interrupted() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let mut data = [0_u32; 10];
            let waited = soon(|| {
                let scope = || {
                    queue.scope(|scope| {
                        let pending =
                            scope.submit(|group| group.all_reduce(&mut data, ReduceOp::Sum));
                        let interrupted = pending.done_by(super::SOON);
                        (pending, interrupted).1
                    })
                };
                interruptible(|| true, scope)
            });
            assert_eq!(kind(waited), ErrorKind::Interrupted);
        }
        world.barrier().unwrap();
        queue.resync().wait().unwrap();
    });
}

/// The callback that is asked whether to end a wait is the user's. It must not unwind while a job writes what it borrows.
#[test]
fn a_callback_that_panics_does_not_end_a_scope_early() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let done = AtomicUsize::new(0);
            let scope = || {
                queue.scope(|scope| {
                    drop(scope.submit(|_| {
                        std::thread::sleep(Duration::from_millis(500));
                        done.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    }));
                })
            };
            let ended =
                catch_unwind(AssertUnwindSafe(|| interruptible(|| panic!("by design"), scope)));
            assert!(ended.is_ok());
            assert_eq!(done.into_inner(), 1);
        }
        world.barrier().unwrap();
    });
}

#[test]
fn an_error_in_a_scope_reaches_its_waiter_and_the_data_is_the_callers_again() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let mut data = vec![7_u32; 10 + world.rank()];
        let result = queue
            .scope(|scope| scope.submit(|group| group.all_reduce(&mut data, ReduceOp::Sum)).wait());
        assert_eq!(kind(result), ErrorKind::Mismatch);
        assert!(data.iter().all(|value| *value == 7));
    });
}
