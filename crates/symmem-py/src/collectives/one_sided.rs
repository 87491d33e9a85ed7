//! Puts, gets and words in any rank's memory, by one rank alone.
#![allow(unsafe_code)] // S2 (what the package's documents ask of its users: signals and barriers order these calls)

use pyo3::prelude::*;
use symmem::{Element, Open};

use super::device_part;
use crate::argument::Slice;
use crate::dtype::{Type, with_element};
use crate::handle::Handle;
use crate::wait::detached;

/// Where a call goes: the rank, the byte of its memory, and the stream of a device.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) rank: usize,
    pub(crate) offset: usize,
    pub(crate) stream: usize,
}

/// Words of a rank's memory to set; checked by the library, with PyTorch's words in the messages.
#[derive(Clone, Copy)]
pub(crate) enum Words {
    Fill { rank: usize, at: usize, value: u32, count: usize },
    Write { rank: usize, at: usize, value: u32 },
}

impl Handle {
    /// A part of the memory in which everyone may put and get.
    fn open<T: Element>(&self, offset: usize, count: usize) -> symmem::Result<Open<T>> {
        // SAFETY: S2 as documented for users; bounds and alignment are checked there.
        let part = unsafe { self.raw().part(offset, count) }?;
        // SAFETY: as above.
        Ok(unsafe { part.assume_open() })
    }

    /// Copies `data` to a rank's memory.
    pub(crate) fn do_put(
        &self,
        py: Python<'_>,
        to: Target,
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const OP: &str = "put";
        self.check_open(py, OP)?;
        let data = Slice::input(OP, data)?;
        let dtype = data.dtype().unwrap_or(Type::of(symmem::DType::U8));
        data.check(py, OP, dtype, self.place())?;
        with_element!(dtype.moved(py, OP)?, T => self.put_elements::<T>(py, to, &data))
    }

    fn put_elements<T: Element>(&self, py: Python<'_>, to: Target, data: &Slice) -> PyResult<()> {
        detached(py, || match self.cuda() {
            None => {
                // SAFETY: `do_put` checked type and place; S2 as documented for users.
                let data = unsafe { data.elements::<T>() };
                self.open(to.offset, data.len())?.put(to.rank, 0, data)
            }
            Some(device) => {
                let part = device_part(device, to.offset, data.count::<T>())?;
                // SAFETY: as above.
                part.put(to.rank, 0, unsafe { data.view::<T>() }, &self.stream(device, to.stream))
            }
        })
    }

    /// Copies from a rank's memory to `out`.
    pub(crate) fn do_get(
        &self,
        py: Python<'_>,
        from: Target,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const OP: &str = "get";
        self.check_open(py, OP)?;
        let mut out = Slice::output(OP, out)?;
        let dtype = out.dtype().unwrap_or(Type::of(symmem::DType::U8));
        out.check(py, OP, dtype, self.place())?;
        with_element!(dtype.moved(py, OP)?, T => self.get_elements::<T>(py, from, &mut out))
    }

    fn get_elements<T: Element>(
        &self,
        py: Python<'_>,
        from: Target,
        out: &mut Slice,
    ) -> PyResult<()> {
        detached(py, || match self.cuda() {
            None => {
                // SAFETY: `do_get` checked type and place; S2 as documented for users.
                let out = unsafe { out.elements_mut::<T>() };
                self.open(from.offset, out.len())?.get(from.rank, 0, out)
            }
            Some(device) => {
                let part = device_part(device, from.offset, out.count::<T>())?;
                let stream = self.stream(device, from.stream);
                // SAFETY: as above.
                part.get(from.rank, 0, unsafe { out.view_mut::<T>() }, &stream)
            }
        })
    }

    /// Fills words of a rank's memory, or writes one so that all written before is seen first.
    pub(crate) fn do_words(
        &self,
        py: Python<'_>,
        op: &'static str,
        words: Words,
        stream: usize,
    ) -> PyResult<()> {
        self.check_open(py, op)?;
        let all = self.raw().buffer_size() / size_of::<u32>();
        detached(py, || match (self.cuda(), words) {
            (None, Words::Fill { rank, at, value, count }) => {
                self.open::<u32>(0, all)?.memset32(rank, at, value, count)
            }
            (None, Words::Write { rank, at, value }) => {
                self.open::<u32>(0, all)?.write_value32(rank, at, value)
            }
            (Some(device), Words::Fill { rank, at, value, count }) => {
                let stream = self.stream(device, stream);
                device_part::<u32>(device, 0, all)?.memset32(rank, at, value, count, &stream)
            }
            (Some(device), Words::Write { rank, at, value }) => {
                let stream = self.stream(device, stream);
                device_part::<u32>(device, 0, all)?.write_value32(rank, at, value, &stream)
            }
        })
    }
}
