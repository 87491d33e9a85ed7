//! All-to-all of rows, with a number of rows for each rank or each expert that only its sender knows.
//!
//! All ranks first read all ranks' splits, so they reach the same verdict on whether everything fits on every rank. Only then
//! does each fetch its rows. The numbers of ranks and experts are not limited.
#![allow(unsafe_code)] // S2, S3

use super::{block_len, check_len, copy_bytes};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::{Call, Group, Op, Way};
use crate::symmetric::{Memory, Phase, Symmetric};

/// Rows that lie together at their source and at their destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) source: usize,
    pub(crate) from: usize,
    pub(crate) rows: usize,
    pub(crate) to: usize,
}

/// All ranks' splits: what each sends to each expert of each rank.
pub(crate) struct Sent {
    ranks: usize,
    experts: usize,
    /// Number of rows and first row, by source, destination and expert.
    rows: Vec<(usize, usize)>,
}

impl Sent {
    /// Of all ranks' splits, each of `words` numbers: rows for expert after expert of rank after rank, which follow each
    /// other. Else the rank that gave a negative number, and that.
    pub(crate) fn to_experts(
        ranks: usize,
        words: usize,
        table: &[i64],
    ) -> std::result::Result<Self, (usize, i64)> {
        let mut sent = Vec::with_capacity(table.len());
        for (source, splits) in table.chunks_exact(words.max(1)).enumerate() {
            let mut from = 0_usize;
            for rows in splits {
                let rows = whole(source, *rows)?;
                sent.push((rows, from));
                from = from.saturating_add(rows);
            }
        }
        Ok(Self { ranks, experts: words / ranks, rows: sent })
    }

    /// Likewise, of splits and offsets on the way back: rows for rank after rank of expert after expert.
    pub(crate) fn from_experts(
        ranks: usize,
        words: usize,
        table: &[i64],
    ) -> std::result::Result<Self, (usize, i64)> {
        let experts = words / (2 * ranks);
        let mut sent = vec![(0, 0); ranks * ranks * experts];
        for (source, table) in table.chunks_exact(words.max(1)).enumerate() {
            let (splits, offsets) = table.split_at(words / 2);
            for (at, (rows, from)) in splits.iter().zip(offsets).enumerate() {
                let (expert, to) = (at / ranks, at % ranks);
                let entry = sent.get_mut((source * ranks + to) * experts + expert);
                let rows = (whole(source, *rows)?, whole(source, *from)?);
                entry.into_iter().for_each(|entry| *entry = rows);
            }
        }
        Ok(Self { ranks, experts, rows: sent })
    }

    fn piece(&self, source: usize, to_rank: usize, expert: usize, to: usize) -> Piece {
        let at = (source * self.ranks + to_rank) * self.experts + expert;
        let (rows, from) = self.rows.get(at).copied().unwrap_or_default();
        Piece { source, from, rows, to }
    }

    /// What `rank` gets, expert by expert, each beginning at a multiple of `align`.
    pub(crate) fn by_expert(&self, rank: usize, align: usize) -> Vec<Piece> {
        let mut begin = 0_usize;
        let mut pieces = Vec::with_capacity(self.ranks * self.experts);
        for expert in 0..self.experts {
            let mut at = begin;
            for source in 0..self.ranks {
                let piece = self.piece(source, rank, expert, at);
                at = at.saturating_add(piece.rows);
                pieces.push(piece);
            }
            // An expert without rows has room all the same: matrix products over groups of rows have no empty ones.
            let end = at.max(begin.saturating_add(1));
            begin = end.checked_next_multiple_of(align).unwrap_or(usize::MAX);
        }
        pieces
    }

    /// What `rank` gets, source by source, without gaps.
    pub(crate) fn by_source(&self, rank: usize) -> Vec<Piece> {
        let mut at = 0_usize;
        let mut pieces = Vec::with_capacity(self.ranks * self.experts);
        for source in 0..self.ranks {
            for expert in 0..self.experts {
                let piece = self.piece(source, rank, expert, at);
                at = at.saturating_add(piece.rows);
                pieces.push(piece);
            }
        }
        pieces
    }
}

/// A number of rows as rank `source` gave it.
fn whole(source: usize, rows: i64) -> std::result::Result<usize, (usize, i64)> {
    usize::try_from(rows).map_err(|_| (source, rows))
}

/// The error of a negative number of rows.
pub(crate) fn negative(group: &Group, name: &'static str, (source, rows): (usize, i64)) -> Error {
    let expected = format!("splits of rank {source} that are not negative");
    group.usage(name, expected, rows.to_string())
}

