//! Collectives on ordinary memory: piece by piece through the ranks' staging buffers, with the same bits as in symmetric memory.
//!
//! A rank stages a piece, and peers read it from there. Each rank has two staging buffers in turn, and a flag comes with each
//! piece, so one exchange per piece is all: while a slow rank still reads one, the others stage the next.
#![allow(unsafe_code)] // S2 (what is staged stays until the next exchange), S3 (pieces of slices checked here)

mod across;
mod cutting;
mod lengths;
mod rooted;
mod scan;

use std::ops::Range;

use super::host::copy::{Stores, copy};
use super::host::reduce::Reduce;
use super::plan::{Across, Spread};
use super::staged::{Input, Read, exchange, pieces, sources};
use super::{PerRank, block_len, check_len, copy_bytes, loop_for, plan, record, share};
use crate::dtype::{DType, Element, Number, ReduceOp};
use crate::error::Result;
use crate::group::{Call, Group, Memory as Named, Op, Running, Span, Staging, Way};
use crate::symmetric::Memory;
use across::Steps;
use cutting::{STREAM, Sources, each_piece, is_long, longest_piece};
pub(super) use rooted::{gather_at, reduce_at, scatter_from};

impl Group {
    /// Element i of `data` becomes the reduction of element i of all ranks. Collective; after an error `data` may be
    /// reduced in part.
    ///
    /// ```
    /// # symmem::World::threads(3, |world| -> symmem::Result<()> {
    /// let mut data = [1.0_f32, world.rank() as f32];
    /// world.all_reduce(&mut data, symmem::ReduceOp::Sum)?;
    /// assert_eq!(data, [3.0, 3.0]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_reduce<T: Number>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let reduce = loop_for::<T>(self, "all_reduce", op)?;
        let data = Slice::new(data.as_mut_ptr().cast(), data.len(), T::DTYPE);
        all_reduce(self, data, (op, reduce))
    }

    /// `out` becomes the `input` of all ranks, in rank order. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut all = [0; 2];
    /// world.all_gather(&[world.rank()], &mut all)?;
    /// assert_eq!(all, [0, 1]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_gather<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        let expected = input.len().saturating_mul(self.size());
        check_len(self, "all_gather", "an output", expected, out.len())?;
        let input = Slice::new(input.as_ptr().cast_mut().cast(), input.len(), T::DTYPE);
        all_gather(self, input, out.as_mut_ptr().cast())
    }

    /// `input` is one block for each rank; `out` becomes the reduction of all ranks' blocks for this one. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut sum = [0];
    /// world.reduce_scatter(&[1, 2], symmem::ReduceOp::Sum, &mut sum)?;
    /// assert_eq!(sum, [2 + 2 * world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn reduce_scatter<T: Number>(
        &self,
        input: &[T],
        op: ReduceOp,
        out: &mut [T],
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let reduce = loop_for::<T>(self, NAME, op)?;
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", block, out.len())?;
        let blocks = Slice::new(input.as_ptr().cast_mut().cast(), block, T::DTYPE);
        reduce_scatter(self, blocks, (op, reduce), out.as_mut_ptr().cast())
    }

    /// `data` becomes the `data` of rank `root`. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut data = [world.rank(); 3];
    /// world.broadcast(&mut data, 1)?;
    /// assert_eq!(data, [1; 3]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.check_rank("broadcast", root)?;
        broadcast(self, Slice::new(data.as_mut_ptr().cast(), data.len(), T::DTYPE), root)
    }

    /// `input` is one block for each rank; `out` becomes the blocks that the ranks have for this one, in rank order. Collective.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// let mut blocks = [0; 2];
    /// world.all_to_all(&[10 * world.rank(), 10 * world.rank() + 1], &mut blocks)?;
    /// assert_eq!(blocks, [world.rank(), 10 + world.rank()]);
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_to_all<T: Element>(&self, input: &[T], out: &mut [T]) -> Result<()> {
        const NAME: &str = "all_to_all";
        let block = block_len(self, NAME, input.len())?;
        check_len(self, NAME, "an output", input.len(), out.len())?;
        let blocks = Slice::new(input.as_ptr().cast_mut().cast(), block, T::DTYPE);
        all_to_all(self, blocks, out.as_mut_ptr().cast())
    }
}

