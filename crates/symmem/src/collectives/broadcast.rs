//! Broadcast: every rank gets one rank's elements.
#![allow(unsafe_code)] // S2, S3

use super::copy_bytes;
use super::slices::{self, Slice};
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const NAME: &str = "broadcast";

impl<T: Element> Symmetric<T> {
    /// In place: the elements become those of rank `root`. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<f32>(4)?.rendezvous(&world)?;
    /// x.local_mut().fill(world.rank() as f32);
    /// x.broadcast(1)?;
    /// assert_eq!(x.local(), [1.0; 4]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn broadcast(&mut self, root: usize) -> Result<()> {
        self.group().check_rank(NAME, root)?;
        broadcast(self.memory(), root)
    }
}

fn broadcast(memory: &Memory, root: usize) -> Result<()> {
    let (bytes, is_root) = (memory.bytes(), memory.group().rank() == root);
    let call = Call { root: Some(root), ..memory.call(const { Op::of(NAME) }, Way::Direct) };
    if let Some(mut running) = memory.begin_across(&call)? {
        let data = Slice::of_part(memory, memory.len());
        return slices::spread_from(memory.group(), &mut running, data, root);
    }
    memory.read_parts(call, is_root, |parts| {
        if !is_root {
            // SAFETY: nobody writes the root's part, nobody else touches ours, which is as long.
            unsafe { copy_bytes(parts[root], memory.own(0), bytes) };
        }
    })
}
