//! Collectives and one-sided calls on parts of a handle's memory: from names and addresses to the library's types.
#![allow(unsafe_code)] // S2 (what the package's documents ask of its users: nobody else touches the elements of a call)

pub(crate) mod slices;

use pyo3::prelude::*;
use symmem::{Algorithm, Element, Open, ReduceOp, Symmetric};

use crate::argument::Slice;
use crate::dtype::{Type, with_element};
use crate::error::usage;
use crate::handle::Handle;
use crate::wait::detached;

/// The elements of a call: `count` of `dtype` from byte `offset` of the memory on.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) op: &'static str,
    pub(crate) dtype: &'static Type,
    pub(crate) offset: usize,
    pub(crate) count: usize,
}

impl Part {
    pub(crate) fn new(
        op: &'static str,
        dtype: &Bound<'_, PyAny>,
        offset: usize,
        count: usize,
    ) -> PyResult<Self> {
        Ok(Self { op, dtype: Type::named(op, dtype)?, offset, count })
    }
}

pub(crate) fn reduce_op(py: Python<'_>, call: &'static str, name: &str) -> PyResult<ReduceOp> {
    ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
        let known: Vec<_> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
        usage(py, call, format!("one of the operators {}", known.join(", ")), name)
    })
}

fn algorithm(py: Python<'_>, name: &str) -> PyResult<Algorithm> {
    match name {
        "auto" => Ok(Algorithm::Auto),
        "staged" => Ok(Algorithm::Staged),
        "one_shot" => Ok(Algorithm::OneShot),
        "two_shot" => Ok(Algorithm::TwoShot),
        other => Err(usage(py, "all_reduce", "auto, staged, one_shot or two_shot", other)),
    }
}

/// A [`Handle::collective`] whose work is written once for all types of elements: `$moved` or `$arithmetic` ones.
macro_rules! collective {
    ($handle:expr, $py:expr, $part:expr, $kind:ident, $out:expr, |$x:ident, $to:ident| $work:expr) => {{
        let part: Part = $part;
        with_element!(part.dtype.$kind($py, part.op)?, T => {
            $handle.collective::<T>($py, part, $out, |$x, $to| $work)
        })
    }};
}

impl Handle {
    /// A part of the memory, to call collectives on.
    fn part<T: Element>(&self, offset: usize, count: usize) -> symmem::Result<Symmetric<T>> {
        // SAFETY: S2 as documented for users; bounds and alignment are checked there.
        unsafe { self.raw().part(offset, count) }
    }

    /// Does `work` on a part of the memory and on the elements of `out`.
    fn collective<T: Element>(
        &self,
        py: Python<'_>,
        part: Part,
        out: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(&mut Symmetric<T>, &mut [T]) -> symmem::Result<()> + Send,
    ) -> PyResult<()> {
        self.check_open(py, part.op)?;
        let mut out = self.output(py, part, out)?;
        detached(py, || {
            let mut memory = self.part(part.offset, part.count)?;
            // SAFETY: `output` checked type and place; S2 as documented for users.
            work(&mut memory, unsafe { out.elements_mut() })
        })
    }

    /// An argument to write to, which is no part of what peers read meanwhile.
    fn output(
        &self,
        py: Python<'_>,
        part: Part,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Slice> {
        let Some(out) = out else { return Ok(Slice::EMPTY) };
        let out = Slice::output(part.op, out)?;
        out.check(py, part.op, part.dtype, self.place())?;
        let bytes = part.count.saturating_mul(part.dtype.size());
        let taken = |base: usize| out.touches(base.saturating_add(part.offset), bytes);
        if self.raw().buffer_ptrs().into_iter().any(taken) {
            let expected = "an output apart from the memory that is read";
            return Err(usage(py, part.op, expected, "one that overlaps it"));
        }
        Ok(out)
    }

    pub(crate) fn do_all_reduce(
        &self,
        py: Python<'_>,
        part: Part,
        op: &str,
        out: Option<&Bound<'_, PyAny>>,
        how: &str,
    ) -> PyResult<()> {
        let (op, how, into) = (reduce_op(py, part.op, op)?, algorithm(py, how)?, out.is_some());
        collective!(self, py, part, arithmetic, out, |x, to| {
            if into { x.all_reduce_into(op, to) } else { x.all_reduce_with(op, how) }
        })
    }

    pub(crate) fn do_reduce_scatter(
        &self,
        py: Python<'_>,
        part: Part,
        op: &str,
        rows: Option<usize>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let op = reduce_op(py, part.op, op)?;
        collective!(self, py, part, arithmetic, Some(out), |x, to| match rows {
            None => x.reduce_scatter(op, to),
            Some(rows) => {
                let columns = part.count / rows.max(1);
                x.reduce_scatter_last_dim(op, rows, columns, to)
            }
        })
    }

    pub(crate) fn do_reduce(
        &self,
        py: Python<'_>,
        part: Part,
        op: &str,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let op = reduce_op(py, part.op, op)?;
        collective!(self, py, part, arithmetic, out, |x, to| x.reduce(op, root, to))
    }

    pub(crate) fn do_all_gather(
        &self,
        py: Python<'_>,
        part: Part,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, Some(out), |x, to| x.all_gather(to))
    }

