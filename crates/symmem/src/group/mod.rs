//! Groups of ranks: who is in, how they synchronise, and what happens when one of them is lost.

mod attached;
mod call;
mod context;
mod conversation;
mod environment;
mod far_access;
mod far_calls;
mod far_message;
mod form;
mod given_up;
mod health;
mod hosts;
mod loans;
mod loss;
mod numbering;
mod p2p;
mod resync;
mod sequence;
mod shrink;
mod signals;
mod staging;
mod subgroup;
mod waiting;
mod wire;
mod world;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

pub use subgroup::GroupBuilder;
pub use world::{World, WorldBuilder};

pub(crate) use attached::WeakGroup;
pub(crate) use call::{Call, Memory, Op, Way, describe, digest, op_code, op_of};
pub(crate) use context::Context;
pub(crate) use conversation::Conversation;
pub(crate) use far_calls::FarAddress;
pub(crate) use far_message::Request;
pub(crate) use hosts::Span;
pub(crate) use numbering::Ticket;
pub(crate) use resync::Resync;
pub(crate) use sequence::Running;
pub(crate) use signals::Act;
pub use staging::PIECE;
pub(crate) use staging::{STAGE, Sent, Staging};
pub(crate) use world::{DEFAULT_TIMEOUT, setting};

use crate::error::{Error, Result};
use crate::memory::Backend;
use crate::mesh::Scope;
use crate::store::SharedStore;
use crate::sync::{Deadline, Ordering, Setting, lock_by};
use call::RENDEZVOUS;
use form::{Forming, Spec};
use health::Health;
use waiting::Waiting;

/// A set of ranks that work together. Cheap to clone.
///
/// # Threads
/// Several threads of a rank may use one group at the same time. Their collective calls follow one another: a call waits for
/// those of other threads, within its own deadline. All ranks must make them in the same order, so threads that make
/// different collective calls need a group each, or an order among themselves. Signals, and barriers on channels other
/// than 0, are independent of them and of each other, as long as each channel is used by one thread at a time.
#[derive(Clone)]
#[must_use = "dropping an unused group tells its members that this rank does not take part"]
pub struct Group(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    spec: Arc<Spec>,
    channels: usize,
    /// Of waits that are given no deadline, in nanoseconds; 0 for ever.
    limit: Setting,
    health: Arc<Health>,
    /// What is needed until all members have come.
    forming: Mutex<Forming>,
    /// One rendezvous at a time.
    rendezvous: Mutex<()>,
    /// The group of survivors of which some had not come when the last `shrink` gave up waiting.
    awaited: Mutex<Option<Group>>,
    /// The first call that gave up before the group was formed.
    not_made: Mutex<Option<Call>>,
    /// One resynchronisation at a time, and what layers above have to do in it.
    resyncing: Mutex<()>,
    resync_hooks: Mutex<Vec<Weak<dyn Resync>>>,
    /// What later layers keep for the group, by type and number.
    attached: Mutex<HashMap<(TypeId, u64), Arc<dyn Any + Send + Sync>>>,
}

