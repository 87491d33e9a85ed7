//! NCCL's view of its symmetric memory: communicators, windows, endpoints.
#![allow(unsafe_code)] // S4: external communicators, which the caller keeps alive

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use symmem::cuda::{Gpu, Symmetric};
use symmem::nccl::{Nccl, Windowed};
use symmem::{Error, nccl};

use crate::group::Group;
use crate::handle::Handle;
use crate::nccl::Communicator;
use crate::wait::detached;

/// The memory as NCCL has it.
fn windowed<'a>(handle: &'a Handle, op: &str) -> symmem::Result<Windowed<'a, u8>> {
    handle.cuda().map(Symmetric::nccl).unwrap_or_else(|| {
        let why = "it is host memory: only available on memory of NCCL";
        Err(Error::unavailable(format!("{op} for this memory"), why))
    })
}

/// The communicator that a handle's memory is registered on.
#[pyfunction]
pub(crate) fn nccl_communicator_of(
    py: Python<'_>,
    handle: &Bound<'_, Handle>,
) -> PyResult<Communicator> {
    let handle = handle.get();
    let found = detached(py, || Ok(windowed(handle, "NCCL")?.communicator().clone()));
    found.map(Communicator::new)
}

/// The library's window (`ncclWindow_t`) onto a handle's memory.
#[pyfunction]
pub(crate) fn nccl_window_of(py: Python<'_>, handle: &Bound<'_, Handle>) -> PyResult<usize> {
    let handle = handle.get();
    detached(py, || Ok(windowed(handle, "NCCL")?.window()?.raw()))
}

/// The endpoint through which NCCL's kernels reach the memory of `peer`, or of all ranks, and the offset in it.
#[pyfunction]
#[pyo3(signature = (handle, peer = None))]
pub(crate) fn nccl_cft_handle(
    py: Python<'_>,
    handle: &Bound<'_, Handle>,
    peer: Option<usize>,
) -> PyResult<(u32, usize)> {
    let handle = handle.get();
    detached(py, || {
        let memory = windowed(handle, "an endpoint of NCCL")?;
        peer.map_or_else(|| memory.multicast_cft_handle(), |peer| memory.cft_handle(peer))
    })
}

/// An external communicator, on which a group's NCCL memory is registered.
#[pyclass(frozen, module = "symmem.nccl")]
pub(crate) struct External(Mutex<Option<nccl::External>>);

#[pymethods]
impl External {
    #[staticmethod]
    fn register(
        py: Python<'_>,
        group: &Bound<'_, Group>,
        device: u32,
        pointer: usize,
    ) -> PyResult<Self> {
        let group = group.get();
        group.check_open(py, "register_external")?;
        let made = detached(py, || {
            let (nccl, gpu) = (Nccl::load()?, Gpu::open(device)?);
            // SAFETY: S4: the caller guarantees that the pointer is a communicator, as for those that it gives to torch.
            unsafe { nccl.register_external(&group.inner, &gpu, pointer) }
        })?;
        Ok(Self(Mutex::new(Some(made))))
    }

    /// Ends the registration, for later rendezvous. A second call does nothing.
    fn unregister(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
