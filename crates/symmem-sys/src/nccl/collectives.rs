//! Collectives, and sending and receiving. All only put work into a stream.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::{Comm, DataType, FLOAT8, Nccl, RedOp, Result, int};
use crate::cuda::Stream;

/// What a call moves: elements of one type, on the devices of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Elements, as the function counts them.
    pub count: usize,
    /// Their type.
    pub kind: DataType,
}

/// # Safety
///
/// Of all of them: the communicator and the stream are live and of one device, whose context is current. The addresses are of
/// memory that the device can use, as long as the function's documentation says, until the stream has passed; nobody else
/// writes it meanwhile, nor reads what is written.
impl Nccl {
    /// `ncclAllReduce`: `span.count` elements of everyone's `from` into everyone's `to`.
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn all_reduce(
        &self,
        comm: Comm,
        from: u64,
        to: u64,
        span: Span,
        op: RedOp,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclAllReduce", comm, span, stream)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclAllReduce(from, to, span.count, kind, op.0, comm, stream) }
    }

    /// `ncclReduce`: into `to` of the root only.
    #[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
    pub unsafe fn reduce(
        &self,
        comm: Comm,
        from: u64,
        to: u64,
        span: Span,
        op: RedOp,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclReduce", comm, span, stream)?;
        let root = int(root);
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclReduce(from, to, span.count, kind, op.0, root, comm, stream) }
    }

    /// `ncclBroadcast`: the root's `from` into everyone's `to`.
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn broadcast(
        &self,
        comm: Comm,
        from: u64,
        to: u64,
        span: Span,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclBroadcast", comm, span, stream)?;
        let root = int(root);
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclBroadcast(from, to, span.count, kind, root, comm, stream) }
    }

    /// `ncclAllGather`: `span.count` elements of each rank, in rank order.
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn all_gather(
        &self,
        comm: Comm,
        from: u64,
        to: u64,
        span: Span,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclAllGather", comm, span, stream)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclAllGather(from, to, span.count, kind, comm, stream) }
    }

    /// `ncclReduceScatter`: `span.count` elements for each rank, in rank order.
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn reduce_scatter(
        &self,
        comm: Comm,
        from: u64,
        to: u64,
        span: Span,
        op: RedOp,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclReduceScatter", comm, span, stream)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclReduceScatter(from, to, span.count, kind, op.0, comm, stream) }
    }

    /// `ncclSend`
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn send(
        &self,
        comm: Comm,
        from: u64,
        span: Span,
        peer: usize,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclSend", comm, span, stream)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclSend(from, span.count, kind, int(peer), comm, stream) }
    }

    /// `ncclRecv`
    #[allow(clippy::missing_safety_doc)]
    pub unsafe fn recv(
        &self,
        comm: Comm,
        to: u64,
        span: Span,
        peer: usize,
        stream: Stream,
    ) -> Result<()> {
        let (kind, comm, stream) = self.arguments("ncclRecv", comm, span, stream)?;
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclRecv(to, span.count, kind, int(peer), comm, stream) }
    }

    /// What all take, in C's types. A library without 8-bit floats would take them for nonsense.
    fn arguments(
        &self,
        call: &'static str,
        comm: Comm,
        span: Span,
        stream: Stream,
    ) -> Result<(c_int, usize, usize)> {
        if matches!(span.kind, DataType::F8E4M3 | DataType::F8E5M2) {
            self.needs(call, FLOAT8)?;
        }
        Ok((span.kind as c_int, comm.raw(), stream.raw()))
    }
}
