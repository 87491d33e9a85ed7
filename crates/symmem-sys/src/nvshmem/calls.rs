//! The functions as methods. Those that allocate, free or make teams are collective over all PEs, or over the team.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::raw::{INIT_WITH_UNIQUE_ID, InitAttr, RawUniqueId, Reduce, TEAM_INVALID};
use super::{Compare, Failure, Nvshmem, Result, SignalOp, Status, Team, UniqueId};
use crate::cuda::{Module, Stream};

/// An address, where the library gave one.
fn given(address: Result<u64>) -> Result<Option<u64>> {
    address.map(|address| (address != 0).then_some(address))
}

/// What may be called at any time.
impl Nvshmem {
    /// The functions that this version does not have.
    pub fn missing(&self) -> Vec<&'static str> {
        self.c.missing()
    }

    /// Its version: major, minor, patch.
    pub fn version(&self) -> Result<(i32, i32, i32)> {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: it only writes the three numbers.
        unsafe { self.c.nvshmemx_vendor_get_version_info(&mut major, &mut minor, &mut patch) }?;
        Ok((major, minor, patch))
    }

    /// How far it is.
    pub fn status(&self) -> Result<Status> {
        // SAFETY: it only reads a number of the library's.
        Ok(match unsafe { self.c.nvshmemx_init_status() }? {
            0 => Status::NotInitialised,
            1 => Status::Bootstrapped,
            2 => Status::Initialised,
            3 => Status::SharedInTurns,
            4 => Status::Shared,
            other => Status::Other(other),
        })
    }

    /// An id for a job, of which this process will be one.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = RawUniqueId::EMPTY;
        // SAFETY: it writes a structure of that version and size.
        unsafe { self.c.nvshmemx_get_uniqueid(&mut id) }?;
        Ok(UniqueId(id.to_bytes()))
    }

    /// Joins the job as PE `rank` of `ranks`, on the device of the current context. Collective.
    pub fn init(&self, id: &UniqueId, rank: i32, ranks: i32) -> Result<()> {
        let id = RawUniqueId::from_bytes(&id.0);
        let mut attributes = InitAttr::new(&id, rank, ranks);
        let flags = INIT_WITH_UNIQUE_ID;
        // SAFETY: structures of the version and size that they say, which outlive the call.
        unsafe { self.c.nvshmemx_hostlib_init_attr(flags, &mut attributes) }
    }
}

/// What needs `init` first.
impl Nvshmem {
    /// Leaves the job. Collective.
    ///
    /// # Safety
    /// Nobody uses memory of the heap, or a team, afterwards.
    pub unsafe fn finalize(&self) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_hostlib_finalize() }
    }

    /// Memory of the heap, at the same offset on all PEs; `None` if it has not as much left. Collective over all PEs, which
    /// make the same calls in the same order.
    pub fn malloc(&self, bytes: usize) -> Result<Option<u64>> {
        // SAFETY: no memory of ours is touched.
        given(unsafe { self.c.nvshmem_malloc(bytes) })
    }

    /// Likewise, at a multiple of `alignment`, a power of two.
    pub fn align(&self, alignment: usize, bytes: usize) -> Result<Option<u64>> {
        // SAFETY: no memory of ours is touched.
        given(unsafe { self.c.nvshmem_align(alignment, bytes) })
    }

    /// Gives memory back. Collective over all PEs.
    ///
    /// # Safety
    /// It came from the heap, and nobody uses it afterwards, on any PE.
    pub unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmem_free(address) }
    }

    /// Where this process reaches the counterpart of `address` on `pe`; `None` where only the network connects the two.
    pub fn ptr(&self, address: u64, pe: i32) -> Result<Option<u64>> {
        // SAFETY: it computes with an address, and does not follow it.
        given(unsafe { self.c.nvshmem_ptr(address, pe) })
    }

    /// Where a store reaches the counterparts of `address` on all PEs of the team at once; `None` where there is no such.
    pub fn multicast_ptr(&self, team: Team, address: u64) -> Result<Option<u64>> {
        // SAFETY: it computes with an address, and does not follow it.
        given(unsafe { self.c.nvshmemx_mc_ptr(team.0, address) })
    }

    /// The team of `size` PEs of `parent` from `start` on, `stride` apart; `None` for one that this PE is not of. Collective
    /// over the parent.
    pub fn split(&self, parent: Team, start: i32, stride: i32, size: i32) -> Result<Option<Team>> {
        let (mut team, config) = (TEAM_INVALID, std::ptr::null());
        // SAFETY: it writes the number; no configuration is given, and no bit says that there is one.
        unsafe {
            let c = &self.c;
            c.nvshmem_team_split_strided(parent.0, start, stride, size, config, 0, &mut team)
        }?;
        Ok((team != TEAM_INVALID).then_some(Team(team)))
    }

    /// Gives a team back. Collective over it.
    ///
    /// # Safety
    /// It was made by [`Nvshmem::split`], and nothing that uses it is under way or comes after.
    pub unsafe fn team_destroy(&self, team: Team) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmem_team_destroy(team.0) }
    }

    /// This PE's number in a team, and how many it has.
    pub fn team(&self, team: Team) -> Result<(i32, i32)> {
        // SAFETY: it only reads a number of the library's.
        let own = unsafe { self.c.nvshmem_team_my_pe(team.0) }?;
        // SAFETY: likewise.
        Ok((own, unsafe { self.c.nvshmem_team_n_pes(team.0) }?))
    }

    /// The number in `to` of a PE of `from`.
    pub fn translate(&self, from: Team, pe: i32, to: Team) -> Result<Option<i32>> {
        // SAFETY: it only reads numbers of the library's.
        let there = unsafe { self.c.nvshmem_team_translate_pe(from.0, pe, to.0) }?;
        Ok((there >= 0).then_some(there))
    }

    /// Makes a module whose kernels call NVSHMEM usable.
    pub fn module_init(&self, module: Module) -> Result<()> {
        // SAFETY: a live module; the library sets variables that it has for this.
        unsafe { self.c.nvshmemx_cumodule_init(module.raw()) }
    }

    /// The counterpart, before such a module is unloaded.
    pub fn module_finalize(&self, module: Module) -> Result<()> {
        // SAFETY: a live module that was made usable.
        unsafe { self.c.nvshmemx_cumodule_finalize(module.raw()) }
    }
}

