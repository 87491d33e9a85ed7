//! NVSHMEM's heap as a source of symmetric memory.
//!
//! A process is one PE of NVSHMEM for as long as it lives. Addresses of peers' memory come from the library, none for peers
//! that only the network connects; where all have one, the library's kernels work as on any other memory. What the
//! library itself does in streams is in `ops.rs`, and reaches all.

mod ops;
mod rows;
mod teams;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use symmem_sys::nvshmem::{self as sys, Status, Team, UniqueId};

pub use ops::Nvshmem;
pub use symmem_sys::nvshmem::SignalOp;

use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::group::{Group, WeakGroup};
use crate::sync::lock;

/// What initialises it.
const OP: &str = "nvshmem";

/// The library's failure, as an error of this one.
pub(crate) fn failed(failure: sys::Failure) -> Error {
    let (call, code, why) = (failure.call, failure.status, failure.to_string());
    Error::Driver { library: "NVSHMEM", call, code, why }
}

/// The one heap of this process.
static HEAP: Mutex<Option<Arc<Heap>>> = Mutex::new(None);

/// NVSHMEM, initialised.
pub(crate) struct Heap {
    pub(crate) library: sys::Nvshmem,
    /// Its device, whose context is current in all calls.
    pub(crate) gpu: Gpu,
    /// World ranks by PE.
    pub(crate) members: Vec<usize>,
    pub(crate) pe: usize,
    /// By PE and PE: whether the one reaches the other's memory.
    reach: Vec<Vec<bool>>,
    /// Ranks share a device, which they use in turns: what has kernels of the library synchronise does not work.
    in_turns: bool,
    /// The address of a first allocation, from which offsets count: the same offset on all PEs.
    pub(crate) origin: u64,
    /// Whose ranks allocate together.
    group: Mutex<WeakGroup>,
    pub(crate) state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Offsets of memory that this rank has let go, and perhaps not all ranks.
    pub(crate) dropped: BTreeSet<u64>,
    /// By start, stride and size; none for one that this PE is not of.
    teams: HashMap<(i32, i32, i32), Option<Team>>,
}

impl Heap {
    /// The heap, with the ranks of `group`. Collective over it.
    pub(crate) fn open(gpu: &Gpu, group: &Group) -> Result<Arc<Self>> {
        if group.size() > 1 && group.context().mesh.in_one_process() {
            let why = "its ranks are processes, and these are threads of one".to_owned();
            return Err(Error::unavailable("NVSHMEM", why));
        }
        let mut known = lock(&HEAP);
        if let Some(heap) = &*known {
            heap.check_same(gpu, group)?;
            *lock(&heap.group) = group.weak();
            return Ok(Arc::clone(heap));
        }
        let heap = Arc::new(Self::initialise(gpu, group)?);
        *known = Some(Arc::clone(&heap));
        Ok(heap)
    }

    fn check_same(&self, gpu: &Gpu, group: &Group) -> Result<()> {
        if self.members == group.world_ranks() && self.gpu == *gpu {
            return Ok(());
        }
        let expected = format!(
            "ranks {:?} and {:?}, with which this process has initialised NVSHMEM",
            self.members, self.gpu
        );
        Err(group.usage(OP, expected, format!("{:?} and {gpu:?}", group.world_ranks())))
    }

    fn initialise(gpu: &Gpu, group: &Group) -> Result<Self> {
        let (rank, size) = (group.rank(), group.size());
        // A rank without it says so before the others wait for it inside NVSHMEM.
        let opened = library().and_then(|library| {
            let version = library.version().map_err(failed)?;
            let id = (rank == 0).then(|| library.unique_id()).transpose().map_err(failed)?;
            Ok((library, version, id))
        });
        let own =
            opened.as_ref().ok().map(|(_, version, id)| (*version, id.map(|id| id.0.to_vec())));
        let (library, id) = group.gather_and(OP, own, |all| {
            let (library, version, _) = opened?;
            let (versions, ids): (Vec<_>, Vec<_>) = all.into_iter().flatten().unzip();
            check_versions(version, &versions)?;
            let id = ids.into_iter().next().flatten().and_then(|id| id.try_into().ok());
            let none = || Error::protocol("rank 0", "a unique id of NVSHMEM", "none");
            Ok((library, UniqueId(id.ok_or_else(none)?)))
        })?;
        let joined = gpu.call(|_| Ok(library.init(&id, rank as i32, size as i32)))?.map_err(failed);
        group.gather_and(OP, (), |_| joined)?;
        Self::survey(gpu, group, library)
    }

