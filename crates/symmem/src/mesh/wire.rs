//! What ranks of different hosts tell each other for their groups: bytes that go straight to the group they are for, and not to
//! a conversation.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::stream::Stream;
use super::watcher::Peers;
use crate::error::Result;
use crate::sync::Deadline;

/// The most bytes of one such message.
pub(crate) const MOST: usize = super::stream::LONGEST - 64;

/// A group that is told something by ranks of other hosts.
pub(crate) trait Listener: Send + Sync {
    /// What rank `from` of the world tells, in the order in which it does. Never waits. An error says why no rank of this job
    /// tells that: the rank is then lost.
    fn told(&self, from: usize, bytes: &[u8]) -> Result<(), String>;
}

/// Has a group told; an error says why no rank of this job tells that.
pub(super) type Tell<'a> = dyn Fn(u128, &[u8]) -> Result<(), String> + 'a;

/// The way to one rank on another host.
pub(crate) struct FarLine {
    pub(super) rank: usize,
    pub(super) stream: Arc<Stream>,
    pub(super) peers: Arc<Peers>,
}

impl FarLine {
    /// Takes in what the rank has sent. The watcher leaves that to whoever calls this often.
    pub(crate) fn take_in(&self) {
        self.peers.look_at(self.rank);
    }

    /// Tells the rank something, without waiting: callers tell no more than their protocol has under way. What a lost rank is
    /// told is lost.
    pub(crate) fn post(&self, group: u128, bytes: Vec<u8>) {
        self.stream.post(group, [&bytes, &[]], false);
    }

    /// As `post`, for what nobody waits for urgently: it goes with the next message, or within a millisecond.
    pub(crate) fn post_soon(&self, group: u128, bytes: [&[u8]; 2]) {
        self.stream.post(group, bytes, true);
        self.peers.send_held_if_idle(&self.stream);
    }

    /// As `post_soon`, once there is room for it.
    pub(crate) fn send(&self, group: u128, bytes: [&[u8]; 2], deadline: Deadline) -> Result<()> {
        // What the rank tells meanwhile may be that there is room.
        self.stream.send_to_group(group, bytes, deadline, &|| self.take_in())?;
        self.peers.send_held_if_idle(&self.stream);
        Ok(())
    }
}

/// The groups that are told something, by their names on the mesh.
#[derive(Default)]
pub(super) struct Listeners(HashMap<u128, Entry>);

enum Entry {
    Formed(Weak<dyn Listener>),
    /// Peers have formed it already, and this rank has not.
    Early(Vec<(usize, Vec<u8>)>),
}

/// How many messages a rank may be sent by each peer before it has formed a group: a signal on every channel, and a call.
const EARLY: usize = 1 << 14;

impl Listeners {
    /// Who is to be told; keeps it for later if that group has not been formed here.
    pub(super) fn find(
        &mut self,
        from: usize,
        group: u128,
        bytes: &[u8],
    ) -> Result<Option<Arc<dyn Listener>>, String> {
        match self.0.entry(group).or_insert_with(|| Entry::Early(Vec::new())) {
            Entry::Formed(listener) => Ok(listener.upgrade()), // nothing if it is gone here
            Entry::Early(early) if early.len() < EARLY => {
                early.push((from, bytes.to_vec()));
                Ok(None)
            }
            Entry::Early(_) => Err("too much for a group that is not formed".to_owned()),
        }
    }

    /// From here on, `listener` is told. Also of what was told before; which peer told what no rank of the job does.
    pub(super) fn listen(
        &mut self,
        group: u128,
        listener: &Arc<dyn Listener>,
    ) -> Vec<(usize, String)> {
        let early = self.0.insert(group, Entry::Formed(Arc::downgrade(listener)));
        let Some(Entry::Early(early)) = early else { return Vec::new() };
        let told = early.into_iter().map(|(from, bytes)| (from, listener.told(from, &bytes)));
        told.filter_map(|(from, result)| result.err().map(|why| (from, why))).collect()
    }

    /// The group was closed so long ago that nobody has anything to tell it.
    pub(super) fn forget(&mut self, group: u128) {
        self.0.remove(&group);
    }
}
