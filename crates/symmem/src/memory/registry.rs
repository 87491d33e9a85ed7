//! All backends by name. A name stands for that backend and never for another: what is missing is an error that says so.

use std::sync::Arc;

use super::{Backend, Host, Process};
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::{cuda::Gpu, group::Group};

/// One backend.
#[derive(Debug)]
pub struct Entry {
    /// The name by which users choose it.
    pub name: &'static str,
    open: Open,
}

/// How it is opened. A backend for devices is opened on one of them, by all ranks of a group.
#[derive(Debug)]
enum Open {
    Host(fn() -> Arc<dyn Backend>),
    #[cfg(feature = "cuda")]
    Device(fn(&Gpu, &Group) -> Result<Gpu>),
}

/// All of them.
pub const BACKENDS: &[Entry] = &[
    Entry { name: "process", open: Open::Host(|| Arc::new(Process)) },
    Entry { name: "host", open: Open::Host(|| Arc::new(Host)) },
    #[cfg(feature = "cuda")]
    Entry { name: "cuda", open: Open::Device(|gpu, _| Ok(gpu.of_driver())) },
    #[cfg(feature = "cuda")]
    Entry { name: "nccl", open: Open::Device(|gpu, _| gpu.with_nccl(&crate::nccl::Nccl::load()?)) },
    #[cfg(feature = "cuda")]
    Entry {
        name: "nvshmem",
        open: Open::Device(|gpu, group| Ok(gpu.with(super::NvshmemMemory::open(gpu, group)?))),
    },
];

/// The names of those for devices, or of the others.
fn names(of_devices: bool) -> String {
    let wanted = BACKENDS.iter().filter(|entry| matches!(entry.open, Open::Host(_)) != of_devices);
    wanted.map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// The backend of main memory of this name.
pub(crate) fn by_name(name: &str) -> Result<Arc<dyn Backend>> {
    for entry in BACKENDS {
        if let (true, Open::Host(open)) = (entry.name == name, &entry.open) {
            return Ok(open());
        }
    }
    let expected = format!("a backend among {}", names(false));
    Err(Error::usage("backend", expected, format!("{name:?}")))
}

/// The variable that names the backend of devices where the program does not.
#[cfg(feature = "cuda")]
const VARIABLE: &str = "SYMMEM_CUDA_BACKEND";

#[cfg(feature = "cuda")]
impl Gpu {
    /// The same device, whose symmetric memory comes from the backend of this name. Without a name it is the one that
    /// `SYMMEM_CUDA_BACKEND` names, or else `cuda`. Collective over `group`.
    ///
    /// | name | memory | allocating |
    /// |---|---|---|
    /// | `cuda` | the driver's | local |
    /// | `nccl` | NCCL's, which a rendezvous registers as a window on the group's communicator: see [`Nccl`](crate::nccl::Nccl) | local |
    /// | `nvshmem` | NVSHMEM's heap | collective over the ranks of `group`, in the same order and with equal sizes |
    ///
    /// Rendezvous are as always, of any group of these ranks, and dropping is local. NVSHMEM is initialised by the first
    /// call of a process, with the ranks of `group`, one in each process; a later call is for the same ranks. Its memory
    /// goes back to the heap at the next allocation after all ranks have let go.
    ///
    /// [`Error::Unavailable`] if the library is not there, is too old, or cannot work with these ranks.
    pub fn with_backend(&self, name: Option<&str>, group: &Group) -> Result<Self> {
        let set = || std::env::var(VARIABLE).ok().filter(|set| !set.is_empty());
        let (name, from) = match name {
            Some(name) => (name.to_owned(), ""),
            None => (set().unwrap_or_else(|| "cuda".to_owned()), " (from SYMMEM_CUDA_BACKEND)"),
        };
        for entry in BACKENDS {
            if let (true, Open::Device(open)) = (entry.name == name, &entry.open) {
                return open(self, group);
            }
        }
        let expected = format!("a backend of devices among {}", names(true));
        Err(group.usage("with_backend", expected, format!("{name:?}{from}")))
    }

    /// The same device, with memory of this NCCL, from 2.27 on. Not collective.
    pub fn with_nccl(&self, nccl: &crate::nccl::Nccl) -> Result<Self> {
        Ok(self.with(super::nccl::NcclMemory::new(nccl, self)?))
    }
}
