//! The mesh: one connection between every two ranks, open as long as the world.
//!
//! It carries messages (of a rendezvous, for example) with descriptors of memory, and it shows liveness: a
//! closed connection means a dead peer. Between processes of one host a connection is a Unix
//! socket; between hosts, a TCP stream, which carries no memory; between threads of one process, the peer's inbox itself.

mod address;
mod carrier;
mod connect;
pub(crate) mod endpoint;
mod far;
mod frames;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group_messages;
mod handshake;
mod host;
mod inbox;
mod interfaces;
mod landing;
mod outbound;
mod records;
mod secret;
mod socket;
mod stream;
mod watcher;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde::{Deserialize, Serialize};

pub use address::between_hosts;
pub(crate) use carrier::Carrier;
pub(crate) use connect::{Bootstrap, connect};
pub(crate) use group_messages::{FRAGMENTS, FarConnection, Listener};
pub use host::identity as host_identity;
pub(crate) use inbox::{Gone, Inbox, Message, Shortfall};
pub(crate) use interfaces::name_of as interface_of;
pub(crate) use landing::Landing;
#[cfg(test)]
pub(crate) use outbound::{WIDEST, WINDOW, cost_of};
pub(crate) use records::Ballot;
#[cfg(test)]
pub(crate) use stream::MOST;

use crate::error::{Error, Result};
use crate::memory::Exported;
use crate::sync::Deadline;
use host::Hosts;
use socket::Packet;
use stream::Stream;
use watcher::{Line, Peers, Watcher};

/// The group that a message belongs to: one that is being formed, with its name and members, or an existing one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Scope {
    Forming { name: String, members: Vec<usize> },
    Group(u128),
}

/// One collective conversation: the n-th of its scope, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Subject {
    pub(crate) scope: Scope,
    pub(crate) number: u64,
}

impl Subject {
    /// Rings for messages between the ranks of a group: of no conversation, and always open.
    pub(crate) fn of_rings(group: u128) -> Self {
        Self { scope: Scope::Group(group), number: u64::MAX - 1 }
    }
}

/// Where a message belongs within a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// The proposal of each rank.
    Proposal,
    /// Whether each rank has succeeded.
    Outcome,
    /// A rank cannot take part in the group.
    Notice,
    /// A rank has found that another one forms a group of this name with other members: that rank, and those members.
    Conflict,
    /// The memory of a ring, for messages of its sender.
    Ring,
}

/// FarMessage of every peer that goes, while the inbox is locked: it must not ask the inbox back.
pub(crate) trait PeerObserver: Send + Sync {
    /// From everything, or from `subject` alone.
    fn gone(&self, world_rank: usize, gone: &Gone, subject: Option<&Subject>);
}

enum Link {
    /// This rank itself.
    None,
    Socket(Arc<OwnedFd>),
    /// To another host.
    Stream(Arc<Stream>),
    Thread(Arc<Inbox>),
}

/// This rank's end of all its connections.
pub(crate) struct Mesh {
    rank: usize,
    links: Vec<Link>,
    hosts: Hosts,
    inbox: Arc<Inbox>,
    watcher: Mutex<Option<Watcher>>,
    /// Identifies messages of this world's ranks on other transports between hosts.
    tag: u64,
    /// Whether connections between hosts are encrypted.
    is_sealed: bool,
    /// The process whose connections they are; a fork of it has copies.
    process: u32,
}

impl Mesh {
    /// The mesh of a world of one.
    pub(crate) fn alone() -> Self {
        Self::new(0, vec![Link::None], Arc::default(), None)
    }

    /// The meshes of `n` ranks that are threads of this process.
    pub(crate) fn threads(n: usize) -> Vec<Self> {
        let inboxes: Vec<Arc<Inbox>> = (0..n).map(|rank| Arc::new(Inbox::new(rank))).collect();
        let link = |from: usize, to: usize| match inboxes.get(to) {
            Some(inbox) if from != to => Link::Thread(Arc::clone(inbox)),
            _ => Link::None,
        };
        let mesh = |rank: usize| {
            let links = (0..n).map(|to| link(rank, to)).collect();
            Self::new(rank, links, Arc::clone(&inboxes[rank]), None)
        };
        (0..n).map(mesh).collect()
    }

