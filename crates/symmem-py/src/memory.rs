//! Allocations of this rank, how an address finds its allocation, and pools.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use symmem::cuda::Gpu;

use crate::array::Array;
use crate::dtype::Type;
use crate::error::usage;
use crate::failures;
use crate::group::Group;
use crate::handle::{self, Handle};
use crate::life::Life;
use crate::lock::unlocked;
use crate::mapped::Mapped;
use crate::stream::Used;
use crate::wait::detached;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Host,
    Cuda(u32),
}

impl Location {
    /// Only memory of devices has a choice of backends.
    pub(crate) fn check_backend(
        self,
        py: Python<'_>,
        op: &'static str,
        backend: Option<&str>,
    ) -> PyResult<()> {
        match backend {
            Some(name) if self == Self::Host => {
                let got = format!("{name:?} on the cpu");
                Err(usage(py, op, "a device for memory of a backend", got))
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Location {
    /// The device that Python names: None or "cpu", a number, or "cuda:N", also as `torch.device`.
    pub(crate) fn named(op: &'static str, given: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(given) = given else { return Ok(Self::Host) };
        if let Ok(number) = given.extract() {
            return Ok(Self::Cuda(number));
        }
        let text = given.str()?.to_string();
        let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match number {
            None if text == "cpu" => Ok(Self::Host),
            None => Err(usage(given.py(), op, "\"cpu\", a number or \"cuda:N\"", text)),
            Some(number) => Ok(Self::Cuda(number)),
        }
    }
}

/// A device with the named backend, or that of the environment. Collective over `group` for NVSHMEM.
pub(crate) fn open(
    number: u32,
    backend: Option<&str>,
    group: &symmem::Group,
) -> symmem::Result<Gpu> {
    Gpu::open(number)?.with_backend(backend, group)
}

/// What an allocation is in the library.
pub(crate) enum Buffer {
    Host(symmem::Buffer<u8>),
    Cuda(symmem::cuda::Buffer<u8>),
}

/// One allocation, for as long as anything uses it.
pub(crate) struct Allocation {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) place: Location,
    /// The streams that the library's calls on it went into, on a device.
    pub(crate) used: Option<Arc<Used>>,
    /// There until the end.
    buffer: Option<Buffer>,
    /// The last handle of each group that mapped it.
    handles: Mutex<Vec<Weak<handle::Inner>>>,
    /// An object of Python's, which it does not keep.
    attached: Mutex<Option<Py<PyWeakrefReference>>>,
}

impl Allocation {
    pub(crate) fn new(buffer: Buffer) -> Arc<Self> {
        let (address, bytes, place, used) = match &buffer {
            Buffer::Host(own) => (own.local().as_ptr() as usize, own.len(), Location::Host, None),
            Buffer::Cuda(own) => {
                failures::watch(own.gpu());
                let (place, used) = (Location::Cuda(own.gpu().number()), Used::new(own.gpu()));
                (own.address() as usize, own.len(), place, Some(Arc::new(used)))
            }
        };
        let (handles, attached) = (Mutex::default(), Mutex::default());
        let buffer = Some(buffer);
        let made = Arc::new(Self { address, bytes, place, used, buffer, handles, attached });
        let owner: Weak<dyn Any + Send + Sync> = Arc::<Self>::downgrade(&made);
        match &made.buffer {
            Some(Buffer::Host(own)) => own.set_owner(owner),
            Some(Buffer::Cuda(own)) => own.set_owner(owner),
            None => {}
        }
        made
    }

    /// The allocation at an address, by the library's table of a group's world, and how far into it that lies.
    pub(crate) fn at(group: &symmem::Group, address: usize) -> Option<(Arc<Self>, usize)> {
        let (owner, offset) = group.owner_at(address)?;
        Some((owner.downcast().ok()?, offset))
    }

    /// Notes a handle of this memory, in place of the former one of its group.
    pub(crate) fn note(&self, new: &Arc<handle::Inner>) {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let is_other = |known: &Weak<handle::Inner>| {
            known.strong_count() > 0 && !known.upgrade().is_some_and(|old| old.is_of_group_of(new))
        };
        handles.retain(is_other);
        handles.push(Arc::downgrade(new));
    }

    /// The last handle of this memory in a group of a world.
    pub(crate) fn handle_in(&self, group: &symmem::Group, life: &Arc<Life>) -> Option<Handle> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.iter().find_map(|known| Handle::of_group(known, group, life))
    }

    pub(crate) fn attached<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        attached.as_ref()?.bind(py).upgrade()
    }

    /// Maps all ranks' memory.
    fn rendezvous(&self, group: &symmem::Group) -> symmem::Result<Mapped> {
        match &self.buffer {
            Some(Buffer::Host(own)) => own.handle(group).map(Mapped::host),
            Some(Buffer::Cuda(own)) => own.symmetric(group).map(Mapped::device),
            None => Err(no_memory()),
        }
    }

    /// As when it is dropped, for callers that hold locks of their own and must not wait for the interpreter's.
    pub(crate) fn end(mut self) {
        if let Some(Buffer::Cuda(own)) = self.buffer.take() {
            end(own);
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Users of the memory may have work on it in their own streams.
        if let Some(Buffer::Cuda(own)) = self.buffer.take() {
            unlocked(move || end(own));
        }
    }
}

fn end(own: symmem::cuda::Buffer<u8>) {
    let _ = own.gpu().settle(); // a device that has failed runs nothing
}

/// Unreachable: an allocation has its memory until it is dropped.
fn no_memory() -> symmem::Error {
    symmem::Error::unavailable("memory", "it is being freed")
}

/// An allocation of this rank's symmetric memory. Arrays and handles of it keep it alive.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Memory(Mutex<Option<Arc<Allocation>>>);

impl Memory {
    pub(crate) fn new(allocation: Arc<Allocation>) -> Self {
        Self(Mutex::new(Some(allocation)))
    }

    fn held(&self, py: Python<'_>, op: &'static str) -> PyResult<Arc<Allocation>> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.clone().ok_or_else(|| usage(py, op, "memory that was not closed", "closed memory"))
    }
}

#[pymethods]
impl Memory {
    /// The address of the first byte.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.held(py, "address")?.address)
    }

