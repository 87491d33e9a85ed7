//! Collectives over symmetric memory.

mod host;
mod op;

pub use op::ReduceOp;
