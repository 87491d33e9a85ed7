//! The loops of the collectives on host memory.

pub(crate) mod copy;
mod environment;
pub(crate) mod reduce;
