//! A collective round of messages of a group over the mesh. Each rank sends a proposal (and memory). All ranks see all
//! proposals and reach the same verdict. Then each reports whether it has succeeded, so that all know whether all have.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Group;
use super::context::Context;
use crate::error::{Error, Result};
use crate::memory::Exported;
use crate::mesh::{Gone, Message, Phase, Shortfall, Subject};
use crate::sync::{Deadline, Expiry};

/// The proposal of one rank: terms that must be equal on all ranks, and data of the operation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Proposal {
    /// (what, value), in the same order on all ranks.
    pub(crate) terms: Vec<(String, String)>,
    pub(crate) data: Vec<u8>,
}

/// What must be equal on all ranks: (what, value).
pub(crate) type Terms = [(&'static str, String)];

impl Proposal {
    pub(crate) fn new(terms: &Terms, data: Vec<u8>) -> Self {
        let terms = terms.iter().map(|(what, value)| (what.to_string(), value.clone()));
        Self { terms: terms.collect(), data }
    }
}

#[derive(Serialize, Deserialize)]
enum Body {
    Proposal(Proposal),
    Done,
    /// The rank has failed; `lost` is the lost world rank that caused it, if any.
    Failed {
        reason: String,
        lost: Option<usize>,
    },
}

pub(crate) struct Conversation<'a> {
    pub(crate) context: &'a Context,
    /// The group of a rendezvous, which may fall out of step meanwhile; `None` while a group is formed.
    pub(crate) group: Option<&'a Group>,
    /// World ranks, in group order.
    pub(crate) members: &'a [usize],
    /// This rank's index among them.
    pub(crate) rank: usize,
    pub(crate) op: &'static str,
    pub(crate) subject: Subject,
    pub(crate) deadline: Deadline,
}

impl Conversation<'_> {
    /// Exchanges proposals and memory, then runs `part` with those of all ranks (in group order; no memory for this
    /// rank). Succeeds on all ranks or on none.
    pub(crate) fn hold<T>(
        &self,
        terms: &Terms,
        data: Vec<u8>,
        memory: impl Fn() -> Result<Option<Exported>>,
        part: impl FnOnce(Vec<Vec<u8>>, Vec<Option<Exported>>) -> Result<T>,
    ) -> Result<T> {
        let (mut part, mut made) = (Some(part), None);
        self.hold_with(terms, data, &memory, &mut |all, memories| {
            made = part.take().map(|part| part(all, memories)).transpose()?;
            Ok(())
        })?;
        made.ok_or_else(|| self.garbled(self.rank)) // cannot be: it has succeeded
    }

    /// The same whatever is made of it: this is a good deal of code, and there are many kinds of conversations.
    fn hold_with(
        &self,
        terms: &Terms,
        data: Vec<u8>,
        memory: &dyn Fn() -> Result<Option<Exported>>,
        part: &mut dyn FnMut(Vec<Vec<u8>>, Vec<Option<Exported>>) -> Result<()>,
    ) -> Result<()> {
        let own = Proposal::new(terms, data);
        let sent = self.send_proposals(&own, memory);
        let collected = sent.and_then(|()| self.collect_proposals(own));
        let held = collected.or_else(|e| self.abort(Phase::Outcome, e)).and_then(
            |(proposals, memories)| {
                self.agree(terms, &proposals)?;
                let done = part(proposals.into_iter().map(|c| c.data).collect(), memories);
                self.conclude(done)
            },
        );
        self.context.mesh.inbox().close(&self.subject);
        held
    }

    /// Sends our proposal and memory to all ranks without waiting.
    pub(crate) fn send_proposals(
        &self,
        own: &Proposal,
        memory: &dyn Fn() -> Result<Option<Exported>>,
    ) -> Result<()> {
        // A descriptor does not reach another host.
        let for_peer = |peer: usize| match memory()? {
            Some(Exported::Descriptor(_) | Exported::Mapping(_))
                if !self.context.mesh.is_local(peer) =>
            {
                Ok(None)
            }
            memory => Ok(memory),
        };
        let memories: Result<Vec<_>> = self.peers().map(for_peer).collect();
        let memories = memories.or_else(|e| self.abort(Phase::Proposal, e))?;
        self.send_all(Phase::Proposal, &Body::Proposal(own.clone()), memories.into_iter())
    }

    /// Sends a message to every peer. If one does not get it, tells all that the conversation is over.
    fn send_all(
        &self,
        phase: Phase,
        body: &Body,
        memories: impl Iterator<Item = Option<Exported>>,
    ) -> Result<()> {
        let body = encode(body);
        let mut messages = self.peer_indices().zip(self.peers()).zip(memories);
        let sent = messages.try_for_each(|((rank, peer), memory)| {
            let sent =
                self.context.mesh.send(peer, &self.subject, phase, &body, memory, self.deadline);
            sent.map_err(|e| self.about(rank, e))
        });
        sent.or_else(|e| self.abort(phase, e))
    }

    /// Names the rank and the operation that a message was for.
    fn about(&self, rank: usize, error: Error) -> Error {
        match error {
            Error::Timeout { after, .. } => Expiry::Deadline.error(self.op, vec![rank], after),
            Error::Interrupted { after, .. } => {
                Expiry::Interrupted.error(self.op, vec![rank], after)
            }
            other => other,
        }
    }

    /// Waits for everyone's proposal and memory, in group order. After a timeout it may be called again.
    pub(crate) fn collect_proposals(
        &self,
        own: Proposal,
    ) -> Result<(Vec<Proposal>, Vec<Option<Exported>>)> {
        let messages = self.collect(Phase::Proposal)?;
        let mut proposals = Vec::with_capacity(self.members.len());
        let mut memories = Vec::with_capacity(self.members.len());
        for (peer, message) in self.peer_indices().zip(messages) {
            match decode(&message.body) {
                Some(Body::Proposal(proposal)) => proposals.push(proposal),
                Some(Body::Failed { reason, lost }) => return Err(self.failed(peer, reason, lost)),
                Some(Body::Done) | None => return Err(self.garbled(peer)),
            }
            memories.push(message.memory);
        }
        proposals.insert(self.rank, own);
        memories.insert(self.rank, None);
        Ok((proposals, memories))
    }

    /// The proposal of one rank, if it has arrived.
    pub(super) fn take_proposal(&self, rank: usize) -> Option<Proposal> {
        let message =
            self.context.mesh.take(&self.subject, Phase::Proposal, *self.members.get(rank)?);
        match decode(&message?.body)? {
            Body::Proposal(proposal) => Some(proposal),
            Body::Done | Body::Failed { .. } => None,
        }
    }

    /// The same verdict on every rank: all see the same proposals.
    pub(crate) fn agree(&self, terms: &Terms, proposals: &[Proposal]) -> Result<()> {
        for (i, (what, ours)) in terms.iter().enumerate() {
            let value = |proposal: &Proposal| {
                proposal.terms.get(i).map(|(_, v)| v.clone()).unwrap_or_default()
            };
            let other = proposals.iter().map(value).enumerate().find(|(_, theirs)| theirs != ours);
            if let Some((rank, theirs)) = other {
                let ours = ours.clone();
                return Err(Error::Mismatch { op: self.op, what, rank, ours, theirs });
            }
        }
        Ok(())
    }

    /// Reports this rank's success or failure to all, and waits for their reports.
    pub(super) fn conclude(&self, done: Result<()>) -> Result<()> {
        done.or_else(|e| self.abort(Phase::Outcome, e))?;
        self.send_all(Phase::Outcome, &Body::Done, std::iter::repeat_with(|| None))?;
        // A rank that gives up waiting withdraws its report: the late peer would otherwise find that everything succeeded.
        let outcomes = self.collect(Phase::Outcome).or_else(|e| self.abort(Phase::Outcome, e))?;
        for (peer, message) in self.peer_indices().zip(outcomes) {
            match decode(&message.body) {
                Some(Body::Done) => {}
                Some(Body::Failed { reason, lost }) => return Err(self.failed(peer, reason, lost)),
                Some(Body::Proposal(_)) | None => return Err(self.garbled(peer)),
            }
        }
        Ok(())
    }

    /// Tells all that this rank has failed, and returns the cause.
    pub(crate) fn abort<T>(&self, phase: Phase, cause: Error) -> Result<T> {
        self.tell_failure(phase, &cause);
        Err(cause)
    }

    #[cold]
    #[inline(never)]
    fn tell_failure(&self, phase: Phase, cause: &Error) {
        let lost = match cause {
            Error::PeerLost { rank, .. } => self.members.get(*rank).copied(),
            _ => None,
        };
        self.tell(phase, &encode(&Body::Failed { reason: cause.to_string(), lost }));
    }

    /// Tells all that this rank does not take part, and ends the conversation here.
    pub(super) fn decline(&self, reason: String) {
        self.tell(Phase::Proposal, &encode(&Body::Failed { reason, lost: None }));
        self.context.mesh.inbox().close(&self.subject);
    }

    fn tell(&self, phase: Phase, body: &[u8]) {
        let deadline = Deadline::after(Duration::from_millis(50));
        for peer in self.peers() {
            let _ = self.context.mesh.send(peer, &self.subject, phase, body, None, deadline);
        }
    }

    fn collect(&self, phase: Phase) -> Result<Vec<Message>> {
        let peers: Vec<usize> = self.peers().collect();
        let mesh = &self.context.mesh;
        let waiting = format!("in {}, waiting for ranks of the world among {peers:?}", self.op);
        let _note = self.context.note(&waiting);
        let out_of_step = || self.group.and_then(Group::find_out_of_step);
        let is_over = || out_of_step().is_some();
        let collected = mesh.collect(&self.subject, phase, &peers, self.deadline, &is_over);
        collected.map_err(|short| match short {
            Shortfall::Over => match (self.group, out_of_step()) {
                (Some(group), Some(rank)) => group.out_of_step(self.op, rank),
                _ => self.garbled(self.rank), // it was in step again at once, without this rank: cannot be
            },
            Shortfall::Lost { world_rank, gone } => self.lost(world_rank, gone),
            Shortfall::GivenUp { world_ranks, why, after } => {
                let missing = world_ranks.iter().filter_map(|&rank| self.in_group(rank)).collect();
                match why.error(self.op, missing, after) {
                    Error::Timeout { op, channel, waiting_for, after, .. } => {
                        let doing = world_ranks.iter().map(|&rank| self.doing(rank)).collect();
                        Error::Timeout { op, channel, waiting_for, after, doing }
                    }
                    other => other,
                }
            }
            Shortfall::Elsewhere { world_rank, members } => {
                // Ranks that are not in the other group learn of the conflict only from us.
                let body = postcard::to_stdvec(&(world_rank, &members)).unwrap_or_default();
                self.tell(Phase::Conflict, &body);
                self.other_members(world_rank, &members)
            }
        })
    }

    fn in_group(&self, world_rank: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == world_rank)
    }

    /// If several ranks are lost, all ranks name the first, in the order that all of them see.
    fn lost(&self, world_rank: usize, gone: Gone) -> Error {
        let left = gone.left;
        let first = |gone: &Gone| {
            let among = |rank| self.in_group(rank).is_some();
            self.context.world.first_lost(among).filter(|_| !gone.left)
        };
        let (world_rank, how) = match first(&gone) {
            Some(first) if first != world_rank => {
                let gone = self.context.mesh.inbox().gone(first);
                (first, gone.map_or("noticed by a peer".to_owned(), |gone| gone.how))
            }
            _ => (world_rank, gone.how),
        };
        let rank = self.in_group(world_rank).unwrap_or(world_rank);
        let first = self.group.filter(|_| !left).and_then(|group| group.first_on_all_hosts(rank));
        match first.filter(|&first| first != rank) {
            Some(rank) => {
                let how = "noticed by a rank of another host".to_owned();
                Error::PeerLost { rank, during: self.op, how }
            }
            None => Error::PeerLost { rank, during: self.op, how },
        }
    }

    fn other_members(&self, world_rank: usize, members: &[usize]) -> Error {
        Error::Mismatch {
            op: self.op,
            what: "members",
            rank: self.in_group(world_rank).unwrap_or(world_rank),
            ours: format!("{:?}", self.members),
            theirs: format!("{members:?}"),
        }
    }

    /// What a rank of the world is doing, by its notes in shared memory.
    fn doing(&self, world_rank: usize) -> String {
        let notes = self.context.doing(world_rank);
        let doing = if notes.is_empty() {
            "not waiting in the library".into()
        } else {
            notes.join(" and ")
        };
        format!("rank {} is {doing}", self.in_group(world_rank).unwrap_or(world_rank))
    }

    fn peer_indices(&self) -> impl Iterator<Item = usize> {
        let own = self.rank;
        (0..self.members.len()).filter(move |&r| r != own)
    }

    fn peers(&self) -> impl Iterator<Item = usize> {
        self.peer_indices().filter_map(|r| self.members.get(r).copied())
    }

    fn failed(&self, rank: usize, reason: String, lost: Option<usize>) -> Error {
        match lost.and_then(|l| self.members.iter().position(|&m| m == l)) {
            Some(lost) if lost != self.rank => {
                Error::PeerLost { rank: lost, during: self.op, how: reason }
            }
            _ => Error::PeerFailed { op: self.op, rank, reason },
        }
    }

    pub(super) fn garbled(&self, rank: usize) -> Error {
        Error::Protocol {
            with: format!("rank {rank}"),
            expected: format!("a message of {}", self.op),
            got: "an invalid one; do all ranks run the same version?".into(),
        }
    }
}

