//! Jobs that succeed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use symmem::{ErrorKind, Order, Pending, ReduceOp};

use super::{kind, ranks, soon};

#[test]
fn jobs_give_back_what_they_own() {
    ranks(3, |world| {
        let queue = world.queue().unwrap();
        let mut data = vec![world.rank() as u32; 100_000];
        let pending = queue.submit(move |group| {
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            Ok((data, group.rank()))
        });
        let (data, rank) = pending.wait().unwrap();
        assert_eq!(rank, world.rank());
        assert!(data.iter().all(|sum| *sum == 3));
        assert_eq!(queue.all_reduce(vec![2.0], ReduceOp::Product).wait().unwrap(), [8.0]);
    });
}

#[test]
fn jobs_run_one_at_a_time_in_the_order_in_which_they_were_submitted() {
    const JOBS: usize = 200;
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let (ran, at_once) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let submit = |n: usize| {
            let (ran, at_once) = (Arc::clone(&ran), Arc::clone(&at_once));
            queue.submit(move |group| {
                assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0);
                let mut sum = [n];
                group.all_reduce(&mut sum, ReduceOp::Sum)?;
                ran.lock().unwrap().push(n);
                at_once.fetch_sub(1, Ordering::SeqCst);
                Ok(sum[0])
            })
        };
        let pending: Vec<_> = (0..JOBS).map(submit).collect();
        for (n, job) in pending.into_iter().enumerate().rev() {
            assert_eq!(job.wait().unwrap(), 2 * n);
        }
        assert_eq!(*ran.lock().unwrap(), (0..JOBS).collect::<Vec<_>>());
    });
}

#[test]
fn calls_on_the_group_and_jobs_of_its_queue_are_independent() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        for round in 0..200_u64 {
            // Rank 0 calls first and submits then, rank 1 the other way round: one sequence would not allow that.
            let call = || {
                let mut data = [round; 10];
                world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [2 * round; 10]);
            };
            if world.rank() == 0 {
                call();
            }
            let pending = queue.all_reduce(vec![round + 1; 10], ReduceOp::Sum);
            if world.rank() == 1 {
                call();
            }
            assert_eq!(pending.wait().unwrap(), [2 * round + 2; 10]);
        }
    });
}

#[test]
fn queues_of_two_threads_do_not_wait_for_each_other() {
    ranks(2, |world| {
        // Both ranks make them in the same order, and use them in different ones.
        let queues = [world.queue().unwrap(), world.queue().unwrap()];
        std::thread::scope(|scope| {
            for nth in 0..2 {
                let queue = &queues[(nth + world.rank()) % 2];
                let base = 1000 * ((nth + world.rank()) % 2);
                scope.spawn(move || {
                    for n in 0..200 {
                        let sum = queue.all_reduce(vec![base + n; 100], ReduceOp::Sum);
                        assert_eq!(sum.wait().unwrap(), [2 * (base + n); 100]);
                    }
                });
            }
        });
    });
}

#[test]
fn a_queue_has_the_ranks_the_order_and_the_time_limit_of_its_group() {
    ranks(3, |world| {
        let limit = std::time::Duration::from_secs(33);
        let builder = world.subgroup_builder(&[0, 1, 2]).order(Order::Any).timeout(limit);
        let any = builder.build().unwrap();
        let reversed = any.split(Some(0), -(any.rank() as i64)).unwrap().unwrap();
        for group in [&any, &reversed] {
            let queue = group.queue().unwrap();
            let seen = queue.submit(|group| {
                let limit = group.deadline().remaining();
                Ok((group.world_ranks().to_vec(), group.rank(), group.order(), limit))
            });
            let expected = (group.world_ranks().to_vec(), group.rank(), Order::Any, Some(limit));
            assert_eq!(seen.wait().unwrap(), expected);
        }
    });
}

#[test]
fn symmetric_memory_of_the_queues_group_can_be_used_in_jobs() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let buffer = world.alloc::<u32>(1000).unwrap();
        let pending = queue.submit(move |group| Ok(buffer.rendezvous(group)?));
        let mut x = pending.wait().unwrap();
        x.local_mut().fill(5);
        let sum = queue.submit(move |_| x.all_reduce(ReduceOp::Sum).map(|()| x));
        assert_eq!(sum.wait().unwrap().local(), [10; 1000]);
    });
}

#[test]
fn a_job_may_submit_others_and_must_not_wait_for_them() {
    ranks(2, |world| {
        let queue = Arc::new(world.queue().unwrap());
        let inner = Arc::clone(&queue);
        let outer = queue.submit(move |_| {
            let later = inner.all_reduce(vec![1], ReduceOp::Sum);
            let error = later.done_by(super::SOON).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            let scoped = inner.scope(|scope| scope.submit(|group| group.barrier()).wait());
            assert_eq!(kind(scoped), ErrorKind::Usage);
            drop(inner);
            Ok(later)
        });
        let later = soon(|| outer.wait().unwrap());
        assert_eq!(later.wait().unwrap(), [2]);
    });
}

#[test]
fn queues_whose_jobs_wait_for_each_other_end() {
    ranks(1, |world| {
        for way in ["a wait", "a scope", "a drop"] {
            let (one, other) = (world.queue().unwrap(), world.queue().unwrap());
            let (give, get) = channel::<Pending<()>>();
            let waits = other.submit(move |_| get.recv().unwrap().wait());
            let first = one.submit(move |_| {
                let other = other;
                match way {
                    "a wait" => waits.wait(),
                    "a scope" => other.scope(|scope| scope.submit(|_| Ok(())).wait()),
                    _ => Ok(()),
                }
            });
            give.send(one.submit(|_| Ok(()))).unwrap();
            let result = soon(|| first.wait());
            assert!(way != "a wait" || kind(result) == ErrorKind::Usage);
            soon(|| drop(one));
        }
    });
}

#[test]
fn a_job_is_done_when_it_is_done() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let (go, wait) = channel();
        let pending = queue.submit(move |_| Ok(wait.recv().unwrap()));
        assert!(!pending.is_done());
        assert_eq!(format!("{pending:?}"), "Pending(not done)");
        go.send(7).unwrap();
        pending.done_by(super::SOON).unwrap();
        assert!(pending.is_done());
        assert_eq!(pending.take().unwrap().unwrap(), 7);
        assert!(pending.take().is_none() && pending.is_done());
        assert_eq!(kind(pending.wait()), ErrorKind::Usage);
    });
}
