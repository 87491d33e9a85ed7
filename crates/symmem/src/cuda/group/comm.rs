//! What a group has on a device: pads on which kernels of all ranks synchronise, the mailbox in which they note what went wrong, and
//! the order of what the group does there.
//!
//! A kernel that gives up tells all ranks, notes why, and returns; all later ones return at once. On the host every call of
//! the group is then that error, until all ranks have put the group back in step: see `failures`.
#![allow(unsafe_code)] // S3 (addresses within the pads), S4

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::cuda::device::gpu::{Gpu, InUse, StreamId};
use crate::cuda::device::placement::{
    Placement, check_apart, has_multicast, most_on_one, ranks_per_device, smallest_cache,
    smallest_if_unlike,
};
use crate::cuda::group::failures::default_limit;
use crate::cuda::group::layout::{GroupParameter, MAX_BLOCKS, MAX_RANKS, Pointers, pad_bytes};
use crate::cuda::group::mailbox::{Mailbox, Note, RESYNC, TOLD};
use crate::cuda::stream::graph::note_use;
use crate::cuda::stream::order::StreamOrder;
use crate::cuda::stream::replays::Replays;
use crate::cuda::stream::{Event, Stream, Target};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Context, Group, WeakGroup, op_code};
use crate::memory::Attachment;
use crate::memory::block::{Block, Mapping};
use crate::memory::cuda::{DeviceBackend, DriverMemory, Way, map_pads};
use crate::mesh::{Gone, PeerObserver, Subject};
use crate::symmetric::{Far, Handle, Offer};
use crate::sync::atomic::AtomicBool;
use crate::sync::lock;

/// What forms a group on a device.
pub(crate) const OP: &str = "rendezvous";

/// A group on a device.
pub(crate) struct Comm {
    me: Weak<Self>,
    pub(crate) gpu: Gpu,
    /// Which keeps this.
    pub(crate) group: WeakGroup,
    context: Weak<Context>,
    /// The most ranks of the group on one device: the same on all ranks.
    pub(crate) neighbours: usize,
    /// The most ranks, of whatever group, that may have kernels on one device at once: likewise, for grids must be alike.
    pub(crate) ranks_per_device: usize,
    /// Bytes of the smallest device's cache: the same on all ranks, which go by it alike.
    pub(crate) cache: usize,
    /// Blocks that the smallest device holds at once, whatever the kernel; where all are alike, each kernel knows better.
    unlike: Option<u32>,
    /// All ranks have devices of their own that can be reached at once.
    pub(crate) has_multicast: bool,
    /// How memory is handed on: the same on all ranks.
    way: Way,
    /// A rank that not all others reach by an address: the same on all ranks.
    apart: Option<usize>,
    /// What all its kernels get alike.
    pub(in crate::cuda) parameter: GroupParameter,
    /// Kernels that are under way look into it.
    pub(in crate::cuda) mailbox: InUse<Mailbox>,
    members: Vec<usize>,
    state: Mutex<State>,
    /// A failure was handed out since the group was last in step.
    pub(crate) told: AtomicBool,
    /// The caller has formed another group instead: its failure is of no interest but to its own calls.
    pub(crate) replaced: AtomicBool,
    /// Of waits in groups that have no limit of their own.
    pub(crate) default_limit: Duration,
    /// This rank's signal pads of memory that the group uses: where, and how many words.
    pub(crate) signal_pads: Mutex<Vec<(Weak<Mapping>, u64, usize)>>,
    /// Not the handle, which would keep the group, which keeps this.
    pads: (Arc<Block>, Arc<Mapping>),
}

/// One launch of a group: what its kernel gets, and where it goes.
pub(crate) struct LaunchContext<'a> {
    pub(crate) group: GroupParameter,
    pub(crate) target: Target<'a>,
    /// For a kernel that runs for a shorter time than its launch takes the host, where replaying it is quicker.
    pub(in crate::cuda) replays: Option<&'a mut Replays>,
}

struct State {
    order: StreamOrder,
    replays: Replays,
}

impl Comm {
    /// That of `group` on `gpu`; collective the first time.
    ///
    /// Where the group's memory says that a rank is `apart`, which only the network connects, or ranks of several hosts have
    /// no fabric handles, no kernel synchronises all: see [`Comm::check_together`].
    pub(crate) fn of(group: &Group, gpu: &Gpu, apart: Option<usize>) -> Result<Arc<Self>> {
        let number = u64::from(gpu.number()) | u64::from(apart.is_some()) << 32;
        group.attached(number, || Self::form(group, gpu, apart))
    }

