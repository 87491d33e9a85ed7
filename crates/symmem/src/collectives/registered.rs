//! Collectives on memory that each rank registers for itself, as NCCL's users register buffers; or on ordinary memory.
//!
//! A call begins with an exchange in which every rank tells all others where its data is: in ordinary memory, in a registered allocation
//! that is not mapped yet, or at an offset in the allocation of a rendezvous. All ranks know the same locations, so all choose the same
//! route. If all data is in mapped memory, each rank reads its peers' data in place. If it can be mapped, all ranks map it, once for
//! each allocation, and exchange locations again. Otherwise the data goes through the staging buffers. So registering is not
//! collective: ranks may allocate in any order.
//!
//! No rank writes to another's memory. Whatever becomes of a call, the memory of a rank changes only by what that rank does.
#![allow(unsafe_code)] // S1 (regions keep what is mapped), S2 (between the exchanges of a call), S3 (locations checked here)

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use super::host::copy::copy;
use super::host::reduce::Reduce;
use super::slices::{self, Slice};
use super::{LINE, block_len, loop_for, plan, record, share};
use crate::dtype::{DType, Element, Number, ReduceOp};
use crate::error::{Error, Result};
use crate::group::{Call, Group, Memory as Named, Op, Running, Staging, Way};
use crate::memory::block::Block;
use crate::memory::region::Region;
use crate::symmetric::{Buffer, Handle};
use crate::sync::{Deadline, lock};

/// Marks an allocation that calls may find by its address. Others are left alone: they may be in a phase of their own.
#[derive(Debug)]
pub struct Registered;

impl Registered {
    /// Lets calls find a buffer by its address, as long as the mark lives.
    #[must_use = "calls find the buffer as long as it lives"]
    pub fn mark(buffer: &Buffer<u8>) -> Arc<Self> {
        let mark = Arc::new(Self);
        let owner: Weak<dyn Any + Send + Sync> = Arc::<Self>::downgrade(&mark);
        buffer.set_owner(owner);
        mark
    }
}

/// The registered memory of all ranks of a group, as far as it is mapped here.
#[derive(Debug)]
pub struct Registrations {
    group: Group,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The rendezvous by which peers know a block of this rank, by its address.
    own: HashMap<usize, u64>,
    /// All ranks' blocks of each rendezvous.
    mapped: HashMap<u64, Handle>,
    /// Blocks that some rank could not map, by address.
    refused: HashSet<usize>,
    /// This rank uses ordinary memory only.
    is_closed: bool,
}

/// Where the data of a rank is, as it tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Location {
    /// The number of a rendezvous plus one; or `APART`, or `NEW`.
    which: u64,
    /// From the beginning of the block.
    offset: u64,
    /// Bytes of the block.
    size: u64,
}

/// In ordinary memory.
const APART: u64 = 0;
/// In memory that has not been mapped.
const NEW: u64 = u64::MAX;

impl Location {
    const ORDINARY: Self = Self { which: APART, offset: 0, size: 0 };
}

/// How the data goes to the other ranks.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    Stage,
    Map,
    ReadInPlace,
}

/// The same on all ranks, because it depends on nothing but `locations`. In a call with a root, peers read the root's data only.
fn route(locations: &[Location], root: Option<usize>) -> Route {
    let read = root.map_or(locations, |root| &locations[root..=root]);
    if read.iter().any(|location| location.which == APART) {
        return Route::Stage;
    }
    if read.iter().all(|location| location.which != NEW) {
        return Route::ReadInPlace;
    }
    let alike = |location: &Location| location.which != APART && location.size == locations[0].size;
    if locations.iter().all(alike) { Route::Map } else { Route::Stage }
}

/// A call in progress, and the data of the ranks that peers read, if they read them in place.
type Agreed<'a, 'c> = (Running<'a, 'c>, Option<Vec<Region>>);

impl Registrations {
    /// Data of fewer bytes go through the staging buffers without a question: the answer would cost more than it saves.
    const WORTH: usize = 32 << 10;
    /// Of a reduction in place, so many bytes at once: what one rank has reduced is in its cache when the others read it.
    const CHUNK: usize = 1 << 20;

    /// Of a group whose calls are all made by this value.
    pub fn new(group: &Group) -> Self {
        Self { group: group.clone(), state: Mutex::default() }
    }

    /// Forgets peers' memory, which they may free then. Later calls use ordinary memory.
    pub fn close(&self) {
        let had = std::mem::replace(
            &mut *lock(&self.state),
            State { is_closed: true, ..State::default() },
        );
        drop(had); // not under the lock: it unmaps memory
    }

    /// How many allocations are mapped.
    pub fn mapped(&self) -> usize {
        lock(&self.state).mapped.len()
    }

