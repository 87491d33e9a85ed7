//! Collectives over symmetric memory.

mod host;
