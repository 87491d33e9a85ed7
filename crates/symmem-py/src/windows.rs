//! What NCCL does with symmetric memory of its own: communicators, windows, endpoints.
#![allow(unsafe_code)] // S4: communicators of others, which the caller keeps alive

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
        let why = "it is memory of the host: only available on memory of NCCL";
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

/// The endpoint by which kernels of NCCL reach the memory of `peer`, or of all ranks without one, and the offset there.
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

/// A communicator that somebody else has made, as the one on which a group's memory of NCCL is registered.
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
            // SAFETY: S4: the caller vouches for the pointer, as for those that it gives to torch.
            unsafe { nccl.register_external(&group.inner, &gpu, pointer) }
        })?;
        Ok(Self(Mutex::new(Some(made))))
    }

    /// Has later rendezvous use another. Again, it does nothing.
    fn unregister(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
