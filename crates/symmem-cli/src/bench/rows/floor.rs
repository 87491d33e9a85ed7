//! What the machine itself allows: flags between processes, with nothing around them.

use anyhow::Result;
use symmem::sync::Ordering;

use super::super::board::Board;
use super::super::measure::Case;
use super::{How, Measure, Row};

pub(super) const ROW: Row = Row {
    name: "floor",
    about: "the machine's own: flags between processes, all at once, and there and back",
    ranks: 2,
    how: How::InRanks,
    measures: &[EXCHANGE, ROUND_TRIP],
};

const EXCHANGE: Measure = Measure {
    system: "limits",
    collective: "flag_exchange",
    bytes: 0,
    batch: 20,
    samples: 300,
    floor: None,
    target: None,
    make: Some(|_, board| Ok(Box::new(Exchange(Flags { board, epoch: 0 })))),
};

const ROUND_TRIP: Measure = Measure {
    collective: "flag_round_trip",
    make: Some(|_, board| Ok(Box::new(RoundTrip(Flags { board, epoch: 0 })))),
    ..EXCHANGE
};

/// The two share their flags but not their counts, so the flags start anew before each sample.
struct Flags<'a> {
    board: &'a Board<'a>,
    epoch: u32,
}

impl Flags<'_> {
    /// Zero in our own pad; nobody touches them before the meeting that follows.
    fn reset(&mut self) {
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

/// Each stores a flag for each, and waits for all the others': the smallest barrier.
struct Exchange<'a>(Flags<'a>);

impl Case for Exchange<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.0.reset();
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        self.0.epoch += 1;
        self.0.others().for_each(|peer| self.0.tell(peer));
        self.0.others().for_each(|peer| self.0.hear(peer));
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
