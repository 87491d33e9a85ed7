//! All-to-all: every rank gets one block from every rank.

use super::{block_len, check_len, copy_elements};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Op, Way};
use crate::symmetric::Symmetric;

const NAME: &str = "all_to_all";

impl<T: Element> Symmetric<T> {
    /// The elements are one block for each rank; `out` becomes the blocks that all ranks have for this one, by rank.
    /// Collective.
    pub fn all_to_all(&mut self, out: &mut [T]) -> Result<()> {
        let block = block_len(self.group(), NAME, self.len())?;
        check_len(self.group(), NAME, "an output", self.len(), out.len())?;
        let own = self.group().rank() * block;
        if self.is_small() {
            return self.staged(
                self.call(const { Op::of(NAME) }, Way::Staged),
                0..self.len(),
                true,
                |from, _| {
                    for (rank, from) in from.iter().enumerate() {
                        let to = out.as_mut_ptr().wrapping_add(rank * block);
                        // SAFETY: each rank has staged a block for each, and `out` has as many.
                        unsafe { copy_elements(from.wrapping_add(own), to, block) };
                    }
                },
            );
        }
        self.collective(self.call(const { Op::of(NAME) }, Way::Direct), |session| {
            let order = (0..session.size()).map(|step| (session.rank() + step) % session.size());
            for rank in order {
                let from = session.part(rank, own).cast_const();
                // SAFETY: each part and `out` have a block for each rank; nobody writes any part.
                unsafe { copy_elements(from, out.as_mut_ptr().wrapping_add(rank * block), block) };
            }
            Ok(())
        })
    }
}
