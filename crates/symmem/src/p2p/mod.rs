//! Messages from one rank to another: the ring in shared memory that carries them, and how the receiver puts them together.
//!
//! A message travels in fragments. The first says what it is; the receiver copies a message that a thread waits for straight
//! to where it goes, and keeps others in its own memory until they are asked for.

mod far;
mod fragment;
#[cfg(fuzzing)]
pub mod fuzzing;
mod incoming;
mod mapped;
mod ring;
#[cfg(any(test, fuzzing))]
mod scripted;
#[cfg(test)]
mod tests;

pub(crate) use far::{FarQueue, FarSent, FarSource, FarTaken};
pub(crate) use fragment::{Fragment, Invalid, Kind, Words};
pub(crate) use incoming::{Incoming, Outcome, Post, Source, number_after};
pub(crate) use mapped::{Mapped, RING_BYTES};
#[cfg(loom)]
pub use ring::RingMemory;
pub use ring::{Reader, Writer};

/// The most bytes of data in a fragment. Small enough that sender and receiver copy at the same time.
pub(crate) const MOST: usize = 32 << 10;
