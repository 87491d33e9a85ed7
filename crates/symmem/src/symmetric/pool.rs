//! A pool: many small buffers cut from few large allocations, each as symmetric as if it had its own.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Buffer;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::group::Group;
use crate::memory::Backend;
use crate::memory::block::{Block, Home, Segment, Shape};

/// Cuts buffers from segments that it allocates as needed. Memory returns to the pool when its last user has dropped it and
/// no pending work uses it, and to the system with the pool.
///
/// `D` is the device whose memory it is: a `cuda::Gpu`, or `()` for main memory.
#[derive(Clone)]
pub struct Pool<D = ()> {
    pub(crate) device: D,
    pub(crate) group: Group,
    backend: Arc<dyn Backend>,
    segment_bytes: usize,
    state: Arc<Segments>,
}

#[derive(Default)]
struct Segments(Mutex<Vec<Cut>>);

/// One segment and what is free in it: length by offset, never two ranges side by side.
struct Cut {
    segment: Arc<Segment>,
    free: BTreeMap<usize, usize>,
    /// Where blocks were that peers have mapped: they are used again whole, for the same shape.
    kept: Vec<(Shape, usize)>,
}

impl Pool {
    /// A pool of this rank's memory, allocated `segment_bytes` at a time (or more, for a larger buffer).
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let pool = symmem::Pool::new(&world, 1 << 20); // one rendezvous for each MiB
    /// let x = pool.alloc::<f32>(100)?.rendezvous(&world)?;
    /// let y = pool.alloc::<u8>(7)?.rendezvous(&world)?;
    /// # drop((x, y));
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn new(group: &Group, segment_bytes: usize) -> Self {
        Self::on((), Arc::clone(group.backend()), group, segment_bytes)
    }

    /// As [`Group::alloc`], from the pool: not zeroed, it holds what its last user left.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let block = self.cut(len, T::DTYPE)?;
        Ok(Buffer { block, len, elements: PhantomData })
    }
}

impl<D> Pool<D> {
    pub(crate) fn on(
        device: D,
        backend: Arc<dyn Backend>,
        group: &Group,
        segment_bytes: usize,
    ) -> Self {
        Self { device, group: group.clone(), backend, segment_bytes, state: Arc::default() }
    }

    /// A block for `len` elements.
    pub(crate) fn cut(&self, len: usize, dtype: DType) -> Result<Arc<Block>> {
        let shape = self.group.shape(len, dtype)?;
        self.group.check_free("alloc", &*self.backend)?;
        let total = shape.total().unwrap_or(usize::MAX);
        let taken = self.state.lock().iter_mut().find_map(|cut| {
            let offset = cut.take_kept(shape).or_else(|| cut.take(total))?;
            Some((Arc::clone(&cut.segment), offset))
        });
        let (segment, offset) = match taken {
            Some(taken) => taken,
            None => self.grow(total)?,
        };
        let home: Arc<dyn Home> = Arc::<Segments>::clone(&self.state);
        let id = segment.id;
        let block = Block::new(segment, offset, shape, Some(home));
        let block = Arc::new(block.inspect_err(|_| self.state.take_back(id, offset, shape, true))?);
        self.group.context().table.insert(&block);
        Ok(block)
    }

    /// The first `bytes` of a new segment. Not under the lock: a backend may give memory back meanwhile.
    fn grow(&self, bytes: usize) -> Result<(Arc<Segment>, usize)> {
        let id = crate::mesh::endpoint::random()?;
        let whole = self.segment_bytes.max(bytes);
        let segment = Arc::new(Segment::allocate(Arc::clone(&self.backend), whole, id)?);
        let free = BTreeMap::from([(0, segment.bytes())]);
        let mut cut = Cut { segment: Arc::clone(&segment), free, kept: Vec::new() };
        let offset = cut.take(bytes).unwrap_or(0);
        self.state.lock().push(cut);
        Ok((segment, offset))
    }

