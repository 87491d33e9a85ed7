//! The collectives, each over a list of sizes, and beside each its floor.
//!
//! `bytes` is one rank's block: the whole buffer of an all-reduce and a broadcast, what a rank contributes to an
//! all-gather, what a reduce-scatter leaves it with, what an all-to-all sends to each rank.

use anyhow::Result;
use symmem::{Group, ReduceOp, Symmetric};

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::read_lines;
use super::super::settings::{Settings, algorithm};
use super::super::value::{Value, with_dtype};
use super::{How, Make, Measure, Measures, Row, limits};

pub(super) const ALL_REDUCE: Row = row("all_reduce", "in place, as all those below over sizes");
pub(super) const REDUCE_SCATTER: Row = row("reduce_scatter", "into private memory");
pub(super) const ALL_GATHER: Row = row("all_gather", "into private memory");
pub(super) const BROADCAST: Row = row("broadcast", "from rank 0, in place");
pub(super) const ALL_TO_ALL: Row = row("all_to_all", "into private memory");

const fn row(name: &'static str, about: &'static str) -> Row {
    Row { name, about, ranks: 2, how: How::InRanks, measures: Measures::BySize(measures) }
}

/// From this size on the reading of the result is timed too.
const READ_FROM: usize = 16 << 10;
/// To this size twenty calls make a sample.
const TINY: usize = 64;
/// Samples in one round, to which size.
const SAMPLES: [(usize, usize); 4] = [(TINY, 300), (16 << 10, 500), (1 << 20, 250), (16 << 20, 50)];

/// For each size the floor and then the library, so that both run under the same conditions.
fn measures(name: &'static str, settings: &Settings) -> Vec<Measure> {
    let one = |bytes: usize, system: &'static str, make: Make| Measure {
        system,
        collective: name,
        bytes,
        dtype: settings.dtype(),
        algorithm: if system == "symmem" && name == "all_reduce" {
            settings.algorithm()
        } else {
            "-"
        },
        batch: if bytes <= TINY { 20 } else { 1 },
        read: bytes >= READ_FROM,
        samples: SAMPLES.iter().find(|(most, _)| bytes <= *most).map_or(20, |found| found.1),
        least: 7,
        time: settings.time(),
        // Large buffers take some dozens of calls to settle in a shared cache.
        warm: if bytes > 1 << 20 { settings.time() } else { settings.time() / 2 },
        floor: None,
        target: None,
        make: Some(make),
    };
    let both = |bytes| [one(bytes, "limits", limits::make), one(bytes, "symmem", make)];
    settings.sizes().into_iter().flat_map(both).collect()
}

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
}

impl Kind {
    pub(super) fn of(measure: &Measure) -> Self {
        match measure.collective {
            "all_reduce" => Self::AllReduce,
            "reduce_scatter" => Self::ReduceScatter,
            "all_gather" => Self::AllGather,
            "broadcast" => Self::Broadcast,
            _ => Self::AllToAll,
        }
    }

    /// Blocks of symmetric memory and of private output, for so many ranks.
    fn blocks(self, ranks: usize) -> (usize, usize) {
        match self {
            Self::AllReduce | Self::Broadcast => (1, 0),
            Self::ReduceScatter => (ranks, 1),
            Self::AllGather => (1, ranks),
            Self::AllToAll => (ranks, ranks),
        }
    }
}

/// One rank's input, output and what is expected of it. Each sample has numbers of its own.
pub(super) struct Data<T: Value> {
    pub(super) kind: Kind,
    pub(super) memory: Symmetric<T>,
    pub(super) out: Vec<T>,
    /// Elements of a block.
    pub(super) block: usize,
    count: usize,
}

impl<T: Value> Data<T> {
    pub(super) fn new(measure: &Measure, group: &Group) -> Result<Self> {
        let kind = Kind::of(measure);
        let block = measure.bytes / size_of::<T>();
        let (inputs, outputs) = kind.blocks(group.size());
        let mut buffer = group.alloc(inputs * block)?;
        buffer.local_mut().fill(T::of(0));
        let out = vec![T::of(0); outputs * block];
        Ok(Self { kind, memory: buffer.rendezvous(group)?, out, block, count: 0 })
    }

