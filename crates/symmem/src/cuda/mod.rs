//! Symmetric memory of NVIDIA devices, through the driver.
//!
//! Everything works in the device's primary context, which all libraries of a process share, and on the caller's streams.
//! Nothing is synchronised but what is given back. Kernels never trap: what goes wrong in one is an [`Error`] of every later
//! call on the group, and of whatever takes results off the device, until all ranks call [`Group::resync`](crate::Group::resync).

mod collectives;
mod comm;
mod copies;
mod fabric;
mod failures;
mod gpu;
mod graph;
mod kernels;
mod layout;
mod mailbox;
mod memory;
mod module;
mod multicast;
mod multimem;
mod nvshmem;
mod order;
mod placement;
mod replays;
mod room;
mod rows;
mod signals;
mod source;
mod stream;
mod symmetric;
mod tiles;

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

pub(crate) use comm::exchange;
pub(crate) use source::Provider;

use symmem_sys::cuda::Failure;

use crate::error::Error;

/// The driver's failure, as an error of this library.
fn failed(failure: Failure) -> Error {
    Error::Driver { call: failure.call, why: failure.to_string() }
}
