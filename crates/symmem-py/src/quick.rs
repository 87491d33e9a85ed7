//! The way of a reduction that was made before, from a tensor of torch's to the library, with as little as possible between.
//!
//! What a tensor's address means in a process group is remembered by the first call, which goes the long way, in Python. Later
//! ones find it here. Whatever is unusual is left to the long way, which has the checks and their texts.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use symmem::{Algorithm, ReduceOp};

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
    group_name: String,
    /// The process group that has the name, by identity: another may have it later.
    process_group: usize,
    handle: Py<Handle>,
    /// Bytes from the start of the handle's memory to the tensor.
    offset: usize,
}

/// Reductions of tensors of torch, by what is known of their addresses.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Quick {
    known: Mutex<BTreeMap<usize, Vec<Known>>>,
    /// torch's types, by identity.
    types: Vec<(Py<PyAny>, &'static Type)>,
    /// torch's names of operators.
    operators: Vec<(String, ReduceOp)>,
    resolve: Py<PyAny>,
    current_stream: Option<Py<PyAny>>,
}

/// What a call needs to know of a tensor.
struct Facts {
    address: usize,
    count: usize,
    dtype: &'static Type,
}

impl Quick {
    fn known(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Known>>> {
        // Nothing is done under the lock that could leave the table half changed.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` for a tensor that is not contiguous or of a type that cannot be reduced.
    fn facts(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Facts>> {
        let py = tensor.py();
        if !tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
            return Ok(None);
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let dtype = self.types.iter().find(|(known, _)| known.as_ptr() == dtype.as_ptr());
        let Some((_, dtype)) = dtype else { return Ok(None) };
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let count = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        Ok(Some(Facts { address, count, dtype }))
    }

    /// The memory at an address in the group that has the name now.
    fn find(
        &self,
        py: Python<'_>,
        address: usize,
        group_name: &str,
    ) -> PyResult<Option<(Py<Handle>, usize)>> {
        let known = self.known();
        let Some(all) = known.get(&address) else { return Ok(None) };
        let Some(found) = all.iter().find(|known| known.group_name == group_name) else {
            return Ok(None);
        };
        let (group, handle) = (found.process_group, found.handle.clone_ref(py));
        let offset = found.offset;
        drop(known); // what follows may run Python
        let now = self.resolve.bind(py).call1((group_name,))?;
        Ok((now.as_ptr() as usize == group).then_some((handle, offset)))
    }

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
    /// `types` and `operators` are torch's, by the library's names; `resolve` and `current_stream` are torch's functions.
    #[new]
    fn new(
        py: Python<'_>,
        types: Vec<(Py<PyAny>, String)>,
        operators: Vec<(String, String)>,
        resolve: Py<PyAny>,
        current_stream: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let named = |(object, name): (Py<PyAny>, String)| {
            let name = name.into_pyobject(py)?;
            Ok((object, Type::named(OP, name.as_any())?))
        };
        let operator = |(torchs, name): (String, String)| Ok((torchs, reduce_op(py, OP, &name)?));
        Ok(Self {
            known: Mutex::default(),
            types: types.into_iter().map(named).collect::<PyResult<_>>()?,
            operators: operators.into_iter().map(operator).collect::<PyResult<_>>()?,
            resolve,
            current_stream,
        })
    }

    /// Remembers what lies at `address` in a process group.
    fn remember(
        &self,
        address: usize,
        group_name: String,
        process_group: &Bound<'_, PyAny>,
        handle: Py<Handle>,
        offset: usize,
    ) {
        let process_group = process_group.as_ptr() as usize;
        let new = Known { group_name, process_group, handle, offset };
        let mut known = self.known();
        // Few are used at a time; of many, the next calls go the long way once more.
        let many = if known.len() >= MOST { std::mem::take(&mut *known) } else { BTreeMap::new() };
        let all = known.entry(address).or_default();
        let old = all.iter_mut().find(|known| known.group_name == new.group_name);
        let had = match old {
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
    fn forget_memory(&self, address: usize, nbytes: usize) {
        let mut known = self.known();
        let mut gone = known.split_off(&address);
        known.append(&mut gone.split_off(&address.saturating_add(nbytes.max(1))));
        drop(known);
        drop(gone);
    }

    /// Forgets what is known of a process group, by its identity: it goes.
    fn forget_group(&self, process_group: usize) {
        let mut gone = Vec::new();
        let mut known = self.known();
        for all in known.values_mut() {
            gone.extend(all.extract_if(.., |known| known.process_group == process_group));
        }
        known.retain(|_, all| !all.is_empty());
        drop(known);
        drop(gone);
    }

    /// How many addresses are known.
    fn __len__(&self) -> usize {
        self.known().len()
    }

    /// Reduces `input` in place, or into `out`, and says whether it did; if not, nothing was done.
    #[pyo3(signature = (input, operator, group_name, out=None, /))]
    fn all_reduce(
        &self,
        input: &Bound<'_, PyAny>,
        operator: &str,
        group_name: &str,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let py = input.py();
        let Some(Facts { address, count, dtype }) = self.facts(input)? else { return Ok(false) };
        let Some((handle, offset)) = self.find(py, address, group_name)? else { return Ok(false) };
        let operator = self.operators.iter().find(|(known, _)| known == operator);
        let Some((_, operator)) = operator else { return Ok(false) };
        let handle = handle.get();
        let Some(stream) = self.stream(py, handle.place())? else { return Ok(false) };
        let part = Part { op: OP, dtype, offset, count, stream };
        let Some(out) = out else {
            handle.reduce_by(py, part, *operator, Algorithm::Auto, None)?;
            return Ok(true);
        };
        let shape = intern!(py, "shape");
        let Some(into) = self.facts(out)? else { return Ok(false) };
        let alike = into.count == count && std::ptr::eq(into.dtype, dtype);
        if !alike || !input.getattr(shape)?.eq(out.getattr(shape)?)? {
            return Ok(false);
        }
        let bytes = count * dtype.size();
        let out = handle.apart(py, part, Slice::raw(into.address, bytes))?;
        handle.reduce_by(py, part, *operator, Algorithm::Auto, Some(out))?;
        Ok(true)
    }
}
