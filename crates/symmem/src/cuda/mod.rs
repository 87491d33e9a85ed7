//! Symmetric memory of NVIDIA devices, through the driver.
//!
//! Everything works in the device's primary context, which all libraries of a process share, and on the caller's streams.
//! Nothing is synchronised but what is given back. Kernels never trap: what goes wrong in one is an [`Error`] of every later
//! call on the group, and of whatever takes results off the device, until all ranks call [`Group::resync`](crate::Group::resync).

mod algorithm;
mod collectives;
mod comm;
mod copies;
mod failures;
mod gpu;
mod graph;
mod kernels;
mod layout;
mod mailbox;
mod module;
mod multimem;
pub(crate) mod nvshmem;
mod order;
mod placement;
mod replays;
mod room;
mod rows;
mod signals;
mod stream;
mod symmetric;
mod tiles;

pub use algorithm::Algorithm;
pub use gpu::Gpu;
pub use graph::Graph;
#[doc(hidden)]
pub use kernels::ptx_files;
pub use layout::DeviceHandle;
pub use module::{HEADER, Kernel, Module, Parameter};
pub use nvshmem::{Nvshmem, SignalOp};
pub use signals::Until;
pub use stream::Stream;
pub use symmetric::{Buffer, Symmetric, View, ViewMut};
pub use tiles::{Tile, TileMut};

pub(crate) use gpu::InUse;
pub(crate) use rows::Rows;
pub(crate) use symmetric::upload;

use symmem_sys::cuda::Failure;

use crate::error::Error;

/// The driver's failure, as an error of this library.
pub(crate) fn failed(failure: Failure) -> Error {
    let (call, code, why) = (failure.call, Some(failure.code), failure.to_string());
    Error::Driver { library: "CUDA", call, code, why }
}
