//! Sending a message.

use std::sync::{MutexGuard, TryLockError};

use super::super::Group;
use super::super::far_message::{FarMessage, RawBytes};
use super::super::form::Formed;
use super::super::waiting::Waiting;
use super::Peer;
use crate::dtype::DType;
use crate::error::Result;
use crate::mesh::{Phase, Subject};
use crate::p2p::{FarSent, Fragment, Kind, MOST, Mapped, RING_BYTES, Writer, number_after};
use crate::signal::Stop;
use crate::sync::{Deadline, lock_by};

const OP: &str = "send";

/// One rank's messages to another.
#[derive(Default)]
pub(super) struct Outbound {
    /// The number of the last message that has begun.
    begun: u32,
    way: Way,
}

/// How they go.
#[derive(Default)]
enum Way {
    /// Nothing was sent yet.
    #[default]
    None,
    Ring(Writer<Mapped>),
    Wire(FarSent),
}

/// One message.
#[derive(Clone, Copy)]
struct Message<'a> {
    data: &'a [u8],
    dtype: DType,
    to: usize,
    tag: u64,
}

impl Group {
    pub(super) fn send_bytes(
        &self,
        data: &[u8],
        dtype: DType,
        (to, tag): (usize, u64),
        mut deadline: Deadline,
    ) -> Result<()> {
        self.check_rank(OP, to)?;
        tracing::trace!(op = OP, rank = to, tag, bytes = data.len(), group = self.name());
        let formed = self.formed_by(deadline)?;
        let peer = &formed.p2p.peers(self.size())[to];
        let message = Message { data, dtype, to, tag };
        self.check_receiver(to)?;
        if to == self.rank() {
            return self.send_to_self(formed, peer, message, deadline);
        }
        let mut out = match peer.out.try_lock() {
            Ok(out) => out,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                deadline = deadline.start();
                self.await_others(peer, deadline)?
            }
        };
        if matches!(out.way, Way::None) {
            out.way = self.way_to(formed, to, deadline)?;
        }
        self.push(formed, &mut out, message, deadline)
    }

    /// Waits until no other thread of this rank sends to the same rank.
    #[cold]
    fn await_others<'a>(
        &self,
        peer: &'a Peer,
        deadline: Deadline,
    ) -> Result<MutexGuard<'a, Outbound>> {
        lock_by(&peer.out, deadline).map_err(|(why, after)| {
            let missing = vec![self.rank()];
            self.stopped(Stop::GivenUp { why, after, missing }, OP, None, &|_| false)
        })
    }

    /// Fails if the receiver is gone, or the group is broken.
    fn check_receiver(&self, to: usize) -> Result<()> {
        if !self.0.health.is_fatal(|rank| rank == to) {
            return Ok(());
        }
        Err(self.stopped(Stop::Lost, OP, None, &|rank| rank != to))
    }

    /// Makes a ring, and sends its memory to the receiver.
    #[cold]
    fn way_to(&self, formed: &Formed, to: usize, deadline: Deadline) -> Result<Way> {
        if !self.is_local_member(to) {
            return Ok(Way::Wire(FarSent::default()));
        }
        let context = self.context();
        let memory = context.pad_backend.allocate(RING_BYTES)?;
        let writer = Writer::new(Mapped::new(&memory.region)?);
        let (subject, member) = (Subject::of_rings(formed.id), self.world_ranks()[to]);
        let memory = Some(memory.export(false)?);
        let sent = context.mesh.send(member, &subject, Phase::Ring, &[], memory, deadline);
        sent.map_err(|e| self.of_far(OP, to, e))?;
        formed.signals.announce_ring(to);
        Ok(Way::Ring(writer))
    }

    /// Sends all fragments of a message, or withdraws it.
    fn push(
        &self,
        formed: &Formed,
        out: &mut Outbound,
        message: Message<'_>,
        mut deadline: Deadline,
    ) -> Result<()> {
        let Message { data, dtype, to, tag } = message;
        let most = formed.signals.pads().0.wire.as_ref().map_or(MOST, |wire| wire.most().min(MOST));
        let mut kind = Kind::First { tag, dtype, total: data.len() };
        let mut rest = data;
        let mut unfinished = Unfinished { out, formed, to, has_begun: false };
        loop {
            let out = &mut *unfinished.out;
            let (now, later) = rest.split_at(rest.len().min(most));
            let fragment = Fragment { kind, bytes: now.len() };
            if !out.has_room(formed, self.size(), to, now.len()) {
                deadline = deadline.start();
                self.await_room(formed, out, message, now.len(), deadline)?;
            }
            self.push_one(formed, out, to, (fragment, now), deadline)?;
            (rest, kind) = (later, Kind::Next);
            unfinished.has_begun = !rest.is_empty();
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn push_one(
        &self,
        formed: &Formed,
        out: &mut Outbound,
        to: usize,
        (fragment, data): (Fragment, &[u8]),
        deadline: Deadline,
    ) -> Result<()> {
        let header = fragment.encode();
        match &mut out.way {
            Way::Ring(ring) => {
                ring.push(&header, data);
                formed.signals.wake(to);
            }
            Way::Wire(sent) => {
                if let Some(wire) = self.wire() {
                    let message = FarMessage::Fragment { header, bytes: RawBytes(&[]) };
                    let gone = wire.send_one(to, &message, data, deadline);
                    gone.map_err(|e| self.of_far(OP, to, e))?;
                }
                sent.count(data.len());
            }
            Way::None => {}
        }
        if fragment.kind != Kind::Next {
            out.begun = number_after(out.begun);
        }
        Ok(())
    }

    #[cold]
    fn await_room(
        &self,
        formed: &Formed,
        out: &mut Outbound,
        message: Message<'_>,
        bytes: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let (to, size) = (message.to, self.size());
        // A receiver that takes the message in slowly makes many short waits of it.
        if let Some(why) = deadline.expiry() {
            let stop = Stop::GivenUp { why, after: deadline.elapsed(), missing: vec![to] };
            return Err(self.stopped(stop, OP, None, &|rank| rank != to));
        }
        let mut waiting = Waiting::for_message(self, OP, message.tag);
        let ready = || {
            // The receiver may be waiting for us to take in what it sends.
            out.has_room(formed, size, to, bytes) || {
                self.collect_from(formed, to);
                out.has_room(formed, size, to, bytes)
            }
        };
        let lost = || {
            self.collect_all(formed);
            waiting.is_hopeless(&|rank| rank != to)
        };
        let waited = formed.signals.wait_for(to, deadline, ready, lost);
        waited.map_err(|stop| self.stopped(stop, OP, None, &|rank| rank != to))
    }

    /// A message to this rank itself goes to those that it keeps.
    fn send_to_self(
        &self,
        formed: &Formed,
        peer: &Peer,
        message: Message<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let Message { data, dtype, to, tag } = message;
        let keep = || match peer.inbound.try_lock() {
            Ok(mut inbound) => inbound.keep(tag, dtype, data),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().keep(tag, dtype, data),
            Err(TryLockError::WouldBlock) => false,
        };
        if !keep() {
            let mut waiting = Waiting::for_message(self, OP, tag);
            let lost = || {
                self.collect_all(formed);
                waiting.is_hopeless(&|rank| rank != to)
            };
            let waited = formed.signals.wait_for(to, deadline, keep, lost);
            waited.map_err(|stop| self.stopped(stop, OP, None, &|rank| rank != to))?;
        }
        formed.signals.ring_own();
        Ok(())
    }

    pub(super) fn is_local_member(&self, rank: usize) -> bool {
        !self.wire().is_some_and(|wire| wire.is_far(rank))
    }
}

/// A message that is being sent. Withdraws it if it has only begun, also after a panic of the callback of `interruptible`.
struct Unfinished<'a> {
    out: &'a mut Outbound,
    formed: &'a Formed,
    to: usize,
    has_begun: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.has_begun {
            self.out.withdraw(self.formed, self.to);
        }
    }
}

