//! Scan: every rank gets the reduction of the ranks up to itself.
#![allow(unsafe_code)] // S2, S3

use super::super::host::copy::Stores;
use super::super::host::reduce::Reduce;
use super::super::loop_for;
use super::cutting::{Sources, each_piece};
use super::{Slice, begin};
use crate::dtype::{Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Group, Op};

const NAME: &str = "scan";

impl Group {
    /// Element i of `data` becomes the reduction of element i of ranks 0 to this one, in rank order. All operators except
    /// `Average`. Collective; after an error `data` may be reduced in part.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut data = [10, world.rank() as i32];
    /// world.scan(&mut data, symmem::ReduceOp::Sum)?;
    /// assert_eq!(data, [[10, 0], [20, 1], [30, 3]][world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn scan<T: Number>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.scan_up_to(data, op, self.rank() + 1)
    }

    /// As [`Group::scan`], but only of the ranks before this one. `data` of rank 0 stays as it is.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut offset = [100 + world.rank() as u64];
    /// world.exclusive_scan(&mut offset, symmem::ReduceOp::Sum)?;
    /// assert_eq!(offset, [[100], [100], [201]][world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn exclusive_scan<T: Number>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.scan_up_to(data, op, self.rank())
    }

    /// Of the first `ranks`.
    fn scan_up_to<T: Number>(&self, data: &mut [T], op: ReduceOp, ranks: usize) -> Result<()> {
        if op == ReduceOp::Average {
            let expected = "an operator other than the average".to_owned();
            return Err(self.usage(NAME, expected, op.to_string()));
        }
        let reduce = loop_for::<T>(self, NAME, op)?;
        let data = Slice::new(data.as_mut_ptr().cast(), data.len(), T::DTYPE);
        scan(self, data, (op, reduce), ranks)
    }
}

fn scan(group: &Group, data: Slice, (op, reduce): (ReduceOp, Reduce), ranks: usize) -> Result<()> {
    let is_exclusive = usize::from(ranks == group.rank());
    let more = [is_exclusive, 0, 0];
    let call = Call { operator: Some(op), more, ..data.call(const { Op::of(NAME) }) };
    each_piece(group, &mut begin(group, &call)?, data, Sources::All(0), |piece, from| {
        if let Some(from) = from.get(..ranks).filter(|from| !from.is_empty()) {
            // SAFETY: what every rank has staged, and ours, which nobody else touches.
            unsafe { reduce(from, &[data.at(piece.start)], piece.len(), Stores::Cached) };
        }
    })
}
