//! One user's allocation: data and signal pad; and the mappings of all peers' counterparts.
//!
//! `[ data | pad ]`, each at a multiple of 128 bytes. A block is a whole segment, or a part of one that a pool
//! cut. Peers address a block by (segment, offset), so offsets need not agree between ranks. The words of the
//! pad are zero at first, and belong to users' own protocols: the library does not touch them.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use serde::{Deserialize, Serialize};

use super::{Allocation, Attachments, Backend, Device, Exported};
use crate::error::{Error, Result};
use crate::memory::region::{Region, WeakRegion, Words};
use crate::sync::atomic::{AtomicBool, AtomicU32};
use crate::sync::shared::AtomicU8;
use crate::sync::{Ordering, SharedWord, lock};

/// Alignment of each part, and so of every buffer that a pool hands out.
pub(crate) const ALIGN: usize = 128;
/// Allocations are whole pages.
const PAGE: usize = 4096;

/// Memory from a backend, with a name of its own in the job.
pub(crate) struct Segment {
    pub(crate) backend: Arc<dyn Backend>,
    /// What the backend keeps of it.
    pub(crate) attached: Attachments,
    pub(crate) allocation: Allocation,
    pub(crate) id: u128,
}

impl Segment {
    pub(crate) fn allocate(backend: Arc<dyn Backend>, bytes: usize, id: u128) -> Result<Self> {
        let whole = bytes.checked_next_multiple_of(PAGE).ok_or_else(|| {
            Error::unavailable(format!("{bytes} bytes"), "they do not fit the address space")
        })?;
        let allocation = backend.allocate(whole)?;
        Ok(Self { backend, attached: Attachments::default(), allocation, id })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.allocation.region.bytes()
    }
}

/// The sizes of a block's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) bytes: usize,
    pub(crate) pad: usize,
}

impl Shape {
    fn pad_at(&self) -> usize {
        self.bytes.next_multiple_of(ALIGN)
    }

    /// Bytes of the whole block; `None` if no machine could hold it.
    pub(crate) fn total(&self) -> Option<usize> {
        self.bytes.checked_add(self.pad + 2 * PAGE)?;
        Some((self.pad_at() + self.pad).next_multiple_of(ALIGN))
    }
}

/// Where a block lies, as told to peers.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SegmentRange {
    segment: u128,
    segment_bytes: usize,
    offset: usize,
}

impl SegmentRange {
    fn is_level_with(&self, other: &Self) -> bool {
        (self.offset, self.segment_bytes) == (other.offset, other.segment_bytes)
    }
}

/// One allocation of this rank.
pub(crate) struct Block {
    segment: Arc<Segment>,
    offset: usize,
    region: Region,
    shape: Shape,
    /// By group: rendezvous is collective once.
    mappings: Mutex<HashMap<u128, Arc<Mapping>>>,
    /// What peers may do with the data: see [`Access`].
    access: AtomicU8,
    /// Peers may have mapped it, at some time.
    was_mapped: AtomicBool,
    /// Where the memory goes when nobody uses it any more; `None`: back to the system.
    home: Option<Arc<dyn Home>>,
    /// The value by which a language binding knows the allocation.
    owner: Mutex<Option<Owner>>,
}

/// What peers may do with a block's data. It is set before a phase begins in which they do that, and ends when all have left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Neither read nor write.
    Nothing = 0,
    /// Read it.
    Read = 1,
    /// Read and write it.
    Write = 2,
}

/// Besides: somebody has the addresses, and accesses them by a protocol of their own.
const RAW: u8 = 4;

/// A value of a language binding, which owns the allocation.
pub(crate) type Owner = Weak<dyn Any + Send + Sync>;

/// What a block was cut by, such as a pool.
pub(crate) trait Home: Send + Sync {
    /// Takes back the block at `offset` of a segment, for new users. If it `was_mapped`, peers may still signal in its
    /// pad: the words of the pad must stay words of a pad.
    fn take_back(&self, segment: u128, offset: usize, shape: Shape, was_mapped: bool);
}

