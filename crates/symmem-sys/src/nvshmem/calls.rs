//! The functions as methods. Those that allocate, free or make teams are collective over all PEs, or over the team.
#![allow(unsafe_code)] // S4, S5

use std::ffi::c_int;

use super::raw::{COMPARE_EQUAL, INIT_WITH_UNIQUE_ID, InitAttr, RawUniqueId, Reduce, TEAM_INVALID};
use super::{Failure, Nvshmem, Result, SignalOp, Status, Team, UniqueId};
use crate::cuda::{Module, Stream};
use crate::table::{given, methods};

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
    methods! {
        /// Leaves the job. Collective.
        ///
        /// # Safety
        /// Nobody uses memory of the heap, or a team, afterwards.
        pub unsafe fn finalize() = nvshmemx_hostlib_finalize();

        /// Memory of the heap, at the same offset on all PEs; `None` if it has not as much left. Collective over all PEs, which
        /// make the same calls in the same order.
        // No memory of ours is touched.
        pub fn malloc(bytes: usize) -> Option<u64> = nvshmem_malloc(bytes) => given;

        /// Likewise, at a multiple of `alignment`, a power of two.
        // No memory of ours is touched.
        pub fn align(alignment: usize, bytes: usize) -> Option<u64> =
            nvshmem_align(alignment, bytes) => given;

        /// Gives memory back. Collective over all PEs.
        ///
        /// # Safety
        /// It came from the heap, and nobody uses it afterwards, on any PE.
        pub unsafe fn free(address: u64) = nvshmem_free(address);

        /// Where this process reaches the counterpart of `address` on `pe`; `None` where only the network connects the two.
        // It computes with an address, and does not follow it.
        pub fn ptr(address: u64, pe: i32) -> Option<u64> = nvshmem_ptr(address, pe) => given;

        /// Where a store reaches the counterparts of `address` on all PEs of the team at once; `None` where there is no such.
        // It computes with an address, and does not follow it.
        pub fn multicast_ptr(team: Team, address: u64) -> Option<u64> =
            nvshmemx_mc_ptr(team.0, address) => given;

        /// Gives a team back. Collective over it.
        ///
        /// # Safety
        /// It was made by [`Nvshmem::split`], and nothing that uses it is under way or comes after.
        pub unsafe fn team_destroy(team: Team) = nvshmem_team_destroy(team.0);

        /// The number in `to` of a PE of `from`.
        // It only reads numbers of the library's.
        pub fn translate(from: Team, pe: i32, to: Team) -> Option<i32> =
            nvshmem_team_translate_pe(from.0, pe, to.0)
            => |there| (there >= 0).then_some(there);

        /// Makes a module whose kernels call NVSHMEM usable.
        // A live module; the library sets variables that it has for this.
        pub fn module_init(module: Module) = nvshmemx_cumodule_init(module.raw());

        /// The counterpart, before such a module is unloaded.
        // A live module that was made usable.
        pub fn module_finalize(module: Module) = nvshmemx_cumodule_finalize(module.raw());
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

    /// This PE's number in a team, and how many it has.
    pub fn team(&self, team: Team) -> Result<(i32, i32)> {
        // SAFETY: it only reads a number of the library's.
        let own = unsafe { self.c.nvshmem_team_my_pe(team.0) }?;
        // SAFETY: likewise.
        Ok((own, unsafe { self.c.nvshmem_team_n_pes(team.0) }?))
    }
}

/// What is put into a stream. Addresses of the heap are this PE's own: the library finds the counterpart.
///
/// # Safety
/// For all of these: the memory is there until the stream has done it, on this PE and on those that take part, and
/// nobody else touches what is written meanwhile. The stream is of the device that the library was initialised with.
#[allow(clippy::missing_safety_doc)] // said once, above
impl Nvshmem {
    methods! {
        /// Copies `from` to the counterpart of `to` on `pe`.
        pub unsafe fn put(to: u64, from: u64, bytes: usize, pe: i32, s: Stream) =
            nvshmemx_putmem_on_stream(to, from, bytes, pe, s.raw());

        /// Copies the counterpart of `from` on `pe` to `to`.
        pub unsafe fn get(to: u64, from: u64, bytes: usize, pe: i32, s: Stream) =
            nvshmemx_getmem_on_stream(to, from, bytes, pe, s.raw());

        /// As [`Nvshmem::put`], and then does `change` to the counterpart of the word `signal`.
        #[allow(clippy::too_many_arguments)] // the library's own
        pub unsafe fn put_signal(
            to: u64, from: u64, bytes: usize, signal: u64, change: (SignalOp, u64), pe: i32,
            s: Stream,
        ) = nvshmemx_putmem_signal_on_stream(
            to, from, bytes, signal, change.1, change.0 as c_int, pe, s.raw(),
        );

        /// Does `change` to the counterpart of the word `signal` on `pe`.
        pub unsafe fn signal(signal: u64, change: (SignalOp, u64), pe: i32, s: Stream) =
            nvshmemx_signal_op_on_stream(signal, change.1, change.0 as c_int, pe, s.raw());

        /// Waits until our own word `signal` is `value`.
        pub unsafe fn wait(signal: u64, value: u64, s: Stream) =
            nvshmemx_signal_wait_until_on_stream(signal, COMPARE_EQUAL, value, s.raw());

        /// Waits until all that this PE has put is there.
        pub unsafe fn quiet(s: Stream) = nvshmemx_quiet_on_stream(s.raw());

        /// A barrier of a team's PEs; what they have put is there.
        pub unsafe fn barrier(team: Team, s: Stream) = nvshmemx_barrier_on_stream(team.0, s.raw());

        /// The team's PEs synchronise; it is not said whether what they have put is there.
        pub unsafe fn sync(team: Team, s: Stream) = nvshmemx_team_sync_on_stream(team.0, s.raw());

        /// `to` becomes PE `root`'s `from` on all PEs of the team.
        pub unsafe fn broadcast(
            team: Team, to: u64, from: u64, bytes: usize, root: i32, s: Stream,
        ) = nvshmemx_broadcastmem_on_stream(team.0, to, from, bytes, root, s.raw());

        /// Each PE's `from` has `bytes` for each; `to` becomes those for this one, by PE.
        pub unsafe fn all_to_all(team: Team, to: u64, from: u64, bytes: usize, s: Stream) =
            nvshmemx_alltoallmem_on_stream(team.0, to, from, bytes, s.raw());

        /// `to` becomes `bytes` of each PE's `from`, by PE.
        pub unsafe fn all_gather(team: Team, to: u64, from: u64, bytes: usize, s: Stream) =
            nvshmemx_fcollectmem_on_stream(team.0, to, from, bytes, s.raw());
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
