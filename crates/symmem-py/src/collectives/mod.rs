//! Collectives and one-sided calls on parts of a handle's memory: from names and addresses to the library's types.
#![allow(unsafe_code)] // S2 (what the package's documents ask of its users: nobody else touches the elements of a call)

pub(crate) mod one_sided;
pub(crate) mod slices;

use pyo3::prelude::*;
use symmem::cuda::Algorithm;
use symmem::cuda::{self, Stream, ViewMut};
use symmem::{Element, Number, ReduceOp, Symmetric};

use crate::argument::Slice;
use crate::dtype::{Type, with_element};
use crate::error::usage;
use crate::handle::Handle;
use crate::wait::detached;

/// The elements of a call, `count` of `dtype` from byte `offset` of the memory on, and the stream that it goes into.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) op: &'static str,
    pub(crate) dtype: &'static Type,
    pub(crate) offset: usize,
    pub(crate) count: usize,
    /// Of a device; 0 is its default stream.
    pub(crate) stream: usize,
}

impl Part {
    pub(crate) fn new(
        op: &'static str,
        dtype: &Bound<'_, PyAny>,
        (offset, count): (usize, usize),
        stream: Option<usize>,
    ) -> PyResult<Self> {
        let stream = stream.unwrap_or(0);
        Ok(Self { op, dtype: Type::named(op, dtype)?, offset, count, stream })
    }
}

pub(crate) fn reduce_op(py: Python<'_>, call: &'static str, name: &str) -> PyResult<ReduceOp> {
    ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
        let known: Vec<_> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
        usage(py, call, format!("one of the operators {}", known.join(", ")), name)
    })
}

/// The ways to all-reduce; the last two on devices.
const ALGORITHMS: [(&str, Algorithm); 6] = [
    ("auto", Algorithm::Auto),
    ("staged", Algorithm::Staged),
    ("one_shot", Algorithm::OneShot),
    ("two_shot", Algorithm::TwoShot),
    ("multimem", Algorithm::Multimem),
    ("copy_engine", Algorithm::CopyEngine),
];

fn algorithm(py: Python<'_>, name: &str) -> PyResult<Algorithm> {
    let known = ALGORITHMS.into_iter().find(|(known, _)| *known == name);
    known.map(|(_, algorithm)| algorithm).ok_or_else(|| {
        let names = ALGORITHMS.map(|(name, _)| name).join(", ");
        usage(py, "all_reduce", format!("one of the algorithms {names}"), name)
    })
}

