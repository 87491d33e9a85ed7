//! Jobs that borrow from their caller: they end before the scope does.
#![allow(unsafe_code)] // S7

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Queue;
use super::pending::Pending;
use super::worker::{Awaiting, Job, NAP, Shared, Work};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::sync::Deadline;

/// For jobs that borrow: see [`Queue::scope`].
pub struct Scope<'scope, 'env: 'scope> {
    shared: &'env Arc<Shared>,
    guests: Arc<Guests>,
    /// As in `std::thread::Scope`: the lifetimes must not shrink.
    _scope: PhantomData<&'scope mut &'scope ()>,
    _env: PhantomData<&'env mut &'env ()>,
}

impl Queue {
    /// Runs `f`, in which jobs can be submitted that borrow what outlives this call. Waits for these jobs at the end, also for those
    /// that nobody has waited for. If `f` panics, or that wait is [interrupted](crate::interruptible), the jobs are aborted.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// # use symmem::ReduceOp;
    /// let queue = world.queue()?;
    /// let mut gradients = vec![1.0_f32; 1000];
    /// let (last, first) = gradients.split_at_mut(500);
    /// queue.scope(|scope| {
    ///     let pending = scope.submit(|group| group.all_reduce(last, ReduceOp::Sum));
    ///     first.fill(3.0); // meanwhile; the borrow checker keeps it away from `last`
    ///     pending.wait()
    /// })?;
    /// assert_eq!((gradients[0], gradients[999]), (2.0, 3.0));
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    ///
    /// What a job borrows cannot be used before the scope ends:
    ///
    /// ```compile_fail,E0502
    /// # let world = symmem::World::from_env()?;
    /// let queue = world.queue()?;
    /// let mut data = vec![1.0_f32; 1000];
    /// queue.scope(|scope| {
    ///     let pending = scope.submit(|group| group.all_reduce(&mut data, symmem::ReduceOp::Sum));
    ///     println!("{}", data[0]); // the job may be writing it
    ///     pending.wait()
    /// })?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn scope<'env, T>(
        &'env self,
        f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T,
    ) -> T {
        let guests = Arc::new(Guests { is_refused: self.shared.is_here(), ..Guests::default() });
        let scope = Scope {
            shared: &self.shared,
            guests: Arc::clone(&guests),
            _scope: PhantomData,
            _env: PhantomData,
        };
        let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
        // One of the jobs may wait for this thread.
        let awaiting = (!guests.is_refused).then(|| Awaiting::begin(self.shared.id()));
        if result.is_err() || matches!(awaiting, Some(None)) {
            self.abort();
        }
        guests.await_none(|| self.abort());
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl<'scope> Scope<'scope, '_> {
    /// As [`Queue::submit`], of a job that may borrow.
    pub fn submit<R: Send + 'scope>(
        &'scope self,
        job: impl FnOnce(&Group) -> Result<R> + Send + 'scope,
    ) -> Pending<R> {
        let (pending, work) = self.shared.prepare(job);
        if self.guests.is_refused {
            let (expected, got) = ("a thread other than the queue's", "a job of the same queue");
            work(Err(Error::usage("scope", expected, got).at_rank(self.shared.group.rank())));
            return pending;
        }
        let guest = Guest::new(&self.guests);
        // SAFETY: S7: what it borrows outlives 'scope, which lasts until the guest is dropped, after the work.
        let work = unsafe { std::mem::transmute::<Work<'scope>, Work<'static>>(work) };
        self.shared.push(Job::borrowing(work, guest));
        pending
    }
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scope({} jobs are not done)", self.guests.lock())
    }
}

/// The jobs of a scope that are not done.
#[derive(Default)]
struct Guests {
    count: Mutex<usize>,
    none: Condvar,
    /// The scope is in a job of the queue, which would wait for itself.
    is_refused: bool,
}

impl Guests {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn await_none(&self, abort: impl Fn()) {
        // The callback of `interruptible` may panic, and nothing may be unwound before the jobs are done.
        let is_interrupted = || catch_unwind(|| Deadline::NEVER.expired()).unwrap_or(true);
        // Without the lock, which a callback could want as well.
        while *self.lock() > 0 {
            if is_interrupted() {
                abort();
            }
            let count = self.lock();
            if *count > 0 {
                drop(self.none.wait_timeout(count, NAP));
            }
        }
    }
}

/// A job of a scope, until it is dropped.
pub(super) struct Guest(Arc<Guests>);

impl Guest {
    fn new(guests: &Arc<Guests>) -> Self {
        *guests.lock() += 1;
        Self(Arc::clone(guests))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.none.notify_all();
    }
}