impl Group {
    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.0.health.rank
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.0.spec.members.len()
    }

    /// The members' ranks in the world, in the order of their ranks in this group.
    pub fn world_ranks(&self) -> &[usize] {
        &self.0.spec.members
    }

    /// The group's name; generated if none was given.
    pub fn name(&self) -> &str {
        &self.0.spec.label
    }

    /// The store of the job.
    pub fn store(&self) -> &SharedStore {
        &self.0.context.store
    }

    /// Bytes of the signal pad.
    pub fn signal_pad_size(&self) -> usize {
        self.0.spec.pad_size
    }

    /// The number of channels for `barrier_on`, `put_signal` and `wait_signal`.
    pub fn channels(&self) -> usize {
        self.0.channels
    }

    /// The deadline of waits without one of their own.
    #[inline]
    pub fn deadline(&self) -> Deadline {
        Deadline::within_nanoseconds(self.0.limit.load(Ordering::Relaxed) as u64)
    }

    /// Sets the time limit of this rank's calls on this group that have no deadline of their own; 0 means no limit.
    pub fn set_timeout(&self, limit: Duration) {
        self.0.limit.store(form::nanos(limit), Ordering::Relaxed);
    }

    /// What the group is called on the mesh; known once it is formed.
    pub(crate) fn id(&self) -> Result<u128> {
        self.formed().map(|formed| formed.id)
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// The name of the backend of this rank's symmetric memory: chosen when the world was joined, and never changed.
    pub fn backend_name(&self) -> &'static str {
        self.backend().name()
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.context.backend
    }

    /// Whether nothing else of this rank's world is alive.
    fn is_last(&self) -> bool {
        // The group holds the context, and so does its name.
        let own = 1 + usize::from(self.0.spec._claim.is_some());
        Arc::strong_count(&self.0) == 1 && Arc::strong_count(&self.0.context) == own
    }

    pub(crate) fn downgrade(&self) -> Weak<dyn Send + Sync> {
        let weak: Weak<Inner> = Arc::downgrade(&self.0);
        weak
    }

    /// Waits for all ranks of the group. Everything that any rank wrote before it is visible to every rank after it.
    ///
    /// A collective call like any other: if a rank calls something else instead, all ranks get [`Error::Mismatch`].
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// world.barrier()?; // nobody gets here before all have come
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn barrier(&self) -> Result<()> {
        self.barrier_on(0, self.deadline())
    }

    /// As [`Group::barrier`], on a channel of its own, until `deadline`. After an [`Error::Timeout`] the next call
    /// continues to wait for the same barrier.
    ///
    /// Channel 0 belongs to the group's collectives. The other channels have only barriers, which other threads may
    /// call at the same time.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// use std::time::Duration;
    /// world.barrier_on(1, Duration::from_secs(5))?;
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn barrier_on(&self, channel: usize, deadline: impl Into<Deadline>) -> Result<()> {
        const OP: &str = "barrier";
        self.check_channel(OP, channel)?;
        let mut deadline = deadline.into();
        if channel == 0 {
            const BARRIER: Call = Call::plain(call::PLAIN);
            return self.begin_call(&BARRIER, deadline)?.barrier();
        }
        let signals = &self.formed_by(deadline)?.signals;
        self.check_whole(OP)?;
        tracing::trace!(op = OP, channel, group = self.name());
        let mut waiting = Waiting::new(self, OP, Some(channel));
        let mut absent = Vec::new();
        let done = signals.barrier(channel, &mut deadline, |arrived| {
            absent = (0..self.size()).filter(|&rank| !arrived(rank)).collect();
            waiting.is_hopeless(arrived)
        });
        done.map_err(|stop| self.stopped(stop, OP, Some(channel), &|rank| !absent.contains(&rank)))
    }

    /// Takes this rank's place in a collective call that it refuses to make, so that nobody waits for it: peers that make the
    /// call get [`Error::Mismatch`] at once, and all ranks stay in step. Also succeeds if all ranks refuse.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut data = [1.0_f32; 4];
    /// if world.rank() == 0 {
    ///     world.refuse()?; // this rank cannot make the call
    /// } else {
    ///     let e = world.all_reduce(&mut data, symmem::ReduceOp::Sum).unwrap_err();
    ///     assert_eq!(e.kind(), symmem::ErrorKind::Mismatch);
    /// }
    /// world.barrier()?; // all ranks are in step
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn refuse(&self) -> Result<()> {
        const REFUSED: Call = Call::plain(Op::of(call::REFUSAL));
        match self.begin_call(&REFUSED, self.deadline())?.barrier() {
            Err(Error::Mismatch { .. }) => Ok(()), // they know
            other => other,
        }
    }

    /// Bytes that take about as long to stage as a line takes to come over.
    const LONG_TO_STAGE: usize = 1024;

    /// Says that this rank is about to make a call: see [`Signals::reach_out`].
    #[inline]
    pub(crate) fn reach_out(&self, call: &Call) {
        // The lines come while a longer message is being staged. Those of a short one would come too early, and the peers, who
        // look at them already, would take them back.
        let bytes = call.bytes();
        let gains = bytes >= Self::LONG_TO_STAGE || (bytes <= Staging::TINY && self.size() == 2);
        if let Some(formed) = self.0.health.formed.get()
            && gains
        {
            formed.signals.reach_out(self.channels());
        }
    }

    /// Fails with [`Error::PeerLost`] if the loss of a rank has broken the group.
    pub fn check(&self) -> Result<()> {
        self.check_whole("check")
    }

    /// Whether a rank was lost or has left.
    pub(crate) fn is_gone(&self, rank: usize) -> bool {
        self.0.health.how_gone(rank).is_some()
    }

    #[inline]
    pub(crate) fn check_whole(&self, op: &'static str) -> Result<()> {
        if self.0.health.trouble() { self.check_losses(op) } else { Ok(()) }
    }

    #[cold]
    fn check_losses(&self, op: &'static str) -> Result<()> {
        let loss = self.explained_loss(&|_| false);
        loss.map_or(Ok(()), |(rank, how)| Err(Error::PeerLost { rank, during: op, how }))
    }

    #[inline]
    pub(crate) fn check_rank(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.size() { Ok(()) } else { Err(self.bad_rank(op, rank)) }
    }

    #[cold]
    fn bad_rank(&self, op: &'static str, rank: usize) -> Error {
        self.usage(op, format!("a rank in [0, {})", self.size()), rank.to_string())
    }

    #[inline]
    fn check_channel(&self, op: &'static str, channel: usize) -> Result<()> {
        if channel < self.channels() { Ok(()) } else { Err(self.bad_channel(op, channel)) }
    }

    #[cold]
    fn bad_channel(&self, op: &'static str, channel: usize) -> Error {
        let last = self.channels() - 1;
        let expected = format!("a channel up to {last}, the maximum supported channel");
        self.usage(op, expected, channel.to_string())
    }

    pub(crate) fn usage(&self, op: &'static str, expected: String, got: String) -> Error {
        Error::Usage { op, rank: Some(self.rank()), expected, got }
    }

    /// Holds the `n`-th rendezvous of the group: see [`Conversation::hold`]. A call of the sequence, so nothing is sent
    /// before all ranks have come.
    pub(crate) fn converse<T>(
        &self,
        op: &'static str,
        deadline: Deadline,
        hold: impl FnOnce(&Conversation<'_>) -> Result<T>,
    ) -> Result<T> {
        let (conversation, _locked) = self.next_conversation(op, deadline)?;
        hold(&conversation).map_err(|e| self.note_common(e))
    }

    /// The conversation of the next rendezvous, once all ranks have come, and this rank's lock for it.
    fn next_conversation(
        &self,
        op: &'static str,
        deadline: Deadline,
    ) -> Result<(Conversation<'_>, MutexGuard<'_, ()>)> {
        let deadline = deadline.start();
        let locked = lock_by(&self.0.rendezvous, deadline);
        let locked = locked.map_err(|(why, after)| why.error(op, vec![self.rank()], after))?;
        let call = Call::plain(RENDEZVOUS);
        let mut running = self.begin_call(&call, deadline)?;
        running.barrier()?;
        let number = self.formed()?.sequence.count_rendezvous();
        drop(running);
        Ok((self.conversation(op, number, deadline)?, locked))
    }

    /// The conversation of a rendezvous by its number, the same on all ranks.
    fn conversation(
        &self,
        op: &'static str,
        number: u64,
        deadline: Deadline,
    ) -> Result<Conversation<'_>> {
        Ok(Conversation {
            context: &self.0.context,
            group: Some(self),
            members: self.world_ranks(),
            rank: self.0.health.rank,
            op,
            subject: self.0.context.mesh.inbox().begin_at(Scope::Group(self.id()?), number),
            deadline,
        })
    }

    /// Tells the ranks that have arrived at a rendezvous that this rank no longer waits for it.
    fn decline_rendezvous(&self, number: u64) {
        let Ok(conversation) = self.conversation(RENDEZVOUS.name(), number, Deadline::NEVER) else {
            return;
        };
        let why = "it gave up before all ranks had arrived".to_owned();
        conversation.decline(why);
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({:?}, rank {} of {})", self.name(), self.rank(), self.size())
    }
}

