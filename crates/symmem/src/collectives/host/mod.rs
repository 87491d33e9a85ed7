//! The loops of the collectives on host memory.

mod number;
mod reduce;
