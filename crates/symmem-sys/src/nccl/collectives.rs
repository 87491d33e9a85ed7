//! Collectives, and sending and receiving. All only put work into a stream.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::{Comm, DataType, Nccl, RedOp, Result, int};
use crate::cuda::Stream;
use crate::table::methods;

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
#[allow(clippy::missing_safety_doc, clippy::too_many_arguments)] // said once, above; as in C
impl Nccl {
    methods! {
        /// `ncclAllReduce`: `span.count` elements of everyone's `from` into everyone's `to`.
        pub unsafe fn all_reduce(
            comm: Comm, from: u64, to: u64, span: Span, op: RedOp, stream: Stream,
        ) = ncclAllReduce(
            from, to, span.count, span.kind as c_int, op.0, comm.raw(), stream.raw(),
        ) since span.kind.since();

        /// `ncclReduce`: into `to` of the root only.
        pub unsafe fn reduce(
            comm: Comm, from: u64, to: u64, span: Span, op: RedOp, root: usize, stream: Stream,
        ) = ncclReduce(
            from, to, span.count, span.kind as c_int, op.0, int(root), comm.raw(), stream.raw(),
        ) since span.kind.since();

        /// `ncclBroadcast`: the root's `from` into everyone's `to`.
        pub unsafe fn broadcast(
            comm: Comm, from: u64, to: u64, span: Span, root: usize, stream: Stream,
        ) = ncclBroadcast(
            from, to, span.count, span.kind as c_int, int(root), comm.raw(), stream.raw(),
        ) since span.kind.since();

        /// `ncclAllGather`: `span.count` elements of each rank, in rank order.
        pub unsafe fn all_gather(comm: Comm, from: u64, to: u64, span: Span, stream: Stream) =
            ncclAllGather(from, to, span.count, span.kind as c_int, comm.raw(), stream.raw())
            since span.kind.since();

        /// `ncclReduceScatter`: `span.count` elements for each rank, in rank order.
        pub unsafe fn reduce_scatter(
            comm: Comm, from: u64, to: u64, span: Span, op: RedOp, stream: Stream,
        ) = ncclReduceScatter(
            from, to, span.count, span.kind as c_int, op.0, comm.raw(), stream.raw(),
        ) since span.kind.since();

        /// `ncclSend`
        pub unsafe fn send(comm: Comm, from: u64, span: Span, peer: usize, stream: Stream) =
            ncclSend(from, span.count, span.kind as c_int, int(peer), comm.raw(), stream.raw())
            since span.kind.since();

        /// `ncclRecv`
        pub unsafe fn recv(comm: Comm, to: u64, span: Span, peer: usize, stream: Stream) =
            ncclRecv(to, span.count, span.kind as c_int, int(peer), comm.raw(), stream.raw())
            since span.kind.since();
    }
}
