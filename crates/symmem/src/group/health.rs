//! What a group knows of its members' lives.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::form::Formed;
use crate::mesh::Subject;
use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

/// Members that have gone, by their rank in the group. It is all of a group that the watcher of the mesh may
/// hold on to, so that a group ends where its last user drops it.
pub(super) struct Health {
    /// World ranks, in group order; and our place among them.
    pub(super) members: Vec<usize>,
    pub(super) rank: usize,
    /// The conversation in which the group is formed.
    pub(super) subject: Subject,
    /// The pads, once they are mapped, through which all others are told.
    pub(super) formed: OnceLock<Arc<Formed>>,
    /// Whether this rank has seen anything wrong.
    trouble: AtomicBool,
    /// In the order in which we learnt it: what comes first is the cause of what follows.
    gone: Mutex<Vec<(usize, Parting)>>,
}

#[derive(Clone)]
pub(super) struct Parting {
    /// Went in order: only those who still wait for it are hurt. Otherwise it was lost, and the group is broken.
    pub(super) left: bool,
    pub(super) how: String,
}

impl Health {
    pub(super) fn new(members: &[usize], rank: usize, subject: Subject) -> Self {
        Self {
            members: members.to_vec(),
            rank,
            subject,
            formed: OnceLock::new(),
            trouble: AtomicBool::new(false),
            gone: Mutex::default(),
        }
    }

    fn gone(&self) -> MutexGuard<'_, Vec<(usize, Parting)>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, rank: usize, parting: Parting) {
        let mut gone = self.gone();
        if !gone.iter().any(|(r, _)| *r == rank) {
            gone.push((rank, parting));
        }
        drop(gone);
        self.trouble.store(true, Ordering::Release); // pairs with the acquire in `trouble`
    }

    /// Whether anything is wrong at all: what a healthy group looks at.
    #[inline]
    pub(super) fn trouble(&self) -> bool {
        self.trouble.load(Ordering::Acquire) || self.poisoned().is_some()
    }

    /// How the member went, if it did.
    pub(super) fn how_gone(&self, rank: usize) -> Option<String> {
        self.gone().iter().find(|(r, _)| *r == rank).map(|(_, parting)| parting.how.clone())
    }

    /// The first that was lost at all, or else the first of `awaited` that is gone.
    pub(super) fn missed(&self, awaited: impl Fn(usize) -> bool) -> Option<(usize, String)> {
        let gone = self.gone();
        let lost = gone.iter().find(|(_, parting)| !parting.left);
        let missed = lost.or_else(|| gone.iter().find(|(rank, _)| awaited(*rank)));
        missed.map(|(rank, parting)| (*rank, parting.how.clone()))
    }
}
