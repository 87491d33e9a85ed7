//! Memory of a device as users hold it: their own ([`Buffer`]), and the same on all ranks ([`Symmetric`]).
//!
//! Stream work is asynchronous, so the order of the streams decides when memory is accessed, and not the borrow checker.
//! Calls are safe as long as all work on a value goes through its own methods.
#![allow(unsafe_code)] // S1 (handles keep mappings), S3 (lengths checked here), S4

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::cuda::device::gpu::Gpu;
use crate::cuda::group::comm::Comm;
use crate::cuda::group::layout::DeviceHandle;
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::Stream;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::memory::Backend;
use crate::memory::block::Block;
use crate::symmetric::{Handle, Pool};

/// Memory of a device, this rank's alone. Zeroed.
pub struct Buffer<T> {
    gpu: Gpu,
    block: Arc<Block>,
    len: usize,
    elements: PhantomData<T>,
}

impl Gpu {
    /// Allocates `len` elements on this device, zeroed, for use in groups of `group`'s world. Not collective, unless the
    /// memory is from NVSHMEM's heap: see [`Gpu::with_backend`].
    ///
    /// ```no_run
    /// use symmem::cuda::Gpu;
    /// use symmem::{ReduceOp, World};
    ///
    /// let world = World::from_env()?;
    /// let gpu = Gpu::open(world.local_rank() as u32)?;
    /// let stream = gpu.stream()?;
    /// let mut x = gpu.alloc::<f32>(&world, 1024)?.rendezvous(&world)?;
    /// x.write(&[1.0; 1024], &stream)?;
    /// x.all_reduce(ReduceOp::Sum, &stream)?;
    /// let sums = x.read(&stream)?; // waits for the stream
    /// # drop(sums);
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn alloc<T: Element>(&self, group: &Group, len: usize) -> Result<Buffer<T>> {
        let block = group.block_of(self.backend(), len, T::DTYPE)?;
        Ok(Buffer { gpu: self.clone(), block, len, elements: PhantomData })
    }

    /// As [`Gpu::alloc`], with a signal pad of `pad` bytes, which is the same on all ranks of a rendezvous.
    pub fn alloc_with_pad<T: Element>(
        &self,
        group: &Group,
        len: usize,
        pad: usize,
    ) -> Result<Buffer<T>> {
        let block = group.block_with_pad(self.backend(), len, T::DTYPE, pad)?;
        Ok(Buffer { gpu: self.clone(), block, len, elements: PhantomData })
    }

    /// As [`Group::alloc_persistent`], on this device: the same id returns the same memory again, with its contents and
    /// its rendezvous. Work that a former user has put into streams may still be running.
    pub fn alloc_persistent<T: Element>(
        &self,
        group: &Group,
        id: u64,
        len: usize,
    ) -> Result<Buffer<T>> {
        let backend: Arc<dyn Backend> = self.backend();
        let make = || Ok(self.alloc::<T>(group, len)?.block);
        let block = group.persistent(id, len, &backend, T::DTYPE, make)?;
        Ok(Buffer { gpu: self.clone(), block, len, elements: PhantomData })
    }

    /// A pool of this device's memory, allocated `segment_bytes` at a time (or more, for a larger buffer), for use in
    /// groups of `group`'s world.
    pub fn pool(&self, group: &Group, segment_bytes: usize) -> Pool<Gpu> {
        Pool::on(self.clone(), self.backend(), group, segment_bytes)
    }
}

impl Pool<Gpu> {
    /// As [`Gpu::alloc`], from the pool: not zeroed, it holds what its last user left. Never memory that work in a
    /// stream of the device may still use.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let gpu = self.device.clone();
        gpu.collect();
        let block = self.cut(len, T::DTYPE)?;
        Ok(Buffer { gpu, block, len, elements: PhantomData })
    }
}

impl<T: Element> Buffer<T> {
    /// Sets the value that [`Group::owner_at`] gives for addresses in this memory.
    #[doc(hidden)]
    pub fn set_owner(&self, owner: std::sync::Weak<dyn std::any::Any + Send + Sync>) {
        self.block.set_owner(owner);
    }

