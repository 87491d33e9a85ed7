//! Memory of the heap. Allocating is collective; so is freeing for NVSHMEM, but dropping is local: what all ranks have let go
//! is given back at the next allocation, by all ranks in the same order, or the heaps would not stay alike.
#![allow(unsafe_code)] // S1, S4, S5

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::cuda::{DeviceBackend, agreed, as_its_gpu};
use super::region::Region;
use super::{Allocation, Backend, Exported};
use crate::cuda::Gpu;
use crate::cuda::nvshmem::{Heap, exhausted, heap_bytes};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::symmetric::Handle;
use crate::sync::lock;

const OP: &str = "alloc";
/// The most pieces that one allocation gives back: a message is short.
const AT_ONCE: usize = 512;
/// What addresses are multiples of.
const ALIGN: usize = 512;

/// The heap as a backend.
pub(crate) struct NvshmemMemory(pub(crate) Arc<Heap>);

impl NvshmemMemory {
    /// Collective over `group`.
    pub(super) fn open(gpu: &Gpu, group: &Group) -> Result<Arc<Self>> {
        Ok(Arc::new(Self(Heap::open(&gpu.of_driver(), group)?)))
    }
}

impl DeviceBackend for NvshmemMemory {
    fn unreached(&self, group: &Group) -> Option<usize> {
        self.0.unreached(group)
    }

    fn has_network(&self) -> bool {
        true
    }

    fn multicast(&self, _gpu: &Gpu, handle: &Handle, _fabric: bool) -> Result<Option<Region>> {
        self.0.multicast(handle)
    }
}

/// Memory of this rank; when it goes, the heap notes that this rank has let go.
struct Held {
    heap: Arc<Heap>,
    offset: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        lock(&self.heap.state).dropped.insert(self.offset);
    }
}

/// What a peer needs to find memory: the PE and the offset.
fn exported(pe: u32, offset: u64) -> Exported {
    let mut bytes = [0; 64];
    bytes[..4].copy_from_slice(&pe.to_le_bytes());
    bytes[8..16].copy_from_slice(&offset.to_le_bytes());
    Exported::Bytes(bytes)
}

/// The PE and the offset that a peer exported.
fn location(bytes: &[u8; 64]) -> (u32, u64) {
    let (mut pe, mut offset) = ([0; 4], [0; 8]);
    pe.copy_from_slice(&bytes[..4]);
    offset.copy_from_slice(&bytes[8..16]);
    (u32::from_le_bytes(pe), u64::from_le_bytes(offset))
}

impl Backend for NvshmemMemory {
    fn name(&self) -> &'static str {
        "nvshmem"
    }

    fn probe(&self) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Allocation> {
        let heap = &self.0;
        heap.gpu.collect();
        let held = heap.allocate(bytes)?;
        let (address, offset) = (heap.origin.wrapping_add(held.offset), held.offset);
        let region = Region::of_device(address, bytes, heap.gpu.in_use(held))?;
        heap.gpu.clear(&region, 0, bytes)?;
        let pe = heap.pe as u32;
        Ok(Allocation::new(region, move |_| Ok(exported(pe, offset))))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        let Exported::Bytes(exported) = exported else {
            let expected = "an offset in NVSHMEM's heap";
            return Err(Error::protocol("a peer", expected, "memory of another kind"));
        };
        let (pe, offset) = location(&exported);
        let own = self.0.origin.wrapping_add(offset);
        match self.0.call(|library| library.ptr(own, pe as i32))? {
            // The heap is mapped for as long as the process lives, and a rank that has a handle of the memory has a block of
            // its own, without which the peer's is not given back.
            Some(address) => Region::of_device(address, bytes, ()),
            None => Ok(Region::elsewhere(bytes)),
        }
    }

    as_its_gpu!(|self| self.0.gpu);
}

/// What a rank says before an allocation.
#[derive(Serialize, Deserialize)]
struct Proposal {
    /// What it has let go.
    dropped: Vec<u64>,
    device: [u8; 16],
    /// Bytes of the device that are free.
    free: usize,
}

/// Refuses what does not fit on a rank's device. The same on all ranks. NVSHMEM itself ends the process where its heap
/// cannot grow.
fn check_free(bytes: usize, proposals: &[Proposal]) -> Result<()> {
    for (rank, proposal) in proposals.iter().enumerate() {
        let together = proposals.iter().filter(|other| other.device == proposal.device).count();
        if bytes.checked_mul(together).is_none_or(|all| all > proposal.free) {
            let why =
                format!("{} are free on the device of rank {rank}, for {together}", proposal.free);
            return Err(Error::unavailable(heap_bytes(bytes), why));
        }
    }
    Ok(())
}

impl Heap {
    /// Gives back what all ranks have let go, and allocates. Collective over the heap's group.
    fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Held> {
        let group = self.group(OP)?;
        let terms = [
            ("operation", "allocation from NVSHMEM's heap".to_owned()),
            ("size", format!("{bytes} bytes")),
        ];
        let dropped: Vec<u64> = lock(&self.state).dropped.iter().take(AT_ONCE).copied().collect();
        let free = self.gpu.call(|driver| driver.memory_info())?.free;
        let proposal = Proposal { dropped: dropped.clone(), device: self.gpu.uuid(), free };
        group.agree_and(OP, &terms, proposal, |proposals: Vec<Proposal>| {
            check_free(bytes, &proposals)?;
            self.give_back(dropped, &proposals)?;
            let address = self.call(|library| library.align(ALIGN, bytes))?;
            let address = address.ok_or_else(|| exhausted(bytes))?;
            let offset = address.wrapping_sub(self.origin);
            Ok(Held { heap: Arc::clone(self), offset })
        })
    }

    /// Frees what is on all lists, in its order, which is the same on all ranks.
    fn give_back(&self, own: Vec<u64>, proposals: &[Proposal]) -> Result<()> {
        let dropped_by_all =
            |offset: &u64| proposals.iter().all(|proposal| proposal.dropped.contains(offset));
        for offset in own.into_iter().filter(dropped_by_all) {
            let address = self.origin.wrapping_add(offset);
            // SAFETY: S1: no rank has a block of it, nor anything in a stream that uses it.
            self.call(|library| unsafe { library.free(address) })?;
            lock(&self.state).dropped.remove(&offset);
        }
        Ok(())
    }

    /// The address of all ranks' segments, if NVSHMEM has one for the group's team on all of them. Collective.
    fn multicast(&self, handle: &Handle) -> Result<Option<Region>> {
        let (group, block) = (handle.group(), handle.block());
        let start = (block.region().address() - block.offset()) as u64;
        let found = self.known_team(group);
        let found = found.map(|team| self.call(|library| library.multicast_ptr(team, start)));
        let found = found.transpose().map(Option::flatten).and_then(|address| {
            let address = address.ok_or_else(no_multicast)?;
            Region::of_device(address, block.segment().bytes(), ())
        });
        Ok(agreed(group, found, |_| None)?.map(|(region, _)| region))
    }
}

fn no_multicast() -> Error {
    Error::unavailable("multicast", "NVSHMEM has no such address for a team of these ranks")
}