/// The data of a call, or the first block of it.
#[derive(Clone, Copy)]
pub(super) struct Slice {
    first: *mut u8,
    /// Elements, in number and type.
    elements: usize,
    dtype: DType,
    /// Of what it is cut into pieces: elements, or the bytes of structs, of which one may be larger than a staging buffer.
    len: usize,
    /// Bytes of each of these.
    size: usize,
}

impl Slice {
    pub(super) fn new(first: *mut u8, elements: usize, dtype: DType) -> Self {
        let size = dtype.size();
        let (len, size) = match dtype {
            DType::Struct(_) => (elements * size, 1),
            _ => (elements, size),
        };
        Self { first, elements, dtype, len, size }
    }

    /// The own part of symmetric memory, or the first block of it, of so many elements.
    pub(super) fn of_part(memory: &Memory, elements: usize) -> Self {
        Self::new(memory.own(0), elements, memory.dtype())
    }

    fn bytes(&self) -> usize {
        self.len * self.size
    }

    fn call(&self, op: Op) -> Call {
        let (dtype, memory, len) = (Some(self.dtype), Named::Slices, self.elements);
        Call { op, dtype, memory, len, ..Call::default() }
    }

    /// From the `at`-th of them on.
    fn at(&self, at: usize) -> *mut u8 {
        self.first.wrapping_add(at * self.size)
    }

    /// Pieces of which a staging buffer holds one of each of `blocks`.
    fn pieces(&self, group: &Group, blocks: usize) -> impl Iterator<Item = Range<usize>> {
        pieces(self.len, self.size, blocks, || group.stage())
    }

    /// The same, of the first of as many blocks as there are ranks.
    fn pieces_of_blocks(&self, group: &Group, blocks: usize) -> impl Iterator<Item = Range<usize>> {
        let all = self.bytes() * group.size();
        pieces(self.len, self.size, blocks, move || longest_piece(group, all >= STREAM))
    }
}

/// How many blocks of a call with one for each rank lie in a staging buffer at once: all, or one if no rank shares its host's.
fn blocks_at_once(group: &Group, block: Slice) -> usize {
    let is_staged = block.bytes() * group.size() > Staging::TINY;
    let is_alone = is_staged && group.span().is_some_and(Span::is_one_each);
    if is_alone { 1 } else { group.size() }
}

/// Stages the same piece of each of a block for each rank, without ours, and gives where each rank has that for us.
fn exchange_blocks<'p>(
    group: &Group,
    running: &mut Running<'_, '_>,
    (block, at_once): (Slice, usize),
    piece: &Range<usize>,
    places: &'p mut PerRank<*const u8>,
) -> Result<&'p [*const u8]> {
    let (rank, ranks, bytes) = (group.rank(), group.size(), piece.len() * block.size);
    let (read, at, most) = match at_once {
        1 => (Read::BlockOnly, 0, ranks * block.bytes()), // never in the line of the flag
        _ => (Read::Block, rank * bytes, ranks * bytes),
    };
    let input = Input {
        from: block.at(piece.start).cast_const(),
        block: block.len * block.size,
        blocks: ranks,
        piece: bytes,
        without: Some(rank),
        most,
        read,
        is_long: is_long(ranks * block.bytes()),
    };
    // SAFETY: a piece of each block.
    let staging = unsafe { exchange(running, &input) }?;
    let own = block.at(rank * block.len + piece.start);
    Ok(sources(places, group, &staging, most, at, own))
}

fn begin<'g, 'c>(group: &'g Group, call: &'c Call) -> Result<Running<'g, 'c>> {
    group.reach_out(call);
    record(group, call, "slices");
    group.begin_call(call, group.deadline())
}

fn all_reduce(group: &Group, data: Slice, (op, reduce): (ReduceOp, Reduce)) -> Result<()> {
    let mut call = Call { operator: Some(op), ..data.call(const { Op::of("all_reduce") }) };
    if data.bytes() > Staging::TINY
        && let Some(span) = group.span_for(&call)?
    {
        call.way = way_across(group, span, &call)?;
        return reduce_across(group, &mut begin(group, &call)?, data, reduce, call.way);
    }
    reduce_pieces(group, &mut begin(group, &call)?, data, reduce, false)
}

