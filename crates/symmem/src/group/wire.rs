//! The members of a group that are on other hosts: how they are told what this rank would otherwise do in their memory, and what
//! this rank does with what they tell.
#![allow(unsafe_code)] // S2 (by atomics, in a phase that allows it), S3 (bounds checked here)

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Group;
use super::context::Context;
use super::form::Formed;
use super::hosts::Span;
use super::signals::Act;
use super::staging::STAGE;
use super::told::{Ask, Told, Whole, encode, encode_head};
use crate::error::{Error, Result};
use crate::memory::block::{Access, Block, Mapping};
use crate::memory::region::Region;
use crate::memory::units::{load_units, store_units};
use crate::mesh::Listener;
use crate::signal::{GROUP, News, Nonsense, SlotAct};
use crate::sync::shared::{AtomicU32, AtomicU64};
use crate::sync::{Deadline, Ordering};
use crate::wire::Transport;

/// A place in a rank's part of the memory of a rendezvous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    /// The number of the rendezvous.
    pub(crate) memory: u64,
    /// Bytes from the beginning of the allocation.
    pub(crate) at: usize,
    /// The size of the atomics by which it is touched.
    pub(crate) unit: usize,
}

/// The way from one member of a group to those on other hosts.
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
    /// What peers may put to and ask of, by the number of its rendezvous.
    memories: Mutex<HashMap<u64, Served>>,
    asked: Mutex<Asked>,
    /// Why peers have refused puts, by the number of the rendezvous: the first of each.
    refused: Mutex<HashMap<u64, (usize, String)>>,
}

struct Served {
    block: Weak<Block>,
    mapping: Weak<Mapping>,
}

/// What this rank has asked for.
#[derive(Default)]
struct Asked {
    last: u64,
    /// Of what somebody waits for, by ticket: of which rank, and what it answered.
    answers: HashMap<u64, (usize, Option<Answer>)>,
}

/// What was found, or why nothing was done.
type Answer = std::result::Result<Vec<u8>, String>;

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
            asked: Mutex::default(),
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

    /// Takes in what has come from the members on other hosts.
    pub(super) fn progress(&self) {
        self.transport.progress(&self.far_members);
    }

    pub(super) fn tell(&self, to: usize, news: &News) {
        let told = Told::News(news.clone());
        match news {
            // The peer needs to know before its next signal, and ours may come first.
            News::Slot { act: SlotAct::Taken, .. } => self.post_soon(to, &told, &[]),
            _ => self.post(to, &told),
        }
    }

    /// Tells rank `to` what this rank has staged, from byte `at` of its buffer on.
    pub(super) fn stage(&self, to: usize, epoch: u32, at: usize, bytes: &[u8]) {
        let most = self.most();
        for (i, bytes) in bytes.chunks(most).enumerate() {
            let told = Told::Staged { epoch, at: at + i * most, bytes: Whole(&[]) };
            self.post_soon(to, &told, bytes); // the arrival comes behind it
        }
    }

    fn post(&self, to: usize, told: &Told<'_>) {
        if let Some(to) = self.world_rank(to) {
            self.transport.post(to, self.group, encode(told));
        }
    }

    /// A message of which `bytes` are the end.
    fn post_soon(&self, to: usize, told: &Told<'_>, bytes: &[u8]) {
        if let Some(to) = self.world_rank(to) {
            let head = encode_head(told, bytes.len());
            self.transport.post_soon(to, self.group, [&head, bytes]);
        }
    }

    /// As `post_soon`, once there is room for it: what nobody answers has no other bound.
    fn send(&self, to: usize, told: &Told<'_>, bytes: &[u8], deadline: Deadline) -> Result<()> {
        let Some(to) = self.world_rank(to) else { return Ok(()) };
        let head = encode_head(told, bytes.len());
        self.transport.send(to, self.group, [&head, bytes], deadline)
    }

    fn ask(&self, place: Place, ask: Ask, deadline: Deadline) -> Result<u64> {
        let mut asked = lock(&self.asked);
        asked.last += 1;
        let ticket = asked.last;
        asked.answers.insert(ticket, (place.rank, None));
        drop(asked);
        let Place { rank, memory, at, unit } = place;
        let told = Told::Ask { ticket, memory, at, unit: unit as u8, ask };
        self.send(rank, &told, &[], deadline).inspect_err(|_| drop(self.answer(ticket)))?;
        Ok(ticket)
    }

    fn is_answered(&self, ticket: u64) -> bool {
        lock(&self.asked).answers.get(&ticket).is_some_and(|(_, answer)| answer.is_some())
    }

    /// Takes the answer, or gives up waiting for it.
    fn answer(&self, ticket: u64) -> Option<Answer> {
        lock(&self.asked).answers.remove(&ticket)?.1
    }

    /// A memory that peers put to and ask of.
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
    fn told(&self, from: usize, bytes: &[u8]) -> Result<(), String> {
        let told: Told<'_> = postcard::from_bytes(bytes).map_err(|e| e.to_string())?;
        let what = || format!("{told:?}");
        let Some(wire) = &self.signals.pads().0.wire else { return Err(what()) };
        let from = wire.members.iter().position(|&member| member == from);
        let from = from.filter(|&from| wire.is_far(from)).ok_or_else(what)?;
        self.hear(wire, from, &told).map_err(|Nonsense| what())
    }
}

