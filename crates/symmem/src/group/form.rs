//! Forming a group: every member sends its pad to the others when it creates the group, and receives theirs when it
//! first uses it. So creating a group never waits, and groups may be created in any order.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::context::{Context, Name};
use super::conversation::{Conversation, Proposal};
use super::health::{Departure, Health};
use super::hosts::Span;
use super::numbering::Sequence;
use super::p2p::P2p;
use super::staging::{RegionPads, staging_offset};
use super::wire::Wire;
use super::{Group, Inner, check_pad_size, no_descriptor};
use serde::{Deserialize, Serialize};

use crate::dtype::Order;
use crate::error::{Error, Result};
use crate::machine::{self, Costs, Rates};
use crate::memory::region::{Region, Words};
use crate::memory::{Allocation, Exported};
use crate::mesh::{Gone, Listener, Phase, Scope, Subject};
use crate::signal::{Layout, Signals};
use crate::sync::atomic::AtomicU32;
use crate::sync::{Deadline, Expiry, Ordering, Patience, Setting, SharedWord, lock_by};
use crate::wire::Offer;

/// The operation that forms the group of all ranks.
pub(super) const WORLD: &str = "world";

/// The settings of a group.
pub(super) struct Spec {
    pub(super) op: &'static str,
    /// How the members find each other.
    pub(super) scope: String,
    /// The name for users.
    pub(super) label: String,
    pub(super) _claim: Option<Name>,
    /// World ranks, in the order of their ranks in the group.
    pub(super) members: Vec<usize>,
    pub(super) pad_size: usize,
    pub(super) limit: Deadline,
    pub(super) order: Order,
    /// The original group that this one was shrunk from.
    pub(super) root: Option<Root>,
}

impl Spec {
    pub(super) fn channels(&self) -> usize {
        self.pad_size / (4 * self.members.len())
    }

    pub(super) fn layout(&self) -> Layout {
        Layout::new(self.members.len(), self.channels())
    }

    /// Words, and behind them the staging.
    fn pad_bytes(&self, context: &Context) -> usize {
        let span = Span::new(context, &self.members);
        staging_offset(self.layout()) + 2 * span.room_in_pads() * (1 + span.shared_mirrors())
    }

    fn terms(&self) -> [(&'static str, String); 2] {
        [
            ("signal pad size", format!("{} bytes", self.pad_size)),
            ("order of reductions", format!("{:?}", self.order)),
        ]
    }

    fn make_pad(&self, context: &Context, rank: usize) -> Result<(Allocation, Proposal)> {
        let pad = context.pad_backend.allocate(self.pad_bytes(context))?;
        let rates = match rank {
            0 => self.rates(context).words().to_vec(),
            _ => Vec::new(),
        };
        // Nobody else has the pad yet, and sending it orders these stores before all who get it.
        let words = pad.region.words(4 * Layout::RATES, rates.len())?;
        words.iter().zip(&rates).for_each(|(word, rate)| word.store(*rate, Ordering::Relaxed));
        let id = crate::mesh::endpoint::random()?;
        let window = context.mesh.window_from(&self.members);
        let offer = context.choice.offer().filter(|_| self.op == WORLD).cloned();
        let data = postcard::to_stdvec(&Details { id, rates, offer, window }).unwrap_or_default();
        Ok((pad, Proposal::new(&self.terms(), data)))
    }

    fn rates(&self, context: &Context) -> Rates {
        let near = self.members.iter().filter(|&&member| context.mesh.is_local(member)).count();
        let (costs, ranks, cores) = (Costs::here(), self.members.len(), machine::cores());
        match near < ranks {
            true => costs.between_hosts(near, ranks, cores),
            false => costs.among(ranks, cores),
        }
    }

    /// The conversation in which the group is formed.
    fn conversation<'a>(
        &'a self,
        context: &'a Context,
        rank: usize,
        subject: &Subject,
        deadline: Deadline,
    ) -> Conversation<'a> {
        Conversation {
            context,
            group: None,
            members: &self.members,
            rank,
            op: self.op,
            subject: subject.clone(),
            deadline: deadline.start(),
        }
    }

    /// This rank's number in the group, if the settings are valid.
    fn check(&self, context: &Context) -> Result<usize> {
        let world_rank = context.mesh.rank();
        check_pad_size(self.op, Some(world_rank), self.pad_size, self.members.len())?;
        self.members.iter().position(|&m| m == world_rank).ok_or_else(|| Error::Usage {
            op: self.op,
            rank: Some(world_rank),
            expected: "a group with this rank in it".into(),
            got: format!("{:?}", self.members),
        })
    }
}

