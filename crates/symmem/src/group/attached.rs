//! What layers above keep for a group.

use std::any::{Any, TypeId};
use std::sync::{Arc, Weak};

use super::{Group, Inner};
use crate::error::Result;
use crate::sync::{Expiry, lock_by};

/// A group, for those who must not keep it.
pub(crate) struct WeakGroup(Weak<Inner>);

impl WeakGroup {
    pub(crate) fn upgrade(&self) -> Option<Group> {
        self.0.upgrade().map(Group)
    }
}

impl Group {
    pub(crate) fn weak(&self) -> WeakGroup {
        WeakGroup(Arc::downgrade(&self.0))
    }

    /// What a later layer keeps for this group under a number, made when first asked for; it goes with the group, so it
    /// must not keep the group.
    pub(crate) fn attached<T: Any + Send + Sync>(
        &self,
        number: u64,
        make: impl FnOnce() -> Result<Arc<T>>,
    ) -> Result<Arc<T>> {
        let key = (TypeId::of::<T>(), number);
        // What is made may take all ranks; another thread waits for that no longer than for anything else.
        let attached = lock_by(&self.0.attached, self.deadline());
        let busy = |(why, after): (Expiry, _)| why.error("attach", vec![self.rank()], after);
        let mut attached = attached.map_err(busy)?;
        let known = attached.get(&key).and_then(|known| Arc::clone(known).downcast().ok());
        if let Some(known) = known {
            return Ok(known);
        }
        let made = make()?;
        attached.insert(key, Arc::clone(&made) as Arc<dyn Any + Send + Sync>);
        Ok(made)
    }

    /// Whether survivors of a broken group made it by [`Group::shrink`].
    pub(crate) fn is_of_survivors(&self) -> bool {
        self.0.spec.root.is_some()
    }
}
