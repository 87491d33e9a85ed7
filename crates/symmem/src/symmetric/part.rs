//! Parts of an allocation without a phase of their own: for callers whose language has no types for phases.

use super::{Handle, Memory, Symmetric};
use crate::dtype::Element;
use crate::error::Result;

impl Handle {
    /// `len` elements of any type at byte `offset` of every rank's memory, to call collectives on. Not collective.
    ///
    /// If a collective on it fails while peers may still be working, this rank keeps its memory as it is. The handle has no
    /// parts then, until [`Group::resync`](crate::Group::resync). After the loss of a rank, a new
    /// [`Group::rendezvous_at`](crate::Group::rendezvous_at) of the survivors returns a handle that has parts.
    ///
    /// # Safety
    /// As long as the value lives, all ranks access these elements only through such values, and all ranks that make
    /// a call use the same offset.
    pub unsafe fn part<T: Element>(&self, offset: usize, len: usize) -> Result<Symmetric<T>> {
        let mut memory = Memory::new::<T>(self.range::<T>(offset, len)?, len)?;
        memory.owned = false;
        Ok(Symmetric::of(memory))
    }

    /// The handle of a part, if there is one there.
    pub(crate) fn range<T: Element>(&self, offset: usize, len: usize) -> Result<Self> {
        const OP: &str = "part";
        if self.mapping().is_suspended(self.group().generation()) {
            let expected = "memory that no peer is working on".to_owned();
            let got = "memory that a failed collective has suspended; call resync, or rendezvous with the survivors";
            return Err(self.group().usage(OP, expected, got.to_owned()));
        }
        let (had, size) = (self.buffer_size(), size_of::<T>());
        let fits = had.checked_sub(offset).is_some_and(|left| len <= left / size);
        if !fits || !offset.is_multiple_of(size) {
            let expected = format!("aligned elements within the {had} bytes of the memory");
            let got = format!("{len} of {} at byte {offset}", T::DTYPE);
            return Err(self.group().usage(OP, expected, got));
        }
        Ok(self.from(offset))
    }
}
