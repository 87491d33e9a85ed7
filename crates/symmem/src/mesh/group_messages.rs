//! Messages between ranks of different hosts that are addressed to a group, and not to a conversation.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::stream::Stream;
use super::watcher::Peers;
use crate::error::Result;
use crate::sync::Deadline;

/// The most bytes of one such message.
pub(crate) const MOST: usize = super::stream::LONGEST - 64;

/// A group that receives messages from ranks of other hosts.
pub(crate) trait Listener: Send + Sync {
    /// Takes a message of rank `from` of the world, in the order of sending. Must not wait. An error says what is wrong with
    /// the message; its sender then counts as lost.
    fn receive(&self, from: usize, bytes: &[u8]) -> Result<(), String>;
}

/// Delivers a message to a group. An error says what is wrong with the message.
pub(super) type DeliverToGroup<'a> = dyn Fn(u128, &[u8]) -> Result<(), String> + 'a;

/// The connection to one rank on another host.
pub(crate) struct FarConnection {
    pub(super) rank: usize,
    pub(super) stream: Arc<Stream>,
    pub(super) peers: Arc<Peers>,
}

impl FarConnection {
    /// Receives what the rank has sent. While a thread calls this often, the watcher leaves the connection to it.
    pub(crate) fn take_in(&self) {
        self.peers.look_at(self.rank);
    }

    /// Sends a message without waiting: the caller's protocol bounds how many are unanswered. Messages to a lost rank are
    /// dropped.
    pub(crate) fn post(&self, group: u128, bytes: Vec<u8>) {
        self.stream.post(group, [&bytes, &[]], false);
    }

    /// As `post`, for messages that are not urgent: they go with the next message, or within a millisecond.
    pub(crate) fn post_soon(&self, group: u128, bytes: [&[u8]; 2]) {
        self.stream.post(group, bytes, true);
        self.peers.send_held_if_idle(&self.stream);
    }

    /// As `post_soon`, once there is room for it.
    pub(crate) fn send(&self, group: u128, bytes: [&[u8]; 2], deadline: Deadline) -> Result<()> {
        // One of the messages received meanwhile may say that there is room.
        self.stream.send_to_group(group, bytes, deadline, &|| self.take_in())?;
        self.peers.send_held_if_idle(&self.stream);
        Ok(())
    }
}

/// The receivers of messages, by the id of their group.
#[derive(Default)]
pub(super) struct Listeners(HashMap<u128, Entry>);

enum Entry {
    Formed(Weak<dyn Listener>),
    /// Peers have formed the group, and this rank has not yet: their messages, with the sender of each.
    Early(Vec<(usize, Vec<u8>)>),
}

/// How many messages are kept for a group that this rank has not formed yet: a signal on every channel, and a call.
const EARLY: usize = 1 << 14;

impl Listeners {
    /// The receiver of a message. If the group has not been formed here yet, keeps the message.
    pub(super) fn find(
        &mut self,
        from: usize,
        group: u128,
        bytes: &[u8],
    ) -> Result<Option<Arc<dyn Listener>>, String> {
        match self.0.entry(group).or_insert_with(|| Entry::Early(Vec::new())) {
            Entry::Formed(listener) => Ok(listener.upgrade()), // `None` if the group is gone here
            Entry::Early(early) if early.len() < EARLY => {
                early.push((from, bytes.to_vec()));
                Ok(None)
            }
            Entry::Early(_) => Err("too much for a group that is not formed".to_owned()),
        }
    }

    /// From here on, `listener` gets the group's messages, starting with those that were kept. Returns the peers that had sent
    /// invalid ones.
    pub(super) fn listen(
        &mut self,
        group: u128,
        listener: &Arc<dyn Listener>,
    ) -> Vec<(usize, String)> {
        let early = self.0.insert(group, Entry::Formed(Arc::downgrade(listener)));
        let Some(Entry::Early(early)) = early else { return Vec::new() };
        let told = early.into_iter().map(|(from, bytes)| (from, listener.receive(from, &bytes)));
        told.filter_map(|(from, result)| result.err().map(|why| (from, why))).collect()
    }

    /// Forgets a group that was closed so long ago that no message for it can arrive any more.
    pub(super) fn forget(&mut self, group: u128) {
        self.0.remove(&group);
    }
}
