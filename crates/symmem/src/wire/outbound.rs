//! Messages to one rank: numbered, and with a bound on unacknowledged data.

use std::collections::VecDeque;

use super::message::Kind;

/// How much unacknowledged data may be in flight to a rank, and what a message counts for besides its bytes. Both ends count
/// in the same way.
pub(super) const WINDOW: u64 = 4 << 20;
pub(super) const OVERHEAD: u64 = 1 << 10;

/// What a message of `bytes` bytes counts for.
pub(super) fn cost(bytes: usize) -> u64 {
    bytes as u64 + OVERHEAD
}

/// A message that has no number yet.
pub(super) struct Parcel {
    pub(super) kind: Kind,
    pub(super) group: u128,
    pub(super) bytes: Vec<u8>,
}

#[derive(Default)]
pub(super) struct Outbound {
    /// Messages that were not sent yet, for lack of room or of a thread to send them.
    queue: VecDeque<Parcel>,
    /// The number of the next message.
    next: u64,
    /// How much was sent, and how much of that was acknowledged.
    sent: u64,
    taken: u64,
    /// The receiver is gone.
    is_over: bool,
}

impl Outbound {
    fn fits(&self, bytes: usize) -> bool {
        self.sent - self.taken + cost(bytes) <= WINDOW
    }

    /// Whether a message would go at once.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.is_over || self.queue.is_empty() && self.fits(bytes)
    }

    pub(super) fn push(&mut self, parcel: Parcel) {
        if !self.is_over {
            self.queue.push_back(parcel);
        }
    }

    /// The next message that may go, with its number.
    pub(super) fn pop(&mut self) -> Option<(u64, Parcel)> {
        let bytes = self.queue.front()?.bytes.len();
        let parcel = if self.fits(bytes) { self.queue.pop_front()? } else { return None };
        self.sent += cost(bytes);
        self.next += 1;
        Some((self.next - 1, parcel))
    }

    /// Notes what the receiver acknowledges. False if that is more than was sent. Acknowledgements may arrive in any order.
    pub(super) fn note_taken(&mut self, total: u64) -> bool {
        self.taken = self.taken.max(total.min(self.sent));
        total <= self.sent
    }

    /// Whether everything was acknowledged, or never will be.
    pub(super) fn is_through(&self) -> bool {
        self.is_over || self.queue.is_empty() && self.sent == self.taken
    }

    /// Sends nothing any more.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.queue.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parcel(bytes: usize) -> Parcel {
        Parcel { kind: Kind::Long, group: 1, bytes: vec![0; bytes] }
    }

    #[test]
    fn no_more_than_a_window_is_under_way() {
        let mut out = Outbound::default();
        let bytes = 100 << 10;
        (0..100).for_each(|_| out.push(parcel(bytes)));
        let sent = std::iter::from_fn(|| out.pop()).count() as u64;
        assert_eq!(sent, WINDOW / cost(bytes));
        assert!(!out.has_room(0) && !out.is_through());
        assert!(out.note_taken(cost(bytes)));
        assert_eq!(out.pop().map(|(number, _)| number), Some(sent));
        assert!(out.pop().is_none());
        assert!(out.note_taken(0), "what was said before comes later");
        assert!(!out.note_taken(u64::MAX), "more than was sent");
        out.end();
        assert!(out.has_room(bytes) && out.is_through());
    }
}
