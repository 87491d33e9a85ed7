//! Going on without the lost: the survivors agree on who is left and form a smaller group.

use super::Group;
use super::form::Plan;
use crate::error::{Error, Result};
use crate::sync::Deadline;

const OP: &str = "shrink";

impl Group {
    /// A new group of those who are still here. Collective over the survivors.
    ///
    /// Symmetric memory goes along: rendezvous it with the new group. A rank that is lost on the way is
    /// left out as well. After a [`Error::Timeout`] (a survivor that does not come) the call may be repeated.
    pub fn shrink(&self) -> Result<Group> {
        self.shrink_by(self.deadline())
    }

    /// As [`Group::shrink`], until `deadline`.
    pub fn shrink_by(&self, deadline: impl Into<Deadline>) -> Result<Group> {
        let deadline = deadline.into().start();
        // All generations of a group are agreed on in the pads of the first: a survivor that formed generation n,
        // and another that saw a member die while forming it, both go on to n + 1.
        let (root, mut generation) =
            self.0.plan.lineage.clone().unwrap_or_else(|| (self.clone(), 0));
        let inbox = root.0.context.mesh.inbox();
        let (signals, id) = (&root.formed()?.signals, root.id()?);
        while generation < root.size() {
            let here =
                |r: usize| root.world_ranks().get(r).is_some_and(|&w| inbox.gone(w).is_none());
            let ranks = signals.decide(generation, here);
            if !ranks.contains(&root.rank()) {
                break;
            }
            let members =
                ranks.iter().filter_map(|&r| root.world_ranks().get(r).copied()).collect();
            generation += 1;
            let plan = Plan {
                op: OP,
                scope: format!("{id:032x} shrunk {generation}"),
                label: format!("{}, shrunk to {ranks:?}", root.name()),
                _claim: None,
                members,
                pad_size: self.signal_pad_size(),
                limit: self.deadline(),
                lineage: Some((root.clone(), generation)),
            };
            let group = Self::begin(&root.0.context, plan)?;
            match group.ready_by(deadline) {
                Ok(()) => return Ok(group),
                Err(Error::PeerLost { .. }) => {} // agreed on before the loss was known
                Err(other) => return Err(other),
            }
        }
        Err(Error::PeerLost {
            rank: self.rank(),
            during: OP,
            how: "the others have gone on without this rank".into(),
        })
    }
}