    /// Bytes that the pool holds, and how many of them are in use.
    pub fn usage(&self) -> (usize, usize) {
        let cuts = self.state.lock();
        let held: usize = cuts.iter().map(|cut| cut.segment.bytes()).sum();
        let free: usize = cuts.iter().flat_map(|cut| cut.free.values()).sum();
        let kept = cuts.iter().flat_map(|cut| &cut.kept).filter_map(|(shape, _)| shape.total());
        (held, held - free - kept.sum::<usize>())
    }
}

impl<D> std::fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (held, used) = self.usage();
        write!(f, "Pool({used} of {held} bytes in use)")
    }
}

impl Segments {
    fn lock(&self) -> MutexGuard<'_, Vec<Cut>> {
        // Nothing is done under the lock that could leave it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Home for Segments {
    fn take_back(&self, segment: u128, offset: usize, shape: Shape, was_mapped: bool) {
        let mut cuts = self.lock();
        let Some(cut) = cuts.iter_mut().find(|cut| cut.segment.id == segment) else { return };
        if was_mapped {
            cut.kept.push((shape, offset));
        } else {
            cut.give(offset, shape.total().unwrap_or(0));
        }
    }
}

impl Cut {
    /// The lowest range that fits, so that the same sequence of calls gives the same offsets on every rank.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&offset, &len) = self.free.iter().find(|(_, len)| **len >= bytes)?;
        self.free.remove(&offset);
        if len > bytes {
            self.free.insert(offset + bytes, len - bytes);
        }
        Some(offset)
    }

    /// The lowest, likewise.
    fn take_kept(&mut self, shape: Shape) -> Option<usize> {
        let fitting = self.kept.iter().enumerate().filter(|(_, (kept, _))| *kept == shape);
        let (at, _) = fitting.min_by_key(|(_, (_, offset))| *offset)?;
        Some(self.kept.swap_remove(at).1)
    }

    fn give(&mut self, mut offset: usize, mut bytes: usize) {
        let before = self.free.range(..offset).next_back().map(|(at, len)| (*at, *len));
        if let Some((before, len)) = before.filter(|(at, len)| at + len == offset) {
            self.free.remove(&before);
            (offset, bytes) = (before, len + bytes);
        }
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Process;

    fn cut(bytes: usize) -> Cut {
        let segment = Arc::new(Segment::allocate(Arc::new(Process), bytes, 1).unwrap());
        let free = BTreeMap::from([(0, segment.bytes())]);
        Cut { segment, free, kept: Vec::new() }
    }

    #[test]
    fn ranges_are_taken_lowest_first_and_joined_again() {
        let mut cut = cut(4096);
        let offsets: Vec<_> = [128, 256, 128].map(|n| cut.take(n).unwrap()).to_vec();
        assert_eq!(offsets, [0, 128, 384]);
        cut.give(0, 128);
        cut.give(384, 128);
        cut.give(128, 256);
        assert_eq!(cut.free, BTreeMap::from([(0, 4096)]));
    }

    #[test]
    fn a_block_that_peers_have_mapped_is_used_again_for_its_own_shape_only() {
        let small = Shape { bytes: 100, pad: 128 };
        let segments = Segments::default();
        segments.lock().push(cut(4096));
        let offset = segments.lock()[0].take(small.total().unwrap()).unwrap();
        segments.take_back(1, offset, small, true);
        let large = Shape { bytes: 1000, pad: 128 };
        assert_eq!(segments.lock()[0].take_kept(large), None);
        assert_ne!(segments.lock()[0].take(large.total().unwrap()), Some(offset));
        assert_eq!(segments.lock()[0].take_kept(small), Some(offset));
    }

    #[test]
    fn a_range_that_does_not_fit_is_not_found() {
        let mut cut = cut(4096);
        assert_eq!(cut.take(4097), None);
        assert_eq!(cut.take(4096), Some(0));
        assert_eq!(cut.take(1), None);
    }
}
