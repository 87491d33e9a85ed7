//! What has failed on a device, and who is told.
//!
//! A failure stays in the group's mailbox until all ranks put the group back in step, so that every call after it is an
//! error. Whatever takes results off the device or starts captured work looks at the mailboxes of all groups there.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::group::comm::Comm;
use crate::cuda::group::mailbox::{Note, RESYNC, TOLD};
use crate::error::{Error, Result};
use crate::group::{DEFAULT_TIMEOUT, Group, Resync, describe, op_of, setting};
use crate::symmetric::Handle;
use crate::sync::{Deadline, Ordering, lock, yield_now};

/// How long kernels wait in groups that have no limit of their own: a peer may write a checkpoint for many minutes, and one
/// that dies is noticed at once whatever the limit is.
const LIMIT: Duration = Duration::from_secs(30 * 60);
const VARIABLE: &str = "SYMMEM_DEVICE_TIMEOUT";

/// The groups that use a device.
#[derive(Default)]
pub(in crate::cuda) struct Failures(Mutex<Vec<Weak<Comm>>>);

impl Failures {
    pub(in crate::cuda) fn watch(&self, comm: &Arc<Comm>) {
        let mut comms = lock(&self.0);
        comms.retain(|comm| comm.strong_count() > 0);
        comms.push(Arc::downgrade(comm));
    }

    /// The groups that still live and of which `is_wanted` is true.
    fn of(&self, is_wanted: impl Fn(&Comm) -> bool) -> Vec<Arc<Comm>> {
        let comms = lock(&self.0).clone();
        comms.iter().filter_map(Weak::upgrade).filter(|comm| is_wanted(comm)).collect()
    }
}

impl Gpu {
    /// The failure of any group on this device, if one has failed: the same one for every call until [`Group::resync`] has put
    /// that group back in step, or another has replaced it. Takes no call of the driver.
    ///
    /// A group that has failed and that the caller knows about is replaced by the next group that the caller forms on the
    /// device, or by [`Group::shrink`]. From then on only calls on the old group, and graphs with such calls, report it.
    pub fn check_failures(&self) -> Result<()> {
        self.check_failures_in("check_failures")
    }

    /// Likewise, for the operation `op`.
    pub(in crate::cuda) fn check_failures_in(&self, op: &'static str) -> Result<()> {
        let failed = self
            .opened
            .failures
            .of(|comm| comm.has_failed() && !comm.replaced.load(Ordering::Relaxed));
        failed.iter().try_for_each(|comm| comm.check_alone(op))
    }

    /// Groups of this rank that have failed are replaced by `group`, which is new on this device.
    pub(in crate::cuda) fn replace_failed(&self, group: &Group) {
        let is_known = |comm: &Comm| {
            let lost = comm.is_of_world(group.context()) && comm.has_lost_a_rank();
            comm.told.load(Ordering::Relaxed) || (group.is_of_survivors() && lost)
        };
        let failed = self.opened.failures.of(|comm| comm.has_failed() && is_known(comm));
        failed.iter().for_each(|comm| comm.replaced.store(true, Ordering::Relaxed));
    }
}

/// How long kernels wait in groups without a limit of their own, as the environment says; 0 for ever.
pub(in crate::cuda) fn default_limit() -> Result<Duration> {
    let seconds = setting::<f64>(VARIABLE, "seconds")?;
    Ok(seconds.map_or(LIMIT, |s| Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX)))
}

impl Comm {
    /// How long the group's kernels wait, in nanoseconds; 0 for ever.
    pub(in crate::cuda) fn limit(&self, group: &Group) -> u64 {
        let own = group.deadline().remaining().unwrap_or(Duration::ZERO);
        let limit = if own == DEFAULT_TIMEOUT { self.default_limit } else { own };
        u64::try_from(limit.as_nanos()).unwrap_or(0)
    }

    /// The failure of the group on this device, if it has failed: the same for every call.
    #[inline]
    pub(in crate::cuda) fn check(&self, group: &Group, op: &'static str) -> Result<()> {
        if self.has_failed() { self.failure(group, op) } else { Ok(()) }
    }

    /// Likewise, for callers that do not have the group, which is named.
    pub(in crate::cuda) fn check_alone(&self, op: &'static str) -> Result<()> {
        let Some(group) = self.group.upgrade() else { return Ok(()) };
        self.check(&group, op).map_err(|e| match e {
            Error::PeerLost { rank, during, how } => {
                let how = format!("{how} (of the group {:?})", group.name());
                Error::PeerLost { rank, during, how }
            }
            Error::PeerFailed { op, rank, reason } => {
                let reason = format!("{reason} (of the group {:?})", group.name());
                Error::peer_failed(op, rank, reason)
            }
            other => other,
        })
    }

