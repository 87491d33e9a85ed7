//! Beginnings and ends of queues.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use symmem::{ErrorKind, ReduceOp, World, interruptible};

use super::{impatient, kind, out_of_step, ranks, soon};

#[test]
fn a_dropped_queue_runs_its_jobs_first() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for n in 0..50 {
            let done = Arc::clone(&done);
            drop(queue.submit(move |group| {
                group.barrier()?;
                done.store(n, Ordering::Relaxed);
                Ok(())
            }));
        }
        drop(queue);
        assert_eq!(done.load(Ordering::Relaxed), 49);
    });
}

#[test]
fn a_queue_that_is_dropped_while_a_peer_never_comes_ends_at_one_deadline() {
    ranks(2, |world| {
        if world.rank() == 0 {
            let queue = impatient(world, true);
            let pending: Vec<_> =
                (0..1000).map(|_| queue.submit(|group| group.barrier())).collect();
            soon(|| drop(queue)); // a thousand deadlines would take longer
            let kinds: Vec<_> = pending.into_iter().map(|job| kind(job.wait())).collect();
            assert_eq!(kinds[0], ErrorKind::Timeout);
            assert!(kinds[1..].iter().all(|kind| *kind == ErrorKind::OutOfStep));
        } else {
            let queue = world.queue().unwrap();
            world.barrier().unwrap();
            assert_eq!(kind(queue.submit(|group| group.barrier()).wait()), ErrorKind::OutOfStep);
            return;
        }
        world.barrier().unwrap();
    });
}

#[test]
fn the_drop_of_a_queue_can_be_interrupted() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let pending = queue.submit(|group| group.barrier());
            soon(|| interruptible(|| true, || drop(queue)));
            assert_eq!(kind(pending.wait()), ErrorKind::Aborted);
        } else {
            world.barrier().unwrap();
            assert_eq!(out_of_step(queue.submit(|group| group.barrier()).wait()).0, 0);
            return;
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_panic_aborts_the_jobs_of_its_queue() {
    ranks(2, |world| {
        let queue = world.queue().unwrap();
        if world.rank() == 0 {
            let pending = queue.submit(|group| group.barrier());
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let _queue = queue;
                panic!("by design");
            }));
            soon(|| assert!(unwound.is_err()));
            assert_eq!(kind(pending.wait()), ErrorKind::Aborted);
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_job_may_drop_its_own_queue() {
    ranks(2, |world| {
        let own: Arc<Mutex<Option<symmem::Queue>>> = Arc::default();
        let queue = world.queue().unwrap();
        let its = Arc::clone(&own);
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let pending = queue.submit(move |group| {
            let _ = wait.recv();
            drop(its.lock().unwrap().take());
            group.barrier()
        });
        let behind = queue.all_reduce(vec![1], ReduceOp::Sum);
        *own.lock().unwrap() = Some(queue);
        go.send(()).unwrap();
        soon(|| pending.wait().unwrap());
        assert_eq!(behind.wait().unwrap(), [2]);
    });
}

#[test]
fn a_world_with_a_queue_cannot_be_left() {
    let left = World::threads(2, |world| {
        let queue = world.queue().unwrap();
        let pending = queue.all_reduce(vec![1], ReduceOp::Sum);
        let failed = world.leave().unwrap_err();
        assert_eq!(failed.error.kind(), ErrorKind::Usage);
        assert_eq!(queue.all_reduce(vec![2], ReduceOp::Sum).wait().unwrap(), [4]);
        drop(queue);
        failed.kept.leave().unwrap(); // a job that is done keeps nothing
        assert_eq!(pending.wait().unwrap(), [2]);
    });
    assert_eq!(left.unwrap().len(), 2);
}

#[test]
fn a_queue_outlives_its_group_and_its_world() {
    World::threads(2, |world| {
        let group = world.subgroup(&[0, 1]).unwrap();
        let queue = group.queue().unwrap();
        drop((group, world));
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    })
    .unwrap();
}

/// Its thread ends with it.
#[test]
fn many_queues_leave_nothing_behind() {
    ranks(2, |world| {
        for n in 0..100 {
            let queue = world.queue().unwrap();
            if n % 2 == 0 {
                assert_eq!(queue.all_reduce(vec![n], ReduceOp::Sum).wait().unwrap(), [2 * n]);
            }
        }
        world.barrier().unwrap();
    });
    let named = |id: std::fs::DirEntry| std::fs::read_to_string(id.path().join("comm")).ok();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(named);
    // Other tests of this process have some.
    assert!(threads.filter(|name| name.trim() == "symmem-queue").count() < 60);
}

#[test]
fn survivors_of_a_loss_make_a_new_queue() {
    ranks(3, |world| {
        let queue = world.queue().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [3]);
        if world.rank() == 2 {
            return;
        }
        // It has left. That is an error for who waits for it.
        let lost = queue.all_reduce(vec![1], ReduceOp::Sum);
        let later = queue.all_reduce(vec![1], ReduceOp::Sum);
        assert_eq!(kind(soon(|| lost.wait())), ErrorKind::PeerLost);
        assert_eq!(kind(soon(|| later.wait())), ErrorKind::PeerLost);
        let survivors = loop {
            match world.shrink() {
                Ok(group) if group.size() == 2 => break group,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let queue = survivors.queue().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}