    /// Which PEs reach which, as seen from a first allocation, which stays: what all know is the same on all.
    fn survey(gpu: &Gpu, group: &Group, library: sys::Nvshmem) -> Result<Self> {
        let seen = gpu.call(|_| {
            let look = || {
                let origin = library.malloc(512)?;
                let reaches = |pe| {
                    let there = origin.map(|origin| library.ptr(origin, pe)).transpose();
                    there.map(|address| address.flatten().is_some())
                };
                let row: sys::Result<Vec<bool>> = (0..group.size() as i32).map(reaches).collect();
                Ok((origin, row?, library.status()?))
            };
            Ok(look())
        })?;
        let seen = seen.map_err(failed);
        let row = seen.as_ref().map_or(Vec::new(), |(_, row, _)| row.clone());
        let (reach, origin, status) = group.gather_and(OP, row, |reach| {
            let (origin, _, status) = seen?;
            Ok((reach, origin.ok_or_else(|| exhausted(512))?, status))
        })?;
        let in_turns = status == Status::SharedInTurns;
        if in_turns {
            tracing::warn!(
                "ranks share {gpu:?} and use it in turns: NVSHMEM's own barriers and collectives need MPS, with \
                 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE so that all ranks stay within 100"
            );
        }
        Ok(Self {
            library,
            gpu: gpu.clone(),
            members: group.world_ranks().to_vec(),
            pe: group.rank(),
            reach,
            in_turns,
            origin,
            group: Mutex::new(group.weak()),
            state: Mutex::default(),
        })
    }

    /// Calls the library with the device's context current.
    pub(crate) fn call<R>(&self, f: impl FnOnce(&sys::Nvshmem) -> sys::Result<R>) -> Result<R> {
        self.gpu.call(|_| Ok(f(&self.library)))?.map_err(failed)
    }

    /// The group whose ranks it has, which all allocate together.
    pub(crate) fn group(&self, op: &'static str) -> Result<Group> {
        let why = "the group that it was opened with is gone; open it with its successor";
        let gone = || Error::unavailable(format!("{op} on NVSHMEM's heap"), why);
        lock(&self.group).upgrade().ok_or_else(gone)
    }

    /// The PE of each rank of a group.
    fn pes(&self, op: &'static str, group: &Group) -> Result<Vec<usize>> {
        let pe = |rank: &usize| self.members.iter().position(|member| member == rank);
        let pes: Option<Vec<usize>> = group.world_ranks().iter().map(pe).collect();
        pes.ok_or_else(|| {
            let expected = format!("a group of ranks with NVSHMEM, which are {:?}", self.members);
            group.usage(op, expected, format!("{:?}", group.world_ranks()))
        })
    }

    /// A rank of the group that not all others reach. The same on all ranks.
    pub(crate) fn unreached(&self, group: &Group) -> Option<usize> {
        let pes = self.pes(OP, group).ok()?;
        let reached = |to: usize| pes.iter().all(|&from| self.reach[from][to]);
        pes.iter().position(|&pe| !reached(pe))
    }
}

fn spelled((major, minor, patch): (i32, i32, i32)) -> String {
    format!("{major}.{minor}.{patch}")
}

/// Refuses libraries that differ in more than a patch: their PEs would talk at cross purposes.
fn check_versions(own: (i32, i32, i32), all: &[(i32, i32, i32)]) -> Result<()> {
    let alike = |other: &(i32, i32, i32)| (other.0, other.1) == (own.0, own.1);
    match all.iter().enumerate().find(|(_, other)| !alike(other)) {
        None if own.0 == 3 => Ok(()),
        None => {
            let why = format!("version 3 is needed, and this is {}", spelled(own));
            Err(Error::unavailable("NVSHMEM", why))
        }
        Some((rank, other)) => {
            let (ours, theirs) = (spelled(own), spelled(*other));
            Err(Error::Mismatch { op: OP, what: "version of NVSHMEM", rank, ours, theirs })
        }
    }
}

/// The library of this machine, not initialised.
fn library() -> Result<sys::Nvshmem> {
    sys::Nvshmem::open().map_err(|missing| Error::unavailable("NVSHMEM", missing.to_string()))
}

pub(crate) fn heap_bytes(bytes: usize) -> String {
    format!("{bytes} bytes of NVSHMEM's heap")
}

pub(crate) fn exhausted(bytes: usize) -> Error {
    let why = "it has not as much left; NVSHMEM_SYMMETRIC_SIZE sets its size";
    Error::unavailable(heap_bytes(bytes), why)
}
