//! Which members of a group are gone.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::context::WorldPads;
use super::form::Formed;
use crate::mesh::Subject;
use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

/// Members that have gone, by their rank in the group. The watcher of the mesh holds only this part of a group, so that
/// the group ends when its last user drops it.
pub(super) struct Health {
    /// World ranks, in group order; and our place among them.
    pub(super) members: Vec<usize>,
    pub(super) rank: usize,
    /// The conversation in which the group is formed.
    pub(super) subject: Subject,
    world: Arc<WorldPads>,
    /// The pads, once they are mapped, through which the others are informed.
    pub(super) formed: OnceLock<Arc<Formed>>,
    /// Whether this rank has seen anything wrong.
    trouble: AtomicBool,
    /// In the order in which this rank learnt of it: the first is the cause of the others.
    gone: Mutex<Vec<(usize, Departure)>>,
}

#[derive(Clone)]
pub(super) struct Departure {
    /// It left in order, which is fatal only to those who still wait for it. Otherwise it was lost, and the group is broken.
    pub(super) left: bool,
    pub(super) how: String,
}

impl Health {
    pub(super) fn new(
        members: &[usize],
        rank: usize,
        subject: Subject,
        world: &Arc<WorldPads>,
    ) -> Self {
        Self {
            members: members.to_vec(),
            rank,
            subject,
            world: Arc::clone(world),
            formed: OnceLock::new(),
            trouble: AtomicBool::new(false),
            gone: Mutex::default(),
        }
    }

    fn gone(&self) -> MutexGuard<'_, Vec<(usize, Departure)>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, rank: usize, departure: Departure) {
        let mut gone = self.gone();
        if !gone.iter().any(|(r, _)| *r == rank) {
            gone.push((rank, departure));
        }
        drop(gone);
        self.trouble.store(true, Ordering::Release); // pairs with the acquire in `trouble`
    }

    /// Whether anything is wrong: the only check in a healthy group.
    #[inline]
    pub(super) fn trouble(&self) -> bool {
        self.is_troubled() || self.poisoned().is_some()
    }

    /// Whether this rank itself has seen anything wrong.
    #[inline]
    pub(super) fn is_troubled(&self) -> bool {
        self.trouble.load(Ordering::Acquire)
    }

    /// How the member went, if it did: its own account before those of others.
    pub(super) fn how_gone(&self, rank: usize) -> Option<String> {
        let farewell = self.members.get(rank).and_then(|&world| self.world.farewell(world));
        let noted = || Some(self.gone().iter().find(|(r, _)| *r == rank)?.1.how.clone());
        farewell.map(str::to_owned).or_else(noted)
    }

    /// The first that was lost, in the order that all ranks of the world see, or else one of `awaited` that is gone.
    pub(super) fn missed(&self, awaited: impl Fn(usize) -> bool) -> Option<(usize, String)> {
        let place = |world_rank| self.members.iter().position(|&m| m == world_rank);
        if let Some(lost) = self.world.first_lost(|rank| place(rank).is_some()).and_then(place) {
            let how = self.how_gone(lost);
            return Some((lost, how.unwrap_or_else(|| "noticed by a peer".to_owned())));
        }
        let gone = self.gone();
        let lost = gone.iter().find(|(_, departure)| !departure.left);
        let absent =
            || gone.iter().filter(|(rank, _)| awaited(*rank)).min_by_key(|(rank, _)| *rank);
        let (rank, departure) = lost.or_else(absent)?.clone();
        drop(gone);
        Some((rank, self.how_gone(rank).unwrap_or(departure.how)))
    }
}