/// Refuses what rank `rank` would get where it is not within the `rows` that each rank has, or its output of `out`.
pub(crate) fn check_pieces(
    group: &Group,
    name: &'static str,
    rank: usize,
    pieces: &[Piece],
    (rows, out): (usize, usize),
) -> Result<()> {
    let refused = |what: String, got: usize| Err(group.usage(name, what, got.to_string()));
    for piece in pieces.iter().filter(|piece| piece.rows != 0) {
        let (from, to) =
            (piece.from.saturating_add(piece.rows), piece.to.saturating_add(piece.rows));
        if from > rows {
            let what = format!("splits of rank {} within its {rows} rows", piece.source);
            return refused(what, from);
        }
        if to > out {
            let what = format!("an output that holds the rows for rank {rank}, not only {out}");
            return refused(what, to);
        }
    }
    if let Some(piece) = pieces.iter().find(|piece| i64::try_from(piece.to).is_err()) {
        // Also where there are no rows: the offset is told all the same.
        return refused("an alignment with which all offsets fit 63 bits".to_owned(), piece.to);
    }
    Ok(())
}

/// One call: its name and what of its arguments must be the same on all ranks.
struct RowsCall {
    name: &'static str,
    row_len: usize,
    align: usize,
    /// In rows.
    out: usize,
}

impl RowsCall {
    /// With an output of `out` elements.
    fn new(
        group: &Group,
        name: &'static str,
        row_len: usize,
        align: usize,
        out: usize,
    ) -> Result<Self> {
        let refused =
            |what| Err(group.usage(name, format!("{what} of at least 1"), "0".to_owned()));
        match (row_len, align) {
            (0, _) => refused("a row length"),
            (_, 0) => refused("an alignment"),
            _ => Ok(Self { name, row_len, align, out: out / row_len }),
        }
    }
}

impl<T: Element> Symmetric<T> {
    /// Sends rows of `row_len` elements, `splits[r]` of them to rank r, in rank order. `out` becomes the rows for this
    /// rank, by source; `received` becomes the number of rows from each rank, and then the first row of each.
    /// Collective.
    ///
    /// `out` is equally long on all ranks. If one is too short for what its rank would get, every rank gets an error and
    /// nothing is written.
    ///
    /// ```
    /// # symmem::World::threads(2, |world| -> symmem::Result<()> {
    /// // Two rows of one element: each rank sends one row to each.
    /// let mut x = world.alloc::<usize>(2)?.rendezvous(&world)?;
    /// x.local_mut().copy_from_slice(&[10 * world.rank(), 10 * world.rank() + 1]);
    /// let mut splits = world.alloc::<i64>(2)?.rendezvous(&world)?;
    /// splits.local_mut().fill(1);
    /// let (mut out, mut received) = ([0; 2], [0; 4]);
    /// x.all_to_all_v(1, &mut splits, &mut out, &mut received)?;
    /// assert_eq!(out, [world.rank(), 10 + world.rank()]);
    /// assert_eq!(received, [1, 1, 0, 1]); // rows from each rank, and where they begin
    /// # Ok(())
    /// # })?.into_iter().collect::<symmem::Result<()>>()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn all_to_all_v(
        &mut self,
        row_len: usize,
        splits: &mut Symmetric<i64>,
        out: &mut [T],
        received: &mut [i64],
    ) -> Result<()> {
        const NAME: &str = "all_to_all_v";
        check_len(self.group(), NAME, "splits", self.group().size(), splits.len())?;
        self.dispatch(NAME, row_len, splits, 1, out, received)
    }

    /// As [`Symmetric::all_to_all_v`], to experts. `splits` has an entry for each expert of each rank, rank by rank. `out`
    /// becomes the rows for this rank's experts, expert by expert and for each by source; `received` becomes the number
    /// of rows, and then the first row, of each of these. Collective.
    ///
    /// Each expert's rows begin at a multiple of `major_align` rows, and an expert without rows takes up `major_align`.
    pub fn all_to_all_v_2d(
        &mut self,
        row_len: usize,
        splits: &mut Symmetric<i64>,
        major_align: usize,
        out: &mut [T],
        received: &mut [i64],
    ) -> Result<()> {
        self.dispatch("all_to_all_v_2d", row_len, splits, major_align, out, received)
    }

    /// The way back from experts. `splits_offsets` is what [`Symmetric::all_to_all_v_2d`] wrote to `received`, or
    /// similar: the number of rows for each rank from each expert, expert by expert, and then the first row of each;
    /// there may be gaps. `out` becomes the rows for this rank, by source and for each by expert, without gaps;
    /// `received` becomes the number of rows, and then the first row, of each of these. Collective.
    pub fn all_to_all_v_2d_offset(
        &mut self,
        row_len: usize,
        splits_offsets: &mut Symmetric<i64>,
        out: &mut [T],
        received: &mut [i64],
    ) -> Result<()> {
        const NAME: &str = "all_to_all_v_2d_offset";
        let (ranks, words) = (self.group().size(), splits_offsets.len());
        let experts = words / (2 * ranks);
        check_len(self.group(), NAME, "splits and offsets", 2 * ranks * experts, words)?;
        let call = RowsCall::new(self.group(), NAME, row_len, 1, out.len())?;
        check_len(self.group(), NAME, "splits and offsets received", words, received.len())?;
        let table = self.gather_splits(&call, splits_offsets)?;
        let sent = Sent::from_experts(ranks, words, &table);
        let sent = sent.map_err(|wrong| negative(self.group(), NAME, wrong))?;
        self.fetch(&call, |rank| sent.by_source(rank), out, received)
    }

    fn dispatch(
        &mut self,
        name: &'static str,
        row_len: usize,
        splits: &mut Symmetric<i64>,
        align: usize,
        out: &mut [T],
        received: &mut [i64],
    ) -> Result<()> {
        block_len(self.group(), name, splits.len())?;
        let (ranks, words) = (self.group().size(), splits.len());
        let call = RowsCall::new(self.group(), name, row_len, align, out.len())?;
        check_len(self.group(), name, "splits and offsets received", 2 * words, received.len())?;
        let table = self.gather_splits(&call, splits)?;
        let sent = Sent::to_experts(ranks, words, &table);
        let sent = sent.map_err(|wrong| negative(self.group(), name, wrong))?;
        self.fetch(&call, |rank| sent.by_expert(rank, align), out, received)
    }

    /// The call that moves the rows.
    fn rows_call(&self, call: &RowsCall) -> Call {
        let more = [call.row_len, call.align, call.out];
        Call { more, ..self.memory().call(Op::of(call.name), Way::Direct) }
    }

    /// All ranks' splits, by rank; all ranks agree on the call once they have them.
    fn gather_splits(&self, call: &RowsCall, splits: &mut Symmetric<i64>) -> Result<Vec<i64>> {
        if self.group().id()? != splits.group().id()? {
            let (expected, got) = ("splits in the memory's group", format!("{:?}", splits.group()));
            return Err(self.group().usage(call.name, expected.into(), got));
        }
        let mut table = vec![0; splits.len() * self.group().size()];
        let (memory, len) = (splits.handle().memory(), splits.len());
        let call = Call { memory, len, ..self.rows_call(call) };
        gather_parts(splits.memory(), &call, table.as_mut_ptr().cast())?;
        Ok(table)
    }

    /// Fetches this rank's rows, if all that every rank would fetch is there and fits: all ranks find the same.
    fn fetch(
        &mut self,
        call: &RowsCall,
        pieces: impl Fn(usize) -> Vec<Piece>,
        out: &mut [T],
        received: &mut [i64],
    ) -> Result<()> {
        for rank in 0..self.group().size() {
            let room = (self.len() / call.row_len, call.out);
            check_pieces(self.group(), call.name, rank, &pieces(rank), room)?;
        }
        let pieces = pieces(self.group().rank());
        let to = out.as_mut_ptr().cast();
        fetch_rows(self.memory(), &self.rows_call(call), call.row_len, &pieces, to)?;
        let (splits, offsets) = received.split_at_mut(pieces.len());
        for ((piece, split), offset) in pieces.iter().zip(splits).zip(offsets) {
            (*split, *offset) = (piece.rows as i64, piece.to as i64);
        }
        Ok(())
    }
}

