//! Collectives over symmetric memory: one file each, over the loops in `host`.
//!
//! Every collective is a call of all ranks of the memory's group, with arguments that agree; ranks that disagree all
//! get [`Error::Mismatch`] and nothing is done. Element i of a reduction is ((x₀ ⊕ x₁) ⊕ x₂) … in rank order, computed in
//! f32 for 8- and 16-bit floats with one rounding at the end, whatever the algorithm: the same bits on every rank.
#![allow(unsafe_code)] // S1 (the memory keeps all mappings), S2 (between the two barriers of a call), S3 (ranges below `len`)

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod host;
mod reduce_scatter;
mod rooted;

use std::ops::Range;
use std::ptr::NonNull;

use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, Result};
use crate::group::{Call, Group};
use crate::symmetric::Symmetric;
use host::copy::{Stores, copy};
use host::reduce::{Loop, reduce_loop};

/// Elements begin at multiples of this many bytes where work is divided, so that no two ranks write one cache line.
const LINE: usize = 64;

/// One call of a collective: what it works on, between the barrier at which all have come and that at which all are done.
struct Session<'a, T> {
    group: &'a Group,
    parts: &'a [NonNull<T>],
    call: Call,
}

impl<'a, T: Element> Session<'a, T> {
    /// Waits for all ranks. From here on every rank may read every part, and write where the collective says.
    fn open(x: &'a mut Symmetric<T>, name: &'static str, agreed: &[usize]) -> Result<Self> {
        let number = x.handle().number() as usize;
        let call = Call::Collective(name, digest(name, T::DTYPE as usize, number, x.len(), agreed));
        let session = Self { group: x.group(), parts: x.parts(), call };
        x.handle().block().set_open(true);
        let met = session.group.meet_for(call, session.group.deadline());
        if let Err(Error::Mismatch { .. }) = met {
            x.handle().block().set_open(false); // it failed on all ranks alike: nobody touches anything
        }
        met.map(|()| session)
    }

    fn close(self, x_block: &crate::block::Block) -> Result<()> {
        self.group.meet_for(self.call, self.group.deadline())?;
        x_block.set_open(false);
        Ok(())
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn part(&self, rank: usize) -> *mut T {
        self.parts.get(rank).map_or(std::ptr::null_mut(), |part| part.as_ptr())
    }
}

/// A number that differs between calls that do not fit together.
fn digest(name: &str, dtype: usize, number: usize, len: usize, agreed: &[usize]) -> u32 {
    let bytes = name.bytes().map(usize::from);
    let words = bytes.chain([dtype, number, len]).chain(agreed.iter().copied());
    let hash = words.fold(0xcbf2_9ce4_8422_2325_u64, |hash, word| {
        (hash ^ word as u64).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash ^ (hash >> 32)) as u32 & (u32::MAX >> 2)
}

/// The elements that rank `rank` of `ranks` works on: equal shares, cut at cache lines.
fn share<T>(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let line = (LINE / size_of::<T>()).max(1);
    let each = len.div_ceil(ranks).next_multiple_of(line);
    let begin = (rank * each).min(len);
    begin..(begin + each).min(len)
}

fn loop_for<T: Element>(group: &Group, name: &'static str, op: ReduceOp) -> Result<Loop<T>> {
    reduce_loop::<T>(op).ok_or_else(|| {
        let expected = format!("an operator that {} has", T::DTYPE);
        group.usage(name, expected, op.to_string())
    })
}

fn check_len(group: &Group, name: &'static str, what: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(group.usage(name, format!("{what} of {expected} elements"), format!("{got}")))
}
