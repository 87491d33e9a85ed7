//! One exception for each variant of the library's error, with its fields as attributes.

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use symmem::Error;

use crate::refusal;

/// One exception; all derive from `Error`, and some from one of Python's own.
struct Kind {
    name: &'static str,
    doc: &'static str,
    fields: &'static [&'static str],
    also: fn(Python<'_>) -> Option<Bound<'_, PyType>>,
}

#[rustfmt::skip]
const KINDS: [Kind; 14] = [
    Kind { name: "Error", doc: "The base class of all errors of symmem.", fields: &[], also: |_| None },
    Kind { name: "Unavailable", doc: "Something this call needs does not exist on this machine.", fields: &["what", "why"], also: |_| None },
    Kind { name: "System", doc: "A call into the operating system failed.", fields: &["call", "errno"], also: |py| Some(py.get_type::<PyOSError>()) },
    Kind { name: "Driver", doc: "A call into a device's driver failed.", fields: &["call", "why"], also: |_| None },
    Kind { name: "Mismatch", doc: "The ranks called the same operation with arguments that do not fit together. Every rank gets this error, and nothing was done. Of a message only the receiver gets it, and the message is consumed.", fields: &["op", "what", "rank", "ours", "theirs"], also: |_| None },
    Kind { name: "PeerLost", doc: "A peer died or left during the call. The other ranks can continue in a smaller group: see Group.shrink.", fields: &["rank", "during", "how"], also: |_| None },
    Kind { name: "PeerFailed", doc: "A peer is alive but could not take part in the call; its own error says why.", fields: &["op", "rank", "reason"], also: |_| None },
    Kind { name: "Timeout", doc: "A wait reached its deadline.", fields: &["op", "channel", "waiting_for", "after", "doing"], also: |py| Some(py.get_type::<PyTimeoutError>()) },
    Kind { name: "Interrupted", doc: "A wait was interrupted. Ctrl-C raises KeyboardInterrupt instead.", fields: &["op", "channel", "waiting_for", "after"], also: |_| None },
    Kind { name: "OutOfStepError", doc: "A rank abandoned a collective that others may have finished. All ranks must call Group.resync.", fields: &["op", "rank", "what"], also: |_| None },
    Kind { name: "Aborted", doc: "Queue.abort ended a call before it was done.", fields: &["rank", "what"], also: |_| None },
    Kind { name: "Panicked", doc: "A job of a queue panicked. A mistake in the library.", fields: &["rank", "what"], also: |_| None },
    Kind { name: "Protocol", doc: "The other end of a connection violated the protocol, or closed it.", fields: &["peer", "expected", "got"], also: |_| None },
    Kind { name: "Usage", doc: "The arguments of the call are wrong, and nothing was done.", fields: &["op", "rank", "expected", "got"], also: |py| Some(py.get_type::<PyValueError>()) },
];

impl Kind {
    /// The class, derived from `error`, or that one itself.
    fn make<'py>(
        &self,
        py: Python<'py>,
        error: Option<&Bound<'py, PyType>>,
    ) -> PyResult<Bound<'py, PyType>> {
        let base = error.cloned().unwrap_or_else(|| py.get_type::<PyRuntimeError>());
        let bases =
            PyTuple::new(py, std::iter::once(base).chain((self.also)(py)).collect::<Vec<_>>())?;
        let members = PyDict::new(py);
        members.set_item("__module__", "symmem")?;
        members.set_item("__doc__", self.doc)?;
        for field in self.fields {
            members.set_item(field, py.None())?;
        }
        let class = py.get_type::<PyType>().call1((self.name, bases, members))?;
        Ok(class.cast_into::<PyType>()?)
    }
}

static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

