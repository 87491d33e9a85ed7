//! Where ranks synchronise between samples, with words of their own instead of the library's calls: shared words in the
//! signal pad of an allocation, each in its own slot.
//!
//! | slot of a pad | in the pad of | written by | values |
//! |---------------|---------------|------------|--------|
//! | `ARRIVED`     | rank 0        | all        | ranks that have come to the barrier; the last one resets it |
//! | `BARRIERS`    | rank 0        | the last   | barriers that are over |
//! | `NUMBER`      | rank 0        | rank 0     | what all are to know |
//! | `TRIPS`       | both          | its owner  | round trips begun (rank 0) or answered (rank 1) |
//! | `COUNTER`     | every rank    | its owner  | for checks of a row |
//! | `FLAGS` + s   | every rank    | rank s     | exchanges and round trips of the floor that s has come to |

use std::cell::Cell;

use anyhow::{Context, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use symmem::Handle;

use super::clock;

/// Words from one slot to the next: two cache lines, since processors fetch lines in pairs.
const SLOT: usize = 32;

const ARRIVED: usize = 0;
const BARRIERS: usize = 1;
const NUMBER: usize = 2;
const TRIPS: usize = 3;
const COUNTER: usize = 4;
const FLAGS: usize = 5;

/// A flag that goes there and back in less travels between cores that share a cache, or between two threads of one: that
/// takes 45 to 120 ns, and 220 to 500 otherwise.
const NEAR_NS: f64 = 170.0;

/// The words, as one rank sees them.
pub(super) struct Board<'h> {
    rank: usize,
    /// By rank.
    pads: Vec<&'h [AtomicU32]>,
    /// Whether waiting keeps the awaited rank from running.
    oversubscribed: bool,
    trips: Cell<u32>,
}

impl<'h> Board<'h> {
    /// Bytes of a signal pad that has all the words for `ranks` ranks.
    pub(super) fn pad_size(ranks: usize) -> usize {
        (FLAGS + ranks) * SLOT * size_of::<AtomicU32>()
    }

    /// In the signal pad of an allocation. To be called before this thread is pinned to one of the cores.
    pub(super) fn new(handle: &'h Handle) -> Result<Self> {
        let ranks = handle.size();
        let needed = FLAGS + ranks;
        let pads: Vec<_> =
            (0..ranks).map(|rank| handle.signal_pad().words(rank)).collect::<Result<_, _>>()?;
        let fits = pads.iter().all(|words| words.len() >= needed * SLOT);
        fits.then_some(()).context("the signal pad is too small for the flags of all ranks")?;
        let oversubscribed = !clock::has_core_each(ranks);
        Ok(Self { rank: handle.rank(), pads, oversubscribed, trips: Cell::new(0) })
    }

    /// In memory that ranks of several hosts share besides.
    pub(super) fn shared(rank: usize, ranks: usize, words: &'h [AtomicU32]) -> Result<Self> {
        let each = Self::pad_size(ranks) / size_of::<AtomicU32>();
        let pads: Vec<_> = words.chunks_exact(each).take(ranks).collect();
        (pads.len() == ranks).then_some(()).context("too little memory for all ranks")?;
        let oversubscribed = !clock::has_core_each(ranks);
        Ok(Self { rank, pads, oversubscribed, trips: Cell::new(0) })
    }

    /// Whether waiting keeps the awaited rank from running.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.oversubscribed
    }

    /// Which rank this is.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub(super) fn ranks(&self) -> usize {
        self.pads.len()
    }

    fn word(&self, owner: usize, slot: usize) -> &'h AtomicU32 {
        &self.pads[owner][slot * SLOT]
    }

    /// The flag of rank `source` in the pad of rank `owner`.
    pub(super) fn flag(&self, owner: usize, source: usize) -> &'h AtomicU32 {
        self.word(owner, FLAGS + source)
    }

    /// A word of rank `owner` for checks.
    pub(super) fn counter(&self, owner: usize) -> &'h AtomicU32 {
        self.word(owner, COUNTER)
    }

    /// Waits until `word` has reached `value`. No deadline: should the other rank die, the launcher ends us.
    #[inline]
    pub(super) fn await_value(&self, word: &AtomicU32, value: u32) {
        // Acquire: pairs with the release of the rank that stored it. The difference is at most 1 either way.
        while (word.load(Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
            if self.oversubscribed { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Waits for all ranks.
    pub(super) fn barrier(&self) {
        let (arrived, barriers) = (self.word(0, ARRIVED), self.word(0, BARRIERS));
        let over = barriers.load(Ordering::Acquire);
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.ranks() as u32 {
            arrived.store(0, Ordering::Relaxed);
            // Release: pairs with the acquire of those who wait, and publishes the line above.
            barriers.store(over.wrapping_add(1), Ordering::Release);
        } else {
            self.await_value(barriers, over.wrapping_add(1));
        }
    }

    /// Waits for all ranks; with two of them, also tells whether they are near each other.
    ///
    /// A host moves the cores of a virtual machine about, and a flag travels five times as fast between those that share a cache.
    pub(super) fn synchronize_and_look(&self) -> bool {
        const TRIPS_EACH: u32 = 8;
        self.barrier();
        if self.ranks() != 2 || self.oversubscribed {
            return false;
        }
        let (ours, theirs) = (self.word(self.rank, TRIPS), self.word(1 - self.rank, TRIPS));
        let begin = clock::now();
        let first = self.trips.get();
        for trip in (1..=TRIPS_EACH).map(|i| first.wrapping_add(i)) {
            if self.rank == 0 {
                ours.store(trip, Ordering::Release);
            }
            self.await_value(theirs, trip);
            if self.rank == 1 {
                ours.store(trip, Ordering::Release);
            }
        }
        self.trips.set(first.wrapping_add(TRIPS_EACH));
        (clock::now() - begin) as f64 / f64::from(TRIPS_EACH) < NEAR_NS
    }

    /// Rank 0's number, for all.
    pub(super) fn agree(&self, number: u32) -> u32 {
        let word = self.word(0, NUMBER);
        if self.rank == 0 {
            word.store(number, Ordering::Relaxed);
        }
        self.barrier();
        let agreed = word.load(Ordering::Relaxed);
        self.barrier();
        agreed
    }
}