impl Formed {
    /// What rank `from`, on another host, tells.
    fn hear(&self, wire: &Wire, from: usize, told: &Told<'_>) -> Result<(), Nonsense> {
        match told {
            Told::News(News::Slot { pad, channel, act }) if *pad != GROUP => {
                // Nobody waits in a pad that is gone.
                let Some((_, mapping)) = wire.served(*pad) else { return Ok(()) };
                let ranks = wire.members.len();
                let word = |owner: usize, source: usize| {
                    let index = channel.checked_mul(ranks)?.checked_add(source)?;
                    mapping.pad(owner)?.get(index)
                };
                let own = self.signals.rank();
                let (ours, theirs) = word(own, from).zip(word(from, own)).ok_or(Nonsense)?;
                self.signals.hear_slot(ours, theirs, *act);
                self.signals.ring_own();
                Ok(())
            }
            Told::News(news) => self.signals.hear(from, news),
            Told::Staged { epoch, at, bytes } => self.hear_staged(from, *epoch, *at, bytes.0),
            Told::Put { memory, at, unit, bytes: Whole(bytes) } => {
                let Some((block, _)) = wire.served(*memory) else { return Ok(()) };
                if !block.allows(Access::Write) {
                    let why = "the memory is not open there".to_owned();
                    wire.post(from, &Told::Refused { memory: *memory, why });
                    return Ok(());
                }
                let unit = usize::from(*unit);
                let to = place_in(&block, *at, bytes.len(), unit).ok_or(Nonsense)?;
                crate::sync::atomic::fence(Ordering::Release); // a word is found with all that was told before it
                // SAFETY: within the data of a block that is held here, at a multiple of the unit; in this phase everyone
                // touches it by such atomics.
                unsafe { store_units(unit, bytes.as_ptr(), to, bytes.len()) };
                self.signals.ring_own();
                Ok(())
            }
            Told::Ask { ticket, memory, at, unit, ask } => {
                let answer = match wire.served(*memory) {
                    Some((block, _)) => {
                        answer(&block, (*at, wire.most()), usize::from(*unit), *ask)?
                    }
                    None => Err("the memory is gone there".to_owned()),
                };
                let answer = answer.as_deref().map(Whole).map_err(Clone::clone);
                wire.post(from, &Told::Answer { ticket: *ticket, answer });
                Ok(())
            }
            Told::Answer { ticket, answer } => {
                if let Some((asked, place)) = lock(&wire.asked).answers.get_mut(ticket) {
                    if *asked != from || place.is_some() {
                        return Err(Nonsense);
                    }
                    *place = Some(answer.clone().map(|bytes| bytes.0.to_vec()));
                }
                self.signals.ring_own();
                Ok(())
            }
            Told::Refused { memory, why } => {
                lock(&wire.refused).entry(*memory).or_insert_with(|| (from, why.clone()));
                Ok(())
            }
        }
    }

