//! The members of a group that are on other hosts: this rank sends them messages in place of stores to their memory, and
//! executes the messages that they send.
#![allow(unsafe_code)] // S2 (by atomics, in a phase that allows it), S3 (bounds checked here)

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Group;
use super::context::Context;
use super::far_access::{self, Reply};
use super::far_message::{FarMessage, RawBytes, Request, encode, encode_head};
use super::form::Formed;
use super::hosts::Span;
use super::signals::Act;
use super::staging::STAGE;
use crate::error::{Error, Result};
use crate::memory::block::{Access, Block, Mapping};
use crate::mesh::Listener;
use crate::signal::{GROUP, InvalidMessage, PadUpdate, SlotAct};
use crate::sync::Deadline;
use crate::wire::Transport;

/// An address in a rank's part of the memory of a rendezvous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FarAddress {
    pub(crate) rank: usize,
    /// The number of the rendezvous.
    pub(crate) memory: u64,
    /// Bytes from the beginning of the allocation.
    pub(crate) at: usize,
    /// The size of the atomics by which it is touched.
    pub(crate) unit: usize,
}

/// The connections from one member of a group to those on other hosts.
pub(super) struct Wire {
    group: u128,
    transport: Arc<dyn Transport>,
    /// By rank in the group: whether it is on another host.
    far: Vec<bool>,
    /// Those of them, by their numbers in the world.
    far_members: Vec<usize>,
    /// World ranks, in group order.
    members: Vec<usize>,
    span: Span,
    /// The memory that peers may access, by the number of its rendezvous.
    memories: Mutex<HashMap<u64, Served>>,
    requests: Mutex<Requests>,
    /// Why peers have refused puts, by the number of the rendezvous: the first of each.
    refused: Mutex<HashMap<u64, (usize, String)>>,
}

struct Served {
    block: Weak<Block>,
    mapping: Weak<Mapping>,
}

/// The requests of this rank.
#[derive(Default)]
struct Requests {
    last: u64,
    /// By ticket, for requests that a thread waits for: the rank that was asked, and its reply.
    replies: HashMap<u64, (usize, Option<Reply>)>,
}

