//! Receiving messages, and taking in those that nobody waits for yet.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::super::far_message::FarMessage;
use super::super::form::Formed;
use super::super::waiting::Waiting;
use super::super::{Group, no_descriptor};
use super::Peer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mesh::{Phase, Subject};
use crate::p2p::{
    FarQueue, FarSource, FarTaken, Incoming, Invalid, Mapped, Outcome, Post, RING_BYTES, Reader,
    Source, Words,
};
use crate::signal::Stop;
use crate::sync::{Deadline, Ordering, poll_by};

/// The messages of one rank to this one.
#[derive(Default)]
pub(super) struct Inbound {
    incoming: Incoming,
    way: Way,
    /// Why no message of the rank can be received any more.
    broken: Option<Invalid>,
}

/// How they come.
#[derive(Default)]
enum Way {
    /// Nothing has come yet; or it is this rank itself.
    #[default]
    None,
    Ring(Reader<Mapped>),
    Wire(FarTaken),
}

/// Counts what is taken.
struct Counted<S> {
    source: S,
    fragments: usize,
}

impl<S: Source> Source for Counted<S> {
    #[inline]
    fn front(&mut self) -> Option<Words> {
        self.source.front()
    }

    fn read(&mut self, out: &mut [u8]) {
        self.source.read(out);
    }

    fn pop(&mut self, bytes: usize) {
        self.fragments += 1;
        self.source.pop(bytes);
    }

    fn withdrawn(&mut self) -> u32 {
        self.source.withdrawn()
    }
}

struct FromRing<'a>(&'a mut Reader<Mapped>);

impl Source for FromRing<'_> {
    #[inline]
    fn front(&mut self) -> Option<Words> {
        self.0.front()
    }

    fn read(&mut self, out: &mut [u8]) {
        self.0.read(out);
    }

    fn pop(&mut self, bytes: usize) {
        self.0.pop(bytes);
    }

    fn withdrawn(&mut self) -> u32 {
        self.0.withdrawn()
    }
}

type Ended = Result<Outcome, Invalid>;

impl Inbound {
    /// Keeps a message of this rank to itself, if there is room.
    pub(super) fn keep(&mut self, tag: u64, dtype: DType, data: &[u8]) -> bool {
        self.incoming.keep(tag, dtype, data)
    }

    /// Takes what has come from `rank`, until `post` is served. Says how that ended, if it did, and whether anything was taken.
    fn advance(
        &mut self,
        group: &Group,
        formed: &Formed,
        rank: usize,
        post: Option<&mut Post<'_>>,
    ) -> (Option<Ended>, bool) {
        if let Some(why) = &self.broken {
            // What came before still counts.
            let kept = post.and_then(|post| self.incoming.take_kept(post)).map(Ok);
            return (kept.or_else(|| Some(Err(why.clone()))), false);
        }
        if matches!(self.way, Way::None) {
            match group.way_from(formed, rank) {
                Ok(way) => self.way = way,
                Err(e) => return (Some(Err(self.broken.insert(e.to_string()).clone())), false),
            }
        }
        let (advanced, fragments) = match &mut self.way {
            Way::None => {
                return (post.and_then(|post| self.incoming.take_kept(post)).map(Ok), false);
            }
            Way::Ring(ring) => {
                let mut source = Counted { source: FromRing(ring), fragments: 0 };
                let advanced = self.incoming.advance(&mut source, post);
                if source.fragments > 0 {
                    formed.signals.wake(rank); // it may wait for room
                }
                (advanced, source.fragments)
            }
            Way::Wire(taken) => {
                let queue: &FarQueue = formed.p2p.far(rank, group.size());
                let source = FarSource { queue, taken };
                let mut source = Counted { source, fragments: 0 };
                let advanced = self.incoming.advance(&mut source, post);
                let fragments = source.fragments;
                if let (Some(total), Some(wire)) = (taken.tell(), group.wire()) {
                    wire.post(rank, &FarMessage::FragmentsTaken { total });
                }
                (advanced, fragments)
            }
        };
        let ended = match advanced {
            Ok(outcome) => outcome.map(Ok),
            Err(why) => Some(Err(self.broken.insert(why).clone())),
        };
        (ended, fragments > 0)
    }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A thread that waits for a message.
struct Receiving<'a, 'b> {
    group: &'a Group,
    formed: &'a Formed,
    peers: &'a [Peer],
    /// The only sender that will do.
    from: Option<usize>,
    /// With which each search for any sender begins.
    first: usize,
    post: Post<'b>,
    /// The sender of the message that is arriving in the memory of this thread.
    held: Option<(usize, MutexGuard<'a, Inbound>)>,
    ended: Option<(usize, Ended)>,
    /// Another thread of this rank was receiving from one of the senders at the last look.
    is_contended: bool,
}

impl<'a> Receiving<'a, '_> {
    /// Whether the wait is over.
    fn look(&mut self) -> bool {
        self.is_contended = false;
        if let Some((rank, inbound)) = self.held.take() {
            return self.look_at(rank, inbound, true);
        }
        let peers = self.peers;
        let (first, count) = self.from.map_or((self.first, peers.len()), |from| (from, 1));
        for rank in (0..count).map(|i| (first + i) % peers.len()) {
            let Some(inbound) = try_lock(&peers[rank].inbound) else {
                self.is_contended = true;
                continue;
            };
            if self.look_at(rank, inbound, false) || self.held.is_some() {
                break;
            }
        }
        self.ended.is_some()
    }

