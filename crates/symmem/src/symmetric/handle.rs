//! The handle: one allocation in one group, without a type. Raw pointers, for protocols of your own.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pad::SignalPad;
use crate::dtype::{DType, Element};
use crate::error::{Error, Failed, Result};
use crate::group::{Group, Memory, no_descriptor};
use crate::memory::block::{Block, Mapping, SegmentRange};
use crate::memory::region::Region;
use crate::memory::{Device, Exported, Multicast, Reach};
use crate::sync::Deadline;

const OP: &str = "rendezvous";

/// One allocation, as all ranks of one group mapped it. Cheap to clone; keeps the memory alive.
#[derive(Clone)]
pub struct Handle {
    group: Group,
    block: Arc<Block>,
    mapping: Arc<Mapping>,
    offset: usize,
}

impl Handle {
    /// Maps all counterparts of `block` in `group`; collective the first time, afterwards known.
    pub(crate) fn offer(block: &Arc<Block>, group: &Group, offer: &Offer<'_>) -> Result<Self> {
        let generation = group.generation();
        let is_read = matches!(offer.ownership, Ownership::Read(..));
        let usable = |known: &Arc<Mapping>| !is_read && !known.is_suspended(generation);
        let known = block.mapping(group.id()?).filter(usable);
        if matches!(offer.ownership, Ownership::Address) {
            block.set_raw(); // first: a peer on another host may put as soon as it has the handle
        }
        let mapping = match known {
            Some(known) => known,
            None => map_all(block, group, offer, group.deadline())?,
        };
        block.remember(group.id()?, &mapping);
        group.context().table.insert(block);
        let (group, block) = (group.clone(), Arc::clone(block));
        Ok(Self { group, block, mapping, offset: offer.offset })
    }

    /// Maps the block of each rank, whichever it is, and whatever has been mapped before. Collective.
    pub(crate) fn of_all(block: &Arc<Block>, group: &Group, deadline: Deadline) -> Result<Self> {
        let ownership = Ownership::Address;
        let offer = Offer { ownership, ..Offer::new(DType::U8) };
        let mapping = map_all(block, group, &offer, deadline)?;
        Ok(Self { group: group.clone(), block: Arc::clone(block), mapping, offset: 0 })
    }

    /// What keeps the memory, without the group.
    pub(crate) fn keep(&self) -> (Arc<Block>, Arc<Mapping>) {
        (Arc::clone(&self.block), Arc::clone(&self.mapping))
    }