    /// Remembers the signal pad of memory that the group uses here, which is made new with the group's own.
    pub(in crate::cuda) fn watch_pad(&self, handle: &Handle) {
        let own = handle.signal_pad_ptrs().get(handle.rank()).copied();
        // There, signals of NVSHMEM's may be under way, which no rank can wait for.
        let is_networked = self.is_apart() && handle.backend_name() == "nvshmem";
        let Some(address) = own.filter(|_| !is_networked) else { return };
        let (mapping, words) = (Arc::downgrade(&handle.keep().1), handle.signal_pad_size() / 4);
        let mut pads = lock(&self.signal_pads);
        pads.retain(|(known, ..)| known.strong_count() > 0 && !known.ptr_eq(&mapping));
        pads.push((mapping, address as u64, words));
    }

    #[cold]
    fn failure(&self, group: &Group, op: &'static str) -> Result<()> {
        let (note, poison) = (self.mailbox.read(), self.mailbox.poison());
        if note.is_none() && poison == 0 {
            return Ok(()); // a kernel is about to say why; it has not ended yet
        }
        self.told.store(true, Ordering::Relaxed);
        let during = note.as_ref().and_then(|note| op_of(note.op)).unwrap_or(op);
        group.check_whole(during)?; // a lost rank is the cause of whatever else happened
        match note {
            _ if poison == RESYNC => {
                let expected = "a group in step".to_owned();
                Err(group.usage(op, expected, "one whose ranks are not done with resync".into()))
            }
            Some(note) => Err(error_of(group, during, &note, self.limit(group))),
            None => {
                let (rank, how) = (poison as usize - 1, "its group is poisoned".to_owned());
                Err(Error::PeerLost { rank, during, how })
            }
        }
    }
}

/// The error of what a kernel noted; `limit` is the nanoseconds that kernels of the group wait.
fn error_of(group: &Group, during: &'static str, note: &Note, limit: u64) -> Error {
    let rank = note.rank as usize;
    let awaited = note.theirs.checked_sub(1).map(|awaited| awaited as usize);
    let timeout = |waiting_for, nanoseconds| {
        let (channel, after) = (Some(note.channel as usize), Duration::from_nanos(nanoseconds));
        Error::Timeout { op: during, channel, waiting_for, after, doing: Vec::new() }
    };
    match note.kind {
        // A kernel that gives up tells all ranks, its own included, before it notes why: another one may note that first.
        TOLD if rank == group.rank() && awaited.is_some() => {
            timeout(awaited.into_iter().collect(), limit)
        }
        1 => timeout(vec![rank], u64::from(note.ours) | u64::from(note.theirs) << 32),
        2 => Error::PeerLost { rank, during, how: "its group is poisoned".into() },
        3 => Error::Mismatch {
            op: during,
            what: "operation",
            rank,
            ours: describe(note.ours, note.ours),
            theirs: describe(note.theirs, note.ours),
        },
        TOLD => {
            let reason = match awaited {
                Some(awaited) => format!("it waited in vain for rank {awaited}"),
                None => "it could not finish an operation of the group".to_owned(),
            };
            Error::peer_failed(during, rank, reason)
        }
        6 => Error::PeerLost { rank, during, how: "it left".into() },
        _ => {
            let why = ["", "negative", "beyond the input", "beyond the output"];
            let got = why.get(note.ours as usize).copied().unwrap_or_default();
            group.usage(during, "rows that fit".into(), format!("rows of rank {rank} {got}"))
        }
    }
}

impl Resync for Comm {
    /// Kernels that wait for peers give up, and the streams that the group was used in run empty.
    fn quiesce(&self, deadline: Deadline) -> Result<()> {
        const OP: &str = "resync";
        let Some(group) = self.group.upgrade() else { return Ok(()) };
        self.gpu.check_free(&group, OP)?;
        self.mailbox.begin_resync();
        let deadline = deadline.start();
        while !self.is_idle()? {
            if deadline.expired() {
                return Err(Error::timeout(OP, vec![group.rank()], deadline.elapsed()));
            }
            yield_now();
        }
        Ok(())
    }

    /// Makes this rank's pads and mailbox what they were in the beginning.
    fn reset(&self) -> Result<()> {
        let pads = lock(&self.signal_pads).clone();
        let living =
            pads.iter().filter_map(|(mapping, at, words)| Some((mapping.upgrade()?, *at, *words)));
        self.clear_pads(&living.collect::<Vec<_>>())?;
        self.mailbox.clear();
        self.told.store(false, Ordering::Relaxed);
        self.replaced.store(false, Ordering::Relaxed);
        Ok(())
    }
}
