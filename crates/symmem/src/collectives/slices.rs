//! Collectives on ordinary memory: piece by piece through the group's workspace, with the same bits as in symmetric memory.
//!
//! Each piece is put into this rank's part of the workspace, and the work on it is a collective of its own. What peers
//! read or write there they have read or written before its end, so the next piece can be put there at once.

use std::ops::Range;

use super::{block_len, check_len, copy_elements, loop_for, share};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::group::Group;
use crate::symmetric::Symmetric;

/// Sets these calls apart from those on symmetric memory of the same name.
const SLICES: usize = usize::MAX - 1;

impl Group {
    /// Element i of `data` becomes the reduction of element i of all ranks. Collective; after an error `data` may be
    /// reduced in part.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        const NAME: &str = "all_reduce";
        let looped = loop_for::<T>(self, NAME, op)?;
        let len = data.len();
        self.with_workspace(NAME, |space: &mut Symmetric<T>| {
            for piece in pieces(len, space.len()) {
                let agreed = [SLICES, op as usize, len, piece.start];
                let data = data.get_mut(piece).unwrap_or_default();
                stage(space, 0, data);
                space.collective(NAME, &agreed, |session| {
                    let own = share::<T>(data.len(), session.rank(), session.size());
                    let to: Vec<*mut T> =
                        (0..session.size()).map(|r| session.part(r, own.start)).collect();
                    // SAFETY: a piece fits all parts; no other rank touches the elements of our share.
                    unsafe { session.reduce(looped, own, &to) };
                    Ok(())
                })?;
                data.copy_from_slice(space.local().get(..data.len()).unwrap_or_default());
            }
            Ok(())
        })
    }

    /// `out` becomes all ranks' `input`s, one rank's after the other's. Collective.
    pub fn all_gather<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        const NAME: &str = "all_gather";
        let len = input.len();
        check_len(self, NAME, "an output", len.saturating_mul(self.size()), out.len())?;
        self.with_workspace(NAME, |space: &mut Symmetric<T>| {
            for piece in pieces(len, space.len()) {
                stage(space, 0, input.get(piece.clone()).unwrap_or_default());
                space.collective(NAME, &[SLICES, len, piece.start], |session| {
                    for rank in from_own(session.rank(), session.size()) {
                        let to = out.as_mut_ptr().wrapping_add(rank * len + piece.start);
                        let from = session.part(rank, 0).cast_const();
                        // SAFETY: a piece fits every part, where nobody writes, and lies in `out` for each rank.
                        unsafe { copy_elements(from, to, piece.len()) };
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })
    }

    /// `input` is one block for each rank; `out` becomes the reduction of all ranks' blocks for this one. Collective.
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        op: ReduceOp,
        out: &mut [T],
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let looped = loop_for::<T>(self, NAME, op)?;
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", block, out.len())?;
        self.with_workspace(NAME, |space: &mut Symmetric<T>| {
            for piece in pieces(block, space.len() / self.size()) {
                stage_blocks(space, input, block, &piece);
                let agreed = [SLICES, op as usize, block, piece.start];
                let out = out.get_mut(piece).unwrap_or_default();
                space.collective(NAME, &agreed, |session| {
                    let own = session.rank() * out.len();
                    // SAFETY: a piece for each rank fits all parts, where nobody writes; `out` is one long, and ours.
                    unsafe { session.reduce(looped, own..own + out.len(), &[out.as_mut_ptr()]) };
                    Ok(())
                })?;
            }
            Ok(())
        })
    }

    /// `data` becomes that of rank `root`. Collective.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        const NAME: &str = "broadcast";
        self.check_rank(NAME, root)?;
        let len = data.len();
        self.with_workspace(NAME, |space: &mut Symmetric<T>| {
            for piece in pieces(len, space.len()) {
                let agreed = [SLICES, root, len, piece.start];
                let data = data.get_mut(piece).unwrap_or_default();
                if self.rank() == root {
                    stage(space, 0, data);
                }
                space.collective(NAME, &agreed, |session| {
                    if session.rank() != root {
                        let from = session.part(root, 0).cast_const();
                        // SAFETY: a piece fits the root's part, where nobody writes, and `data` is one long.
                        unsafe { copy_elements(from, data.as_mut_ptr(), data.len()) };
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })
    }

    /// `input` is one block for each rank; `out` becomes the blocks that all ranks have for this one, by rank. Collective.
    pub fn all_to_all<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        const NAME: &str = "all_to_all";
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", input.len(), out.len())?;
        self.with_workspace(NAME, |space: &mut Symmetric<T>| {
            for piece in pieces(block, space.len() / self.size()) {
                stage_blocks(space, input, block, &piece);
                space.collective(NAME, &[SLICES, block, piece.start], |session| {
                    for rank in from_own(session.rank(), session.size()) {
                        let from = session.part(rank, session.rank() * piece.len()).cast_const();
                        let to = out.as_mut_ptr().wrapping_add(rank * block + piece.start);
                        // SAFETY: a piece for each rank fits every part, where nobody writes, and `out` block by block.
                        unsafe { copy_elements(from, to, piece.len()) };
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })
    }
}

/// Cuts `len` elements into pieces of at most `most`; one empty piece if there are none, so that ranks still meet.
fn pieces(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most.max(1);
    (0..len.div_ceil(most).max(1)).map(move |i| i * most..((i + 1) * most).min(len))
}

/// All ranks, our own first: it is in our cache.
fn from_own(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).map(move |step| (rank + step) % ranks)
}

/// Puts `data` into our part, `at` elements from its start.
fn stage<T: Element>(space: &mut Symmetric<T>, at: usize, data: &[T]) {
    if let Some(to) = space.local_mut().get_mut(at..at + data.len()) {
        to.copy_from_slice(data);
    }
}

/// Puts the same piece of every block into our part, one after the other.
fn stage_blocks<T: Element>(
    space: &mut Symmetric<T>,
    input: &[T],
    block: usize,
    piece: &Range<usize>,
) {
    for (rank, data) in input.chunks_exact(block.max(1)).enumerate() {
        stage(space, rank * piece.len(), data.get(piece.clone()).unwrap_or_default());
    }
}
