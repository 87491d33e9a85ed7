//! The choice of where symmetric memory of a device comes from.
//!
//! Whatever the source, users hold the same `Buffer` and `Symmetric`, and kernels get addresses of the same kind. A source is
//! chosen by name, and never another in its place: what is missing is an error that says so.

use crate::cuda::Gpu;
use crate::error::Result;
use crate::group::Group;
use crate::nccl::{Nccl, Windows};

/// The variable that names the source where the program does not.
const VARIABLE: &str = "SYMMEM_CUDA_BACKEND";
/// All of them.
const NAMES: [&str; 3] = ["cuda", "nccl", "nvshmem"];

impl Gpu {
    /// The same device, whose symmetric memory comes from the source of this name. Without a name it is the one that
    /// `SYMMEM_CUDA_BACKEND` names, or else `cuda`. Collective over `group`.
    ///
    /// | name | memory | allocating |
    /// |---|---|---|
    /// | `cuda` | the driver's | local |
    /// | `nccl` | NCCL's, which a rendezvous registers as a window on the group's communicator: see [`Nccl`] | local |
    /// | `nvshmem` | NVSHMEM's heap | collective over the ranks of `group`, in the same order and with equal sizes |
    ///
    /// Rendezvous are as always, of any group of these ranks, and dropping is local. NVSHMEM is initialised by the first
    /// call of a process, with the ranks of `group`, one in each process; a later call is for the same ranks. Its memory
    /// goes back to the heap at the next allocation after all ranks have let go.
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) if the library is not there, is too old, or cannot work with these
    /// ranks.
    pub fn with_source(&self, name: Option<&str>, group: &Group) -> Result<Self> {
        let set = || std::env::var(VARIABLE).ok().filter(|set| !set.is_empty());
        let (name, from) = match name {
            Some(name) => (name.to_owned(), ""),
            None => (set().unwrap_or_else(|| "cuda".to_owned()), " (from SYMMEM_CUDA_BACKEND)"),
        };
        match name.as_str() {
            "cuda" => Ok(self.of_driver()),
            "nccl" => self.with_nccl(&Nccl::load()?),
            "nvshmem" => self.of_nvshmem(group),
            _ => {
                let expected = format!("a source among {}", NAMES.join(", "));
                Err(group.usage("with_source", expected, format!("{name:?}{from}")))
            }
        }
    }

    /// The same device, with memory of this NCCL, from 2.27 on. Not collective.
    pub fn with_nccl(&self, nccl: &Nccl) -> Result<Self> {
        Windows::of(nccl, &self.of_driver()).map(|windows| self.provided_by(windows))
    }
}
