//! Eight bytes and a signal, there and back.

use anyhow::{Context, Result};
use symmem::{Group, Symmetric};

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::Words;
use super::{How, Measure, Measures, Row, Target};

pub(super) const ROW: Row = Row {
    name: "put_signal",
    about: "8 bytes and a signal from rank 0 to rank 1, and the same back",
    ranks: 2,
    how: How::InRanks,
    on_slices: false,
    on_devices: false,
    measures: Measures::Fixed(&[Measure {
        collective: "put_signal",
        bytes: 8,
        floor: Some("flag_round_trip"),
        target: Some(Target::TimesFloor(1.15)),
        make: Some(make),
        ..Measure::TINY
    }]),
};

fn make<'a>(_: &Measure, group: &'a Group, _: &'a Board<'a>) -> Result<Box<dyn Case + 'a>> {
    let memory = group.alloc(1)?.rendezvous(group)?;
    Ok(Box::new(PutSignal { group, memory, count: 0, right: true }))
}

struct PutSignal<'a> {
    group: &'a Group,
    memory: Symmetric<u64>,
    count: u64,
    /// Whether every value was the expected one.
    right: bool,
}

const CHANNEL: usize = 0;

impl PutSignal<'_> {
    fn put(&self, words: &Words<'_>, to: usize, value: u64) -> Result<()> {
        words.write(value);
        Ok(self.group.put_signal(to, CHANNEL, self.group.deadline())?)
    }

    fn take(&self, words: &Words<'_>, from: usize) -> Result<u64> {
        self.group.wait_signal(from, CHANNEL, self.group.deadline())?;
        Ok(words.read())
    }
}

impl Case for PutSignal<'_> {
    fn call(&mut self) -> Result<()> {
        self.calls(1)
    }

    fn calls(&mut self, count: usize) -> Result<()> {
        let rank = self.group.rank();
        let peer = 1 - rank.min(1);
        if rank > 1 {
            return Ok(());
        }
        let words = Words::new(&self.memory, peer).context("no pointer to the peer's memory")?;
        for value in (1..=count as u64).map(|i| self.count + i) {
            // The answer differs from what it answers.
            if rank == 0 {
                self.put(&words, peer, value)?;
                self.right &= self.take(&words, peer)? == !value;
            } else {
                self.right &= self.take(&words, peer)? == value;
                self.put(&words, peer, !value)?;
            }
        }
        self.count += count as u64;
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        Ok(self.right)
    }
}