    fn hear_staged(
        &self,
        from: usize,
        epoch: u32,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), Nonsense> {
        let (pads, _) = self.signals.pads();
        // Else this rank may be reading what would be written.
        if !self.signals.is_next_of(from, epoch) || at.saturating_add(bytes.len()) > STAGE {
            return Err(Nonsense);
        }
        let offset = (epoch & 1) as usize * STAGE + at;
        let to = pads.stages.get(from).and_then(|stage| stage.at::<u8>(offset, bytes.len()).ok());
        let to = to.ok_or(Nonsense)?;
        // SAFETY: in the mirror, which nobody reads before the rank's arrival at the epoch has been heard.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// `bytes` of the data of a block at a multiple of `unit`, which is a size of atomics.
fn place_in(block: &Block, at: usize, bytes: usize, unit: usize) -> Option<*mut u8> {
    let fits = at.checked_add(bytes).is_some_and(|end| end <= block.shape().bytes);
    let is_whole = [1, 2, 4, 8].contains(&unit) && at.is_multiple_of(unit);
    let data: &Region = block.region();
    let first = data.at::<u8>(at, bytes).ok().filter(|_| fits && is_whole)?;
    bytes.is_multiple_of(unit).then_some(first.as_ptr())
}

/// Does what a peer asks for.
fn answer(
    block: &Block,
    (at, most): (usize, usize),
    unit: usize,
    ask: Ask,
) -> std::result::Result<Answer, Nonsense> {
    let (bytes, access) = match ask {
        Ask::Read(bytes) => (bytes, Access::Read),
        Ask::Add(_) | Ask::Swap { .. } => (unit, Access::Write),
    };
    if !block.allows(access) {
        return Ok(Err("the memory is in another phase there".to_owned()));
    }
    if bytes > most {
        return Err(Nonsense);
    }
    let place = place_in(block, at, bytes, unit).ok_or(Nonsense)?;
    let mut found = vec![0; bytes];
    match (ask, unit) {
        (Ask::Read(_), _) => {
            // SAFETY: within the data of a block that is held here, at a multiple of the unit; nobody writes it meanwhile, or
            // only by such atomics.
            unsafe { load_units(unit, place, found.as_mut_ptr(), bytes) };
        }
        (ask, 4) => {
            // SAFETY: as above.
            let word = unsafe { AtomicU32::from_ptr(place.cast()) };
            let before = match ask {
                Ask::Swap { expected, new } => swapped(word.compare_exchange(
                    expected as u32,
                    new as u32,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                )),
                Ask::Add(value) => word.fetch_add(value as u32, Ordering::AcqRel),
                Ask::Read(_) => return Err(Nonsense),
            };
            found.copy_from_slice(&before.to_le_bytes());
        }
        (ask, 8) => {
            // SAFETY: as above.
            let word = unsafe { AtomicU64::from_ptr(place.cast()) };
            let before = match ask {
                Ask::Swap { expected, new } => swapped(word.compare_exchange(
                    expected,
                    new,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                )),
                Ask::Add(value) => word.fetch_add(value, Ordering::AcqRel),
                Ask::Read(_) => return Err(Nonsense),
            };
            found.copy_from_slice(&before.to_le_bytes());
        }
        _ => return Err(Nonsense),
    }
    Ok(Ok(found))
}

fn swapped<V>(result: std::result::Result<V, V>) -> V {
    result.unwrap_or_else(|found| found)
}

impl Group {
    fn wire(&self) -> Option<&Wire> {
        self.0.health.formed.get()?.signals.pads().0.wire.as_ref()
    }

    /// How the ranks are spread over hosts, where they are on several; of a group that is formed.
    pub(crate) fn span(&self) -> Option<&Span> {
        self.wire().map(|wire| &wire.span)
    }

    /// Lets members on other hosts put to and ask of a memory.
    pub(crate) fn serve(&self, block: &Arc<Block>, mapping: &Arc<Mapping>) {
        let Some(wire) = self.wire() else { return };
        let mut memories = lock(&wire.memories);
        memories.retain(|_, served| served.mapping.strong_count() > 0);
        let served = Served { block: Arc::downgrade(block), mapping: Arc::downgrade(mapping) };
        memories.insert(mapping.number, served);
    }

    /// Relaxed: hands bytes over to a rank on another host. The next signal or barrier of this rank comes behind them.
    pub(crate) fn put_far(&self, op: &'static str, place: Place, data: &[u8]) -> Result<()> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(place.rank)) };
        self.check_whole(op)?;
        self.check_refused(op, place.memory)?;
        let deadline = self.deadline().start();
        let Place { rank, memory, at, unit } = place;
        let most = wire.most();
        for (i, bytes) in data.chunks(most).enumerate() {
            let (unit, at) = (unit as u8, at + i * most);
            let told = Told::Put { memory, at, unit, bytes: Whole(&[]) };
            wire.send(rank, &told, bytes, deadline).map_err(|e| self.of_far(op, rank, e))?;
        }
        Ok(())
    }

    /// Asks a rank on another host, and waits for what it answers: a read, in pieces, into `out`.
    pub(crate) fn get_far(&self, op: &'static str, place: Place, out: &mut [u8]) -> Result<()> {
        let deadline = self.deadline().start();
        let most = self.wire().ok_or_else(|| self.out_of_reach(place.rank))?.most();
        let mut tickets = Vec::new();
        for at in (0..out.len()).step_by(most) {
            let ask = Ask::Read(most.min(out.len() - at));
            let place = Place { at: place.at + at, ..place };
            tickets.push(self.ask_far(op, place, ask, deadline)?);
        }
        for (ticket, out) in tickets.into_iter().zip(out.chunks_mut(most)) {
            let answer = self.await_answer(op, place, ticket, deadline)?;
            if answer.len() != out.len() {
                return Err(self.bad_answer(op, place.rank, format!("{} bytes", answer.len())));
            }
            out.copy_from_slice(&answer);
        }
        Ok(())
    }

    /// Changes an integer of a rank on another host; what was there before.
    pub(crate) fn change_far(&self, op: &'static str, place: Place, ask: Ask) -> Result<u64> {
        let deadline = self.deadline().start();
        let ticket = self.ask_far(op, place, ask, deadline)?;
        let answer = self.await_answer(op, place, ticket, deadline)?;
        let mut bytes = [0; 8];
        let end = bytes.get_mut(..answer.len()).filter(|_| answer.len() == place.unit);
        let Some(end) = end else {
            return Err(self.bad_answer(op, place.rank, format!("{} bytes", answer.len())));
        };
        end.copy_from_slice(&answer);
        Ok(u64::from_le_bytes(bytes))
    }

    fn ask_far(&self, op: &'static str, place: Place, ask: Ask, deadline: Deadline) -> Result<u64> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(place.rank)) };
        self.check_whole(op)?;
        self.check_refused(op, place.memory)?;
        wire.ask(place, ask, deadline).map_err(|e| self.of_far(op, place.rank, e))
    }

    fn await_answer(
        &self,
        op: &'static str,
        place: Place,
        ticket: u64,
        deadline: Deadline,
    ) -> Result<Vec<u8>> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(place.rank)) };
        let act = Act { op, peer: place.rank, channel: 0 };
        let waited = self.await_act(act, deadline, || wire.is_answered(ticket));
        let answer = wire.answer(ticket);
        waited?;
        match answer {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(why)) => Err(self.bad_answer(op, place.rank, why)),
            None => Err(self.bad_answer(op, place.rank, "nothing".to_owned())),
        }
    }

    /// Fails if a rank has refused what was put to it.
    fn check_refused(&self, op: &'static str, memory: u64) -> Result<()> {
        let refused = self.wire().and_then(|wire| lock(&wire.refused).get(&memory).cloned());
        refused.map_or(Ok(()), |(rank, why)| Err(self.bad_answer(op, rank, why)))
    }

    fn bad_answer(&self, op: &'static str, rank: usize, got: String) -> Error {
        let (with, expected) = (format!("rank {rank}"), format!("that it takes part in {op}"));
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
