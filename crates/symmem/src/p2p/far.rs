//! Fragments from and to a rank of another host: they come as messages, and the receiver says how much it has taken.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::fragment::{HEADER, Invalid, Words};
use super::incoming::Source;
use crate::mesh::FRAGMENTS;
use crate::sync::Ordering;
use crate::sync::shared::AtomicU64;

/// How much may be under way to a rank that has not taken it.
const WINDOW: u64 = 1 << 20;
const _: () =
    assert!(WINDOW as usize / HEADER <= FRAGMENTS, "they may come before the group is formed");
/// After how much the receiver says what it has taken.
const UNTOLD: u64 = WINDOW / 4;

/// What a fragment counts for. Both ends count in the same way.
fn cost(bytes: usize) -> u64 {
    (HEADER + bytes) as u64
}

/// What has arrived from one rank, and what that rank has taken of ours.
#[derive(Default)]
pub(crate) struct FarQueue {
    arrived: Mutex<Arrived>,
    taken: AtomicU64,
}

#[derive(Default)]
struct Arrived {
    fragments: VecDeque<(Words, Vec<u8>)>,
    /// What they count for.
    held: u64,
    /// As in a ring.
    withdrawn: u32,
}

impl FarQueue {
    fn lock(&self) -> MutexGuard<'_, Arrived> {
        // Nothing is done under the lock that could leave it half changed.
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A fragment has arrived. It is an error if the sender was not to send it yet.
    pub(crate) fn deliver(&self, header: Words, data: &[u8]) -> Result<(), Invalid> {
        let (mut arrived, cost) = (self.lock(), cost(data.len()));
        if header[1] as usize != data.len() || arrived.held + cost > WINDOW {
            return Err("a part of a message that is too long, or too early".to_owned());
        }
        arrived.held += cost;
        arrived.withdrawn = 0; // another message begins
        arrived.fragments.push_back((header, data.to_vec()));
        Ok(())
    }

    /// The sender has withdrawn a message.
    pub(crate) fn note_withdrawn(&self, number: u32) {
        self.lock().withdrawn = number;
    }

    /// The receiver has taken so much of what this rank has sent.
    pub(crate) fn note_taken(&self, total: u64) {
        self.taken.fetch_max(total, Ordering::Relaxed); // orders nothing
    }
}

/// How much this rank has sent to a rank of another host.
#[derive(Default)]
pub(crate) struct FarSent(u64);

impl FarSent {
    pub(crate) fn has_room(&self, queue: &FarQueue, bytes: usize) -> bool {
        let under_way = self.0.saturating_sub(queue.taken.load(Ordering::Relaxed));
        under_way + cost(bytes) <= WINDOW
    }

    pub(crate) fn count(&mut self, bytes: usize) {
        self.0 += cost(bytes);
    }
}

/// How much this rank has taken of what a rank of another host has sent.
#[derive(Default)]
pub(crate) struct FarTaken {
    total: u64,
    told: u64,
}

impl FarTaken {
    /// What to tell the sender now, if anything.
    pub(crate) fn tell(&mut self) -> Option<u64> {
        let is_due = self.total - self.told >= UNTOLD;
        is_due.then(|| {
            self.told = self.total;
            self.total
        })
    }
}

/// The queue as a source.
pub(crate) struct FarSource<'a> {
    pub(crate) queue: &'a FarQueue,
    pub(crate) taken: &'a mut FarTaken,
}

impl Source for FarSource<'_> {
    fn front(&mut self) -> Option<Words> {
        self.queue.lock().fragments.front().map(|(header, _)| *header)
    }

    fn read(&mut self, out: &mut [u8]) {
        if let Some((_, data)) = self.queue.lock().fragments.front() {
            out.copy_from_slice(data); // of the length that the header says, as checked on arrival
        }
    }

    fn pop(&mut self, _bytes: usize) {
        let mut arrived = self.queue.lock();
        if let Some((_, data)) = arrived.fragments.pop_front() {
            let cost = cost(data.len());
            arrived.held -= cost;
            self.taken.total += cost;
        }
    }

    fn withdrawn(&mut self) -> u32 {
        self.queue.lock().withdrawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::p2p::{Fragment, Kind, MOST};

    #[test]
    fn a_sender_cannot_make_this_rank_hold_more_than_a_window() {
        let (queue, mut sent, mut taken) =
            (FarQueue::default(), FarSent::default(), FarTaken::default());
        let header = Fragment { kind: Kind::Next, bytes: MOST }.encode();
        let data = vec![7; MOST];
        while sent.has_room(&queue, MOST) {
            sent.count(MOST);
            queue.deliver(header, &data).unwrap();
        }
        assert!(queue.deliver(header, &data).is_err(), "more than the window");
        assert!(queue.deliver(header, &data[1..]).is_err(), "another length than the header says");
        let mut source = FarSource { queue: &queue, taken: &mut taken };
        while source.front().is_some() {
            source.pop(MOST);
            if let Some(total) = source.taken.tell() {
                queue.note_taken(total);
                queue.note_taken(total - 1);
            }
        }
        assert!(sent.has_room(&queue, MOST), "what was not told is less than a fragment's room");
        assert_eq!(queue.lock().held, 0);
    }
}
