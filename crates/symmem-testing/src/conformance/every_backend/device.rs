//! Memory of a device, of the backend `cuda`, `nccl` or `nvshmem`. Each call waits for its stream.
#![allow(unsafe_code)] // an allocation's pad is read at its address

use std::time::Duration;

use symmem::cuda::{Algorithm, Buffer, Gpu, Stream, Symmetric, View};
use symmem::{Error, Group, Handle, Number, Pool, ReduceOp, Result, World};

use super::platform::{Call, Memory, Platform, Way};

/// A device that was opened with the backend, and a stream for all work.
#[derive(Clone)]
pub struct OnDevice<'a> {
    world: &'a World,
    gpu: &'a Gpu,
    stream: &'a Stream,
    /// The same device with memory of the driver, which is allocated without the other ranks.
    plain: Gpu,
}

impl<'a> OnDevice<'a> {
    /// This rank's.
    pub fn new(world: &'a World, gpu: &'a Gpu, stream: &'a Stream) -> Self {
        let plain = gpu.with_backend(Some("cuda"), world).unwrap();
        Self { world, gpu, stream, plain }
    }

    /// The same elements in memory of this rank alone.
    fn copy_of<T: Number>(&self, data: &[T]) -> Buffer<T> {
        let mut buffer = self.plain.alloc(self.world, data.len()).unwrap();
        buffer.write(data, self.stream).unwrap();
        buffer
    }
}

/// Memory of all ranks' devices.
pub struct DeviceMemory<'a, T> {
    platform: OnDevice<'a>,
    x: Symmetric<T>,
}

impl<'a> Platform for OnDevice<'a> {
    type Buffer<T: Number> = Buffer<T>;
    type Memory<T: Number> = DeviceMemory<'a, T>;
    type Pool = Pool<Gpu>;

    const KEEPS: bool = false;

    fn world(&self) -> &World {
        self.world
    }

    fn names(&self) -> (&'static str, String) {
        (self.gpu.backend_name(), format!("cuda:{}", self.gpu.number()))
    }

    fn ways<T: Number>(&self) -> &'static [Way] {
        let all = &[Way::Auto, Way::OneShot, Way::TwoShot, Way::Staged];
        // Elements of 16 bytes do not fit next to a flag.
        if size_of::<T>() > 8 { &all[..3] } else { all }
    }

    fn alloc<T: Number>(&self, len: usize) -> Result<Buffer<T>> {
        self.gpu.alloc(self.world, len)
    }

    fn persistent<T: Number>(&self, id: u64, len: usize) -> Result<Buffer<T>> {
        self.gpu.alloc_persistent(self.world, id, len)
    }

    fn pool(&self, bytes: usize) -> Pool<Gpu> {
        self.gpu.pool(self.world, bytes)
    }

    fn cut<T: Number>(&self, pool: &Pool<Gpu>, len: usize) -> Result<Buffer<T>> {
        pool.alloc(len)
    }

    fn at<T: Number>(&self, buffer: &Buffer<T>) -> (usize, usize) {
        (buffer.address() as usize, buffer.offset())
    }

    fn rendezvous<T: Number>(
        &self,
        buffer: Buffer<T>,
        group: &Group,
    ) -> Result<DeviceMemory<'a, T>> {
        Ok(DeviceMemory { platform: self.clone(), x: buffer.rendezvous(group)? })
    }

    /// Kernels compare digests of calls. The first rank that notices tells the others.
    fn check_told(&self, error: &Error, _what: &str) {
        let told = matches!(error, Error::Mismatch { what: "operation", .. });
        assert!(told || matches!(error, Error::PeerFailed { .. }), "{error}");
    }
}

impl<T: Number> DeviceMemory<'_, T> {
    /// Waits for what was put into the stream; the error of what failed there.
    fn done(&self, put: Result<()>) -> Result<()> {
        put.and_then(|()| self.x.synchronize(self.platform.stream))
    }
}