/// The error if a message came without the memory that belongs to it.
pub(crate) fn no_descriptor() -> Error {
    Error::Unavailable {
        what: "a peer's memory".into(),
        why: "no descriptor came with it: this process is at its limit of open files (ulimit -n), or the memory is of a \
              backend whose memory cannot leave its process"
            .into(),
    }
}

/// 32 channels for 72 ranks, as in PyTorch.
pub const DEFAULT_SIGNAL_PAD_SIZE: usize = 32 * 72 * 4;

/// The process-wide setting; 0 stands for the default.
static PAD_SIZE: Setting = Setting::new(0);

/// The default size of the signal pads of groups and allocations.
pub fn signal_pad_size() -> usize {
    match PAD_SIZE.load(Ordering::Relaxed) {
        0 => DEFAULT_SIGNAL_PAD_SIZE,
        bytes => bytes,
    }
}

/// Sets what [`signal_pad_size`] says, for groups and allocations made from now on; 0 restores the default.
/// All ranks must set the same: if they differ, a group or a rendezvous fails with [`Error::Mismatch`].
pub fn set_signal_pad_size(bytes: usize) -> Result<()> {
    if bytes != 0 {
        check_pad_size("set_signal_pad_size", None, bytes, 1)?;
    }
    PAD_SIZE.store(bytes, Ordering::Relaxed);
    Ok(())
}

/// The smallest pad has one channel; the largest keeps a group's pads below 128 MiB a rank.
pub(crate) fn check_pad_size(
    op: &'static str,
    rank: Option<usize>,
    bytes: usize,
    ranks: usize,
) -> Result<()> {
    const MOST: usize = 4 << 20;
    if bytes.is_multiple_of(4) && (4 * ranks..=MOST).contains(&bytes) {
        return Ok(());
    }
    Err(Error::Usage {
        op,
        rank,
        expected: format!("a signal pad size in [{}, {MOST}] divisible by 4", 4 * ranks),
        got: format!("{bytes}"),
    })
}
