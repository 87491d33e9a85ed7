//! All-to-all of rows between ranks that only the network connects. No kernel reads their splits, so the host does: it waits
//! for the stream, all ranks tell each other their splits, and each fetches its rows.
#![allow(unsafe_code)] // S1, S3: pieces are checked against all ranks' memory; S4, S5

use crate::collectives::all_to_all_v::{Piece, Sent, check_pieces, negative};
use crate::cuda::memory::{Elements, Memory};
use crate::cuda::{Rows, Stream, Symmetric, ViewMut, upload};
use crate::error::{Error, Result};

impl Rows {
    /// The same as by kernels, with the same errors; done when it returns.
    pub(crate) fn over_network(
        &self,
        x: &Memory,
        splits: &Symmetric<i64>,
        out: Elements,
        received: ViewMut<'_, i64>,
        stream: &Stream,
    ) -> Result<()> {
        let (group, heap) = (x.group(), x.gpu.heap()?);
        let (ranks, words) = (group.size(), splits.len());
        let room = (x.len() / self.row_len, out.len / self.row_len);
        // What is before this in the streams of all ranks is done once all have told their splits.
        let own = splits.read(stream)?;
        let call = [self.row_len, self.align, words, room.1];
        let pieces = group.gather_and(self.name, (call, own), |all| {
            self.check_alike(call, all.iter().map(|(theirs, _)| *theirs))?;
            let table: Vec<i64> = all.into_iter().flat_map(|(_, splits)| splits).collect();
            let sent = match self.is_back {
                true => Sent::from_experts(ranks, words, &table),
                false => Sent::to_experts(ranks, words, &table),
            };
            let sent = sent.map_err(|wrong| negative(group, self.name, wrong))?;
            let pieces = |rank| match self.is_back {
                true => sent.by_source(rank),
                false => sent.by_expert(rank, self.align),
            };
            for rank in 0..ranks {
                check_pieces(group, self.name, rank, &pieces(rank), room)?;
            }
            Ok(pieces(group.rank()))
        })?;
        let (pes, row) = (heap.pes(self.name, group)?, self.row_len * x.size());
        let own = x.own().address;
        for piece in pieces.iter().filter(|piece| piece.rows != 0) {
            let (from, to) =
                (own + (piece.from * row) as u64, out.address + (piece.to * row) as u64);
            let pe = pes.get(piece.source).copied().unwrap_or(0) as i32;
            // SAFETY: within the source's part and within `out`, as all ranks have just found.
            heap.call(|library| unsafe {
                library.get(to, from, piece.rows * row, pe, stream.raw())
            })?;
        }
        upload(&x.gpu, received, &told(&pieces), stream)?;
        // Nobody writes its rows again before all have fetched theirs.
        group.gather_and(self.name, (), |_| Ok(()))
    }

    /// Refuses ranks that make different calls.
    fn check_alike(&self, ours: [usize; 4], all: impl Iterator<Item = [usize; 4]>) -> Result<()> {
        match all.enumerate().find(|(_, theirs)| *theirs != ours) {
            None => Ok(()),
            Some((rank, theirs)) => Err(Error::Mismatch {
                op: self.name,
                what: "row length, alignment, splits and rows of the output",
                rank,
                ours: format!("{ours:?}"),
                theirs: format!("{theirs:?}"),
            }),
        }
    }
}

/// The number of rows of each piece, and then where each begins.
fn told(pieces: &[Piece]) -> Vec<i64> {
    let rows = pieces.iter().map(|piece| piece.rows as i64);
    rows.chain(pieces.iter().map(|piece| piece.to as i64)).collect()
}
