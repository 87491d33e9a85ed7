//! The native part of the Python package `symmem`: classes over those of the library.
//!
//! A method determines the types of its arguments, releases the GIL while the library works (`wait.rs`), and converts an error
//! into an exception (`error.rs`).

mod argument;
mod array;
mod collectives;
mod dispatcher;
mod dlpack;
mod dtype;
mod error;
mod failures;
mod group;
mod handle;
mod life;
mod lock;
mod mapped;
mod memory;
mod messages;
mod nccl;
mod pad;
mod pluggable;
mod process_group;
mod queue;
mod quick;
mod refusal;
mod store;
mod stream;
mod wait;
mod windows;
mod world;

/// The module `symmem._native`, re-exported by the package.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::argument::span;
    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::dispatcher::{register_kernels, set_aside};
    #[pymodule_export]
    use super::failures::check_failures;
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::handle::Handle;
    #[pymodule_export]
    use super::life::{close_all, note_process};
    #[pymodule_export]
    use super::memory::{Memory, Pool, find};
    #[pymodule_export]
    use super::nccl::{Communicator, look_in, nccl_call, nccl_unique_id, nccl_version};
    #[pymodule_export]
    use super::pad::{set_signal_pad_size, signal_pad_size};
    #[pymodule_export]
    use super::pluggable::serve_pools;
    #[pymodule_export]
    use super::process_group::{ProcessGroup, ProcessGroupCall};
    #[pymodule_export]
    use super::queue::{Pending, Queue};
    #[pymodule_export]
    use super::quick::{Quick, forget_group, group_names, name_group};
    #[pymodule_export]
    use super::stream::keep_stream;
    #[pymodule_export]
    use super::windows::{External, nccl_cft_handle, nccl_communicator_of, nccl_window_of};
    #[pymodule_export]
    use super::world::World;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let names = super::collectives::Collective::OF_MEMORY.iter().map(|(name, _)| *name);
        module.add("COLLECTIVES", names.collect::<Vec<_>>())?;
        module.add("DTYPES", super::dtype::names(module.py())?)?;
        super::error::add_to(module)
    }
}
