//! The members of a group that are on other hosts: this rank sends them messages in place of stores to their memory, and
//! executes the messages that they send.
#![allow(unsafe_code)] // S2 (by atomics, in a phase that allows it), S3 (bounds checked here)

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::Group;
use super::context::Context;
use super::far_access::{self, Reply};
use super::far_calls::FarAddress;
use super::far_message::{FarMessage, RawBytes, Request, StagedHead, encode, encode_head};
use super::form::Formed;
use super::hosts::Span;
use super::loans::{Lent, Loans};
use super::staging::{buffer, stage_between_hosts, stage_within_host};
use crate::error::Result;
use crate::memory::block::{Access, Block, Mapping};
use crate::memory::region::Region;
use crate::mesh::{Landing, Listener};
use crate::signal::{GROUP, InvalidMessage, PadUpdate, SlotAct};
use crate::sync::shared::AtomicU64;
use crate::sync::{Deadline, Ordering, lock};
use crate::wire::{Parts, Transport};

/// What is staged and shorter is copied, to go with the next message.
const WORTH_KEEPING: usize = 12 << 10;

/// The connections from one member of a group to those on other hosts.
pub(super) struct Wire {
    group: u128,
    transport: Arc<dyn Transport>,
    /// By rank in the group: whether it is on another host.
    far: Vec<bool>,
    /// World ranks, in group order.
    members: Vec<usize>,
    /// By rank of the world: how many messages it has been sent, of all groups, that arrivals must not overtake.
    sent: Arc<[AtomicU64]>,
    span: Span,
    /// Bytes of a staging buffer in a mirror; the same on all ranks.
    pub(super) stage: usize,
    /// The memory that peers may access, by the number of its rendezvous.
    memories: Mutex<HashMap<u64, Served>>,
    /// What goes with the next arrivals.
    staged: Mutex<Vec<Staged>>,
    /// Where bytes are received in place of mirrors. Held while they are copied there.
    pub(super) lent: Lent,
    requests: Mutex<Requests>,
    /// Why peers have refused puts, by the number of the rendezvous: the first of each.
    pub(super) refused: Mutex<HashMap<u64, (usize, String)>>,
}

/// Bytes to send: to which rank, where they belong there, and where they are.
struct Staged {
    to: usize,
    epoch: u32,
    at: usize,
    bytes: *const [u8],
}

