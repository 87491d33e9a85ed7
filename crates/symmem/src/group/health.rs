//! What a group knows of its members' lives.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

/// Members that have gone, by their rank in the group.
#[derive(Default)]
pub(super) struct Health {
    /// Whether anything is wrong: all that a healthy group looks at.
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

    pub(super) fn trouble(&self) -> bool {
        self.trouble.load(Ordering::Acquire)
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