    /// The size in bytes, as requested.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.held(py, "nbytes")?.bytes)
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.held(py, "device")?.place.to_string())
    }

    /// The backend of device memory: "cuda", "nccl" or "nvshmem"; None for host memory.
    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(match &self.held(py, "backend")?.buffer {
            Some(Buffer::Cuda(own)) => Some(own.gpu().backend_name()),
            Some(Buffer::Host(_)) | None => None,
        })
    }

    /// A view of the memory as an array of `dtype`, from byte `offset`; `shape` defaults to all of it in one dimension.
    #[pyo3(signature = (dtype=None, shape=None, offset=0))]
    fn view(
        &self,
        py: Python<'_>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<usize>>,
        offset: usize,
    ) -> PyResult<Array> {
        const OP: &str = "view";
        let held = self.held(py, OP)?;
        let dtype =
            dtype.map_or(Ok(Type::of(symmem::DType::U8)), |given| Type::named(OP, given))?;
        let shape = shape.unwrap_or_else(|| vec![held.bytes.saturating_sub(offset) / dtype.size()]);
        Array::check(py, OP, (held.bytes, offset), dtype, &shape)?;
        let used = held.used.clone();
        Ok(Array::new(held.address + offset, dtype, shape, held.place, (held, used)))
    }

    /// Maps all ranks' memory of this allocation. The first call for a group is collective; later calls are local.
    fn rendezvous(&self, py: Python<'_>, group: &Bound<'_, Group>) -> PyResult<Handle> {
        const OP: &str = "rendezvous";
        let (held, group) = (self.held(py, OP)?, group.get());
        group.check_open(py, OP)?;
        let mapped = detached(py, || held.rendezvous(&group.inner))?;
        Ok(Handle::new(mapped, held, Arc::clone(&group.life)))
    }

    /// Attaches an object, without keeping it: `Group.attached` finds it by any address in this memory.
    fn attach(&self, py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<()> {
        let new = PyWeakrefReference::new(object)?.unbind();
        let held = self.held(py, "attach")?;
        let had = held.attached.lock().unwrap_or_else(PoisonError::into_inner).replace(new);
        drop(had);
        Ok(())
    }

    /// Frees the memory as soon as no array or handle of it is left.
    fn close(&self) {
        let had = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(had); // not under the lock: it may wait for a device
    }

    fn __repr__(&self) -> String {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(held) => format!("symmem.Memory({} bytes on {})", held.bytes, held.place),
            None => "symmem.Memory(closed)".to_owned(),
        }
    }
}

/// The allocation that contains an address, or None. Looks in all worlds of this process that are alive.
#[pyfunction]
pub(crate) fn find(address: usize) -> Option<Memory> {
    let found = Life::all().iter().find_map(|life| Allocation::at(life.world(), address));
    found.map(|(allocation, _)| Memory::new(allocation))
}

/// A pool: small allocations, cut from large segments.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Pool {
    cutter: Cutter,
    _life: Arc<Life>,
}

enum Cutter {
    Host(symmem::Pool),
    Cuda(symmem::Pool<Gpu>),
}

impl Pool {
    pub(crate) fn new(
        py: Python<'_>,
        group: &Group,
        segment_bytes: usize,
        place: Location,
        backend: Option<&str>,
    ) -> PyResult<Self> {
        place.check_backend(py, "pool", backend)?;
        let cutter = match place {
            Location::Host => Cutter::Host(symmem::Pool::new(&group.inner, segment_bytes)),
            Location::Cuda(number) => {
                let gpu = detached(py, || open(number, backend, &group.inner))?;
                Cutter::Cuda(gpu.pool(&group.inner, segment_bytes))
            }
        };
        Ok(Self { cutter, _life: Arc::clone(&group.life) })
    }
}

#[pymethods]
impl Pool {
    /// Allocates as `Group.alloc` does, from the pool. The memory is not zeroed.
    fn alloc(&self, py: Python<'_>, nbytes: usize) -> PyResult<Memory> {
        let buffer = detached(py, || match &self.cutter {
            Cutter::Host(pool) => pool.alloc(nbytes).map(Buffer::Host),
            Cutter::Cuda(pool) => pool.alloc(nbytes).map(Buffer::Cuda),
        })?;
        Ok(Memory::new(Allocation::new(buffer)))
    }

    /// The bytes that the pool holds, and how many of them are in use.
    #[getter]
    fn usage(&self) -> (usize, usize) {
        match &self.cutter {
            Cutter::Host(pool) => pool.usage(),
            Cutter::Cuda(pool) => pool.usage(),
        }
    }
}
