//! One rank's end of a communicator: how it is made, how it fails, how it ends.
#![allow(unsafe_code)] // S4: handles are live from where they were made to where they are destroyed or aborted

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use symmem_sys::nccl::{Begun, Comm, Config, Failure, Handle, ShrinkFlags};

use super::group::check_closed;
use super::{Nccl, UniqueId, failed, group};
use crate::cuda::{Gpu, Stream};
use crate::error::{Error, Result};
use crate::group::{Group, WorldOptions};
use crate::sync::{Deadline, yield_now};

/// This rank's end of a communicator, on one device. Cheap to clone; closed when the last clone goes.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

struct Inner {
    nccl: Nccl,
    gpu: Gpu,
    rank: usize,
    size: usize,
    limit: Mutex<Deadline>,
    /// Who makes a call, until it is over: the library takes one at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

enum State {
    Live(Comm),
    /// It has failed, for this reason, but can still shrink.
    Failed(Comm, String),
    /// The library has taken it back, for this reason.
    Gone(String),
}

/// What communicators are made with: calls that wait for others do not block the thread, so that they can be given up.
const CONFIG: Config = Config { blocking: Some(false), split_share: None, cta_policy: None };

/// How long a wait sleeps at most before it looks again.
const NAP: Duration = Duration::from_micros(200);
/// How often it looks before it sleeps.
const LOOKS: usize = 200;

impl Nccl {
    /// The end of `rank` of a communicator of `size` ranks that find each other by `id`. Collective; a rank that does not
    /// come by the deadline is a [`Timeout`](Error::Timeout). The deadline is also that of later calls.
    pub fn communicator(
        &self,
        gpu: &Gpu,
        size: usize,
        id: &UniqueId,
        rank: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<Communicator> {
        const OP: &str = "communicator";
        check_closed(OP, rank)?;
        check_rank(OP, rank, size)?;
        let deadline = deadline.into();
        let begun = gpu.within(|| self.0.init_rank(size, &id.0, rank, &CONFIG))?;
        let begun = begun.map_err(|failure| failed(OP, Some(rank), &failure))?;
        let made = Communicator::begin(self, gpu, (rank, size), &begun, deadline, OP)?;
        made.settle(OP)?;
        // SAFETY: S4: it is ready, so the library has written for the last time.
        unsafe { begun.end() };
        Ok(made)
    }

    /// As [`communicator`](Self::communicator), of the ranks of `group`, which tell each other the id. Collective.
    pub fn of_group(&self, group: &Group, gpu: &Gpu) -> Result<Communicator> {
        const OP: &str = "communicator";
        let rank = group.rank();
        check_closed(OP, rank)?;
        let id = if rank == 0 { self.unique_id().map(Some) } else { Ok(None) };
        // Rank 0 says its id, or nothing where it has none to say.
        let card = id.as_ref().ok().and_then(|id| id.map(|id| id.as_bytes().to_vec()));
        let (card, terms) =
            (card.unwrap_or_default(), [("operation", "a communicator of NCCL".to_owned())]);
        group.converse(OP, group.deadline(), |conversation| {
            conversation.hold(
                &terms,
                card,
                || Ok(None),
                |cards, _| {
                    id?;
                    let id = UniqueId::from_bytes(cards.first().map_or(&[], Vec::as_slice));
                    let id = id.map_err(|_| Error::PeerFailed {
                        op: OP,
                        rank: 0,
                        reason: "it has no id for the communicator".into(),
                    })?;
                    self.communicator(gpu, group.size(), &id, rank, group.deadline())
                },
            )
        })
    }

    /// A communicator of these devices of this process, in this order: one end for each. They make calls together, in a
    /// [`group`](Self::group).
    pub fn of_devices(
        &self,
        gpus: &[Gpu],
        deadline: impl Into<Deadline>,
    ) -> Result<Vec<Communicator>> {
        const OP: &str = "communicator";
        check_closed(OP, 0)?;
        let (deadline, size) = (deadline.into(), gpus.len());
        let id = self.unique_id()?;
        self.0.group_start().map_err(|failure| failed(OP, None, &failure))?;
        let begun: Vec<_> = gpus
            .iter()
            .enumerate()
            .map(|(rank, gpu)| {
                let begun = gpu.within(|| self.0.init_rank(size, &id.0, rank, &CONFIG))?;
                begun.map_err(|failure| failed(OP, Some(rank), &failure))
            })
            .collect();
        let ended = self.0.group_end();
        let begun: Vec<Begun<Comm>> = begun.into_iter().collect::<Result<_>>()?;
        let begin = |(rank, (gpu, begun)): (usize, (&Gpu, &Begun<Comm>))| {
            Communicator::begin(self, gpu, (rank, size), begun, deadline, OP)
        };
        let made = gpus.iter().zip(&begun).enumerate().map(begin);
        let made: Vec<Communicator> = made.collect::<Result<_>>()?;
        if let Err(failure) = ended
            && !failure.is_in_progress()
        {
            made.iter().for_each(|one| one.abort());
            return Err(failed(OP, None, &failure));
        }
        let settled = made.iter().map(|one| one.settle(OP)).fold(Ok(()), Result::and);
        settled.inspect_err(|_| made.iter().for_each(|one| one.abort()))?;
        for one in begun {
            // SAFETY: S4: all are ready, so the library has written for the last time.
            unsafe { one.end() };
        }
        Ok(made)
    }

    /// The deadline of calls that have no other: `SYMMEM_TIMEOUT` seconds, or 5 minutes.
    pub fn deadline() -> Result<Deadline> {
        WorldOptions::default().deadline()
    }
}

fn check_rank(op: &'static str, rank: usize, size: usize) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    let expected = format!("a rank in [0, {size})");
    Err(Error::Usage { op, rank: None, expected, got: rank.to_string() })
}

impl Communicator {
    /// What is being made, from here on closed when it goes.
    fn begin(
        nccl: &Nccl,
        gpu: &Gpu,
        (rank, size): (usize, usize),
        begun: &Begun<Comm>,
        deadline: Deadline,
        op: &'static str,
    ) -> Result<Self> {
        let comm = begun.peek().ok_or_else(|| Error::Driver {
            call: "ncclCommInitRankConfig",
            why: format!("rank {rank}: {op}: NCCL gave no communicator"),
        })?;
        Ok(Self::new(nccl, gpu, (rank, size), comm, deadline))
    }

