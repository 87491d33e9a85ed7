//! Whether kernels that wait for each other fit on a device together.
//!
//! A kernel that is launched early waits on the device for its predecessor, and occupies multiprocessors meanwhile. Other ranks
//! may not have launched their counterparts of the predecessor yet: if these no longer fit, all ranks wait for ever.

use std::sync::Mutex;

use crate::cuda::device::gpu::StreamId;
use crate::sync::lock;

/// How many queues are remembered.
const MOST: usize = 16;

/// What all ranks on a device launch of one kernel.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Grids {
    /// Of all of them.
    pub(in crate::cuda) blocks: u32,
    /// How many the device holds at once.
    pub(in crate::cuda) fit: u32,
}

impl Grids {
    /// Whether all of these still fit while all of `next` are on the device, wherever it has placed them.
    ///
    /// Of a multiprocessor that holds `a` of ours or `b` of theirs, `m` of theirs take at most `m / b` of anything, and what
    /// is left holds at least `a - m * a / b` of ours, rounded down. So none of theirs costs more than `a / b`, rounded up.
    fn fit_together_with(self, next: Self) -> bool {
        let each = self.fit.div_ceil(next.fit.max(1));
        self.blocks + next.blocks * each <= self.fit
    }
}

/// The last kernel in each queue: a stream, or a capture of one.
pub(in crate::cuda) struct Occupancy<Q = (StreamId, Option<u64>)>(Mutex<Vec<(Q, Grids)>>);

impl<Q: PartialEq> Occupancy<Q> {
    pub(in crate::cuda) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Notes the next kernel in a queue. Returns whether it may start before its predecessor has ended: never, where that is
    /// not known.
    pub(in crate::cuda) fn enter(&self, queue: Q, grids: Grids) -> bool {
        let mut last = lock(&self.0);
        let known = last.iter().position(|(known, _)| *known == queue);
        let before = known.map(|at| last.remove(at).1);
        // Those that were used last come first, and others are forgotten.
        last.truncate(MOST - 1);
        last.insert(0, (queue, grids));
        before.is_some_and(|before| before.fit_together_with(grids))
    }

    /// Forgets the last kernel in a queue.
    pub(in crate::cuda) fn forget(&self, queue: Q) {
        lock(&self.0).retain(|(known, _)| *known != queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn grids(blocks: u32, fit: u32) -> Grids {
        Grids { blocks, fit }
    }

    /// Multiprocessors are filled in the worst way: one of the next in each, then as many as it takes to spoil another slot.
    #[test]
    fn there_is_room_in_the_worst_case() {
        const MULTIPROCESSORS: u32 = 6;
        for (a, b) in (1..=8).flat_map(|a| (1..=8).map(move |b| (a, b))) {
            for next in 0..=MULTIPROCESSORS * b {
                // Slots of ours that are left if `m` of the next are in a multiprocessor, in units of 1 / (a * b).
                let left = |m: u32| (a * b - m * a) / b;
                let mut held = [0_u32; MULTIPROCESSORS as usize];
                for _ in 0..next {
                    let spoils = |m: &u32| if *m < b { left(*m) - left(*m + 1) } else { 0 };
                    let open = held.iter_mut().filter(|m| **m < b);
                    let worst = open.max_by_key(|m| spoils(m)).unwrap();
                    *worst += 1;
                }
                let slots: u32 = held.iter().map(|m| left(*m)).sum();
                let most = (0..=MULTIPROCESSORS * a)
                    .filter(|ours| {
                        grids(*ours, a * MULTIPROCESSORS)
                            .fit_together_with(grids(next, b * MULTIPROCESSORS))
                    })
                    .max();
                assert!(most.is_none_or(|most| most <= slots), "{a} {b} {next}: {most:?} {slots}");
            }
        }
    }

    #[test]
    fn what_comes_early_is_known_to_leave_room() {
        let occupancy = Occupancy::new();
        let [a, b] = [1, 2];
        assert!(!occupancy.enter(a, grids(10, 100)), "nothing is known of what was before");
        assert!(occupancy.enter(a, grids(10, 100)));
        assert!(!occupancy.enter(b, grids(10, 100)), "in another queue");
        assert!(occupancy.enter(a, grids(50, 100)));
        assert!(occupancy.enter(a, grids(50, 100)), "two halves");
        assert!(!occupancy.enter(a, grids(51, 100)), "not on top of a half");
        assert!(!occupancy.enter(a, grids(50, 100)), "not behind more than a half");
        assert!(!occupancy.enter(a, grids(30, 50)), "they cost two slots each");
        for other in 3..3 + MOST {
            assert!(!occupancy.enter(other, grids(1, 100)));
        }
        assert!(!occupancy.enter(a, grids(1, 100)), "forgotten");
        assert_eq!(lock(&occupancy.0).len(), MOST);
        assert!(occupancy.enter(a, grids(1, 100)));
        occupancy.forget(a);
        assert!(!occupancy.enter(a, grids(1, 100)));
    }
}
