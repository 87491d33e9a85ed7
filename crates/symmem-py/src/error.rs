//! One exception for each variant of the library's error, with its fields as attributes.

use pyo3::exceptions::{PyException, PyOSError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use symmem::Error;

/// Name, document and second base of each; all derive from `Error`.
type Kind = (&'static str, &'static str, fn(Python<'_>) -> Option<Bound<'_, PyType>>);

const KINDS: [Kind; 8] = [
    ("Unavailable", "Something this call needs does not exist on this machine: what, why.", |_| {
        None
    }),
    ("System", "A call into the operating system failed: call, errno.", |py| {
        Some(py.get_type::<PyOSError>())
    }),
    ("Driver", "A call into a device's driver failed: call, why.", |_| None),
    (
        "Mismatch",
        "The ranks called the same operation with arguments that do not fit together: op, what, rank, ours, theirs. \
         Every rank gets this, and nothing was done.",
        |_| None,
    ),
    (
        "PeerLost",
        "A peer died or left while it was needed: rank, during, how. Its group can go on without it: see Group.shrink.",
        |_| None,
    ),
    ("PeerFailed", "A peer lives, but could not do its part: op, rank, reason.", |_| None),
    ("Timeout", "A wait ended at its deadline: op, channel, waiting_for, after.", |py| {
        Some(py.get_type::<PyTimeoutError>())
    }),
    (
        "Protocol",
        "The other end of a connection did not keep to the protocol: peer, expected, got.",
        |_| None,
    ),
];

static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

/// `Error`, then `Usage`, then all of `KINDS`.
fn types<'py>(py: Python<'py>) -> PyResult<&'py Vec<Py<PyType>>> {
    TYPES.get_or_try_init(py, || {
        let of = |name: &str, doc: &str, bases: Vec<Bound<'py, PyType>>| -> PyResult<Py<PyType>> {
            let members = PyDict::new(py);
            members.set_item("__module__", "symmem")?;
            members.set_item("__doc__", doc)?;
            let made = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, members))?;
            Ok(made.cast_into::<PyType>()?.unbind())
        };
        let base = of("Error", "What went wrong in symmem.", vec![py.get_type::<PyException>()])?;
        let with = |other: Option<Bound<'py, PyType>>| -> Vec<Bound<'py, PyType>> {
            std::iter::once(base.bind(py).clone()).chain(other).collect()
        };
        let doc = "The call itself is wrong, and nothing was done: op, rank, expected, got.";
        let usage = of("Usage", doc, with(Some(py.get_type::<PyValueError>())))?;
        let kinds = KINDS.iter().map(|(name, doc, other)| of(name, doc, with(other(py))));
        let kinds: PyResult<Vec<_>> = kinds.collect();
        Ok([base.clone_ref(py), usage].into_iter().chain(kinds?).collect())
    })
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for kind in types(module.py())? {
        let kind = kind.bind(module.py());
        module.add(kind.name()?, kind)?;
    }
    Ok(())
}

/// The exception for an error of the library.
pub(crate) fn exception(py: Python<'_>, error: Error) -> PyErr {
    raised(py, &error).unwrap_or_else(|trouble| trouble)
}

fn raised(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let name = fill(&fields, error)?;
    let kind = types(py)?.iter().map(|kind| kind.bind(py));
    let kind =
        kind.clone().find(|kind| kind.name().is_ok_and(|n| n == name)).or(kind.clone().next());
    let Some(kind) = kind else { return Ok(PyException::new_err(error.to_string())) };
    let value = kind.call1((error.to_string(),))?;
    for (field, content) in fields {
        value.setattr(field.cast::<pyo3::types::PyString>()?, content)?;
    }
    Ok(PyErr::from_value(value))
}

/// Puts the fields of a variant into `to`; its name.
fn fill(to: &Bound<'_, PyDict>, error: &Error) -> PyResult<&'static str> {
    Ok(match error {
        Error::Unavailable { what, why } => {
            to.set_item("what", what)?;
            to.set_item("why", why)?;
            "Unavailable"
        }
        Error::System { call, source } => {
            to.set_item("call", call)?;
            to.set_item("errno", source.raw_os_error())?;
            "System"
        }
        Error::Driver { call, why } => {
            to.set_item("call", call)?;
            to.set_item("why", why)?;
            "Driver"
        }
        Error::Mismatch { op, what, rank, ours, theirs } => {
            to.set_item("op", op)?;
            to.set_item("what", what)?;
            to.set_item("rank", rank)?;
            to.set_item("ours", ours)?;
            to.set_item("theirs", theirs)?;
            "Mismatch"
        }
        Error::PeerLost { rank, during, how } => {
            to.set_item("rank", rank)?;
            to.set_item("during", during)?;
            to.set_item("how", how)?;
            "PeerLost"
        }
        Error::PeerFailed { op, rank, reason } => {
            to.set_item("op", op)?;
            to.set_item("rank", rank)?;
            to.set_item("reason", reason)?;
            "PeerFailed"
        }
        Error::Timeout { op, channel, waiting_for, after } => {
            to.set_item("op", op)?;
            to.set_item("channel", channel)?;
            to.set_item("waiting_for", waiting_for)?;
            to.set_item("after", after.as_secs_f64())?;
            "Timeout"
        }
        Error::Protocol { with, expected, got } => {
            to.set_item("peer", with)?;
            to.set_item("expected", expected)?;
            to.set_item("got", got)?;
            "Protocol"
        }
        Error::Usage { op, rank, expected, got } => {
            to.set_item("op", op)?;
            to.set_item("rank", rank)?;
            to.set_item("expected", expected)?;
            to.set_item("got", got)?;
            "Usage"
        }
        _ => "Error",
    })
}

/// A `Usage` of this module's own.
pub(crate) fn usage(
    py: Python<'_>,
    op: &'static str,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> PyErr {
    exception(py, Error::Usage { op, rank: None, expected: expected.into(), got: got.into() })
}
