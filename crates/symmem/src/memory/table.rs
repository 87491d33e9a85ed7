//! The one table from an address to the allocation that it lies in, of one rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use super::block::Block;
use crate::sync::lock;

/// Living allocations by address.
#[derive(Default)]
pub(crate) struct Table(Mutex<BTreeMap<usize, Weak<Block>>>);

impl Table {
    pub(crate) fn insert(&self, block: &Arc<Block>) {
        let mut blocks = lock(&self.0);
        blocks.retain(|_, block| block.strong_count() > 0);
        blocks.insert(block.region().address(), Arc::downgrade(block));
    }

    /// The living allocation whose data cover `address`, and how far into them it lies.
    pub(crate) fn find(&self, address: usize) -> Option<(Arc<Block>, usize)> {
        let blocks = lock(&self.0);
        let (&start, block) = blocks.range(..=address).next_back()?;
        let block = block.upgrade()?;
        let offset = address - start;
        (offset < block.shape().bytes.max(1)).then_some((block, offset))
    }

    /// Whether a living allocation other than `besides` took part in that rendezvous of a group.
    pub(crate) fn holds(&self, group: u128, number: u64, besides: Option<&Arc<Block>>) -> bool {
        let blocks = lock(&self.0);
        let other = |b: &Arc<Block>| !besides.is_some_and(|besides| Arc::ptr_eq(b, besides));
        let mut others = blocks.values().filter_map(Weak::upgrade).filter(other);
        others.any(|b| b.mapping(group).is_some_and(|m| m.number == number))
    }
}