    fn new(
        nccl: &Nccl,
        gpu: &Gpu,
        (rank, size): (usize, usize),
        comm: Comm,
        deadline: Deadline,
    ) -> Self {
        Self(Arc::new(Inner {
            nccl: nccl.clone(),
            gpu: gpu.clone(),
            rank,
            size,
            limit: Mutex::new(deadline),
            turn: Mutex::new(()),
            state: Mutex::new(State::Live(comm)),
        }))
    }

    /// Whose end it is.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// The library it is of.
    pub fn nccl(&self) -> &Nccl {
        &self.0.nccl
    }

    /// How long its calls wait for the other ranks.
    pub fn deadline(&self) -> Deadline {
        *self.0.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how long its calls wait for the other ranks.
    pub fn set_deadline(&self, deadline: impl Into<Deadline>) {
        *self.0.limit.lock().unwrap_or_else(PoisonError::into_inner) = deadline.into();
    }

    /// The library's own handle (`ncclComm_t`), for calls that this library does not have; 0 after its end.
    pub fn raw(&self) -> usize {
        match &*self.state() {
            State::Live(comm) | State::Failed(comm, _) => comm.raw(),
            State::Gone(_) => 0,
        }
    }

    /// Says whether something has gone wrong since: on another rank, in the network, on the device.
    ///
    /// After an error it can be aborted, shrunk or dropped, and nothing else.
    pub fn check(&self) -> Result<()> {
        self.poll("check").map(|_| ())
    }

    /// Waits until everything in `stream` is done, or until the deadline: then it aborts.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        const OP: &str = "synchronize";
        stream.check_runs(OP)?;
        self.wait(OP, || {
            self.poll(OP)?;
            stream.is_idle()
        })
    }

    /// Ends what is going on, on this rank, and gives the communicator back. For whoever makes a call with it, that is an
    /// error. Another thread may do this while one waits.
    pub fn abort(&self) {
        self.end("it was aborted");
    }

    /// Waits until what is going on is done, and gives the communicator back. Dropping it does the same.
    pub fn close(self) -> Result<()> {
        self.0.close()
    }

    /// The communicator of those ranks that give the same `color`, in the order of `key` and then of ranks; none for ranks
    /// without one. Collective.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        const OP: &str = "split";
        check_closed(OP, self.rank())?;
        let color_fits = color.is_none_or(|color| i32::try_from(color).is_ok());
        if !color_fits {
            let expected = "a color below 2³¹".to_owned();
            return Err(self.usage(OP, expected, format!("{color:?}")));
        }
        let _turn = self.turn();
        // SAFETY: S4: `begun` gives a communicator that is live.
        let made =
            self.begun(OP, |nccl, comm| unsafe { nccl.split(comm, color, key, Some(&CONFIG)) })?;
        made.map(|comm| self.child(comm, OP)).transpose()
    }