    fn form(group: &Group, gpu: &Gpu, apart: Option<usize>) -> Result<Arc<Self>> {
        let size = group.size();
        if size > MAX_RANKS {
            let expected = format!("a group of at most {MAX_RANKS} ranks on a device");
            return Err(group.usage(OP, expected, size.to_string()));
        }
        gpu.check_free(group, OP)?;
        // Whatever can fail on one rank alone comes before all agree to go on.
        let own = prepared(group, gpu);
        let (placements, own) = group.gather_and(OP, Placement::new(group, gpu), |placements| {
            check_apart(group, &placements)?;
            Ok((placements, own?))
        })?;
        let (block, mailbox, events, default_limit) = own;
        let neighbours = most_on_one(&placements);
        let able: Vec<bool> = placements.iter().map(|placement| placement.has_fabric).collect();
        let (handle, way) = map_pads(group, &block, &able)?;
        let is_parted = matches!(way, Way::WithinHosts(_));
        let apart = apart.or_else(|| group.first_beyond().filter(|_| is_parted));
        let parameter = GroupParameter {
            rank: group.rank() as u32,
            size: size as u32,
            scope: u32::from(neighbours == size),
            op: 0,
            call: 0,
            reserved: 0,
            timeout: 0,
            mailbox: mailbox.memory.device,
            pads: pads_to_tell(&handle),
        };
        let comm = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            gpu: gpu.clone(),
            group: group.weak(),
            context: Arc::downgrade(group.context()),
            neighbours,
            ranks_per_device: ranks_per_device(group, &placements),
            cache: smallest_cache(&placements),
            unlike: smallest_if_unlike(&placements),
            has_multicast: !is_parted && has_multicast(group, &placements),
            way,
            apart,
            parameter,
            mailbox: gpu.in_use(mailbox),
            members: group.world_ranks().to_vec(),
            state: Mutex::new(State {
                order: StreamOrder::new(gpu, events),
                replays: Replays::default(),
            }),
            told: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
            default_limit,
            signal_pads: Mutex::default(),
            pads: handle.keep(),
        });
        let (observer, hook): (Weak<Self>, Weak<Self>) = (comm.me.clone(), comm.me.clone());
        group.context().mesh.watch(observer);
        group.on_resync(hook);
        gpu.replace_failed(group);
        gpu.opened.failures.watch(&comm);
        Ok(comm)
    }

    /// Maps all ranks' counterparts of `block`, which is of this backend. Collective the first time.
    pub(crate) fn map(
        &self,
        block: &Arc<Block>,
        group: &Group,
        backend: &dyn DeviceBackend,
        dtype: DType,
    ) -> Result<Handle> {
        let placement = Some(self.pads.1.number);
        let far = match &self.way {
            Way::WithinHosts(why) if !backend.has_network() => Far::Never(why),
            Way::WithinHosts(_) => Far::IfItCan,
            Way::Fabric | Way::Descriptors => Far::OverFabric,
        };
        let over_fabric = self.is_over_fabric();
        Handle::offer(block, group, &Offer { over_fabric, far, placement, ..Offer::new(dtype) })
    }

    /// Whether memory is handed on by fabric handles.
    pub(crate) fn is_over_fabric(&self) -> bool {
        matches!(self.way, Way::Fabric)
    }

    /// The most blocks of a kernel that each rank may launch, where `fit` are on this rank's device at once: the same on all
    /// ranks, and so that those of all ranks that share a device fit on it, for they wait for each other.
    pub(crate) fn blocks_together(&self, fit: u32) -> u32 {
        (self.unlike.unwrap_or(fit) / self.ranks_per_device as u32).clamp(1, MAX_BLOCKS)
    }

    /// Makes the group's next kernel, by `launch`, come after its last, whatever their streams.
    pub(crate) fn enqueue(
        &self,
        group: &Group,
        op: &'static str,
        call: u32,
        stream: &Stream,
        launch: impl FnOnce(LaunchContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut state, group, target) = self.begin(group, op, call, stream)?;
        // Several processes' graphs a device takes up one after the other.
        let may = target.capture.is_none() && self.ranks_per_device <= 2;
        launch(LaunchContext { group, target, replays: may.then_some(&mut state.replays) })?;
        state.order.is_last(target);
        Ok(())
    }

    #[inline(never)] // there is an `enqueue` for each operation and element type
    fn begin<'a>(
        &'a self,
        group: &Group,
        op: &'static str,
        call: u32,
        stream: &'a Stream,
    ) -> Result<(MutexGuard<'a, State>, GroupParameter, Target<'a>)> {
        self.check_together(group, op)?;
        stream.check_gpu(op, &self.gpu).map_err(|e| e.at_rank(group.rank()))?;
        let mut state = lock(&self.state);
        group.check_whole(op)?;
        self.check(group, op)?;
        note_use(&self.me);
        let target = state.order.after_last(group, op, stream)?;
        let timeout = self.limit(group);
        let group = GroupParameter { op: op_code(op), call, timeout, ..self.parameter };
        Ok((state, group, target))
    }

    /// Before something goes there that waits for peers, and for which the group's next kernel must not wait.
    pub(crate) fn mark_before(&self, target: Target<'_>) {
        lock(&self.state).order.mark_last(target);
    }

    /// Has `work` put something into `stream` that does not synchronise with the group's kernels, and is not ordered with them.
    ///
    pub(crate) fn enqueue_unordered(
        &self,
        group: &Group,
        op: &'static str,
        stream: &Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        stream.check_gpu(op, &self.gpu).map_err(|e| e.at_rank(group.rank()))?;
        group.check_whole(op)?;
        self.check(group, op)?;
        note_use(&self.me);
        lock(&self.state).order.is_used(stream.id());
        work()
    }

    /// Whether only the network connects some of its ranks.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart.is_some()
    }

    /// Refuses what kernels do with all ranks' memory, where one is out of their reach. The same on all ranks.
    pub(crate) fn check_together(&self, group: &Group, op: &'static str) -> Result<()> {
        let Some(rank) = self.apart else { return Ok(()) };
        Err(out_of_reach(group, op, rank))
    }

    /// Whether something of the group failed on this device since it was last in step, or a rank of it was lost.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.mailbox.is_marked()
    }

    pub(crate) fn has_lost_a_rank(&self) -> bool {
        !matches!(self.mailbox.poison(), 0 | RESYNC)
    }

    /// Whether it is of this rank of this world.
    pub(crate) fn is_of_world(&self, context: &Arc<Context>) -> bool {
        std::ptr::eq(self.context.as_ptr(), Arc::as_ptr(context))
    }

    /// Kernels of the group go into this stream.
    pub(crate) fn is_used_in(&self, stream: StreamId) {
        lock(&self.state).order.is_used(stream);
    }

    /// Whether none of this rank's kernels is under way.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        lock(&self.state).order.is_idle()
    }

    /// As a kernel that gives up: all ranks' kernels are told that this one does not take part in `op`.
    pub(crate) fn give_up(&self, op: &'static str) -> Result<()> {
        let (rank, op) = (self.parameter.rank, op_code(op));
        let note = Note { kind: TOLD, op, channel: 0, rank, ours: 0, theirs: 0 };
        self.mailbox.note(&note);
        let pads = self.parameter.pads.0.iter().copied().take(self.members.len());
        let service = self.gpu.stream()?;
        self.gpu.call(|driver| {
            for pad in pads {
                // SAFETY: S3: the first word of a pad, which any rank may set at any time; S1: mapped as long as this.
                unsafe { driver.memset32(pad, rank + 1, 1, service.raw()) }?;
            }
            driver.stream_synchronize(service.raw())
        })
    }

    /// Makes this rank's pad what it was in the beginning, and those of memory likewise: addresses and words.
    pub(crate) fn clear_pads(&self, others: &[(Arc<Mapping>, u64, usize)]) -> Result<()> {
        let (service, words) = (self.gpu.stream()?, pad_bytes(self.members.len()) / 4);
        let own = self.parameter.pads.0[self.parameter.rank as usize % MAX_RANKS];
        let others = others.iter().map(|(_, address, words)| (*address, *words));
        self.gpu.call(|driver| {
            for (address, words) in others.chain([(own, words)]) {
                // SAFETY: S3: our own pads, which nobody uses until all ranks have done this; S1: mapped until then.
                unsafe { driver.memset32(address, 0, words, service.raw()) }?;
            }
            driver.stream_synchronize(service.raw())
        })
    }
}

