//! All-gather: every rank gets all ranks' elements.
#![allow(unsafe_code)] // S2, S3

use super::slices::{self, Slice};
use super::{check_len, copy_bytes};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const NAME: &str = "all_gather";

impl<T: Element> Symmetric<T> {
    /// `out` becomes the elements of all ranks, in rank order. Collective.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<u32>(2)?.rendezvous(&world)?;
    /// x.local_mut().fill(world.rank() as u32);
    /// let mut all = [0; 6];
    /// x.all_gather(&mut all)?;
    /// assert_eq!(all, [0, 0, 1, 1, 2, 2]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_gather(&mut self, out: &mut [T]) -> Result<()> {
        check_len(self.group(), NAME, "an output", self.len() * self.group().size(), out.len())?;
        all_gather(self.memory(), out.as_mut_ptr().cast())
    }
}

/// Into `out`, which has room for all parts.
fn all_gather(memory: &Memory, out: *mut u8) -> Result<()> {
    let (bytes, call) = (memory.bytes(), memory.call(const { Op::of(NAME) }, Way::Direct));
    if let Some(mut running) = memory.begin_across(&call)? {
        let input = Slice::of_part(memory, memory.len());
        return slices::gather_all(memory.group(), &mut running, input, out);
    }
    memory.read_parts(call, true, |parts| {
        for rank in memory.ranks_from_own() {
            // SAFETY: nobody writes the part; `out` has room for each.
            unsafe { copy_bytes(parts[rank], out.wrapping_add(rank * bytes), bytes) };
        }
    })
}
