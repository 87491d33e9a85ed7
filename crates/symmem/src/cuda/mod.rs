//! Symmetric memory of NVIDIA devices, through the driver.
//!
//! Everything works in the device's primary context, which all libraries of a process share, and on the caller's streams.
//! Only freeing waits for the device. Kernels never trap: a failure in one is an [`Error`] of every later call on the group,
//! and of every call that takes results off the device, until all ranks call [`Group::resync`](crate::Group::resync).

/// `Debug` of a type with some of its fields, or what is made of them: not its elements, which need not have it.
macro_rules! debug_of {
    ([$($of:tt)*] $type:ty, $name:literal: |$this:ident| $($field:ident = $value:expr),*) => {
        impl<$($of)*> std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct($name)
                    $(.field(stringify!($field), &$value))*
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use debug_of;

mod collectives;
mod device;
mod group;
mod memory;
pub(crate) mod nvshmem;
mod signals;
mod stream;
mod symmetric;

pub use collectives::algorithm::Algorithm;
pub use collectives::tiles::{Tile, TileMut};
pub use device::gpu::Gpu;
#[doc(hidden)]
pub use device::kernels::ptx_files;
pub use device::module::{HEADER, Kernel, Module, Parameter};
pub use group::layout::DeviceHandle;
pub use nvshmem::{Nvshmem, SignalOp};
pub use signals::Until;
pub use stream::Stream;
pub use stream::graph::Graph;
pub use symmetric::{Buffer, Symmetric, View, ViewMut};

pub(crate) use collectives::rows::Rows;
pub(crate) use device::gpu::InUse;
pub(crate) use symmetric::upload;

use symmem_sys::cuda::Failure;

use crate::error::Error;

/// The driver's failure, as an error of this library.
pub(crate) fn failed(failure: Failure) -> Error {
    let (call, code, why) = (failure.call, Some(failure.code), failure.to_string());
    Error::Driver { library: "CUDA", call, code, why }
}