/// All ranks' parts into `to`, which has room for them.
fn gather_parts(memory: &Memory, call: &Call, to: *mut u8) -> Result<()> {
    memory.read_large(*call, true, |parts| {
        for rank in memory.ranks_from_own() {
            let to = to.wrapping_add(rank * memory.bytes());
            // SAFETY: nobody writes the part; there is room for each.
            unsafe { copy_bytes(parts[rank], to, memory.bytes()) };
        }
    })
}

/// Pieces of rows of `row` elements, which lie within all parts, into `out`, in which they lie as well.
fn fetch_rows(
    memory: &Memory,
    call: &Call,
    row: usize,
    pieces: &[Piece],
    out: *mut u8,
) -> Result<()> {
    let bytes = row * memory.size();
    memory.read_large(*call, true, |parts| {
        for piece in pieces.iter().filter(|piece| piece.rows != 0) {
            let from = parts[piece.source].wrapping_add(piece.from * bytes);
            let to = out.wrapping_add(piece.to * bytes);
            // SAFETY: both lie within the part, which nobody writes, and within `out`: `check_pieces` saw to it.
            unsafe { copy_bytes(from, to, piece.rows * bytes) };
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_without_rows_takes_up_one_alignment() {
        let sent = Sent { ranks: 1, experts: 4, rows: vec![(3, 0), (0, 3), (4, 3), (1, 7)] };
        let begins = |align| -> Vec<usize> {
            sent.by_expert(0, align).into_iter().map(|piece| piece.to).collect()
        };
        assert_eq!(begins(4), [0, 4, 8, 12]);
        assert_eq!(begins(1), [0, 3, 4, 8]);
        assert_eq!(begins(2), [0, 4, 6, 10]);
    }

    #[test]
    fn sums_beyond_the_address_space_are_no_smaller_numbers() {
        let sent = Sent { ranks: 1, experts: 2, rows: vec![(usize::MAX, 0), (usize::MAX, 1)] };
        assert_eq!(sent.by_source(0)[1].to, usize::MAX);
        assert_eq!(sent.by_expert(0, 8)[1].to, usize::MAX);
    }
}
