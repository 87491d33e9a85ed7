//! Making, asking and closing communicators.
#![allow(unsafe_code)] // S4

use std::ffi::c_int;
use std::ptr;

use super::{
    Begun, Comm, Config, DataType, Failure, Handle, Nccl, RawConfig, RedOp, Result, ShrinkFlags,
    UniqueId, WINDOWS, int,
};
use crate::cuda::Device;
use crate::table::written;

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

    /// `ncclCommFinalize`: waits for the other ranks and what is going on, or begins to.
    ///
    /// # Safety
    ///
    /// The communicator is live and is used for nothing else afterwards but being asked, destroyed and aborted.
    pub unsafe fn finalize(&self, comm: Comm) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclCommFinalize(comm.raw()) }
    }

    /// `ncclCommDestroy`
    ///
    /// # Safety
    ///
    /// The communicator is live and not used again, neither by a stream.
    pub unsafe fn destroy(&self, comm: Comm) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclCommDestroy(comm.raw()) }
    }

    /// `ncclCommAbort`: ends what is going on, and destroys.
    ///
    /// # Safety
    ///
    /// The communicator is live and not used again.
    pub unsafe fn abort(&self, comm: Comm) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclCommAbort(comm.raw()) }
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
        config: Option<&Config>,
    ) -> Result<Begun<Comm>> {
        const NO_COLOR: c_int = -1;
        let color = color.map_or(NO_COLOR, |color| c_int::try_from(color).unwrap_or(c_int::MAX));
        let mut config = config.map(|one| RawConfig::new(one, self.version));
        let config = config.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: as the caller promises; it writes the handle, now or later, and reads what the structure says.
        Begun::by(|slot| unsafe { self.c.ncclCommSplit(comm.raw(), color, key, slot, config) })
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
        config: Option<&Config>,
    ) -> Result<Begun<Comm>> {
        self.needs("ncclCommShrink", WINDOWS)?;
        let mut excluded: Vec<c_int> = excluded.iter().map(|&rank| int(rank)).collect();
        let (ranks, count) = (excluded.as_mut_ptr(), int(excluded.len()));
        let mut config = config.map(|one| RawConfig::new(one, self.version));
        let config = config.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let (comm, flags) = (comm.raw(), flags as c_int);
        // SAFETY: as the caller promises; it sorts and copies so many ranks, and writes the handle, now or later.
        Begun::by(|slot| unsafe { self.c.ncclCommShrink(comm, ranks, count, slot, config, flags) })
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

    /// `ncclCommCount`: how many ranks it has.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready.
    pub unsafe fn count(&self, comm: Comm) -> Result<usize> {
        // SAFETY: the caller has a live communicator; it only writes the number.
        let count = written(|count| unsafe { self.c.ncclCommCount(comm.raw(), count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// `ncclCommCuDevice`: the device it is on.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready.
    pub unsafe fn device(&self, comm: Comm) -> Result<Device> {
        // SAFETY: the caller has a live communicator; it only writes the number.
        written(|device| unsafe { self.c.ncclCommCuDevice(comm.raw(), device) }).map(Device)
    }

    /// `ncclCommUserRank`: the rank whose end it is.
    ///
    /// # Safety
    ///
    /// The communicator is live and ready.
    pub unsafe fn user_rank(&self, comm: Comm) -> Result<usize> {
        // SAFETY: the caller has a live communicator; it only writes the number.
        let rank = written(|rank| unsafe { self.c.ncclCommUserRank(comm.raw(), rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    /// `ncclRedOpCreatePreMulSum`: a sum of elements that are multiplied with the number first, whose bytes in `kind` these
    /// are.
    ///
    /// # Safety
    ///
    /// The communicator is live.
    pub unsafe fn pre_mul_sum(
        &self,
        comm: Comm,
        scalar: &[u8; 8],
        kind: DataType,
    ) -> Result<RedOp> {
        const HOST_IMMEDIATE: c_int = 1;
        let (kind, scalar, comm) = (kind as c_int, scalar.as_ptr().cast(), comm.raw());
        // SAFETY: the caller has a live communicator; it reads one element, of at most 8 bytes, before it returns.
        written(|op| unsafe {
            self.c.ncclRedOpCreatePreMulSum(op, scalar, kind, HOST_IMMEDIATE, comm)
        })
        .map(RedOp)
    }

    /// `ncclRedOpDestroy`
    ///
    /// # Safety
    ///
    /// The communicator is live, has made the operator, and is not given it again.
    pub unsafe fn red_op_destroy(&self, comm: Comm, op: RedOp) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.c.ncclRedOpDestroy(op.0, comm.raw()) }
    }

    /// `ncclGroupStart`: what this thread calls from here on is begun together, by [`group_end`](Self::group_end).
    pub fn group_start(&self) -> Result<()> {
        // SAFETY: may be called at any time, and again.
        unsafe { self.c.ncclGroupStart() }
    }

    /// `ncclGroupEnd`: begins what was called since the outermost [`group_start`](Self::group_start).
    pub fn group_end(&self) -> Result<()> {
        // SAFETY: without a start it is an error of its own; what was called was checked then.
        unsafe { self.c.ncclGroupEnd() }
    }
}

/// The handle that was given.
fn given(raw: usize) -> Result<Comm> {
    let none = || Failure::new("ncclCommInitAll", Failure::INTERNAL, "it gave no communicator");
    Comm::given(raw).ok_or_else(none)
}
