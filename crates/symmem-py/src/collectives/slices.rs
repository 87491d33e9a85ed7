//! Collectives of a group on ordinary arrays.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: no other thread accesses the arguments of a call)

use pyo3::prelude::*;

use super::{Call, Collective, no_element, reduce_op};
use crate::argument::Slice;
use crate::dtype::Type;
use crate::error::{Op, usage};
use crate::group::Group;
use crate::memory::Location;
use crate::wait::detached;

/// The arrays of a call: the input, where it is another than the output, and the output.
type Arrays<'a, 'py> = (Option<&'a Bound<'py, PyAny>>, &'a Bound<'py, PyAny>);

/// Makes a collective on arrays of the type asked for, or else of their own.
pub(crate) fn run(
    group: &Group,
    collective: Collective,
    (input, out): Arrays<'_, '_>,
    (op, root): (&str, usize),
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let (py, at) = (out.py(), Op::at(collective.shown(), group.inner.rank()));
    group.check_open(py, at.name)?;
    let op = reduce_op(py, at, op)?;
    let (given, mut out) = (input.map(|input| Slice::input(at, input)), Slice::output(at, out)?);
    let is_separate = given.is_some();
    let input = given.transpose()?.unwrap_or(Slice::EMPTY);
    let asked = dtype.map(|given| Type::named(at, given)).transpose()?;
    let found = asked.or(input.dtype()).or(out.dtype());
    let dtype = found
        .ok_or_else(|| usage(py, at, "an array, or a buffer and its dtype", "a buffer alone"))?;
    input.check(py, at, dtype, Location::Host)?;
    out.check(py, at, dtype, Location::Host)?;
    if is_separate && input.overlaps(&out) {
        return Err(usage(py, at, "an output apart from the input", "one that overlaps it"));
    }
    let call = Call { root, ..Call::new(collective, dtype, (0, 0), op, 0) };
    let element = call.checked_element(py, at)?;
    let group = &group.inner;
    detached(py, || {
        let done = symmem::with_element!(element, T => {
            // SAFETY: type and place are checked above; S2 as documented for users.
            let input = unsafe { input.elements::<T>() };
            // SAFETY: as above, and that the two do not overlap.
            call.on_slices(group, input, unsafe { out.elements_mut() })
        });
        done.unwrap_or_else(|| Err(no_element(&call)))
    })
}