    /// Maps all ranks' buffers into each. Collective over `group`, the first time for this allocation and group.
    pub fn rendezvous(self, group: &Group) -> Result<Symmetric<T>> {
        self.symmetric(group)
    }

    /// As [`Buffer::rendezvous`], but the caller keeps the buffer, and must order the work that is put into streams
    /// through both.
    pub fn symmetric(&self, group: &Group) -> Result<Symmetric<T>> {
        let memory = Memory::of(&self.gpu, &self.block, group, self.len, T::DTYPE)?;
        Ok(Symmetric { memory, elements: PhantomData })
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Its address, for your own kernels and [`Group::rendezvous_at`].
    pub fn address(&self) -> u64 {
        self.block.region().address() as u64
    }

    /// Byte offset within the allocation that this buffer was cut from; 0 except for buffers of a pool.
    pub fn offset(&self) -> usize {
        self.block.offset()
    }

    /// The elements, as an input of collectives.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address(), len: self.len, of: PhantomData }
    }

    /// The elements, as an output of collectives.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address(), len: self.len, of: PhantomData }
    }

    /// Copies `data` to the device, and waits for it.
    pub fn write(&mut self, data: &[T], stream: &Stream) -> Result<()> {
        let gpu = self.gpu.clone();
        upload(&gpu, self.view_mut(), data, stream)
    }

    /// Waits until `stream` has completed, and returns the elements.
    pub fn read(&self, stream: &Stream) -> Result<Vec<T>> {
        download(&self.gpu, self.view(), stream)
    }
}

/// Elements of a device's memory.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    of: PhantomData<&'a T>,
}

/// Elements of a device's memory, to write.
pub struct ViewMut<'a, T> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    of: PhantomData<&'a mut T>,
}

impl<T> View<'_, T> {
    /// The same without their type.
    pub(crate) fn elements(&self) -> Elements {
        Elements { address: self.address, len: self.len }
    }

    /// A view of memory that was not allocated by this library.
    ///
    /// # Safety
    /// The device of the call can read `len` elements at `address` until what is put into the stream is done.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }
}

impl<T> ViewMut<'_, T> {
    /// The same without their type.
    pub(crate) fn elements(&self) -> Elements {
        Elements { address: self.address, len: self.len }
    }

    /// A view of memory that was not allocated by this library.
    ///
    /// # Safety
    /// The device of the call can write `len` elements at `address` until what is put into the stream is done, and nobody
    /// else touches them meanwhile.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, of: PhantomData }
    }
}

/// Memory of the same length on the devices of all ranks of a group, mapped into each.
pub struct Symmetric<T> {
    pub(crate) memory: Memory,
    elements: PhantomData<T>,
}

impl<T: Element> Symmetric<T> {
    fn new(gpu: Gpu, comm: Arc<Comm>, handle: Handle, len: usize) -> Self {
        Self { memory: Memory::new(gpu, comm, handle, len, T::DTYPE), elements: PhantomData }
    }

    /// `len` elements of any type at byte `offset` of every rank's memory, as [`Handle::part`] of host memory. Not
    /// collective.
    ///
    /// # Safety
    /// The caller must order the work that is put into streams through several values with the same elements, and all
    /// ranks that make a call use the same offset.
    pub unsafe fn part<U: Element>(&self, offset: usize, len: usize) -> Result<Symmetric<U>> {
        let Memory { gpu, comm, handle, .. } = &self.memory;
        let handle = handle.range::<U>(offset, len)?;
        Ok(Symmetric::new(gpu.clone(), Arc::clone(comm), handle, len))
    }

    /// How many elements each rank has.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its group.
    pub fn group(&self) -> &Group {
        self.memory.group()
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.memory.gpu
    }

    /// The handle without a type: addresses of all ranks' memory and signal pads.
    pub fn handle(&self) -> &Handle {
        &self.memory.handle
    }

    /// What your own kernels get by value, as `SymmemHandle` of `kernels/symmem.cuh`.
    pub fn device_handle(&self) -> DeviceHandle {
        self.memory.device_handle_about(u32::MAX)
    }

