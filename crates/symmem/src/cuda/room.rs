//! Room for kernels that wait for each other.
//!
//! A kernel that is launched before the one before it has ended waits on the device, and takes up room there. Other ranks'
//! counterparts of the one before it may not have come yet: if no room is left for them, all wait for ever.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::gpu::StreamId;

/// Places that are remembered.
const MOST: usize = 16;

/// What all ranks on a device launch of one kernel.
#[derive(Clone, Copy)]
pub(super) struct Grids {
    /// Of all of them.
    pub(super) blocks: u32,
    /// How many the device holds at once.
    pub(super) fit: u32,
}

impl Grids {
    /// Whether all of these still find room where all of `next` are, however the device has placed them.
    ///
    /// Of a multiprocessor that holds `a` of ours or `b` of theirs, `m` of theirs take at most `m / b` of anything, and what
    /// is left holds at least `a - m * a / b` of ours, rounded down. So none of theirs costs more than `a / b`, rounded up.
    fn find_room_beside(self, next: Self) -> bool {
        let each = self.fit.div_ceil(next.fit.max(1));
        self.blocks + next.blocks * each <= self.fit
    }
}

/// The last kernels at places: in streams, or in captures of them.
pub(super) struct Room<P = (StreamId, Option<u64>)>(Mutex<Vec<(P, Grids)>>);

impl<P: PartialEq> Room<P> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(P, Grids)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a kernel comes next at a place; whether it may come before the one before it has ended. Not, where that
    /// is not known.
    pub(super) fn enter(&self, place: P, grids: Grids) -> bool {
        let mut last = self.lock();
        let known = last.iter().position(|(known, _)| *known == place);
        let before = known.map(|at| last.remove(at).1);
        // Those that were used last come first, and others are forgotten.
        last.truncate(MOST - 1);
        last.insert(0, (place, grids));
        before.is_some_and(|before| before.find_room_beside(grids))
    }

    /// Forgets what was last at a place.
    pub(super) fn forget(&self, place: P) {
        self.lock().retain(|(known, _)| *known != place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn grids(blocks: u32, fit: u32) -> Grids {
        Grids { blocks, fit }
    }

    /// Multiprocessors are filled in the worst way: one of the next in each, then as many as it takes to spoil another place.
    #[test]
    fn there_is_room_in_the_worst_case() {
        const MULTIPROCESSORS: u32 = 6;
        for (a, b) in (1..=8).flat_map(|a| (1..=8).map(move |b| (a, b))) {
            for next in 0..=MULTIPROCESSORS * b {
                // Places of ours that are left if `m` of the next are in a multiprocessor, in units of 1 / (a * b).
                let left = |m: u32| (a * b - m * a) / b;
                let mut held = [0_u32; MULTIPROCESSORS as usize];
                for _ in 0..next {
                    let spoils = |m: &u32| if *m < b { left(*m) - left(*m + 1) } else { 0 };
                    let open = held.iter_mut().filter(|m| **m < b);
                    let worst = open.max_by_key(|m| spoils(m)).unwrap();
                    *worst += 1;
                }
                let places: u32 = held.iter().map(|m| left(*m)).sum();
                let most = (0..=MULTIPROCESSORS * a)
                    .filter(|ours| {
                        grids(*ours, a * MULTIPROCESSORS)
                            .find_room_beside(grids(next, b * MULTIPROCESSORS))
                    })
                    .max();
                assert!(
                    most.is_none_or(|most| most <= places),
                    "{a} {b} {next}: {most:?} {places}"
                );
            }
        }
    }

    #[test]
    fn what_comes_early_is_known_to_leave_room() {
        let room = Room::new();
        let [a, b] = [1, 2];
        assert!(!room.enter(a, grids(10, 100)), "nothing is known of what was before");
        assert!(room.enter(a, grids(10, 100)));
        assert!(!room.enter(b, grids(10, 100)), "at another place");
        assert!(room.enter(a, grids(50, 100)));
        assert!(room.enter(a, grids(50, 100)), "two halves");
        assert!(!room.enter(a, grids(51, 100)), "not on top of a half");
        assert!(!room.enter(a, grids(50, 100)), "not behind more than a half");
        assert!(!room.enter(a, grids(30, 50)), "they cost two places each");
        for other in 3..3 + MOST {
            assert!(!room.enter(other, grids(1, 100)));
        }
        assert!(!room.enter(a, grids(1, 100)), "forgotten");
        assert_eq!(room.lock().len(), MOST);
        assert!(room.enter(a, grids(1, 100)));
        room.forget(a);
        assert!(!room.enter(a, grids(1, 100)));
    }
}