    /// The communicator without these ranks, who do not call this. Collective for the others; also after a failure, but
    /// not after an abort. Since 2.27.
    pub fn shrink(&self, excluded: &[usize]) -> Result<Self> {
        const OP: &str = "shrink";
        check_closed(OP, self.rank())?;
        if excluded.is_empty() || excluded.contains(&self.rank()) {
            let expected = "other ranks to leave out".to_owned();
            return Err(self.usage(OP, expected, format!("{excluded:?}")));
        }
        excluded.iter().try_for_each(|&rank| check_rank(OP, rank, self.size()))?;
        let _turn = self.turn();
        let mut flags = ShrinkFlags::Default;
        let mut state = self.state();
        if let State::Failed(comm, _) = *state {
            (*state, flags) = (State::Live(comm), ShrinkFlags::Abort);
        }
        drop(state);
        // SAFETY: S4: `begun` gives a communicator that is live.
        let made = self
            .begun(OP, |nccl, comm| unsafe { nccl.shrink(comm, excluded, flags, Some(&CONFIG)) })?;
        let none = || Error::Driver {
            call: "ncclCommShrink",
            why: format!("rank {}: {OP}: NCCL gave no communicator", self.rank()),
        };
        made.ok_or_else(none).and_then(|comm| self.child(comm, OP))
    }

    /// A communicator that was made of this one.
    fn child(&self, comm: Comm, op: &'static str) -> Result<Self> {
        let Inner { nccl, gpu, .. } = &*self.0;
        let made = Self::new(nccl, gpu, (0, 1), comm, self.deadline());
        made.settle(op)?;
        // SAFETY: S4: it is live and ready.
        let rank = made.ask(op, |nccl, comm| unsafe { nccl.user_rank(comm) })?;
        // SAFETY: S4: likewise.
        let size = made.ask(op, |nccl, comm| unsafe { nccl.count(comm) })?;
        let Ok(mut inner) = Arc::try_unwrap(made.0) else {
            return Err(self.usage(op, "a communicator of its own".into(), "a shared one".into()));
        };
        (inner.rank, inner.size) = (rank, size);
        Ok(Self(Arc::new(inner)))
    }

    /// Begins what makes something of this communicator, and waits for it. The caller has the turn.
    pub(super) fn begun<T: Handle>(
        &self,
        op: &'static str,
        f: impl FnOnce(&symmem_sys::nccl::Nccl, Comm) -> Result<Begun<T>, Failure>,
    ) -> Result<Option<T>> {
        let begun = self.enter(op, f)?.map_err(|failure| self.refused(op, &failure))?;
        self.settle(op)?;
        // SAFETY: S4: this communicator has nothing to do any more, so the library has written for the last time.
        Ok(unsafe { begun.end() })
    }

    /// A call that puts something into a stream: waits until it is there, or is begun at the end of the group.
    pub(super) fn call(
        &self,
        op: &'static str,
        stream: &Stream,
        f: impl FnOnce(&symmem_sys::nccl::Nccl, Comm) -> Result<(), Failure>,
    ) -> Result<()> {
        if stream.gpu() != self.gpu() {
            let expected = format!("a stream of {:?}", self.gpu());
            return Err(self.usage(op, expected, format!("one of {:?}", stream.gpu())));
        }
        let _turn = self.turn();
        match self.enter(op, f)? {
            Err(failure) if !failure.is_in_progress() => return Err(self.refused(op, &failure)),
            _ => {}
        }
        if group::join(self) { Ok(()) } else { self.settle(op) }
    }

    /// A call that is over when it returns.
    pub(super) fn ask<R>(
        &self,
        op: &'static str,
        f: impl FnOnce(&symmem_sys::nccl::Nccl, Comm) -> Result<R, Failure>,
    ) -> Result<R> {
        self.enter(op, f)?.map_err(|failure| self.refused(op, &failure))
    }

    /// Calls the library, with the device's context current and nobody else calling it for this communicator.
    fn enter<R>(
        &self,
        op: &'static str,
        f: impl FnOnce(&symmem_sys::nccl::Nccl, Comm) -> R,
    ) -> Result<R> {
        let state = self.state();
        let comm = match &*state {
            State::Live(comm) => *comm,
            State::Failed(_, why) | State::Gone(why) => {
                let what = format!("rank {}: {op}: the communicator", self.rank());
                return Err(Error::Unavailable { what, why: why.clone() });
            }
        };
        self.gpu().within(|| f(&self.0.nccl.0, comm))
    }

