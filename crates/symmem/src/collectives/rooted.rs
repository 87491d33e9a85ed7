//! Collectives with one rank at their root: reduce, gather, scatter.

use super::host::copy::Stores;
use super::{block_len, check_len, copy_elements, loop_for};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::Symmetric;

impl<T: Number> Symmetric<T> {
    /// On rank `root`, `out` becomes the reduction of all ranks' elements; on others it is not looked at. Collective.
    pub fn reduce(&mut self, op: ReduceOp, root: usize, out: &mut [T]) -> Result<()> {
        const NAME: &str = "reduce";
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let len = self.len();
        let is_root = self.is_root(NAME, root)?;
        if is_root {
            check_len(self.group(), NAME, "an output", len, out.len())?;
        }
        let call = |way| Call {
            operator: Some(op),
            root: Some(root),
            ..self.call(const { Op::of(NAME) }, way)
        };
        if self.is_small() {
            return self.staged(call(Way::Staged), 0..len, true, |from, _| {
                if is_root {
                    // SAFETY: each rank has laid out `len` elements; `out` has as many and is ours alone.
                    unsafe { looped(from, &[out.as_mut_ptr()], len, Stores::Cached) };
                }
            });
        }
        self.collective(call(Way::Direct), |session| {
            if session.rank() == root {
                // SAFETY: all have `len` elements; `out` is ours alone, and nobody writes any part.
                unsafe { session.reduce(looped, 0..len, &[out.as_mut_ptr()]) };
            }
            Ok(())
        })
    }
}

impl<T: Element> Symmetric<T> {
    /// On rank `root`, `out` becomes all ranks' elements, by rank; on others it is not looked at. Collective.
    pub fn gather(&mut self, root: usize, out: &mut [T]) -> Result<()> {
        const NAME: &str = "gather";
        let len = self.len();
        let is_root = self.is_root(NAME, root)?;
        if is_root {
            check_len(self.group(), NAME, "an output", len * self.group().size(), out.len())?;
        }
        let call = |way| Call { root: Some(root), ..self.call(const { Op::of(NAME) }, way) };
        if self.is_small() {
            return self.staged(call(Way::Staged), 0..len, true, |from, _| {
                for (rank, &from) in from.iter().enumerate().filter(|_| is_root) {
                    let to = out.as_mut_ptr().wrapping_add(rank * len);
                    // SAFETY: each rank has laid out `len` elements; `out` has as many for each.
                    unsafe { copy_elements(from, to, len) };
                }
            });
        }
        self.collective(call(Way::Direct), |session| {
            for rank in (0..session.size()).filter(|_| session.rank() == root) {
                let to = out.as_mut_ptr().wrapping_add(rank * len);
                // SAFETY: each part has `len` elements, which nobody writes; `out` has as many for each rank.
                unsafe { copy_elements(session.part(rank, 0).cast_const(), to, len) };
            }
            Ok(())
        })
    }

    /// The elements of rank `root` are one block for each rank; `out` becomes that for this one. Collective.
    pub fn scatter(&mut self, root: usize, out: &mut [T]) -> Result<()> {
        const NAME: &str = "scatter";
        let block = block_len(self.group(), NAME, self.len())?;
        let is_root = self.is_root(NAME, root)?;
        check_len(self.group(), NAME, "an output", block, out.len())?;
        let own = self.group().rank() * block;
        let call = |way| Call { root: Some(root), ..self.call(const { Op::of(NAME) }, way) };
        if self.is_small() {
            return self.staged(call(Way::Staged), 0..self.len(), is_root, |from, _| {
                if let Some(from) = from.get(root) {
                    // SAFETY: the root has laid out a block for each rank, and `out` is one long.
                    unsafe { copy_elements(from.wrapping_add(own), out.as_mut_ptr(), block) };
                }
            });
        }
        self.collective(call(Way::Direct), |session| {
            let from = session.part(root, own).cast_const();
            // SAFETY: the root's part has a block for each rank, and `out` is one long; nobody writes any part.
            unsafe { copy_elements(from, out.as_mut_ptr(), block) };
            Ok(())
        })
    }

    fn is_root(&self, name: &'static str, root: usize) -> Result<bool> {
        self.group().check_rank(name, root)?;
        Ok(self.group().rank() == root)
    }
}
