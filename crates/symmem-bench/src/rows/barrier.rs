//! The barrier of a group.

use anyhow::Result;
use std::sync::atomic::Ordering;
use symmem::Group;

use super::super::board::Board;
use super::super::measure::Case;
use super::{How, Measure, Measures, Row, Target};

pub(super) const ROW: Row = Row {
    name: "barrier",
    about: "the barrier of a group",
    ranks: 2,
    how: How::InRanks,
    on_slices: true,
    on_devices: true,
    measures: Measures::Fixed(&[Measure {
        collective: "barrier",
        floor: Some("flag_exchange"),
        target: Some(Target::TimesFloor(1.15)),
        make: Some(|_, group, board| Ok(Box::new(Barrier { group, board, count: 0 }))),
        ..Measure::TINY
    }]),
};

struct Barrier<'a> {
    group: &'a Group,
    board: &'a Board<'a>,
    count: u32,
}

impl Case for Barrier<'_> {
    fn call(&mut self) -> Result<()> {
        Ok(self.group.barrier()?)
    }

    /// A number that each rank writes before a barrier is what all read after it.
    fn check(&mut self) -> Result<bool> {
        self.count = self.count.wrapping_add(1);
        // Relaxed: it is the barrier that has to make it seen.
        self.board.counter(self.board.rank()).store(self.count, Ordering::Relaxed);
        self.group.barrier()?;
        let mut ranks = 0..self.board.ranks();
        let seen = ranks.all(|r| self.board.counter(r).load(Ordering::Relaxed) == self.count);
        self.board.barrier(); // nobody writes the next number before all have read this one
        Ok(seen)
    }
}
