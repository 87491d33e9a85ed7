//! All-reduce: every rank gets the reduction of all ranks' elements.

use super::{Session, loop_for, share};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::symmetric::Symmetric;

const NAME: &str = "all_reduce";

/// How an all-reduce is done. All ways give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Whichever should be the fastest.
    #[default]
    Auto,
    /// Every rank reduces all elements for itself.
    OneShot,
    /// Every rank reduces its share of the elements and stores it with all: each byte crosses once each way.
    TwoShot,
}

impl<T: Element> Symmetric<T> {
    /// In place: element i becomes the reduction of element i of all ranks. Collective.
    pub fn all_reduce(&mut self, op: ReduceOp) -> Result<()> {
        self.all_reduce_with(op, Algorithm::Auto)
    }

    /// As [`Symmetric::all_reduce`], by the given algorithm.
    pub fn all_reduce_with(&mut self, op: ReduceOp, algorithm: Algorithm) -> Result<()> {
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let len = self.len();
        let agreed = [op as usize, algorithm as usize];
        self.collective(NAME, &agreed, |session| match algorithm {
            Algorithm::OneShot => {
                let mut whole = Vec::with_capacity(len);
                // SAFETY: all parts have `len` elements, and so has the vector; peers only read until they meet.
                unsafe { session.reduce(looped, 0..len, &[whole.as_mut_ptr()]) };
                session.meet()?;
                // SAFETY: nobody reads our part any more.
                unsafe {
                    super::copy_elements(whole.as_ptr(), session.part(session.rank(), 0), len)
                };
                Ok(())
            }
            Algorithm::Auto | Algorithm::TwoShot => {
                let own = share::<T>(len, session.rank(), session.size());
                let to: Vec<*mut T> =
                    (0..session.size()).map(|r| session.part(r, own.start)).collect();
                // SAFETY: within all parts; no other rank touches the elements of our share.
                unsafe { session.reduce(looped, own, &to) };
                Ok(())
            }
        })
    }

    /// Into `out`, leaving this memory as it is. Collective.
    pub fn all_reduce_into(&mut self, op: ReduceOp, out: &mut [T]) -> Result<()> {
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let len = self.len();
        super::check_len(self.group(), NAME, "an output", len, out.len())?;
        self.collective(NAME, &[op as usize, usize::MAX], |session: &Session<'_, T>| {
            // SAFETY: all have `len` elements; `out` is ours alone, and nobody writes any part.
            unsafe { session.reduce(looped, 0..len, &[out.as_mut_ptr()]) };
            Ok(())
        })
    }

    /// As [`Symmetric::all_reduce_into`], of `input`, which is put into this memory first. Collective.
    pub fn all_reduce_from(&mut self, input: &[T], op: ReduceOp, out: &mut [T]) -> Result<()> {
        super::check_len(self.group(), NAME, "an input", self.len(), input.len())?;
        self.local_mut().copy_from_slice(input);
        self.all_reduce_into(op, out)
    }
}
