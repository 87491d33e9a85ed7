//! Allocations of this rank, the table by which an address finds its allocation, and pools.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;
use symmem::cuda::Gpu;

use crate::array::Array;
use crate::dtype::Type;
use crate::error::usage;
use crate::failures;
use crate::group::{Group, Life};
use crate::handle::Handle;
use crate::lock::unlocked;
use crate::mapped::Mapped;
use crate::stream::Used;
use crate::wait::detached;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    Cuda(u32),
}

impl Place {
    pub(crate) fn is_host(self) -> bool {
        self == Self::Host
    }

    /// Only memory of devices has sources.
    pub(crate) fn check_source(
        self,
        py: Python<'_>,
        op: &'static str,
        source: Option<&str>,
    ) -> PyResult<()> {
        match source {
            Some(name) if self.is_host() => Err(usage(
                py,
                op,
                "a device for memory of a source",
                format!("{name:?} on the cpu"),
            )),
            _ => Ok(()),
        }
    }
}

impl From<symmem::Device> for Place {
    fn from(device: symmem::Device) -> Self {
        match device {
            symmem::Device::Cuda(number) => Self::Cuda(number),
            _ => Self::Host,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Place {
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

/// A device, with memory of the source that the caller names, or else the environment. Collective over `group` for NVSHMEM.
pub(crate) fn open(
    number: u32,
    source: Option<&str>,
    group: &symmem::Group,
) -> symmem::Result<Gpu> {
    Gpu::open(number)?.with_backend(source, group)
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
    pub(crate) place: Place,
    /// The streams that the library's calls on it went into, on a device.
    pub(crate) used: Option<Arc<Used>>,
    /// There until the end.
    buffer: Option<Buffer>,
}

/// All living allocations by address.
static ALLOCATIONS: Mutex<BTreeMap<usize, Weak<Allocation>>> = Mutex::new(BTreeMap::new());

fn allocations() -> MutexGuard<'static, BTreeMap<usize, Weak<Allocation>>> {
    // Nothing is done under the lock that could leave the table half changed.
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Allocation {
    pub(crate) fn new(place: Place, buffer: Buffer) -> Arc<Self> {
        let (address, bytes) = match &buffer {
            Buffer::Host(own) => (own.local().as_ptr() as usize, own.len()),
            Buffer::Cuda(own) => (own.address() as usize, own.len()),
        };
        let used = match &buffer {
            Buffer::Host(_) => None,
            Buffer::Cuda(own) => {
                failures::watch(own.gpu());
                Some(Arc::new(Used::new(own.gpu())))
            }
        };
        let made = Arc::new(Self { address, bytes, place, used, buffer: Some(buffer) });
        let mut all = allocations();
        all.retain(|_, known| known.strong_count() > 0);
        all.insert(address, Arc::downgrade(&made));
        made
    }

    /// Maps all ranks' counterparts.
    fn rendezvous(&self, group: &symmem::Group) -> symmem::Result<Mapped> {
        match &self.buffer {
            Some(Buffer::Host(own)) => own.handle(group).map(Mapped::host),
            Some(Buffer::Cuda(own)) => own.symmetric(group).map(Mapped::device),
            None => Err(no_memory()),
        }
    }

    /// As when it is dropped, for callers with locks of their own, who must not wait for that of the interpreter.
    pub(crate) fn end(mut self) {
        if let Some(Buffer::Cuda(own)) = self.buffer.take() {
            end(own);
        }
    }

    fn find(address: usize) -> Option<Arc<Self>> {
        let all = allocations();
        let (_, found) = all.range(..=address).next_back()?;
        found.upgrade().filter(|found| address - found.address < found.bytes.max(1))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Whoever was handed the memory has streams of its own, which may still be using it.
        if let Some(Buffer::Cuda(own)) = self.buffer.take() {
            unlocked(move || end(own));
        }
    }
}

fn end(own: symmem::cuda::Buffer<u8>) {
    let _ = own.gpu().settle(); // a device that has failed runs nothing
}

/// Nobody sees an allocation without its memory.
fn no_memory() -> symmem::Error {
    symmem::Error::unavailable("memory", "it is being given back")
}

/// An allocation of this rank's symmetric memory. Arrays and handles of it keep the memory too.
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

    /// Bytes, as asked for.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.held(py, "nbytes")?.bytes)
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.held(py, "device")?.place.to_string())
    }

    /// Where memory of a device comes from: "cuda", "nccl" or "nvshmem"; None for memory of the host.
    #[getter]
    fn source(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(match &self.held(py, "source")?.buffer {
            Some(Buffer::Cuda(own)) => Some(own.gpu().backend_name()),
            Some(Buffer::Host(_)) | None => None,
        })
    }

    /// The memory as an array of `dtype`, from byte `offset` on; `shape` defaults to all of it.
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

    /// Maps all ranks' counterparts of this memory. Collective over `group`, the first time for this memory and group.
    fn rendezvous(&self, py: Python<'_>, group: &Bound<'_, Group>) -> PyResult<Handle> {
        const OP: &str = "rendezvous";
        let (held, group) = (self.held(py, OP)?, group.get());
        group.check_open(py, OP)?;
        let mapped = detached(py, || held.rendezvous(&group.inner))?;
        Ok(Handle::new(mapped, held, Arc::clone(&group.life)))
    }

    /// Gives the memory up, once its arrays and handles are gone.
    fn close(&self) {
        let had = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(had); // not under the lock, for it may take a while
    }

    fn __repr__(&self) -> String {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(held) => format!("symmem.Memory({} bytes on {})", held.bytes, held.place),
            None => "symmem.Memory(closed)".to_owned(),
        }
    }
}

/// The allocation of this process that contains an address, or None.
#[pyfunction]
pub(crate) fn find(address: usize) -> Option<Memory> {
    Allocation::find(address).map(Memory::new)
}

/// Cuts small allocations from large ones.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Pool {
    place: Place,
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
        place: Place,
        source: Option<&str>,
    ) -> PyResult<Self> {
        place.check_source(py, "pool", source)?;
        let cutter = match place {
            Place::Host => Cutter::Host(symmem::Pool::new(&group.inner, segment_bytes)),
            Place::Cuda(number) => {
                let gpu = detached(py, || open(number, source, &group.inner))?;
                Cutter::Cuda(gpu.pool(&group.inner, segment_bytes))
            }
        };
        Ok(Self { place, cutter, _life: Arc::clone(&group.life) })
    }
}

#[pymethods]
impl Pool {
    /// As `Group.alloc`, from the pool: it holds what its last user left.
    fn alloc(&self, py: Python<'_>, nbytes: usize) -> PyResult<Memory> {
        let buffer = detached(py, || match &self.cutter {
            Cutter::Host(pool) => pool.alloc(nbytes).map(Buffer::Host),
            Cutter::Cuda(pool) => pool.alloc(nbytes).map(Buffer::Cuda),
        })?;
        Ok(Memory::new(Allocation::new(self.place, buffer)))
    }

    /// Bytes that the pool holds in all, and bytes of them in use.
    #[getter]
    fn usage(&self) -> (usize, usize) {
        match &self.cutter {
            Cutter::Host(pool) => pool.usage(),
            Cutter::Cuda(pool) => pool.usage(),
        }
    }
}