    /// Over sockets, one per peer of this host, and streams, one per peer of another.
    fn connected(
        rank: usize,
        sockets: Vec<Option<OwnedFd>>,
        streams: Vec<Option<Stream>>,
        hosts: Hosts,
    ) -> Result<Self> {
        let inbox = Arc::new(Inbox::new(rank));
        let streams = streams.into_iter().chain(std::iter::repeat_with(|| None));
        let link = |(socket, stream): (Option<OwnedFd>, Option<Stream>)| match (socket, stream) {
            (Some(socket), _) => Link::Socket(Arc::new(socket)),
            (None, Some(stream)) => Link::Stream(Arc::new(stream)),
            (None, None) => Link::None,
        };
        let links: Vec<Link> = sockets.into_iter().zip(streams).map(link).collect();
        let watched = links.iter().enumerate().filter_map(|(peer, link)| match link {
            Link::Socket(fd) => Some((peer, Line::Socket(Arc::clone(fd)))),
            Link::Stream(stream) => {
                Some((peer, Line::Stream(Arc::clone(stream), hosts.name(peer).to_owned())))
            }
            Link::None | Link::Thread(_) => None,
        });
        let watcher = Watcher::start(Arc::clone(&inbox), watched.collect())?;
        Ok(Self { hosts, ..Self::new(rank, links, inbox, Some(watcher)) })
    }

    /// Of one host.
    fn new(rank: usize, links: Vec<Link>, inbox: Arc<Inbox>, watcher: Option<Watcher>) -> Self {
        let (watcher, process) = (Mutex::new(watcher), std::process::id());
        let hosts = Hosts::one(links.len());
        Self { rank, links, hosts, inbox, watcher, tag: 0, is_sealed: false, process }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.links.len()
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Whether `rank` is on this host.
    pub(crate) fn is_local(&self, rank: usize) -> bool {
        self.hosts.are_together(self.rank, rank)
    }

    /// The connection to a rank of another host.
    pub(crate) fn far_connection(&self, rank: usize) -> Option<FarConnection> {
        let Some(Link::Stream(stream)) = self.links.get(rank) else { return None };
        Some(FarConnection { rank, stream: Arc::clone(stream), peers: self.peers()? })
    }

    /// How much may be under way to this rank from each of these ranks of other hosts; the least of that.
    pub(crate) fn window_from(&self, ranks: &[usize]) -> u64 {
        let far = ranks.iter().filter_map(|&rank| match self.links.get(rank)? {
            Link::Stream(stream) => Some(stream.window()),
            _ => None,
        });
        far.min().unwrap_or(u64::MAX)
    }

    /// The address of this host on the connections to other hosts.
    pub(crate) fn address_between_hosts(&self) -> Option<IpAddr> {
        let stream = self.links.iter().find_map(|link| match link {
            Link::Stream(stream) => Some(stream),
            _ => None,
        });
        let address: SocketAddr = rustix::net::getsockname(&**stream?).ok()?.try_into().ok()?;
        Some(address.ip().to_canonical())
    }

    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }

