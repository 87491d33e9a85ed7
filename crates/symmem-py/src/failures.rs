//! Failures of groups on devices, for code that synchronises with a device without calling the library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use pyo3::prelude::*;
use symmem::cuda::Gpu;

use crate::error::exception;

/// The devices on which this process has had memory, by number.
static GPUS: RwLock<Vec<Gpu>> = RwLock::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

/// Includes a device in later checks.
pub(crate) fn watch(gpu: &Gpu) {
    let is_known = |gpus: &[Gpu]| gpus.iter().any(|known| known.number() == gpu.number());
    if is_known(&GPUS.read().unwrap_or_else(PoisonError::into_inner)) {
        return;
    }
    let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
    if !is_known(&gpus) {
        gpus.push(gpu.clone());
    }
    // Release: pairs with the acquire below, after which the device is in the list.
    ANY.store(true, Ordering::Release);
}

/// Raises the failure of a group on any device of this process, if there is one; again until its ranks have called resync.
/// Cheap, and does not wait.
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
