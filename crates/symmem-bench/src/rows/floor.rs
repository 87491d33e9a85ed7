//! What the machine itself allows: flags between processes, with nothing around them.

use anyhow::Result;
use std::sync::atomic::Ordering;
use symmem::Symmetric;

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::Words;
use super::{How, Measure, Measures, Row};

pub(super) const ROW: Row = Row {
    name: "floor",
    about: "the machine's own: flags between processes, crosswise, there and back, and with 8 bytes",
    ranks: 2,
    how: How::InRanks,
    on_slices: true,
    on_devices: false,
    measures: Measures::Fixed(&[EXCHANGE, ROUND_TRIP, PUT_ROUND_TRIP]),
};

const EXCHANGE: Measure = Measure {
    system: "limits",
    collective: "flag_exchange",
    make: Some(|_, _, board| Ok(Box::new(Exchange(Flags::new(board))))),
    ..Measure::TINY
};

const ROUND_TRIP: Measure = Measure {
    collective: "flag_round_trip",
    make: Some(|_, _, board| Ok(Box::new(RoundTrip(Flags::new(board))))),
    ..EXCHANGE
};

/// With eight bytes of data in a line of their own: the reader misses twice, and no signal can help that.
const PUT_ROUND_TRIP: Measure = Measure {
    collective: "put_flag_round_trip",
    bytes: 8,
    make: Some(|_, group, board| {
        let memory = group.alloc(1)?.rendezvous(group)?;
        Ok(Box::new(PutRoundTrip { flags: Flags::new(board), memory, right: true }))
    }),
    ..EXCHANGE
};

/// They share their flags but not their counts, so the flags are reset before each sample.
pub(super) struct Flags<'a> {
    board: &'a Board<'a>,
    epoch: u32,
}

impl<'a> Flags<'a> {
    pub(super) fn new(board: &'a Board<'a>) -> Self {
        Self { board, epoch: 0 }
    }

    /// Each stores a flag for each, and waits for all the others': the smallest barrier.
    #[inline]
    pub(super) fn exchange(&mut self) {
        self.epoch += 1;
        self.others().for_each(|peer| self.tell(peer));
        self.others().for_each(|peer| self.hear(peer));
    }

    /// Zero in our own pad; nobody touches them before the barrier that follows.
    pub(super) fn reset(&mut self) {
        self.epoch = 0;
        for source in 0..self.board.ranks() {
            self.board.flag(self.board.rank(), source).store(0, Ordering::Relaxed);
        }
    }

    /// Tells `peer` how far we are.
    #[inline]
    fn tell(&self, peer: usize) {
        // Release: pairs with the acquire in `Board::await_value`.
        self.board.flag(peer, self.board.rank()).store(self.epoch, Ordering::Release);
    }

    /// Waits until `peer` is as far as we.
    #[inline]
    fn hear(&self, peer: usize) {
        self.board.await_value(self.board.flag(self.board.rank(), peer), self.epoch);
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.board.rank();
        (0..self.board.ranks()).filter(move |&peer| peer != rank)
    }
}

/// The smallest barrier.
struct Exchange<'a>(Flags<'a>);

impl Case for Exchange<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.0.reset();
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        self.0.exchange();
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        Ok(true) // there is nothing but the flags, and they have come
    }
}

/// Rank 0 stores a flag, rank 1 sees it and stores one, rank 0 sees that.
struct RoundTrip<'a>(Flags<'a>);

impl Case for RoundTrip<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.0.reset();
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        self.0.epoch += 1;
        match self.0.board.rank() {
            0 => {
                self.0.tell(1);
                self.0.hear(1);
            }
            1 => {
                self.0.hear(0);
                self.0.tell(0);
            }
            _ => {}
        }
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// As [`RoundTrip`], with a value written before the flag and read after it.
struct PutRoundTrip<'a> {
    flags: Flags<'a>,
    memory: Symmetric<u64>,
    right: bool,
}

impl Case for PutRoundTrip<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.flags.reset();
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        self.calls(1)
    }

    fn calls(&mut self, count: usize) -> Result<()> {
        let rank = self.flags.board.rank();
        if rank > 1 {
            return Ok(());
        }
        let peer = 1 - rank;
        let words = Words::new(&self.memory, peer)?;
        for _ in 0..count {
            self.flags.epoch += 1;
            let value = u64::from(self.flags.epoch);
            if rank == 0 {
                words.write(value);
                self.flags.tell(peer);
                self.flags.hear(peer);
                self.right &= words.read() == !value;
            } else {
                self.flags.hear(peer);
                self.right &= words.read() == value;
                words.write(!value);
                self.flags.tell(peer);
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        Ok(self.right)
    }
}
