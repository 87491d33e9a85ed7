//! Puts, gets and words in any rank's memory, by one rank alone.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: signals and barriers order these calls)

use pyo3::prelude::*;
use symmem::{Element, Open};

use super::device_part;
use crate::argument::Slice;
use crate::dtype::Type;
use crate::handle::Handle;
use crate::wait::detached;

/// Where a call goes: the rank, the byte of its memory, and the stream of a device.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) rank: usize,
    pub(crate) offset: usize,
    pub(crate) stream: usize,
}

/// Which way a copy goes.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Peer,
    Here,
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

    /// Copies `data` to a rank's memory, or from there to `data`.
    pub(crate) fn copy(
        &self,
        py: Python<'_>,
        at: Target,
        data: &Bound<'_, PyAny>,
        to: Direction,
    ) -> PyResult<()> {
        let (op, mut data) = match to {
            Direction::Peer => ("put", Slice::input(self.op("put"), data)?),
            Direction::Here => ("get", Slice::output(self.op("get"), data)?),
        };
        self.check_open(py, op)?;
        let dtype = data.dtype().unwrap_or(Type::of(symmem::DType::U8));
        data.check(py, self.op(op), dtype, self.place())?;
        detached(py, || {
            let done =
                symmem::with_element!(dtype.moved, T => self.copy_of::<T>(at, &mut data, to));
            done.unwrap_or(Ok(()))
        })
    }

    fn copy_of<T: Element>(
        &self,
        at: Target,
        data: &mut Slice,
        to: Direction,
    ) -> symmem::Result<()> {
        let count = data.count::<T>();
        let Some(device) = self.cuda() else {
            let memory = self.open::<T>(at.offset, count)?;
            return match to {
                // SAFETY: `copy` checked type and place; S2 as documented for users.
                Direction::Peer => memory.put(at.rank, 0, unsafe { data.elements() }),
                // SAFETY: as above.
                Direction::Here => memory.get(at.rank, 0, unsafe { data.elements_mut() }),
            };
        };
        let (part, stream) =
            (device_part(device, at.offset, count)?, self.stream(device, at.stream));
        match to {
            // SAFETY: as above.
            Direction::Peer => part.put(at.rank, 0, unsafe { data.view::<T>() }, &stream),
            // SAFETY: as above.
            Direction::Here => part.get(at.rank, 0, unsafe { data.view_mut::<T>() }, &stream),
        }
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
        detached(py, || {
            let Some(device) = self.cuda() else {
                let open = self.open(0, all)?;
                return match words {
                    Words::Fill { rank, at, value, count } => open.memset32(rank, at, value, count),
                    Words::Write { rank, at, value } => open.write_value32(rank, at, value),
                };
            };
            let (part, s) = (device_part(device, 0, all)?, self.stream(device, stream));
            match words {
                Words::Fill { rank, at, value, count } => part.memset32(rank, at, value, count, &s),
                Words::Write { rank, at, value } => part.write_value32(rank, at, value, &s),
            }
        })
    }
}
