//! What ranks agree on besides the library: when all are through a round, and with what success.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How a rank got through a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Clean = 1,
    /// A call failed that leaves the group out of step.
    Dirty = 2,
    /// A rank is lost.
    Lost = 3,
}

/// What ranks do next; all come to the same answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    GoOn,
    Resync,
    Shrink,
}

const LANES: usize = 4;
const ROUNDS: usize = 16;
const RANKS: usize = 8;
/// Nobody waits longer: something hangs.
const HANG: Duration = Duration::from_secs(40);

/// Words that all ranks and their supervisor read and write.
pub enum Board {
    Threads(Vec<AtomicU64>),
    Processes(std::fs::File),
}

impl Board {
    const WORDS: usize = 2 * RANKS + LANES * ROUNDS * RANKS;

    pub fn for_threads() -> Self {
        Self::Threads((0..Self::WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// In a file that was made by `create`.
    pub fn in_file(file: std::fs::File) -> Self {
        Self::Processes(file)
    }

    /// Waits until all ranks have begun.
    pub fn begin(&self, ranks: usize, rank: usize) -> bool {
        let members: Vec<usize> = (0..ranks).collect();
        self.agree(&members, rank, LANES - 1, ROUNDS - 1, Status::Clean) == Some(Next::GoOn)
    }

    pub fn create(path: &std::path::Path) -> std::io::Result<Self> {
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(8 * Self::WORDS as u64)?;
        Ok(Self::Processes(file))
    }

    fn load(&self, at: usize) -> u64 {
        match self {
            Self::Threads(words) => words[at].load(Ordering::SeqCst),
            Self::Processes(file) => {
                let mut bytes = [0; 8];
                let _ = file.read_exact_at(&mut bytes, 8 * at as u64);
                u64::from_le_bytes(bytes)
            }
        }
    }

    fn store(&self, at: usize, value: u64) {
        match self {
            Self::Threads(words) => words[at].store(value, Ordering::SeqCst),
            Self::Processes(file) => {
                let _ = file.write_all_at(&value.to_le_bytes(), 8 * at as u64);
            }
        }
    }

    /// The rank is dead, or will not come to the board again.
    pub fn gone(&self, rank: usize) {
        self.store(rank, 1);
    }

    /// The rank's thread for a lane makes no further calls: nobody should wait for it.
    pub fn retire(&self, rank: usize, lane: usize) {
        for round in 0..ROUNDS {
            let place = Self::place(lane, round, rank);
            if self.load(place) == 0 {
                self.store(place, Status::Lost as u64);
            }
        }
    }

    fn place(lane: usize, round: usize, rank: usize) -> usize {
        2 * RANKS + (lane * ROUNDS + round) * RANKS + rank
    }

    /// Asks the supervisor to stop this rank's process for so many milliseconds.
    pub fn ask_to_stop(&self, rank: usize, milliseconds: u64) {
        self.store(RANKS + rank, milliseconds);
    }

    /// What a rank has asked for, once.
    pub fn asked_to_stop(&self, rank: usize) -> Option<u64> {
        let asked = self.load(RANKS + rank);
        self.store(RANKS + rank, 0);
        Some(asked).filter(|asked| *asked > 0)
    }

    /// Says how a round went here, waits for all that live, and says what comes of it. None if somebody does not come.
    pub fn agree(
        &self,
        members: &[usize],
        rank: usize,
        lane: usize,
        round: usize,
        status: Status,
    ) -> Option<Next> {
        let place = |r: usize| Self::place(lane, round, r);
        self.store(place(rank), status as u64);
        let begin = Instant::now();
        // Ranks that look all the time may leave no core to whom they wait for: a process that is about to end, say.
        let mut nap = Duration::from_micros(100);
        let mut worst = status as u64;
        for &member in members {
            worst = worst.max(loop {
                let gone = self.load(member) != 0; // before the word: it was written by then or never
                match self.load(place(member)) {
                    0 if gone => break Status::Lost as u64,
                    0 if begin.elapsed() > HANG => return None,
                    0 => {
                        std::thread::sleep(nap);
                        nap = (2 * nap).min(Duration::from_millis(4));
                    }
                    said => break said,
                }
            });
        }
        Some(match worst {
            1 => Next::GoOn,
            2 => Next::Resync,
            _ => Next::Shrink,
        })
    }
}
