//! A ring in mapped memory.
#![allow(unsafe_code)] // S2 (only the sender writes what the receiver has taken, only the receiver reads what was sent), S3

use super::ring::{LINE, RingMemory, WORDS};
use crate::error::Result;
use crate::memory::region::{Region, Words};
use crate::sync::SharedWord;

const LINES: usize = 4 << 10;
/// Where the lines begin: on a page of their own.
const START: usize = 4096;
/// Bytes of the memory of a ring.
pub(crate) const RING_BYTES: usize = START + LINES * LINE;
/// Words per line.
const PER_LINE: usize = LINE / 4;
const _: () = assert!(LINES.is_power_of_two());

/// The words of a ring, and its data, which lies in them.
pub(crate) struct Mapped(Words);

impl Mapped {
    /// In the first [`RING_BYTES`] of a region.
    pub(crate) fn new(region: &Region) -> Result<Self> {
        region.part(0, RING_BYTES).and_then(Words::new).map(Self)
    }

    fn word_of(line: u32) -> usize {
        START / 4 + (line as usize % LINES) * PER_LINE
    }

    /// The memory of `bytes` bytes behind the header at a line: up to the end of the ring, and from its beginning on.
    fn parts(&self, line: u32, bytes: usize) -> [(*mut u8, usize); 2] {
        const ALL: usize = LINES * LINE;
        assert!(bytes <= ALL, "more than the ring holds");
        let lines = &self.0[START / 4..START / 4 + LINES * PER_LINE];
        let first = ((line as usize % LINES) * LINE + WORDS * 4) % ALL;
        let until_end = bytes.min(ALL - first);
        let base = lines.as_ptr().cast_mut().cast::<u8>();
        [(base.wrapping_add(first), until_end), (base, bytes - until_end)]
    }
}

impl RingMemory for Mapped {
    type Word = SharedWord;

    fn lines(&self) -> u32 {
        LINES as u32
    }

    fn taken(&self) -> &SharedWord {
        &self.0[0]
    }

    fn withdrawn(&self) -> &SharedWord {
        &self.0[2 * PER_LINE]
    }

    #[inline]
    fn header(&self, line: u32, word: usize) -> &SharedWord {
        &self.0[Self::word_of(line) + word]
    }

    fn write(&self, line: u32, data: &[u8]) {
        let mut from = data.as_ptr();
        for (to, bytes) in self.parts(line, data.len()) {
            // SAFETY: S3: within the ring, and both parts together are as long as the data; S2: the receiver reads it only after
            // the header.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
            from = from.wrapping_add(bytes);
        }
    }

    fn read(&self, line: u32, out: &mut [u8]) {
        let mut to = out.as_mut_ptr();
        for (from, bytes) in self.parts(line, out.len()) {
            // SAFETY: as in `write`; the sender has published it, and writes it again only once it is taken.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
            to = to.wrapping_add(bytes);
        }
    }
}
