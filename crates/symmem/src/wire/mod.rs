//! How what groups tell ranks of other hosts gets there: over the mesh's own connections, or by UCX's active messages.
//!
//! Both bring the messages of one rank to another in the order in which they were posted, each once, and hand them to the
//! mesh's listeners. The ranks choose one of them when their world forms: see `choice.rs`.

mod choice;
#[cfg(feature = "ucx")]
mod devices;
#[cfg(feature = "ucx")]
mod inbound;
#[cfg(feature = "ucx")]
mod message;
#[cfg(feature = "ucx")]
mod outbound;
#[cfg(feature = "ucx")]
mod peers;
#[cfg(all(test, feature = "ucx"))]
mod tests;
#[cfg(feature = "ucx")]
mod ucx;

pub(crate) use choice::{Choice, Offer};

use crate::error::Result;
use crate::mesh::{FarLine, MOST, Mesh};
use crate::sync::Deadline;

/// Brings messages to ranks of other hosts, by their numbers in the world.
pub(crate) trait Transport: Send + Sync {
    /// The most bytes of one message.
    fn most(&self) -> usize;

    /// Hands a message over, without waiting: callers post no more than their protocol has under way. What a lost rank is told
    /// is lost.
    fn post(&self, to: usize, group: u128, bytes: Vec<u8>);

    /// As `post`, for what nobody waits for urgently: it goes with the next message, or within some milliseconds.
    fn post_soon(&self, to: usize, group: u128, bytes: Parts<'_>);

    /// Takes in what has come, at least from these ranks of other hosts. For threads that look again and again.
    fn progress(&self, from: &[usize]);

    /// As `post`, once there is room for it.
    fn send(&self, to: usize, group: u128, bytes: Parts<'_>, deadline: Deadline) -> Result<()>;
}

/// A message: what it begins with, and data that need not be copied behind that.
pub(crate) type Parts<'a> = [&'a [u8]; 2];

/// Over the mesh's connections.
struct OverMesh(Vec<Option<FarLine>>);

impl OverMesh {
    fn new(mesh: &Mesh) -> Self {
        Self((0..mesh.size()).map(|rank| mesh.far_line(rank)).collect())
    }

    fn line(&self, to: usize) -> Option<&FarLine> {
        self.0.get(to)?.as_ref()
    }
}

impl Transport for OverMesh {
    fn most(&self) -> usize {
        MOST
    }

    fn post(&self, to: usize, group: u128, bytes: Vec<u8>) {
        if let Some(line) = self.line(to) {
            line.post(group, bytes);
        }
    }

    fn post_soon(&self, to: usize, group: u128, bytes: Parts<'_>) {
        if let Some(line) = self.line(to) {
            line.post_soon(group, bytes);
        }
    }

    fn progress(&self, from: &[usize]) {
        from.iter().filter_map(|&rank| self.line(rank)).for_each(FarLine::take_in);
    }

    fn send(&self, to: usize, group: u128, bytes: Parts<'_>, deadline: Deadline) -> Result<()> {
        self.line(to).map_or(Ok(()), |line| line.send(group, bytes, deadline))
    }
}
