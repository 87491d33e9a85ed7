//! The numbers by which ranks know calls that all of them have made before: see `sequence.rs`.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::call::{Call, PLAIN, Words};
use super::staging::RegionPads;
use crate::signal::{BARRIER, IN_FULL, Layout, Signals};
use crate::sync::Ordering;
use crate::sync::shared::AtomicU64;

/// How many calls have numbers. A further one replaces another, the same one on all ranks.
const KNOWN: usize = 256;
/// The first number of a known call.
const FIRST: u32 = IN_FULL + 1;
/// Set in all but the first barrier of a call.
pub(super) const CONTINUED: u32 = 1 << 31;

/// What a rank knows of its group's calls. All but what has a lock is for the thread that holds the sequence.
pub(super) struct Sequence {
    known: Vec<[AtomicU64; 8]>,
    /// The call that gave up and may be resumed.
    pub(super) pending: [AtomicU64; 8],
    /// A call that gave up before peers could know of it, because it waited for an earlier one. The last word says whether
    /// there is one.
    pub(super) put_off: [AtomicU64; 8],
    /// The outcome of the call that gave up, if a caller asks for it later.
    awaited: Mutex<Option<Ticket>>,
    /// The last call that failed on all ranks alike: its number and operation.
    common_failure: Mutex<Option<(u32, &'static str)>>,
    /// How many rendezvous there were: the same on all ranks, because all have made the same calls.
    rendezvous: AtomicU64,
}

/// A barrier that a rank has reached and not left, for a later question about its outcome.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(super) generation: u32,
    pub(super) epoch: u32,
    /// Whether all ranks have arrived with the same call.
    pub(super) outcome: Arc<OnceLock<bool>>,
}

impl Default for Sequence {
    fn default() -> Self {
        let words = || std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            known: std::iter::repeat_with(words).take(KNOWN).collect(),
            pending: words(),
            put_off: words(),
            awaited: Mutex::default(),
            common_failure: Mutex::default(),
            rendezvous: AtomicU64::new(0),
        }
    }
}

impl Sequence {
    #[inline]
    pub(super) fn place(words: &Words) -> usize {
        let mixed = words.iter().zip([0, 11, 23, 37, 5, 17, 29, 43]);
        let mixed = mixed.fold(0_u64, |all, (word, bits)| all ^ word.rotate_left(bits));
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % KNOWN
    }

    /// The number of a call whose place is `place`, or that of one in full.
    #[inline(always)]
    pub(super) fn number(&self, words: &Words, place: usize) -> u32 {
        match self.known.get(place) {
            Some(known) if is_equal(known, words) => FIRST + place as u32,
            _ => IN_FULL,
        }
    }

    /// What stands for a call in its caller's flag.
    pub(super) fn word(&self, call: &Call) -> u32 {
        let words = call.words();
        if call.op == PLAIN { BARRIER } else { self.number(&words, Self::place(&words)) }
    }

    /// Gives a number to a call that all ranks have just made.
    #[cold]
    pub(super) fn learn(&self, words: &Words) {
        if let Some(known) = self.known.get(Self::place(words)) {
            store(known, words);
        }
    }

    pub(super) fn forget_all(&self) {
        self.known.iter().for_each(|known| store(known, &[0; 8]));
    }

    /// Takes the call that was put off, if one was.
    pub(super) fn take_put_off(&self) -> Option<Call> {
        let words = load(&self.put_off);
        store(&self.put_off, &[0; 8]);
        (words[7] != 0).then(|| Call::from_words(&words))
    }

    /// The call of a word in `rank`'s flag at `epoch`.
    pub(super) fn call(
        &self,
        signals: &Signals<RegionPads>,
        rank: usize,
        word: u32,
        epoch: u32,
    ) -> Call {
        match word & !CONTINUED {
            BARRIER => Call::plain(PLAIN),
            IN_FULL => Call::from_words(&unpack(&signals.description(rank, epoch))),
            number => {
                let known = self.known.get((number - FIRST) as usize);
                Call::from_words(&known.map(load).unwrap_or_default())
            }
        }
    }

    /// Numbers a rendezvous that all ranks have reached.
    pub(super) fn count_rendezvous(&self) -> u64 {
        self.rendezvous.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn common_failure(&self) -> MutexGuard<'_, Option<(u32, &'static str)>> {
        self.common_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn awaited(&self) -> MutexGuard<'_, Option<Ticket>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[inline]
fn is_equal(known: &[AtomicU64; 8], words: &Words) -> bool {
    let differences = known.iter().zip(words).map(|(a, b)| a.load(Ordering::Relaxed) ^ b);
    differences.fold(0, |all, difference| all | difference) == 0
}

pub(super) fn load(words: &[AtomicU64; 8]) -> Words {
    std::array::from_fn(|i| words[i].load(Ordering::Relaxed))
}

pub(super) fn store(to: &[AtomicU64; 8], words: &Words) {
    to.iter().zip(words).for_each(|(to, word)| to.store(*word, Ordering::Relaxed));
}

pub(super) fn pack(words: &Words) -> [u32; Layout::DESCRIPTION] {
    std::array::from_fn(|i| (words[i / 2] >> (32 * (i % 2))) as u32)
}

pub(super) fn unpack(words: &[u32; Layout::DESCRIPTION]) -> Words {
    std::array::from_fn(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32)
}