    fn look_at(
        &mut self,
        rank: usize,
        mut inbound: MutexGuard<'a, Inbound>,
        was_held: bool,
    ) -> bool {
        let post = Some(&mut self.post);
        let (ended, has_moved) = inbound.advance(self.group, self.formed, rank, post);
        if ended.is_none() && inbound.incoming.is_claimed() {
            self.held = Some((rank, inbound));
            return false;
        }
        drop(inbound);
        if has_moved || was_held {
            self.formed.signals.ring_own(); // for other threads, whose messages may be here
        }
        self.ended = ended.map(|ended| (rank, ended));
        self.ended.is_some()
    }

    /// Waits no longer for the rest of a message that is arriving in the memory of this thread: it stays with this rank.
    fn leave(&mut self) {
        if let Some((rank, mut inbound)) = self.held.take() {
            let outcome = inbound.incoming.leave(&self.post);
            drop(inbound);
            self.formed.signals.ring_own();
            self.ended = outcome.map(|outcome| (rank, Ok(outcome)));
        }
    }

    /// The sender, or why there is no message.
    fn finish(mut self, op: &'static str, waited: Result<()>) -> Result<usize> {
        // Another rank may have sent a whole one meanwhile. Each look finds at most one more that has only begun.
        for _ in 0..self.peers.len() {
            let has_left = self.held.is_some();
            self.leave();
            if !has_left || self.ended.is_some() || self.from.is_some() || self.look() {
                break;
            }
        }
        self.leave();
        match self.ended.take() {
            Some((rank, Ok(Outcome::Taken))) => Ok(rank),
            Some((rank, Ok(Outcome::Differs { dtype, total }))) => {
                Err(self.differs(op, rank, dtype, total))
            }
            Some((rank, Err(got))) => {
                let (with, expected) = (format!("rank {rank}"), "its messages".to_owned());
                Err(Error::Protocol { with, expected, got })
            }
            None => Err(waited.err().map_or_else(no_descriptor, |e| self.with_other_tags(e))),
        }
    }

    fn differs(&self, op: &'static str, rank: usize, dtype: DType, total: usize) -> Error {
        let what = if dtype == self.post.dtype { "length" } else { "element type" };
        let shown = |dtype: DType, bytes: usize| format!("{} x {dtype}", bytes / dtype.size());
        let (ours, theirs) = (shown(self.post.dtype, self.post.out.len()), shown(dtype, total));
        Error::Mismatch { op, what, rank, ours, theirs }
    }

