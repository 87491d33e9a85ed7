//! Broadcast: every rank gets one rank's elements.
#![allow(unsafe_code)] // S2, S3

use super::{PerRank, copy_bytes};
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
    let call = |way| Call { root: Some(root), ..memory.call(const { Op::of(NAME) }, way) };
    if memory.is_small() {
        let call = call(Way::Staged);
        let mut running = memory.begin_staged(&call)?;
        let mut places = PerRank::new();
        let staged = memory.stage(&mut running, is_root, &mut places)?;
        if let Some(&from) = staged.get(root).filter(|_| !is_root) {
            // SAFETY: the root has staged its part, and ours is as long and ours alone.
            unsafe { copy_bytes(from, memory.own(0), bytes) };
        }
        return Ok(());
    }
    let call = call(Way::Direct);
    let session = memory.enter(&call)?;
    if !is_root {
        // SAFETY: nobody writes the root's part, nobody else touches ours.
        unsafe { copy_bytes(memory.part(root, 0).cast_const(), memory.own(0), bytes) };
    }
    session.leave()
}
