//! Messages between ranks of different hosts that are addressed to a group, and not to a conversation.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use super::landing::Landing;
use super::stream::Stream;
use super::watcher::Peers;
use crate::error::Result;
use crate::sync::Deadline;

/// A group that receives messages from ranks of other hosts.
pub(crate) trait Listener: Send + Sync {
    /// Takes a message of rank `from` of the world, in the order of sending. Must not wait. An error says what is wrong with
    /// the message; its sender then counts as lost.
    fn receive(&self, from: usize, bytes: &[u8]) -> Result<(), String>;

    /// This rank is about to say goodbye: the last moment to send anything.
    fn leaving(&self) {}

    /// Where the rest of a message of rank `from` is to be received, of which `beginning` has come and `rest` bytes have not. Nothing
    /// if the message is to be received whole, and then taken by `receive`.
    fn land(&self, from: usize, beginning: &[u8], rest: usize) -> Option<Landing>;
}

/// Takes messages to groups that come over one connection: see [`Listener`].
pub(super) trait GroupMessages {
    fn deliver(&self, group: u128, bytes: &[u8]) -> Result<(), String>;

    fn land(&self, group: u128, beginning: &[u8], rest: usize) -> Option<Landing>;
}

/// Of a connection that carries none.
pub(super) struct NoGroups;

impl GroupMessages for NoGroups {
    fn deliver(&self, _: u128, _: &[u8]) -> Result<(), String> {
        Err("bytes for a group".to_owned())
    }

    fn land(&self, _: u128, _: &[u8], _: usize) -> Option<Landing> {
        None
    }
}

/// The connection to one rank on another host.
pub(crate) struct FarConnection {
    pub(super) rank: usize,
    pub(super) stream: Arc<Stream>,
    pub(super) peers: Arc<Peers>,
}

impl FarConnection {
    /// The most bytes of one message; the same between all ranks of a world.
    pub(crate) fn most(&self) -> usize {
        self.stream.most()
    }

    /// Receives what the rank has sent. While a thread calls this often, the watcher leaves the connection to it.
    pub(crate) fn take_in(&self) {
        self.peers.look_at(self.rank);
    }

    /// From here on, nothing is received into memory that was lent: see [`Landing::lent`].
    pub(crate) fn end_loan(&self) {
        self.stream.end_loan();
    }

    /// Sends messages without waiting: the caller's protocol bounds how many are unanswered. Messages to a lost rank are
    /// dropped.
    pub(crate) fn post(&self, group: u128, messages: &[[&[u8]; 2]]) {
        self.stream.post(group, messages, false);
    }

    /// As `post`, for messages that are not urgent: they go with the next message, or within a millisecond.
    pub(crate) fn post_soon(&self, group: u128, messages: &[[&[u8]; 2]]) {
        self.stream.post(group, messages, true);
        self.peers.send_held_if_idle(&self.stream);
    }

    /// As `post_soon`, as far as there is room, and then the others.
    pub(crate) fn send(
        &self,
        group: u128,
        messages: &[[&[u8]; 2]],
        deadline: Deadline,
    ) -> Result<()> {
        // One of the messages received meanwhile may say that there is room.
        self.stream.send_to_group(group, messages, deadline, &|| self.take_in())?;
        self.peers.send_held_if_idle(&self.stream);
        Ok(())
    }
}

/// The receivers of messages, by the id of their group.
#[derive(Default)]
pub(super) struct Listeners(HashMap<u128, Entry>);

enum Entry {
    Formed(Weak<dyn Listener>),
    /// Peers have formed the group, and this rank has not yet: their messages, by sender.
    Early(BTreeMap<usize, Vec<Vec<u8>>>),
    /// This rank has dropped the group.
    Closed,
}

/// How many messages of a sender are kept for a group that this rank has not formed yet: a signal on every channel, a call, and as many
/// fragments of messages as it may send before any is received.
const EARLY: usize = (1 << 14) + FRAGMENTS;

/// The most fragments of messages that a rank may have sent to another which has received none.
pub(crate) const FRAGMENTS: usize = 1 << 15;

impl Listeners {
    /// The receiver of a message. If the group has not been formed here yet, keeps the message.
    pub(super) fn find(
        &mut self,
        from: usize,
        group: u128,
        bytes: &[u8],
    ) -> Result<Option<Arc<dyn Listener>>, String> {
        match self.0.entry(group).or_insert_with(|| Entry::Early(BTreeMap::new())) {
            Entry::Formed(listener) => Ok(listener.upgrade()), // `None` if the group is gone here
            Entry::Closed => Ok(None),
            Entry::Early(early) => match early.entry(from).or_default() {
                early if early.len() < EARLY => {
                    early.push(bytes.to_vec());
                    Ok(None)
                }
                _ => Err("too much for a group that is not formed".to_owned()),
            },
        }
    }

    /// The receiver of a group's messages, if the group has been formed here.
    pub(super) fn formed(&self, group: u128) -> Option<Arc<dyn Listener>> {
        match self.0.get(&group)? {
            Entry::Formed(listener) => listener.upgrade(),
            Entry::Early(_) | Entry::Closed => None,
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
        let all = early.into_iter();
        let all = all.flat_map(|(from, early)| early.into_iter().map(move |bytes| (from, bytes)));
        let told = all.map(|(from, bytes)| (from, listener.receive(from, &bytes)));
        told.filter_map(|(from, result)| result.err().map(|why| (from, why))).collect()
    }

    /// All groups that receive messages.
    pub(super) fn all(&self) -> Vec<Arc<dyn Listener>> {
        let formed = |entry: &Entry| match entry {
            Entry::Formed(listener) => listener.upgrade(),
            Entry::Early(_) | Entry::Closed => None,
        };
        self.0.values().filter_map(formed).collect()
    }

    /// Drops the messages of a group that this rank has not formed, and now never will.
    pub(super) fn close(&mut self, group: u128) {
        let entry = self.0.entry(group).or_insert(Entry::Closed);
        if let Entry::Early(_) = entry {
            *entry = Entry::Closed;
        }
    }

    /// Forgets a group that was closed so long ago that no message for it can arrive any more.
    pub(super) fn forget(&mut self, group: u128) {
        self.0.remove(&group);
    }
}
