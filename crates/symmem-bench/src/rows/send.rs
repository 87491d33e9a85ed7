//! A message, and one back; and the same bytes by a put with a signal, which the receiver copies out of the memory.

use anyhow::Result;
use symmem::{Group, Open};

use super::super::measure::Case;
use super::{How, Measure, Measures, Row};

pub(super) const ROW: Row = Row {
    name: "send",
    about: "a message from rank 0 to rank 1, and one back; the same by put_signal and get",
    ranks: 2,
    how: How::InRanks,
    on_slices: true,
    on_devices: false,
    measures: Measures::Fixed(&[
        message(8),
        message(1 << 10),
        message(64 << 10),
        message(1 << 20),
        put(8),
        put(1 << 10),
        put(64 << 10),
        put(1 << 20),
    ]),
};

const fn message(bytes: usize) -> Measure {
    let make: super::Make = |measure, group, _| Ok(Box::new(Pair::new(measure, group, None)));
    Measure { collective: "send", bytes, make: Some(make), ..Measure::TINY }
}

const fn put(bytes: usize) -> Measure {
    let make: super::Make = |measure, group, _| {
        let memory = group.alloc(2 * measure.bytes / 8)?.rendezvous(group)?.open()?;
        Ok(Box::new(Pair::new(measure, group, Some(memory))))
    };
    Measure { collective: "put_and_get", bytes, make: Some(make), ..Measure::TINY }
}

struct Pair<'a> {
    group: &'a Group,
    /// Through which the data goes, if not as a message.
    memory: Option<Open<u64>>,
    data: Vec<u64>,
    got: Vec<u64>,
    count: u64,
    /// Whether all that came was what was sent.
    right: bool,
}

impl<'a> Pair<'a> {
    fn new(measure: &Measure, group: &'a Group, memory: Option<Open<u64>>) -> Self {
        let data = vec![0; measure.bytes / 8];
        Self { group, memory, got: data.clone(), data, count: 0, right: true }
    }

    fn send(&mut self, to: usize, value: u64) -> Result<()> {
        for end in [0, self.data.len() - 1] {
            self.data[end] = value;
        }
        match &self.memory {
            None => self.group.send(&self.data, to, 0)?,
            Some(memory) => memory.put_signal(to, 0, &self.data, 0, self.group.deadline())?,
        }
        Ok(())
    }

    fn receive(&mut self, from: usize, value: u64) -> Result<()> {
        match &self.memory {
            None => self.group.recv(&mut self.got, from, 0)?,
            Some(memory) => {
                memory.wait_signal(from, 0, self.group.deadline())?;
                memory.get(self.group.rank(), 0, &mut self.got)?;
            }
        }
        self.right &= self.got.first() == Some(&value) && self.got.last() == Some(&value);
        Ok(())
    }
}

impl Case for Pair<'_> {
    fn call(&mut self) -> Result<()> {
        self.calls(1)
    }

    fn calls(&mut self, count: usize) -> Result<()> {
        let (rank, before) = (self.group.rank(), self.count);
        for value in (1..=count as u64).map(|i| before + i) {
            // The answer differs from what it answers.
            match rank {
                0 => {
                    self.send(1, value)?;
                    self.receive(1, !value)?;
                }
                1 => {
                    self.receive(0, value)?;
                    self.send(0, !value)?;
                }
                _ => {}
            }
        }
        self.count = before + count as u64;
        Ok(())
    }

    fn check(&mut self) -> Result<bool> {
        Ok(self.right)
    }
}