/// The classes of `KINDS`.
fn types(py: Python<'_>) -> PyResult<&Vec<Py<PyType>>> {
    TYPES.get_or_try_init(py, || {
        let [error, kinds @ ..] = &KINDS;
        let error = error.make(py, None)?;
        let kinds: PyResult<Vec<_>> =
            kinds.iter().map(|kind| kind.make(py, Some(&error)).map(Bound::unbind)).collect();
        Ok(std::iter::once(error.clone().unbind()).chain(kinds?).collect())
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
    let error = refusal::of_a_peer(&error).unwrap_or(error);
    raised(py, &error).unwrap_or_else(|trouble| trouble)
}

fn raised(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let name = fill(&fields, error)?;
    let kind = types(py)?.iter().map(|kind| kind.bind(py));
    let kind =
        kind.clone().find(|kind| kind.name().is_ok_and(|n| n == name)).or(kind.clone().next());
    let Some(kind) = kind else { return Ok(PyRuntimeError::new_err(error.to_string())) };
    let value = kind.call1((error.to_string(),))?;
    for (field, content) in fields {
        value.setattr(field.cast::<pyo3::types::PyString>()?, content)?;
    }
    Ok(PyErr::from_value(value))
}

/// The exception of a call that was aborted.
pub(crate) fn aborted(py: Python<'_>, what: &str) -> PyErr {
    let made = types(py).and_then(|types| {
        let named = |kind: &&Py<PyType>| kind.bind(py).name().is_ok_and(|name| name == "Aborted");
        let kind = types.iter().find(named).map(|kind| kind.bind(py).clone());
        let kind = kind.unwrap_or_else(|| py.get_type::<PyRuntimeError>());
        let value = kind.call1((format!("the call was aborted: {what}"),))?;
        value.setattr("what", what)?;
        Ok(PyErr::from_value(value))
    });
    made.unwrap_or_else(|trouble| trouble)
}

/// Puts the fields of a variant into `to`; its name.
fn fill(to: &Bound<'_, PyDict>, error: &Error) -> PyResult<&'static str> {
    macro_rules! filled {
        ($name:literal: $($field:ident),*) => {{
            $(to.set_item(stringify!($field), $field)?;)*
            $name
        }};
    }
    Ok(match error {
        Error::Unavailable { what, why, .. } => filled!("Unavailable": what, why),
        Error::System { call, source, .. } => {
            let errno = source.raw_os_error();
            filled!("System": call, errno)
        }
        Error::Driver { library, code, call, why, .. } => {
            filled!("Driver": library, code, call, why)
        }
        Error::Mismatch { op, what, rank, ours, theirs, .. } => {
            filled!("Mismatch": op, what, rank, ours, theirs)
        }
        Error::PeerLost { rank, during, how, .. } => filled!("PeerLost": rank, during, how),
        Error::PeerFailed { op, rank, reason, .. } => filled!("PeerFailed": op, rank, reason),
        Error::Timeout { op, channel, waiting_for, after, doing, .. } => {
            let after = after.as_secs_f64();
            filled!("Timeout": op, channel, waiting_for, after, doing)
        }
        Error::Interrupted { op, channel, waiting_for, after, .. } => {
            let after = after.as_secs_f64();
            filled!("Interrupted": op, channel, waiting_for, after)
        }
        Error::OutOfStep { op, rank, what, .. } => filled!("OutOfStepError": op, rank, what),
        Error::Aborted { rank, what, .. } => filled!("Aborted": rank, what),
        Error::Panicked { rank, what, .. } => filled!("Panicked": rank, what),
        Error::Protocol { with: peer, expected, got, .. } => {
            filled!("Protocol": peer, expected, got)
        }
        Error::Usage { op, rank, expected, got, .. } => {
            filled!("Usage": op, rank, expected, got)
        }
        _ => "Error",
    })
}

/// An operation, and the rank that calls it where that is known.
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub(crate) name: &'static str,
    rank: Option<usize>,
}

impl Op {
    pub(crate) const fn at(name: &'static str, rank: usize) -> Self {
        Self { name, rank: Some(rank) }
    }
}

impl From<&'static str> for Op {
    fn from(name: &'static str) -> Self {
        Self { name, rank: None }
    }
}

impl std::fmt::Display for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank}: {}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// A `Usage` of this module's own.
pub(crate) fn usage(
    py: Python<'_>,
    op: impl Into<Op>,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> PyErr {
    let Op { name: op, rank } = op.into();
    let error = Error::usage(op, expected, got);
    exception(py, rank.into_iter().fold(error, Error::at_rank))
}
