//! A group's own symmetric memory, through which collectives on ordinary slices go.

use std::sync::Arc;

use super::handle::{Bringing, Handle};
use super::{Memory, Symmetric};
use crate::block::Block;
use crate::dtype::Element;
use crate::error::Result;
use crate::group::Group;

/// Large enough that barriers do not count, small enough to stay in a cache.
const BYTES: usize = 1 << 20;
/// So that every rank has a cache line in every rank's part, however many ranks there are.
const LINE: usize = 64;

impl Group {
    /// Hands the group's workspace to `work`, as elements of `T`. Collective the first time.
    ///
    /// It never grows or moves, so no peer can be surprised. It is kept as a block: a handle would keep the group, and
    /// the group it. A block that is still open here is one that a failed collective left to peers.
    pub(crate) fn with_workspace<T: Element, R>(
        &self,
        op: &'static str,
        work: impl FnOnce(&mut Symmetric<T>) -> Result<R>,
    ) -> Result<R> {
        let mut kept = self.workspace();
        let block = match &*kept {
            Some(block) => Arc::clone(block),
            None => Arc::clone(kept.insert(self.make_workspace()?)),
        };
        if block.is_open() {
            let expected = "a group in which no collective on slices has failed halfway".to_owned();
            let got = "one in which one has; shrink it, or make another".to_owned();
            return Err(self.usage(op, expected, got));
        }
        let handle = Handle::rendezvous(&block, self, T::DTYPE, 0, Bringing::Owned)?;
        let len = block.shape().bytes / size_of::<T>();
        work(&mut Symmetric(Memory::new(handle, len)?))
    }

    fn make_workspace(&self) -> Result<Arc<Block>> {
        let space = self.alloc::<u8>(BYTES.max(LINE * self.size()))?.rendezvous(self)?;
        Ok(Arc::clone(space.handle().block()))
    }
}