/// The way of an all-reduce between hosts.
pub(super) fn way_across(group: &Group, span: &Span, call: &Call) -> Result<Way> {
    if call.bytes() <= Staging::TINY {
        return Ok(Way::Raw);
    }
    let is_passed_on =
        call.dtype.zip(call.operator).is_some_and(|(dtype, op)| plan::is_passed_on(dtype, op));
    let spread = spread(group, span, is_passed_on);
    let (rates, bytes) = (group.rates()?, call.bytes());
    let chosen = plan::quickest_across(rates, bytes, &spread);
    tracing::debug!(op = call.op.name(), bytes, ?spread, ?chosen);
    Ok(match chosen {
        Across::Raw => Way::Raw,
        Across::RawRelayed => Way::RawRelayed,
        Across::TwoHops => Way::TwoHops,
        Across::TwoHopsRelayed => Way::TwoHopsRelayed,
        Across::Chain => Way::Chain,
    })
}

/// How the ranks lie on hosts, for what can be passed on in part or not.
fn spread(group: &Group, span: &Span, is_passed_on: bool) -> Spread {
    Spread {
        ranks: group.size(),
        hosts: span.hosts().len(),
        is_even: span.ranks_per_host().is_some(),
        can_chain: is_passed_on && span.is_in_blocks(),
        stage: group.stage(),
    }
}

/// An all-reduce in place, the given way between hosts.
pub(super) fn reduce_across(
    group: &Group,
    running: &mut Running<'_, '_>,
    data: Slice,
    reduce: Reduce,
    way: Way,
) -> Result<()> {
    if way != Way::Raw
        && let Some(steps) = &mut Steps::new(group, running)
        && match way {
            Way::Chain => across::chain(steps, data, reduce)?,
            Way::RawRelayed => across::raw_relayed(steps, data, reduce)?,
            way => across::two_hops(steps, data, reduce, way == Way::TwoHopsRelayed)?,
        }
    {
        return Ok(());
    }
    reduce_pieces(group, running, data, reduce, way == Way::Raw)
}

fn reduce_pieces(
    group: &Group,
    running: &mut Running<'_, '_>,
    data: Slice,
    reduce: Reduce,
    is_raw: bool,
) -> Result<()> {
    let mut places = PerRank::new();
    for piece in data.pieces(group, 1) {
        let (first, len, bytes) = (data.at(piece.start), piece.len(), piece.len() * data.size);
        let at_once =
            bytes <= Staging::TINY || is_raw || plan::at_once(group.rates()?, bytes, group.size());
        // What of the piece this rank reduces: all of it, or its share.
        let own = if at_once { 0..len } else { share(len, data.size, group.rank(), group.size()) };
        let (at, to) = (own.start * data.size, first.wrapping_add(own.start * data.size));
        let read = match at_once {
            true => Read::All,
            false => Read::Share { len, size: data.size },
        };
        // SAFETY: a piece of the data.
        let staging = unsafe { exchange(running, &Input { read, ..Input::one(first, bytes) }) }?;
        let from = sources(&mut places, group, &staging, bytes, at, to);
        // SAFETY: what every other rank has staged, and ours, which nobody else touches.
        unsafe { reduce(from, &[to], own.len(), Stores::Cached) };
        if !at_once {
            gather_shares(group, running, first, len, data.size)?;
        }
    }
    Ok(())
}

/// Every rank has its share of the `len` elements from `first` on, and gets those of the others.
fn gather_shares(
    group: &Group,
    running: &mut Running<'_, '_>,
    first: *mut u8,
    len: usize,
    size: usize,
) -> Result<()> {
    let shares = |rank| share(len, size, rank, group.size());
    let place = |rank: usize| first.wrapping_add(shares(rank).start * size);
    let own = Input {
        most: shares(0).len() * size,
        ..Input::one(place(group.rank()), shares(group.rank()).len() * size)
    };
    // SAFETY: our share of the elements.
    let staging = unsafe { exchange(running, &own) }?;
    for rank in (0..group.size()).filter(|rank| *rank != group.rank()) {
        let from = staging.of(rank, own.most);
        // SAFETY: the rank has staged its share, and here is the place for it.
        unsafe { copy_bytes(from, place(rank), shares(rank).len() * size) };
    }
    Ok(())
}

fn all_gather(group: &Group, input: Slice, out: *mut u8) -> Result<()> {
    let call = input.call(const { Op::of("all_gather") });
    gather_all(group, &mut begin(group, &call)?, input, out)
}