    fn asks(&self, bytes: usize) -> bool {
        bytes >= Self::WORTH && self.group.size() > 1 && !self.group.spans_hosts()
    }

    /// As [`Group::all_reduce`].
    pub fn all_reduce<T: Number>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let (group, len) = (&self.group, data.len());
        if !self.asks(size_of_val(data)) {
            return group.all_reduce(data, op);
        }
        let reduce = loop_for::<T>(group, "all_reduce", op)?;
        let first = data.as_mut_ptr().cast::<u8>();
        let call =
            Call { operator: Some(op), ..call(const { Op::of("all_reduce") }, T::DTYPE, len) };
        let (mut running, parts) = self.agree(&call, first, len * size_of::<T>(), None)?;
        match parts {
            // SAFETY: the data are ours; peers read them in mapped memory, each its own share until the next exchange.
            Some(parts) => unsafe {
                reduce_in_place(&mut running, &parts, (first, len), T::DTYPE, reduce)
            },
            None => {
                let data = Slice::new(first, len, T::DTYPE);
                slices::reduce_across(group, &mut running, data, reduce, Way::Any)
            }
        }
    }

    /// As [`Group::broadcast`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        let (group, len, bytes) = (&self.group, data.len(), size_of_val(data));
        if !self.asks(bytes) {
            return group.broadcast(data, root);
        }
        group.check_rank("broadcast", root)?;
        let first = data.as_mut_ptr().cast::<u8>();
        let call = Call { root: Some(root), ..call(const { Op::of("broadcast") }, T::DTYPE, len) };
        let (mut running, parts) = self.agree(&call, first, bytes, Some(root))?;
        let Some(parts) = parts else {
            return slices::spread_from(
                group,
                &mut running,
                Slice::new(first, len, T::DTYPE),
                root,
            );
        };
        if group.rank() != root {
            let from = address(&parts[0], 0, bytes)?;
            // SAFETY: the root's data, which it leaves as they are until all are done; ours are our own.
            unsafe { copy(from, first, bytes, plan::stores(bytes)) };
        }
        finish(&mut running)
    }

    /// As [`Group::all_gather`], of `len` elements. The input may be the rank's own part of the output.
    ///
    /// # Safety
    /// `input` may be read for `len` elements, `out` written for as many from each rank, by nobody else meanwhile. They do not overlap
    /// otherwise. Without elements, they may be anything.
    pub unsafe fn all_gather<T: Element>(
        &self,
        input: *const T,
        len: usize,
        out: *mut T,
    ) -> Result<()> {
        let (group, bytes) = (&self.group, len * size_of::<T>());
        let (input, out) = if len == 0 { nothing() } else { (input, out) };
        let is_in_place = input == out.wrapping_add(group.rank() * len).cast_const();
        if !self.asks(bytes) {
            // SAFETY: as the caller promises.
            let moved =
                is_in_place.then(|| unsafe { std::slice::from_raw_parts(input, len) }.to_vec());
            let from = moved.as_ref().map_or(input, Vec::as_ptr);
            // SAFETY: as the caller promises, or what has moved.
            let from = unsafe { std::slice::from_raw_parts(from, len) };
            // SAFETY: as the caller promises; what was part of the output has moved.
            let out = unsafe { std::slice::from_raw_parts_mut(out, len * group.size()) };
            return group.all_gather(from, out);
        }
        let (input, out) = (input.cast::<u8>(), out.cast::<u8>());
        let call = call(const { Op::of("all_gather") }, T::DTYPE, len);
        let (mut running, parts) = self.agree(&call, input, bytes, None)?;
        let Some(parts) = parts else {
            // Pieces are staged while the output is written.
            // SAFETY: as the caller promises.
            let moved =
                is_in_place.then(|| unsafe { std::slice::from_raw_parts(input, bytes) }.to_vec());
            let from = moved.as_ref().map_or(input, Vec::as_ptr).cast_mut();
            return slices::gather_all(group, &mut running, Slice::new(from, len, T::DTYPE), out);
        };
        let stores = plan::stores(bytes * group.size());
        for rank in from_own(group).filter(|rank| *rank != group.rank() || !is_in_place) {
            let from = address(&parts[rank], 0, bytes)?;
            // SAFETY: the rank's data, which it leaves as they are until all are done; the caller's output has room for them.
            unsafe { copy(from, out.wrapping_add(rank * bytes), bytes, stores) };
        }
        finish(&mut running)
    }

    /// As [`Group::reduce_scatter`], of `len` elements in all. The output may be the rank's own part of the input.
    ///
    /// # Safety
    /// `input` may be read for `len` elements, `out` written for this rank's part of them, by nobody else meanwhile. They do not overlap
    /// otherwise. Without elements, they may be anything.
    pub unsafe fn reduce_scatter<T: Number>(
        &self,
        input: *const T,
        len: usize,
        op: ReduceOp,
        out: *mut T,
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let group = &self.group;
        let reduce = loop_for::<T>(group, NAME, op)?;
        let block = block_len(group, NAME, len)?;
        let bytes = block * size_of::<T>();
        let (input, out) = if len == 0 { nothing() } else { (input, out) };
        if !self.asks(bytes) {
            // SAFETY: as the caller promises; an output that is a part of what is read is written when all is done.
            let given = unsafe { std::slice::from_raw_parts(input, len) };
            if out.cast_const() != input.wrapping_add(group.rank() * block) {
                // SAFETY: as the caller promises.
                let out = unsafe { std::slice::from_raw_parts_mut(out, block) };
                return group.reduce_scatter(given, op, out);
            }
            let mut reduced = given[..block].to_vec();
            group.reduce_scatter(given, op, &mut reduced)?;
            // SAFETY: as the caller promises.
            unsafe { std::ptr::copy_nonoverlapping(reduced.as_ptr(), out, block) };
            return Ok(());
        }
        let (input, out) = (input.cast::<u8>(), out.cast::<u8>());
        let call = Call { operator: Some(op), ..call(const { Op::of(NAME) }, T::DTYPE, block) };
        let (mut running, parts) = self.agree(&call, input, len * size_of::<T>(), None)?;
        let Some(parts) = parts else {
            let blocks = Slice::new(input.cast_mut(), block, T::DTYPE);
            return slices::reduce_blocks(group, &mut running, blocks, reduce, out);
        };
        let at = group.rank() * bytes;
        let from: Result<Vec<_>> = parts.iter().map(|part| address(part, at, bytes)).collect();
        // SAFETY: the ranks' parts for this one, which nobody else reads, and they leave as they are until all are done.
        unsafe { reduce(&from?, &[out], block, plan::results(bytes * group.size(), 1)) };
        finish(&mut running)
    }

    /// Begins a call whose data are `bytes` bytes at `first`.
    fn agree<'a, 'c>(
        &'a self,
        call: &'c Call,
        first: *const u8,
        bytes: usize,
        root: Option<usize>,
    ) -> Result<Agreed<'a, 'c>> {
        let (group, deadline) = (&self.group, self.group.deadline().start());
        loop {
            let (own, block) =
                self.locate(first as usize, bytes, call.dtype.map_or(1, DType::size));
            group.reach_out(call);
            record(group, call, "registered");
            let mut running = group.begin_call(call, deadline)?;
            let locations = exchange_locations(&mut running, own)?;
            match (route(&locations, root), block) {
                (Route::ReadInPlace, _) => {
                    let read = locations.iter().enumerate();
                    let read = read.filter(|(rank, _)| root.is_none_or(|root| root == *rank));
                    let parts = read.map(|(rank, at)| self.part(rank, at, bytes));
                    return Ok((running, Some(parts.collect::<Result<_>>()?)));
                }
                (Route::Map, Some(block)) => {
                    drop(running);
                    self.map(&block, deadline)?;
                }
                _ => return Ok((running, None)),
            }
        }
    }

    /// Where data of this rank lie, and the block if they lie in one that peers may read.
    fn locate(&self, first: usize, bytes: usize, size: usize) -> (Location, Option<Arc<Block>>) {
        let ordinary = (Location::ORDINARY, None);
        let Some((block, offset)) = self.group.context().table.find(first) else { return ordinary };
        let had = block.shape().bytes;
        let fits = offset.is_multiple_of(size) && bytes <= had - offset;
        if !fits || !block.owner().is_some_and(|owner| owner.is::<Registered>()) {
            return ordinary;
        }
        let (state, key) = (lock(&self.state), block.region().address());
        if state.is_closed || state.refused.contains(&key) {
            return ordinary;
        }
        let which = state.own.get(&key).map_or(NEW, |number| number + 1);
        drop(state);
        (Location { which, offset: offset as u64, size: had as u64 }, Some(block))
    }

    /// Maps all ranks' blocks. If it cannot be done, and all ranks know, this one is not tried again.
    fn map(&self, block: &Arc<Block>, deadline: Deadline) -> Result<()> {
        let key = block.region().address();
        match Handle::of_all(block, &self.group, deadline) {
            Ok(handle) => {
                let mut state = lock(&self.state);
                if !state.is_closed {
                    state.own.insert(key, handle.number());
                    state.mapped.insert(handle.number(), handle);
                }
                Ok(())
            }
            Err(Error::PeerFailed { .. } | Error::Unavailable { .. } | Error::System { .. }) => {
                lock(&self.state).refused.insert(key);
                Ok(())
            }
            // Others may have succeeded, and must not count on this rank.
            Err(error) => {
                self.close();
                Err(error)
            }
        }
    }

    /// The data of a rank, at the location that it has told.
    fn part(&self, rank: usize, at: &Location, bytes: usize) -> Result<Region> {
        let mapped = lock(&self.state).mapped.get(&(at.which - 1)).cloned();
        let data = mapped.and_then(|handle| handle.mapping().data(rank));
        let data = data.ok_or_else(|| Error::Protocol {
            with: format!("rank {rank}"),
            expected: "memory of a rendezvous of this group".into(),
            got: format!("that of rendezvous {}", at.which - 1),
        })?;
        data.part(at.offset as usize, bytes)
    }
}

