//! Putting a group back in step after a failure. To be replaced by the core's own: only the hook stays as it is.

use std::sync::{PoisonError, Weak};

use super::Group;
use crate::error::Result;
use crate::sync::Deadline;

const OP: &str = "resync";

/// What a later layer does when all ranks put their group back in step.
pub(crate) trait Resync: Send + Sync {
    /// Returns once no work of this rank is under way any more.
    fn quiesce(&self, deadline: Deadline) -> Result<()>;

    /// No rank has work under way: makes what they synchronise on new.
    fn reset(&self) -> Result<()>;
}

impl Group {
    /// Has `hook` take part in every [`Group::resync`] for as long as it lives.
    pub(crate) fn on_resync(&self, hook: Weak<dyn Resync>) {
        let mut hooks = self.0.resyncs.lock().unwrap_or_else(PoisonError::into_inner);
        hooks.retain(|hook| hook.strong_count() > 0);
        hooks.push(hook);
    }

    /// Puts the group back in step after a failure other than a lost rank. Collective: all ranks call it, and afterwards all
    /// calls work again.
    pub fn resync(&self) -> Result<()> {
        self.resync_by(self.deadline())
    }

    /// As [`Group::resync`], until `deadline`.
    pub fn resync_by(&self, deadline: impl Into<Deadline>) -> Result<()> {
        let deadline = deadline.into().start();
        let hooks = self.0.resyncs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let hooks: Vec<_> = hooks.iter().filter_map(Weak::upgrade).collect();
        self.check_whole(OP)?;
        self.all_do(deadline, || hooks.iter().try_for_each(|hook| hook.quiesce(deadline)))?;
        self.all_do(deadline, || hooks.iter().try_for_each(|hook| hook.reset()))
    }

    /// Does this rank's `part`: an error on all ranks if one fails.
    fn all_do(&self, deadline: Deadline, part: impl FnOnce() -> Result<()>) -> Result<()> {
        let done = part();
        let terms = [("operation", OP.to_owned())];
        self.converse(OP, deadline, |conversation| {
            conversation.hold(&terms, Vec::new(), || Ok(None), |_, _| done)
        })
    }
}