impl Wire {
    /// To these ranks of the world; nothing if all are on this host.
    pub(super) fn to(context: &Context, members: &[usize], group: u128) -> Option<Self> {
        let far: Vec<bool> = members.iter().map(|&m| !context.mesh.is_local(m)).collect();
        let transport = context.choice.chosen().filter(|_| far.contains(&true))?;
        Some(Self {
            group,
            transport: Arc::clone(transport),
            far,
            far_members: members.iter().copied().filter(|&m| !context.mesh.is_local(m)).collect(),
            members: members.to_vec(),
            span: Span::new(context, members),
            memories: Mutex::default(),
            requests: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    /// The most bytes of data in one message: a whole number of units of any size.
    fn most(&self) -> usize {
        (self.transport.most() - 64) / 64 * 64
    }

    /// A rank on another host, by its number in the world.
    fn world_rank(&self, rank: usize) -> Option<usize> {
        self.members.get(rank).copied().filter(|_| self.is_far(rank))
    }

    pub(super) fn is_far(&self, rank: usize) -> bool {
        self.far.get(rank).is_some_and(|far| *far)
    }

    pub(super) fn far_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.far.len()).filter(|&rank| self.is_far(rank))
    }

    /// Receives what the members on other hosts have sent.
    pub(super) fn progress(&self) {
        self.transport.progress(&self.far_members);
    }

    pub(super) fn send_update(&self, to: usize, update: &PadUpdate) {
        let message = FarMessage::Pad(update.clone());
        match update {
            // The peer needs this only before its next signal, and one of our messages may go before that.
            PadUpdate::Slot { act: SlotAct::Taken, .. } => self.post_soon(to, &message, &[]),
            _ => self.post(to, &message),
        }
    }

    /// Sends rank `to` what this rank has staged, from byte `at` of its buffer on.
    pub(super) fn stage(&self, to: usize, epoch: u32, at: usize, bytes: &[u8]) {
        let most = self.most();
        for (i, bytes) in bytes.chunks(most).enumerate() {
            let message = FarMessage::Staged { epoch, at: at + i * most, bytes: RawBytes(&[]) };
            self.post_soon(to, &message, bytes); // it goes with the arrival, which follows
        }
    }

    fn post(&self, to: usize, message: &FarMessage<'_>) {
        if let Some(to) = self.world_rank(to) {
            self.transport.post(to, self.group, encode(message));
        }
    }

    /// A message that ends with `bytes`.
    fn post_soon(&self, to: usize, message: &FarMessage<'_>, bytes: &[u8]) {
        if let Some(to) = self.world_rank(to) {
            let head = encode_head(message, bytes.len());
            self.transport.post_soon(to, self.group, [&head, bytes]);
        }
    }

    /// Sends a message that ends with `bytes` once there is room: nothing else bounds messages without a reply.
    fn send(
        &self,
        to: usize,
        message: &FarMessage<'_>,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<()> {
        let Some(to) = self.world_rank(to) else { return Ok(()) };
        let head = encode_head(message, bytes.len());
        self.transport.send(to, self.group, [&head, bytes], deadline)
    }

    fn request(&self, target: FarAddress, request: Request, deadline: Deadline) -> Result<u64> {
        let mut requests = lock(&self.requests);
        requests.last += 1;
        let ticket = requests.last;
        requests.replies.insert(ticket, (target.rank, None));
        drop(requests);
        let FarAddress { rank, memory, at, unit } = target;
        let message = FarMessage::Request { ticket, memory, at, unit: unit as u8, request };
        self.send(rank, &message, &[], deadline).inspect_err(|_| drop(self.answer(ticket)))?;
        Ok(ticket)
    }

    fn has_reply(&self, ticket: u64) -> bool {
        lock(&self.requests).replies.get(&ticket).is_some_and(|(_, answer)| answer.is_some())
    }

    /// Takes the reply, or gives up waiting for it.
    fn answer(&self, ticket: u64) -> Option<Reply> {
        lock(&self.requests).replies.remove(&ticket)?.1
    }

    /// Memory that peers may access.
    fn served(&self, memory: u64) -> Option<(Arc<Block>, Arc<Mapping>)> {
        let memories = lock(&self.memories);
        let served = memories.get(&memory)?;
        Some((served.block.upgrade()?, served.mapping.upgrade()?))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is done under these locks that could leave a table half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listener for Formed {
    fn receive(&self, from: usize, bytes: &[u8]) -> Result<(), String> {
        let message: FarMessage<'_> = postcard::from_bytes(bytes).map_err(|e| e.to_string())?;
        let what = || format!("{message:?}");
        let Some(wire) = &self.signals.pads().0.wire else { return Err(what()) };
        let from = wire.members.iter().position(|&member| member == from);
        let from = from.filter(|&from| wire.is_far(from)).ok_or_else(what)?;
        self.apply(wire, from, &message).map_err(|InvalidMessage| what())
    }
}

impl Formed {
    /// Executes a message of rank `from`, on another host.
    fn apply(
        &self,
        wire: &Wire,
        from: usize,
        message: &FarMessage<'_>,
    ) -> Result<(), InvalidMessage> {
        match message {
            FarMessage::Pad(PadUpdate::Slot { pad, channel, act }) if *pad != GROUP => {
                // If the pad is gone, nobody waits for its words.
                let Some((_, mapping)) = wire.served(*pad) else { return Ok(()) };
                let ranks = wire.members.len();
                let word = |owner: usize, source: usize| {
                    let index = channel.checked_mul(ranks)?.checked_add(source)?;
                    mapping.pad(owner)?.get(index)
                };
                let own = self.signals.rank();
                let (ours, theirs) = word(own, from).zip(word(from, own)).ok_or(InvalidMessage)?;
                self.signals.apply_slot(ours, theirs, *act);
                self.signals.ring_own();
                Ok(())
            }
            FarMessage::Pad(update) => self.signals.apply(from, update),
            FarMessage::Staged { epoch, at, bytes } => {
                self.apply_staged(from, *epoch, *at, bytes.0)
            }
            FarMessage::Put { memory, at, unit, bytes: RawBytes(bytes) } => {
                let Some((block, _)) = wire.served(*memory) else { return Ok(()) };
                if !block.allows(Access::Write) {
                    let why = "a refusal: the memory is not open on that rank".to_owned();
                    wire.post(from, &FarMessage::Refused { memory: *memory, why });
                    return Ok(());
                }
                far_access::put(&block, (*at, usize::from(*unit)), bytes)?;
                self.signals.ring_own();
                Ok(())
            }
            FarMessage::Request { ticket, memory, at, unit, request } => {
                let answer = match wire.served(*memory) {
                    Some((block, _)) => {
                        let place = (*at, usize::from(*unit));
                        far_access::answer(&block, place, *request, wire.most())?
                    }
                    None => Err("a refusal: that rank has dropped the memory".to_owned()),
                };
                let reply = answer.as_deref().map(RawBytes).map_err(Clone::clone);
                wire.post(from, &FarMessage::Reply { ticket: *ticket, reply });
                Ok(())
            }
            FarMessage::Reply { ticket, reply } => {
                if let Some((requests, slot)) = lock(&wire.requests).replies.get_mut(ticket) {
                    if *requests != from || slot.is_some() {
                        return Err(InvalidMessage);
                    }
                    *slot = Some(reply.clone().map(|bytes| bytes.0.to_vec()));
                }
                self.signals.ring_own();
                Ok(())
            }
            FarMessage::Refused { memory, why } => {
                lock(&wire.refused).entry(*memory).or_insert_with(|| (from, why.clone()));
                Ok(())
            }
        }
    }

    fn apply_staged(
        &self,
        from: usize,
        epoch: u32,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), InvalidMessage> {
        let (pads, _) = self.signals.pads();
        // Otherwise this rank may be reading the bytes that would be overwritten.
        if !self.signals.is_next_of(from, epoch) || at.saturating_add(bytes.len()) > STAGE {
            return Err(InvalidMessage);
        }
        let offset = (epoch & 1) as usize * STAGE + at;
        let to = pads.stages.get(from).and_then(|stage| stage.at::<u8>(offset, bytes.len()).ok());
        let to = to.ok_or(InvalidMessage)?;
        // SAFETY: in the mirror, which nobody reads before the rank's arrival at the epoch has been heard.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Group {
    fn wire(&self) -> Option<&Wire> {
        self.0.health.formed.get()?.signals.pads().0.wire.as_ref()
    }

    /// How the ranks are spread over hosts, if they are on several. Only of a group that has been formed.
    pub(crate) fn span(&self) -> Option<&Span> {
        self.wire().map(|wire| &wire.span)
    }

    /// Lets members on other hosts access this memory.
    pub(crate) fn serve(&self, block: &Arc<Block>, mapping: &Arc<Mapping>) {
        let Some(wire) = self.wire() else { return };
        let mut memories = lock(&wire.memories);
        memories.retain(|_, served| served.mapping.strong_count() > 0);
        let served = Served { block: Arc::downgrade(block), mapping: Arc::downgrade(mapping) };
        memories.insert(mapping.number, served);
    }

    /// Relaxed: sends bytes to a rank on another host. The next signal or barrier of this rank follows them.
    pub(crate) fn put_far(&self, op: &'static str, target: FarAddress, data: &[u8]) -> Result<()> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(target.rank)) };
        self.check_whole(op)?;
        self.check_refused(op, target.memory)?;
        let deadline = self.deadline().start();
        let FarAddress { rank, memory, at, unit } = target;
        let most = wire.most();
        for (i, bytes) in data.chunks(most).enumerate() {
            let (unit, at) = (unit as u8, at + i * most);
            let message = FarMessage::Put { memory, at, unit, bytes: RawBytes(&[]) };
            wire.send(rank, &message, bytes, deadline).map_err(|e| self.of_far(op, rank, e))?;
        }
        Ok(())
    }

    /// Reads memory of a rank on another host into `out`, in pieces.
    pub(crate) fn get_far(
        &self,
        op: &'static str,
        target: FarAddress,
        out: &mut [u8],
    ) -> Result<()> {
        let deadline = self.deadline().start();
        let most = self.wire().ok_or_else(|| self.out_of_reach(target.rank))?.most();
        let mut tickets = Vec::new();
        for at in (0..out.len()).step_by(most) {
            let request = Request::Read(most.min(out.len() - at));
            let target = FarAddress { at: target.at + at, ..target };
            tickets.push(self.request_far(op, target, request, deadline)?);
        }
        for (ticket, out) in tickets.into_iter().zip(out.chunks_mut(most)) {
            let answer = self.await_reply(op, target, ticket, deadline)?;
            if answer.len() != out.len() {
                return Err(self.bad_reply(op, target.rank, format!("{} bytes", answer.len())));
            }
            out.copy_from_slice(&answer);
        }
        Ok(())
    }

    /// Changes an integer of a rank on another host. Returns its previous value.
    pub(crate) fn change_far(
        &self,
        op: &'static str,
        target: FarAddress,
        request: Request,
    ) -> Result<u64> {
        let deadline = self.deadline().start();
        let ticket = self.request_far(op, target, request, deadline)?;
        let answer = self.await_reply(op, target, ticket, deadline)?;
        let mut bytes = [0; 8];
        let end = bytes.get_mut(..answer.len()).filter(|_| answer.len() == target.unit);
        let Some(end) = end else {
            return Err(self.bad_reply(op, target.rank, format!("{} bytes", answer.len())));
        };
        end.copy_from_slice(&answer);
        Ok(u64::from_le_bytes(bytes))
    }

    fn request_far(
        &self,
        op: &'static str,
        target: FarAddress,
        request: Request,
        deadline: Deadline,
    ) -> Result<u64> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(target.rank)) };
        self.check_whole(op)?;
        self.check_refused(op, target.memory)?;
        wire.request(target, request, deadline).map_err(|e| self.of_far(op, target.rank, e))
    }

    fn await_reply(
        &self,
        op: &'static str,
        target: FarAddress,
        ticket: u64,
        deadline: Deadline,
    ) -> Result<Vec<u8>> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(target.rank)) };
        let act = Act { op, peer: target.rank, channel: None };
        let waited = self.await_act(act, deadline, || wire.has_reply(ticket));
        let answer = wire.answer(ticket);
        waited?;
        match answer {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(why)) => Err(self.bad_reply(op, target.rank, why)),
            None => Err(self.bad_reply(op, target.rank, "nothing".to_owned())),
        }
    }

    /// Fails if a rank has refused what was put to it.
    fn check_refused(&self, op: &'static str, memory: u64) -> Result<()> {
        let refused = self.wire().and_then(|wire| lock(&wire.refused).get(&memory).cloned());
        refused.map_or(Ok(()), |(rank, why)| Err(self.bad_reply(op, rank, why)))
    }

    fn bad_reply(&self, op: &'static str, rank: usize, got: String) -> Error {
        let (with, expected) = (format!("rank {rank}"), format!("a valid reply to {op}"));
        Error::Protocol { with, expected, got }
    }

    /// The error of a message to a rank on another host, with the operation that it was for.
    fn of_far(&self, op: &'static str, rank: usize, error: Error) -> Error {
        match error {
            Error::Timeout { after, .. } => {
                crate::sync::Expiry::Deadline.error(op, vec![rank], after)
            }
            Error::Interrupted { after, .. } => {
                crate::sync::Expiry::Interrupted.error(op, vec![rank], after)
            }
            other => other,
        }
    }
}
