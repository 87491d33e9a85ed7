//! The floors of the collectives: the bare data movement in the same kind of memory, between two exchanges of flags.
//!
//! An all-reduce is the two-shot (each rank adds up its share and stores it with all), with up to 64 bytes one exchange
//! and nothing else, since so much fits next to a flag. What is added of 16-bit floats are their bits: no converting.

use std::ops::Range;

use anyhow::Result;

use super::super::board::Board;
use super::super::measure::Case;
use super::super::raw::Parts;
use super::super::value::Value;
use super::Measure;
use super::data::{Data, Kind, ROOT, Way};
use super::floor::Flags;

/// The bare data movement.
pub(super) struct Floor;

impl Way for Floor {
    fn case<'a, T: Value>(
        measure: &Measure,
        data: Data<'a, T>,
        board: &'a Board<'a>,
    ) -> Box<dyn Case + 'a> {
        let tiny = measure.bytes <= 64 && data.kind == Kind::AllReduce;
        Box::new(Bare { data, flags: Flags::new(board), tiny })
    }
}

struct Bare<'a, T: Value> {
    data: Data<'a, T>,
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
        let Data { kind, group, input, out, block, .. } = &mut self.data;
        let (rank, ranks, block) = (group.rank(), group.size(), *block);
        let parts = Parts::new(input.symmetric()?);
        // Our own first: it is in our cache.
        let mut order = (0..ranks).map(|step| (rank + step) % ranks);
        let own = rank * block..(rank + 1) * block;
        match kind {
            Kind::AllReduce => parts.add(share::<T>(block, rank, ranks), None),
            Kind::ReduceScatter => parts.add(own, Some(out)),
            Kind::Broadcast if rank == ROOT => Ok(()),
            Kind::Reduce | Kind::Gather if rank != ROOT => Ok(()),
            Kind::Broadcast => parts.copy_all(ROOT),
            Kind::Reduce => parts.add(0..block, Some(out)),
            Kind::AllGather | Kind::Gather => {
                order.try_for_each(|r| parts.copy(r, 0..block, &mut out[r * block..][..block]))
            }
            Kind::AllToAll => {
                order.try_for_each(|r| parts.copy(r, own.clone(), &mut out[r * block..][..block]))
            }
            Kind::Scatter => parts.copy(ROOT, own, out),
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
        Ok(self.tiny || (self.data.kind.adds() && !T::EXACT) || self.data.right())
    }
}
