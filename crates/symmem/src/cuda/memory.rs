//! Memory on the devices of all ranks of a group, whatever the type of its elements. [`Symmetric`](super::Symmetric) is this with a
//! type, and its methods call those of this, which are compiled once.

use std::sync::Arc;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::group::comm::Comm;
use crate::cuda::group::layout::{DeviceHandle, GroupParameter, Pointers};
use crate::cuda::symmetric::Buffer;
use crate::dtype::DType;
use crate::error::Result;
use crate::group::Group;
use crate::memory::Multicast;
use crate::memory::block::Block;
use crate::symmetric::Handle;

/// One allocation of all ranks, and how many elements of which type it holds.
pub(crate) struct Memory {
    pub(crate) gpu: Gpu,
    pub(crate) comm: Arc<Comm>,
    pub(crate) handle: Handle,
    /// All ranks' parts as mapped here.
    pub(crate) parts: Pointers,
    /// All ranks' signal pads likewise.
    pads: Pointers,
    /// The address of all parts at once, or 0.
    multicast: u64,
    /// As much as this rank's part, for what has to be gathered before it is reduced.
    scratch: Option<Buffer<u8>>,
    /// Which way the last all-reduce of more than the device's cache holds went through it.
    pub(crate) backwards: bool,
    len: usize,
    dtype: DType,
}

/// Elements of a device's memory, of the type of the memory that they come from or go to.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Memory {
    pub(crate) fn new(gpu: Gpu, comm: Arc<Comm>, handle: Handle, len: usize, dtype: DType) -> Self {
        let parts = Pointers::new(&handle.buffer_ptrs());
        let pads = Pointers::new(&handle.signal_pad_ptrs());
        let multicast = handle.multicast_ptr().unwrap_or(0) as u64;
        let (scratch, backwards) = (None, false);
        Self { gpu, comm, handle, parts, pads, multicast, scratch, backwards, len, dtype }
    }

    /// The block of `len` elements with those of all ranks. Collective, as [`Buffer::rendezvous`].
    pub(crate) fn of(
        gpu: &Gpu,
        block: &Arc<Block>,
        group: &Group,
        len: usize,
        dtype: DType,
    ) -> Result<Self> {
        let backend = gpu.backend();
        let comm = Comm::of(group, gpu, backend.unreached(group))?;
        let handle = comm.map(block, group, &*backend, dtype)?;
        if comm.has_multicast {
            let set_up = || backend.multicast(gpu, &handle, comm.is_over_fabric());
            Multicast::try_for(block, handle.mapping(), set_up)?;
        }
        backend.mapped(&handle)?;
        handle.mapping().attached.get_or_add(|| Arc::clone(&comm)); // for as long as peers may be at work on it
        comm.watch_pad(&handle);
        Ok(Self::new(gpu.clone(), comm, handle, len, dtype))
    }

    pub(crate) fn group(&self) -> &Group {
        self.handle.group()
    }

    /// Elements of each rank.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of an element.
    pub(crate) fn size(&self) -> usize {
        self.dtype.size()
    }

    /// Bytes of each rank.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.size()
    }

    /// This rank's elements.
    pub(crate) fn own(&self) -> Elements {
        let address = self.parts.0.get(self.group().rank()).copied().unwrap_or(0);
        Elements { address, len: self.len }
    }

    /// What a kernel of ours gets by value, which says by `op` what it is about. No vector: this is on the way of every signal.
    #[inline]
    pub(crate) fn device_handle_about(&self, op: u32) -> DeviceHandle {
        let GroupParameter { rank, size, scope, mailbox, pads, .. } = self.comm.parameter;
        DeviceHandle {
            rank,
            size,
            scope,
            channels: self.channels(),
            op,
            reserved: 0,
            timeout: self.comm.limit(self.group()),
            mailbox,
            buffers: self.parts,
            pads: self.pads,
            multicast: self.multicast,
            group_pads: pads,
        }
    }

    /// How many channels the pads have.
    pub(crate) fn channels(&self) -> u32 {
        (self.handle.signal_pad_size() / 4 / self.group().size()) as u32
    }

    /// Memory of this rank's alone, as much as its part; allocated when first asked for.
    pub(crate) fn scratch(&mut self) -> Result<u64> {
        if self.scratch.is_none() {
            self.scratch = Some(self.gpu.of_driver().alloc(self.handle.group(), self.bytes())?);
        }
        Ok(self.scratch.as_ref().map_or(0, |scratch| scratch.view().address))
    }

    /// Fails if a call of the group has failed, or of another group on the device.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        self.comm.check(self.group(), op)
    }

    pub(crate) fn refuse(&self, op: &'static str) -> Result<()> {
        self.gpu.check_free(self.group(), op)?;
        self.comm.check_together(self.group(), op)?;
        self.comm.give_up(op)
    }
}