    /// This rank's elements, as an input of collectives.
    pub fn view(&self) -> View<'_, T> {
        let Elements { address, len } = self.memory.own();
        View { address, len, of: PhantomData }
    }

    /// This rank's elements, as an output of collectives on other memory.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let Elements { address, len } = self.memory.own();
        ViewMut { address, len, of: PhantomData }
    }

    /// Copies `data` to this rank's elements, and waits for that. Fails if something failed before it.
    pub fn write(&mut self, data: &[T], stream: &Stream) -> Result<()> {
        self.memory.check("write")?;
        let gpu = self.memory.gpu.clone();
        upload(&gpu, self.view_mut(), data, stream)
    }

    /// Waits until `stream` has completed, and returns this rank's elements. Fails if something in the stream failed.
    pub fn read(&self, stream: &Stream) -> Result<Vec<T>> {
        let data = download(&self.memory.gpu, self.view(), stream);
        self.memory.check("read")?;
        data
    }

    /// For a caller that refuses a collective that its peers make. Their waiting kernels give up with
    /// [`Error::PeerFailed`], which names this rank. All ranks then call [`Group::resync`]. Not while a graph is captured.
    pub fn refuse(&self, op: &'static str) -> Result<()> {
        self.memory.refuse(op)
    }

    /// Waits until `stream` has completed. Fails if a call of this group has failed, or of another group on the device.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        let done = stream.synchronize();
        self.memory.check("synchronize")?;
        done
    }
}

/// Copies `data` to the device, and waits for it.
pub(crate) fn upload<T: Element>(
    gpu: &Gpu,
    to: ViewMut<'_, T>,
    data: &[T],
    stream: &Stream,
) -> Result<()> {
    check_len("write", to.len, data.len())?;
    // SAFETY: S3: as long as each other; `data` is borrowed.
    unsafe { upload_bytes(gpu, to.address, data.as_ptr().cast(), size_of_val(data), stream) }
}

/// # Safety
/// So many bytes can be read and written there.
unsafe fn upload_bytes(
    gpu: &Gpu,
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: &Stream,
) -> Result<()> {
    stream.check_runs("write")?;
    gpu.call(|driver| {
        // SAFETY: as the caller promises, until the stream is empty.
        unsafe { driver.copy_to_device(to, from, bytes, stream.raw()) }?;
        driver.stream_synchronize(stream.raw())
    })?;
    gpu.check_failures_in("write")
}

fn download<T: Element>(gpu: &Gpu, from: View<'_, T>, stream: &Stream) -> Result<Vec<T>> {
    let mut data: Vec<T> = Vec::with_capacity(from.len);
    let (to, bytes) = (data.as_mut_ptr().cast(), from.len * size_of::<T>());
    // SAFETY: S3: as long as each other, and nobody else has `data`.
    unsafe { download_bytes(gpu, to, from.address, bytes, stream) }?;
    // SAFETY: so many elements have been written, and `Element`s have no invalid bits.
    unsafe { data.set_len(from.len) };
    Ok(data)
}

/// # Safety
/// So many bytes can be read and written there.
unsafe fn download_bytes(
    gpu: &Gpu,
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: &Stream,
) -> Result<()> {
    stream.check_runs("read")?;
    gpu.call(|driver| {
        // SAFETY: as the caller promises, until the stream is empty.
        unsafe { driver.copy_to_host(to, from, bytes, stream.raw()) }?;
        driver.stream_synchronize(stream.raw())
    })?;
    gpu.check_failures_in("read")
}

pub(crate) fn check_len(op: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    let expected = format!("{expected} elements");
    Err(Error::usage(op, expected, got.to_string()))
}

debug_of!([T: Element] Buffer<T>, "Buffer":
    |this| gpu = this.gpu, dtype = T::DTYPE, len = this.len);

debug_of!([T] View<'_, T>, "View": |this| address = this.address, len = this.len);

debug_of!([T] ViewMut<'_, T>, "ViewMut": |this| address = this.address, len = this.len);

debug_of!([T] Symmetric<T>, "Symmetric": |this| gpu = this.memory.gpu, handle = this.memory.handle);
