//! The native half of the Python package `symmem`. The Python API follows; for now it has `__version__`.

/// The module `symmem._native`, re-exported by the package.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