    /// The same memory from byte `offset` of this handle on, which lies within it.
    pub(super) fn from(&self, offset: usize) -> Self {
        Self { offset: self.offset + offset, ..self.clone() }
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn block(&self) -> &Arc<Block> {
        &self.block
    }

    pub(crate) fn number(&self) -> u64 {
        self.mapping.number
    }

    /// The memory of this handle, as all ranks call it.
    #[inline]
    pub(crate) fn memory(&self) -> Memory {
        Memory::Rendezvous(self.mapping.number, self.offset)
    }

    /// A number that tells the memory of one handle from that of others; the same on all ranks.
    pub(crate) fn digest(&self) -> usize {
        self.mapping.number as usize ^ self.offset.rotate_left(32)
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The group of this handle.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The device of the memory.
    pub fn device(&self) -> Device {
        self.block.segment().backend.device()
    }

    /// The size in bytes of each rank's data, from this handle's offset on, as requested at allocation.
    pub fn buffer_size(&self) -> usize {
        self.block.shape().bytes - self.offset
    }

    /// The byte offset of this handle within the allocation.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes of this allocation's signal pad.
    pub fn signal_pad_size(&self) -> usize {
        self.block.shape().pad
    }

    /// An address that reaches all ranks at once, if the hardware has one.
    pub fn multicast_ptr(&self) -> Option<usize> {
        let address = self.mapping.attached.get::<Multicast>()?.address()?;
        Some(address + self.offset)
    }

    /// The addresses of all ranks' data as mapped here, by rank, this handle's offset applied; 0 for a rank that only the
    /// network connects.
    pub fn buffer_ptrs(&self) -> Vec<usize> {
        let all = (0..self.size()).filter_map(|r| self.mapping.data(r));
        let address = |data: Region| match data.reach() {
            Reach::Wire => 0,
            Reach::Host | Reach::Device => data.address() + self.offset,
        };
        all.map(address).collect()
    }

    /// Whether this rank reaches rank `rank`'s memory by an address, and not by the network alone.
    pub fn is_reachable(&self, rank: usize) -> bool {
        self.mapping.data(rank).is_some_and(|data| data.reach() != Reach::Wire)
    }

    /// Whether it reaches the memory of all ranks by an address.
    pub fn is_within_direct_access(&self) -> bool {
        (0..self.size()).all(|rank| self.is_reachable(rank))
    }

    /// The name of the backend that the memory is from.
    pub fn backend_name(&self) -> &'static str {
        self.block.segment().backend.name()
    }

    /// The addresses of all ranks' signal pads as mapped here, by rank; 0 for a rank that only the network connects.
    pub fn signal_pad_ptrs(&self) -> Vec<usize> {
        let pads = (0..self.size()).filter_map(|r| self.mapping.pad_region(r));
        pads.map(|pad| pad.address()).collect()
    }

    /// Rank `rank`'s data from this handle's offset on.
    pub(super) fn data(&self, op: &'static str, rank: usize) -> Result<Region> {
        self.group.check_rank(op, rank)?;
        let data = self.mapping.data(rank).ok_or_else(no_descriptor)?;
        data.part(self.offset, self.buffer_size())
    }

    /// A pointer to `len` elements of rank `rank`'s data, `offset` elements from this handle's start.
    /// Valid while this handle lives. The caller is responsible for synchronising the accesses through it.
    pub fn view<T: Element>(&self, rank: usize, offset: usize, len: usize) -> Result<NonNull<T>> {
        const OP: &str = "view";
        let data = self.data(OP, rank)?;
        let at = offset.saturating_mul(size_of::<T>());
        data.at(at, len).map_err(|e| match e {
            Error::Unavailable { .. } if self.device() == Device::Host => {
                self.group.out_of_reach(rank)
            }
            Error::Usage { .. } => self.group.usage(
                OP,
                format!("aligned elements within the {} bytes of rank {rank}", data.bytes()),
                format!("{len} of {} at element {offset}", T::DTYPE),
            ),
            other => other,
        })
    }

    /// This allocation's own signal pad, which belongs to the user.
    pub fn signal_pad(&self) -> SignalPad<'_> {
        SignalPad::new(&self.group, &self.mapping, self.signal_pad_size())
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({} bytes on {:?})", self.buffer_size(), self.group)
    }
}

impl Group {
    /// A handle to the living allocation that covers `address`, beginning there; `None` if none of this rank's does.
    /// Collective the first time for an allocation and group.
    pub fn rendezvous_at(&self, address: usize, dtype: DType) -> Result<Option<Handle>> {
        let found = self.context().table.find(address);
        let handle = |(block, offset)| {
            let ownership = Ownership::Address;
            Handle::offer(&block, self, &Offer { offset, ownership, ..Offer::new(dtype) })
        };
        found.map(handle).transpose()
    }

    /// The owner that a language binding gave to the allocation at `address`, and how far into its data that lies.
    #[doc(hidden)]
    pub fn owner_at(&self, address: usize) -> Option<(Arc<dyn Any + Send + Sync>, usize)> {
        let (block, offset) = self.context().table.find(address)?;
        Some((block.owner()?, offset))
    }

    /// Whether `address` lies in the data of a living symmetric allocation of this rank. No communication.
    pub fn is_symmetric(&self, address: usize) -> bool {
        self.context().table.find(address).is_some()
    }
}

