//! All-to-all of rows, of which only their senders know the numbers.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: nobody else touches the elements of a call)

use pyo3::prelude::*;
use symmem::cuda::{self, Stream, ViewMut};
use symmem::{Element, Error, Symmetric};

use super::device_part;
use crate::argument::Slice;
use crate::dtype::Type;
use crate::error::Op;
use crate::handle::Handle;

const OP: &str = "all_to_all_v";

/// How Python gives them: elements of a row; handle, offset and count of the splits; the output for what was received; and the
/// alignment of experts' rows, or 0 for the way back from them.
pub(crate) type RowsGiven<'py> =
    (usize, (Bound<'py, Handle>, usize, usize), Bound<'py, PyAny>, Option<usize>);

/// The arguments that only this collective has.
pub(crate) struct Rows {
    len: usize,
    /// `None`: rows by rank. 0: back from experts. Else to experts, whose rows begin at a multiple of it.
    align: Option<usize>,
    /// Numbers of rows in symmetric memory: handle, byte offset and count.
    splits: (Handle, usize, usize),
    received: Slice,
}

impl Rows {
    /// The arguments for rows in the memory of `handle`, checked.
    pub(crate) fn new(py: Python<'_>, handle: &Handle, given: RowsGiven<'_>) -> PyResult<Self> {
        let (len, (splits, offset, count), received, align) = given;
        let at: Op = handle.op(OP);
        let received = Slice::output(at, &received)?;
        received.check(py, at, Type::of(symmem::DType::I64), handle.place())?;
        Ok(Self { len, align, splits: (splits.get().share(), offset, count), received })
    }

    fn of(given: &mut Option<Self>) -> symmem::Result<&mut Self> {
        given.as_mut().ok_or_else(|| Error::Usage {
            op: OP,
            rank: None,
            expected: "rows".into(),
            got: "none".into(),
        })
    }
}

pub(super) trait HostRows<T> {
    fn all_to_all_rows(&mut self, rows: &mut Option<Rows>, out: &mut [T]) -> symmem::Result<()>;
}

impl<T: Element> HostRows<T> for Symmetric<T> {
    fn all_to_all_rows(&mut self, rows: &mut Option<Rows>, out: &mut [T]) -> symmem::Result<()> {
        let Rows { len, align, splits: (handle, offset, count), received } = Rows::of(rows)?;
        let splits = &mut handle.part(*offset, *count)?;
        // SAFETY: `Rows::new` checked type and place; S2 as documented for users.
        let got = unsafe { received.elements_mut() };
        match *align {
            None => self.all_to_all_v(*len, splits, out, got),
            Some(0) => self.all_to_all_v_2d_offset(*len, splits, out, got),
            Some(align) => self.all_to_all_v_2d(*len, splits, align, out, got),
        }
    }
}

pub(super) trait DeviceRows<T> {
    fn all_to_all_rows(
        &mut self,
        rows: &mut Option<Rows>,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> symmem::Result<()>;
}

impl<T: Element> DeviceRows<T> for cuda::Symmetric<T> {
    fn all_to_all_rows(
        &mut self,
        rows: &mut Option<Rows>,
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> symmem::Result<()> {
        let Rows { len, align, splits: (handle, offset, count), received } = Rows::of(rows)?;
        let device = handle.cuda().ok_or_else(|| Error::Usage {
            op: OP,
            rank: Some(handle.raw().rank()),
            expected: "splits on the device of the rows".into(),
            got: "splits on the host".into(),
        })?;
        let splits = &mut device_part(device, *offset, *count)?;
        // SAFETY: `Rows::new` checked type and place; S2 as documented for users.
        let got = unsafe { received.view_mut() };
        match *align {
            None => self.all_to_all_v(*len, splits, out, got, stream),
            Some(0) => self.all_to_all_v_2d_offset(*len, splits, out, got, stream),
            Some(align) => self.all_to_all_v_2d(*len, splits, align, out, got, stream),
        }
    }
}
