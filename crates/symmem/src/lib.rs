//! Symmetric memory: every rank allocates a buffer of the same size, a rendezvous maps all peers'
//! buffers into each rank, and from then on ranks load, store and signal in each other's memory.
//!
//! ```
//! use symmem::World;
//!
//! // Three ranks as threads; `World::from_env()` joins ranks that are processes.
//! let sums = World::threads(3, |world| -> symmem::Result<f32> {
//!     let mut x = world.alloc::<f32>(1024)?.rendezvous(&world)?; // every peer is mapped
//!     x.local_mut().fill(world.rank() as f32);
//!     let shared = x.share()?; // barrier: from here every rank may read every part
//!     let sum = (0..world.size()).map(|r| shared.peer(r).map(|part| part[0])).sum();
//!     let _x = shared.release()?; // barrier: from here each rank owns its part again
//!     sum
//! })?;
//! assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 3.0)));
//! # Ok::<(), symmem::Error>(())
//! ```
//!
//! Nothing here waits for ever: every wait has a deadline and watches its peers, and every failure is an
//! [`Error`] that names the rank, the operation and what was waited for.
#![deny(unsafe_code, missing_docs)]
#![cfg_attr(not(loom), warn(missing_debug_implementations))]
// Without devices, hooks that only they use are left.
#![cfg_attr(not(all(feature = "cuda", feature = "ucx")), allow(dead_code, unused_imports))]

mod collectives;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dtype;
mod error;
mod group;
mod interrupt;
mod machine;
mod memory;
mod mesh;
#[cfg(feature = "cuda")]
pub mod nccl;
mod p2p;
mod private;
mod queue;
mod signal;
pub mod store;
mod symmetric;
mod sync;
mod wire;

/// For the `symmem` program, its benchmark, its Python package and its tests. Not part of the interface: it may change in any release.
#[doc(hidden)]
pub mod internals {
    pub use crate::collectives::plan;
    pub use crate::collectives::registered::{Registered, Registrations};
    pub use crate::group::{set_signal_pad_size, signal_pad_size};
    pub use crate::machine::{Costs, InUse, Measured, Origin, costs_path, measure};
    #[cfg(fuzzing)]
    pub use crate::mesh::fuzzing::frames as fuzz_frames;
    pub use crate::mesh::{between_hosts, host_identity};
    #[cfg(fuzzing)]
    pub use crate::p2p::fuzzing::messages as fuzz_messages;
}

/// What the models in `tests/loom.rs` explore.
#[cfg(loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::p2p::{Reader, RingMemory, Writer};
    pub use crate::signal::{Layout, Pads, Signals, Slot, Stop};
    pub use crate::sync::{LATE_STORES, Ordering, Word};
}

pub use collectives::Algorithm;
pub use dtype::{Bool, DType, Element, F8E4M3, F8E5M2, Number, Order, ReduceOp};
pub use error::{Error, ErrorKind, Failed, Result};
pub use group::{DEFAULT_SIGNAL_PAD_SIZE, Group, GroupBuilder, World, WorldBuilder};
pub use half::{bf16, f16};
pub use interrupt::interruptible;
pub use memory::Device;
pub use num_complex::Complex;
pub use queue::{Pending, Queue, Scope};
pub use symmetric::{Atomic, Buffer, Handle, Open, Paused, Pool, Shared, SignalPad, Symmetric};
pub use sync::Deadline;

/// Only so that the example of the readme is tested.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}

/// Only so that the recipes are tested.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../../../docs/recipes.md")]
mod recipes {}
