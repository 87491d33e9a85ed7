//! What a backend keeps of an allocation or a mapping beyond what every backend has.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

/// One such thing: a multicast address, a window of NCCL, a group on a device.
pub(crate) trait Attachment: Any + Send + Sync {
    /// Whether peers may still be at work on the memory although this rank's work is done: then it gets no new user.
    fn may_be_in_use(&self) -> bool {
        false
    }
}

/// All of them, at most one of each type. They are dropped before the memory.
#[derive(Default)]
pub(crate) struct Attachments(Mutex<Vec<Arc<dyn Attachment>>>);

impl Attachments {
    /// The one of this type.
    pub(crate) fn get<T: Attachment>(&self) -> Option<Arc<T>> {
        find(&lock(&self.0))
    }

    /// The one of this type, made if there is none.
    pub(crate) fn get_or_add<T: Attachment>(&self, make: impl FnOnce() -> Arc<T>) -> Arc<T> {
        let mut all = lock(&self.0);
        find(&all).unwrap_or_else(|| {
            let made = make();
            all.push(Arc::clone(&made) as Arc<dyn Attachment>);
            made
        })
    }

    pub(super) fn may_be_in_use(&self) -> bool {
        lock(&self.0).iter().any(|attachment| attachment.may_be_in_use())
    }
}

fn find<T: Attachment>(all: &[Arc<dyn Attachment>]) -> Option<Arc<T>> {
    let any = all.iter().map(|attachment| Arc::clone(attachment) as Arc<dyn Any + Send + Sync>);
    any.filter_map(|attachment| attachment.downcast().ok()).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Quiet(u32);
    struct Busy;
    impl Attachment for Quiet {}
    impl Attachment for Busy {
        fn may_be_in_use(&self) -> bool {
            true
        }
    }

    #[test]
    fn there_is_one_of_each_type_and_the_first_stays() {
        let all = Attachments::default();
        assert!(all.get::<Quiet>().is_none());
        assert_eq!(all.get_or_add(|| Arc::new(Quiet(1))).0, 1);
        assert_eq!(all.get_or_add(|| Arc::new(Quiet(2))).0, 1);
        assert!(!all.may_be_in_use());
        all.get_or_add(|| Arc::new(Busy));
        assert!(all.may_be_in_use() && all.get::<Quiet>().is_some_and(|quiet| quiet.0 == 1));
    }
}