    pub(crate) fn do_all_to_all(
        &self,
        py: Python<'_>,
        part: Part,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, Some(out), |x, to| x.all_to_all(to))
    }

    pub(crate) fn do_broadcast(&self, py: Python<'_>, part: Part, root: usize) -> PyResult<()> {
        collective!(self, py, part, moved, None, |x, _to| x.broadcast(root))
    }

    pub(crate) fn do_gather(
        &self,
        py: Python<'_>,
        part: Part,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, out, |x, to| x.gather(root, to))
    }

    pub(crate) fn do_scatter(
        &self,
        py: Python<'_>,
        part: Part,
        root: usize,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, Some(out), |x, to| x.scatter(root, to))
    }

    /// All-to-all of rows. `splits` are numbers in symmetric memory; `received` gets those of what came.
    pub(crate) fn do_all_to_all_v(
        &self,
        py: Python<'_>,
        part: Part,
        rows: Rows,
        splits: (&Handle, usize, usize),
        (out, received): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
    ) -> PyResult<()> {
        let mut received = Slice::output(part.op, received)?;
        received.check(py, part.op, Type::NUMBERS, self.place())?;
        // SAFETY: checked above; S2 as documented for users.
        let got = unsafe { received.elements_mut::<i64>() };
        collective!(self, py, part, moved, Some(out), |x, to| {
            let mut splits = splits.0.part(splits.1, splits.2)?;
            match rows {
                Rows::ByRank(len) => x.all_to_all_v(len, &mut splits, to, got),
                Rows::ByExpert(len, align) => x.all_to_all_v_2d(len, &mut splits, align, to, got),
                Rows::FromExperts(len) => x.all_to_all_v_2d_offset(len, &mut splits, to, got),
            }
        })
    }

    /// A part of the memory in which everyone may put and get.
    fn open<T: Element>(&self, offset: usize, count: usize) -> symmem::Result<Open<T>> {
        // SAFETY: S2 as documented for users.
        self.part(offset, count).map(|part| unsafe { part.assume_open() })
    }

    /// Copies `data` to rank `rank`'s memory.
    pub(crate) fn do_put(
        &self,
        py: Python<'_>,
        op: &'static str,
        (rank, offset): (usize, usize),
        data: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.check_open(py, op)?;
        let data = Slice::input(op, data)?;
        let dtype = data.dtype().unwrap_or(Type::BYTES);
        data.check(py, op, dtype, self.place())?;
        with_element!(dtype.moved(py, op)?, T => self.put_elements::<T>(py, rank, offset, &data))
    }

    fn put_elements<T: Element>(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        data: &Slice,
    ) -> PyResult<()> {
        // SAFETY: `do_put` checked type and place; S2 as documented for users.
        let data = unsafe { data.elements::<T>() };
        detached(py, || self.open(offset, data.len())?.put(rank, 0, data))
    }

    /// Copies from rank `rank`'s memory to `out`.
    pub(crate) fn do_get(
        &self,
        py: Python<'_>,
        op: &'static str,
        (rank, offset): (usize, usize),
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.check_open(py, op)?;
        let mut out = Slice::output(op, out)?;
        let dtype = out.dtype().unwrap_or(Type::BYTES);
        out.check(py, op, dtype, self.place())?;
        with_element!(dtype.moved(py, op)?, T => self.get_elements::<T>(py, rank, offset, &mut out))
    }

    fn get_elements<T: Element>(
        &self,
        py: Python<'_>,
        rank: usize,
        offset: usize,
        out: &mut Slice,
    ) -> PyResult<()> {
        // SAFETY: `do_get` checked type and place; S2 as documented for users.
        let out = unsafe { out.elements_mut::<T>() };
        detached(py, || self.open(offset, out.len())?.get(rank, 0, out))
    }

    /// Fills words of rank `rank`'s memory, or writes one so that all written before is seen first.
    pub(crate) fn do_words(&self, py: Python<'_>, op: &'static str, words: Words) -> PyResult<()> {
        self.check_open(py, op)?;
        detached(py, || {
            let open = self.open::<u32>(0, self.raw().buffer_size() / 4)?;
            match words {
                Words::Fill { rank, at, value, count } => open.memset32(rank, at, value, count),
                Words::Write { rank, at, value } => open.write_value32(rank, at, value),
            }
        })
    }
}

/// How the rows of an all-to-all are divided; each with the elements of a row.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    ByRank(usize),
    /// Each expert's rows begin at a multiple of the second.
    ByExpert(usize, usize),
    /// The way back.
    FromExperts(usize),
}

/// Words of a rank's memory to set; checked by the library, with PyTorch's words in the messages.
#[derive(Clone, Copy)]
pub(crate) enum Words {
    Fill { rank: usize, at: i64, value: i64, count: i64 },
    Write { rank: usize, at: i64, value: i64 },
}