impl Block {
    pub(crate) fn new(
        segment: Arc<Segment>,
        offset: usize,
        shape: Shape,
        home: Option<Arc<dyn Home>>,
    ) -> Result<Self> {
        let total = shape.total().unwrap_or(usize::MAX);
        let region = segment.allocation.region.part(offset, total)?;
        // What a former user of the memory left in the pad.
        segment.backend.clear(&region, shape.pad_at(), shape.pad)?;
        let (access, was_mapped) = (AtomicU8::new(0), AtomicBool::new(false));
        let (mappings, owner) = (Mutex::default(), Mutex::default());
        Ok(Self { segment, offset, region, shape, mappings, access, was_mapped, home, owner })
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Byte offset within the segment; not 0 only for parts of a pool.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn range(&self) -> SegmentRange {
        SegmentRange {
            segment: self.segment.id,
            segment_bytes: self.segment.bytes(),
            offset: self.offset,
        }
    }

    pub(crate) fn mapping(&self, group: u128) -> Option<Arc<Mapping>> {
        lock(&self.mappings).get(&group).cloned()
    }

    /// Notes that peers may map it from now on.
    pub(crate) fn set_exposed(&self) {
        self.was_mapped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn remember(&self, group: u128, mapping: &Arc<Mapping>) {
        let mut mappings = lock(&self.mappings);
        mappings.retain(|_, m| m.group_lives());
        mappings.insert(group, Arc::clone(mapping));
    }

    pub(crate) fn set_owner(&self, owner: Owner) {
        *lock(&self.owner) = Some(owner);
    }

    pub(crate) fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        lock(&self.owner).as_ref()?.upgrade()
    }

    pub(crate) fn set_access(&self, access: Access) {
        let raw = self.access.load(Ordering::Relaxed) & RAW;
        self.access.store(access as u8 | raw, Ordering::Relaxed);
    }

    /// From here on, addresses of the data are known.
    pub(crate) fn set_raw(&self) {
        self.access.fetch_or(RAW, Ordering::Relaxed);
    }

    /// Whether peers may still touch the data, for all this rank knows.
    pub(crate) fn is_open(&self) -> bool {
        self.access.load(Ordering::Relaxed) & !RAW != 0
    }

    /// Whether a peer may do `access` now.
    pub(crate) fn allows(&self, access: Access) -> bool {
        let now = self.access.load(Ordering::Relaxed);
        now & RAW != 0 || now >= access as u8
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(home) = self.home.take() else { return };
        let was_mapped = self.was_mapped.load(Ordering::Relaxed);
        let (open, bytes) = (self.is_open(), self.region.bytes());
        let (segment, offset, shape) = (self.segment.id, self.offset, self.shape);
        let mappings: Vec<_> = lock(&self.mappings).drain().map(|(_, mapping)| mapping).collect();
        self.segment.backend.after_use(Box::new(move || {
            if open || mappings.iter().any(|mapping| mapping.attached.may_be_in_use()) {
                // A peer's mapping keeps the memory, which must not get a new user.
                tracing::warn!(
                    "memory was dropped while peers may use it; {bytes} bytes are not reused"
                );
            } else {
                home.take_back(segment, offset, shape, was_mapped);
            }
        }));
    }
}

/// Signals of a barrier over the pads that were put, and taken.
pub(crate) type Progress = Mutex<(usize, usize)>;

/// All ranks' counterparts of a block in one group, as mapped here.
pub(crate) struct Mapping {
    /// The number of the rendezvous in its group: the same on all ranks.
    pub(crate) number: u64,
    /// The generation of calls in which a collective on it failed while peers may be in the middle of it, and one.
    suspended: AtomicU32,
    /// What the backend keeps of it; goes before the memory.
    pub(crate) attached: Attachments,
    /// Barriers over the pads, by channel.
    barriers: Mutex<HashMap<usize, Arc<Progress>>>,
    /// By rank in the group; our own block at our own rank.
    blocks: Vec<Region>,
    /// The words of their pads; of ranks on other hosts those of mirrors, where this rank's signals to them are stored. None if this
    /// process does not reach them.
    pads: Vec<Option<Words>>,
    ranges: Vec<SegmentRange>,
    shape: Shape,
    group: Weak<dyn Send + Sync>,
}

impl Mapping {
    pub(crate) fn new(
        number: u64,
        blocks: Vec<Region>,
        ranges: Vec<SegmentRange>,
        shape: Shape,
        group: Weak<dyn Send + Sync>,
    ) -> Self {
        let (suspended, attached, barriers) =
            (AtomicU32::new(0), Attachments::default(), Mutex::default());
        let pad = |block: &Region| block.part(shape.pad_at(), shape.pad).and_then(Words::new).ok();
        let pads = blocks.iter().map(pad).collect();
        Self { number, suspended, attached, barriers, blocks, pads, ranges, shape, group }
    }

