//! All-reduce: every rank gets the reduction of all ranks' elements.

use super::host::copy::Stores;
use super::host::reduce::Loop;
use super::{Session, by_rank, loop_for, plan, share};
use crate::dtype::{Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, STAGE, Staging, Way};
use crate::symmetric::Symmetric;

const NAME: &str = "all_reduce";
/// Sets calls whose result goes elsewhere apart from those in place.
const INTO: [usize; 3] = [1, 0, 0];

/// How a collective is done. All ways give the same bits but [`Algorithm::Multimem`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Whichever should be the fastest.
    #[default]
    Auto,
    /// Every rank writes its elements beside its flag, and reduces what all have written: one barrier. Longer parts go
    /// piece by piece.
    Staged,
    /// Every rank reduces all elements for itself.
    OneShot,
    /// Every rank reduces its share of the elements and stores it with all: each byte crosses once each way.
    TwoShot,
    /// On devices with multicast: the switch adds up what it loads from all ranks, in an order of its own, and stores the
    /// same with all. Sums of f32, f16 and bf16.
    Multimem,
    /// On devices: the copy engine moves the bytes and leaves the multiprocessors to others.
    CopyEngine,
}

impl<T: Number> Symmetric<T> {
    /// In place: element i becomes the reduction of element i of all ranks. Collective.
    pub fn all_reduce(&mut self, op: ReduceOp) -> Result<()> {
        self.all_reduce_with(op, Algorithm::Auto)
    }

    /// As [`Symmetric::all_reduce`], by the given algorithm.
    pub fn all_reduce_with(&mut self, op: ReduceOp, algorithm: Algorithm) -> Result<()> {
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let len = self.len();
        let (bytes, ranks) = (len * size_of::<T>(), self.group().size());
        let algorithm = match algorithm {
            Algorithm::Multimem | Algorithm::CopyEngine => {
                let expected = "an algorithm for host memory".to_owned();
                return Err(self.group().usage(NAME, expected, format!("{algorithm:?}")));
            }
            // What travels in the line of the flag needs no thought, and has no time for any.
            Algorithm::Auto if bytes <= Staging::TINY => Algorithm::Staged,
            Algorithm::Auto => {
                let rates = self.group().rates()?;
                let chosen = plan::quickest(rates, bytes, ranks);
                tracing::debug!(op = NAME, bytes, ranks, ?chosen, because = ?plan::estimate(rates, bytes, ranks));
                chosen
            }
            given => given,
        };
        let way = match algorithm {
            Algorithm::Staged => return self.all_reduce_staged(op, looped),
            Algorithm::OneShot => Way::OneShot,
            _ => Way::TwoShot,
        };
        let call = Call { operator: Some(op), ..self.call(const { Op::of(NAME) }, way) };
        self.collective(call, |session| match way {
            Way::OneShot => {
                let mut whole = Vec::with_capacity(len);
                // SAFETY: all parts have `len` elements, and so has the vector; peers only read until they synchronise.
                unsafe { session.reduce(looped, 0..len, &[whole.as_mut_ptr()]) };
                session.synchronize()?;
                // SAFETY: nobody reads our part any more.
                unsafe {
                    super::copy_elements(whole.as_ptr(), session.part(session.rank(), 0), len)
                };
                Ok(())
            }
            _ => {
                let own = share::<T>(len, session.rank(), session.size());
                let part = |rank| session.part(rank, own.start);
                by_rank(session.size(), part, |parts| {
                    // SAFETY: within all parts; no other rank touches the elements of our share.
                    unsafe { session.reduce(looped, own.clone(), parts) };
                });
                Ok(())
            }
        })
    }

    fn all_reduce_staged(&mut self, op: ReduceOp, looped: Loop<T>) -> Result<()> {
        let (len, piece) = (self.len(), STAGE / size_of::<T>());
        let call = Call { operator: Some(op), ..self.call(const { Op::of(NAME) }, Way::Staged) };
        let group = self.group();
        group.reach_out();
        let mut running = group.begin_call(&call, group.deadline())?;
        let mut begin = 0;
        loop {
            let end = (begin + piece).min(len);
            self.stage(&mut running, NAME, begin..end, true, |from, own| {
                // SAFETY: each rank has staged that many elements; our part has them too, and is ours alone.
                unsafe { looped(from, &[own], end - begin, Stores::Cached) };
            })?;
            begin = end;
            if begin == len {
                return Ok(());
            }
        }
    }

    /// Into `out`, leaving this memory as it is. Collective.
    pub fn all_reduce_into(&mut self, op: ReduceOp, out: &mut [T]) -> Result<()> {
        let looped = loop_for::<T>(self.group(), NAME, op)?;
        let len = self.len();
        super::check_len(self.group(), NAME, "an output", len, out.len())?;
        let call =
            |way| Call { operator: Some(op), more: INTO, ..self.call(const { Op::of(NAME) }, way) };
        if self.is_small() {
            return self.staged(call(Way::Staged), 0..len, true, |from, _| {
                // SAFETY: each rank has staged `len` elements; `out` has as many and is ours alone.
                unsafe { looped(from, &[out.as_mut_ptr()], len, Stores::Cached) };
            });
        }
        self.collective(call(Way::Direct), |session: &mut Session<'_, T>| {
            // SAFETY: all have `len` elements; `out` is ours alone, and nobody writes any part.
            unsafe { session.reduce(looped, 0..len, &[out.as_mut_ptr()]) };
            Ok(())
        })
    }

    /// As [`Symmetric::all_reduce_into`], of `input`, which is put into this memory first. Collective.
    pub fn all_reduce_from(&mut self, input: &[T], op: ReduceOp, out: &mut [T]) -> Result<()> {
        super::check_len(self.group(), NAME, "an input", self.len(), input.len())?;
        // Shorter while the memory is suspended: then the call says why.
        if self.local_mut().len() == input.len() {
            self.local_mut().copy_from_slice(input);
        }
        self.all_reduce_into(op, out)
    }
}
