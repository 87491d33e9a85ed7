//! Where each word of a pad lies, and who writes it.
//!
//! | word of rank r's pad   | written by | values |
//! |------------------------|------------|--------|
//! | `rings`, `sleepers`    | see `Bell` | |
//! | `poison`               | any rank   | 0: fine; n+1: rank n of the group is lost; never reset |
//! | `out`                  | any rank   | 0: in step; else the generation of calls that broke, and n+1: rank n gave up a call of it |
//! | `coming`               | rank r     | the epoch of the calls' channel that r reaches as soon as its earlier calls are over; 0: none |
//! | `farewell`             | rank r     | 0: here; else how r is leaving the world, written before any peer is told |
//! | `loss(i)`              | any rank, in the arbiter's pad | n+1: rank n was the i-th to be lost; never reset |
//! | `description(e & 1)`   | rank r     | what r calls at epoch e, in full, where its peers do not know it by a number yet; rewritten as `call` is |
//! | `given_up`             | rank r     | what r called when it gave up, in full |
//! | `note(i)`              | rank r     | what a thread of r waits for, as text, for those who wait for r |
//! | `RATES` and following  | rank 0, in its own pad, before any peer has it | what all ranks plan with: see `Rates`; never changed |
//! | `epoch(c, s)`          | rank s     | number of barriers on channel c that s has reached; only grows (modulo 2³²) |
//! | `call(c, s, e & 1)`    | rank s     | what s called when it reached epoch e; rewritten only once r has reached e + 1 |
//! | `core(c, s)`           | rank s     | on which core s was when it last reached a barrier on c, where ranks outnumber the cores |
//! | `payload(c, s, e & 1)` | rank s     | what s carries along to epoch e, in the line of its flag; rewritten as `call` is |
//! | `resync(s)`            | rank s     | number of rounds of resynchronisation that s has reached; only grows |
//! | `known(s, e & 1)`    | rank r     | where a group spans hosts: e, once r has heard that s, of another host, has reached it, for all ranks of its own |
//! | `left(c, s)`           | s, or whom it told | where a group spans hosts: the last barrier on c that s had left when it gave up a call |
//! | `ring(s)`              | rank s     | 1 once s has sent r the memory of its ring for messages to r |
//! | `signal(c, s)`         | s: 0 → 1 (release), r: 1 → 0 (acquire) | zero at rest |
//! | `decision(g)`          | first of all, in the arbiter's pad | 0: open; n+1: rank n's proposal for generation g won |
//! | `proposal(g, i)`       | rank r     | bit b of word i: rank 32·i+b takes part in generation g |
//!
//! The arbiter is rank 0, or the first rank of this host where a group spans several: there each host decides for itself.

use crate::machine::Rates;

/// Words from one slot to the next: two cache lines, since processors fetch lines in pairs.
const SLOT: usize = 32;
const _: () = assert!(Rates::WORDS <= SLOT, "the decisions begin behind the rates");

/// Where each word lies in a pad, in words. The same on all ranks of a group.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub(super) ranks: usize,
    /// The users' channels; one more, with this number, belongs to the library's own operations.
    pub(super) channels: usize,
    /// Where the slots begin.
    slots: usize,
}

impl Layout {
    /// Of a group of `ranks` with `channels` for its users.
    pub const fn new(ranks: usize, channels: usize) -> Self {
        let layout = Self { ranks, channels, slots: 0 };
        let slots = layout.loss(ranks).next_multiple_of(SLOT);
        Self { slots, ..layout }
    }

    pub(super) const RINGS: usize = 0;
    pub(super) const SLEEPERS: usize = SLOT;
    pub(super) const POISON: usize = 2 * SLOT;
    /// The first of [`Rates::WORDS`].
    pub(crate) const RATES: usize = 3 * SLOT;
    /// In the line of the poison, which every call looks at.
    pub(super) const OUT: usize = Self::POISON + 1;
    pub(super) const COMING: usize = Self::POISON + 2;
    pub(crate) const FAREWELL: usize = Self::POISON + 3;
    const DESCRIPTIONS: usize = 4 * SLOT;
    const NOTES: usize = Self::DESCRIPTIONS + 3 * Self::DESCRIPTION;
    const DECISIONS: usize = Self::NOTES + Self::THREADS * Self::NOTE;

