//! The loops of the collectives on host memory.

pub(crate) mod copy;
pub(crate) mod reduce;
