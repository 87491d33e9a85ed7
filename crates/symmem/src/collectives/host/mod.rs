//! The loops of the collectives on host memory.

mod reduce;
