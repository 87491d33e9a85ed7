//! Queues: jobs that run in the background, one after the other, on a group of their own.
//!
//! | file | contents |
//! |---|---|
//! | `mod.rs` | `Queue`, as users hold it |
//! | `pending.rs` | `Pending`: the result of a job, and the wait for it |
//! | `worker.rs` | the jobs in order, the thread that runs them, and how they are aborted |
//! | `scope.rs` | jobs that borrow from their caller |

mod pending;
mod scope;
mod worker;

use std::sync::Arc;
use std::thread::JoinHandle;

pub use pending::Pending;
pub use scope::Scope;

use crate::dtype::{Number, ReduceOp};
use crate::error::{Error, Result};
use crate::group::Group;
use worker::{Job, Shared};

/// Runs collectives in the background while the caller computes: see [`Group::queue`].
///
/// A queue has a group of the same ranks, with a sequence of calls of its own, and a thread that runs jobs on it in the order in
/// which they were submitted. All ranks submit jobs that make the same calls in the same order. Calls on the group itself are
/// independent of that.
///
/// ```
/// # symmem::World::threads(2, |world| -> symmem::Result<()> {
/// use symmem::ReduceOp;
///
/// let queue = world.queue()?;
/// let sum = queue.all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum);
/// let work: u64 = (0..1000).sum(); // meanwhile
/// assert_eq!((work, sum.wait()?[0]), (499_500, 2.0));
/// # Ok(())
/// # })?.into_iter().collect::<symmem::Result<()>>()?;
/// # Ok::<(), symmem::Error>(())
/// ```
///
/// # Errors
/// A job that fails may have left out calls that its peers make. A later job must not be taken for those, so what a failed job leaves
/// behind depends on its error:
///
/// | the job ended with | later jobs |
/// |---|---|
/// | [`Mismatch`](Error::Mismatch), [`PeerFailed`](Error::PeerFailed) of its last call on the queue's group | run: all ranks know of it, and are in step |
/// | [`PeerLost`](Error::PeerLost) | fail with the same at once |
/// | any other error, a panic or an abort | fail with [`OutOfStep`](Error::OutOfStep) at once on all ranks, until all have called [`resync`](Self::resync) |
///
/// # Dropping it
/// runs the jobs that were submitted, waits for them, and ends the thread. That takes no longer than the deadlines of these jobs, and
/// [`interruptible`](crate::interruptible) ends it. While the thread panics, the jobs are aborted.
/// A queue keeps its world: [`World::leave`](crate::World::leave) fails until it is dropped.
#[must_use = "dropping a queue ends it"]
pub struct Queue {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// A forked process has no thread to wait for.
    process: u32,
}

impl Group {
    /// A queue of jobs on this group's ranks. Called by all ranks of the group, in the same order where they make several. Waits for
    /// nobody once this group was used: the first job waits until all ranks have called this.
    ///
    /// Jobs have the group's time limit and order of reductions.
    pub fn queue(&self) -> Result<Queue> {
        let shared = Arc::new(Shared::new(self.duplicate("queue")?));
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("symmem-queue".into());
        let thread = thread.spawn(move || its.work()).map_err(Error::system("starting a queue"))?;
        Ok(Queue { shared, thread: Some(thread), process: std::process::id() })
    }
}

impl Queue {
    /// Has `job` run after the jobs submitted before it. It gets the queue's group; all that it makes of what it owns goes back
    /// through its result.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// # use symmem::ReduceOp;
    /// let queue = world.queue()?;
    /// let mut gradient = vec![world.rank() as f32; 100];
    /// let pending = queue.submit(move |group| {
    ///     group.all_reduce(&mut gradient, ReduceOp::Sum)?;
    ///     Ok(gradient)
    /// });
    /// assert_eq!(pending.wait()?[99], 1.0);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn submit<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Group) -> Result<R> + Send + 'static,
    ) -> Pending<R> {
        let (pending, work) = self.shared.prepare(job);
        self.shared.push(Job::new(work));
        pending
    }

    /// [`Group::all_reduce`] of `data`, which comes back as the result.
    pub fn all_reduce<T: Number>(&self, mut data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.submit(move |group| group.all_reduce(&mut data, op).map(|()| data))
    }

    /// [`Group::resync`], after the jobs submitted before it: brings the ranks back in step after a job has failed. All ranks call it.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// # use symmem::{ErrorKind, ReduceOp};
    /// let queue = world.queue()?;
    /// let failed = queue.submit(|group| match group.rank() {
    ///     0 => Err(symmem::Error::usage("load", "a file", "nothing")), // rank 0 does not make the call
    ///     _ => group.barrier(),
    /// });
    /// let error = failed.wait().unwrap_err();
    /// assert!([ErrorKind::Usage, ErrorKind::OutOfStep].contains(&error.kind()));
    /// queue.resync().wait()?;
    /// assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait()?, [2]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn resync(&self) -> Pending<()> {
        self.submit(Group::resync)
    }

    /// Ends all jobs that are not done, with [`Aborted`](Error::Aborted): those that have not begun at once, and the one that runs
    /// when it next waits in this library, within a tenth of a second. Does not wait for that. Jobs submitted afterwards fail with
    /// [`OutOfStep`](Error::OutOfStep), here and on all other ranks, until all have called [`resync`](Self::resync).
    ///
    /// Nothing happens if all jobs are done.
    pub fn abort(&self) {
        self.shared.abort();
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({:?}, {} jobs are not done)", self.shared.group, self.shared.unfinished())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if std::process::id() != self.process {
            return std::mem::forget(thread);
        }
        if std::thread::panicking() {
            self.shared.abort();
        }
        self.shared.close();
        // A job that drops its own queue does not wait for itself.
        if !self.shared.is_here() {
            self.shared.await_end();
            let _ = thread.join(); // it has only to drop what it holds
        }
    }
}
