//! The sending half of a connection.

use std::io::IoSlice;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, SendAncillaryBuffer, SendFlags};

use super::super::frames;
use super::super::outbound::{Outbound, cost_of};
use super::super::socket::{self, Packet};
use super::{ALONG, LONGEST, Stream, cost, head};
use crate::error::Result;
use crate::sync::{Deadline, Expiry, Ordering};

/// The most bytes that are held back.
const HELD: usize = 16 << 10;
/// How often a thread that waits for room polls before it sleeps.
const LOOKS: u32 = 1000;

/// The parts of a frame to send.
type Frame<'a> = [&'a [u8]; 3];

/// What a message to a group counts for.
fn cost_of_message([_, first, rest]: &Frame<'_>) -> u64 {
    cost_of(first.len() + rest.len())
}

/// Calls `send` with messages to a group as frames.
fn in_frames<R>(group: u128, messages: &[[&[u8]; 2]], send: impl FnOnce(&[Frame<'_>]) -> R) -> R {
    let head = head(group);
    match messages {
        [[first, rest]] => send(&[[&head, first, rest]]),
        _ => {
            let frames = messages.iter().map(|[first, rest]| [&head[..], first, rest]);
            send(&frames.collect::<Vec<_>>())
        }
    }
}

impl Stream {
    /// Sends one packet, waiting for room until the deadline.
    pub(in super::super) fn send(&self, packet: &Packet, deadline: Deadline) -> Result<()> {
        let bytes = socket::encode(packet, LONGEST)?;
        let frame = [&bytes[..], &[], &[]];
        self.send_frames(&[frame], |_| cost(packet, bytes.len()), deadline, &|| {})?;
        self.send_held();
        Ok(())
    }

    /// Sends messages to a group as far as there is room, and then the others. Calls `meanwhile` while it waits. Short messages are
    /// held back.
    pub(in super::super) fn send_to_group(
        &self,
        group: u128,
        messages: &[[&[u8]; 2]],
        deadline: Deadline,
        meanwhile: &dyn Fn(),
    ) -> Result<()> {
        in_frames(group, messages, |frames| {
            self.send_frames(frames, cost_of_message, deadline, meanwhile)
        })
    }

    fn send_frames(
        &self,
        mut frames: &[Frame<'_>],
        cost: impl Fn(&Frame<'_>) -> u64,
        deadline: Deadline,
        meanwhile: &dyn Fn(),
    ) -> Result<()> {
        let deadline = deadline.start();
        let mut looks = 0_u32;
        let mut expired: Option<Expiry> = None;
        loop {
            let mut out = self.outbound();
            if looks > 0 || out.is_full {
                self.flush(&mut out);
            }
            if out.is_over {
                return Ok(()); // the watcher reports the loss; the packets are dropped
            }
            self.send_later(&mut out);
            let (now, later) = out.split_by_room(frames, &cost);
            if !now.is_empty() {
                self.put(&mut out, now, true);
                (frames, looks) = (later, 0);
            }
            if frames.is_empty() {
                return Ok(());
            }
            if let Some(why) = expired {
                return Err(why.error("send", vec![], deadline.elapsed()));
            }
            if looks > LOOKS {
                out = self.await_room(out, deadline.nap(Duration::from_millis(1)));
            }
            drop(out);
            meanwhile();
            // Without the lock: what is asked whether to end the wait may send something itself.
            expired = deadline.expiry();
            looks = looks.saturating_add(1);
        }
    }

    /// Sends messages to a group without waiting. Those for which there is no room are sent later. If `is_held`, short ones go with
    /// the next frame, or when [`Stream::send_held`] is called.
    pub(in super::super) fn post(&self, group: u128, messages: &[[&[u8]; 2]], is_held: bool) {
        in_frames(group, messages, |frames| {
            let mut out = self.outbound();
            let (now, later) = out.split_by_room(frames, cost_of_message);
            if !out.is_over {
                let later = later.iter().map(|frame| (cost_of_message(frame), frame.concat()));
                out.later.extend(later);
            }
            self.put(&mut out, now, is_held);
        });
    }

    /// Sends what is held back.
    pub(in super::super) fn send_held(&self) {
        if self.has_held.load(Ordering::SeqCst) {
            self.flush(&mut self.outbound());
        }
    }

    /// Sends messages that were posted when there was no room, as far as there is room now.
    pub(super) fn send_later(&self, out: &mut Outbound) {
        while let Some(&(cost, _)) = out.later.front()
            && out.has_room(cost)
        {
            let Some((cost, bytes)) = out.later.pop_front() else { return };
            out.sent += cost;
            self.put(out, &[[&bytes, &[], &[]]], false);
        }
    }

    /// Sends frames, or holds them back if they are short and may be.
    fn put(&self, out: &mut Outbound, frames: &[Frame<'_>], may_be_held: bool) {
        self.tell_taken(out, ALONG);
        let len: usize = frames.iter().flatten().map(|part| part.len()).sum();
        if self.keys.get().is_none() && !out.is_full && len >= HELD {
            return self.put_directly(out, frames);
        }
        for frame in frames {
            self.append(out, frame);
            if out.rest.len() >= HELD && !out.is_full {
                self.flush(out); // the peer decrypts it while the next is encrypted
            }
        }
        match may_be_held && out.rest.len() < HELD {
            true => self.has_held.store(true, Ordering::SeqCst),
            false => self.flush(out),
        }
    }

    pub(super) fn append(&self, out: &mut Outbound, frame: &[&[u8]]) {
        let fits = match self.keys.get() {
            None => frames::append(&mut out.rest, frame),
            Some(keys) => {
                let sealed = keys.seal(out.sealed, &frame.concat());
                out.sealed += 1;
                sealed.is_some_and(|sealed| frames::append(&mut out.rest, &[&sealed]))
            }
        };
        // Cannot happen: packets are shorter than the longest frame, and their numbers do not run out.
        out.is_over |= !fits;
    }

    /// Sends long frames without copying them, after what is held.
    fn put_directly(&self, out: &mut Outbound, frames: &[Frame<'_>]) {
        let lengths: Option<Vec<_>> = frames.iter().map(|frame| frames::length(frame)).collect();
        let Some(lengths) = lengths else {
            out.is_over = true;
            return;
        };
        let held = std::mem::take(&mut out.rest);
        self.has_held.store(false, Ordering::Relaxed); // under the lock
        let frames = lengths
            .iter()
            .zip(frames)
            .flat_map(|(length, [head, first, rest])| [&length[..], head, first, rest]);
        let parts: Vec<IoSlice<'_>> =
            std::iter::once(&held[..]).chain(frames).map(IoSlice::new).collect();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = net::sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), flags);
        let mut sent = match sent {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => 0,
            Err(_) => {
                out.is_over = true;
                return;
            }
        };
        for part in &parts {
            let of_part = sent.min(part.len());
            out.rest.extend_from_slice(part.get(of_part..).unwrap_or_default());
            sent -= of_part;
        }
        if !out.rest.is_empty() {
            self.flush(out);
        }
    }

    fn await_room<'a>(
        &'a self,
        out: MutexGuard<'a, Outbound>,
        nap: Duration,
    ) -> MutexGuard<'a, Outbound> {
        if !out.is_full {
            let mut out = out;
            out.waiting += 1;
            out = self.room.wait_timeout(out, nap).unwrap_or_else(PoisonError::into_inner).0;
            out.waiting -= 1;
            return out;
        }
        drop(out);
        let nap = socket::timespec(nap);
        let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(&nap));
        self.outbound()
    }

    /// Gives the kernel as much as it takes, without waiting.
    pub(super) fn flush(&self, out: &mut Outbound) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.has_held.store(false, Ordering::Relaxed); // under the lock
        out.is_full = false;
        while !out.rest.is_empty() && !out.is_over {
            match net::send(&self.socket, &out.rest, flags) {
                Ok(len) => drop(out.rest.drain(..len)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => {
                    out.is_full = true;
                    return;
                }
                Err(_) => out.is_over = true,
            }
        }
    }
}