    /// Words of a call's description.
    pub(crate) const DESCRIPTION: usize = 16;
    /// How many threads of a rank can say at once what they wait for.
    pub(crate) const THREADS: usize = 4;
    /// Words of one note: its length, and text.
    pub(crate) const NOTE: usize = 40;

    /// The first word of the description of the call at `epoch`.
    pub(crate) const fn description(epoch: u32) -> usize {
        Self::DESCRIPTIONS + (epoch & 1) as usize * Self::DESCRIPTION
    }

    /// The first word of the description of a call that was given up.
    pub(crate) const fn given_up() -> usize {
        Self::DESCRIPTIONS + 2 * Self::DESCRIPTION
    }

    /// The first word of a thread's note.
    pub(crate) const fn note(thread: usize) -> usize {
        Self::NOTES + thread * Self::NOTE
    }

    /// Whether words from the first to before the second are among those that a rank writes in its own pad for others to read.
    pub(super) fn is_said((first, end): (usize, usize)) -> bool {
        [(Self::COMING, Self::FAREWELL + 1), (Self::DESCRIPTIONS, Self::DECISIONS)]
            .iter()
            .any(|(from, to)| (*from..*to).contains(&first) && end <= *to)
    }

    /// Who was the `i`-th to be lost; in the arbiter's pad.
    pub(super) const fn loss(&self, i: usize) -> usize {
        self.proposal(self.generations(), 0) + i
    }

    pub(super) const fn decision(&self, generation: usize) -> usize {
        Self::DECISIONS + generation
    }

    pub(super) const fn bitmap(&self) -> usize {
        self.ranks.div_ceil(32)
    }

    /// How many generations can be decided on: one for every loss, and some for attempts that failed otherwise.
    pub(crate) const fn generations(&self) -> usize {
        self.ranks + 64
    }

    pub(super) const fn proposal(&self, generation: usize, i: usize) -> usize {
        self.decision(self.generations()) + generation * self.bitmap() + i
    }

    const fn slot(&self, channel: usize, source: usize) -> usize {
        self.slots + (channel * self.ranks + source) * SLOT
    }

    pub(super) const fn epoch(&self, channel: usize, source: usize) -> usize {
        self.slot(channel, source)
    }

    pub(super) const fn call(&self, channel: usize, source: usize, epoch: u32) -> usize {
        self.slot(channel, source) + 1 + (epoch & 1) as usize
    }

    pub(super) const fn core(&self, channel: usize, source: usize) -> usize {
        self.slot(channel, source) + 3
    }

    /// Bytes that fit into the line of a flag, for each of two epochs in guard.
    pub(crate) const PAYLOAD: usize = 24;

    /// The first of the words that carry [`Layout::PAYLOAD`] bytes of the library's own channel.
    pub(crate) const fn payload(&self, source: usize, epoch: u32) -> usize {
        self.slot(self.channels, source) + 4 + (epoch & 1) as usize * (Self::PAYLOAD / 4)
    }

    /// In the line of the flag of the library's own channel, which carries no signals.
    pub(super) const fn resync(&self, source: usize) -> usize {
        self.slot(self.channels, source) + SLOT / 2 + 1
    }

    pub(super) const fn known(&self, source: usize, epoch: u32) -> usize {
        self.slot(self.channels, source) + SLOT / 2 + 3 + (epoch & 1) as usize
    }

    pub(super) const fn ring(&self, source: usize) -> usize {
        self.slot(self.channels, source) + SLOT / 2 + 7
    }

    pub(super) const fn left(&self, channel: usize, source: usize) -> usize {
        self.slot(channel, source) + SLOT / 2 + 2
    }

    pub(super) const fn signal(&self, channel: usize, source: usize) -> usize {
        self.slot(channel, source) + SLOT / 2
    }

    /// Length of a pad in words.
    pub const fn words(&self) -> usize {
        self.slot(self.channels + 1, 0)
    }

