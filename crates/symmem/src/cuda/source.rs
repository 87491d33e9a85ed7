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

/// A library beyond this layer that memory comes from: the driver's own kind of memory, which peers map as any other.
pub(crate) trait Provider: Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// What allocates.
    fn backend(&self) -> Arc<dyn Backend>;

    /// Does with all ranks' memory what the library wants, once it is mapped. Collective.
    fn mapped(&self, handle: &Handle) -> Result<()>;
}

#[derive(Clone)]
pub(super) enum Source {
    /// The driver's own memory, which peers map.
    Driver,
    /// NVSHMEM's heap.
    Nvshmem(Arc<Heap>),
    /// Another library.
    Provided(Arc<dyn Provider>),
}

impl Source {
    fn name(&self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvshmem(_) => "nvshmem",
            Self::Provided(provider) => provider.name(),
        }
    }

    /// A rank of the group that not all others reach by an address. The same on all ranks.
    pub(super) fn apart(&self, group: &Group) -> Option<usize> {
        match self {
            Self::Driver | Self::Provided(_) => None,
            Self::Nvshmem(heap) => heap.apart(group),
        }
    }

    /// Gives all ranks' parts of `handle` one address more; none, if one rank cannot. Collective.
    pub(super) fn set_up_multicast(&self, gpu: &Gpu, handle: &Handle, comm: &Comm) -> Result<()> {
        match self {
            Self::Driver | Self::Provided(_) => multicast::set_up(gpu, handle, comm.over_fabric),
            Self::Nvshmem(heap) => heap.set_up_multicast(handle),
        }
    }

    /// Does what is left to do once all ranks' memory is mapped. Collective.
    pub(super) fn mapped(&self, handle: &Handle) -> Result<()> {
        match self {
            Self::Driver | Self::Nvshmem(_) => Ok(()),
            Self::Provided(provider) => provider.mapped(handle),
        }
    }
}

impl Gpu {
    /// The same device, with memory of NVSHMEM's heap: see [`Gpu::with_source`]. Collective over `group`.
    pub(crate) fn of_nvshmem(&self, group: &Group) -> Result<Self> {
        Ok(self.taking_from(Source::Nvshmem(Heap::open(&self.of_driver(), group)?)))
    }

    /// The same device, with memory of another library.
    pub(crate) fn provided_by(&self, provider: Arc<dyn Provider>) -> Self {
        self.taking_from(Source::Provided(provider))
    }

    /// The name of its memory's source.
    pub fn source_name(&self) -> &'static str {
        self.source().name()
    }

    /// The same device, with the driver's memory.
    pub(crate) fn of_driver(&self) -> Self {
        self.taking_from(Source::Driver)
    }

    /// What symmetric memory is allocated by.
    pub(super) fn memory(&self) -> Arc<dyn Backend> {
        match self.source() {
            Source::Driver => Arc::new(self.clone()),
            Source::Nvshmem(heap) => Arc::new(Memory(Arc::clone(heap))),
            Source::Provided(provider) => provider.backend(),
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