    pub(super) fn rank(&self) -> usize {
        self.memory.group().rank()
    }

    pub(super) fn ranks(&self) -> usize {
        self.memory.group().size()
    }

    /// What rank `rank` writes into block `block`: small enough that the sum over all ranks is exact in every type.
    fn number(&self, rank: usize, block: usize) -> u8 {
        let spread = if self.ranks() > 32 { 2 } else { 4 };
        ((rank + 2 * block + self.count) % spread + usize::from(self.ranks() <= 32)) as u8
    }

    fn sum(&self, block: usize) -> u8 {
        (0..self.ranks()).fold(0, |sum: u8, rank| sum.wrapping_add(self.number(rank, block)))
    }

    /// Rewrites the input with the next numbers; of a broadcast only the root has one.
    pub(super) fn rewrite(&mut self) {
        self.count += 1;
        let rank = self.rank();
        if self.kind == Kind::Broadcast && rank != 0 {
            return;
        }
        for block in 0..self.memory.len() / self.block {
            let value = T::of(self.number(rank, block));
            self.memory.local_mut()[block * self.block..][..self.block].fill(value);
        }
    }

    /// The result, for whoever reads it.
    pub(super) fn read(&self) {
        read_lines(if self.out.is_empty() { self.memory.local() } else { &self.out });
    }

    /// Whether every element of the result is the one expected.
    pub(super) fn right(&self) -> bool {
        let rank = self.rank();
        let all = |slice: &[T], number: u8| {
            let value = T::of(number);
            // No early end, so that it is done in vectors.
            slice.iter().fold(true, |right, element| right & (*element == value))
        };
        let blocks = |number: &dyn Fn(usize) -> u8| {
            let mut blocks = self.out.chunks_exact(self.block).enumerate();
            blocks.all(|(from, block)| all(block, number(from)))
        };
        match self.kind {
            Kind::AllReduce => all(self.memory.local(), self.sum(0)),
            Kind::Broadcast => all(self.memory.local(), self.number(0, 0)),
            Kind::ReduceScatter => all(&self.out, self.sum(rank)),
            Kind::AllGather => blocks(&|from| self.number(from, 0)),
            Kind::AllToAll => blocks(&|from| self.number(from, rank)),
        }
    }
}

fn make<'a>(
    measure: &Measure,
    group: &'a Group,
    board: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    fn typed<'a, T: Value>(
        measure: &Measure,
        group: &'a Group,
        board: &'a Board<'a>,
    ) -> Result<Box<dyn Case + 'a>> {
        let data = Data::<T>::new(measure, group)?;
        let algorithm = algorithm(measure.algorithm);
        Ok(Box::new(Collective { data, board, algorithm, repeated: measure.batch > 1 }))
    }
    with_dtype!(measure.dtype, typed(measure, group, board))
}

struct Collective<'a, T: Value> {
    data: Data<T>,
    board: &'a Board<'a>,
    algorithm: symmem::Algorithm,
    /// Whether a sample is several calls, so that an all-reduce in place has reduced its own results.
    repeated: bool,
}

impl<T: Value> Case for Collective<'_, T> {
    fn prepare(&mut self) -> Result<()> {
        self.data.rewrite();
        if self.repeated && self.data.kind == Kind::AllReduce {
            self.data.memory.local_mut().fill(T::of(0)); // a sum of sums would leave the range
        }
        Ok(())
    }

    #[inline]
    fn call(&mut self) -> Result<()> {
        let Data { kind, memory, out, .. } = &mut self.data;
        match kind {
            Kind::AllReduce => memory.all_reduce_with(ReduceOp::Sum, self.algorithm)?,
            Kind::ReduceScatter => memory.reduce_scatter(ReduceOp::Sum, out)?,
            Kind::AllGather => memory.all_gather(out)?,
            Kind::Broadcast => memory.broadcast(0)?,
            Kind::AllToAll => memory.all_to_all(out)?,
        }
        Ok(())
    }

    fn read(&mut self) {
        self.data.read();
    }

    fn check(&mut self) -> Result<bool> {
        if self.repeated && self.data.kind == Kind::AllReduce {
            self.data.rewrite();
            self.board.meet();
            self.call()?;
        }
        Ok(self.data.right())
    }
}
