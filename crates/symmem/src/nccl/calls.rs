//! Collectives of a communicator, each of which puts work into a stream.
#![allow(unsafe_code)] // S1, S3, S4, S5: lengths are checked here; sources and targets vouch for addresses

use super::communicator::Communicator;
use super::elements::{Operator, Source, Target, moved, reduced};
use super::forming::check_rank;
use crate::cuda::Stream;
use crate::dtype::DType;
use crate::error::Result;

impl Communicator {
    /// Everyone's `from` in one, into everyone's `to`. Collective; done when the streams get there.
    pub fn all_reduce<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: impl Into<Target<'a>>,
        op: impl Into<Operator>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "all_reduce";
        let (from, to) = (from.into(), to.into());
        self.check_len(OP, (from.len, from.dtype), (to.len, to.dtype))?;
        let (span, op) = reduced(OP, self.rank(), from.len, from.dtype, op.into())?;
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: as long as each other, and live in the stream.
            unsafe { nccl.all_reduce(comm, from.address, to.address, span, op, stream.raw()) }
        })
    }

    /// As [`all_reduce`](Self::all_reduce), of elements that are replaced.
    pub fn all_reduce_in_place<'a>(
        &self,
        elements: impl Into<Target<'a>>,
        op: impl Into<Operator>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "all_reduce";
        let to = elements.into();
        let (span, op) = reduced(OP, self.rank(), to.len, to.dtype, op.into())?;
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: live in the stream.
            unsafe { nccl.all_reduce(comm, to.address, to.address, span, op, stream.raw()) }
        })
    }

    /// Everyone's `from` in one, into `to` of the root; that of others is not looked at. Collective.
    pub fn reduce<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: Option<Target<'a>>,
        op: impl Into<Operator>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "reduce";
        let from = from.into();
        let to = self.at_root(OP, to, (root, "write"))?;
        if let Some(to) = &to {
            self.check_len(OP, (from.len, from.dtype), (to.len, to.dtype))?;
        }
        let to = to.map_or(0, |to| to.address);
        let (span, op) = reduced(OP, self.rank(), from.len, from.dtype, op.into())?;
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: as long as each other, and live in the stream; only the root writes.
            unsafe { nccl.reduce(comm, from.address, to, span, op, root, stream.raw()) }
        })
    }

    /// The root's elements into everyone's. Collective.
    pub fn broadcast<'a>(
        &self,
        elements: impl Into<Target<'a>>,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "broadcast";
        let to = elements.into();
        self.check_root(OP, root)?;
        let span = moved(to.len, to.dtype);
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: live in the stream.
            unsafe { nccl.broadcast(comm, to.address, to.address, span, root, stream.raw()) }
        })
    }

    /// Everyone's `from`, one after the other in rank order, into everyone's `to`. Collective.
    pub fn all_gather<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: impl Into<Target<'a>>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "all_gather";
        let (from, to) = (from.into(), to.into());
        self.check_len(OP, (from.len * self.size(), from.dtype), (to.len, to.dtype))?;
        let span = moved(from.len, from.dtype);
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: as long as all ranks' parts, and live in the stream.
            unsafe { nccl.all_gather(comm, from.address, to.address, span, stream.raw()) }
        })
    }

    /// Everyone's `from` in one, of which each rank gets the part of its number into `to`. Collective.
    pub fn reduce_scatter<'a>(
        &self,
        from: impl Into<Source<'a>>,
        to: impl Into<Target<'a>>,
        op: impl Into<Operator>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "reduce_scatter";
        let (from, to) = (from.into(), to.into());
        self.check_len(OP, (from.len, from.dtype), (to.len * self.size(), to.dtype))?;
        let (span, op) = reduced(OP, self.rank(), to.len, to.dtype, op.into())?;
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: as long as all ranks' parts, and live in the stream.
            unsafe { nccl.reduce_scatter(comm, from.address, to.address, span, op, stream.raw()) }
        })
    }

    /// Sends to `peer`, who receives as much from this rank. Between two ranks, what is sent arrives in the order of the calls.
    pub fn send<'a>(
        &self,
        from: impl Into<Source<'a>>,
        peer: usize,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "send";
        let from = from.into();
        self.check_root(OP, peer)?;
        let span = moved(from.len, from.dtype);
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: live in the stream.
            unsafe { nccl.send(comm, from.address, span, peer, stream.raw()) }
        })
    }

    /// Receives from `peer`, who sends as much to this rank: there for what comes after in `stream`.
    pub fn recv<'a>(&self, to: impl Into<Target<'a>>, peer: usize, stream: &Stream) -> Result<()> {
        const OP: &str = "recv";
        let to = to.into();
        self.check_root(OP, peer)?;
        let span = moved(to.len, to.dtype);
        self.call(OP, stream, |nccl, comm| {
            // SAFETY: live in the stream.
            unsafe { nccl.recv(comm, to.address, span, peer, stream.raw()) }
        })
    }

    /// The root's elements, which others need not have, to do `what` with.
    pub(super) fn at_root<E>(
        &self,
        op: &'static str,
        elements: Option<E>,
        (root, what): (usize, &str),
    ) -> Result<Option<E>> {
        self.check_root(op, root)?;
        match elements.filter(|_| self.rank() == root) {
            None if self.rank() == root => {
                Err(self.usage(op, format!("elements to {what} at the root"), "none".into()))
            }
            elements => Ok(elements),
        }
    }

    pub(super) fn check_root(&self, op: &'static str, root: usize) -> Result<()> {
        check_rank(op, root, self.size()).map_err(|e| e.at_rank(self.rank()))
    }

    pub(super) fn check_len(
        &self,
        op: &'static str,
        (expected, dtype): (usize, DType),
        got: (usize, DType),
    ) -> Result<()> {
        if (expected, dtype) == got {
            return Ok(());
        }
        let got = format!("{} of {}", got.0, got.1);
        Err(self.usage(op, format!("{expected} elements of {dtype} to write"), got))
    }
}