/// What a rank offers to the others in a rendezvous, besides the memory.
#[derive(Clone, Copy)]
pub(crate) struct Offer<'a> {
    pub(crate) dtype: DType,
    /// Where its handle begins.
    pub(crate) offset: usize,
    pub(crate) ownership: Ownership,
    /// It is handed on as a fabric handle, which all ranks' memory has.
    pub(crate) over_fabric: bool,
    /// How ranks of other hosts get it, if it is of a device.
    pub(crate) far: Far<'a>,
    /// The rendezvous at which ranks found out on which devices they are. The same on all ranks.
    pub(crate) placement: Option<u64>,
}

impl Offer<'_> {
    /// All of a block that this rank owns.
    pub(crate) fn new(dtype: DType) -> Self {
        let ownership = Ownership::Owned;
        let far = Far::OverFabric;
        Self { dtype, offset: 0, ownership, over_fabric: false, far, placement: None }
    }
}

/// How ranks of other hosts get a device's memory. The same on all ranks.
#[derive(Clone, Copy)]
pub(crate) enum Far<'a> {
    /// By a fabric handle: then all ranks get that.
    OverFabric,
    /// Only if it needs no descriptor: without, they have no address of it.
    IfItCan,
    /// Not at all, for this reason.
    Never(&'a str),
}

/// By what right a rank offers memory.
#[derive(Clone, Copy)]
pub(crate) enum Ownership {
    /// It gave up the value that owned its part.
    Owned,
    /// It gave up the value, and others may be reading by right of that rendezvous (group and number). Collective in any
    /// case: success means that no rank of the group is reading or will be.
    Read(u128, u64),
    /// By its address: a value of it may live on.
    Address,
}

/// What a rank tells of the memory that it offers.
#[derive(Serialize, Deserialize)]
struct Contribution {
    range: SegmentRange,
    /// The rendezvous (group and number) by which peers may be reading it still. A rank that has a counterpart of
    /// that rendezvous must offer exactly that, which proves that it does not read.
    read_in: Option<(u128, u64)>,
    /// Why ranks of other hosts cannot have it, if they must.
    stays: Option<String>,
}

impl Contribution {
    fn read(rank: usize, bytes: &[u8]) -> Result<Self> {
        postcard::from_bytes(bytes).map_err(|e| Error::Protocol {
            with: format!("rank {rank}"),
            expected: "the position of its memory".into(),
            got: e.to_string(),
        })
    }
}

/// A device's memory on its way to ranks of which some are on other hosts.
struct Leaving {
    /// For all ranks alike.
    handle: Option<Exported>,
    stays: Option<String>,
}

impl Leaving {
    fn new(block: &Block, offer: &Offer<'_>) -> Self {
        match offer.far {
            Far::IfItCan => Self { handle: None, stays: None },
            Far::Never(why) => Self { handle: None, stays: Some(why.to_owned()) },
            Far::OverFabric => match block.segment().allocation.export(true) {
                Ok(handle) => Self { handle: Some(handle), stays: None },
                Err(e) => Self { handle: None, stays: Some(e.to_string()) },
            },
        }
    }
}

/// The error for memory of a device that does not get to other hosts.
fn stays(backend: &str, why: &str) -> Error {
    Error::Unavailable {
        what: format!("memory of the backend {backend} for ranks of several hosts"),
        why: format!(
            "it goes between hosts by fabric handles (multi-node NVLink), and {why}; over a network NCCL and NVSHMEM reach \
             memory of theirs (backends nccl, nvshmem)"
        ),
    }
}

