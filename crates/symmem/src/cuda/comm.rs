//! What a group has on a device: pads on which kernels of all ranks meet, the mailbox in which they note what went wrong, and
//! the order of what the group does there.
//!
//! A kernel that gives up notes why, tells all ranks, and returns; all later ones return at once. The host hands the error
//! out once, on every rank; the call after that puts the pads in order together with the other ranks, and goes on.
#![allow(unsafe_code)] // S3 (addresses within the pads), S4

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::fabric;
use super::gpu::Gpu;
use super::layout::{GroupParameter, MAX_BLOCKS, MAX_RANKS, Pointers, pad_bytes};
use super::mailbox::Mailbox;
use super::order::Order;
use super::placement::{
    Placed, check_apart, crowd, has_multicast, most_on_one, smallest_cache, smallest_if_unlike,
};
use super::replays::Replays;
use super::stream::{Event, Place, Stream};
use crate::backend::Device;
use crate::block::{Block, Mapping, Witness};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Group, describe, op_code, op_of};
use crate::mesh::{Gone, Mourner, Subject};
use crate::symmetric::Handle;
use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

/// What forms a group on a device.
pub(super) const OP: &str = "rendezvous";

/// A group on a device.
pub(super) struct Comm {
    gpu: Gpu,
    /// The most ranks of the group on one device: the same on all ranks.
    pub(super) neighbours: usize,
    /// The most ranks, of whatever group, that may have kernels on one device at once: likewise, for grids must be alike.
    pub(super) crowd: usize,
    /// Bytes of the smallest device's cache: the same on all ranks, which go by it alike.
    pub(super) cache: usize,
    /// Blocks that the smallest device holds at once, whatever the kernel; where all are alike, each kernel knows better.
    unlike: Option<u32>,
    /// All ranks have devices of their own that can be reached at once.
    pub(super) has_multicast: bool,
    /// Memory is handed on by fabric handles.
    pub(super) over_fabric: bool,
    /// A rank that not all others reach by an address: the same on all ranks.
    apart: Option<usize>,
    parameter: GroupParameter,
    /// Always there, until this goes.
    mailbox: Option<Mailbox>,
    members: Vec<usize>,
    state: Mutex<State>,
    /// A failure was handed out; the pads are not in order. Changed under the lock of `state`, and read without.
    failed: AtomicBool,
    /// Not the handle, which would keep the group, which keeps this.
    _pads: Option<(Arc<Block>, Arc<Mapping>)>,
}

/// A group's turn in a stream: what its kernel gets, and where it goes.
pub(super) struct Turn<'a> {
    pub(super) group: GroupParameter,
    pub(super) place: Place<'a>,
    /// For a kernel that runs for a shorter time than its launch takes the host, where replaying it is quicker.
    pub(super) replays: Option<&'a mut Replays>,
}

struct State {
    order: Order,
    replays: Replays,
}

impl Comm {
    /// That of `group` on `gpu`; collective the first time.
    ///
    /// Where the group's memory says that a rank is `apart`, which only the network connects, there are no pads, and no
    /// kernel meets others: see [`Comm::check_together`].
    pub(super) fn of(group: &Group, gpu: &Gpu, apart: Option<usize>) -> Result<Arc<Self>> {
        let number = u64::from(gpu.number()) | u64::from(apart.is_some()) << 32;
        group.attached(number, || Self::form(group, gpu, apart))
    }

