//! Queues: jobs in the background, their order, and what happens to them when something fails.
//!
//! The ranks are threads; where one of them dies, or is on another host, they are processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests, and what they share")]

mod queue {
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use symmem::{Error, ErrorKind, Pending, Queue, World};

    mod aborting;
    mod failing;
    mod lives;
    mod processes;
    mod scopes;
    mod working;

    /// Far above what anything takes on a busy machine, far below the deadline.
    const SOON: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(100);

    /// Runs a rank in each of `n` threads, on both backends that threads may have.
    fn ranks(n: usize, body: impl Fn(&World) + Sync) {
        for backend in ["process", "host"] {
            let builder = World::builder().backend(backend).timeout(Duration::from_secs(60));
            builder.threads(n, |world| body(&world)).unwrap();
        }
    }

    /// A queue whose jobs give up soon, and one of the default time limit otherwise.
    fn impatient(world: &World, is_impatient: bool) -> Queue {
        if is_impatient {
            world.set_timeout(SHORT);
        }
        let queue = world.queue().unwrap();
        world.set_timeout(Duration::from_secs(60));
        queue
    }

    /// A job that has begun and does not wait for other ranks, until it is sent something.
    fn a_job_that_runs(queue: &Queue) -> (Sender<()>, Pending<()>) {
        let (go, wait) = channel();
        let (begins, begun) = channel();
        let job = queue.submit(move |_| {
            begins.send(()).unwrap();
            wait.recv().unwrap();
            Ok(())
        });
        begun.recv().unwrap();
        (go, job)
    }

    fn kind<R: std::fmt::Debug>(result: symmem::Result<R>) -> ErrorKind {
        result.unwrap_err().kind()
    }

    /// The rank that has put the group out of step.
    fn out_of_step<R: std::fmt::Debug>(result: symmem::Result<R>) -> (usize, String) {
        match result.unwrap_err() {
            Error::OutOfStep { rank, what, .. } => (rank, what),
            other => panic!("expected a group out of step, got {other}"),
        }
    }

    /// What a call gives that must not wait for a deadline.
    fn soon<R>(call: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = call();
        assert!(begin.elapsed() < SOON, "it took {:?}", begin.elapsed());
        result
    }
}