/// Exchanges the ranks' memory and maps it: all of them agree and succeed, or none does.
fn map_all(
    block: &Arc<Block>,
    group: &Group,
    offer: &Offer<'_>,
    deadline: Deadline,
) -> Result<Arc<Mapping>> {
    group.check_free(OP, &*block.segment().backend)?;
    let read_in = match offer.ownership {
        Ownership::Read(group, number) => Some((group, number)),
        Ownership::Owned | Ownership::Address => None,
    };
    let (backend, placement) = (&block.segment().backend, offer.placement);
    let terms = [
        ("operation", "rendezvous of memory".to_owned()),
        ("size", format!("{} bytes", block.shape().bytes)),
        ("element type", offer.dtype.to_string()),
        ("device", backend.device().kind().to_owned()),
        ("backend", backend.name().to_owned()),
        ("signal pad size", format!("{} bytes", block.shape().pad)),
        ("placement of ranks", placement.map_or("none".into(), |n| format!("by rendezvous {n}"))),
    ];
    let on_host = backend.device() == Device::Host;
    let leaving = (!on_host && group.spans_hosts()).then(|| Leaving::new(block, offer));
    let keeps = leaving.as_ref().and_then(|leaving| leaving.stays.clone());
    let own = Contribution { range: block.range(), read_in, stays: keeps };
    let own = postcard::to_stdvec(&own).unwrap_or_default();
    let imports = &group.context().imports;
    let import = |rank: usize, brought: &[u8], memory: Option<Exported>| {
        if rank == group.rank() {
            return Ok((block.region().clone(), block.range()));
        }
        let Contribution { range, read_in, .. } = Contribution::read(rank, brought)?;
        let besides = (!matches!(offer.ownership, Ownership::Address)).then_some(block);
        if read_in.is_some_and(|(id, number)| group.context().table.holds(id, number, besides)) {
            let expected = format!("the counterpart of the memory of rank {rank}");
            return Err(group.usage(
                OP,
                expected,
                "other memory, while that counterpart is still in use".into(),
            ));
        }
        let may_stay = on_host || matches!(offer.far, Far::IfItCan);
        if memory.is_none() && !group.is_local(rank) && may_stay {
            return Ok((Region::elsewhere(block.shape().total().unwrap_or(0)), range));
        }
        let exported = || memory.ok_or_else(no_descriptor);
        let region = imports.block(backend.as_ref(), range, exported, block.shape())?;
        Ok((region, range))
    };
    let export = || {
        // From here on a peer may have it mapped, whatever becomes of this rendezvous.
        block.set_exposed();
        match &leaving {
            Some(Leaving { stays: Some(_), .. }) => Ok(None),
            Some(Leaving { handle: Some(handle), .. }) => handle.try_clone().map(Some),
            _ => block.segment().allocation.export(offer.over_fabric).map(Some),
        }
    };
    group.converse(OP, deadline, |conversation| {
        conversation.hold(&terms, own, export, |brought, memories| {
            for (rank, brought) in brought.iter().enumerate().filter(|_| leaving.is_some()) {
                if let Some(why) = Contribution::read(rank, brought)?.stays {
                    return Err(stays(backend.name(), &why));
                }
            }
            let ranks = brought.iter().zip(memories).enumerate();
            let blocks: Result<Vec<_>> = ranks.map(|(r, (b, m))| import(r, b, m)).collect();
            let (blocks, places) = blocks?.into_iter().unzip();
            let number = conversation.subject.number;
            let mapping = Mapping::new(number, blocks, places, block.shape(), group.downgrade());
            if !on_host {
                return Ok(Arc::new(mapping));
            }
            let mapping = mapping.with_mirrors(|rank| !group.is_local(rank))?;
            let mapping = Arc::new(mapping);
            group.serve(block, &mapping); // before any peer knows that we are here
            Ok(mapping)
        })
    })
}

/// Hands `kept` back with the error.
pub(super) fn keeping<K, T>(result: Result<T>, kept: K) -> Result<(T, K), Failed<K>> {
    match result {
        Ok(value) => Ok((value, kept)),
        Err(error) => Err(Failed { error, kept }),
    }
}
