//! What a collective works on: one rank's input and output, and what is expected of them.

use anyhow::{Context, Result};
use symmem::{Group, Symmetric};

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::read_lines;
use super::super::value::{Value, with_dtype};
use super::Measure;

/// Who does a collective: makes what one rank times.
pub(super) trait Way {
    fn case<'a, T: Value>(
        measure: &Measure,
        data: Data<'a, T>,
        board: &'a Board<'a>,
    ) -> Box<dyn Case + 'a>;
}

/// The case of a measure of any type.
pub(super) fn make<'a, W: Way>(
    measure: &Measure,
    group: &'a Group,
    board: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    fn typed<'a, W: Way, T: Value>(
        measure: &Measure,
        group: &'a Group,
        board: &'a Board<'a>,
    ) -> Result<Box<dyn Case + 'a>> {
        Ok(W::case(measure, Data::<T>::new(measure, group)?, board))
    }
    with_dtype!(measure.dtype, T => typed::<W, T>(measure, group, board))
}

/// Which of the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Reduce,
    Gather,
    Scatter,
}

/// The root of those that have one.
pub(super) const ROOT: usize = 0;

impl Kind {
    pub(super) fn of(measure: &Measure) -> Self {
        match measure.collective {
            "all_reduce" => Self::AllReduce,
            "reduce_scatter" => Self::ReduceScatter,
            "all_gather" => Self::AllGather,
            "broadcast" => Self::Broadcast,
            "reduce" => Self::Reduce,
            "gather" => Self::Gather,
            "scatter" => Self::Scatter,
            _ => Self::AllToAll,
        }
    }

    /// Blocks of input and of private output on this rank.
    pub(super) fn blocks(self, group: &Group) -> (usize, usize) {
        let ranks = group.size();
        let on_root = |blocks| if group.rank() == ROOT { blocks } else { 0 };
        match self {
            Self::AllReduce | Self::Broadcast => (1, 0),
            Self::ReduceScatter | Self::Scatter => (ranks, 1),
            Self::AllGather => (1, ranks),
            Self::AllToAll => (ranks, ranks),
            Self::Reduce => (1, on_root(1)),
            Self::Gather => (1, on_root(ranks)),
        }
    }

    fn is_in_place(self) -> bool {
        matches!(self, Self::AllReduce | Self::Broadcast)
    }

    /// Whether it adds up.
    pub(super) fn adds(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }
}

/// Where the input lies.
pub(super) enum Input<T: Value> {
    Symmetric(Symmetric<T>),
    Slice(Vec<T>),
}

impl<T: Value> Input<T> {
    fn local(&self) -> &[T] {
        match self {
            Self::Symmetric(memory) => memory.local(),
            Self::Slice(slice) => slice,
        }
    }

    pub(super) fn local_mut(&mut self) -> &mut [T] {
        match self {
            Self::Symmetric(memory) => memory.local_mut(),
            Self::Slice(slice) => slice,
        }
    }

    /// For systems that know no other.
    pub(super) fn symmetric(&self) -> Result<&Symmetric<T>> {
        match self {
            Self::Symmetric(memory) => Ok(memory),
            Self::Slice(_) => None.context("this is measured in symmetric memory only"),
        }
    }
}

/// One rank's input, output and what is expected of it. Each sample has numbers of its own.
pub(super) struct Data<'a, T: Value> {
    pub(super) kind: Kind,
    pub(super) group: &'a Group,
    pub(super) input: Input<T>,
    pub(super) out: Vec<T>,
    /// Elements of a block.
    pub(super) block: usize,
    numbers: Numbers,
}

/// What the ranks write, and what comes of it; the same for all types.
struct Numbers {
    kind: Kind,
    rank: usize,
    ranks: usize,
    /// How often they were written.
    count: usize,
}

impl Numbers {
    /// What rank `rank` writes into block `block`: small enough that the sum over all ranks is exact in every type.
    fn number(&self, rank: usize, block: usize) -> u8 {
        let spread = if self.ranks > 32 { 2 } else { 4 };
        ((rank + 2 * block + self.count) % spread + usize::from(self.ranks <= 32)) as u8
    }

    fn sum(&self, block: usize) -> u8 {
        (0..self.ranks).fold(0, |sum: u8, rank| sum.wrapping_add(self.number(rank, block)))
    }

    /// What block `from` of this rank's result is.
    fn expected(&self, from: usize) -> u8 {
        match self.kind {
            Kind::AllReduce | Kind::Reduce => self.sum(0),
            Kind::ReduceScatter => self.sum(self.rank),
            Kind::Broadcast => self.number(ROOT, 0),
            Kind::Scatter => self.number(ROOT, self.rank),
            Kind::AllGather | Kind::Gather => self.number(from, 0),
            Kind::AllToAll => self.number(from, self.rank),
        }
    }
}

impl<'a, T: Value> Data<'a, T> {
    fn new(measure: &Measure, group: &'a Group) -> Result<Self> {
        let kind = Kind::of(measure);
        let block = measure.bytes / size_of::<T>();
        let (inputs, outputs) = kind.blocks(group);
        let input = if measure.memory == "slices" {
            Input::Slice(vec![T::of(0); inputs * block])
        } else {
            let mut buffer = group.alloc(inputs * block)?;
            buffer.local_mut().fill(T::of(0));
            Input::Symmetric(buffer.rendezvous(group)?)
        };
        let out = vec![T::of(0); outputs * block];
        let numbers = Numbers { kind, rank: group.rank(), ranks: group.size(), count: 0 };
        Ok(Self { kind, group, input, out, block, numbers })
    }

    /// Rewrites the input with the next numbers; of a broadcast and a scatter only the root has one.
    pub(super) fn rewrite(&mut self) {
        self.numbers.count += 1;
        let rank = self.group.rank();
        if matches!(self.kind, Kind::Broadcast | Kind::Scatter) && rank != ROOT {
            return;
        }
        for block in 0..self.input.local().len() / self.block {
            let value = T::of(self.numbers.number(rank, block));
            self.input.local_mut()[block * self.block..][..self.block].fill(value);
        }
    }

    /// Where the result is; on some ranks there is none.
    fn result(&self) -> &[T] {
        if self.kind.is_in_place() { self.input.local() } else { &self.out }
    }

    /// The result, to be read.
    pub(super) fn read(&self) {
        read_lines(self.result());
    }

    /// Whether every element of the result is the one expected.
    pub(super) fn right(&self) -> bool {
        let mut blocks = self.result().chunks_exact(self.block).enumerate();
        blocks.all(|(from, block)| {
            let value = T::of(self.numbers.expected(from));
            // No early end, so that it is done in vectors.
            block.iter().fold(true, |right, element| right & (*element == value))
        })
    }
}
