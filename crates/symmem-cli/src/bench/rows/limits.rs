//! The floors of the collectives: the bare data movement in the same kind of memory, between two exchanges of flags.
//!
//! An all-reduce is the two-shot (each rank adds up its share and stores it with all), with up to 64 bytes one exchange
//! and nothing else, since so much fits beside a flag. What is added of 16-bit floats are their bits: no converting.

use std::ops::Range;

use anyhow::Result;
use symmem::Group;

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::Parts;
use super::super::value::{Value, with_dtype};
use super::Measure;
use super::collectives::{Data, Kind};
use super::floor::Flags;

pub(super) fn make<'a>(
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
        let tiny = measure.bytes <= 64 && data.kind == Kind::AllReduce;
        Ok(Box::new(Bare { data, flags: Flags::new(board), tiny }))
    }
    with_dtype!(measure.dtype, typed(measure, group, board))
}

struct Bare<'a, T: Value> {
    data: Data<T>,
    flags: Flags<'a>,
    /// Whether the data goes with the flag.
    tiny: bool,
}

/// The elements of rank `rank`, cut at cache lines.
fn share<T>(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = len.div_ceil(ranks).next_multiple_of((64 / size_of::<T>()).max(1));
    (rank * each).min(len)..((rank + 1) * each).min(len)
}

impl<T: Value> Bare<'_, T> {
    fn move_data(&mut self) -> Result<()> {
        let (rank, ranks, block) = (self.data.rank(), self.data.ranks(), self.data.block);
        let Data { kind, memory, out, .. } = &mut self.data;
        let parts = Parts::new(memory);
        // Our own first: it is in our cache.
        let mut order = (0..ranks).map(|step| (rank + step) % ranks);
        match kind {
            Kind::AllReduce => parts.add(share::<T>(block, rank, ranks), None),
            Kind::ReduceScatter => parts.add(rank * block..(rank + 1) * block, Some(out)),
            Kind::Broadcast if rank == 0 => Ok(()),
            Kind::Broadcast => parts.copy_all(0),
            Kind::AllGather => {
                order.try_for_each(|r| parts.copy(r, 0..block, &mut out[r * block..][..block]))
            }
            Kind::AllToAll => order.try_for_each(|r| {
                let from = rank * block..(rank + 1) * block;
                parts.copy(r, from, &mut out[r * block..][..block])
            }),
        }
    }
}

impl<T: Value> Case for Bare<'_, T> {
    fn prepare(&mut self) -> Result<()> {
        self.flags.reset();
        self.data.rewrite();
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        self.flags.exchange();
        if !self.tiny {
            self.move_data()?;
            self.flags.exchange();
        }
        Ok(())
    }

    fn read(&mut self) {
        self.data.read();
    }

    fn check(&mut self) -> Result<bool> {
        let adds = matches!(self.data.kind, Kind::AllReduce | Kind::ReduceScatter);
        Ok(self.tiny || (adds && !T::EXACT) || self.data.right())
    }
}
