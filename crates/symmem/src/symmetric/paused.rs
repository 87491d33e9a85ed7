//! Changes of phase that were not completed.

use super::handle::keeping;
use super::{Memory, Phase, Shared, Symmetric};
use crate::dtype::Element;
use crate::error::{Error, Failed, Result};
use crate::group::{Call, Group, Op, Ticket};
use crate::memory::block::Access;

/// Memory whose change to phase `P` was not completed. Nobody may access it until it is.
///
/// [`resume`](Paused::resume) continues the change. If another call was made in between, that call waited for the change
/// first, and `resume` finds it done. After [`Group::resync`], a change that all ranks had reached counts as done, and any other
/// starts again.
#[must_use = "dropping it gives the memory up while peers may use it"]
pub struct Paused<P> {
    phase: P,
    /// The call by which the phase changes.
    op: &'static str,
    /// The barrier that this rank has reached; `None` if nobody can have passed it.
    ticket: Option<Ticket>,
}

impl<P: Phase> Paused<P> {
    pub(crate) fn new(phase: P, op: &'static str) -> Self {
        Self { phase, op, ticket: None }
    }

    /// The same change of the same memory, as another value holds it.
    pub(super) fn to<Q>(self, phase: impl FnOnce(P) -> Q) -> Paused<Q> {
        Paused { phase: phase(self.phase), op: self.op, ticket: self.ticket }
    }

    /// To a phase in which peers touch our part.
    pub(super) fn advance(mut self) -> Result<P, Failed<Self>> {
        self.phase.memory().handle.block().set_access(P::PEERS);
        match reach(self.phase.memory(), self.op, &mut self.ticket) {
            Ok(()) => Ok(self.phase),
            Err(error) => {
                if self.ticket.is_none() {
                    self.phase.memory().handle.block().set_access(Access::Nothing);
                }
                Err(Failed { error, kept: self })
            }
        }
    }

    /// Back to the phase before, if nobody has come to the next.
    pub(super) fn go_back(self) -> Result<P, Self> {
        if !self.is_void() {
            return Err(self);
        }
        self.phase.memory().handle.block().set_access(Access::Nothing);
        Ok(self.phase)
    }

    /// Whether nobody has come to the next phase, or will by this attempt.
    pub(super) fn is_void(&self) -> bool {
        let group = self.phase.memory().group();
        self.ticket.as_ref().is_none_or(|ticket| group.outcome(ticket) == Some(false))
    }

    pub(super) fn op(&self) -> &'static str {
        self.op
    }

    pub(super) fn into_phase(self) -> P {
        self.phase
    }
}

/// Waits until all ranks change the phase of `memory` by `op`, or finds that they have.
fn reach(memory: &Memory, op: &'static str, ticket: &mut Option<Ticket>) -> Result<()> {
    let group = memory.handle.group();
    match ticket.as_ref().map(|ticket| group.outcome(ticket)) {
        Some(Some(true)) => return Ok(()),
        Some(Some(false)) => *ticket = None,
        Some(None) | None => {}
    }
    let call = Call { memory: memory.handle.memory(), ..Call::plain(Op::of(op)) };
    let mut running = group.begin_call(&call, group.deadline())?;
    running.barrier().inspect_err(|error| {
        let is_void = match error {
            Error::Mismatch { .. } | Error::PeerLost { .. } => running.is_void(error),
            _ => false,
        };
        *ticket = group.ticket().filter(|_| !is_void);
    })
}

impl<T: Element> Paused<Shared<T>> {
    /// Continues to wait for the phase to begin.
    pub fn resume(self) -> Result<Shared<T>, Failed<Self>> {
        self.advance()
    }

    /// Returns the memory to its former phase, if the change has failed on all ranks.
    pub fn give_up(self) -> Result<Symmetric<T>, Self> {
        self.go_back().map(|shared| Symmetric::of(shared.0))
    }

    /// See [`Shared::rendezvous`]. The call gives up the right to read, even if it fails: a peer may have
    /// seen it succeed.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Paused<Symmetric<T>>>> {
        self.to(|shared| Symmetric::of(shared.0)).rendezvous(group)
    }
}

impl<T: Element> Paused<Symmetric<T>> {
    /// Continues to wait until all ranks have released it.
    pub fn resume(mut self) -> Result<Symmetric<T>, Failed<Self>> {
        let reached = reach(&self.phase.0, self.op, &mut self.ticket);
        if reached.is_ok() {
            self.phase.0.handle.block().set_access(Access::Nothing);
        }
        keeping(reached, self).map(|((), paused)| paused.phase)
    }

    /// Returns to reading, after a release that has failed on all ranks.
    pub fn reshare(self) -> Result<Shared<T>, Self> {
        if self.op != "release" || !self.is_void() {
            return Err(self);
        }
        Ok(Shared::of(self.phase.0))
    }

    /// The same memory in the group of the survivors. See [`Shared::rendezvous`].
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>, Failed<Self>> {
        let memory = self.phase.0.regroup_survivors::<T>(group);
        keeping(memory, self).map(|(memory, _)| Symmetric::of(memory))
    }
}

impl<P: std::fmt::Debug> std::fmt::Debug for Paused<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Paused({} of {:?})", self.op, self.phase)
    }
}
