//! Messages from one rank of a group to another, matched by sender and tag.
//!
//! Messages are no calls of the group's sequence: they need no order among the ranks, and a failure of one leaves the group in
//! step. What connects two ranks is made when one first sends to the other: a ring in shared memory, or between hosts nothing.
//!
//! Whoever waits for a message, or for room to send one, takes in what all others have sent meanwhile, so that ranks which
//! wait for each other go on. Locks are held while a thread waits, so all others only try them.

mod receiving;
mod sending;

use std::sync::{Mutex, OnceLock};

use super::Group;
use crate::dtype::Element;
use crate::error::Result;
use crate::p2p::FarQueue;
use crate::sync::Deadline;
use crate::sync::atomic::AtomicU32;
use receiving::Inbound;
use sending::Outbound;

/// What a rank has sent to and got from the others of a group; nothing until the first message.
#[derive(Default)]
pub(super) struct P2p {
    peers: OnceLock<Box<[Peer]>>,
    /// With which rank the next search for a message of any rank begins, so that all get their chance.
    first: AtomicU32,
}

#[derive(Default)]
struct Peer {
    out: Mutex<Outbound>,
    inbound: Mutex<Inbound>,
    /// Of a rank of another host.
    far: FarQueue,
}

impl P2p {
    fn peers(&self, ranks: usize) -> &[Peer] {
        self.peers.get_or_init(|| std::iter::repeat_with(Peer::default).take(ranks).collect())
    }

    /// The messages of a rank of another host, in a group of so many.
    pub(super) fn far(&self, rank: usize, ranks: usize) -> &FarQueue {
        &self.peers(ranks)[rank].far
    }
}

impl Group {
    /// Sends a message to rank `to`, which takes it by [`Group::recv`] with the same tag. Messages with the same sender and tag
    /// arrive in the order of sending.
    ///
    /// Returns once `data` may be changed, which need not wait for the receiver: some 200 KiB on the way to each rank are buffered,
    /// and a receiver that waits for any message takes in up to 64 MiB more. So ranks that first send to each other and then
    /// receive go on, unless they send more than that. A rank may send to itself.
    ///
    /// Not collective, and threads may send and receive at the same time. A message to a rank on the way to which a larger one
    /// waits for room goes after that one.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let other = 1 - world.rank();
    /// let mut theirs = [0.0; 3];
    /// world.send(&[world.rank() as f32; 3], other, 7)?;
    /// world.recv(&mut theirs, other, 7)?;
    /// assert_eq!(theirs, [other as f32; 3]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u64) -> Result<()> {
        self.send_by(data, to, tag, self.deadline())
    }

    /// As [`Group::send`], until `deadline`. If it fails, the message is withdrawn: no rank receives it, or a part of it. If it
    /// succeeds, and this rank leaves in order, the receiver can still take the message.
    pub fn send_by<T: Element>(
        &self,
        data: &[T],
        to: usize,
        tag: u64,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        self.send_bytes(bytemuck::cast_slice(data), T::DTYPE, (to, tag), deadline.into())
    }

    /// Receives the next message with this tag from rank `from`.
    ///
    /// A message of another length or element type is an [`Error::Mismatch`](crate::Error::Mismatch), which only this rank gets.
    /// The message is consumed then. After any other error the next call gets the message, whole. An error leaves `data`
    /// unspecified.
    ///
    /// If `from` was lost, what it has sent completely is still received; then this is
    /// [`PeerLost`](crate::Error::PeerLost).
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u64) -> Result<()> {
        self.recv_by(data, from, tag, self.deadline())
    }

    /// As [`Group::recv`], until `deadline`.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// let (other, mut data) = (1 - world.rank(), [0_u8; 4]);
    /// let late = world.recv_by(&mut data, other, 0, Duration::from_millis(5)).unwrap_err();
    /// assert_eq!(late.kind(), symmem::ErrorKind::Timeout); // and all calls still work
    /// world.barrier()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn recv_by<T: Element>(
        &self,
        data: &mut [T],
        from: usize,
        tag: u64,
        deadline: impl Into<Deadline>,
    ) -> Result<()> {
        const OP: &str = "recv";
        self.check_rank(OP, from)?;
        let data = bytemuck::cast_slice_mut(data);
        self.receive(OP, Some(from), tag, (T::DTYPE, data), deadline.into()).map(drop)
    }

    /// As [`Group::recv`], from whichever rank has sent a message with this tag. Returns the sender.
    ///
    /// If no message is there, it fails with [`PeerLost`](crate::Error::PeerLost) if any rank of the group was lost, or all others
    /// have left.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// if world.rank() > 0 {
    ///     return world.send(&[world.rank()], 0, 0);
    /// }
    /// for _ in 1..world.size() {
    ///     let mut from_itself = [0];
    ///     let from = world.recv_any(&mut from_itself, 0)?;
    ///     assert_eq!(from_itself, [from]);
    /// }
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn recv_any<T: Element>(&self, data: &mut [T], tag: u64) -> Result<usize> {
        self.recv_any_by(data, tag, self.deadline())
    }

    /// As [`Group::recv_any`], until `deadline`.
    pub fn recv_any_by<T: Element>(
        &self,
        data: &mut [T],
        tag: u64,
        deadline: impl Into<Deadline>,
    ) -> Result<usize> {
        let data = bytemuck::cast_slice_mut(data);
        self.receive("recv_any", None, tag, (T::DTYPE, data), deadline.into())
    }
}
