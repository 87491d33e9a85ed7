//! Messages from one rank. They are delivered in the order of their numbers, in whatever order they arrive.

use std::collections::BTreeMap;

use super::outbound::{OVERHEAD, WINDOW, cost};

/// How much may have been delivered without an acknowledgement.
const UNTOLD: u64 = WINDOW / 4;

/// A message that has arrived before an earlier one.
struct Held {
    group: u128,
    /// `None` while the body is being received.
    bytes: Option<Vec<u8>>,
    cost: u64,
}

#[derive(Default)]
pub(super) struct Inbound {
    /// The number of the next message to deliver.
    next: u64,
    ahead: BTreeMap<u64, Held>,
    /// What the messages in `ahead` count for.
    held: u64,
    /// How much was delivered, and how much of that was acknowledged.
    taken: u64,
    told: u64,
    /// The sender has sent an invalid message.
    is_over: bool,
}

impl Inbound {
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Delivers nothing any more.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.ahead.clear();
    }

    /// Whether a message that has just arrived is the next one. It is an error if it was received before, or exceeds the bound on
    /// data in flight, which also bounds what is held here.
    pub(super) fn admit(&self, number: u64, bytes: usize) -> Result<bool, String> {
        if number < self.next || self.ahead.contains_key(&number) {
            return Err(format!("message {number} twice"));
        }
        if number - self.next > WINDOW / OVERHEAD || self.held + cost(bytes) > WINDOW {
            return Err(format!("message {number} before it was asked for more"));
        }
        Ok(number == self.next)
    }

    /// Keeps an admitted message until the earlier ones are delivered, and until its body has arrived.
    pub(super) fn hold(&mut self, number: u64, group: u128, len: usize, bytes: Option<Vec<u8>>) {
        let cost = cost(len);
        self.held += cost;
        self.ahead.insert(number, Held { group, bytes, cost });
    }

    /// The body of a held message has arrived.
    pub(super) fn fill(&mut self, number: u64, bytes: Vec<u8>) {
        if let Some(held) = self.ahead.get_mut(&number) {
            held.bytes = Some(bytes);
        }
    }

    /// The next message was delivered.
    pub(super) fn take(&mut self, bytes: usize) {
        self.next += 1;
        self.taken += cost(bytes);
    }

    /// Takes the next message, if it is held here; it counts as delivered.
    pub(super) fn next(&mut self) -> Option<(u128, Vec<u8>)> {
        let first = self.ahead.first_entry()?;
        if *first.key() != self.next || first.get().bytes.is_none() {
            return None;
        }
        let Held { group, bytes, cost } = first.remove();
        self.held -= cost;
        self.next += 1;
        self.taken += cost;
        bytes.map(|bytes| (group, bytes))
    }

    /// Whether an acknowledgement is due.
    pub(super) fn is_due(&self) -> bool {
        self.taken - self.told >= UNTOLD
    }

    /// How much was delivered, for an acknowledgement.
    pub(super) fn tell(&mut self) -> u64 {
        self.told = self.taken;
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_in_by_their_numbers() {
        let mut into = Inbound::default();
        assert_eq!(into.admit(2, 1), Ok(false));
        into.hold(2, 7, 1, Some(vec![2]));
        assert!(into.admit(2, 1).is_err(), "twice");
        assert_eq!(into.admit(1, 1), Ok(false));
        into.hold(1, 7, 1, None);
        assert_eq!(into.admit(0, 1), Ok(true));
        into.take(1);
        assert!(into.next().is_none(), "the bytes are with the sender");
        into.fill(1, vec![1]);
        assert_eq!(into.next(), Some((7, vec![1])));
        assert_eq!(into.next(), Some((7, vec![2])));
        assert!(into.next().is_none());
        assert_eq!((into.tell(), into.held), (3 * cost(1), 0));
        assert!(into.admit(1, 1).is_err(), "twice");
    }

    #[test]
    fn a_sender_cannot_make_this_rank_hold_more_than_a_window() {
        let mut into = Inbound::default();
        let bytes = 1 << 20;
        let mut number = 1;
        while into.admit(number, bytes).is_ok() {
            into.hold(number, 7, bytes, None);
            number += 1;
        }
        assert!(into.held <= WINDOW && number < 5);
        assert!(into.admit(WINDOW, 0).is_err());
    }

    #[test]
    fn the_sender_is_told_when_a_quarter_was_taken_in() {
        let mut into = Inbound::default();
        let bytes = UNTOLD as usize / 2;
        into.take(bytes);
        assert!(!into.is_due());
        into.take(bytes);
        assert!(into.is_due());
        assert_eq!(into.tell(), 2 * cost(bytes));
        assert!(!into.is_due());
    }
}
