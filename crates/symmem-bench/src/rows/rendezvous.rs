//! The rendezvous of a further allocation in a group that is formed already.

use std::time::Duration;

use anyhow::{Context, Result};
use symmem::{Buffer, Group, Symmetric};

use super::super::measure::Case;
use super::{How, Measure, Measures, Row, Target};

const BYTES: usize = 1 << 20;

pub(super) const ROW: Row = Row {
    name: "rendezvous",
    about: "a further allocation of 1 MiB in a group that exists",
    ranks: 4,
    how: How::InRanks,
    on_slices: false,
    on_devices: false,
    measures: Measures::Fixed(&[Measure {
        collective: "rendezvous",
        bytes: BYTES,
        batch: 1,
        samples: 200,
        target: Some(Target::Within(Duration::from_millis(1))),
        make: Some(|_, group, _| {
            Ok(Box::new(Rendezvous { group, count: 0, buffer: None, memory: None }))
        }),
        ..Measure::TINY
    }]),
};

struct Rendezvous<'a> {
    group: &'a Group,
    count: u64,
    buffer: Option<Buffer<u64>>,
    memory: Option<Symmetric<u64>>,
}

impl Rendezvous<'_> {
    /// What rank `rank` writes this time.
    fn mark(&self, rank: usize) -> u64 {
        self.count << 16 | rank as u64
    }
}

impl Case for Rendezvous<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.count += 1;
        let mut buffer = self.group.alloc(BYTES / size_of::<u64>())?;
        buffer.local_mut().fill(self.mark(self.group.rank()));
        self.buffer = Some(buffer);
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        let buffer = self.buffer.take().context("nothing is allocated")?;
        self.memory = Some(buffer.rendezvous(self.group)?);
        Ok(())
    }

    /// Each rank's memory reads what that rank wrote.
    fn check(&mut self) -> Result<bool> {
        let memory = self.memory.take().context("nothing is mapped")?;
        let shared = memory.share()?;
        let mut right = true;
        for rank in 0..self.group.size() {
            let ends = [shared.peer(rank)?.first(), shared.peer(rank)?.last()];
            right &= ends == [Some(&self.mark(rank)); 2];
        }
        shared.release()?;
        Ok(right)
    }
}
