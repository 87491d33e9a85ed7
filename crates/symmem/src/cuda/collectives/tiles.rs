//! Matrices in symmetric memory: reductions of tiles to one or many roots, and all-to-all from one dimension to another.
#![allow(unsafe_code)] // S1, S3: tiles and lengths are checked here, and kernels touch nothing else

use crate::collectives::check_len;
use crate::cuda::Algorithm;
use crate::cuda::collectives::multimem::files;
use crate::cuda::device::kernels::parameters;
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::stream::Stream;
use crate::cuda::symmetric::{Symmetric, ViewMut};
use crate::dtype::{Element, Number, ReduceOp};
use crate::error::Result;

/// The most tiles of one rank in a call.
const MAX_TILES: usize = 16;

/// A part of a matrix: `rows` rows of `columns` elements, from element `first` of the memory on and `pitch` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Its first element.
    pub first: usize,
    /// How many rows it has.
    pub rows: usize,
    /// How many elements of each row.
    pub columns: usize,
    /// Elements from one row of the matrix to the next.
    pub pitch: usize,
}

impl Tile {
    /// One row: `len` elements from `first` on.
    pub(super) const fn flat(first: usize, len: usize) -> Self {
        Self { first, rows: 1, columns: len, pitch: len }
    }

    /// Elements from its first to its last; `None` if no memory has so many.
    fn extent(&self, pitch: usize) -> Option<usize> {
        match (self.rows, self.columns) {
            (0, _) | (_, 0) => Some(0),
            (rows, columns) => pitch.checked_mul(rows - 1)?.checked_add(columns),
        }
    }
}

/// Elements of a device's memory for a tile, to write: rows that are `pitch` elements apart, or that follow each other.
pub struct TileMut<'a, T> {
    view: ViewMut<'a, T>,
    pitch: Option<usize>,
}

impl<'a, T> TileMut<'a, T> {
    /// Rows that follow each other.
    pub fn dense(view: ViewMut<'a, T>) -> Self {
        Self { view, pitch: None }
    }

    /// Rows that are `pitch` elements apart; what is between them is left alone.
    pub fn within(view: ViewMut<'a, T>, pitch: usize) -> Self {
        Self { view, pitch: Some(pitch) }
    }

    /// Its elements, and how far its rows are apart.
    fn untyped(&self) -> (Elements, Option<usize>) {
        (self.view.elements(), self.pitch)
    }
}

/// `Tiles` of `kernels/tiles.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Tiles {
    count: u32,
    reserved: u32,
    pitch: u64,
    out_pitch: u64,
    first: [u64; MAX_TILES],
    rows: [u64; MAX_TILES],
    columns: [u64; MAX_TILES],
    out: [u64; MAX_TILES],
}

impl<T: Number> Symmetric<T> {
    /// On rank `root`, `out` becomes the reduction of all ranks' tiles; on other ranks it is not written. Collective, in
    /// `stream`, of f32, f16 and bf16.
    ///
    /// [`Algorithm::Auto`] or [`Algorithm::Multimem`].
    pub fn tile_reduce(
        &mut self,
        op: ReduceOp,
        tile: Tile,
        root: usize,
        out: TileMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "tile_reduce";
        self.memory.reduce_to_roots(NAME, op, &[tile], &[root], out.untyped(), algorithm, stream)
    }

    /// As [`Symmetric::tile_reduce`], of several tiles of one matrix. Each has a root of its own, which gets it in `out`. A
    /// rank is the root of at most one of them.
    #[allow(clippy::too_many_arguments)] // what a reduction of tiles has
    pub fn multi_root_tile_reduce(
        &mut self,
        op: ReduceOp,
        tiles: &[Tile],
        roots: &[usize],
        out: TileMut<'_, T>,
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "multi_root_tile_reduce";
        check_len(self.group(), NAME, "roots", tiles.len(), roots.len())?;
        self.memory.reduce_to_roots(NAME, op, tiles, roots, out.untyped(), algorithm, stream)
    }

