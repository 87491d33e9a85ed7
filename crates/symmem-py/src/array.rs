//! A view of this rank's or a peer's symmetric memory, which numpy, torch and others use without a copy.

use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{self, Export};
use crate::dtype::Type;
use crate::error::usage;
use crate::memory::Location;
use crate::stream::Used;
use crate::wait::detached;

/// A view of memory with a type and a shape, in C order. It keeps the memory alive, and so do arrays made from it by
/// `numpy.asarray(array)`, `numpy.from_dlpack(array)` or `torch.from_dlpack(array)`.
#[pyclass(frozen, module = "symmem")]
pub(crate) struct Array {
    pub(crate) address: usize,
    pub(crate) dtype: &'static Type,
    pub(crate) shape: Vec<usize>,
    pub(crate) place: Location,
    keep: Arc<dyn Send + Sync>,
    /// The streams of a device in which the library's calls may have written it.
    used: Option<Arc<Used>>,
}

impl Array {
    /// The memory at `address`, which `keep` keeps alive, as elements of `dtype`. The caller has checked that it is long enough.
    pub(crate) fn new(
        address: usize,
        dtype: &'static Type,
        shape: Vec<usize>,
        place: Location,
        (keep, used): (Arc<dyn Send + Sync>, Option<Arc<Used>>),
    ) -> Self {
        Self { address, dtype, shape, place, keep, used }
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements from one entry to the next in each dimension.
    fn steps(&self) -> Vec<i64> {
        let mut step = 1_i64;
        let mut steps: Vec<i64> = Vec::with_capacity(self.shape.len());
        for len in self.shape.iter().rev() {
            steps.push(step);
            step = step.saturating_mul((*len).max(1) as i64);
        }
        steps.reverse();
        steps
    }

    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let typestr = self.dtype.typestr().ok_or_else(|| {
            PyAttributeError::new_err(format!("numpy has no {}; use DLPack", self.dtype.name))
        })?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (self.address, false))?;
        interface.set_item("strides", py.None())?;
        Ok(interface)
    }

    /// Waits for the library's calls on the memory in streams other than the consumer's. `stream` is as in DLPack: None or 1 for
    /// the default stream, 2 for the per-thread one, -1 if the consumer synchronises itself, or an address.
    fn be_ready(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let given: Option<i64> = stream.map(|given| given.extract()).transpose()?;
        let wrong =
            |why: &str| Err(PyBufferError::new_err(format!("stream: {why}, got {given:?}")));
        let consumer = match (self.place, given) {
            (_, Some(-1)) | (Location::Host, None) => return Ok(()),
            (Location::Host, _) => return wrong("host memory has no streams"),
            (Location::Cuda(_), None | Some(1)) => 0,
            (Location::Cuda(_), Some(0)) => {
                return wrong("1 is the default stream, and 2 the per-thread stream");
            }
            (Location::Cuda(_), Some(number)) => match usize::try_from(number) {
                Ok(raw) => raw,
                Err(_) => return wrong("expected None, -1, 1, 2 or an address"),
            },
        };
        match &self.used {
            Some(used) => detached(py, || used.finish_for(consumer)),
            None => Ok(()),
        }
    }

    /// Checks that a view of `dtype` and `shape` at byte `offset` lies within `bytes`; its elements' size in bytes.
    pub(crate) fn check(
        py: Python<'_>,
        op: &'static str,
        (bytes, offset): (usize, usize),
        dtype: &Type,
        shape: &[usize],
    ) -> PyResult<usize> {
        let elements = shape.iter().try_fold(1_usize, |all, len| all.checked_mul(*len));
        let wanted = elements.and_then(|all| all.checked_mul(dtype.size()));
        let end = wanted.and_then(|wanted| wanted.checked_add(offset));
        let fits = end.is_some_and(|end| end <= bytes);
        match wanted {
            Some(wanted) if fits && offset.is_multiple_of(dtype.size().min(16)) => Ok(wanted),
            _ => {
                let expected = format!("aligned elements within the {bytes} bytes of the memory");
                let got = format!("{shape:?} of {} at byte {offset}", dtype.name);
                Err(usage(py, op, expected, got))
            }
        }
    }
}

#[pymethods]
impl Array {
    /// Bytes of one element of a type.
    #[staticmethod]
    fn itemsize_of(dtype: &Bound<'_, PyAny>) -> PyResult<usize> {
        Type::named("empty", dtype).map(Type::size)
    }

    /// The number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The bytes from one element to the next in each dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let size = self.dtype.size() as i64;
        PyTuple::new(py, self.steps().into_iter().map(|step| step * size).collect::<Vec<_>>())
    }

    /// The name of the element type, such as "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    /// Bytes of one element.
    #[getter]
    fn itemsize(&self) -> usize {
        self.dtype.size()
    }

    /// The number of elements.
    #[getter]
    fn size(&self) -> usize {
        self.elements()
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// The address of the first element.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.place.to_string()
    }

    /// A view of the same memory with another type or shape, from byte `offset`.
    #[pyo3(signature = (dtype=None, shape=None, offset=0))]
    fn view(
        &self,
        py: Python<'_>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<usize>>,
        offset: usize,
    ) -> PyResult<Self> {
        const OP: &str = "view";
        let dtype = dtype.map_or(Ok(self.dtype), |given| Type::named(OP, given))?;
        let left = self.nbytes().saturating_sub(offset);
        let shape = shape.unwrap_or_else(|| vec![left / dtype.size()]);
        Self::check(py, OP, (self.nbytes(), offset), dtype, &shape)?;
        let keep = (Arc::clone(&self.keep), self.used.clone());
        Ok(Self::new(self.address + offset, dtype, shape, self.place, keep))
    }

    /// The memory as a numpy array, without a copy.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// numpy calls this if there is no `__array_interface__`.
    #[pyo3(signature = (*_arguments, **_options))]
    fn __array__(
        &self,
        py: Python<'_>,
        _arguments: &Bound<'_, PyTuple>,
        _options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let got = format!("{} on {}", self.dtype.name, self.place);
        Err(usage(py, "numpy", "a type that numpy has, on the host; use DLPack for others", got))
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.place {
            Location::Host => self.interface(py),
            Location::Cuda(_) => Err(PyAttributeError::new_err("memory of a device")),
        }
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.place {
            Location::Host => Err(PyAttributeError::new_err("memory of the host")),
            Location::Cuda(_) => self.interface(py),
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        match self.place {
            Location::Host => (dlpack::CPU, 0),
            Location::Cuda(number) => (dlpack::CUDA, number as i32),
        }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        self.be_ready(py, stream)?;
        if copy == Some(true) || dl_device.is_some_and(|asked| asked != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(
                "symmetric memory can only be shared without a copy, on its own device",
            ));
        }
        let export = Export {
            address: self.address,
            device: self.__dlpack_device__(),
            dtype: self.dtype,
            shape: self.shape.iter().map(|len| *len as i64).collect(),
            strides: self.steps(),
            _keep: Box::new(Arc::clone(&self.keep)),
        };
        export.into_capsule(py, max_version)
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.shape.first().copied();
        first.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("an array of no dimensions"))
    }

    fn __repr__(&self) -> String {
        let (shape, dtype, place) = (&self.shape, self.dtype.name, self.place);
        format!("symmem.Array(shape={shape:?}, dtype={dtype:?}, device=\"{place}\")")
    }
}