    /// A timeout also says which other tags the sender has used: one of them may have been meant.
    fn with_other_tags(&self, mut error: Error) -> Error {
        if let (Error::Timeout { doing, .. }, Some(from)) = (&mut error, self.from)
            && let Some(inbound) = try_lock(&self.peers[from].inbound)
            && let tags = inbound.incoming.kept_tags()
            && !tags.is_empty()
        {
            let some: Vec<_> = tags.iter().take(8).map(u64::to_string).collect();
            let more = if tags.len() > some.len() { ", and others" } else { "" };
            let tags = some.join(", ");
            doing.push(format!("it has sent messages that wait here, with tag {tags}{more}"));
        }
        error
    }
}

impl Drop for Receiving<'_, '_> {
    /// Also after a panic of the callback of `interruptible`: the rest of the message must not go to whoever receives next.
    fn drop(&mut self) {
        self.leave();
    }
}

impl Group {
    /// Receives a message from one rank, or from any. Returns the sender.
    pub(super) fn receive(
        &self,
        op: &'static str,
        from: Option<usize>,
        tag: u64,
        (dtype, out): (DType, &mut [u8]),
        deadline: Deadline,
    ) -> Result<usize> {
        tracing::trace!(op, rank = from, tag, bytes = out.len(), group = self.name());
        let formed = self.formed_by(deadline)?;
        let first = match from {
            Some(_) => 0,
            None => formed.p2p.first.fetch_add(1, Ordering::Relaxed) as usize,
        };
        let mut receiving = Receiving {
            group: self,
            formed,
            peers: formed.p2p.peers(self.size()),
            from,
            first,
            post: Post { tag, dtype, out },
            held: None,
            ended: None,
            is_contended: false,
        };
        let waited = match receiving.look() {
            true => Ok(()),
            false => self.await_message(op, &mut receiving, deadline),
        };
        receiving.finish(op, waited)
    }

    #[cold]
    fn await_message(
        &self,
        op: &'static str,
        receiving: &mut Receiving<'_, '_>,
        deadline: Deadline,
    ) -> Result<()> {
        let (from, formed, own) = (receiving.from, receiving.formed, self.rank());
        let arrived = |rank: usize| from.map_or(rank == own, |from| rank != from);
        let missing = || (0..self.size()).filter(|&rank| !arrived(rank)).collect();
        let mut waiting = Waiting::for_message(self, op, receiving.post.tag);
        let mut lost = || {
            self.collect_all(formed);
            match from {
                Some(_) => waiting.is_hopeless(&arrived),
                None => waiting.is_hopeless_for_any(&arrived),
            }
        };
        // In a broken group the message is here, or never comes.
        let waited = if self.0.health.trouble() && lost() {
            receiving.look().then_some(()).ok_or(Stop::Lost)
        } else {
            formed.signals.wait_for_any(missing, deadline, || receiving.look(), lost)
        };
        let waited = match waited {
            // The message may be with another thread of this rank, which will let go of it soon.
            Err(Stop::Lost) if receiving.is_contended => {
                let soon = Deadline::after(Duration::from_millis(100));
                poll_by(soon, &mut || receiving.look().then_some(())).map_err(|_| Stop::Lost)
            }
            // Its message has begun to arrive, so this thread waited for nobody else.
            Err(Stop::GivenUp { why, after, missing }) => {
                let held = receiving.held.as_ref().map(|(rank, _)| vec![*rank]);
                Err(Stop::GivenUp { why, after, missing: held.unwrap_or(missing) })
            }
            waited => waited,
        };
        waited.map_err(|stop| self.stopped(stop, op, None, &arrived))
    }

    /// Takes in what a rank has sent to this one, unless another thread does.
    pub(super) fn collect_from(&self, formed: &Formed, rank: usize) {
        let peers = formed.p2p.peers(self.size());
        let Some(mut inbound) = try_lock(&peers[rank].inbound) else { return };
        let (_, has_moved) = inbound.advance(self, formed, rank, None);
        drop(inbound);
        if has_moved {
            formed.signals.ring_own();
        }
    }

    /// Takes in what all have sent, so that no rank waits for this one while it waits.
    pub(super) fn collect_all(&self, formed: &Formed) {
        (0..self.size()).for_each(|rank| self.collect_from(formed, rank));
    }

    /// How the messages of a rank come, once it has sent any.
    fn way_from(&self, formed: &Formed, rank: usize) -> Result<Way> {
        if rank == self.rank() {
            return Ok(Way::None);
        }
        if !self.is_local_member(rank) {
            return Ok(Way::Wire(FarTaken::default()));
        }
        if !formed.signals.has_ring(rank) {
            return Ok(Way::None);
        }
        let (context, member) = (self.context(), self.world_ranks()[rank]);
        let message = context.mesh.take(&Subject::of_rings(formed.id), Phase::Ring, member);
        let memory = message.and_then(|message| message.memory).ok_or_else(no_descriptor)?;
        let region = context.pad_backend.import(memory, RING_BYTES)?;
        Ok(Way::Ring(Reader::new(Mapped::new(&region)?)))
    }
}