    /// Blocks of a matrix of `rows` by `columns`, `pitch` elements from one row to the next, cut along dimension `dim`: the
    /// i-th ends at `offsets[i]`, and its reduction goes to rank `dst_ranks[i]`, whose `outs` become its blocks in this order.
    /// Without offsets there is one block of equal size for each rank. Without ranks, block i goes to rank i modulo their
    /// number. Collective, in `stream`, of f32, f16 and bf16.
    ///
    /// [`Algorithm::Auto`] or [`Algorithm::Multimem`].
    #[allow(clippy::too_many_arguments)] // what such a reduction has
    pub fn reduce_scatter_offset(
        &mut self,
        op: ReduceOp,
        (rows, columns, pitch): (usize, usize, usize),
        dim: usize,
        offsets: Option<&[usize]>,
        dst_ranks: Option<&[usize]>,
        outs: &mut [ViewMut<'_, T>],
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        let outs: Vec<Elements> = outs.iter().map(ViewMut::elements).collect();
        let to = (offsets, dst_ranks, &*outs);
        self.memory.reduce_scatter_offset(op, (rows, columns, pitch), dim, to, algorithm, stream)
    }
}

impl<T: Element> Symmetric<T> {
    /// All-to-all of a matrix of `rows` by `columns`, which is cut along one dimension and joined along the other.
    /// Along columns and rows (1, 0): `out` becomes, rank by rank, the columns that each has for this one. Along rows and
    /// columns (0, 1): each row of `out` becomes, rank by rank, the rows that each has for this one. Collective, in `stream`.
    pub fn all_to_all_nd(
        &mut self,
        (rows, columns): (usize, usize),
        (scatter, gather): (usize, usize),
        out: ViewMut<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        let (shape, dims) = ((rows, columns), (scatter, gather));
        self.memory.all_to_all_nd(shape, dims, out.elements(), stream)
    }
}

impl Memory {
    #[allow(clippy::too_many_arguments)] // likewise
    fn reduce_to_roots(
        &self,
        name: &'static str,
        op: ReduceOp,
        tiles: &[Tile],
        roots: &[usize],
        (out, out_pitch): (Elements, Option<usize>),
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        for (number, &root) in roots.iter().enumerate() {
            self.group().check_rank(name, root)?;
            if roots[..number].contains(&root) {
                let expected = "each rank as the root of at most one tile".to_owned();
                return Err(self.group().usage(name, expected, format!("rank {root} of two")));
            }
        }
        tiles.iter().try_for_each(|tile| self.check_tile(name, tile, tiles))?;
        let own = roots.iter().position(|root| *root == self.group().rank());
        let own = own.and_then(|number| tiles.get(number).copied());
        let mut wanted =
            Tiles { pitch: tiles.first().map_or(0, |t| t.pitch as u64), ..Tiles::default() };
        if let Some(tile) = own {
            let pitch = out_pitch.unwrap_or(tile.columns);
            let room = tile.extent(pitch).filter(|_| pitch >= tile.columns);
            if room.is_none_or(|room| room > out.len) {
                let expected = format!("an output with room for {} rows {pitch} apart", tile.rows);
                let e = self.group().usage(name, expected, out.len.to_string());
                return Err(self.refused(name, e));
            }
            wanted.out_pitch = out_pitch.unwrap_or(0) as u64;
            wanted.push(&tile, out.address);
        }
        // Grids are the same on all ranks: as large as the largest tile.
        let work = tiles.iter().map(|tile| tile.rows * tile.columns).max().unwrap_or(0);
        let all = tiles.iter().flat_map(|t| [t.first, t.rows, t.columns, t.pitch]);
        let agreed: Vec<usize> = all.chain(roots.iter().copied()).collect();
        self.reduce_tiles(name, op, wanted, work, &agreed, algorithm, stream)
    }