/// `out` gets all ranks' `input`.
pub(super) fn gather_all(
    group: &Group,
    running: &mut Running<'_, '_>,
    input: Slice,
    out: *mut u8,
) -> Result<()> {
    if input.bytes() > Staging::TINY
        && let Some(steps) = &mut Steps::new(group, running)
        && steps.relays(input.bytes())
        && across::all_gather(steps, input, out)?
    {
        return Ok(());
    }
    each_piece(group, running, input, Sources::All(input.bytes() * group.size()), |piece, from| {
        // SAFETY: each rank has staged a piece; `out` has room for a block of each.
        unsafe { copy_pieces(group, from, input, &piece, out) };
    })
}

fn reduce_scatter(
    group: &Group,
    input: Slice,
    (op, reduce): (ReduceOp, Reduce),
    out: *mut u8,
) -> Result<()> {
    let call = Call { operator: Some(op), ..input.call(const { Op::of("reduce_scatter") }) };
    reduce_blocks(group, &mut begin(group, &call)?, input, reduce, out)
}

/// `out` gets the reduction of all ranks' blocks for this one, of which `input` is the first.
pub(super) fn reduce_blocks(
    group: &Group,
    running: &mut Running<'_, '_>,
    input: Slice,
    reduce: Reduce,
    out: *mut u8,
) -> Result<()> {
    let mut places = PerRank::new();
    let at_once = blocks_at_once(group, input);
    for piece in input.pieces_of_blocks(group, at_once) {
        let from = exchange_blocks(group, running, (input, at_once), &piece, &mut places)?;
        let to = out.wrapping_add(piece.start * input.size);
        // SAFETY: every other rank has staged a piece for us, ours is in the input; `out` has room for a block.
        unsafe { reduce(from, &[to], piece.len(), Stores::Cached) };
    }
    Ok(())
}

fn broadcast(group: &Group, data: Slice, root: usize) -> Result<()> {
    let call = Call { root: Some(root), ..data.call(const { Op::of("broadcast") }) };
    spread_from(group, &mut begin(group, &call)?, data, root)
}

/// `data` becomes that of rank `root`.
pub(super) fn spread_from(
    group: &Group,
    running: &mut Running<'_, '_>,
    data: Slice,
    root: usize,
) -> Result<()> {
    if data.bytes() > Staging::TINY
        && let Some(steps) = &mut Steps::new(group, running)
        && steps.relays(data.bytes())
        && across::broadcast(steps, data, root)?
    {
        return Ok(());
    }
    let is_root = group.rank() == root;
    each_piece(group, running, data, Sources::Some(is_root), |piece, from| {
        if !is_root {
            // SAFETY: the root has staged a piece, and here is the place for it.
            unsafe { copy_bytes(from[root], data.at(piece.start), piece.len() * data.size) };
        }
    })
}

fn all_to_all(group: &Group, input: Slice, out: *mut u8) -> Result<()> {
    let call = input.call(const { Op::of("all_to_all") });
    exchange_all(group, &mut begin(group, &call)?, input, out)
}

/// `out` gets all ranks' blocks for this one, of which `input` is the first.
pub(super) fn exchange_all(
    group: &Group,
    running: &mut Running<'_, '_>,
    input: Slice,
    out: *mut u8,
) -> Result<()> {
    let mut places = PerRank::new();
    let at_once = blocks_at_once(group, input);
    for piece in input.pieces_of_blocks(group, at_once) {
        let from = exchange_blocks(group, running, (input, at_once), &piece, &mut places)?;
        // SAFETY: each rank has staged a piece for us; `out` has room for a block of each.
        unsafe { copy_pieces(group, from, input, &piece, out) };
    }
    Ok(())
}

/// Copies each rank's piece to its place in that rank's block of `out`.
///
/// # Safety
/// The pieces may be read, and `out` written for a block of each rank.
unsafe fn copy_pieces(
    group: &Group,
    from: &[*const u8],
    block: Slice,
    piece: &Range<usize>,
    out: *mut u8,
) {
    let bytes = block.len * block.size;
    let stores = plan::stores(bytes * from.len());
    // Our own first: it is in our cache. Then each rank begins with another one.
    for rank in (group.rank()..from.len()).chain(0..group.rank()) {
        let to = out.wrapping_add(rank * bytes + piece.start * block.size);
        // SAFETY: as the caller promises.
        unsafe { copy(from[rank], to, piece.len() * block.size, stores) };
    }
}