// SAFETY: they may be read until they are forgotten, by any thread.
unsafe impl Send for Staged {}

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
    pub(super) fn to(
        context: &Context,
        members: &[usize],
        group: u128,
        window: u64,
    ) -> Option<Self> {
        let far: Vec<bool> = members.iter().map(|&m| !context.mesh.is_local(m)).collect();
        let transport = context.choice.chosen().filter(|_| far.contains(&true))?;
        let span = Span::new(context, members);
        let stage = stage_between_hosts(span.room(), window);
        Some(Self {
            group,
            transport: Arc::clone(transport),
            far,
            members: members.to_vec(),
            sent: Arc::clone(&context.sent),
            span,
            stage,
            memories: Mutex::default(),
            staged: Mutex::default(),
            lent: Lent::default(),
            requests: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    /// The most bytes of data in one message: a whole number of units of any size.
    pub(super) fn most(&self) -> usize {
        (self.transport.most() - 64) / 64 * 64
    }

    /// A rank on another host, by its number in the world.
    fn world_rank(&self, rank: usize) -> Option<usize> {
        self.members.get(rank).copied().filter(|_| self.is_far(rank))
    }

    pub(super) fn is_far(&self, rank: usize) -> bool {
        self.far.get(rank).is_some_and(|far| *far)
    }

    /// The number of a rank's host.
    pub(super) fn host(&self, rank: usize) -> usize {
        self.span.hosts().iter().position(|host| host.contains(&rank)).unwrap_or_default()
    }

    pub(super) fn sent(&self, to: usize) -> u64 {
        let count = self.members.get(to).and_then(|&member| self.sent.get(member));
        count.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Counts a message, after it was posted: whoever reads the count posts its arrival behind it.
    fn count(&self, world_rank: usize) {
        if let Some(count) = self.sent.get(world_rank) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn far_ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.far.len()).filter(|&rank| self.is_far(rank))
    }

    /// Receives what these members on other hosts have sent.
    pub(super) fn progress(&self, from: &[usize]) {
        for &rank in from {
            self.transport.progress(self.members.get(rank..=rank).unwrap_or_default());
        }
    }

    pub(super) fn send_update(&self, to: usize, update: &PadUpdate) {
        let message = FarMessage::Pad(update.clone());
        match update {
            // The peer needs this only before its next signal, and one of our messages may go before that.
            PadUpdate::Slot { act: SlotAct::Taken, .. } => self.post_soon(to, &message),
            _ => self.post(to, &message),
        }
    }

    /// Sends rank `to` what this rank has staged, from byte `at` of its buffer on: with its next arrival there.
    ///
    /// # Safety
    /// The bytes may be read until [`Wire::forget_staged`] is called.
    pub(super) unsafe fn stage(&self, to: usize, epoch: u32, at: usize, bytes: &[u8]) {
        let Some(member) = self.world_rank(to) else { return };
        if bytes.len() < WORTH_KEEPING {
            let message = FarMessage::Staged { epoch, at, bytes: RawBytes(&[]) };
            let head = encode_head(&message, bytes.len());
            self.transport.post_soon(member, self.group, &[[&head, bytes]]);
        } else {
            lock(&self.staged).push(Staged { to, epoch, at, bytes });
        }
        self.count(member);
    }

    /// Nothing of what was staged is sent any more.
    pub(super) fn forget_staged(&self) {
        lock(&self.staged).clear();
    }

    /// Nothing of what ranks of other hosts send is received into memory that was lent.
    pub(super) fn end_loans(&self) {
        let far = self.far_ranks().filter_map(|rank| self.world_rank(rank));
        far.for_each(|rank| self.transport.end_loan(rank));
    }

    /// Sends an arrival, after what was staged for the rank: by the thread that has staged it, and no other may do so.
    pub(super) fn send_arrival(&self, to: usize, arrival: &PadUpdate) {
        let Some(member) = self.world_rank(to) else { return };
        let arrival = &FarMessage::Pad(arrival.clone());
        let mut staged = lock(&self.staged);
        if staged.iter().all(|staged| staged.to != to) {
            drop(staged);
            return self.transport.post(member, self.group, encode(arrival));
        }
        let most = self.most();
        let (mut heads, mut bodies): (Vec<Vec<u8>>, Vec<&[u8]>) = Default::default();
        for Staged { epoch, at, bytes, .. } in staged.extract_if(.., |staged| staged.to == to) {
            // SAFETY: as the caller of `stage` has promised.
            let bytes = unsafe { &*bytes };
            for (i, body) in bytes.chunks(most).enumerate() {
                let message = FarMessage::Staged { epoch, at: at + i * most, bytes: RawBytes(&[]) };
                heads.push(encode_head(&message, body.len()));
                bodies.push(body);
            }
        }
        drop(staged);
        heads.push(encode(arrival));
        bodies.push(&[]);
        let parts: Vec<Parts<'_>> =
            heads.iter().zip(bodies).map(|(head, body)| [&head[..], body]).collect();
        self.transport.post_all(member, self.group, &parts);
    }

    /// Calls `send` with the messages that carry these bytes. `message` says what one begins with whose bytes begin there among them.
    pub(super) fn in_messages<'a, R>(
        &self,
        bytes: &[u8],
        message: impl Fn(usize) -> FarMessage<'a>,
        send: impl FnOnce(&[Parts<'_>]) -> R,
    ) -> R {
        let most = self.most();
        if bytes.len() <= most {
            return send(&[[&encode_head(&message(0), bytes.len()), bytes]]);
        }
        let pieces = || bytes.chunks(most);
        let head = |(i, piece): (usize, &[u8])| encode_head(&message(i * most), piece.len());
        let heads: Vec<Vec<u8>> = pieces().enumerate().map(head).collect();
        let parts = heads.iter().zip(pieces()).map(|(head, piece)| [&head[..], piece]);
        send(&parts.collect::<Vec<_>>())
    }

    pub(super) fn post(&self, to: usize, message: &FarMessage<'_>) {
        let Some(to) = self.world_rank(to) else { return };
        self.transport.post(to, self.group, encode(message));
        match message {
            FarMessage::Reply { .. } => {} // the peer waits for it
            FarMessage::Pad(update) if update.is_arrival() => {}
            _ => self.count(to),
        }
    }

    fn post_soon(&self, to: usize, message: &FarMessage<'_>) {
        if let Some(to) = self.world_rank(to) {
            self.transport.post_soon(to, self.group, &[[&encode(message), &[]]]);
            self.count(to);
        }
    }

    /// As [`send`](Self::send), a message that ends with `bytes`.
    pub(super) fn send_one(
        &self,
        to: usize,
        message: &FarMessage<'_>,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<()> {
        self.send(to, &[[&encode_head(message, bytes.len()), bytes]], deadline)
    }

    /// Sends messages once there is room: nothing else bounds those without a reply.
    pub(super) fn send(&self, to: usize, messages: &[Parts<'_>], deadline: Deadline) -> Result<()> {
        let Some(to) = self.world_rank(to) else { return Ok(()) };
        self.transport.send(to, self.group, messages, deadline)?;
        self.count(to);
        Ok(())
    }

    pub(super) fn request(
        &self,
        target: FarAddress,
        request: Request,
        deadline: Deadline,
    ) -> Result<u64> {
        let mut requests = lock(&self.requests);
        requests.last += 1;
        let ticket = requests.last;
        requests.replies.insert(ticket, (target.rank, None));
        drop(requests);
        let FarAddress { rank, memory, at, unit } = target;
        let message = FarMessage::Request { ticket, memory, at, unit: unit as u8, request };
        let sent = self.send_one(rank, &message, &[], deadline);
        sent.inspect_err(|_| drop(self.answer(ticket)))?;
        Ok(ticket)
    }

    pub(super) fn has_reply(&self, ticket: u64) -> bool {
        lock(&self.requests).replies.get(&ticket).is_some_and(|(_, answer)| answer.is_some())
    }

    /// Takes the reply, or gives up waiting for it.
    pub(super) fn answer(&self, ticket: u64) -> Option<Reply> {
        lock(&self.requests).replies.remove(&ticket)?.1
    }

    /// Memory that peers may access.
    fn served(&self, memory: u64) -> Option<(Arc<Block>, Arc<Mapping>)> {
        let memories = lock(&self.memories);
        let served = memories.get(&memory)?;
        Some((served.block.upgrade()?, served.mapping.upgrade()?))
    }
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

    fn leaving(&self) {
        self.signals.tell_of_arrivals(); // or others would hear of them after our goodbye
    }

    /// What is staged is not read before the flag that follows it, so it may come in any number of pieces.
    fn land(&self, from: usize, beginning: &[u8], rest: usize) -> Option<Landing> {
        let (StagedHead { epoch, at, bytes }, begun) = StagedHead::read(beginning)?;
        let wire = self.signals.pads().0.wire.as_ref()?;
        let from = wire.members.iter().position(|&member| member == from);
        let from = from.filter(|&from| wire.is_far(from) && begun.len() + rest == bytes)?;
        let (mirror, offset) = self.mirrored(from, epoch, at, bytes).ok()?;
        let mut place = match wire.lent.hold().place(from, epoch, at, bytes) {
            // SAFETY: as whoever lends it has promised; before that is over, the loan ends.
            Some(first) => unsafe { Landing::lent(first, bytes) },
            // SAFETY: in the mirror, which safe code never sees. Nobody reads it before the rank's arrival at the epoch has been
            // received, and of this rank's messages none is received before the rest of this one.
            None => unsafe { Landing::new(mirror.part(offset, bytes).ok()?) }?,
        };
        place.put(begun);
        Some(place)
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
                self.apply_staged(wire, from, (*epoch, *at), bytes.0)
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
            FarMessage::Fragment { header, bytes } => {
                let queue = self.p2p.far(from, wire.members.len());
                queue.deliver(*header, bytes.0).map_err(|_| InvalidMessage)?;
                self.signals.ring_own();
                Ok(())
            }
            FarMessage::FragmentsTaken { total } => {
                self.p2p.far(from, wire.members.len()).note_taken(*total);
                self.signals.ring_own();
                Ok(())
            }
            FarMessage::Withdrawn { number } => {
                self.p2p.far(from, wire.members.len()).note_withdrawn(*number);
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
        wire: &Wire,
        from: usize,
        (epoch, at): (u32, usize),
        bytes: &[u8],
    ) -> Result<(), InvalidMessage> {
        let (mirror, offset) = self.mirrored(from, epoch, at, bytes.len())?;
        let lent = wire.lent.hold(); // until they are there
        let to = match lent.place(from, epoch, at, bytes.len()) {
            Some(first) => first,
            None => mirror.at::<u8>(offset, bytes.len()).map_err(|_| InvalidMessage)?,
        };
        // SAFETY: in the mirror, which nobody reads before the rank's arrival at the epoch has been heard.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The mirror of rank `from`, and the byte of it from which on so many that the rank stages for an exchange belong.
    fn mirrored(
        &self,
        from: usize,
        epoch: u32,
        at: usize,
        bytes: usize,
    ) -> Result<(&Region, usize), InvalidMessage> {
        let (pads, _) = self.signals.pads();
        // Otherwise this rank may be reading the bytes that would be overwritten.
        let mirror = pads.stages.get(from).filter(|_| self.signals.is_next_of(from, epoch));
        let mirror = mirror.ok_or(InvalidMessage)?;
        // Or its neighbours may.
        let is_shared = pads.relayed.get(from).is_some_and(Option::is_some);
        if is_shared && !self.signals.have_all_left(epoch) {
            return Err(InvalidMessage);
        }
        let (first, most) = buffer(mirror, epoch);
        let fits = at.checked_add(bytes).is_some_and(|end| end <= most);
        fits.then_some((mirror, first + at)).ok_or(InvalidMessage)
    }
}

impl Group {
    /// Loans of a call of this group, if it spans hosts.
    pub(crate) fn loans(&self) -> Option<Loans<'_>> {
        self.wire().map(Loans)
    }

    pub(super) fn wire(&self) -> Option<&Wire> {
        self.0.health.formed.get()?.signals.pads().0.wire.as_ref()
    }

    /// How the ranks are spread over hosts, if they are on several. Only of a group that has been formed.
    pub(crate) fn span(&self) -> Option<&Span> {
        self.wire().map(|wire| &wire.span)
    }

    /// Bytes of a piece that every rank has a staging buffer for; the same on all ranks.
    #[inline]
    pub(crate) fn stage(&self) -> usize {
        self.wire().map_or_else(|| stage_within_host(self.size()), |wire| wire.stage)
    }

    /// Lets members on other hosts access this memory.
    pub(crate) fn serve(&self, block: &Arc<Block>, mapping: &Arc<Mapping>) {
        let Some(wire) = self.wire() else { return };
        let mut memories = lock(&wire.memories);
        memories.retain(|_, served| served.mapping.strong_count() > 0);
        let served = Served { block: Arc::downgrade(block), mapping: Arc::downgrade(mapping) };
        memories.insert(mapping.number, served);
    }
}