    fn form(group: &Group, gpu: &Gpu, apart: Option<usize>) -> Result<Arc<Self>> {
        let size = group.size();
        if size > MAX_RANKS {
            let expected = format!("a group of at most {MAX_RANKS} ranks on a device");
            return Err(group.usage(OP, expected, size.to_string()));
        }
        group.check_free(OP, gpu)?;
        // Whatever can fail on one rank alone comes before all agree to go on.
        let (places, Own { block, mailbox, events }) = meet(group, gpu, Own::new(group, gpu))?;
        let (neighbours, crowd) = (most_on_one(&places), crowd(&places));
        let able: Vec<bool> = places.iter().map(|place| place.has_fabric).collect();
        let mapped = match apart {
            None => Some(fabric::map_pads(group, &block, &able)?),
            Some(_) => None,
        };
        let handle = mapped.as_ref().map(|(handle, _)| handle);
        let parameter = GroupParameter {
            rank: group.rank() as u32,
            size: size as u32,
            scope: u32::from(neighbours == size),
            op: 0,
            call: 0,
            reserved: 0,
            timeout: 0,
            mailbox: mailbox.memory.device,
            pads: Pointers::new(&handle.map(Handle::buffer_ptrs).unwrap_or_default()),
        };
        let comm = Arc::new(Self {
            gpu: gpu.clone(),
            neighbours,
            crowd,
            cache: smallest_cache(&places),
            unlike: smallest_if_unlike(&places),
            has_multicast: has_multicast(group, &places),
            over_fabric: mapped.as_ref().is_some_and(|(_, over_fabric)| *over_fabric),
            apart,
            parameter,
            mailbox: Some(mailbox),
            members: group.world_ranks().to_vec(),
            state: Mutex::new(State {
                order: Order::new(gpu, events),
                replays: Replays::default(),
            }),
            failed: AtomicBool::new(false),
            _pads: handle.map(Handle::keep),
        });
        if let Some(handle) = handle {
            group.set_placement(Device::Cuda(gpu.number()), handle.number());
        }
        let mourner: std::sync::Weak<Self> = Arc::downgrade(&comm);
        group.context().mesh.watch(mourner);
        Ok(comm)
    }