fn call(op: Op, dtype: DType, len: usize) -> Call {
    // Ranks that make the call without this value would not ask: they must find out that they differ.
    let (dtype, way, memory) = (Some(dtype), Way::Direct, Named::Slices);
    Call { op, dtype, way, memory, len, ..Call::default() }
}

/// Where no elements are: empty arrays may be at null, where not even empty slices may begin.
fn nothing<T>() -> (*const T, *mut T) {
    let nowhere = NonNull::dangling().as_ptr();
    (nowhere, nowhere)
}

/// Tells all ranks where this one's data is. Returns where all ranks' is.
fn exchange_locations(running: &mut Running<'_, '_>, own: Location) -> Result<Vec<Location>> {
    let (rank, ranks) = (running.group().rank(), running.group().size());
    let staging = running.exchange(Some(&[own.which, own.offset, own.size]))?;
    let location = |of: usize| {
        if of == rank {
            return own;
        }
        let words = staging.of(of, Staging::TINY).cast::<u64>();
        // SAFETY: the words that came with the rank's flag.
        let [which, offset, size] = unsafe { words.cast::<[u64; 3]>().read_unaligned() };
        Location { which, offset, size }
    };
    Ok((0..ranks).map(location).collect())
}

/// Waits until all ranks have read what they need. A rank that gave the call up after it had come has its memory back, and may have written
/// to it while this one was reading: then the call fails here too.
fn finish(running: &mut Running<'_, '_>) -> Result<()> {
    running.exchange(None)?;
    running.check_not_given_up()
}

