//! Puts, gets and atomics on memory of ranks on other hosts, by the rank that calls them.

use super::Group;
use super::far_message::{FarMessage, RawBytes, Request};
use super::signals::Act;
use crate::error::{Error, Result};
use crate::sync::{Deadline, lock};

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

/// Messages of a put that are sent with one call: many more do not make it faster.
const BATCH: usize = 8;

impl Group {
    /// Relaxed: sends bytes to a rank on another host. The next signal or barrier of this rank follows them.
    pub(crate) fn put_far(&self, op: &'static str, target: FarAddress, data: &[u8]) -> Result<()> {
        let Some(wire) = self.wire() else { return Err(self.out_of_reach(target.rank)) };
        self.check_whole(op)?;
        self.check_refused(op, target.memory)?;
        let deadline = self.deadline().start();
        let FarAddress { rank, memory, at, unit } = target;
        let batch = wire.most() * BATCH;
        for (i, data) in data.chunks(batch).enumerate() {
            let message = |within: usize| {
                let (unit, at) = (unit as u8, at + i * batch + within);
                FarMessage::Put { memory, at, unit, bytes: RawBytes(&[]) }
            };
            let sent = wire.in_messages(data, message, |parts| wire.send(rank, parts, deadline));
            sent.map_err(|e| self.of_far(op, rank, e))?;
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
    pub(super) fn of_far(&self, op: &'static str, rank: usize, error: Error) -> Error {
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
