//! All-gather: every rank gets all ranks' elements.

use super::{check_len, copy_elements};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Op, Way};
use crate::symmetric::Symmetric;

const NAME: &str = "all_gather";

impl<T: Element> Symmetric<T> {
    /// `out` becomes all ranks' elements, one rank's after the other's. Collective.
    pub fn all_gather(&mut self, out: &mut [T]) -> Result<()> {
        let len = self.len();
        check_len(self.group(), NAME, "an output", len * self.group().size(), out.len())?;
        if self.is_small() {
            return self.staged(
                self.call(const { Op::of(NAME) }, Way::Staged),
                0..len,
                true,
                |from, _| {
                    for (rank, &from) in from.iter().enumerate() {
                        let to = out.as_mut_ptr().wrapping_add(rank * len);
                        // SAFETY: each rank has staged `len` elements; `out` has as many for each.
                        unsafe { copy_elements(from, to, len) };
                    }
                },
            );
        }
        self.collective(self.call(const { Op::of(NAME) }, Way::Direct), |session| {
            // Our own first: it is in our cache, and the others' come while it is written.
            let order = (0..session.size()).map(|step| (session.rank() + step) % session.size());
            for rank in order {
                let to = out.as_mut_ptr().wrapping_add(rank * len);
                // SAFETY: each part has `len` elements, which nobody writes; `out` has as many for each rank.
                unsafe { copy_elements(session.part(rank, 0).cast_const(), to, len) };
            }
            Ok(())
        })
    }
}