    /// The places of all words that mean something.
    #[cfg(any(test, loom))]
    pub fn used(self) -> Vec<usize> {
        let mut used = vec![Self::RINGS, Self::SLEEPERS, Self::POISON];
        used.extend([Self::OUT, Self::COMING, Self::FAREWELL]);
        used.extend(Self::RATES..Self::RATES + Rates::WORDS);
        used.extend(
            (0..self.ranks).flat_map(|rank| [self.loss(rank), self.resync(rank), self.ring(rank)]),
        );
        for (source, epoch) in (0..self.ranks).flat_map(|s| [0, 1].map(|e| (s, e))) {
            used.push(self.known(source, epoch));
        }
        for generation in 0..self.ranks {
            used.push(self.decision(generation));
            used.extend((0..self.bitmap()).map(|i| self.proposal(generation, i)));
        }
        for (channel, source) in
            (0..=self.channels).flat_map(|c| (0..self.ranks).map(move |s| (c, s)))
        {
            used.push(self.epoch(channel, source));
            used.extend([0, 1].map(|epoch| self.call(channel, source, epoch)));
            used.extend([self.core(channel, source), self.signal(channel, source)]);
            used.push(self.left(channel, source));
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const RANKS: [usize; 10] = [1, 2, 3, 8, 31, 32, 33, 64, 72, 130];

    #[test]
    fn no_two_words_of_a_pad_overlap_and_all_lie_within() {
        for (ranks, channels) in RANKS.iter().flat_map(|&r| [0, 1, 2, 32].map(|c| (r, c))) {
            let layout = Layout::new(ranks, channels);
            let used = layout.used();
            let distinct: BTreeSet<_> = used.iter().copied().collect();
            assert_eq!(used.len(), distinct.len(), "{layout:?}");
            assert!(used.iter().all(|&index| index < layout.words()), "{layout:?}");
        }
    }

    #[test]
    fn descriptions_and_notes_lie_between_the_rates_and_the_decisions() {
        let layout = Layout::new(3, 2);
        let mut parts: Vec<_> =
            [Layout::description(0), Layout::description(1), Layout::given_up()]
                .map(|first| first..first + Layout::DESCRIPTION)
                .to_vec();
        parts.extend((0..Layout::THREADS).map(|i| Layout::note(i)..Layout::note(i) + Layout::NOTE));
        assert!(parts[0].start >= Layout::RATES + Rates::WORDS);
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(parts.iter().all(|part| part.end <= layout.decision(0)));
    }

    #[test]
    fn ranks_write_to_cache_lines_of_their_own() {
        for ranks in RANKS {
            let layout = Layout::new(ranks, 2);
            let sources = || (0..=2).flat_map(|c| (0..ranks).map(move |s| (c, s)));
            let lines: BTreeSet<_> = sources().map(|(c, s)| layout.epoch(c, s) / SLOT).collect();
            assert_eq!(lines.len(), 3 * ranks);
            let within = |(c, s)| {
                let words = [layout.epoch(c, s), layout.call(c, s, 1), layout.signal(c, s)];
                words.iter().all(|word| word / SLOT == words[0] / SLOT)
            };
            assert!(sources().all(within));
            assert!(lines.iter().all(|&line| line * SLOT > layout.proposal(ranks - 1, 0)));
        }
    }

    #[test]
    fn a_flag_and_its_payload_lie_in_one_line_and_nothing_else_lies_there() {
        const WORDS: usize = Layout::PAYLOAD / 4;
        let layout = Layout::new(3, 2);
        let used = layout.used();
        for (source, epoch) in (0..3).flat_map(|s| [0, 1].map(|e| (s, e))) {
            let first = layout.payload(source, epoch);
            let flag = layout.epoch(2, source);
            assert_eq!((first + WORDS - 1) / (SLOT / 2), flag / (SLOT / 2));
            assert!((first..first + WORDS).all(|word| !used.contains(&word)));
            let other = layout.payload(source, epoch + 1);
            assert!(first.abs_diff(other) >= WORDS && first.is_multiple_of(2));
        }
    }
}
