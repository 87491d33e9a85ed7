//! All-to-all: every rank gets one block from every rank.
#![allow(unsafe_code)] // S2, S3

use super::slices::{self, Slice};
use super::{block_len, check_len, copy_bytes};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const NAME: &str = "all_to_all";

impl<T: Element> Symmetric<T> {
    /// The elements are one block for each rank; `out` becomes the blocks that the ranks have for this one, in
    /// rank order. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<usize>(2)?.rendezvous(&world)?;
    /// x.local_mut().copy_from_slice(&[10 * world.rank(), 10 * world.rank() + 1]);
    /// let mut out = [0; 2];
    /// x.all_to_all(&mut out)?;
    /// assert_eq!(out, [world.rank(), 10 + world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_to_all(&mut self, out: &mut [T]) -> Result<()> {
        let block = block_len(self.group(), NAME, self.len())?;
        check_len(self.group(), NAME, "an output", self.len(), out.len())?;
        all_to_all(self.memory(), block, out.as_mut_ptr().cast())
    }
}

/// Blocks of `block` elements, into `out`, which has room for one of each rank.
fn all_to_all(memory: &Memory, block: usize, out: *mut u8) -> Result<()> {
    let bytes = block * memory.size();
    let own = memory.group().rank() * bytes;
    let call = memory.call(const { Op::of(NAME) }, Way::Direct);
    if let Some(mut running) = memory.begin_across(&call)? {
        let first = Slice::of_part(memory, block);
        return slices::exchange_all(memory.group(), &mut running, first, out);
    }
    memory.read_parts(call, true, |parts| {
        for rank in memory.ranks_from_own() {
            let (from, to) = (parts[rank].wrapping_add(own), out.wrapping_add(rank * bytes));
            // SAFETY: each part and `out` have a block for each rank; nobody writes any part.
            unsafe { copy_bytes(from, to, bytes) };
        }
    })
}