    /// With mirrors of the pads of `far` ranks.
    pub(crate) fn with_mirrors(mut self, is_far: impl Fn(usize) -> bool) -> Result<Self> {
        for (_, pad) in self.pads.iter_mut().enumerate().filter(|(rank, _)| is_far(*rank)) {
            *pad = Some(Words::new(Region::anonymous(self.shape.pad)?)?);
        }
        Ok(self)
    }

    /// How far the barrier over the pads on a channel has come.
    pub(crate) fn barrier_on(&self, channel: usize) -> Arc<Progress> {
        let mut barriers = lock(&self.barriers);
        Arc::clone(barriers.entry(channel).or_default())
    }

    pub(crate) fn suspend(&self, generation: u32) {
        self.suspended.store(generation.wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether peers may be at work on it, in a collective that failed here.
    pub(crate) fn is_suspended(&self, generation: u32) -> bool {
        self.suspended.load(Ordering::Relaxed).checked_sub(1) == Some(generation)
    }

    /// Whether all blocks lie at the same offset of segments of the same length.
    pub(crate) fn is_level(&self) -> bool {
        self.ranges.windows(2).all(|pair| pair[0].is_level_with(&pair[1]))
    }

    /// The segments that the blocks lie in, by rank.
    pub(crate) fn segments(&self) -> Vec<u128> {
        self.ranges.iter().map(|range| range.segment).collect()
    }

    /// Who made it, for as long as that lives.
    pub(crate) fn group(&self) -> &Weak<dyn Send + Sync> {
        &self.group
    }

    fn group_lives(&self) -> bool {
        self.group.strong_count() > 0
    }

    /// The data of rank `rank`.
    pub(crate) fn data(&self, rank: usize) -> Option<Region> {
        self.blocks.get(rank)?.part(0, self.shape.bytes).ok()
    }

    /// The pad of rank `rank`.
    pub(crate) fn pad_region(&self, rank: usize) -> Option<Region> {
        self.blocks.get(rank)?.part(self.shape.pad_at(), self.shape.pad).ok()
    }

    /// The pad words of rank `rank`, or of their mirror.
    #[inline]
    pub(crate) fn pad(&self, rank: usize) -> Option<&[SharedWord]> {
        self.pads.get(rank)?.as_deref()
    }
}

/// Peers' segments that are mapped here, each once for a device that reaches it, however many blocks and groups use it.
#[derive(Default)]
pub(crate) struct Imports(Mutex<HashMap<(u128, Device), WeakRegion>>);

impl Imports {
    /// The peer's block at `range`, mapping its segment if need be.
    pub(crate) fn block(
        &self,
        backend: &dyn Backend,
        range: SegmentRange,
        exported: impl FnOnce() -> Result<Exported>,
        shape: Shape,
    ) -> Result<Region> {
        let mut known = lock(&self.0);
        let key = (range.segment, backend.device());
        let segment = match known.get(&key).and_then(WeakRegion::upgrade) {
            Some(region) => region,
            None => {
                let region = backend.import(exported()?, range.segment_bytes)?;
                known.retain(|_, region| region.upgrade().is_some());
                known.insert(key, region.downgrade());
                region
            }
        };
        segment.part(range.offset, shape.total().unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_keep_their_alignment() {
        for bytes in [0, 1, 127, 128, 129, 4096, 1 << 20] {
            for pad in [8, 9216] {
                let s = Shape { bytes, pad };
                assert!(s.pad_at() >= bytes);
                assert!(s.total().unwrap() >= s.pad_at() + pad);
                assert_eq!((s.pad_at() % ALIGN, s.total().unwrap() % ALIGN), (0, 0));
            }
        }
    }

    #[test]
    fn a_size_that_does_not_fit_the_address_space_has_no_total() {
        let s = Shape { bytes: usize::MAX - 100, pad: 9216 };
        assert_eq!(s.total(), None);
    }
}
