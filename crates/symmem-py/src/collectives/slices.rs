//! Collectives of a group on ordinary arrays.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: no other thread accesses the arguments of a call)

use std::sync::Arc;

use pyo3::prelude::*;
use symmem::ReduceOp;

use super::{Call, Collective, no_element, reduce_op};
use crate::argument::Slice;
use crate::array::Array;
use crate::dtype::Type;
use crate::error::{Op, usage};
use crate::memory::Location;

/// The arrays of a call: the input, where it is another than the output, and the output; each where this rank needs it.
pub(crate) type Arrays<'a, 'py> = (Option<&'a Bound<'py, PyAny>>, Option<&'a Bound<'py, PyAny>>);

/// The type that was asked for, or else that of the first array that has one.
pub(crate) fn element_type(
    py: Python<'_>,
    at: Op,
    asked: Option<&Bound<'_, PyAny>>,
    arrays: [&Slice; 2],
) -> PyResult<&'static Type> {
    let asked = asked.map(|given| Type::named(at, given)).transpose()?;
    let found = asked.or_else(|| arrays.into_iter().find_map(Slice::dtype));
    found.ok_or_else(|| usage(py, at, "an array, or a buffer and its dtype", "no type of elements"))
}

/// A checked collective on arrays of the type asked for, or else of their own, which it keeps alive.
pub(crate) fn on_arrays(
    py: Python<'_>,
    group: &symmem::Group,
    collective: Collective,
    (input, out): Arrays<'_, '_>,
    (op, root): (&str, usize),
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<impl FnOnce(&symmem::Group) -> symmem::Result<()> + Send + use<>> {
    let at = Op::at(collective.shown(), group.rank());
    let op = reduce_op(py, at, op)?;
    let input = input.map_or(Ok(Slice::EMPTY), |input| Slice::input(at, input))?;
    let mut out = out.map_or(Ok(Slice::EMPTY), |out| Slice::output(at, out))?;
    let dtype = element_type(py, at, dtype, [&input, &out])?;
    input.check(py, at, dtype, Location::Host)?;
    out.check(py, at, dtype, Location::Host)?;
    if input.overlaps(&out) {
        return Err(usage(py, at, "an output apart from the input", "one that overlaps it"));
    }
    let call = Call { root, ..Call::new(collective, dtype, (0, 0), op, 0) };
    let element = call.checked_element(py, at)?;
    Ok(move |group: &symmem::Group| {
        let done = symmem::with_element!(element, T => {
            // SAFETY: type and place are checked above; S2 as documented for users.
            let input = unsafe { input.elements::<T>() };
            // SAFETY: as above, and that the two do not overlap.
            call.on_slices(group, input, unsafe { out.elements_mut() })
        });
        done.unwrap_or_else(|| Err(no_element(&call)))
    })
}

/// What a collective has received, and how much of it from each rank.
pub(crate) type Received = (Array, Vec<usize>);

/// A checked collective whose output is as long as the call finds out.
pub(crate) fn on_vector(
    py: Python<'_>,
    group: &symmem::Group,
    collective: Collective,
    data: &Bound<'_, PyAny>,
    counts: Vec<usize>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<impl FnOnce(&symmem::Group) -> symmem::Result<Received> + Send + use<>> {
    let at = Op::at(collective.shown(), group.rank());
    let input = Slice::input(at, data)?;
    let dtype = element_type(py, at, dtype, [&input, &Slice::EMPTY])?;
    input.check(py, at, dtype, Location::Host)?;
    let call = Call::new(collective, dtype, (0, 0), ReduceOp::Sum, 0);
    let element = call.checked_element(py, at)?;
    Ok(move |group: &symmem::Group| {
        let done = symmem::with_element!(element, T => {
            // SAFETY: type and place are checked above; S2 as documented for users.
            let input = unsafe { input.elements::<T>() };
            call.on_vector(group, input, &counts).map(|(received, lengths)| {
                let (address, shape) = (received.as_ptr() as usize, vec![received.len()]);
                (Array::new(address, dtype, shape, Location::Host, (Arc::new(received), None)), lengths)
            })
        });
        done.unwrap_or_else(|| Err(no_element(&call)))
    })
}
