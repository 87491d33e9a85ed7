//! One rank's end of a communicator: how its calls are waited for, how it fails, how it ends.
#![allow(unsafe_code)] // S4: handles are live from where they were made to where they are destroyed or aborted

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use symmem_sys::nccl::{Begun, Comm, Failure, Handle};

use super::{Nccl, failed, group, warn};
use crate::cuda::{Gpu, Stream};
use crate::error::{Error, Result};
use crate::sync::{Deadline, lock, yield_now};

/// This rank's end of a communicator, on one device. Cheap to clone; closed when the last clone goes.
///
/// All ranks make its calls in the same order. A call returns when it is in its stream, and what it writes is there for
/// whatever comes after it in that stream; its elements belong to it until then.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

struct Inner {
    nccl: Nccl,
    gpu: Gpu,
    rank: usize,
    size: usize,
    /// Whether it is destroyed when it goes: not where somebody else has made it.
    owned: bool,
    limit: Mutex<Deadline>,
    /// Who makes a call, until it is over: the library takes one at a time.
    calling: Mutex<()>,
    state: Mutex<State>,
}

enum State {
    Live(Comm),
    /// It has failed, for this reason, but can still shrink.
    Failed(Comm, String),
    /// The library has taken it back, for this reason.
    Gone(String),
}

/// How long a wait sleeps at most before it looks again.
const NAP: Duration = Duration::from_micros(200);
/// How often it looks before it sleeps.
const LOOKS: usize = 200;

impl Communicator {
    /// What is being made, from here on closed when it goes.
    pub(super) fn begin(
        nccl: &Nccl,
        gpu: &Gpu,
        (rank, size): (usize, usize),
        begun: &Begun<Comm>,
        deadline: Deadline,
        op: &'static str,
    ) -> Result<Self> {
        let comm = begun.peek().ok_or_else(|| none_given("ncclCommInitRankConfig", rank, op))?;
        Ok(Self::new(nccl, gpu, (rank, size), comm, deadline, true))
    }