    fn reduce_scatter_offset(
        &self,
        op: ReduceOp,
        (rows, columns, pitch): (usize, usize, usize),
        dim: usize,
        (offsets, dst_ranks, outs): (Option<&[usize]>, Option<&[usize]>, &[Elements]),
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "reduce_scatter_offset";
        let (group, ranks) = (self.group(), self.group().size());
        let extent = match dim {
            0 => rows,
            1 => columns,
            _ => return Err(group.usage(NAME, "dimension 0 or 1".into(), dim.to_string())),
        };
        self.check_tile(NAME, &Tile { first: 0, rows, columns, pitch }, &[])?;
        let ends = match offsets {
            Some(offsets) => offsets.to_vec(),
            None => {
                let each = crate::collectives::block_len(group, NAME, extent)?;
                (1..=ranks).map(|rank| rank * each).collect()
            }
        };
        let owners =
            dst_ranks.map_or_else(|| (0..ends.len()).map(|i| i % ranks).collect(), <[_]>::to_vec);
        check_len(group, NAME, "ranks", ends.len(), owners.len())?;
        owners.iter().try_for_each(|&rank| group.check_rank(NAME, rank))?;
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let blocks: Vec<(usize, usize)> = starts.zip(ends.iter().copied()).collect();
        if blocks.iter().any(|(start, end)| start > end || *end > extent) {
            let expected = format!("ascending offsets up to {extent}");
            return Err(group.usage(NAME, expected, format!("{ends:?}")));
        }
        let block = |&(start, end): &(usize, usize)| match dim {
            0 => Tile { first: start * pitch, rows: end - start, columns, pitch },
            _ => Tile { first: start, rows, columns: end - start, pitch },
        };
        let own =
            |rank: usize| owners.iter().zip(&blocks).filter(move |(owner, _)| **owner == rank);
        let tiles: Vec<Tile> = own(group.rank()).map(|(_, cut)| block(cut)).collect();
        let most = (0..ranks).map(|rank| own(rank).count()).max().unwrap_or(0);
        if most > MAX_TILES {
            let expected = format!("at most {MAX_TILES} blocks for each rank");
            return Err(group.usage(NAME, expected, most.to_string()));
        }
        check_len(group, NAME, "outputs", tiles.len(), outs.len())
            .map_err(|e| self.refused(NAME, e))?;
        let mut wanted = Tiles { pitch: pitch as u64, ..Tiles::default() };
        for (tile, out) in tiles.iter().zip(outs.iter()) {
            self.check_roots_out(NAME, tile.rows * tile.columns, out.len)?;
            wanted.push(tile, out.address);
        }
        let shape = [rows, columns, pitch, dim].into_iter();
        let agreed: Vec<usize> = shape.chain(ends.iter().copied()).chain(owners.clone()).collect();
        self.reduce_tiles(NAME, op, wanted, rows * columns / ranks, &agreed, algorithm, stream)
    }

    /// Reduces this rank's tiles, which with all ranks are as large as `work` elements.
    #[allow(clippy::too_many_arguments)] // likewise
    fn reduce_tiles(
        &self,
        name: &'static str,
        op: ReduceOp,
        tiles: Tiles,
        work: usize,
        agreed: &[usize],
        algorithm: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        let by_switch = self.by_switch(name, op, algorithm, "Auto or Multimem")?;
        let Some((_, tiled)) = files(self.dtype()) else {
            let expected = "elements of f32, f16 or bf16".to_owned();
            return Err(self.group().usage(name, expected, self.dtype().to_string()));
        };
        self.check_operator(name, op)?;
        let (file, all) = if by_switch { self.check_multimem(name, op)? } else { (tiled, 0) };
        let mut terms = vec![op as usize, usize::from(by_switch)];
        terms.extend(agreed);
        let call = self.digest(name, &terms);
        let op = op as u32;
        let kernel = if by_switch { "multimem_reduce_tiles" } else { "reduce_tiles" };
        self.enqueue(name, call, stream, |context| {
            let list = match by_switch {
                true => parameters![context.group, self.parts, all, tiles],
                false => parameters![context.group, self.parts, tiles, op],
            };
            // SAFETY: the kernel's parameters in order; tiles lie within all parts, and outputs have room for them.
            unsafe { self.run((file, kernel), work * self.size(), context.target, list) }
        })
    }

