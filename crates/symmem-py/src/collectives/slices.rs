//! Collectives of a group on memory of any kind.
#![allow(unsafe_code)] // S2 (what the package's documents ask of its users: nobody else touches the arguments of a call)

use pyo3::prelude::*;
use symmem::Element;

use super::reduce_op;
use crate::argument::Slice;
use crate::dtype::{Type, with_element};
use crate::error::usage;
use crate::group::Group;
use crate::memory::Place;
use crate::wait::detached;

/// The type of the elements: as asked for, or that of `data`.
fn type_of(
    py: Python<'_>,
    op: &'static str,
    data: &Slice,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<&'static Type> {
    let asked = dtype.map(|given| Type::named(op, given)).transpose()?;
    let found = asked.or(data.dtype());
    found.ok_or_else(|| usage(py, op, "an array, or a buffer and its dtype", "a buffer alone"))
}

/// Leaves Python with the elements of one argument, which are read and changed.
fn changing<T: Element>(
    py: Python<'_>,
    data: &mut Slice,
    work: impl FnOnce(&mut [T]) -> symmem::Result<()> + Send,
) -> PyResult<()> {
    // SAFETY: `in_place` checked type and place; S2 as documented for users.
    detached(py, || work(unsafe { data.elements_mut() }))
}

/// Leaves Python with the elements of one argument that are read, and of one that are written.
fn reading<T: Element>(
    py: Python<'_>,
    (data, out): (&Slice, &mut Slice),
    work: impl FnOnce(&[T], &mut [T]) -> symmem::Result<()> + Send,
) -> PyResult<()> {
    // SAFETY: `from_to` checked type and place; S2 as documented for users.
    let data = unsafe { data.elements() };
    // SAFETY: as above, and that the two do not overlap.
    detached(py, || work(data, unsafe { out.elements_mut() }))
}

/// Does `$work` for the type of one argument, which is read and changed.
macro_rules! in_place {
    ($group:ident, $op:expr, $data:ident, $dtype:expr, $kind:ident, |$x:ident| $work:expr) => {{
        let (py, op) = ($data.py(), $op);
        $group.check_open(py, op)?;
        let mut data = Slice::output(op, $data)?;
        let dtype = type_of(py, op, &data, $dtype)?;
        data.check(py, op, dtype, Place::Host)?;
        let $group = &$group.inner;
        with_element!(dtype.$kind(py, op)?, T => changing::<T>(py, &mut data, |$x| $work))
    }};
}

/// Does `$work` for the type of one argument that is read and one that is written.
macro_rules! from_to {
    ($group:ident, $op:expr, $data:ident, $out:ident, $dtype:expr, $kind:ident, |$x:ident, $y:ident| $work:expr) => {{
        let (py, op) = ($data.py(), $op);
        $group.check_open(py, op)?;
        let (data, mut out) = (Slice::input(op, $data)?, Slice::output(op, $out)?);
        let dtype = type_of(py, op, &data, $dtype)?;
        data.check(py, op, dtype, Place::Host)?;
        out.check(py, op, dtype, Place::Host)?;
        if data.overlaps(&out) {
            return Err(usage(py, op, "an output apart from the input", "one that overlaps it"));
        }
        let $group = &$group.inner;
        with_element!(dtype.$kind(py, op)?, T => {
            reading::<T>(py, (&data, &mut out), |$x, $y| $work)
        })
    }};
}

pub(crate) fn all_reduce(
    group: &Group,
    data: &Bound<'_, PyAny>,
    op: &str,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let op = reduce_op(data.py(), "all_reduce", op)?;
    in_place!(group, "all_reduce", data, dtype, arithmetic, |x| group.all_reduce(x, op))
}

pub(crate) fn broadcast(
    group: &Group,
    data: &Bound<'_, PyAny>,
    root: usize,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    in_place!(group, "broadcast", data, dtype, moved, |x| group.broadcast(x, root))
}

pub(crate) fn all_gather(
    group: &Group,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    from_to!(group, "all_gather", data, out, dtype, moved, |x, y| group.all_gather(x, y))
}

pub(crate) fn reduce_scatter(
    group: &Group,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    op: &str,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let op = reduce_op(data.py(), "reduce_scatter", op)?;
    from_to!(group, "reduce_scatter", data, out, dtype, arithmetic, |x, y| group
        .reduce_scatter(x, op, y))
}

pub(crate) fn all_to_all(
    group: &Group,
    data: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    from_to!(group, "all_to_all", data, out, dtype, moved, |x, y| group.all_to_all(x, y))
}
