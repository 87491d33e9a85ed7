//! What a group knows of its members' lives.

use std::sync::{Mutex, PoisonError};

use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

/// Members that have gone, by their rank in the group.
pub(super) struct Health {
    /// Whether anything is wrong: all that a healthy group looks at.
    trouble: AtomicBool,
    members: Mutex<Vec<Member>>,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Member {
    Here,
    /// Went in order: only those who still wait for it are hurt.
    Left(String),
    /// Was lost: the group is broken.
    Lost(String),
}

impl Health {
    pub(super) fn new(members: usize) -> Self {
        Self { trouble: AtomicBool::new(false), members: Mutex::new(vec![Member::Here; members]) }
    }

    pub(super) fn note(&self, rank: usize, state: Member) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(member) = members.get_mut(rank).filter(|m| **m == Member::Here) {
            *member = state;
        }
        drop(members);
        self.trouble.store(true, Ordering::Release); // pairs with the acquire in `trouble`
    }

    pub(super) fn trouble(&self) -> bool {
        self.trouble.load(Ordering::Acquire)
    }

    pub(super) fn member(&self, rank: usize) -> Member {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.get(rank).cloned().unwrap_or(Member::Here)
    }

    /// The first of `awaited` that is gone, or else the first that was lost at all.
    pub(super) fn missed(&self, awaited: impl Fn(usize) -> bool) -> Option<(usize, String)> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = members.iter().enumerate().find_map(|(rank, m)| match m {
            Member::Lost(how) => Some((rank, how.clone())),
            _ => None,
        });
        lost.or_else(|| {
            members.iter().enumerate().find_map(|(rank, m)| match m {
                Member::Left(how) if awaited(rank) => Some((rank, how.clone())),
                _ => None,
            })
        })
    }
}
