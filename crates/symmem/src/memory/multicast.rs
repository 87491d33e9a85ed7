//! Multicast: an address at which a store reaches the memory of all ranks, where the hardware has such.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::Attachment;
use super::block::{Block, Mapping};
use super::region::Region;
use crate::error::Result;
use crate::sync::lock;

/// Of a mapping: where a store reaches the blocks of all ranks, if there is such an address; set once all have tried.
#[derive(Default)]
pub(crate) struct Multicast(OnceLock<Option<Region>>);

impl Attachment for Multicast {}

/// Of a segment: the addresses of all ranks' segments, by group, for other blocks that lie alike in them.
#[derive(Default)]
struct Segments(Mutex<Vec<Known>>);

impl Attachment for Segments {}

/// Whose segments they are, which, and the address of all of them.
struct Known {
    group: Weak<dyn Send + Sync>,
    segments: Vec<u128>,
    region: Region,
}

impl Multicast {
    /// Sees to it that an address of `block` and its counterparts has been tried for, by `set_up` where blocks of these
    /// segments have none yet. Only blocks at the same offset of segments of the same length can have one. Collective the first
    /// time; the same on all ranks.
    pub(crate) fn try_for(
        block: &Block,
        mapping: &Mapping,
        set_up: impl FnOnce() -> Result<Option<Region>>,
    ) -> Result<()> {
        let multicast: Arc<Self> = mapping.attached.get_or_add(Arc::default);
        if multicast.0.get().is_some() {
            return Ok(());
        }
        let segments: Arc<Segments> = block.segment().attached.get_or_add(Arc::default);
        let all = match segments.find(mapping) {
            _ if !mapping.is_level() => None,
            Some(known) => Some(known),
            None => set_up()?.inspect(|made| segments.insert(mapping, made.clone())),
        };
        let own = all.and_then(|all| all.part(block.offset(), block.region().bytes()).ok());
        let _ = multicast.0.set(own); // the first to set it had the same
        Ok(())
    }

    /// The address of the block of all ranks.
    pub(crate) fn address(&self) -> Option<usize> {
        self.0.get().and_then(Option::as_ref).map(Region::address)
    }
}

impl Segments {
    fn find(&self, mapping: &Mapping) -> Option<Region> {
        let (group, segments) = (mapping.group(), mapping.segments());
        let known = lock(&self.0);
        let is_it = |known: &&Known| known.group.ptr_eq(group) && known.segments == segments;
        known.iter().find(is_it).map(|known| known.region.clone())
    }

    fn insert(&self, mapping: &Mapping, region: Region) {
        let (group, segments) = (Weak::clone(mapping.group()), mapping.segments());
        let mut known = lock(&self.0);
        known.retain(|known| known.group.strong_count() > 0);
        known.push(Known { group, segments, region });
    }
}
