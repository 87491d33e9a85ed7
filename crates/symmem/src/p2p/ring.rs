//! A ring of fragments in shared memory, from one sender to one receiver.
//!
//! A fragment takes whole lines: its header, and its data behind that. The first word of a header says that the fragment is
//! there, so a small message is one cache line. Before the sender sets it, it clears the word where the next fragment will
//! begin; it always leaves a line free for that. Generic over the words, so that loom explores the same code.

use crate::sync::{Ordering, Word};

/// The memory of a ring. Indices are taken modulo its length.
pub trait RingMemory {
    /// What headers consist of.
    type Word: Word;

    /// How many lines there are: a power of two.
    fn lines(&self) -> u32;

    /// How many lines the receiver has taken, modulo 2³². Only the receiver writes it.
    fn taken(&self) -> &Self::Word;

    /// The number of the message that the sender withdrew, until it begins another one; else 0. Only the sender writes it.
    fn withdrawn(&self) -> &Self::Word;

    /// A word of the header that begins at a line.
    fn header(&self, line: u32, word: usize) -> &Self::Word;

    /// Writes data behind the header at a line.
    fn write(&self, line: u32, data: &[u8]);

    /// Reads data behind the header at a line.
    fn read(&self, line: u32, out: &mut [u8]);
}

/// Bytes of a line.
pub(super) const LINE: usize = 64;
/// Words of a header. The first is not zero.
pub(super) const WORDS: usize = 8;
const HEADER: usize = WORDS * 4;

/// How many lines a fragment takes.
fn lines_of(bytes: usize) -> u32 {
    (HEADER + bytes).div_ceil(LINE) as u32
}

/// The sender's end.
#[derive(Debug)]
pub struct Writer<M> {
    memory: M,
    /// The line at which the next fragment begins.
    next: u32,
    /// What the receiver had taken when the sender last looked.
    taken: u32,
    /// The last message was withdrawn.
    has_withdrawn: bool,
}

impl<M: RingMemory> Writer<M> {
    /// At the beginning of a ring of zeros.
    pub fn new(memory: M) -> Self {
        Self { memory, next: 0, taken: 0, has_withdrawn: false }
    }

    /// Whether a fragment with so many bytes of data fits.
    pub fn has_room(&mut self, bytes: usize) -> bool {
        let needed = lines_of(bytes).saturating_add(1); // the next header is cleared
        let fits = |taken: u32| {
            let free = self.memory.lines() - self.next.wrapping_sub(taken);
            needed <= free
        };
        if fits(self.taken) {
            return true;
        }
        // Acquire: pairs with the release in `pop`. What the receiver has read is overwritten only now.
        let taken = self.memory.taken().load(Ordering::Acquire);
        // A receiver that has taken more than there was is not believed.
        if self.next.wrapping_sub(taken) <= self.next.wrapping_sub(self.taken) {
            self.taken = taken;
        }
        fits(self.taken)
    }

    /// Adds a fragment, for which there is room.
    pub fn push(&mut self, header: &[u32; WORDS], data: &[u8]) {
        let (at, next) = (self.next, self.next.wrapping_add(lines_of(data.len())));
        self.memory.header(next, 0).store(0, Ordering::Relaxed); // published with this fragment
        if std::mem::take(&mut self.has_withdrawn) {
            self.memory.withdrawn().store(0, Ordering::Relaxed); // likewise; numbers come again
        }
        self.memory.write(at, data);
        for (i, word) in header.iter().enumerate().skip(1) {
            self.memory.header(at, i).store(*word, Ordering::Relaxed);
        }
        // Release: pairs with the acquire in `front`.
        self.memory.header(at, 0).store(header[0], Ordering::Release);
        self.next = next;
        // The next small fragment clears it. The receiver reads the line before it.
        self.memory.header(next.wrapping_add(1), 0).fetch_to_write();
    }

    /// Says that message `number` will not be completed.
    pub fn withdraw(&mut self, number: u32) {
        // Release: pairs with the acquire in `withdrawn`, for the fragments of the message that were sent.
        self.memory.withdrawn().store(number, Ordering::Release);
        self.has_withdrawn = true;
    }
}

/// The receiver's end.
#[derive(Debug)]
pub struct Reader<M> {
    memory: M,
    /// The line at which the next fragment begins.
    next: u32,
}

impl<M: RingMemory> Reader<M> {
    /// At the beginning of a ring of zeros.
    pub fn new(memory: M) -> Self {
        Self { memory, next: 0 }
    }

    /// The header of the next fragment, if it is there. Its sender may have written anything.
    #[inline]
    pub fn front(&self) -> Option<[u32; WORDS]> {
        // Acquire: pairs with the release in `push`.
        let first = self.memory.header(self.next, 0).load(Ordering::Acquire);
        let word = |i| self.memory.header(self.next, i).load(Ordering::Relaxed);
        (first != 0).then(|| std::array::from_fn(|i| if i == 0 { first } else { word(i) }))
    }

    /// The data of the next fragment, which is there.
    pub fn read(&self, out: &mut [u8]) {
        self.memory.read(self.next, out);
    }

    /// Goes on behind the next fragment, which has so many bytes of data.
    pub fn pop(&mut self, bytes: usize) {
        self.next = self.next.wrapping_add(lines_of(bytes));
        // Release: pairs with the acquire in `has_room`, for what was read.
        self.memory.taken().store(self.next, Ordering::Release);
    }

    /// The number of the message that the sender withdrew, if it has begun no other one since; else 0. Whoever looks for its fragments afterwards finds all of them.
    pub fn withdrawn(&self) -> u32 {
        self.memory.withdrawn().load(Ordering::Acquire) // pairs with the release in `withdraw`
    }
}