impl<T: Number> Memory<T> for DeviceMemory<'_, T> {
    fn handle(&self) -> &Handle {
        self.x.handle()
    }

    fn write(&mut self, data: &[T]) {
        self.x.write(data, self.platform.stream).unwrap();
    }

    fn read(&self) -> Result<Vec<T>> {
        self.x.read(self.platform.stream)
    }

    fn pad(&self) -> Vec<u32> {
        let OnDevice { world, plain, stream, .. } = &self.platform;
        let (handle, alone) = (self.handle(), world.subgroup(&[world.rank()]).unwrap());
        let words = handle.signal_pad_size() / 4;
        let copy = plain.alloc::<u32>(world, words).unwrap().rendezvous(&alone).unwrap();
        let own = handle.signal_pad_ptrs()[handle.rank()];
        // SAFETY: the pad has so many words, and lives until the stream is empty.
        let pad = unsafe { View::from_raw(own as u64, words) };
        copy.put(0, 0, pad, stream).unwrap();
        copy.read(stream).unwrap()
    }

    fn all_reduce(&mut self, op: ReduceOp, way: Way) -> Result<()> {
        let algorithm = match way {
            Way::Auto => Algorithm::Auto,
            Way::Staged => Algorithm::Staged,
            Way::OneShot => Algorithm::OneShot,
            Way::TwoShot => Algorithm::TwoShot,
        };
        let put = self.x.all_reduce_with(op, algorithm, self.platform.stream);
        self.done(put)
    }

    fn broadcast(&mut self, root: usize) -> Result<()> {
        let put = self.x.broadcast(root, self.platform.stream);
        self.done(put)
    }

    fn call(&mut self, call: Call, out: &mut [T]) -> Result<()> {
        let mut buffer = self.platform.copy_of(out);
        let (x, to, stream) = (&mut self.x, buffer.view_mut(), self.platform.stream);
        let put = match call {
            Call::AllReduce(op) => x.all_reduce_into(op, to, stream),
            Call::Reduce(op, root) => x.reduce(op, root, to, stream),
            Call::ReduceScatter(op) => x.reduce_scatter(op, to, stream),
            Call::ReduceColumns(op, n) => x.reduce_scatter_last_dim(op, n, to, stream),
            Call::AllGather => x.all_gather(to, stream),
            Call::AllToAll => x.all_to_all(to, stream),
            Call::Gather(root) => x.gather(root, to, stream),
            Call::Scatter(root) => x.scatter(root, to, stream),
        };
        self.done(put)?;
        out.copy_from_slice(&buffer.read(stream)?);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.done(self.x.barrier(self.platform.stream))
    }

    fn open(&mut self) {
        self.barrier().unwrap();
    }

    fn close(&mut self) {
        self.barrier().unwrap();
    }

    fn put(&self, rank: usize, at: usize, data: &[T]) -> Result<()> {
        let buffer = self.platform.copy_of(data);
        self.done(self.x.put(rank, at, buffer.view(), self.platform.stream))
    }

    fn get(&self, rank: usize, at: usize, out: &mut [T]) -> Result<()> {
        let mut buffer = self.platform.copy_of(out);
        self.done(self.x.get(rank, at, buffer.view_mut(), self.platform.stream))?;
        out.copy_from_slice(&buffer.read(self.platform.stream)?);
        Ok(())
    }

    fn put_with_signal(&self, to: usize, at: usize, data: &[T], channel: usize) -> Result<()> {
        let buffer = self.platform.copy_of(data);
        self.done(self.x.put_with_signal(to, at, buffer.view(), channel, self.platform.stream))
    }

    fn put_signal(&self, to: usize, channel: usize, within: Duration) -> Result<()> {
        self.done(self.x.put_signal_within(to, channel, within, self.platform.stream))
    }

    fn wait_signal(&self, from: usize, channel: usize, within: Duration) -> Result<()> {
        self.done(self.x.wait_signal_within(from, channel, within, self.platform.stream))
    }
}