    /// Maps all ranks' counterparts of `block`. Collective the first time.
    pub(super) fn map(&self, block: &Arc<Block>, group: &Group, dtype: DType) -> Result<Handle> {
        if self.over_fabric {
            Handle::over_fabric(block, group, dtype)
        } else {
            Handle::of_block(block, group, dtype)
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mailbox_address(&self) -> u64 {
        self.parameter.mailbox
    }

    pub(super) fn pads(&self) -> Pointers {
        self.parameter.pads
    }

    pub(super) fn scope(&self) -> u32 {
        self.parameter.scope
    }

    /// The most blocks of a kernel that each rank may launch, where `fit` are on this rank's device at once: the same on all
    /// ranks, and so that those of all ranks that share a device fit on it, for they wait for each other.
    pub(super) fn blocks_together(&self, fit: u32) -> u32 {
        (self.unlike.unwrap_or(fit) / self.crowd as u32).clamp(1, MAX_BLOCKS)
    }

    /// Makes the group's next kernel, by `launch`, come after its last, whatever their streams.
    pub(super) fn enqueue(
        &self,
        group: &Group,
        op: &'static str,
        call: u32,
        stream: &Stream,
        launch: impl FnOnce(Turn<'_>) -> Result<()>,
    ) -> Result<()> {
        self.check_together(group, op)?;
        self.check_stream(group, op, stream)?;
        let mut state = self.state();
        self.check_in(&state, group, op, stream)?;
        let place = state.order.after_last(group, op, stream)?;
        let timeout = nanoseconds(group);
        let group = GroupParameter { op: op_code(op), call, timeout, ..self.parameter };
        // Several processes' graphs a device takes up one after the other.
        let may = place.capture.is_none() && self.crowd <= 2;
        launch(Turn { group, place, replays: may.then_some(&mut state.replays) })?;
        state.order.is_last(place);
        Ok(())
    }

    /// Before something goes there that waits for peers, and for which the group's next kernel must not wait.
    pub(super) fn mark_before(&self, place: Place<'_>) {
        self.state().order.mark_last(place);
    }

    /// Has `work` put something into `stream` that meets none of the group's kernels, and is not ordered with them.
    ///
    /// It is no collective, so it cannot put the group in order after a failure, and is refused until one has.
    pub(super) fn beside(
        &self,
        group: &Group,
        op: &'static str,
        stream: &Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.check_stream(group, op, stream)?;
        let state = self.state();
        group.check_whole(op)?;
        if self.has_failed() {
            let expected = "a group in order, as its next collective makes it".to_owned();
            return Err(group.usage(op, expected, "one that has failed".to_owned()));
        }
        self.take_failure(group, op)?;
        drop(state);
        work()
    }

    /// Whether only the network connects some of its ranks.
    pub(super) fn is_apart(&self) -> bool {
        self.apart.is_some()
    }

    /// Refuses what kernels do with all ranks' memory, where one is out of their reach. The same on all ranks.
    pub(super) fn check_together(&self, group: &Group, op: &'static str) -> Result<()> {
        let Some(rank) = self.apart else { return Ok(()) };
        Err(out_of_reach(group, op, rank))
    }

    fn check_stream(&self, group: &Group, op: &'static str, stream: &Stream) -> Result<()> {
        if *stream.gpu() == self.gpu {
            return Ok(());
        }
        let expected = format!("a stream of {:?}", self.gpu);
        Err(group.usage(op, expected, format!("one of {:?}", stream.gpu())))
    }

    /// The error of a kernel that failed, if one did since the last call.
    pub(super) fn check(&self, group: &Group, op: &'static str) -> Result<()> {
        let _state = self.state();
        if self.has_failed() { Ok(()) } else { self.take_failure(group, op) }
    }

    fn check_in(
        &self,
        state: &State,
        group: &Group,
        op: &'static str,
        stream: &Stream,
    ) -> Result<()> {
        group.check_whole(op)?;
        if self.has_failed() {
            return self.recover(state, group, stream);
        }
        self.take_failure(group, op)
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    fn take_failure(&self, group: &Group, op: &'static str) -> Result<()> {
        let Some(note) = self.mailbox.as_ref().and_then(Mailbox::read) else { return Ok(()) };
        self.failed.store(true, Ordering::Relaxed);
        group.check_whole(op)?; // a lost rank is the cause of whatever else happened
        let during = op_of(note.op).unwrap_or(op);
        let rank = note.rank as usize;
        Err(match note.kind {
            1 => Error::Timeout {
                op: during,
                channel: Some(note.channel as usize),
                waiting_for: vec![rank],
                after: Duration::from_nanos(nanoseconds(group)),
                doing: Vec::new(),
            },
            2 => Error::PeerLost { rank, during, how: "its group is poisoned".into() },
            3 => Error::Mismatch {
                op: during,
                what: "operation",
                rank,
                ours: describe(note.ours, note.ours),
                theirs: describe(note.theirs, note.ours),
            },
            4 => {
                let reason = "it could not finish an operation of the group".into();
                Error::PeerFailed { op: during, rank, reason }
            }
            _ => {
                let why = ["", "negative", "beyond the input", "beyond the output"];
                let got = why.get(note.ours as usize).copied().unwrap_or_default();
                group.usage(during, "rows that fit".into(), format!("rows of rank {rank} {got}"))
            }
        })
    }

    /// Puts the pads in order, with all ranks: they are as new.
    fn recover(&self, state: &State, group: &Group, stream: &Stream) -> Result<()> {
        const OP: &str = "recover";
        group.check_free(OP, &self.gpu)?;
        let left = state.order.wait_for_all(stream);
        exchange(group, OP, (), |_| left)?;
        let done = self.renew_pad();
        // Nobody meets on the pads before all of them are in order.
        exchange(group, OP, (), |_| done)?;
        self.failed.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Makes this rank's pad and mailbox what they were in the beginning.
    fn renew_pad(&self) -> Result<()> {
        let (service, words) = (self.gpu.service()?, pad_bytes(self.members.len()) / 4);
        self.gpu.call(|driver| {
            // SAFETY: S3: our own pad, on which nobody meets until all ranks have done this.
            unsafe { driver.memset32(self.own_pad(), 0, words, service.raw()) }?;
            driver.stream_synchronize(service.raw())
        })?;
        self.mailbox.iter().for_each(Mailbox::clear);
        Ok(())
    }

    fn own_pad(&self) -> u64 {
        self.parameter.pads.0[self.parameter.rank as usize % MAX_RANKS]
    }
}

impl Mourner for Comm {
    fn gone(&self, world_rank: usize, gone: &Gone, _subject: Option<&Subject>) {
        let rank = self.members.iter().position(|member| *member == world_rank);
        if let Some(rank) = rank.filter(|_| !gone.left) {
            let words = self.mailbox.iter().map(Mailbox::words);
            words.for_each(|words| words.poison.store(rank as u32 + 1, Ordering::Relaxed));
        }
    }
}

impl Witness for Comm {
    /// Not after a kernel gave up: its peers' may be late, and still at it. All are done when the pads are in order again.
    fn is_quiet(&self) -> bool {
        let noted = self.mailbox.as_ref().is_some_and(|mailbox| mailbox.read().is_some());
        !noted && !self.has_failed()
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Kernels that are under way look into it.
        if let Some(mailbox) = self.mailbox.take() {
            self.gpu.retire(Box::new(mailbox));
        }
    }
}

/// What a rank has for itself before it meets the others.
struct Own {
    block: Arc<Block>,
    mailbox: Mailbox,
    events: [Event; 2],
}

impl Own {
    fn new(group: &Group, gpu: &Gpu) -> Result<Self> {
        let block = group.block_of::<u8>(Arc::new(gpu.clone()), pad_bytes(group.size()))?;
        let events = [Event::new(gpu)?, Event::new(gpu)?];
        Ok(Self { block, mailbox: Mailbox::new(gpu)?, events })
    }
}

/// Where all ranks are, once all of them have what they need; an error on all if one has not.
fn meet(group: &Group, gpu: &Gpu, own: Result<Own>) -> Result<(Vec<Placed>, Own)> {
    exchange(group, OP, Placed::new(group, gpu), |places| {
        check_apart(group, &places)?;
        Ok((places, own?))
    })
}

/// The error of a kernel of ours that would have to reach a rank that only the network connects.
pub(super) fn out_of_reach(group: &Group, op: &'static str, rank: usize) -> Error {
    Error::Unavailable {
        what: format!("{op} by a kernel on rank {} of {group:?}", group.rank()),
        why: format!(
            "only the network connects rank {rank} with some ranks; put, get and the operations of Symmetric::nvshmem go \
             over it"
        ),
    }
}

/// Tells all ranks what this one has to say, and does `part` with what all have: an error on all if one fails.
pub(crate) fn exchange<T: Serialize + DeserializeOwned, R>(
    group: &Group,
    op: &'static str,
    own: T,
    part: impl FnOnce(Vec<T>) -> Result<R>,
) -> Result<R> {
    let terms = [("operation", format!("{op} on devices"))];
    let own = postcard::to_stdvec(&own).unwrap_or_default();
    let read = |(rank, card): (usize, Vec<u8>)| {
        postcard::from_bytes(&card).map_err(|e| Error::Protocol {
            with: format!("rank {rank}"),
            expected: format!("its part of {op}"),
            got: e.to_string(),
        })
    };
    group.converse(op, group.deadline(), |conversation| {
        let nothing = || Ok(None);
        conversation.hold(&terms, own, nothing, |cards, _| {
            let all: Result<Vec<T>> = cards.into_iter().enumerate().map(read).collect();
            part(all?)
        })
    })
}

/// The group's limit for a wait; 0 for ever.
pub(super) fn nanoseconds(group: &Group) -> u64 {
    let limit = group.deadline().remaining().unwrap_or(Duration::ZERO);
    u64::try_from(limit.as_nanos()).unwrap_or(0)
}