    /// Whether the last call is over. An error is the end of all calls.
    fn poll(&self, op: &'static str) -> Result<bool> {
        // SAFETY: S4: `enter` gives a communicator that is live.
        match self.enter(op, |nccl, comm| unsafe { nccl.async_error(comm) })? {
            Ok(()) => Ok(true),
            Err(failure) if failure.is_in_progress() => Ok(false),
            Err(failure) => Err(self.broken(op, &failure)),
        }
    }

    /// Waits until the last call is over.
    pub(super) fn settle(&self, op: &'static str) -> Result<()> {
        self.wait(op, || self.poll(op))
    }

    fn wait(&self, op: &'static str, done: impl Fn() -> Result<bool>) -> Result<()> {
        let mut deadline = self.deadline();
        for look in 0_usize.. {
            if done()? {
                return Ok(());
            }
            deadline = deadline.start();
            if deadline.expired() {
                break;
            }
            if look < LOOKS { yield_now() } else { std::thread::sleep(deadline.nap(NAP)) }
        }
        let after = deadline.elapsed();
        self.end(&format!("{op} was given up after {after:.1?}"));
        let others: Vec<usize> = (0..self.size()).filter(|rank| *rank != self.rank()).collect();
        let waiting_for = if others.is_empty() { vec![self.rank()] } else { others };
        Err(Error::Timeout { op, channel: None, waiting_for, after })
    }

    /// The error of a call that was refused; whether more than the call is broken is asked at the next.
    fn refused(&self, op: &'static str, failure: &Failure) -> Error {
        failed(op, Some(self.rank()), failure)
    }

    /// The communicator is of no use any more.
    fn broken(&self, op: &'static str, failure: &Failure) -> Error {
        let error = failed(op, Some(self.rank()), failure);
        let mut state = self.state();
        if let State::Live(comm) = *state {
            *state = State::Failed(comm, format!("it has failed: {error}"));
        }
        error
    }

    fn end(&self, why: &str) {
        self.0.end(why);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state()
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.0.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn usage(&self, op: &'static str, expected: String, got: String) -> Error {
        Error::Usage { op, rank: Some(self.rank()), expected, got }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts, if it is not gone.
    fn end(&self, why: &str) {
        let mut state = self.state();
        let comm = match &*state {
            State::Live(comm) | State::Failed(comm, _) => *comm,
            State::Gone(_) => return,
        };
        *state = State::Gone(why.to_owned());
        // SAFETY: S4: it is live, and the state says that it is not used again.
        let aborted = self.gpu.within(|| unsafe { self.nccl.0.abort(comm) });
        warn(aborted);
    }

    /// Finalizes and destroys what works, and aborts what does not.
    fn close(&self) -> Result<()> {
        const OP: &str = "close";
        let comm = match &*self.state() {
            State::Live(comm) => Ok(*comm),
            State::Failed(..) => Err(()),
            State::Gone(_) => return Ok(()),
        };
        let Ok(comm) = comm else {
            self.end("it has failed");
            return Ok(());
        };
        let failed = |failure: &Failure| {
            self.end("it could not be closed");
            failed(OP, Some(self.rank), failure)
        };
        // SAFETY: S4: it is live; after this it is only asked, destroyed or aborted.
        let mut finalized = self.gpu.within(|| unsafe { self.nccl.0.finalize(comm) })?;
        let mut deadline = *self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        while let Err(failure) = &finalized {
            if !failure.is_in_progress() {
                return Err(failed(failure));
            }
            deadline = deadline.start();
            if deadline.expired() {
                self.end("it could not be closed in time");
                let (waiting_for, after) = (vec![self.rank], deadline.elapsed());
                return Err(Error::Timeout { op: OP, channel: None, waiting_for, after });
            }
            std::thread::sleep(deadline.nap(NAP));
            // SAFETY: S4: it is live.
            finalized = self.gpu.within(|| unsafe { self.nccl.0.async_error(comm) })?;
        }
        *self.state() = State::Gone("it was closed".into());
        // SAFETY: S4: it is live, and the state says that it is not used again.
        let destroyed = self.gpu.within(|| unsafe { self.nccl.0.destroy(comm) })?;
        destroyed.map_err(|failure| super::failed(OP, Some(self.rank), &failure))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(e) = self.close() {
            tracing::warn!("{e}");
        }
    }
}

fn warn(done: Result<Result<(), Failure>>) {
    match done {
        Ok(Err(failure)) if !failure.is_in_progress() => tracing::warn!("{failure}"),
        Err(e) => tracing::warn!("{e}"),
        Ok(_) => {}
    }
}

impl PartialEq for Communicator {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {} on {:?})", self.rank(), self.size(), self.gpu())
    }
}
