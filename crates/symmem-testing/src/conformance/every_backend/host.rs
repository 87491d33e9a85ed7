//! Main memory, of the backend `process` or `host`.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use symmem::{
    Algorithm, Buffer, Deadline, Error, Group, Handle, Number, Open, Pool, ReduceOp, Result,
    Symmetric, World,
};

use super::LONG;
use super::platform::{Call, Memory, Platform, Way};

/// The world's own backend.
pub struct OnHost<'a>(pub &'a World, pub &'static str);

/// In one of two phases; none only while it changes.
pub struct HostMemory<T: Number> {
    own: Option<Symmetric<T>>,
    open: Option<Open<T>>,
}

impl<T: Number> HostMemory<T> {
    fn own(&self) -> &Symmetric<T> {
        self.own.as_ref().expect("the phase in which each rank owns its part")
    }

    fn own_mut(&mut self) -> &mut Symmetric<T> {
        self.own.as_mut().expect("the phase in which each rank owns its part")
    }

    fn opened(&self) -> &Open<T> {
        self.open.as_ref().expect("the phase of puts and gets")
    }
}

impl Platform for OnHost<'_> {
    type Buffer<T: Number> = Buffer<T>;
    type Memory<T: Number> = HostMemory<T>;
    type Pool = Pool;

    const KEEPS: bool = true;

    fn world(&self) -> &World {
        self.0
    }

    fn names(&self) -> (&'static str, String) {
        (self.1, "host".to_owned())
    }

    fn ways<T: Number>(&self) -> &'static [Way] {
        &[Way::Auto, Way::Staged, Way::OneShot, Way::TwoShot]
    }

    fn alloc<T: Number>(&self, len: usize) -> Result<Buffer<T>> {
        self.0.alloc(len)
    }

    fn persistent<T: Number>(&self, id: u64, len: usize) -> Result<Buffer<T>> {
        self.0.alloc_persistent(id, len)
    }

    fn pool(&self, bytes: usize) -> Pool {
        Pool::new(self.0, bytes)
    }

    fn cut<T: Number>(&self, pool: &Pool, len: usize) -> Result<Buffer<T>> {
        pool.alloc(len)
    }

    fn at<T: Number>(&self, buffer: &Buffer<T>) -> (usize, usize) {
        (buffer.local().as_ptr() as usize, buffer.offset())
    }

    fn rendezvous<T: Number>(&self, buffer: Buffer<T>, group: &Group) -> Result<HostMemory<T>> {
        let own = buffer.rendezvous(group).map_err(|failed| failed.error)?;
        Ok(HostMemory { own: Some(own), open: None })
    }

    fn check_told(&self, error: &Error, what: &str) {
        assert!(matches!(error, Error::Mismatch { what: told, .. } if *told == what), "{error}");
    }
}

impl<T: Number> Memory<T> for HostMemory<T> {
    fn handle(&self) -> &Handle {
        match &self.open {
            Some(open) => open.handle(),
            None => self.own().handle(),
        }
    }

    fn write(&mut self, data: &[T]) {
        self.own_mut().local_mut().copy_from_slice(data);
    }

    fn read(&self) -> Result<Vec<T>> {
        Ok(self.own().local().to_vec())
    }

    fn pad(&self) -> Vec<u32> {
        let handle = self.handle();
        let words = handle.signal_pad().words(handle.rank()).unwrap();
        words.iter().map(|word| word.load(Relaxed)).collect()
    }

    fn all_reduce(&mut self, op: ReduceOp, way: Way) -> Result<()> {
        let algorithm = match way {
            Way::Auto => Algorithm::Auto,
            Way::Staged => Algorithm::Staged,
            Way::OneShot => Algorithm::OneShot,
            Way::TwoShot => Algorithm::TwoShot,
        };
        self.own_mut().all_reduce_with(op, algorithm)
    }

    fn broadcast(&mut self, root: usize) -> Result<()> {
        self.own_mut().broadcast(root)
    }

    fn call(&mut self, call: Call, out: &mut [T]) -> Result<()> {
        let x = self.own_mut();
        match call {
            Call::AllReduce(op) => x.all_reduce_into(op, out),
            Call::Reduce(op, root) => x.reduce(op, root, out),
            Call::ReduceScatter(op) => x.reduce_scatter(op, out),
            Call::ReduceColumns(op, columns) => x.reduce_scatter_last_dim(op, columns, out),
            Call::AllGather => x.all_gather(out),
            Call::AllToAll => x.all_to_all(out),
            Call::Gather(root) => x.gather(root, out),
            Call::Scatter(root) => x.scatter(root, out),
        }
    }

    fn barrier(&self) -> Result<()> {
        self.handle().group().barrier()
    }

    fn open(&mut self) {
        let own = self.own.take().expect("one open at a time");
        self.open = Some(own.open().unwrap());
    }

    fn close(&mut self) {
        let open = self.open.take().expect("an open before it");
        self.own = Some(open.close().unwrap());
    }

    fn put(&self, rank: usize, at: usize, data: &[T]) -> Result<()> {
        self.opened().put(rank, at, data)
    }

    fn get(&self, rank: usize, at: usize, out: &mut [T]) -> Result<()> {
        self.opened().get(rank, at, out)
    }

    fn put_with_signal(&self, to: usize, at: usize, data: &[T], channel: usize) -> Result<()> {
        self.opened().put_signal(to, at, data, channel, Deadline::within(LONG))
    }

    fn put_signal(&self, to: usize, channel: usize, within: Duration) -> Result<()> {
        self.handle().signal_pad().put(to, channel, Deadline::within(within))
    }

    fn wait_signal(&self, from: usize, channel: usize, within: Duration) -> Result<()> {
        self.handle().signal_pad().wait(from, channel, Deadline::within(within))
    }
}