/// A collective, written once for all types of elements (`arithmetic` or `moved`): on the host, and in a stream.
macro_rules! collective {
    (
        $handle:expr, $py:expr, $part:expr, $kind:ident, $out:expr,
        |$x:ident, $to:ident| $work:expr, |$y:ident, $into:ident, $stream:ident| $launch:expr
    ) => {{
        let (handle, py, part, out): (&Handle, _, Part, _) = ($handle, $py, $part, $out);
        let element = part.dtype.$kind(py, part.op)?;
        let out = handle.output(py, part, out)?;
        with_element!(element, T => match handle.cuda() {
            None => handle.on_host::<T>(py, part, out, |$x, $to| $work),
            Some(device) => {
                handle.on_device::<T>(py, device, part, out, |$y, $into, $stream| $launch)
            }
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
    fn on_host<T: Element>(
        &self,
        py: Python<'_>,
        part: Part,
        mut out: Slice,
        work: impl FnOnce(&mut Symmetric<T>, &mut [T]) -> symmem::Result<()> + Send,
    ) -> PyResult<()> {
        self.check_open(py, part.op)?;
        detached(py, || {
            let mut memory = self.part(part.offset, part.count)?;
            // SAFETY: `output` checked type and place; S2 as documented for users.
            work(&mut memory, unsafe { out.elements_mut() })
        })
    }

    /// Puts `work` on a part of the memory and on the elements of `out` into the stream.
    fn on_device<T: Element>(
        &self,
        py: Python<'_>,
        device: &cuda::Symmetric<u8>,
        part: Part,
        mut out: Slice,
        work: impl FnOnce(&mut cuda::Symmetric<T>, ViewMut<'_, T>, &Stream) -> symmem::Result<()> + Send,
    ) -> PyResult<()> {
        self.check_open(py, part.op)?;
        let stream = self.stream(device, part.stream);
        let range = (part.offset, part.count);
        detached(py, || {
            // SAFETY: `output` checked type and place; S2 as documented for users.
            let out = unsafe { out.view_mut() };
            self.mapped().with_part(device, range, |memory| work(memory, out, &stream))
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
        self.apart(py, part, out)
    }

    /// Refuses an output that is a part of what peers read meanwhile.
    pub(crate) fn apart(&self, py: Python<'_>, part: Part, out: Slice) -> PyResult<Slice> {
        let bytes = part.count.saturating_mul(part.dtype.size());
        let taken = |base: usize| out.touches(base.saturating_add(part.offset), bytes);
        if self.mapped().buffers.iter().copied().any(taken) {
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
        let (op, how) = (reduce_op(py, part.op, op)?, algorithm(py, how)?);
        let out = out.map(|out| self.output(py, part, Some(out))).transpose()?;
        self.reduce_by(py, part, op, how, out)
    }

    /// Reduces a part: in place, or into an output that was checked.
    pub(crate) fn reduce_by(
        &self,
        py: Python<'_>,
        part: Part,
        op: ReduceOp,
        how: Algorithm,
        out: Option<Slice>,
    ) -> PyResult<()> {
        let (into, out) = (out.is_some(), out.unwrap_or(Slice::EMPTY));
        let no_such = || usage(py, part.op, "an algorithm for host memory", format!("{how:?}"));
        let on_host = match self.cuda() {
            None => how.on_host().ok_or_else(no_such)?,
            Some(_) => symmem::Algorithm::Auto, // not used there
        };
        with_element!(part.dtype.arithmetic(py, part.op)?, T => match self.cuda() {
            None => self.on_host::<T>(py, part, out, |x, to| {
                if into { x.all_reduce_into(op, to) } else { x.all_reduce_with(op, on_host) }
            }),
            Some(device) => self.on_device::<T>(py, device, part, out, |x, to, stream| {
                if into { x.all_reduce_into(op, to, stream) } else { x.all_reduce_with(op, how, stream) }
            }),
        })
    }

    /// Puts a reduction of a part of a device's memory into its stream, in place or into `out`, without the interpreter's
    /// lock. `None` where that is not possible, and nothing was done.
    ///
    /// # Safety
    /// `out` has as many elements of the part's type, on the same device, until the stream is done with them.
    pub(crate) unsafe fn reduce_in_stream(
        &self,
        part: Part,
        op: ReduceOp,
        out: Option<usize>,
    ) -> Option<symmem::Result<()>> {
        let (device, dtype) = (self.cuda()?, part.dtype.number()?);
        let bytes = part.count.saturating_mul(part.dtype.size());
        let to = out.map_or(Slice::EMPTY, |address| Slice::raw(address, bytes));
        let taken = |base: usize| to.touches(base.saturating_add(part.offset), bytes);
        if !self.is_open() || self.mapped().buffers.iter().copied().any(taken) {
            return None;
        }
        let to = out.map(|_| to);
        symmem::with_element!(dtype, T => self.put_reduction::<T>(device, part, op, to))
    }

    /// The last of [`Handle::reduce_in_stream`], which has checked everything.
    fn put_reduction<T: Number>(
        &self,
        device: &cuda::Symmetric<u8>,
        part: Part,
        op: ReduceOp,
        to: Option<Slice>,
    ) -> symmem::Result<()> {
        let stream = self.stream(device, part.stream);
        self.mapped().with_part::<T>(device, (part.offset, part.count), |memory| match to {
            // SAFETY: as its caller promises; S2 as documented for users.
            Some(mut to) => memory.all_reduce_into(op, unsafe { to.view_mut() }, &stream),
            None => memory.all_reduce_with(op, Algorithm::Auto, &stream),
        })
    }

    pub(crate) fn do_reduce_scatter(
        &self,
        py: Python<'_>,
        part: Part,
        op: &str,
        columns: Option<usize>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let op = reduce_op(py, part.op, op)?;
        collective!(
            self,
            py,
            part,
            arithmetic,
            Some(out),
            |x, to| match columns {
                None => x.reduce_scatter(op, to),
                Some(columns) => x.reduce_scatter_last_dim(op, columns, to),
            },
            |x, to, stream| match columns {
                None => x.reduce_scatter(op, to, stream),
                Some(columns) => x.reduce_scatter_last_dim(op, columns, to, stream),
            }
        )
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
        collective!(
            self,
            py,
            part,
            arithmetic,
            out,
            |x, to| x.reduce(op, root, to),
            |x, to, stream| x.reduce(op, root, to, stream)
        )
    }

    pub(crate) fn do_all_gather(
        &self,
        py: Python<'_>,
        part: Part,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, Some(out), |x, to| x.all_gather(to), |x, to, stream| x
            .all_gather(to, stream))
    }

    pub(crate) fn do_all_to_all(
        &self,
        py: Python<'_>,
        part: Part,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, Some(out), |x, to| x.all_to_all(to), |x, to, stream| x
            .all_to_all(to, stream))
    }

    pub(crate) fn do_broadcast(&self, py: Python<'_>, part: Part, root: usize) -> PyResult<()> {
        collective!(self, py, part, moved, None, |x, _to| x.broadcast(root), |x, _to, stream| x
            .broadcast(root, stream))
    }

    pub(crate) fn do_gather(
        &self,
        py: Python<'_>,
        part: Part,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        collective!(self, py, part, moved, out, |x, to| x.gather(root, to), |x, to, stream| x
            .gather(root, to, stream))
    }

    pub(crate) fn do_scatter(
        &self,
        py: Python<'_>,
        part: Part,
        root: usize,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        collective!(
            self,
            py,
            part,
            moved,
            Some(out),
            |x, to| x.scatter(root, to),
            |x, to, stream| x.scatter(root, to, stream)
        )
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
        received.check(py, part.op, Type::of(symmem::DType::I64), self.place())?;
        let received = &mut received;
        collective!(
            self,
            py,
            part,
            moved,
            Some(out),
            |x, to| {
                let mut splits = splits.0.part(splits.1, splits.2)?;
                rows.on_host(x, &mut splits, to, received)
            },
            |x, to, stream| {
                let mut splits = splits.0.device_numbers(splits.1, splits.2)?;
                rows.on_device(x, &mut splits, to, received, stream)
            }
        )
    }

    /// Numbers of rows in the memory of a device.
    fn device_numbers(&self, offset: usize, count: usize) -> symmem::Result<cuda::Symmetric<i64>> {
        let device = self.cuda().ok_or_else(|| {
            let expected = "splits on the device of the rows";
            symmem::Error::usage("all_to_all_v", expected, "splits on the host")
        })?;
        device_part(device, offset, count)
    }
}

impl Rows {
    fn on_host<T: Element>(
        self,
        x: &mut Symmetric<T>,
        splits: &mut Symmetric<i64>,
        out: &mut [T],
        received: &mut Slice,
    ) -> symmem::Result<()> {
        // SAFETY: `do_all_to_all_v` checked type and place; S2 as documented for users.
        let got = unsafe { received.elements_mut() };
        match self {
            Self::ByRank(len) => x.all_to_all_v(len, splits, out, got),
            Self::ByExpert(len, align) => x.all_to_all_v_2d(len, splits, align, out, got),
            Self::FromExperts(len) => x.all_to_all_v_2d_offset(len, splits, out, got),
        }
    }

    fn on_device<T: Element>(
        self,
        x: &mut cuda::Symmetric<T>,
        splits: &mut cuda::Symmetric<i64>,
        out: ViewMut<'_, T>,
        received: &mut Slice,
        stream: &Stream,
    ) -> symmem::Result<()> {
        // SAFETY: `do_all_to_all_v` checked type and place; S2 as documented for users.
        let got = unsafe { received.view_mut() };
        match self {
            Self::ByRank(len) => x.all_to_all_v(len, splits, out, got, stream),
            Self::ByExpert(len, align) => x.all_to_all_v_2d(len, splits, align, out, got, stream),
            Self::FromExperts(len) => x.all_to_all_v_2d_offset(len, splits, out, got, stream),
        }
    }
}

/// A part of a device's memory, to call collectives on.
pub(crate) fn device_part<T: Element>(
    device: &cuda::Symmetric<u8>,
    offset: usize,
    count: usize,
) -> symmem::Result<cuda::Symmetric<T>> {
    // SAFETY: S2 as documented for users; bounds and alignment are checked there.
    unsafe { device.part(offset, count) }
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