/// What is put into a stream. Addresses of the heap are this PE's own: the library finds the counterpart.
///
/// # Safety
/// For all of these: the memory is there until the stream has done it, on this PE and on those that take part, and
/// nobody else touches what is written meanwhile. The stream is of the device that the library was initialised with.
#[allow(clippy::missing_safety_doc)] // said once, above
impl Nvshmem {
    /// Copies `from` to the counterpart of `to` on `pe`.
    pub unsafe fn put(&self, to: u64, from: u64, bytes: usize, pe: i32, s: Stream) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_putmem_on_stream(to, from, bytes, pe, s.raw()) }
    }

    /// Copies the counterpart of `from` on `pe` to `to`.
    pub unsafe fn get(&self, to: u64, from: u64, bytes: usize, pe: i32, s: Stream) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_getmem_on_stream(to, from, bytes, pe, s.raw()) }
    }

    /// As [`Nvshmem::put`], and then does `op` to the counterpart of the word `signal`.
    #[allow(clippy::too_many_arguments)] // the library's own
    pub unsafe fn put_signal(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        signal: u64,
        (op, value): (SignalOp, u64),
        pe: i32,
        s: Stream,
    ) -> Result<()> {
        let op = op as c_int;
        let c = &self.c;
        // SAFETY: as the caller promises.
        unsafe {
            c.nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, op, pe, s.raw())
        }
    }

    /// Does `op` to the counterpart of the word `signal` on `pe`.
    pub unsafe fn signal(
        &self,
        signal: u64,
        (op, value): (SignalOp, u64),
        pe: i32,
        s: Stream,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_signal_op_on_stream(signal, value, op as c_int, pe, s.raw()) }
    }

    /// Waits until our own word `signal` compares so with `value`.
    pub unsafe fn wait(
        &self,
        signal: u64,
        (compare, value): (Compare, u64),
        s: Stream,
    ) -> Result<()> {
        let compare = compare as c_int;
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_signal_wait_until_on_stream(signal, compare, value, s.raw()) }
    }

    /// Waits until all that this PE has put is there.
    pub unsafe fn quiet(&self, s: Stream) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_quiet_on_stream(s.raw()) }
    }

    /// A barrier of a team's PEs; what they have put is there.
    pub unsafe fn barrier(&self, team: Team, s: Stream) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_barrier_on_stream(team.0, s.raw()) }
    }

    /// The team's PEs synchronise; it is not said whether what they have put is there.
    pub unsafe fn sync(&self, team: Team, s: Stream) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_team_sync_on_stream(team.0, s.raw()) }
    }

    /// `to` becomes PE `root`'s `from` on all PEs of the team.
    pub unsafe fn broadcast(
        &self,
        team: Team,
        to: u64,
        from: u64,
        bytes: usize,
        root: i32,
        s: Stream,
    ) -> Result<()> {
        let c = &self.c;
        // SAFETY: as the caller promises.
        unsafe { c.nvshmemx_broadcastmem_on_stream(team.0, to, from, bytes, root, s.raw()) }
    }

    /// Each PE's `from` has `bytes` for each; `to` becomes those for this one, by PE.
    pub unsafe fn all_to_all(
        &self,
        team: Team,
        to: u64,
        from: u64,
        bytes: usize,
        s: Stream,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_alltoallmem_on_stream(team.0, to, from, bytes, s.raw()) }
    }

    /// `to` becomes `bytes` of each PE's `from`, by PE.
    pub unsafe fn all_gather(
        &self,
        team: Team,
        to: u64,
        from: u64,
        bytes: usize,
        s: Stream,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.nvshmemx_fcollectmem_on_stream(team.0, to, from, bytes, s.raw()) }
    }

    /// `to` becomes the reduction of all PEs' `from`, `count` elements, in an order of the library's. `kind` and `op` are its
    /// names, such as `float` and `sum`.
    pub unsafe fn all_reduce(
        &self,
        (kind, op): (&str, &str),
        team: Team,
        to: u64,
        from: u64,
        count: usize,
        s: Stream,
    ) -> Result<()> {
        let symbol = format!("nvshmemx_{kind}_{op}_reduce_on_stream");
        // SAFETY: all functions of that form have this type.
        let function = unsafe { self.c.library.function::<Reduce>(&symbol) };
        let call = "nvshmemx_reduce_on_stream";
        let Some(function) = function else {
            let why = format!("this version of NVSHMEM has no {symbol}");
            return Err(Failure { call, status: None, why });
        };
        // SAFETY: as the caller promises.
        match unsafe { function(team.0, to, from, count, s.raw()) } {
            0 => Ok(()),
            status => Err(self.c.failure(call, status)),
        }
    }
}
