//! What is on its way to a rank of another host over TCP, and how much may be.

use std::collections::VecDeque;

/// How much unacknowledged data may be in flight: at first, and if the peer says that it has memory for more. What a message counts
/// for besides its bytes.
pub(crate) const WINDOW: u64 = 256 << 10;
pub(crate) const WIDEST: u64 = 1 << 20;
pub(super) const OVERHEAD: u64 = 1 << 10;

/// One direction of a connection.
pub(super) struct Outbound {
    /// The rest of a frame for which the kernel had no room.
    pub(super) rest: Vec<u8>,
    /// Whether the kernel takes no more of `rest` for now. Otherwise it is held back, to go with the next frame.
    pub(super) is_full: bool,
    /// Messages that were posted when there was no room, and what they count for.
    pub(super) later: VecDeque<(u64, Vec<u8>)>,
    /// How many packets were encrypted.
    pub(super) sealed: u64,
    /// How much was sent, and how much of that the peer has acknowledged.
    pub(super) sent: u64,
    pub(super) taken: u64,
    /// How much may be under way.
    pub(super) window: u64,
    /// How many threads sleep until there is room.
    pub(super) waiting: usize,
    pub(super) is_over: bool,
}

impl Outbound {
    pub(super) fn new() -> Self {
        let (rest, later) = (Vec::new(), VecDeque::new());
        let (is_full, is_over) = (false, false);
        let (sealed, sent, taken) = (0, 0, 0);
        let (window, waiting) = (WINDOW, 0);
        Self { rest, is_full, later, sealed, sent, taken, window, waiting, is_over }
    }

    /// Counts those that may be sent now, after what is to be sent later, and gives them, and the others.
    pub(super) fn split_by_room<'m, T>(
        &mut self,
        messages: &'m [T],
        cost: impl Fn(&T) -> u64,
    ) -> (&'m [T], &'m [T]) {
        let mut count = 0;
        for cost in messages.iter().map(cost) {
            let has_room = self.has_room(cost) || cost == 0 && !self.is_full;
            if !has_room || !self.later.is_empty() {
                break;
            }
            self.sent += cost;
            count += 1;
        }
        messages.split_at(count)
    }

    pub(super) fn has_room(&self, cost: u64) -> bool {
        let under_way = self.sent.saturating_sub(self.taken);
        !self.is_full && (under_way == 0 || under_way.saturating_add(cost) <= self.window)
    }
}

/// What a message of so many bytes counts for.
pub(crate) const fn cost_of(len: usize) -> u64 {
    len as u64 + OVERHEAD
}
