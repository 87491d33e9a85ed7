//! The state of the peers, and the engine's events: they deliver messages in the order of their numbers, and note failures.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use symmem_sys::ucx::{Answer, Data, Endpoint, Events, Failure, ReceiveBuffer};

use super::inbound::Inbound;
use super::message::{Header, Kind};
use super::outbound::Outbound;
use crate::sync::atomic::{AtomicBool, AtomicUsize};
use crate::sync::{Ordering, lock};

/// The most bytes of one message.
pub(super) const MOST: usize = 256 << 10;

/// Where messages are delivered: the mesh's listeners.
pub(super) type Sink = dyn Fn(usize, u128, &[u8]) -> Result<(), String> + Send + Sync;

/// The state that the engine's events work on.
pub(super) struct Shared {
    pub(super) own: usize,
    pub(super) tag: u64,
    pub(super) sink: Box<Sink>,
    /// By rank of the world; `None` for ranks of this host.
    pub(super) peers: Vec<Option<Peer>>,
    /// Ranks that messages or acknowledgements have to be sent to, and whether there are any.
    pub(super) due: Mutex<Vec<usize>>,
    pub(super) is_due: AtomicBool,
    pub(super) bodies: Mutex<Bodies>,
    pub(super) failed: Mutex<Vec<Failed>>,
    /// The number of messages that no rank of the world has sent.
    pub(super) strangers: AtomicUsize,
}

#[derive(Default)]
pub(super) struct Peer {
    pub(super) endpoint: OnceLock<Endpoint>,
    pub(super) out: Mutex<Outbound>,
    /// Used only by the thread that works with the engine.
    pub(super) into: Mutex<Inbound>,
    /// Whether the peer has asked for an acknowledgement.
    pub(super) asked: AtomicBool,
    /// Whether the mesh has reported it as gone, and whether its endpoint was closed.
    pub(super) is_gone: AtomicBool,
    pub(super) is_closed: AtomicBool,
}

/// Bodies that are being received.
#[derive(Default)]
pub(super) struct Bodies {
    last: u64,
    /// By token: the sender, and the message's number.
    coming: HashMap<u64, (usize, u64)>,
}

pub(super) struct Failed {
    pub(super) rank: usize,
    pub(super) how: String,
    /// When its connection failed; `None` if it has sent an invalid message.
    pub(super) since: Option<Instant>,
}

impl Peer {
    /// Whether an acknowledgement is due now.
    pub(super) fn owes(&self) -> bool {
        self.asked.load(Ordering::Relaxed) || lock(&self.into).is_due()
    }
}

impl Shared {
    pub(super) fn peer(&self, rank: usize) -> Option<&Peer> {
        self.peers.get(rank)?.as_ref()
    }

