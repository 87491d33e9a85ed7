//! All-reduce: every rank gets the reduction of all ranks' elements.
#![allow(unsafe_code)] // S2, S3

use super::host::copy::Stores;
use super::host::reduce::Reduce;
use super::slices::{self, Slice};
use super::staged::{Input, exchange, pieces, sources};
use super::{PerRank, check_len, copy_bytes, loop_for, plan, share};
use crate::dtype::{Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Op, Staging, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

const NAME: &str = "all_reduce";
/// Sets calls whose result goes elsewhere apart from those in place.
const INTO: [usize; 3] = [1, 0, 0];

/// How an all-reduce is done. All algorithms give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// The one that the cost model expects to be the fastest.
    #[default]
    Auto,
    /// Every rank stages its elements with its flag, and reduces what all have staged: one barrier. Longer parts go in
    /// pieces.
    Staged,
    /// Every rank reduces all elements for itself.
    OneShot,
    /// Every rank reduces its share of the elements and stores it to all ranks: each byte crosses once in each direction.
    TwoShot,
}

impl<T: Number> Symmetric<T> {
    /// In place: element i becomes the reduction of element i of all ranks. Collective.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<f32>(1000)?.rendezvous(&world)?;
    /// x.local_mut().fill(world.rank() as f32);
    /// x.all_reduce(symmem::ReduceOp::Sum)?;
    /// assert!(x.local().iter().all(|sum| *sum == 3.0));
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_reduce(&mut self, op: ReduceOp) -> Result<()> {
        self.all_reduce_with(op, Algorithm::Auto)
    }

    /// As [`Symmetric::all_reduce`], by the given algorithm.
    pub fn all_reduce_with(&mut self, op: ReduceOp, algorithm: Algorithm) -> Result<()> {
        let reduce = loop_for::<T>(self.group(), NAME, op)?;
        all_reduce(self.memory(), (op, reduce), algorithm)
    }

    /// Into `out`, leaving this memory as it is. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut x = world.alloc::<i32>(2)?.rendezvous(&world)?;
    /// x.local_mut().copy_from_slice(&[1, 2]);
    /// let mut sum = [0; 2];
    /// x.all_reduce_into(symmem::ReduceOp::Sum, &mut sum)?;
    /// assert_eq!((sum, x.local()), ([2, 4], &[1, 2][..]));
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_reduce_into(&mut self, op: ReduceOp, out: &mut [T]) -> Result<()> {
        let reduce = loop_for::<T>(self.group(), NAME, op)?;
        check_len(self.group(), NAME, "an output", self.len(), out.len())?;
        all_reduce_into(self.memory(), (op, reduce), out.as_mut_ptr().cast())
    }

    /// Copies `input` into this memory, then does [`Symmetric::all_reduce_into`]. Collective.
    pub fn all_reduce_from(&mut self, input: &[T], op: ReduceOp, out: &mut [T]) -> Result<()> {
        check_len(self.group(), NAME, "an input", self.len(), input.len())?;
        // Shorter while the memory is suspended: then the call says why.
        if self.local_mut().len() == input.len() {
            self.local_mut().copy_from_slice(input);
        }
        self.all_reduce_into(op, out)
    }
}

/// The way to go: the given one, or the quickest.
fn choose(memory: &Memory, algorithm: Algorithm) -> Result<Way> {
    let (group, bytes) = (memory.group(), memory.bytes());
    let chosen = match algorithm {
        // What travels in the line of the flag needs no thought, and has no time for any.
        Algorithm::Auto if bytes <= Staging::TINY => Algorithm::Staged,
        Algorithm::Auto => {
            let (rates, ranks) = (group.rates()?, group.size());
            let chosen = plan::quickest(rates, bytes, ranks);
            tracing::debug!(op = NAME, bytes, ranks, ?chosen, because = ?plan::estimate(rates, bytes, ranks));
            chosen
        }
        given => given,
    };
    Ok(match chosen {
        Algorithm::Staged => Way::Staged,
        Algorithm::OneShot => Way::OneShot,
        _ => Way::TwoShot,
    })
}

