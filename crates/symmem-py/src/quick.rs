//! The quick path of torch's all-reduces: from a tensor's address to the library's call, with as little as possible between.
//!
//! The library's table finds the allocation at an address, and the allocation its handle in the group. Python reads the tensor's
//! properties: it does that faster than the stable ABI can. Anything unusual is left to the operators in Python, which have the
//! checks and their messages.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;
use symmem::ReduceOp;

use crate::collectives::reduce_op;
use crate::dtype::Type;
use crate::group::Group;
use crate::handle::Handle;
use crate::life::Life;
use crate::memory::{Allocation, Location};
use crate::stream::is_kept;
use crate::wait::detached;

/// The groups that torch's names mean. Not in an object of Python's: torch's dispatcher calls without the interpreter's lock.
static NAMES: Mutex<Vec<(String, Weak<Life>)>> = Mutex::new(Vec::new());

fn names() -> MutexGuard<'static, Vec<(String, Weak<Life>)>> {
    // Nothing is done under the lock that could leave the list half changed.
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that `name` means the world of `group` from now on.
#[pyfunction]
pub(crate) fn name_group(name: String, group: &Bound<'_, Group>) {
    let mut names = names();
    names.retain(|(known, life)| *known != name && life.strong_count() > 0);
    names.push((name, Arc::downgrade(&group.get().life)));
}

/// Forgets what a name means; without a name, forgets all of them.
#[pyfunction]
#[pyo3(signature = (name=None))]
pub(crate) fn forget_group(name: Option<&str>) {
    names().retain(|(known, _)| name.is_some_and(|name| name != known));
}

/// The names that `name_group` has noted, of worlds that are alive.
#[pyfunction]
pub(crate) fn group_names() -> Vec<String> {
    let names = names();
    let alive = names.iter().filter(|(_, life)| life.strong_count() > 0);
    alive.map(|(name, _)| name.clone()).collect()
}

/// The memory at an address in a group that a name means, and how far into it the address lies.
pub(crate) fn named(address: usize, name: &[u8]) -> Option<(Handle, usize)> {
    let life = {
        let names = names();
        let (_, life) = names.iter().find(|(known, _)| known.as_bytes() == name)?;
        life.upgrade()?
    };
    mapped(address, life.world(), &life)
}

fn mapped(address: usize, group: &symmem::Group, life: &Arc<Life>) -> Option<(Handle, usize)> {
    let (allocation, offset) = Allocation::at(group, address)?;
    Some((allocation.handle_in(group, life)?, offset))
}

/// All-reduces of torch's tensors, by their addresses.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Quick {
    /// torch's types, by identity.
    types: Vec<(Py<PyAny>, &'static Type)>,
    /// torch's names of operators.
    operators: Vec<(String, ReduceOp)>,
    current_stream: Option<Py<PyAny>>,
}

impl Quick {
    /// The current stream of the memory's device; `None` if it is not known to be permanent.
    fn stream(&self, py: Python<'_>, place: Location) -> PyResult<Option<usize>> {
        let (Location::Cuda(number), Some(ask)) = (place, &self.current_stream) else {
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
        const OP: &str = "all_reduce";
        let named = |(object, name): (Py<PyAny>, String)| {
            let name = name.into_pyobject(py)?;
            Ok((object, Type::named(OP, name.as_any())?))
        };
        let operator =
            |(torchs, name): (String, String)| Ok((torchs, reduce_op(py, OP.into(), &name)?));
        Ok(Self {
            types: types.into_iter().map(named).collect::<PyResult<_>>()?,
            operators: operators.into_iter().map(operator).collect::<PyResult<_>>()?,
            current_stream,
        })
    }

    /// Reduces the `count` elements at `address` in place, or into as many at `out`, and says whether it did; if not, nothing
    /// was done. The tensors are contiguous, of the same type and on the same device.
    #[pyo3(signature = (address, count, dtype, operator, group, out=0, /))]
    fn all_reduce(
        &self,
        address: usize,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        operator: &str,
        group: &Bound<'_, Group>,
        out: usize,
    ) -> PyResult<bool> {
        let (py, group) = (group.py(), group.get());
        let Some((handle, offset)) = mapped(address, &group.inner, &group.life) else {
            return Ok(false);
        };
        let dtype = self.types.iter().find(|(known, _)| known.as_ptr() == dtype.as_ptr());
        let operator = self.operators.iter().find(|(known, _)| known == operator);
        let (Some((_, dtype)), Some((_, operator))) = (dtype, operator) else { return Ok(false) };
        let Some(stream) = self.stream(py, handle.place())? else { return Ok(false) };
        let (what, out) = ((*dtype, *operator), (out != 0).then_some(out));
        match handle.quick_all_reduce(what, (offset, count), out, stream) {
            Some(work) => detached(py, work).map(|()| true),
            None => Ok(false),
        }
    }
}