/// What a member proposes besides its terms: the data of its `Proposal`.
#[derive(Serialize, Deserialize)]
struct Details {
    /// The id of the group, from rank 0; the ids of other ranks are not used.
    id: u128,
    /// The costs by which all members choose algorithms, from rank 0.
    rates: Vec<u32>,
    /// For the world: how the member could reach other hosts.
    offer: Option<Offer>,
    /// How much other hosts may have under way to the member.
    window: u64,
}

impl Details {
    /// What counts for all members: rank 0's, and the least window.
    fn of_all(details: Vec<Self>) -> Option<Self> {
        let window = details.iter().map(|details| details.window).min()?;
        details.into_iter().next().map(|first| Self { window, ..first })
    }
}

/// A group that is being formed.
pub(super) struct Forming {
    /// This rank's pad, and what it proposes.
    own: (Allocation, Proposal),
    /// All proposals, once they have arrived, so that a later call reaches the same verdict.
    proposals: Option<Vec<Proposal>>,
    /// A member was lost, or cannot take part: the group will never be formed.
    over: bool,
    /// A rank forms a group of this name with other members: that rank, and those.
    elsewhere: Option<(usize, String)>,
}

/// A group whose pads are mapped.
pub(super) struct Formed {
    pub(super) id: u128,
    pub(super) signals: Signals<RegionPads>,
    pub(super) sequence: Sequence,
    /// The costs by which all members choose algorithms.
    rates: Rates,
    /// How many groups of survivors this rank has begun to form; see `Group::shrink`.
    pub(super) generations: AtomicU32,
    /// The first lost member that all hosts agree on, if the group spans several.
    pub(super) first_lost: OnceLock<usize>,
    pub(super) p2p: P2p,
}

impl RegionPads {
    /// Those that rank 0 wrote into its pad before it sent it.
    fn rates(&self) -> Rates {
        let word = |i| self.words.first().and_then(|words| words.get(Layout::RATES + i));
        let rate = |i| word(i).map_or(0, |word: &SharedWord| word.load(Ordering::Relaxed));
        Rates::from_words(std::array::from_fn(rate))
    }
}

/// What remains of a group for its survivors, so that they find each other.
#[derive(Clone)]
pub(super) struct Root {
    pub(super) spec: Arc<Spec>,
    pub(super) rank: usize,
    pub(super) formed: Arc<Formed>,
}

impl Group {
    /// Creates a group: sends the proposal to the other members without waiting.
    pub(super) fn begin(context: &Arc<Context>, spec: Spec) -> Result<Self> {
        let rank = spec.check(context)?;
        let scope = Scope::Forming { name: spec.scope.clone(), members: spec.members.clone() };
        let subject = context.mesh.inbox().begin(scope);
        let made = spec.make_pad(context, rank).or_else(|e| {
            // Otherwise the others would wait for this rank until their deadline.
            let told =
                spec.conversation(context, rank, &subject, spec.limit).abort(Phase::Proposal, e);
            context.mesh.inbox().close(&subject);
            told
        });
        let (pad, own) = made?;
        let inner = Arc::new(Inner {
            health: Arc::new(Health::new(&spec.members, rank, subject, &context.world)),
            context: Arc::clone(context),
            channels: spec.channels(),
            limit: Setting::new(spec.limit.remaining().map_or(0, nanos)),
            spec: Arc::new(spec),
            forming: Mutex::new(Forming {
                own: (pad.clone(), own.clone()),
                proposals: None,
                over: false,
                elsewhere: None,
            }),
            rendezvous: Mutex::new(()),
            awaited: Mutex::new(None),
            not_made: Mutex::new(None),
            resyncing: Mutex::new(()),
            resync_hooks: Mutex::default(),
            attached: Mutex::default(),
        });
        let observer: Weak<Health> = Arc::downgrade(&inner.health);
        context.mesh.watch(observer);
        inner
            .conversation(inner.spec.limit)
            .send_proposals(&own, &|| pad.export(false).map(Some))?;
        Ok(Self(inner))
    }

    /// The order in which its reductions combine the ranks' elements.
    pub fn order(&self) -> Order {
        self.0.spec.order
    }

    /// Waits until all members have created the group. Collective, once; any use of the group does the same.
    pub fn ready(&self) -> Result<()> {
        self.ready_by(self.deadline())
    }

    pub(super) fn ready_by(&self, deadline: Deadline) -> Result<()> {
        if self.0.health.formed.get().is_none() { self.0.form(deadline) } else { Ok(()) }
    }

    #[inline]
    pub(super) fn formed(&self) -> Result<&Arc<Formed>> {
        self.formed_by(self.deadline())
    }

    /// The costs by which all members choose algorithms: the same on all, so that all choose alike.
    #[inline]
    pub(crate) fn rates(&self) -> Result<&Rates> {
        self.formed().map(|formed| &formed.rates)
    }