    /// One that is made, with the rank and the size that the library says; not `owned` if somebody else will destroy it.
    pub(super) fn of(
        nccl: &Nccl,
        gpu: &Gpu,
        comm: Comm,
        deadline: Deadline,
        (owned, op): (bool, &'static str),
    ) -> Result<Self> {
        let made = Self::new(nccl, gpu, (0, 1), comm, deadline, owned);
        made.settle(op)?;
        made.filled(op)
    }

    fn new(
        nccl: &Nccl,
        gpu: &Gpu,
        (rank, size): (usize, usize),
        comm: Comm,
        deadline: Deadline,
        owned: bool,
    ) -> Self {
        Self(Arc::new(Inner {
            nccl: nccl.clone(),
            gpu: gpu.clone(),
            rank,
            size,
            owned,
            limit: Mutex::new(deadline),
            calling: Mutex::new(()),
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
        *lock(&self.0.limit)
    }

    /// Sets how long its calls wait for the other ranks.
    pub fn set_deadline(&self, deadline: impl Into<Deadline>) {
        *lock(&self.0.limit) = deadline.into();
    }

    /// The library's own handle (`ncclComm_t`), for calls that this library does not have; 0 after its end.
    pub fn raw(&self) -> usize {
        match &*lock(&self.0.state) {
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

    /// Ends what is going on, on this rank, and gives the communicator back. For a caller that is waiting in it, that is an
    /// error. Another thread may do this while one waits.
    pub fn abort(&self) {
        self.0.end("it was aborted");
    }

    /// Waits until what is going on is done, and gives the communicator back. Dropping it does the same.
    pub fn close(self) -> Result<()> {
        self.0.close()
    }

    /// Lets one more call be made of a communicator that has failed, if it has.
    pub(super) fn revive(&self) -> bool {
        let mut state = lock(&self.0.state);
        let State::Failed(comm, _) = *state else { return false };
        *state = State::Live(comm);
        true
    }

    /// A communicator that was made of this one.
    pub(super) fn child(&self, comm: Comm, op: &'static str) -> Result<Self> {
        Self::of(self.nccl(), self.gpu(), comm, self.deadline(), (true, op))
    }

    /// Itself, with the rank and the size that the library says. Nobody else has it yet.
    fn filled(self, op: &'static str) -> Result<Self> {
        // SAFETY: S4: it is live and ready.
        let rank = self.ask(op, |nccl, comm| unsafe { nccl.user_rank(comm) })?;
        // SAFETY: S4: likewise.
        let size = self.ask(op, |nccl, comm| unsafe { nccl.count(comm) })?;
        let mut inner = Arc::try_unwrap(self.0).map_err(|shared| {
            Error::usage(op, "a communicator of its own", "a shared one").at_rank(shared.rank)
        })?;
        (inner.rank, inner.size) = (rank, size);
        Ok(Self(Arc::new(inner)))
    }

    /// Begins what makes something of this communicator, and waits for it. The caller holds [`Self::lock_calls`].
    pub(super) fn begun<T: Handle>(
        &self,
        op: &'static str,
        f: impl FnOnce(&symmem_sys::nccl::Nccl, Comm) -> Result<Begun<T>, Failure>,
    ) -> Result<Option<T>> {
        let begun = self.ask(op, f)?;
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
        stream.check_gpu(op, self.gpu()).map_err(|e| e.at_rank(self.rank()))?;
        let _calling = self.lock_calls();
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
        let state = lock(&self.0.state);
        let comm = match &*state {
            State::Live(comm) => *comm,
            State::Failed(_, why) | State::Gone(why) => {
                let what = format!("rank {}: {op}: the communicator", self.rank());
                return Err(Error::unavailable(what, why.clone()));
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
        self.0.end(&format!("{op} was given up after {after:.1?}"));
        let others: Vec<usize> = (0..self.size()).filter(|rank| *rank != self.rank()).collect();
        let waiting_for = if others.is_empty() { vec![self.rank()] } else { others };
        Err(Error::timeout(op, waiting_for, after))
    }

    /// The error of a call that was refused; whether more than the call is broken is asked at the next.
    fn refused(&self, op: &'static str, failure: &Failure) -> Error {
        failed(op, Some(self.rank()), failure)
    }

    /// The communicator is of no use any more.
    fn broken(&self, op: &'static str, failure: &Failure) -> Error {
        let error = failed(op, Some(self.rank()), failure);
        let mut state = lock(&self.0.state);
        if let State::Live(comm) = *state {
            *state = State::Failed(comm, format!("it has failed: {error}"));
        }
        error
    }

    /// Waits until no other thread makes a call.
    pub(super) fn lock_calls(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.calling)
    }

    pub(super) fn usage(&self, op: &'static str, expected: String, got: String) -> Error {
        Error::usage(op, expected, got).at_rank(self.rank())
    }
}

impl Inner {
    /// Aborts, if it is not gone.
    fn end(&self, why: &str) {
        let mut state = lock(&self.state);
        let comm = match &*state {
            State::Live(comm) | State::Failed(comm, _) => *comm,
            State::Gone(_) => return,
        };
        *state = State::Gone(why.to_owned());
        if !self.owned {
            return;
        }
        // SAFETY: S4: it is live, and the state says that it is not used again.
        warn(self.gpu.within(|| unsafe { self.nccl.0.abort(comm) }));
    }

    /// Finalizes and destroys what works, and aborts what does not.
    fn close(&self) -> Result<()> {
        const OP: &str = "close";
        let live = match &*lock(&self.state) {
            State::Live(comm) if self.owned => Some(*comm),
            _ => None,
        };
        let Some(comm) = live else {
            self.end("it was closed");
            return Ok(());
        };
        let failed = |failure: &Failure| {
            self.end("it could not be closed");
            failed(OP, Some(self.rank), failure)
        };
        // SAFETY: S4: it is live; after this it is only asked, destroyed or aborted.
        let mut finalized = self.gpu.within(|| unsafe { self.nccl.0.finalize(comm) })?;
        let mut deadline = *lock(&self.limit);
        while let Err(failure) = &finalized {
            if !failure.is_in_progress() {
                return Err(failed(failure));
            }
            deadline = deadline.start();
            if deadline.expired() {
                self.end("it could not be closed in time");
                return Err(Error::timeout(OP, vec![self.rank], deadline.elapsed()));
            }
            std::thread::sleep(deadline.nap(NAP));
            // SAFETY: S4: it is live.
            finalized = self.gpu.within(|| unsafe { self.nccl.0.async_error(comm) })?;
        }
        *lock(&self.state) = State::Gone("it was closed".into());
        // SAFETY: S4: it is live, and the state says that it is not used again.
        let destroyed = self.gpu.within(|| unsafe { self.nccl.0.destroy(comm) })?;
        match destroyed {
            Err(e) if !e.is_in_progress() => Err(super::failed(OP, Some(self.rank), &e)),
            _ => Ok(()),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close().unwrap_or_else(|e| tracing::warn!("{e}"));
    }
}

/// The error where `call` has worked, but made nothing.
pub(super) fn none_given(call: &'static str, rank: usize, op: &'static str) -> Error {
    let why = format!("rank {rank}: {op}: NCCL gave no communicator");
    Error::Driver { library: "NCCL", code: None, call, why }
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
