//! Messages from one rank to another, on ordinary arrays.
#![allow(unsafe_code)] // S2 (the package's documents require it of users: no other thread accesses the arguments of a call)

use pyo3::prelude::*;
use symmem::{Deadline, Error};

use crate::argument::Slice;
use crate::collectives::slices::element_type;
use crate::dtype::Type;
use crate::error::Op;
use crate::group::{Group, seconds};
use crate::memory::Location;
use crate::wait::detached;

/// What every call has.
struct Call {
    dtype: &'static Type,
    deadline: Deadline,
}

/// The type asked for, or else that of the array, which `memory` is.
fn call(
    py: Python<'_>,
    group: &Group,
    op: Op,
    memory: &Slice,
    (timeout, dtype): (Option<f64>, Option<&Bound<'_, PyAny>>),
) -> PyResult<Call> {
    let dtype = element_type(py, op, dtype, [memory, &Slice::EMPTY])?;
    memory.check(py, op, dtype, Location::Host)?;
    let given = timeout.map(|given| seconds(py, given)).transpose()?;
    let deadline = given.map_or_else(|| group.inner.deadline(), Deadline::within);
    Ok(Call { dtype, deadline })
}

/// The error for a type that the library does not know: there is none.
fn no_element(op: &'static str, dtype: &Type) -> Error {
    Error::usage(op, "a type of elements", dtype.name)
}

/// Sends elements of a type to a rank. Their type and place were checked.
pub(crate) fn send_elements(
    group: &symmem::Group,
    (data, dtype): (&Slice, &Type),
    (to, tag): (usize, u64),
    deadline: Deadline,
) -> symmem::Result<()> {
    let sent = symmem::with_element!(dtype.moved, T => {
        // SAFETY: type and place are checked by the caller; S2 as documented for users.
        group.send_by(unsafe { data.elements::<T>() }, to, tag, deadline)
    });
    sent.unwrap_or_else(|| Err(no_element("send", dtype)))
}

/// Receives elements of a type from a rank, or from any. Their type and place were checked. Returns the sender.
pub(crate) fn receive_elements(
    group: &symmem::Group,
    (out, dtype): (&mut Slice, &Type),
    (source, tag): (Option<usize>, u64),
    deadline: Deadline,
) -> symmem::Result<usize> {
    let received = symmem::with_element!(dtype.moved, T => {
        // SAFETY: as in `send_elements`.
        let out = unsafe { out.elements_mut::<T>() };
        match source {
            Some(from) => group.recv_by(out, from, tag, deadline).map(|()| from),
            None => group.recv_any_by(out, tag, deadline),
        }
    });
    received.unwrap_or_else(|| Err(no_element("recv", dtype)))
}

/// Sends an array to a rank.
pub(crate) fn send(
    group: &Group,
    data: &Bound<'_, PyAny>,
    (to, tag): (usize, u64),
    options: (Option<f64>, Option<&Bound<'_, PyAny>>),
) -> PyResult<()> {
    let (py, op) = (data.py(), Op::at("send", group.inner.rank()));
    group.check_open(py, op.name)?;
    let data = Slice::input(op, data)?;
    let call = call(py, group, op, &data, options)?;
    detached(py, || send_elements(&group.inner, (&data, call.dtype), (to, tag), call.deadline))
}

/// Receives into an array from a rank, or from any. Returns the sender.
pub(crate) fn receive(
    group: &Group,
    out: &Bound<'_, PyAny>,
    (source, tag): (Option<usize>, u64),
    options: (Option<f64>, Option<&Bound<'_, PyAny>>),
) -> PyResult<usize> {
    let name = if source.is_some() { "recv" } else { "recv_any" };
    let (py, op) = (out.py(), Op::at(name, group.inner.rank()));
    group.check_open(py, name)?;
    let mut out = Slice::output(op, out)?;
    let call = call(py, group, op, &out, options)?;
    let from = (source, tag);
    detached(py, || receive_elements(&group.inner, (&mut out, call.dtype), from, call.deadline))
}
