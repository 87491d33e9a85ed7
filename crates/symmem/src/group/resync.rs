//! Getting back in step: after a call was given up, all ranks agree on where they are, and calls pair up again.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use super::Group;
use super::call::{Call, Op};
use super::form::Formed;
use super::waiting::Waiting;
use crate::error::Result;
use crate::sync::{Deadline, lock_by};

const OP: &str = "resync";

/// What a layer above has to do when its group is resynchronised.
pub(crate) trait Resync: Send + Sync {
    /// Returns once nothing of this rank's calls is under way any more.
    fn quiesce(&self, deadline: Deadline) -> Result<()>;

    /// Makes this rank's part of what ranks share as new. No rank has anything under way.
    fn reset(&self) -> Result<()>;
}

impl Group {
    /// Brings a group whose ranks are out of step back in step. Collective; after it every call works again, and memory that
    /// a failed collective had suspended is accessible again, with whatever that collective left in it.
    ///
    /// Calls that other threads and ranks are waiting in end with [`OutOfStep`](crate::Error::OutOfStep). After a
    /// [`Timeout`](crate::Error::Timeout), call it again to continue waiting. Signals stay as they are.
    ///
    /// ```
    /// use std::time::Duration;
    /// use symmem::{Error, ReduceOp, World};
    ///
    /// let sums = World::threads(2, |world| -> symmem::Result<f32> {
    ///     let mut data = [0.0; 4];
    ///     if world.rank() == 0 {
    ///         let limit = world.deadline().remaining().unwrap_or_default();
    ///         world.set_timeout(Duration::from_millis(20));
    ///         // Rank 1 does not make this call: it is late, or has called resync already.
    ///         let alone = world.all_reduce(&mut data, ReduceOp::Sum);
    ///         assert!(matches!(alone, Err(Error::Timeout { .. } | Error::OutOfStep { .. })));
    ///         world.set_timeout(limit);
    ///     }
    ///     world.resync()?;
    ///     data.fill(world.rank() as f32);
    ///     world.all_reduce(&mut data, ReduceOp::Sum)?;
    ///     Ok(data[0])
    /// })?;
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 1.0)));
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn resync(&self) -> Result<()> {
        self.resync_by(self.deadline())
    }

    /// As [`Group::resync`], until `deadline`.
    pub fn resync_by(&self, deadline: impl Into<Deadline>) -> Result<()> {
        let mut deadline = deadline.into().start();
        let formed = self.formed_by(deadline)?;
        self.check_whole(OP)?;
        let locked = lock_by(&self.0.resyncing, deadline);
        let _locked = locked.map_err(|(why, after)| why.error(OP, vec![self.rank()], after))?;
        let signals = &formed.signals;
        // Two rounds; what gave up in one of them goes on there.
        let quiet = signals.generation().wrapping_mul(2).wrapping_add(1);
        let renewed = quiet.wrapping_add(1);
        if signals.round() != quiet && signals.round() != renewed {
            self.leave_all_calls(formed, deadline)?;
        }
        if signals.round() != renewed {
            self.round(formed, quiet, &mut deadline)?;
            self.reset_sequence(formed);
            self.resync_hooks().iter().try_for_each(|hook| hook.reset())?;
        }
        self.round(formed, renewed, &mut deadline)?;
        signals.begin_generation();
        Ok(())
    }

    /// Ends the calls that threads of this rank are in; no new ones begin until the group is in step.
    fn leave_all_calls(&self, formed: &Formed, deadline: Deadline) -> Result<()> {
        let signals = &formed.signals;
        if signals.out_of_step().is_none() {
            formed.give_up(&Call::plain(Op::of(OP)));
        }
        for channel in 0..=signals.sequence() {
            let guard = signals.lock_channel(channel, deadline);
            guard.map_err(|stop| self.stopped(stop, OP, None, &|_| false))?;
        }
        self.resync_hooks().iter().try_for_each(|hook| hook.quiesce(deadline))
    }

    fn round(&self, formed: &Formed, round: u32, deadline: &mut Deadline) -> Result<()> {
        let mut waiting = Waiting::new(self, OP, None);
        let done =
            formed.signals.resync_round(round, deadline, |arrived| waiting.is_hopeless(arrived));
        let arrived = |rank| formed.signals.is_in_round(rank, round);
        done.map_err(|stop| self.stopped(stop, OP, None, &arrived))
    }

    /// Has `hook` take part in every resynchronisation of the group, for as long as it lives.
    pub(crate) fn on_resync(&self, hook: Weak<dyn Resync>) {
        self.lock_hooks().push(hook);
    }

    fn resync_hooks(&self) -> Vec<Arc<dyn Resync>> {
        let mut hooks = self.lock_hooks();
        hooks.retain(|hook| hook.strong_count() > 0);
        hooks.iter().filter_map(Weak::upgrade).collect()
    }

    fn lock_hooks(&self) -> MutexGuard<'_, Vec<Weak<dyn Resync>>> {
        self.0.resync_hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