/// All ranks, beginning with our own, whose data are in our cache.
fn from_own(group: &Group) -> impl Iterator<Item = usize> + use<> {
    (group.rank()..group.size()).chain(0..group.rank())
}

fn address(part: &Region, at: usize, bytes: usize) -> Result<*const u8> {
    part.at::<u8>(at, bytes).map(|first| first.as_ptr().cast_const())
}

/// Reduces `data` in place: each rank its share, which the others then read.
///
/// # Safety
/// `parts` are the data of all ranks, `data` those of this one, of so many elements. All ranks have come, and until the last exchange none
/// touches what another one reads.
unsafe fn reduce_in_place(
    running: &mut Running<'_, '_>,
    parts: &[Region],
    (data, len): (*mut u8, usize),
    dtype: DType,
    reduce: Reduce,
) -> Result<()> {
    let (rank, ranks, size) = (running.group().rank(), parts.len(), dtype.size());
    let part: Vec<_> =
        parts.iter().map(|part| address(part, 0, len * size)).collect::<Result<_>>()?;
    let each = (Registrations::CHUNK / size).next_multiple_of(LINE);
    let mut from = Vec::with_capacity(ranks);
    for begin in (0..len).step_by(each) {
        let chunk = each.min(len - begin);
        let bytes_of = |rank: usize| {
            let share = share(chunk, size, rank, ranks);
            ((begin + share.start) * size, share.len())
        };
        let (at, count) = bytes_of(rank);
        from.clear();
        from.extend((0..ranks).map(|of| match of == rank {
            true => data.wrapping_add(at).cast_const(),
            false => part[of].wrapping_add(at),
        }));
        let stores = super::host::copy::Stores::Cached; // the others read it at once
        // SAFETY: our share, which no other rank touches now; the others' data of it stay as they are.
        unsafe { reduce(&from, &[data.wrapping_add(at)], count, stores) };
        running.exchange(None)?;
        for of in from_own(running.group()).skip(1) {
            let (at, count) = bytes_of(of);
            // SAFETY: that rank's share, which it has reduced; of ours, nobody reads those elements any more.
            unsafe { copy(part[of].wrapping_add(at), data.wrapping_add(at), count * size, stores) };
        }
    }
    finish(running)
}

#[cfg(test)]
mod tests;
