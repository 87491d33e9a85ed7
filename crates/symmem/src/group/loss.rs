//! Losses: a lost member poisons its group, which ends all waits.

use std::time::Duration;

use super::health::{Departure, Health};
use super::{Group, Inner};
use crate::mesh::{Ballot, Gone, PeerObserver, Subject};
use crate::sync::{Deadline, poll_by};

impl Health {
    #[inline]
    pub(super) fn poisoned(&self) -> Option<usize> {
        self.formed.get().and_then(|formed| formed.signals.poisoned())
    }

    /// Whether a wait for `awaited` can no longer succeed.
    pub(super) fn is_fatal(&self, awaited: impl Fn(usize) -> bool) -> bool {
        self.trouble() && self.loss(awaited).is_some()
    }

    /// The loss that all survivors name: the one in the pad, before one that only this rank has seen.
    pub(super) fn loss(&self, awaited: impl Fn(usize) -> bool) -> Option<(usize, String)> {
        match self.poisoned() {
            Some(rank) => {
                let how = self.how_gone(rank);
                Some((rank, how.unwrap_or_else(|| "noticed by a peer".to_owned())))
            }
            None => self.missed(awaited),
        }
    }

    /// As `loss`, for the error that a caller gets. A peer may have written it to the pad before the mesh reports how the
    /// rank went.
    #[cold]
    pub(super) fn explained_loss(
        &self,
        awaited: &dyn Fn(usize) -> bool,
    ) -> Option<(usize, String)> {
        let (rank, how) = self.loss(awaited)?;
        let soon = Deadline::after(Duration::from_millis(100));
        Some((rank, poll_by(soon, &mut || self.how_gone(rank)).unwrap_or(how)))
    }

    /// Writes the first loss to all pads, once these are mapped; or wakes this rank's threads if a rank has left.
    pub(super) fn pass_on(&self) {
        let Some(formed) = self.formed.get() else { return };
        match self.missed(|_| false) {
            Some((lost, _)) => formed.signals.poison(lost),
            None => formed.signals.bell(self.rank).ring(),
        }
    }
}

impl Group {
    /// As [`Health::explained_loss`]; where the group spans hosts, the first lost rank as all hosts see it.
    #[cold]
    pub(super) fn explained_loss(
        &self,
        awaited: &dyn Fn(usize) -> bool,
    ) -> Option<(usize, String)> {
        let (rank, how) = self.0.health.explained_loss(awaited)?;
        let first = self.first_on_all_hosts(rank).filter(|&first| first != rank);
        let how_first = first.and_then(|first| Some((first, self.0.health.how_gone(first)?)));
        Some(how_first.unwrap_or((rank, how)))
    }

    /// If several ranks are lost, hosts may notice them in different orders. The store decides which one the group names. Hosts
    /// that cannot reach each other or the store name the one that they noticed themselves.
    pub(super) fn first_on_all_hosts(&self, lost: usize) -> Option<usize> {
        let formed = self.0.health.formed.get().filter(|formed| formed.signals.spans())?;
        let world_rank = *self.world_ranks().get(lost)?;
        self.context().mesh.inbox().gone(world_rank).filter(|gone| !gone.left)?;
        let ask = || {
            let patience = Deadline::after(Duration::from_millis(500));
            let ballot = Ballot::open(self.store(), patience).ok()?;
            let first = ballot.decide(&format!("lost/{:032x}", formed.id), &lost);
            first.inspect_err(|e| tracing::debug!("which rank was lost first: {e}")).ok()
        };
        let first = *formed.first_lost.get_or_init(|| ask().unwrap_or(lost));
        let first_member = *self.world_ranks().get(first)?;
        let is_lost = || {
            let gone = self.context().mesh.inbox().gone(first_member)?;
            (!gone.left).then_some(first)
        };
        poll_by(Deadline::after(Duration::from_millis(100)), &mut || is_lost()).ok()
    }
}

impl PeerObserver for Health {
    fn gone(&self, world_rank: usize, gone: &Gone, subject: Option<&Subject>) {
        let Some(rank) = self.members.iter().position(|&m| m == world_rank) else { return };
        if subject.is_some_and(|s| *s != self.subject) {
            return;
        }
        self.note(rank, Departure { left: gone.left, how: gone.how.clone() });
        self.pass_on();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let inbox = self.context.mesh.inbox();
        match self.health.formed.get() {
            Some(formed) => {
                formed.signals.tell_of_arrivals();
                inbox.close_group(formed.id);
            }
            None => {
                // Peers may have formed it, and sent messages.
                self.proposed_id().iter().for_each(|&id| inbox.close_group(id));
                if !self.is_settled() {
                    self.tell_all("it dropped the group before using it");
                }
            }
        }
        inbox.close(&self.health.subject);
    }
}
