//! Symmetric memory: every rank allocates a buffer of the same size, a rendezvous maps all peers'
//! buffers into each rank, and from then on ranks load, store and signal in each other's memory.
#![deny(unsafe_code, missing_docs)]

pub mod error;
pub mod store;
pub mod sync;

pub use error::{Error, Result};
pub use sync::Deadline;