impl Group {
    /// Gathers a value from every rank on all ranks, and runs `part` on them. If that fails on one rank, all get an error.
    pub(crate) fn gather_and<T: Serialize + DeserializeOwned, R>(
        &self,
        op: &'static str,
        own: T,
        part: impl FnOnce(Vec<T>) -> Result<R>,
    ) -> Result<R> {
        self.agree_and(op, &[("operation", op.to_owned())], own, part)
    }

    /// As [`Group::gather_and`], where all ranks must agree on `terms`.
    pub(crate) fn agree_and<T: Serialize + DeserializeOwned, R>(
        &self,
        op: &'static str,
        terms: &Terms,
        own: T,
        part: impl FnOnce(Vec<T>) -> Result<R>,
    ) -> Result<R> {
        let own = postcard::to_stdvec(&own).unwrap_or_default();
        let read = |(rank, told): (usize, Vec<u8>)| {
            postcard::from_bytes(&told).map_err(|e| Error::Protocol {
                with: format!("rank {rank}"),
                expected: format!("a message of {op}"),
                got: e.to_string(),
            })
        };
        self.converse(op, self.deadline(), |conversation| {
            let nothing = || Ok(None);
            conversation.hold(terms, own, nothing, |told, _| {
                let all: Result<Vec<T>> = told.into_iter().enumerate().map(read).collect();
                part(all?)
            })
        })
    }
}

fn encode(body: &Body) -> Vec<u8> {
    // Fails only for types that cannot be serialised at all.
    postcard::to_stdvec(body).unwrap_or_default()
}

fn decode(bytes: &[u8]) -> Option<Body> {
    postcard::from_bytes(bytes).ok()
}