    fn all_to_all_nd(
        &self,
        (rows, columns): (usize, usize),
        (scatter, gather): (usize, usize),
        out: Elements,
        stream: &Stream,
    ) -> Result<()> {
        const NAME: &str = "all_to_all_nd";
        let (rank, ranks, bytes) = (self.group().rank(), self.group().size(), self.size());
        check_len(self.group(), NAME, "a matrix", self.len(), rows.saturating_mul(columns))?;
        self.check_out(NAME, self.len(), out.len)?;
        // First element, rows, elements of each, elements between them; and in the output between ranks and between rows.
        let counts = match (scatter, gather) {
            (1, 0) => {
                let each = self.block(NAME, columns)?;
                [rank * each, rows, each, columns, rows * each, each]
            }
            (0, 1) => {
                let each = self.block(NAME, rows)?;
                [rank * each * columns, each, columns, columns, columns, ranks * columns]
            }
            other => {
                let expected =
                    "dimensions 1 and 0, or 0 and 1, to scatter and to gather".to_owned();
                return Err(self.group().usage(NAME, expected, format!("{other:?}")));
            }
        };
        let call = self.digest(NAME, &[rows, columns, scatter]);
        let [first, count, each, pitch, of_rank, out_pitch] = counts.map(|n| n as u64);
        let [first, each, pitch, of_rank, out_pitch] =
            [first, each, pitch, of_rank, out_pitch].map(|n| n * bytes as u64);
        let to = out.address;
        let work = self.bytes();
        self.enqueue(NAME, call, stream, |context| {
            let (group, parts) = (&context.group, &self.parts);
            let list =
                parameters![*group, *parts, to, first, count, each, pitch, of_rank, out_pitch];
            // SAFETY: the kernel's parameters in order; the rows lie within all parts, and `out` has as many elements.
            unsafe { self.run(("rows", "all_to_all_nd"), work, context.target, list) }
        })
    }

    /// Refuses a tile that does not lie within the memory, or in another matrix than the first of `all`.
    fn check_tile(&self, name: &'static str, tile: &Tile, all: &[Tile]) -> Result<()> {
        let end = tile.extent(tile.pitch).and_then(|extent| tile.first.checked_add(extent));
        let even = tile.rows <= 1 || tile.pitch >= tile.columns;
        let alike = all.first().is_none_or(|first| first.pitch == tile.pitch);
        if even && alike && end.is_some_and(|end| end <= self.len()) {
            return Ok(());
        }
        let expected =
            format!("tiles of one matrix within the {} elements of each rank", self.len());
        Err(self.group().usage(name, expected, format!("{tile:?}")))
    }
}

impl Tiles {
    fn push(&mut self, tile: &Tile, out: u64) {
        let at = self.count as usize % MAX_TILES;
        self.first[at] = tile.first as u64;
        self.rows[at] = tile.rows as u64;
        self.columns[at] = tile.columns as u64;
        self.out[at] = out;
        self.count += 1;
    }
}

debug_of!([T] TileMut<'_, T>, "TileMut": |this| view = this.view, pitch = this.pitch);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_laid_out_as_the_kernel_says() {
        assert_eq!(size_of::<Tiles>(), 536); // asserted in `kernels/tiles.cuh` too
        assert_eq!(std::mem::offset_of!(Tiles, first), 24);
        assert_eq!(std::mem::offset_of!(Tiles, out), 24 + 3 * 128);
    }

    #[test]
    fn the_extent_of_a_tile_ends_with_its_last_row() {
        let tile = |rows, columns| Tile { first: 0, rows, columns, pitch: 10 };
        assert_eq!(tile(3, 4).extent(10), Some(24));
        assert_eq!(tile(0, 4).extent(10), Some(0));
        assert_eq!(tile(usize::MAX, 4).extent(10), None);
    }
}