    /// Whether the job has a secret, so that messages between hosts are encrypted.
    pub(crate) fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// Where messages of ranks of other hosts to their groups are delivered.
    pub(crate) fn listeners(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    /// From here on, the watcher also serves this.
    pub(crate) fn carry(&self, carrier: Option<Arc<dyn Carrier>>) {
        if let Some(peers) = self.peers() {
            peers.carry(carrier);
        }
    }

    /// How many ranks of the world are on this host.
    pub(crate) fn ranks_here(&self) -> usize {
        self.hosts.ranks_beside(self.rank)
    }

    /// Whether all ranks are threads of this process.
    pub(crate) fn in_one_process(&self) -> bool {
        !self.links.iter().any(|l| matches!(l, Link::Socket(_) | Link::Stream(_)))
    }

    /// Notifies `observer` of every loss from now on, and of those already known.
    pub(crate) fn watch(&self, observer: Weak<dyn PeerObserver>) {
        self.inbox.watch(observer);
    }

    /// Sends a message. It is not an error if the peer is gone: the wait for its answer fails.
    pub(crate) fn send(
        &self,
        to: usize,
        subject: &Subject,
        phase: Phase,
        body: &[u8],
        memory: Option<Exported>,
        deadline: Deadline,
    ) -> Result<()> {
        let packet = |memory: &Option<Exported>| {
            let (subject, body) = (subject.clone(), body.to_vec());
            let fabric = match memory {
                Some(Exported::Bytes(handle)) => Some(handle.to_vec()),
                _ => None,
            };
            Packet::Message { subject, phase, body, fabric }
        };
        match self.links.get(to) {
            Some(Link::Socket(fd)) => socket::send(fd, &packet(&memory), memory, deadline),
            Some(Link::Stream(_)) if matches!(memory, Some(Exported::Descriptor(_))) => {
                Err(Error::Unavailable {
                    what: format!("memory of rank {} on rank {to}", self.rank),
                    why: format!(
                        "that rank is on another host ({}), to which no descriptor can be sent",
                        self.hosts.name(to)
                    ),
                })
            }
            Some(Link::Stream(stream)) => stream.send(&packet(&memory), deadline),
            Some(Link::Thread(inbox)) => {
                inbox.deliver(
                    self.rank,
                    subject.clone(),
                    phase,
                    Message::new(body.to_vec(), memory),
                );
                Ok(())
            }
            Some(Link::None) | None => Err(Error::Unavailable {
                what: format!("a connection to rank {to}"),
                why: "there is none".into(),
            }),
        }
    }

    /// Waits for a message from each of `from`: see [`Inbox::collect`]. Messages that have arrived by the deadline count, even if
    /// they are still in the socket.
    pub(crate) fn collect(
        &self,
        subject: &Subject,
        phase: Phase,
        from: &[usize],
        deadline: Deadline,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Message>, Shortfall> {
        let deadline = deadline.start();
        let collect = || self.inbox.collect(subject, phase, from, deadline, is_over);
        match collect() {
            Err(Shortfall::GivenUp { world_ranks, why, after }) => match self.peers() {
                Some(peers) => {
                    peers.take_in(&world_ranks);
                    collect() // without waiting: what has ended its wait still does
                }
                None => Err(Shortfall::GivenUp { world_ranks, why, after }),
            },
            collected => collected,
        }
    }

    /// Takes a message that rank `from` has sent before, if it came.
    pub(crate) fn take(&self, subject: &Subject, phase: Phase, from: usize) -> Option<Message> {
        self.inbox.take(subject, phase, from).or_else(|| {
            self.peers()?.take_in(&[from]);
            self.inbox.take(subject, phase, from)
        })
    }

    fn peers(&self) -> Option<Arc<Peers>> {
        let watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        watcher.as_ref().map(|watcher| Arc::clone(watcher.peers()))
    }

    /// Says goodbye to all peers: from here on they count this rank as gone.
    ///
    /// The goodbye blames the first loss, or else the rank that the caller blames.
    pub(crate) fn leave(&self, how: &str, blamed: Option<usize>) {
        // From here on, peers that close their connections are not losses. The thread holds the other half of the descriptors.
        let watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // The rank is the process that this one was forked from, with its connections and its thread.
            return std::mem::forget(watcher);
        }
        drop(watcher);
        let because_of = self.inbox.first_lost(|_| true).or(blamed);
        let gone = Gone { left: !std::thread::panicking(), how: how.to_owned(), because_of };
        for link in &self.links {
            match link {
                Link::Socket(fd) => socket::say_goodbye(fd, &gone),
                Link::Stream(stream) => stream.say_goodbye(&gone),
                Link::Thread(inbox) => inbox.mark_gone(self.rank, gone.clone()),
                Link::None => {}
            }
        }
        stream::linger(self.links.iter().filter_map(|link| match link {
            Link::Stream(stream) => Some(&**stream),
            _ => None,
        }));
    }
}
