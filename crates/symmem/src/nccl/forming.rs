//! How communicators are made: by an id, of a group, of devices, of another communicator.
#![allow(unsafe_code)] // S4: handles are live from where they were made to where they are destroyed or aborted

use symmem_sys::nccl::{Begun, Comm, Config, ShrinkFlags};

use super::communicator::{Communicator, none_given};
use super::group::check_closed;
use super::{Nccl, UniqueId, failed};
use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::group::{Group, World};
use crate::sync::Deadline;

/// What communicators are made with: calls that wait for others do not block the thread, so that they can be given up.
const CONFIG: Config = Config { blocking: Some(false) };

impl Nccl {
    /// The end of `rank` of a communicator of `size` ranks that find each other by `id`. Collective; a rank that does not
    /// come by the deadline is a [`Timeout`](Error::Timeout). The deadline is also that of later calls.
    pub fn communicator(
        &self,
        gpu: &Gpu,
        size: usize,
        id: &UniqueId,
        rank: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<Communicator> {
        const OP: &str = "communicator";
        check_closed(OP, rank)?;
        check_rank(OP, rank, size)?;
        let deadline = deadline.into();
        let begun = gpu.within(|| self.0.init_rank(size, &id.0, rank, &CONFIG))?;
        let begun = begun.map_err(|failure| failed(OP, Some(rank), &failure))?;
        let made = Communicator::begin(self, gpu, (rank, size), &begun, deadline, OP)?;
        made.settle(OP)?;
        // SAFETY: S4: it is ready, so the library has written for the last time.
        unsafe { begun.end() };
        Ok(made)
    }

    /// As [`communicator`](Self::communicator), of the ranks of `group`, which tell each other the id. Collective.
    pub fn of_group(&self, group: &Group, gpu: &Gpu) -> Result<Communicator> {
        const OP: &str = "communicator";
        let rank = group.rank();
        check_closed(OP, rank)?;
        let id = if rank == 0 { self.unique_id().map(Some) } else { Ok(None) };
        // Rank 0 says its id, or nothing where it has none to say.
        let proposal = id.as_ref().ok().and_then(|id| id.map(|id| id.as_bytes().to_vec()));
        let (proposal, terms) =
            (proposal.unwrap_or_default(), [("operation", "a communicator of NCCL".to_owned())]);
        group.converse(OP, group.deadline(), |conversation| {
            conversation.hold(
                &terms,
                proposal,
                || Ok(None),
                |proposals, _| {
                    id?;
                    let id = UniqueId::from_bytes(proposals.first().map_or(&[], Vec::as_slice));
                    let none = "it has no id for the communicator";
                    let id = id.map_err(|_| Error::peer_failed(OP, 0, none))?;
                    self.communicator(gpu, group.size(), &id, rank, group.deadline())
                },
            )
        })
    }

    /// A communicator of these devices of this process, in this order: one end for each. They make calls together, in a
    /// [`group`](Self::group).
    pub fn of_devices(
        &self,
        gpus: &[Gpu],
        deadline: impl Into<Deadline>,
    ) -> Result<Vec<Communicator>> {
        const OP: &str = "communicator";
        check_closed(OP, 0)?;
        let (deadline, size) = (deadline.into(), gpus.len());
        let id = self.unique_id()?;
        self.0.group_start().map_err(|failure| failed(OP, None, &failure))?;
        let begun: Vec<_> = gpus
            .iter()
            .enumerate()
            .map(|(rank, gpu)| {
                let begun = gpu.within(|| self.0.init_rank(size, &id.0, rank, &CONFIG))?;
                begun.map_err(|failure| failed(OP, Some(rank), &failure))
            })
            .collect();
        let ended = self.0.group_end();
        let begun: Vec<Begun<Comm>> = begun.into_iter().collect::<Result<_>>()?;
        let begin = |(rank, (gpu, begun)): (usize, (&Gpu, &Begun<Comm>))| {
            Communicator::begin(self, gpu, (rank, size), begun, deadline, OP)
        };
        let made = gpus.iter().zip(&begun).enumerate().map(begin);
        let made: Vec<Communicator> = made.collect::<Result<_>>()?;
        if let Err(failure) = ended
            && !failure.is_in_progress()
        {
            made.iter().for_each(|one| one.abort());
            return Err(failed(OP, None, &failure));
        }
        let settled = made.iter().map(|one| one.settle(OP)).fold(Ok(()), Result::and);
        settled.inspect_err(|_| made.iter().for_each(|one| one.abort()))?;
        for one in begun {
            // SAFETY: S4: all are ready, so the library has written for the last time.
            unsafe { one.end() };
        }
        Ok(made)
    }

    /// A communicator (`ncclComm_t`) that somebody else has made with the same library, and will destroy: dropping and
    /// aborting this only lets go of it.
    ///
    /// # Safety
    /// It is live for as long as this value is, and nobody else makes calls with it at the same time.
    pub unsafe fn adopt(
        &self,
        gpu: &Gpu,
        raw: usize,
        deadline: impl Into<Deadline>,
    ) -> Result<Communicator> {
        const OP: &str = "adopt";
        check_closed(OP, 0)?;
        if raw == 0 {
            return Err(Error::usage(OP, "a communicator of NCCL", "a null pointer"));
        }
        // SAFETY: S4: as the caller promises.
        let comm = unsafe { Comm::from_raw(raw) };
        let adopted = Communicator::of(self, gpu, comm, deadline.into(), (false, OP))?;
        // SAFETY: S4: it is live and ready.
        let device = adopted.ask(OP, |nccl, comm| unsafe { nccl.device(comm) })?;
        if u32::try_from(device.0) != Ok(gpu.number()) {
            let expected = format!("a communicator on {gpu:?}");
            return Err(Error::usage(OP, expected, format!("one on cuda:{}", device.0)));
        }
        Ok(adopted)
    }

    /// The deadline of calls that have no other: `SYMMEM_TIMEOUT` seconds, or 5 minutes.
    pub fn deadline() -> Result<Deadline> {
        World::builder().deadline()
    }
}

pub(super) fn check_rank(op: &'static str, rank: usize, size: usize) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    let expected = format!("a rank in [0, {size})");
    Err(Error::usage(op, expected, rank.to_string()))
}

impl Communicator {
    /// The communicator of those ranks that give the same `color`, in the order of `key` and then of ranks; none for ranks
    /// without one. Collective.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        const OP: &str = "split";
        check_closed(OP, self.rank())?;
        if color.is_some_and(|color| i32::try_from(color).is_err()) {
            let expected = "a color below 2³¹".to_owned();
            return Err(self.usage(OP, expected, format!("{color:?}")));
        }
        let _calling = self.lock_calls();
        // SAFETY: S4: `begun` gives a communicator that is live.
        let made = self.begun(OP, |nccl, comm| unsafe { nccl.split(comm, color, key, &CONFIG) })?;
        made.map(|comm| self.child(comm, OP)).transpose()
    }

    /// The communicator without these ranks, who do not call this. Collective for the others; also after a failure, but
    /// not after an abort. Since 2.27.
    pub fn shrink(&self, excluded: &[usize]) -> Result<Self> {
        const OP: &str = "shrink";
        check_closed(OP, self.rank())?;
        if excluded.is_empty() || excluded.contains(&self.rank()) {
            let expected = "other ranks to leave out".to_owned();
            return Err(self.usage(OP, expected, format!("{excluded:?}")));
        }
        excluded.iter().try_for_each(|&rank| check_rank(OP, rank, self.size()))?;
        let _calling = self.lock_calls();
        let flags = if self.revive() { ShrinkFlags::Abort } else { ShrinkFlags::Default };
        // SAFETY: S4: `begun` gives a communicator that is live.
        let made =
            self.begun(OP, |nccl, comm| unsafe { nccl.shrink(comm, excluded, flags, &CONFIG) })?;
        let none = || none_given("ncclCommShrink", self.rank(), OP);
        made.ok_or_else(none).and_then(|comm| self.child(comm, OP))
    }
}
