//! NCCL communicators, and the calls of `symmem.nccl`, which checks all arguments first.
#![allow(unsafe_code)] // S5: addresses and streams that the package has checked, of arrays that the caller holds

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmem::cuda::{Gpu, Stream};
use symmem::nccl::{Communicator as Inner, Nccl, Operator, Source, Target, UniqueId};
use symmem::{DType, Deadline, Error};

use crate::dtype::Type;
use crate::error::{exception, usage};
use crate::group::{Group, seconds};
use crate::wait::detached;

/// Adds folders, which are entries of `sys.path`, to the search for libraries that are installed as Python packages.
#[pyfunction]
pub(crate) fn look_in(folders: Vec<PathBuf>) {
    folders.into_iter().for_each(symmem::nccl::look_in);
}

/// The version of NCCL: three numbers, and the suffix of its file name.
#[pyfunction]
pub(crate) fn nccl_version(py: Python<'_>) -> PyResult<(i32, i32, i32, Option<String>)> {
    let version = detached(py, || Ok(Nccl::load()?.version()))?;
    Ok((version.major, version.minor, version.patch, version.suffix))
}

/// The unique id with which the ranks of a new communicator connect.
#[pyfunction]
pub(crate) fn nccl_unique_id(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let id = detached(py, || Nccl::load()?.unique_id())?;
    Ok(PyBytes::new(py, id.as_bytes()))
}

/// One rank's end of a communicator of NCCL.
#[pyclass(frozen, module = "symmem.nccl")]
pub(crate) struct Communicator {
    /// There until this is dropped.
    inner: Option<Inner>,
}

impl Communicator {
    pub(crate) fn new(inner: Inner) -> Self {
        Self { inner: Some(inner) }
    }

    fn get(&self, py: Python<'_>) -> PyResult<&Inner> {
        self.inner.as_ref().ok_or_else(|| usage(py, "nccl", "a communicator", "none"))
    }
}

/// The deadline of a communicator's calls: the caller's, or that of all waits.
fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Deadline> {
    match timeout {
        Some(given) => seconds(py, given).map(Deadline::within),
        None => Nccl::deadline().map_err(|e| exception(py, e)),
    }
}

#[pymethods]
impl Communicator {
    #[staticmethod]
    #[pyo3(signature = (num_ranks, uid, rank, device, timeout = None))]
    fn init_rank(
        py: Python<'_>,
        num_ranks: usize,
        uid: &[u8],
        rank: usize,
        device: u32,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let deadline = deadline(py, timeout)?;
        detached(py, || {
            let (id, gpu) = (UniqueId::from_bytes(uid)?, Gpu::open(device)?);
            Nccl::load()?.communicator(&gpu, num_ranks, &id, rank, deadline)
        })
        .map(Self::new)
    }

    #[staticmethod]
    #[pyo3(signature = (devices, timeout = None))]
    fn of_devices(py: Python<'_>, devices: Vec<u32>, timeout: Option<f64>) -> PyResult<Vec<Self>> {
        let deadline = deadline(py, timeout)?;
        let made = detached(py, || {
            let gpus: symmem::Result<Vec<Gpu>> = devices.iter().map(|n| Gpu::open(*n)).collect();
            Nccl::load()?.of_devices(&gpus?, deadline)
        })?;
        Ok(made.into_iter().map(Self::new).collect())
    }

    #[staticmethod]
    fn of_group(py: Python<'_>, group: &Bound<'_, Group>, device: u32) -> PyResult<Self> {
        let group = group.get();
        group.check_open(py, "communicator")?;
        let made = detached(py, || Nccl::load()?.of_group(&group.inner, &Gpu::open(device)?));
        made.map(Self::new)
    }

    /// An external communicator, such as torch's, whose owner will destroy it.
    #[staticmethod]
    #[pyo3(signature = (pointer, device, timeout = None))]
    fn adopt(py: Python<'_>, pointer: usize, device: u32, timeout: Option<f64>) -> PyResult<Self> {
        let deadline = deadline(py, timeout)?;
        detached(py, || {
            // SAFETY: the caller guarantees that the pointer is a communicator, as for those that it gives to torch.
            unsafe { Nccl::load()?.adopt(&Gpu::open(device)?, pointer, deadline) }
        })
        .map(Self::new)
    }

    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.rank())
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.size())
    }

    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.get(py)?.gpu().number())
    }

    /// The library's own handle (`ncclComm_t`); 0 after its end.
    #[getter]
    fn raw(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.raw())
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.get(py)?;
        detached(py, || inner.check())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.get(py)?.clone();
        detached(py, || inner.close())
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.get(py)?;
        py.detach(|| inner.abort());
        Ok(())
    }

    #[pyo3(signature = (color, key = 0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i32) -> PyResult<Option<Self>> {
        let inner = self.get(py)?;
        Ok(detached(py, || inner.split(color, key))?.map(Self::new))
    }

    fn shrink(&self, py: Python<'_>, excluded: Vec<usize>) -> PyResult<Self> {
        let inner = self.get(py)?;
        detached(py, || inner.shrink(&excluded)).map(Self::new)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("{:?}", self.get(py)?))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Closing may wait for the device, so release the GIL; during shutdown no other thread needs it.
        let mut inner = self.inner.take();
        let _ = Python::try_attach(|py| py.detach(|| drop(inner.take())));
    }
}

/// Address and number of elements.
type Span = (u64, usize);

/// One collective on several communicators, in one NCCL group: each has its input, output and stream.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "only the package calls it")]
pub(crate) fn nccl_call(
    py: Python<'_>,
    name: &str,
    communicators: Vec<Bound<'_, Communicator>>,
    inputs: Vec<Span>,
    outputs: Vec<Span>,
    streams: Vec<usize>,
    dtype: &str,
    op: i32,
    root: usize,
) -> PyResult<()> {
    let dtype = Type::by_name(dtype).and_then(Type::number);
    let dtype = dtype.ok_or_else(|| usage(py, "nccl", "a type of the library's", name))?;
    let communicators: PyResult<Vec<Inner>> =
        communicators.iter().map(|one| one.get().get(py).cloned()).collect();
    let communicators = communicators?;
    detached(py, || {
        let Some(first) = communicators.first() else { return Ok(()) };
        let each = communicators.iter().zip(&inputs).zip(&outputs).zip(&streams);
        first.nccl().group(|| {
            for (((communicator, input), output), stream) in each {
                // SAFETY: the package has found it to be a stream of this device, which the caller holds.
                let stream = unsafe { Stream::from_raw(communicator.gpu(), *stream) };
                one(name, communicator, (*input, *output, dtype), (op, root), &stream)?;
            }
            Ok(())
        })
    })
}

fn one(
    name: &str,
    communicator: &Inner,
    (input, output, dtype): (Span, Span, DType),
    (op, root): (i32, usize),
    stream: &Stream,
) -> symmem::Result<()> {
    // SAFETY: the package has found so many elements there, on this device, which the caller keeps until the stream has passed.
    let from = unsafe { Source::from_raw(input.0, input.1, dtype) };
    // SAFETY: likewise.
    let to = unsafe { Target::from_raw(output.0, output.1, dtype) };
    let op = Operator::from_code(op);
    match name {
        "all_reduce" => communicator.all_reduce(from, to, op, stream),
        "reduce" => communicator.reduce(from, Some(to), op, root, stream),
        "broadcast" => communicator.broadcast(to, root, stream),
        "all_gather" => communicator.all_gather(from, to, stream),
        "reduce_scatter" => communicator.reduce_scatter(from, to, op, stream),
        other => Err(Error::usage("nccl", "a collective", other)),
    }
}