    pub(super) fn far_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.peers.len()).filter(|&rank| self.peer(rank).is_some())
    }

    pub(super) fn is_due_for(&self, rank: usize) {
        let mut due = lock(&self.due);
        if !due.contains(&rank) {
            due.push(rank);
        }
        drop(due);
        self.is_due.store(true, Ordering::SeqCst);
    }

    /// Whether no message of a rank is accepted any more.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        self.peer(rank).is_none_or(|peer| peer.is_gone.load(Ordering::Acquire))
    }

    /// The connection with a rank has failed. The rank is lost, unless the mesh reports its departure soon.
    pub(super) fn note_failure(&self, rank: usize, failure: &Failure) {
        let how = format!("its UCX connection failed: {failure}");
        self.note(Failed { rank, how, since: Some(Instant::now()) });
    }

    fn note(&self, new: Failed) {
        if self.is_gone(new.rank) {
            return;
        }
        let mut failed = lock(&self.failed);
        if !failed.iter().any(|known| known.rank == new.rank) {
            failed.push(new);
        }
    }

    /// Delivers a message, or holds it until the earlier ones are delivered.
    fn admit(&self, rank: usize, peer: &Peer, header: &Header, data: Data<'_>) -> Answer {
        let mut into = lock(&peer.into);
        if into.is_over() {
            return Answer::Refuse;
        }
        let admitted = self.admit_into(rank, peer, &mut into, (header, data));
        admitted.unwrap_or_else(|why| {
            into.end();
            self.note(Failed {
                rank,
                how: format!("it sent an invalid message: {why}"),
                since: None,
            });
            Answer::Refuse
        })
    }

    fn admit_into(
        &self,
        rank: usize,
        peer: &Peer,
        into: &mut Inbound,
        (header, data): (&Header, Data<'_>),
    ) -> Result<Answer, String> {
        if !lock(&peer.out).note_taken(header.taken) {
            return Err(format!("{} bytes said to be taken in", header.taken));
        }
        self.is_due_for(rank); // there may be room now
        let (len, number) = (data.len(), header.sequence);
        if header.kind == Kind::Credit {
            return Ok(Answer::Done);
        }
        if len > MOST {
            return Err(format!("a message of {len} bytes"));
        }
        let is_next = into.admit(number, len)?;
        // A request for an acknowledgement is a message without bytes to group 0, and goes to no group.
        match data {
            Data::Inline(bytes) if is_next => {
                self.tell(rank, peer, header.group, bytes)?;
                into.take(len);
                self.tell_held(rank, peer, into)?;
            }
            Data::Inline(bytes) => into.hold(number, header.group, len, Some(bytes.to_vec())),
            Data::Rendezvous(len) => {
                into.hold(number, header.group, len, None);
                let mut bodies = lock(&self.bodies);
                bodies.last += 1;
                let token = bodies.last;
                bodies.coming.insert(token, (rank, number));
                return Ok(Answer::Receive { buffer: ReceiveBuffer::new(len), token });
            }
        }
        Ok(Answer::Done)
    }

    /// Delivers held messages that are next.
    fn tell_held(&self, rank: usize, peer: &Peer, into: &mut Inbound) -> Result<(), String> {
        while let Some((group, bytes)) = into.next() {
            self.tell(rank, peer, group, &bytes)?;
        }
        if into.is_due() {
            self.is_due_for(rank);
        }
        Ok(())
    }

    fn tell(&self, rank: usize, peer: &Peer, group: u128, bytes: &[u8]) -> Result<(), String> {
        if bytes.is_empty() {
            peer.asked.store(true, Ordering::Relaxed);
            self.is_due_for(rank);
            return Ok(());
        }
        (self.sink)(rank, group, bytes)
    }

    /// The body of a message has arrived.
    fn fill(&self, rank: usize, peer: &Peer, number: u64, bytes: Vec<u8>) {
        let mut into = lock(&peer.into);
        if into.is_over() {
            return;
        }
        into.fill(number, bytes);
        if let Err(why) = self.tell_held(rank, peer, &mut into) {
            into.end();
            self.note(Failed {
                rank,
                how: format!("it sent an invalid message: {why}"),
                since: None,
            });
        }
    }
}

impl Events for Shared {
    fn message(&self, header: &[u8], data: Data<'_>) -> Answer {
        let decoded = Header::decode(header).filter(|(header, _)| header.tag == self.tag);
        let from = |header: &Header| {
            let rank = usize::try_from(header.from).ok()?;
            Some((rank, self.peer(rank)?))
        };
        let ours = decoded.and_then(|(header, rest)| Some((header, rest, from(&header)?)));
        let Some((header, rest, (rank, peer))) = ours else {
            self.strangers.fetch_add(1, Ordering::Relaxed);
            return Answer::Refuse;
        };
        let data = if header.kind == Kind::Long { data } else { Data::Inline(rest) };
        if peer.is_gone.load(Ordering::Acquire) {
            return Answer::Refuse;
        }
        self.admit(rank, peer, &header, data)
    }

    fn received(&self, token: u64, buffer: ReceiveBuffer, result: symmem_sys::ucx::Result<()>) {
        let Some((rank, number)) = lock(&self.bodies).coming.remove(&token) else { return };
        let Some(peer) = self.peer(rank) else { return };
        match (result, buffer.into_bytes()) {
            (Ok(()), Some(bytes)) => self.fill(rank, peer, number, bytes),
            (Err(failure), _) => self.note_failure(rank, &failure),
            (Ok(()), None) => {} // not a buffer of ours
        }
    }

    fn sent(&self, token: u64, result: symmem_sys::ucx::Result<()>) {
        if let (Err(failure), Ok(rank)) = (result, usize::try_from(token)) {
            self.note_failure(rank, &failure);
        }
    }

    fn failed(&self, endpoint: Endpoint, why: Failure) {
        let is_it = |rank: &usize| {
            self.peer(*rank).is_some_and(|peer| peer.endpoint.get() == Some(&endpoint))
        };
        let rank = self.far_ranks().find(is_it);
        if let Some(rank) = rank {
            self.note_failure(rank, &why);
        }
    }
}