fn all_reduce(
    memory: &Memory,
    (op, reduce): (ReduceOp, Reduce),
    algorithm: Algorithm,
) -> Result<()> {
    if memory.group().spans_hosts() {
        let call = memory.call(const { Op::of(NAME) }, Way::Any);
        return across(memory, None, Call { operator: Some(op), ..call }, reduce);
    }
    let way = choose(memory, algorithm)?;
    let call = Call { operator: Some(op), ..memory.call(const { Op::of(NAME) }, way) };
    match way {
        Way::Staged => staged(memory, &call, reduce),
        Way::OneShot => one_shot(memory, &call, reduce),
        _ => two_shot(memory, &call, reduce),
    }
}

/// In place, or into `out`, where ranks are on several hosts: there, no rank reaches all parts.
#[cold]
fn across(memory: &Memory, out: Option<*mut u8>, mut call: Call, reduce: Reduce) -> Result<()> {
    let group = memory.group();
    if let Some(span) = group.span() {
        call.way = slices::way_across(group, span, &call)?;
    }
    let mut running = memory.begin_staged(&call)?;
    if let Some(out) = out {
        running.barrier()?; // ranks that make different calls leave `out` as it is
        // SAFETY: nobody else touches our part or `out`, which has room for it.
        unsafe { copy_bytes(memory.own(0), out, memory.bytes()) };
    }
    let data = Slice::new(out.unwrap_or(memory.own(0)), memory.len(), memory.dtype());
    slices::reduce_across(group, &mut running, data, reduce, call.way)
}

/// Through the staging buffers, one after the other.
fn staged(memory: &Memory, call: &Call, reduce: Reduce) -> Result<()> {
    let size = memory.size();
    let mut running = memory.begin_staged(call)?;
    let mut places = PerRank::new();
    for piece in pieces(memory.len(), size, 1, || memory.group().stage()) {
        let (own, bytes) = (memory.own(piece.start), piece.len() * size);
        // SAFETY: a piece of our own part.
        let staging = unsafe { exchange(&mut running, &Input::one(own, bytes)) }?;
        let from = sources(&mut places, memory.group(), &staging, bytes, 0, own);
        // SAFETY: each rank has staged as many elements; our part has them too, and is ours alone.
        unsafe { reduce(from, &[own], piece.len(), Stores::Cached) };
    }
    Ok(())
}

/// Every rank reduces everything, and stores it once all have read its part.
#[inline(never)] // or the way of a small message would have to save its registers
fn one_shot(memory: &Memory, call: &Call, reduce: Reduce) -> Result<()> {
    let mut session = memory.enter(call)?;
    let mut whole: Vec<u8> = Vec::with_capacity(memory.bytes());
    // SAFETY: the vector has room for a part; peers only read until they synchronise.
    unsafe { session.reduce(reduce, 0..memory.len(), &[whole.as_mut_ptr()]) };
    session.synchronize()?;
    // SAFETY: nobody reads our part any more.
    unsafe { copy_bytes(whole.as_ptr(), memory.own(0), memory.bytes()) };
    session.leave()
}

/// Every rank reduces its share, and stores it with all.
#[inline(never)]
fn two_shot(memory: &Memory, call: &Call, reduce: Reduce) -> Result<()> {
    let session = memory.enter(call)?;
    let own = share(memory.len(), memory.size(), session.rank(), session.size());
    let mut to = PerRank::new();
    let to = to.fill(session.size(), |rank| memory.part(rank, own.start));
    // SAFETY: within all parts; no other rank touches the elements of our share.
    unsafe { session.reduce(reduce, own, to) };
    session.leave()
}

/// Into `out`, which has room for a part.
fn all_reduce_into(memory: &Memory, (op, reduce): (ReduceOp, Reduce), out: *mut u8) -> Result<()> {
    let stores = plan::results(memory.bytes(), 1);
    let call = memory.call(const { Op::of(NAME) }, Way::Direct);
    let call = Call { operator: Some(op), more: INTO, ..call };
    if memory.group().spans_hosts() {
        return across(memory, Some(out), call, reduce);
    }
    memory.read_parts(call, true, |parts| {
        // SAFETY: nobody writes any part; `out` has room for one and is ours alone.
        unsafe { reduce(parts, &[out], memory.len(), stores) };
    })
}