impl Outbound {
    fn has_room(&mut self, formed: &Formed, ranks: usize, to: usize, bytes: usize) -> bool {
        match &mut self.way {
            Way::Ring(ring) => ring.has_room(bytes),
            Way::Wire(sent) => sent.has_room(formed.p2p.far(to, ranks), bytes),
            Way::None => false,
        }
    }

    /// The message that has begun last will not be completed.
    #[cold]
    fn withdraw(&mut self, formed: &Formed, to: usize) {
        match &mut self.way {
            Way::Ring(ring) => {
                ring.withdraw(self.begun);
                formed.signals.wake(to);
            }
            Way::Wire(_) => {
                if let Some(wire) = &formed.signals.pads().0.wire {
                    wire.post(to, &FarMessage::Withdrawn { number: self.begun });
                }
            }
            Way::None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;
    use crate::group::World;

    /// Writes a fragment as it is.
    fn forge(world: &World, to: usize, header: [u32; 8], data: &[u8]) {
        let formed = world.formed().unwrap();
        let mut out = formed.p2p.peers(world.size())[to].out.lock().unwrap();
        let Way::Ring(ring) = &mut out.way else { panic!("no ring") };
        assert!(ring.has_room(data.len()));
        ring.push(&header, data);
        formed.signals.wake(to);
    }

    #[test]
    fn a_rank_that_sends_nonsense_is_named_and_harms_nobody() {
        let whole = |bytes: usize, total: usize| {
            let kind = Kind::First { tag: 0, dtype: DType::U8, total };
            Fragment { kind, bytes }.encode()
        };
        for (i, header) in
            [[77; 8], [u32::MAX; 8], whole(8, 4), [2, 8, 0, 0, 0, 0, 0, 0]].into_iter().enumerate()
        {
            World::threads(3, |world| {
                let (limit, mut data) = (Duration::from_secs(20), [0_u8; 4]);
                if world.rank() == 1 {
                    world.send(&[i as u8; 4], 0, 0).unwrap();
                    forge(&world, 0, header, &[9; 8]);
                    world.send(&[1_u8; 4], 0, 0).unwrap();
                }
                if world.rank() == 0 {
                    world.recv_by(&mut data, 1, 0, limit).unwrap();
                    assert_eq!(data, [i as u8; 4]);
                    for _ in 0..2 {
                        let e = world.recv_by(&mut data, 1, 0, limit).unwrap_err();
                        assert_eq!(e.kind(), ErrorKind::Protocol);
                        assert!(e.to_string().starts_with("rank 1: expected its messages"), "{e}");
                    }
                    world.recv_by(&mut data, 2, 0, limit).unwrap();
                    world.send(&[5_u8], 1, 0).unwrap();
                }
                if world.rank() == 2 {
                    world.send(&[3_u8; 4], 0, 0).unwrap();
                }
                if world.rank() == 1 {
                    world.recv_by(&mut data[..1], 0, 0, limit).unwrap();
                }
                world.barrier().unwrap();
            })
            .unwrap();
        }
    }

    #[test]
    fn messages_before_nonsense_are_received() {
        World::threads(2, |world| {
            let (limit, mut data) = (Duration::from_secs(20), [0_u8; 4]);
            if world.rank() == 1 {
                world.send(&[1_u8; 4], 0, 1).unwrap();
                forge(&world, 0, [77; 8], &[]);
            }
            world.barrier().unwrap();
            if world.rank() == 0 {
                // Finds both: the message is not the one it waits for.
                let e = world.recv_by(&mut data, 1, 2, limit).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Protocol);
                world.recv_by(&mut data, 1, 1, limit).unwrap();
                assert_eq!(data, [1; 4]);
            }
        })
        .unwrap();
    }

    #[test]
    fn a_message_that_stops_half_way_is_awaited_from_its_sender_alone() {
        World::threads(3, |world| {
            let mut data = [0_u8; 8];
            if world.rank() == 1 {
                world.send(&[1_u8], 0, 1).unwrap();
                let kind = Kind::First { tag: 0, dtype: DType::U8, total: 8 };
                forge(&world, 0, Fragment { kind, bytes: 4 }.encode(), &[9; 4]);
            }
            world.barrier().unwrap();
            if world.rank() == 0 {
                let late = world.recv_any_by(&mut data, 0, Duration::from_millis(50)).unwrap_err();
                let crate::Error::Timeout { waiting_for, .. } = late else { panic!("{late}") };
                assert_eq!(waiting_for, [1]);
            }
            world.barrier().unwrap();
            if world.rank() == 1 {
                forge(&world, 0, Fragment { kind: Kind::Next, bytes: 4 }.encode(), &[9; 4]);
            }
            if world.rank() == 0 {
                assert_eq!(world.recv_any(&mut data, 0).unwrap(), 1);
                assert_eq!(data, [9; 8]);
            }
            world.barrier().unwrap();
        })
        .unwrap();
    }

    #[test]
    fn memory_that_was_announced_and_never_sent_is_told() {
        World::threads(2, |world| {
            let limit = Duration::from_secs(20);
            if world.rank() == 1 {
                world.formed().unwrap().signals.announce_ring(0);
            } else {
                let e = world.recv_by(&mut [0_u8], 1, 0, limit).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            }
            world.barrier().unwrap();
        })
        .unwrap();
    }
}
