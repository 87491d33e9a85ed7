//! Transports of messages between groups on different hosts: the mesh's own connections, or UCX's active messages.
//!
//! Both deliver the messages of one rank to another in the order of posting, each once, to the mesh's listeners. The ranks choose
//! a transport when their world forms: see `choice.rs`.

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
use crate::mesh::{FarConnection, Mesh};
use crate::sync::Deadline;

/// Sends messages to ranks of other hosts, by their ranks in the world.
pub(crate) trait Transport: Send + Sync {
    /// The most bytes of one message.
    fn most(&self) -> usize;

    /// Sends a message without waiting: the caller's protocol bounds how many are unanswered. Messages to a lost rank are
    /// dropped.
    fn post(&self, to: usize, group: u128, bytes: Vec<u8>) {
        self.post_all(to, group, &[[&bytes, &[]]]);
    }

    /// As `post`, for several messages.
    fn post_all(&self, to: usize, group: u128, messages: &[Parts<'_>]);

    /// As `post`, for messages that are not urgent: they go with the next message, or within some milliseconds.
    fn post_soon(&self, to: usize, group: u128, messages: &[Parts<'_>]);

    /// Receives messages, at least from these ranks of other hosts. For threads that poll.
    fn progress(&self, from: &[usize]);

    /// From here on, nothing of this rank is received into memory that was lent. If it is being received, this waits until what has come
    /// lies there.
    fn end_loan(&self, _from: usize) {}

    /// As `post_soon`, but waits until there is room. If it fails, the first of the messages may have been sent.
    fn send(
        &self,
        to: usize,
        group: u128,
        messages: &[Parts<'_>],
        deadline: Deadline,
    ) -> Result<()>;
}

/// A message: what it begins with, and data that need not be copied behind that.
pub(crate) type Parts<'a> = [&'a [u8]; 2];

/// Over the mesh's connections.
struct OverMesh {
    lines: Vec<Option<FarConnection>>,
    most: usize,
}

impl OverMesh {
    fn new(mesh: &Mesh) -> Self {
        let lines: Vec<_> = (0..mesh.size()).map(|rank| mesh.far_connection(rank)).collect();
        let most = lines.iter().flatten().map(FarConnection::most).min().unwrap_or_default();
        Self { lines, most }
    }

    fn line(&self, to: usize) -> Option<&FarConnection> {
        self.lines.get(to)?.as_ref()
    }
}

impl Transport for OverMesh {
    fn most(&self) -> usize {
        self.most
    }

    fn post_all(&self, to: usize, group: u128, messages: &[Parts<'_>]) {
        if let Some(line) = self.line(to) {
            line.post(group, messages);
        }
    }

    fn post_soon(&self, to: usize, group: u128, messages: &[Parts<'_>]) {
        if let Some(line) = self.line(to) {
            line.post_soon(group, messages);
        }
    }

    fn end_loan(&self, from: usize) {
        if let Some(line) = self.line(from) {
            line.end_loan();
        }
    }

    fn progress(&self, from: &[usize]) {
        from.iter().filter_map(|&rank| self.line(rank)).for_each(FarConnection::take_in);
    }

    fn send(
        &self,
        to: usize,
        group: u128,
        messages: &[Parts<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.line(to).map_or(Ok(()), |line| line.send(group, messages, deadline))
    }
}
