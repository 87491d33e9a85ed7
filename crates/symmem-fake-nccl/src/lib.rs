//! Stands in for NCCL where there is no device: its functions, for ranks that are threads of one process, or one thread.
//!
//! - Memory of devices is memory of this process. The last rank to call a collective does it, in rank order.
//! - A communicator that does not block is in progress until its call was done by all ranks: one that never comes leaves the
//!   others so, until they abort. One that blocks only puts into its stream, which is done when the last rank has; but to
//!   be made, split and given windows it waits.
//! - It is strict: a handle that is not live, a call while another goes on, and ranks that call different things are errors.
//! - [`script`] says what it answers: its version, failures, what is left.
//!
//! [`driver`] has functions of the CUDA driver for Python's tests.
#![allow(non_snake_case, clippy::missing_safety_doc, reason = "C's names and rules")]

mod arithmetic;
mod calls;
mod communicators;
pub mod driver;
mod group;
mod memory;
pub mod script;
mod state;
mod work;

/// Codes of `ncclResult_t`.
pub(crate) mod code {
    pub(crate) type Code = std::ffi::c_int;
    pub(crate) const SUCCESS: Code = 0;
    pub(crate) const INVALID_ARGUMENT: Code = 4;
    pub(crate) const INVALID_USAGE: Code = 5;
    pub(crate) const IN_PROGRESS: Code = 7;
}
