//! Continuing without lost ranks: the survivors agree on who is left and form a smaller group.

use super::Group;
use super::form::{Root, Spec};
use crate::error::{Error, Result};
use crate::mesh::{Ballot, Gone, Scope};
use crate::sync::{Deadline, Ordering, lock_by};

const OP: &str = "shrink";

impl Group {
    /// A new group of the surviving ranks. Collective over these.
    ///
    /// Symmetric memory is kept: rendezvous it with the new group. A rank that is lost in the meantime is left
    /// out as well. After an [`Error::Timeout`] (a survivor did not call in time), call it again.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// if world.rank() == 2 {
    ///     return Ok(()); // it leaves
    /// }
    /// assert!(world.barrier().is_err());
    /// let survivors = world.shrink()?;
    /// assert_eq!(survivors.world_ranks(), [0, 1]);
    /// survivors.barrier()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn shrink(&self) -> Result<Group> {
        self.shrink_by(self.deadline())
    }

    /// As [`Group::shrink`], until `deadline`.
    pub fn shrink_by(&self, deadline: impl Into<Deadline>) -> Result<Group> {
        let deadline = deadline.into().start();
        let awaited = lock_by(&self.0.awaited, deadline);
        let mut awaited =
            awaited.map_err(|(why, after)| why.error(OP, vec![self.rank()], after))?;
        loop {
            let group = awaited.take().map_or_else(|| self.next_generation(deadline), Ok)?;
            match group.ready_by(deadline) {
                Ok(()) => return Ok(group),
                Err(Error::PeerLost { .. }) => {} // agreed on before the loss was known
                Err(late @ (Error::Timeout { .. } | Error::Interrupted { .. })) => {
                    *awaited = Some(group);
                    return Err(late);
                }
                Err(other) => return Err(other),
            }
        }
    }

    /// Begins to form the next group of survivors, as all of them agree.
    ///
    /// All generations of a group are agreed on in the pads of the first, or in the store where it spans hosts: a survivor that
    /// formed generation n, and another that saw a member die while forming it, both go on to n + 1.
    fn next_generation(&self, deadline: Deadline) -> Result<Group> {
        let root = self.root()?;
        let (signals, members) = (&root.formed.signals, &root.spec.members);
        let generation = root.formed.generations.load(Ordering::Relaxed) as usize;
        if generation >= root.spec.layout().generations() {
            return Err(Error::Unavailable {
                what: "another group of survivors".into(),
                why: format!("{generation} have been formed of one group; create a subgroup"),
            });
        }
        let inbox = self.0.context.mesh.inbox();
        let is_here = |r: usize| members.get(r).is_some_and(|&w| inbox.gone(w).is_none());
        let ranks = match signals.spans() {
            false => signals.decide(generation, is_here),
            true => self.decide_by_store(&root, generation, &is_here, deadline)?,
        };
        root.formed.generations.store(generation as u32 + 1, Ordering::Relaxed);
        if !ranks.contains(&root.rank) {
            return Err(Error::PeerLost {
                rank: self.rank(),
                during: OP,
                how: "the others have gone on without this rank".into(),
            });
        }
        // What one of the others knew, and we perhaps not yet, holds for all from here on.
        for (_, &gone) in members.iter().enumerate().filter(|(r, _)| !ranks.contains(r)) {
            inbox.mark_gone(gone, Gone::lost("the survivors went on without it"));
        }
        let members: Vec<usize> = ranks.iter().filter_map(|&r| members.get(r).copied()).collect();
        if let Some(formed) = self.0.health.formed.get().filter(|_| members.len() < self.size()) {
            // A rendezvous that is pending will never be, whatever memory peers have sent for it.
            inbox.begin_no_more(&Scope::Group(formed.id));
        }
        let spec = Spec {
            op: OP,
            scope: format!("{:032x} shrunk {generation}", root.formed.id),
            label: format!("{}, shrunk to {ranks:?}", root.spec.label),
            _claim: None,
            members,
            pad_size: self.signal_pad_size(),
            limit: self.deadline(),
            order: self.order(),
            root: Some(root),
        };
        Self::begin(&self.0.context, spec)
    }

    /// The first rank to come decides, for all hosts. Those that cannot reach the store do not go on: the others may be going
    /// on without them.
    fn decide_by_store(
        &self,
        root: &Root,
        generation: usize,
        is_here: &dyn Fn(usize) -> bool,
        deadline: Deadline,
    ) -> Result<Vec<usize>> {
        let here: Vec<usize> = (0..root.spec.members.len()).filter(|&rank| is_here(rank)).collect();
        let question = format!("survivors/{:032x}/{generation}", root.formed.id);
        let decided = Ballot::open(self.store(), deadline)
            .and_then(|ballot| ballot.decide::<Vec<usize>>(&question, &here));
        decided.map_err(|e| Error::Unavailable {
            what: "the decision which ranks survive".to_owned(),
            why: format!("rank {} does not reach the store: {e}", self.rank()),
        })
    }

    fn root(&self) -> Result<Root> {
        let own = || {
            let (spec, formed) = (self.0.spec.clone(), self.formed()?.clone());
            Ok(Root { spec, rank: self.rank(), formed })
        };
        self.0.spec.root.clone().map_or_else(own, Ok)
    }
}
