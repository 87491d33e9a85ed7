//! The seam between the checks and the backends.

use std::time::Duration;

use symmem::{Error, Group, Handle, Number, ReduceOp, Result, World};

/// An algorithm of an all-reduce in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the algorithms")]
pub enum Way {
    Auto,
    Staged,
    OneShot,
    TwoShot,
}

/// A collective that reads symmetric memory and writes to memory of this rank alone.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names of the collectives; roots and numbers of columns")]
pub enum Call {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, usize),
    ReduceScatter(ReduceOp),
    ReduceColumns(ReduceOp, usize),
    AllGather,
    AllToAll,
    Gather(usize),
    Scatter(usize),
}

/// Where memory comes from: a backend, as one rank uses it.
pub trait Platform {
    /// Memory of this rank alone.
    type Buffer<T: Number>;
    /// The same memory once all ranks have mapped it.
    type Memory<T: Number>: Memory<T>;
    /// What buffers can be cut from.
    type Pool;

    /// Whether a call that fails leaves the memory as it was. On devices it leaves no numbers there.
    const KEEPS: bool;

    /// All ranks.
    fn world(&self) -> &World;
    /// What handles say about the backend and the device.
    fn names(&self) -> (&'static str, String);
    /// The algorithms that an all-reduce of these elements has.
    fn ways<T: Number>(&self) -> &'static [Way];
    /// `len` elements. Collective where the backend says so.
    fn alloc<T: Number>(&self, len: usize) -> Result<Self::Buffer<T>>;
    /// The allocation with this number, which outlives its users.
    fn persistent<T: Number>(&self, id: u64, len: usize) -> Result<Self::Buffer<T>>;
    /// A pool of segments of so many bytes.
    fn pool(&self, bytes: usize) -> Self::Pool;
    /// `len` elements of a pool.
    fn cut<T: Number>(&self, pool: &Self::Pool, len: usize) -> Result<Self::Buffer<T>>;
    /// Address of a buffer, and its offset in its segment.
    fn at<T: Number>(&self, buffer: &Self::Buffer<T>) -> (usize, usize);
    /// Maps the buffers of all ranks. Collective over `group`.
    fn rendezvous<T: Number>(
        &self,
        buffer: Self::Buffer<T>,
        group: &Group,
    ) -> Result<Self::Memory<T>>;
    /// Checks the error of a rank whose peers made another call; `what` is the difference.
    fn check_told(&self, error: &Error, what: &str);

    /// Memory of a group.
    fn memory<T: Number>(&self, group: &Group, len: usize) -> Result<Self::Memory<T>> {
        self.rendezvous(self.alloc(len)?, group)
    }

    /// Memory of all ranks, with this rank's elements.
    fn filled<T: Number>(&self, data: &[T]) -> Self::Memory<T> {
        let mut memory = self.memory(self.world(), data.len()).unwrap();
        memory.write(data);
        memory
    }
}

/// Symmetric memory. Every call has ended when it returns, on devices too, so its failures are its own.
pub trait Memory<T: Number> {
    /// Sizes and addresses.
    fn handle(&self) -> &Handle;
    /// Sets this rank's elements.
    fn write(&mut self, data: &[T]);
    /// This rank's elements.
    fn read(&self) -> Result<Vec<T>>;
    /// The words of this rank's signal pad.
    fn pad(&self) -> Vec<u32>;

    /// In place.
    fn all_reduce(&mut self, op: ReduceOp, way: Way) -> Result<()>;
    /// In place.
    fn broadcast(&mut self, root: usize) -> Result<()>;
    /// Any other collective, into `out`.
    fn call(&mut self, call: Call, out: &mut [T]) -> Result<()>;
    /// Of the memory's group.
    fn barrier(&self) -> Result<()>;

    /// From now on ranks may put and get. Collective.
    fn open(&mut self);
    /// Until now. Collective.
    fn close(&mut self);
    /// Writes to the elements of `rank` from `at` on.
    fn put(&self, rank: usize, at: usize, data: &[T]) -> Result<()>;
    /// Reads them.
    fn get(&self, rank: usize, at: usize, out: &mut [T]) -> Result<()>;
    /// A put, and then a signal that shows it.
    fn put_with_signal(&self, to: usize, at: usize, data: &[T], channel: usize) -> Result<()>;
    /// A signal in the memory's own pad.
    fn put_signal(&self, to: usize, channel: usize, within: Duration) -> Result<()>;
    /// Takes one.
    fn wait_signal(&self, from: usize, channel: usize, within: Duration) -> Result<()>;
}
