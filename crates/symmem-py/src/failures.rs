//! Failures of groups on devices, for whoever takes results off a device or starts work there without a call of the library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use pyo3::prelude::*;
use symmem::cuda::Gpu;

use crate::error::exception;

/// The devices on which this process has had memory, by number.
static GPUS: RwLock<Vec<Gpu>> = RwLock::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// Has failures of groups on a device be looked for.
pub(crate) fn watch(gpu: &Gpu) {
    let is_known = |gpus: &[Gpu]| gpus.iter().any(|known| known.number() == gpu.number());
    if is_known(&GPUS.read().unwrap_or_else(PoisonError::into_inner)) {
        return;
    }
    let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
    if !is_known(&gpus) {
        gpus.push(gpu.clone());
    }
    // Release: pairs with the acquire below; whoever sees it finds the device.
    ANY.store(true, Ordering::Release);
}

/// Raises the failure of a group on any device of this process, if one has failed: the same one until its ranks are back in
/// step. Cheap, and waits for nothing.
#[pyfunction]
pub(crate) fn check_failures(py: Python<'_>) -> PyResult<()> {
    if !ANY.load(Ordering::Acquire) {
        return Ok(());
    }
    let gpus = GPUS.read().unwrap_or_else(PoisonError::into_inner);
    let looked = gpus.iter().try_for_each(Gpu::check_failures);
    drop(gpus);
    looked.map_err(|error| exception(py, error))
}
