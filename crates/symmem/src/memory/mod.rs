//! Memory that every rank of a group can reach: the one seam between the library and what provides memory.
//!
//! A `Backend` allocates memory and exports it; the peer's backend imports that as a mapping. Each backend is a file or a
//! folder here: `process`, `host`, `cuda`, `nccl`, `nvshmem`. Which memory a group needs, and that all ranks agree, is
//! the group's business. What only one backend has (multicast addresses, windows) is an `Attachment` of its mappings.

mod attachments;
pub(crate) mod block;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod host;
mod multicast;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod nvshmem;
mod process;
pub(crate) mod region;
mod registry;
mod table;
pub(crate) mod units;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use attachments::{Attachment, Attachments};
pub(crate) use host::Host;
pub(crate) use multicast::Multicast;
#[cfg(feature = "cuda")]
pub(crate) use nvshmem::NvshmemMemory;
pub(crate) use process::Process;
pub(crate) use region::Region;
pub(crate) use registry::by_name;
pub(crate) use table::Table;

use crate::error::{Error, Result};
use crate::sync::Ordering;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// Main memory.
    Host,
    /// The CUDA device of this number among those that this process sees.
    Cuda(u32),
}

impl Device {
    /// The kind of device, in which all ranks of a rendezvous agree.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda(_) => "cuda",
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// A way to obtain memory that peers can map.
pub(crate) trait Backend: Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// Where its memory lies.
    fn device(&self) -> Device;

    /// Whether it can work here; `Unavailable` says what is missing.
    fn probe(&self) -> Result<()>;

    /// Zeroed memory of at least `bytes` (more than 0), all of it present. Not collective, unless the backend is a heap
    /// that all ranks have together.
    fn allocate(&self, bytes: usize) -> Result<Allocation>;

    /// Maps `bytes` of what a peer exported. [`Reach`] of the region says whether there is an address for it.
    fn import(&self, exported: Exported, bytes: usize) -> Result<Region>;

    /// Zeroes `bytes` of a region of its memory from `offset` on, before anybody else gets it.
    fn clear(&self, region: &Region, offset: usize, bytes: usize) -> Result<()> {
        let words = region.words(offset, bytes / size_of::<u32>())?;
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Ok(())
    }

    /// What it is in the middle of, if allocating or mapping memory now would disturb that.
    fn occupation(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Does `then` once nothing that is under way here can touch memory that its user has let go: at once, where work is
    /// done when its call returns.
    fn after_use(&self, then: Box<dyn FnOnce() + Send + Sync>) {
        then();
    }
}

/// How a peer's memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// By loads and stores of the host.
    Host,
    /// By an address of a device, for its kernels and copies.
    Device,
    /// Only through a wire: there is no address.
    Wire,
}

/// Memory that one rank allocated; given back when the last owner, here or in a peer, lets go.
#[derive(Clone)]
pub(crate) struct Allocation {
    /// The memory as mapped here.
    pub(crate) region: Region,
    /// What a peer needs to map it: a fabric handle if that is asked for, where the memory has one.
    export: Arc<dyn Fn(bool) -> Result<Exported> + Send + Sync>,
}

impl Allocation {
    fn new(
        region: Region,
        export: impl Fn(bool) -> Result<Exported> + Send + Sync + 'static,
    ) -> Self {
        Self { region, export: Arc::new(export) }
    }

    /// Of the host's memory, which has no fabric handles.
    fn of_host(
        region: Region,
        export: impl Fn() -> Result<Exported> + Send + Sync + 'static,
    ) -> Self {
        Self::new(region, move |over_fabric| match over_fabric {
            false => export(),
            true => Err(Error::unavailable("a fabric handle", "the memory has none")),
        })
    }

    pub(crate) fn export(&self, over_fabric: bool) -> Result<Exported> {
        (self.export)(over_fabric)
    }
}

/// Memory on its way to a peer.
#[derive(Debug)]
pub(crate) enum Exported {
    /// A descriptor, for a peer in another process.
    Descriptor(OwnedFd),
    /// Bytes that lead to memory of a device while its owner lives: a handle of the NVLink fabric, or an offset in the
    /// heap of a library that knows all ranks.
    Bytes([u8; 64]),
    /// The mapping itself, for a peer in this process.
    Mapping(Region),
}

impl Exported {
    /// The same for one peer more.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        Ok(match self {
            Self::Descriptor(fd) => {
                let fd = fd.try_clone().map_err(Error::system("dup of a memory descriptor"))?;
                Self::Descriptor(fd)
            }
            Self::Bytes(bytes) => Self::Bytes(*bytes),
            Self::Mapping(region) => Self::Mapping(region.clone()),
        })
    }
}
