//! Where symmetric memory of a device comes from: the driver, or a library that has a heap of its own.
//!
//! Whatever the source, users hold the same `Buffer` and `Symmetric`, and kernels get the same addresses. A source is chosen
//! once, by name, and never another in its place: what is missing is an error that says so.

use std::sync::Arc;

use super::comm::Comm;
use super::gpu::Gpu;
use super::multicast;
use super::nvshmem::{Heap, Memory};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::symmetric::Handle;

/// The variable that names the source where the program does not.
const VARIABLE: &str = "SYMMEM_CUDA_BACKEND";
/// All of them.
const NAMES: [&str; 2] = ["cuda", "nvshmem"];

#[derive(Clone)]
pub(super) enum Source {
    /// The driver's own memory, which peers map.
    Driver,
    /// NVSHMEM's heap.
    Nvshmem(Arc<Heap>),
}

impl Source {
    fn name(&self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvshmem(_) => "nvshmem",
        }
    }

    /// A rank of the group that not all others reach by an address. The same on all ranks.
    pub(super) fn apart(&self, group: &Group) -> Option<usize> {
        match self {
            Self::Driver => None,
            Self::Nvshmem(heap) => heap.apart(group),
        }
    }

    /// Gives all ranks' parts of `handle` one address more; none, if one rank cannot. Collective.
    pub(super) fn set_up_multicast(&self, gpu: &Gpu, handle: &Handle, comm: &Comm) -> Result<()> {
        match self {
            Self::Driver => multicast::set_up(gpu, handle, comm.over_fabric),
            Self::Nvshmem(heap) => heap.set_up_multicast(handle),
        }
    }
}

impl Gpu {
    /// The same device, whose symmetric memory comes from the source of this name: `cuda`, the driver; or `nvshmem`,
    /// NVSHMEM's heap. Without a name it is the one that `SYMMEM_CUDA_BACKEND` names, or else the driver. Collective over
    /// `group`.
    ///
    /// NVSHMEM is initialised by the first call of a process, with the ranks of `group`, one in each process; a later call
    /// is for the same ranks. Allocating from its heap is collective over them, in the same order and with equal sizes;
    /// rendezvous are as always, of any group of these ranks. Dropping is local: memory goes back to the heap at the next
    /// allocation after all ranks have let go.
    ///
    /// [`Error::Unavailable`] if the library is not there, or cannot work with these ranks: never another source instead.
    pub fn with_source(&self, name: Option<&str>, group: &Group) -> Result<Self> {
        let set = || std::env::var(VARIABLE).ok().filter(|set| !set.is_empty());
        let (name, from) = match name {
            Some(name) => (name.to_owned(), ""),
            None => (set().unwrap_or_else(|| "cuda".to_owned()), " (from SYMMEM_CUDA_BACKEND)"),
        };
        let source = match name.as_str() {
            "cuda" => Source::Driver,
            "nvshmem" => Source::Nvshmem(Heap::open(&self.of_driver(), group)?),
            _ => {
                let expected = format!("a source among {}", NAMES.join(", "));
                return Err(group.usage("with_source", expected, format!("{name:?}{from}")));
            }
        };
        Ok(self.taking_from(source))
    }

    /// The name of its memory's source.
    pub fn source_name(&self) -> &'static str {
        self.source().name()
    }

    /// The same device, with the driver's memory.
    pub(super) fn of_driver(&self) -> Self {
        self.taking_from(Source::Driver)
    }

    /// What symmetric memory is allocated by.
    pub(super) fn memory(&self) -> Arc<dyn Backend> {
        match self.source() {
            Source::Driver => Arc::new(self.clone()),
            Source::Nvshmem(heap) => Arc::new(Memory(Arc::clone(heap))),
        }
    }

    /// NVSHMEM's heap, where it is the source.
    pub(super) fn heap(&self) -> Result<&Arc<Heap>> {
        match self.source() {
            Source::Nvshmem(heap) => Ok(heap),
            other => Err(Error::Unavailable {
                what: "NVSHMEM for this memory".into(),
                why: format!("its source is {}", other.name()),
            }),
        }
    }
}
