//! The way of a reduction that was made before, from a tensor of torch's to the library, with as little as possible between.
//!
//! What an address means in a group is remembered by the first call, which goes the long way, in Python. Later ones find it
//! here. Python asks tensors for what is needed of them: it does that quicker than the stable ABI can. Whatever is unusual is
//! left to the long way, which has the checks and their texts.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use symmem::ReduceOp;
use symmem::cuda::Algorithm;

use crate::argument::Slice;
use crate::collectives::{Part, reduce_op};
use crate::dtype::Type;
use crate::handle::Handle;
use crate::memory::Place;
use crate::stream::is_kept;

const OP: &str = "all_reduce";
/// How many addresses are remembered.
const MOST: usize = 1024;

/// A tensor's memory in a group.
struct Known {
    /// The group, by identity, and by the name that stands for it until names change.
    group: usize,
    name: String,
    handle: Handle,
    /// Bytes from the start of the handle's memory to the tensor.
    offset: usize,
}

type Table = BTreeMap<usize, Vec<Known>>;

/// By address. Not in an object of Python's: whoever comes from torch's dispatcher has not the interpreter's lock.
static KNOWN: Mutex<Table> = Mutex::new(Table::new());

fn known() -> MutexGuard<'static, Table> {
    // Nothing is done under the lock that could leave the table half changed.
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(address: usize, wanted: impl Fn(&Known) -> bool) -> Option<(Handle, usize)> {
    let known = known();
    let found = known.get(&address)?.iter().find(|known| wanted(known))?;
    Some((found.handle.share(), found.offset))
}

/// What lies at `address` in the group of a name.
pub(crate) fn named(address: usize, name: &[u8]) -> Option<(Handle, usize)> {
    find(address, |known| known.name.as_bytes() == name)
}

/// Reductions of tensors of torch, by what is known of their addresses.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Quick {
    /// torch's types, by identity.
    types: Vec<(Py<PyAny>, &'static Type)>,
    /// torch's names of operators.
    operators: Vec<(String, ReduceOp)>,
    current_stream: Option<Py<PyAny>>,
}

impl Quick {
    /// The current stream of the memory's device; `None` if nobody has said that it lives for ever.
    fn stream(&self, py: Python<'_>, place: Place) -> PyResult<Option<usize>> {
        let (Place::Cuda(number), Some(ask)) = (place, &self.current_stream) else {
            return Ok(Some(0));
        };
        let stream: usize = ask.bind(py).call1((number,))?.extract()?;
        Ok(is_kept(number, stream).then_some(stream))
    }
}

#[pymethods]
impl Quick {
    /// `types` and `operators` are torch's, by the library's names; `current_stream` is torch's function.
    #[new]
    fn new(
        py: Python<'_>,
        types: Vec<(Py<PyAny>, String)>,
        operators: Vec<(String, String)>,
        current_stream: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let named = |(object, name): (Py<PyAny>, String)| {
            let name = name.into_pyobject(py)?;
            Ok((object, Type::named(OP, name.as_any())?))
        };
        let operator = |(torchs, name): (String, String)| Ok((torchs, reduce_op(py, OP, &name)?));
        Ok(Self {
            types: types.into_iter().map(named).collect::<PyResult<_>>()?,
            operators: operators.into_iter().map(operator).collect::<PyResult<_>>()?,
            current_stream,
        })
    }

    /// Remembers what lies at `address` in a group of that name.
    #[staticmethod]
    fn remember(
        address: usize,
        group: &Bound<'_, PyAny>,
        name: String,
        handle: &Bound<'_, Handle>,
        offset: usize,
    ) {
        let (group, handle) = (group.as_ptr() as usize, handle.get().share());
        let new = Known { group, name, handle, offset };
        let mut known = known();
        // Few are used at a time; of many, the next calls go the long way once more.
        let many = if known.len() >= MOST { std::mem::take(&mut *known) } else { Table::new() };
        let all = known.entry(address).or_default();
        let had = all.iter_mut().find(|known| known.group == new.group);
        let had = match had {
            Some(old) => Some(std::mem::replace(old, new)),
            None => {
                all.push(new);
                None
            }
        };
        drop(known);
        drop((had, many)); // not under the lock: memory may go
    }

    /// Forgets all from `address` on within `nbytes`: the memory goes.
    #[staticmethod]
    fn forget_memory(address: usize, nbytes: usize) {
        let mut known = known();
        let mut gone = known.split_off(&address);
        known.append(&mut gone.split_off(&address.saturating_add(nbytes.max(1))));
        drop(known);
        drop(gone);
    }

    /// Forgets what is known of a group, by its identity: it goes.
    #[staticmethod]
    fn forget_group(group: usize) {
        let mut gone = Vec::new();
        let mut known = known();
        for all in known.values_mut() {
            gone.extend(all.extract_if(.., |known| known.group == group));
        }
        known.retain(|_, all| !all.is_empty());
        drop(known);
        drop(gone);
    }

    /// Forgets everything: names of groups may mean others from now on.
    #[staticmethod]
    fn forget_all() {
        let gone = std::mem::take(&mut *known());
        drop(gone); // not under the lock: memory may go
    }

    /// How many addresses are known.
    fn __len__(&self) -> usize {
        known().len()
    }

    /// Reduces the `count` elements at `address` in place, or into as many at `out`, and says whether it did; if not, nothing
    /// was done. The tensors that have them are contiguous, of the same type and on the same device.
    #[pyo3(signature = (address, count, dtype, operator, group, out=0, /))]
    fn all_reduce(
        &self,
        address: usize,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        operator: &str,
        group: &Bound<'_, PyAny>,
        out: usize,
    ) -> PyResult<bool> {
        let py = group.py();
        let group = group.as_ptr() as usize;
        let Some((handle, offset)) = find(address, |known| known.group == group) else {
            return Ok(false);
        };
        let dtype = self.types.iter().find(|(known, _)| known.as_ptr() == dtype.as_ptr());
        let operator = self.operators.iter().find(|(known, _)| known == operator);
        let (Some((_, dtype)), Some((_, operator))) = (dtype, operator) else { return Ok(false) };
        let Some(stream) = self.stream(py, handle.place())? else { return Ok(false) };
        let part = Part { op: OP, dtype, offset, count, stream };
        let out = match out {
            0 => None,
            // What overlaps is refused the long way, which tells the others.
            out => match handle.apart(py, part, Slice::raw(out, count * dtype.size())) {
                Ok(out) => Some(out),
                Err(_) => return Ok(false),
            },
        };
        handle.reduce_by(py, part, *operator, Algorithm::Auto, out)?;
        Ok(true)
    }
}