impl PeerObserver for Comm {
    fn gone(&self, world_rank: usize, gone: &Gone, subject: Option<&Subject>) {
        if subject.is_some() {
            return; // a group that is not formed, or not with this rank
        }
        let rank = self.members.iter().position(|member| *member == world_rank);
        let Some(rank) = rank else { return };
        if gone.left { self.mailbox.mark_left(rank) } else { self.mailbox.mark_lost(rank) }
    }
}

impl Attachment for Comm {
    /// After a kernel gave up, its peers' may be late, and still at it. All are done when the group is in step again.
    fn may_be_in_use(&self) -> bool {
        self.has_failed()
    }
}

/// Where a kernel of this rank tells each rank that it gave up: in its pad, or in our own for one that has no address.
fn pads_to_tell(handle: &Handle) -> Pointers {
    let pads = handle.buffer_ptrs();
    let own = pads.get(handle.rank()).copied().unwrap_or(0);
    let of = |&pad: &usize| if pad == 0 { own } else { pad };
    Pointers::new(&pads.iter().map(of).collect::<Vec<_>>())
}

/// What a rank has for itself before it tells the others: its pad, its mailbox, the events of its order, and its limit.
fn prepared(group: &Group, gpu: &Gpu) -> Result<(Arc<Block>, Mailbox, [Event; 2], Duration)> {
    let memory = Arc::new(DriverMemory(gpu.clone()));
    let block = group.block_of(memory, pad_bytes(group.size()), DType::U8)?;
    let events = [Event::new(gpu)?, Event::new(gpu)?];
    Ok((block, Mailbox::new(gpu)?, events, default_limit()?))
}

/// The error of a kernel of ours that would have to reach a rank that only the network connects.
pub(crate) fn out_of_reach(group: &Group, op: &'static str, rank: usize) -> Error {
    let what = format!("{op} by a kernel on rank {} of {group:?}", group.rank());
    Error::unavailable(
        what,
        format!(
            "only the network connects rank {rank} with some ranks; put, get and the operations of Symmetric::nvshmem go \
             over it on memory of the backend nvshmem, and NCCL's collectives and signals (Symmetric::nccl) on memory of nccl"
        ),
    )
}
