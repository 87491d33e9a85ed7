//! Making, asking and closing communicators.
#![allow(unsafe_code)] // S4

use std::ffi::c_int;

use super::{
    Begun, Comm, Config, DataType, Failure, Handle, Nccl, RawConfig, RedOp, Result, ShrinkFlags,
    UniqueId, WINDOWS, int,
};
use crate::cuda::Device;
use crate::table::{methods, number};

/// `ncclScalarHostImmediate`: a factor that is read before the call returns.
const HOST_IMMEDIATE: c_int = 1;

impl Nccl {
    /// `ncclGetUniqueId`: what ranks find each other by; made by one of them.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it only writes the 128 bytes.
        unsafe { self.c.ncclGetUniqueId(&mut id) }?;
        Ok(id)
    }

    /// `ncclCommInitRankConfig`: this rank's end of a communicator of so many, on the device whose context is current.
    ///
    /// Blocking, it waits for the other ranks, for ever.
    pub fn init_rank(
        &self,
        ranks: usize,
        id: &UniqueId,
        rank: usize,
        config: &Config,
    ) -> Result<Begun<Comm>> {
        let mut config = RawConfig::new(config, self.version);
        let (ranks, rank) = (int(ranks), int(rank));
        // SAFETY: it writes the handle, now or later, and reads as much of the structure as that says.
        Begun::by(|slot| unsafe {
            self.c.ncclCommInitRankConfig(slot, ranks, *id, rank, &mut config)
        })
    }

    /// `ncclCommInitRank`: as [`init_rank`](Self::init_rank) with the library's choice of everything.
    pub fn init_rank_plainly(
        &self,
        ranks: usize,
        id: &UniqueId,
        rank: usize,
    ) -> Result<Begun<Comm>> {
        // SAFETY: it only writes the handle, now or later.
        Begun::by(|slot| unsafe { self.c.ncclCommInitRank(slot, int(ranks), *id, int(rank)) })
    }

    /// `ncclCommInitAll`: a communicator of these devices of this process, which waits until it is ready.
    pub fn init_all(&self, devices: &[Device]) -> Result<Vec<Comm>> {
        let numbers: Vec<c_int> = devices.iter().map(|device| device.0).collect();
        let mut comms = vec![0_usize; numbers.len()];
        let count = int(numbers.len());
        // SAFETY: it reads so many numbers, and writes so many handles.
        unsafe { self.c.ncclCommInitAll(comms.as_mut_ptr(), count, numbers.as_ptr()) }?;
        comms.into_iter().map(given).collect()
    }

    /// `ncclCommSplit`: the communicator of those ranks that give the same `color`, in the order of `key`; none without one.
    ///
    /// Whether it is over is asked of the communicator that is split.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready.
    pub unsafe fn split(
        &self,
        comm: Comm,
        color: Option<u32>,
        key: i32,
        config: &Config,
    ) -> Result<Begun<Comm>> {
        const NO_COLOR: c_int = -1;
        let color = color.map_or(NO_COLOR, |color| c_int::try_from(color).unwrap_or(c_int::MAX));
        let mut config = RawConfig::new(config, self.version);
        // SAFETY: as the caller promises; it writes the handle, now or later, and reads what the structure says.
        Begun::by(|slot| unsafe { self.c.ncclCommSplit(comm.raw(), color, key, slot, &mut config) })
    }

    /// `ncclCommShrink` (2.27): the communicator without these ranks, who do not call it.
    ///
    /// Whether it is over is asked of the communicator that is shrunk.
    ///
    /// # Safety
    ///
    /// The communicator is live.
    pub unsafe fn shrink(
        &self,
        comm: Comm,
        excluded: &[usize],
        flags: ShrinkFlags,
        config: &Config,
    ) -> Result<Begun<Comm>> {
        self.needs("ncclCommShrink", WINDOWS)?;
        let mut excluded: Vec<c_int> = excluded.iter().map(|&rank| int(rank)).collect();
        let (ranks, count) = (excluded.as_mut_ptr(), int(excluded.len()));
        let mut config = RawConfig::new(config, self.version);
        let (comm, flags) = (comm.raw(), flags as c_int);
        // SAFETY: as the caller promises; it sorts and copies so many ranks, and writes the handle, now or later.
        Begun::by(|slot| unsafe {
            self.c.ncclCommShrink(comm, ranks, count, slot, &mut config, flags)
        })
    }

    /// `ncclCommGetAsyncError`: what has gone wrong since; [`Failure::IN_PROGRESS`] while a call goes on.
    ///
    /// # Safety
    ///
    /// The communicator is live.
    pub unsafe fn async_error(&self, comm: Comm) -> Result<()> {
        let call = "ncclCommGetAsyncError";
        let mut code = 0;
        // SAFETY: the caller has a live communicator; it only writes the number.
        unsafe { self.c.ncclCommGetAsyncError(comm.raw(), &mut code) }?;
        if code == 0 { Ok(()) } else { Err(self.c.failure(call, code)) }
    }

    methods! {
        /// `ncclCommFinalize`: waits for the other ranks and what is going on, or begins to.
        ///
        /// # Safety
        ///
        /// The communicator is live and is used for nothing else afterwards but being asked, destroyed and aborted.
        pub unsafe fn finalize(comm: Comm) = ncclCommFinalize(comm.raw());

        /// `ncclCommDestroy`
        ///
        /// # Safety
        ///
        /// The communicator is live and not used again, neither by a stream.
        pub unsafe fn destroy(comm: Comm) = ncclCommDestroy(comm.raw());

        /// `ncclCommAbort`: ends what is going on, and destroys.
        ///
        /// # Safety
        ///
        /// The communicator is live and not used again.
        pub unsafe fn abort(comm: Comm) = ncclCommAbort(comm.raw());

        /// `ncclCommCount`: how many ranks it has.
        ///
        /// # Safety
        ///
        /// The communicator is live and ready.
        pub unsafe fn count(comm: Comm) -> usize =
            |count| ncclCommCount(comm.raw(), count) => number;

        /// `ncclCommCuDevice`: the device it is on.
        ///
        /// # Safety
        ///
        /// The communicator is live and ready.
        pub unsafe fn device(comm: Comm) -> Device =
            |device| ncclCommCuDevice(comm.raw(), device) => Device;

        /// `ncclCommUserRank`: the rank whose end it is.
        ///
        /// # Safety
        ///
        /// The communicator is live and ready.
        pub unsafe fn user_rank(comm: Comm) -> usize =
            |rank| ncclCommUserRank(comm.raw(), rank) => number;

        /// `ncclRedOpCreatePreMulSum`: a sum of elements that are multiplied with the number first, whose bytes in `kind` these
        /// are.
        ///
        /// # Safety
        ///
        /// The communicator is live.
        pub unsafe fn pre_mul_sum(comm: Comm, scalar: &[u8; 8], kind: DataType) -> RedOp =
            |op| ncclRedOpCreatePreMulSum(
                op, scalar.as_ptr().cast(), kind as c_int, HOST_IMMEDIATE, comm.raw(),
            ) => RedOp;

        /// `ncclRedOpDestroy`
        ///
        /// # Safety
        ///
        /// The communicator is live, has made the operator, and is not given it again.
        pub unsafe fn red_op_destroy(comm: Comm, op: RedOp) =
            ncclRedOpDestroy(op.0, comm.raw());

        /// `ncclGroupStart`: what this thread calls from here on is begun together, by [`group_end`](Self::group_end).
        // May be called at any time, and again.
        pub fn group_start() = ncclGroupStart();

        /// `ncclGroupEnd`: begins what was called since the outermost [`group_start`](Self::group_start).
        // Without a start it is an error of its own; what was called was checked then.
        pub fn group_end() = ncclGroupEnd();
    }
}

/// The handle that was given.
fn given(raw: usize) -> Result<Comm> {
    let none = || Failure::new("ncclCommInitAll", Failure::INTERNAL, "it gave no communicator");
    Comm::given(raw).ok_or_else(none)
}