    #[inline]
    pub(super) fn formed_by(&self, deadline: Deadline) -> Result<&Arc<Formed>> {
        match self.0.health.formed.get() {
            Some(formed) => Ok(formed),
            None => {
                self.ready_by(deadline)?;
                self.0.health.formed.get().ok_or_else(no_descriptor)
            }
        }
    }
}

/// A limit in nanoseconds; centuries are long enough.
pub(super) fn nanos(limit: std::time::Duration) -> usize {
    limit.as_nanos().try_into().unwrap_or(usize::MAX)
}

impl Inner {
    fn conversation(&self, deadline: Deadline) -> Conversation<'_> {
        self.spec.conversation(&self.context, self.health.rank, &self.health.subject, deadline)
    }

    /// Receives the proposals of the other members.
    #[cold]
    fn form(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.start();
        let (op, rank) = (self.spec.op, self.health.rank);
        let busy = |(why, after): (Expiry, _)| why.error(op, vec![rank], after);
        let mut forming = lock_by(&self.forming, deadline).map_err(busy)?;
        if self.health.formed.get().is_some() {
            return Ok(()); // another thread was faster
        }
        let (pad, own) = forming.own.clone();
        let conversation = self.conversation(deadline);
        if let Some((rank, theirs)) = forming.elsewhere.clone() {
            let ours = format!("{:?}", self.spec.members);
            return Err(Error::Mismatch { op, what: "members", rank, ours, theirs });
        }
        if let Some(proposals) = &forming.proposals {
            conversation.agree(&self.spec.terms(), proposals)?;
            // They agree, but the group was not formed, because this rank has failed.
            let (rank, how) = self.health.missed(|_| true).unwrap_or_default();
            return Err(Error::PeerLost { rank, during: self.spec.op, how });
        }
        if let Some((rank, how)) = self.health.missed(|_| true).filter(|_| forming.over) {
            return Err(Error::PeerLost { rank, during: self.spec.op, how });
        }
        let collected = conversation.collect_proposals(own).inspect_err(|e| {
            forming.over = matches!(e, Error::PeerLost { .. } | Error::PeerFailed { .. });
            match e {
                Error::PeerFailed { rank, reason, .. } => {
                    self.health.note(*rank, Departure { left: false, how: reason.clone() });
                }
                Error::Mismatch { rank, theirs, .. } => {
                    forming.elsewhere = Some((*rank, theirs.clone()));
                }
                _ => {}
            }
        });
        let (proposals, memories) = collected?;
        let proposals = forming.proposals.insert(proposals);
        conversation.agree(&self.spec.terms(), proposals)?;
        let read = |(rank, proposal): (usize, &Proposal)| {
            postcard::from_bytes::<Details>(&proposal.data).map_err(|_| conversation.garbled(rank))
        };
        let mut details: Vec<Details> =
            proposals.iter().enumerate().map(read).collect::<Result<_>>()?;
        if self.spec.op == WORLD {
            let offers: Vec<_> = details.iter_mut().map(|details| details.offer.take()).collect();
            self.settle_transport(&conversation, &offers)?;
        }
        let common = Details::of_all(details).ok_or_else(|| conversation.garbled(0))?;
        let pads = self.map_pads(&pad, memories, &common).inspect_err(|e| {
            // For us and for all others this group is broken.
            let how = format!("it could not map the group's pads: {e}");
            self.health.note(self.health.rank, Departure { left: false, how: how.clone() });
            self.tell_all(&how);
        })?;
        let near = self.spec.members.iter().filter(|&&member| self.context.mesh.is_local(member));
        let patience =
            Patience::among(near.count(), machine::cores(), machine::hints_between_looks());
        let rates = pads.rates();
        let signals = Signals::new(pads, self.health.rank, self.spec.layout(), patience);
        let id = common.id;
        let (sequence, generations) = (Sequence::default(), AtomicU32::new(0));
        let (first_lost, p2p) = (OnceLock::new(), P2p::default());
        let formed = Formed { id, signals, sequence, rates, generations, first_lost, p2p };
        let formed = Arc::new(formed);
        let formed = self.health.formed.get_or_init(|| formed);
        if formed.signals.spans() {
            let listener: Arc<dyn Listener> = formed.clone();
            self.context.mesh.inbox().listen(id, &listener);
        }
        if let Some(call) = self.not_made.lock().unwrap_or_else(PoisonError::into_inner).take() {
            formed.put_off(&call);
        }
        if self.spec.op == WORLD {
            self.context.world.set(formed);
        }
        self.context.mesh.inbox().close(&self.health.subject);
        // Reports losses from before the pads were mapped.
        self.health.pass_on();
        Ok(())
    }

    /// Chooses how the ranks of a world reach those of other hosts.
    fn settle_transport(
        &self,
        conversation: &Conversation<'_>,
        offers: &[Option<Offer>],
    ) -> Result<()> {
        let Context { choice, mesh, .. } = &*self.context;
        if !choice.settle(mesh, offers)? {
            return Ok(());
        }
        match conversation.conclude(choice.connect(mesh, conversation.deadline)) {
            Ok(()) => choice.go_with(),
            Err(e @ (Error::Unavailable { .. } | Error::PeerFailed { .. }))
                if choice.is_optional() =>
            {
                choice.warn(mesh, &e.to_string());
                choice.go_without(mesh);
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn map_pads(
        &self,
        own: &Allocation,
        memories: Vec<Option<Exported>>,
        common: &Details,
    ) -> Result<RegionPads> {
        let bytes = self.spec.pad_bytes(&self.context);
        let mesh = &self.context.mesh;
        let is_far = |rank: usize| self.spec.members.get(rank).is_some_and(|&m| !mesh.is_local(m));
        let map = |(rank, memory): (usize, Option<Exported>)| match memory {
            Some(memory) => self.context.pad_backend.import(memory, bytes),
            None if rank == self.health.rank => own.region.part(0, bytes),
            None if is_far(rank) => Region::anonymous(staging_offset(self.spec.layout())),
            None => Err(no_descriptor()),
        };
        let whole: Vec<Region> =
            memories.into_iter().enumerate().map(map).collect::<Result<_>>()?;
        let words = self.spec.layout().words() * 4;
        let staging = staging_offset(self.spec.layout());
        if is_far(0) {
            let words =
                whole.first().map(|mirror| mirror.words(4 * Layout::RATES, common.rates.len()));
            let words = words.transpose()?.unwrap_or_default();
            words.iter().zip(&common.rates).for_each(|(w, rate)| w.store(*rate, Ordering::Relaxed));
        }
        let wire = Wire::to(&self.context, &self.spec.members, common.id, common.window);
        let span = Span::new(&self.context, &self.spec.members);
        // The n-th pair of buffers in the pad of a rank of this host: its own, and behind them its mirrors.
        let buffers = |rank: usize, n: usize| {
            let pad = whole.get(rank).ok_or_else(no_descriptor)?;
            let each = 2 * span.room_in_pads();
            pad.part(staging + n * each, each)
        };
        let relayed = |rank: usize| {
            let heard = span.hearer(rank).map(|(hearer, n)| buffers(hearer, 1 + n));
            heard.filter(|_| is_far(rank)).transpose()
        };
        let relayed: Vec<_> = (0..whole.len()).map(relayed).collect::<Result<_>>()?;
        let stages = (0..whole.len()).map(|rank| match (&wire, relayed.get(rank)) {
            (Some(_), Some(Some(mirror))) if span.hears(self.health.rank, rank) => {
                Ok(mirror.clone())
            }
            (Some(wire), _) if is_far(rank) => Region::reserved(2 * wire.stage),
            _ => buffers(rank, 0),
        });
        let stages = stages.collect::<Result<_>>()?;
        Ok(RegionPads {
            words: whole
                .iter()
                .map(|r| r.part(0, words).and_then(Words::new))
                .collect::<Result<_>>()?,
            stages,
            relayed,
            wire,
        })
    }

    /// Whether the outcome is known to all members: formed, mismatched, or a member is missing.
    pub(super) fn is_settled(&self) -> bool {
        let forming = self.forming.lock().unwrap_or_else(PoisonError::into_inner);
        forming.proposals.is_some() || forming.over || forming.elsewhere.is_some()
    }

    /// The id of a group that was not formed here, if it is known.
    #[cold]
    pub(super) fn proposed_id(&self) -> Option<u128> {
        let forming = self.forming.lock().unwrap_or_else(PoisonError::into_inner);
        let conversation = || self.conversation(Deadline::after(std::time::Duration::ZERO));
        let proposal = match &forming.proposals {
            Some(all) => all.first().cloned(),
            None if self.health.rank == 0 => Some(forming.own.1.clone()),
            None => conversation().take_proposal(0),
        };
        let details = postcard::from_bytes::<Details>(&proposal?.data);
        details.ok().map(|details| details.id)
    }

    /// Tells all members that this rank cannot take part.
    pub(super) fn tell_all(&self, how: &str) {
        let mesh = &self.context.mesh;
        let because_of = mesh.inbox().first_lost(|rank| self.spec.members.contains(&rank));
        let gone = Gone { left: false, how: how.to_owned(), because_of };
        // Fails only for types that cannot be serialised at all.
        let notice = postcard::to_stdvec(&gone).unwrap_or_default();
        for &peer in self.spec.members.iter().filter(|&&m| m != mesh.rank()) {
            let soon = Deadline::after(std::time::Duration::from_millis(50));
            let _ = mesh.send(peer, &self.health.subject, Phase::Notice, &notice, None, soon);
        }
    }
}
