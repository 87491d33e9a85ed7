//! The collectives, each over a list of sizes, each with its floor.
//!
//! `bytes` is one rank's block: the whole buffer of an all-reduce, a reduce and a broadcast, what a rank contributes to an
//! all-gather or a gather, what a reduce-scatter or a scatter leaves it with, what an all-to-all sends to each rank.

use anyhow::Result;
use symmem::{Group, ReduceOp, Symmetric};

use super::super::board::Board;
use super::super::measure::Case;
use super::super::settings::{Memory, Settings, algorithm};
use super::super::value::Value;
use super::data::{Data, Input, Kind, ROOT, Way, make};
use super::{How, Measure, Measures, Row, limits};

pub(super) const ALL_REDUCE: Row = row("all_reduce", "in place, as all those below over sizes");
pub(super) const REDUCE_SCATTER: Row = row("reduce_scatter", "into private memory");
pub(super) const ALL_GATHER: Row = row("all_gather", "into private memory");
pub(super) const BROADCAST: Row = row("broadcast", "from rank 0, in place");
pub(super) const ALL_TO_ALL: Row = row("all_to_all", "into private memory");
pub(super) const REDUCE: Row = rooted("reduce", "into private memory of rank 0");
pub(super) const GATHER: Row = rooted("gather", "into private memory of rank 0");
pub(super) const SCATTER: Row = rooted("scatter", "from rank 0 into private memory");

const fn row(name: &'static str, about: &'static str) -> Row {
    let measures = Measures::BySize(measures);
    Row { name, about, ranks: 2, how: How::InRanks, on_slices: true, on_devices: true, measures }
}

/// These are measured in symmetric memory of the host only.
const fn rooted(name: &'static str, about: &'static str) -> Row {
    Row { on_slices: false, on_devices: false, ..row(name, about) }
}

/// From this size on the reading of the result is timed too.
const READ_FROM: usize = 16 << 10;
/// To this size twenty calls make a sample.
const TINY: usize = 64;
/// Samples in one round, to which size.
const SAMPLES: [(usize, usize); 4] = [(TINY, 300), (16 << 10, 500), (1 << 20, 250), (16 << 20, 50)];

/// For each type and size the floor and then the library, so that both run under the same conditions.
fn measures(name: &'static str, settings: &Settings) -> Vec<Measure> {
    let both = |ours: Measure| {
        let floor = Measure {
            system: "limits",
            memory: Memory::Symmetric.name(),
            algorithm: "-",
            make: Some(make::<limits::Floor>),
            ..ours.clone()
        };
        [floor, ours]
    };
    library(name, settings).into_iter().flat_map(both).collect()
}

/// Those of the library, for each type and size.
pub(super) fn library(name: &'static str, settings: &Settings) -> Vec<Measure> {
    let chooses = name == "all_reduce" && settings.memory == Memory::Symmetric;
    let one = |dtype, bytes| Measure {
        dtype,
        memory: settings.memory.name(),
        algorithm: if chooses { settings.algorithm() } else { "-" },
        make: Some(make::<Library>),
        ..sized(name, bytes, settings)
    };
    let types = settings.dtypes().into_iter();
    types.flat_map(|t| settings.sizes().into_iter().map(move |b| one(t, b))).collect()
}

/// How often and how long so many bytes are measured.
pub(super) fn sized(name: &'static str, bytes: usize, settings: &Settings) -> Measure {
    Measure {
        collective: name,
        bytes,
        memory: Memory::Symmetric.name(),
        batch: if bytes <= TINY { 20 } else { 1 },
        read: bytes >= READ_FROM,
        samples: SAMPLES.iter().find(|(most, _)| bytes <= *most).map_or(20, |found| found.1),
        least: 7,
        time: settings.time(),
        // Large buffers take some dozens of calls to settle in a shared cache.
        warm: if bytes > 1 << 20 { settings.time() } else { settings.time() / 2 },
        ..Measure::TINY
    }
}

/// The library's own calls.
struct Library;

impl Way for Library {
    fn case<'a, T: Value>(
        measure: &Measure,
        data: Data<'a, T>,
        board: &'a Board<'a>,
    ) -> Box<dyn Case + 'a> {
        let algorithm = algorithm(measure.algorithm).on_host().unwrap_or_default();
        Box::new(Collective { data, board, algorithm, repeated: measure.batch > 1 })
    }
}

struct Collective<'a, T: Value> {
    data: Data<'a, T>,
    board: &'a Board<'a>,
    algorithm: symmem::Algorithm,
    /// Whether a sample is several calls, so that an all-reduce in place has reduced its own results.
    repeated: bool,
}

impl<T: Value> Case for Collective<'_, T> {
    fn prepare(&mut self) -> Result<()> {
        self.data.rewrite();
        if self.repeated && self.data.kind == Kind::AllReduce {
            self.data.input.local_mut().fill(T::of(0)); // a sum of sums would leave the range
        }
        Ok(())
    }

    #[inline]
    fn call(&mut self) -> Result<()> {
        let Data { kind, group, input, out, .. } = &mut self.data;
        match input {
            Input::Symmetric(memory) => on_symmetric(*kind, memory, self.algorithm, out)?,
            Input::Slice(slice) => on_slice(*kind, group, slice, out)?,
        }
        Ok(())
    }

    fn read(&mut self) {
        self.data.read();
    }

    fn check(&mut self) -> Result<bool> {
        if self.repeated && self.data.kind == Kind::AllReduce {
            self.data.rewrite();
            self.board.barrier();
            self.call()?;
        }
        Ok(self.data.right())
    }
}

#[inline]
fn on_symmetric<T: Value>(
    kind: Kind,
    memory: &mut Symmetric<T>,
    algorithm: symmem::Algorithm,
    out: &mut [T],
) -> symmem::Result<()> {
    match kind {
        Kind::AllReduce => memory.all_reduce_with(ReduceOp::Sum, algorithm),
        Kind::ReduceScatter => memory.reduce_scatter(ReduceOp::Sum, out),
        Kind::AllGather => memory.all_gather(out),
        Kind::Broadcast => memory.broadcast(ROOT),
        Kind::AllToAll => memory.all_to_all(out),
        Kind::Reduce => memory.reduce(ReduceOp::Sum, ROOT, out),
        Kind::Gather => memory.gather(ROOT, out),
        Kind::Scatter => memory.scatter(ROOT, out),
    }
}

#[inline]
fn on_slice<T: Value>(kind: Kind, group: &Group, slice: &mut [T], out: &mut [T]) -> Result<()> {
    match kind {
        Kind::AllReduce => group.all_reduce(slice, ReduceOp::Sum)?,
        Kind::ReduceScatter => group.reduce_scatter(slice, ReduceOp::Sum, out)?,
        Kind::AllGather => group.all_gather(slice, out)?,
        Kind::Broadcast => group.broadcast(slice, ROOT)?,
        Kind::AllToAll => group.all_to_all(slice, out)?,
        Kind::Reduce | Kind::Gather | Kind::Scatter => {
            anyhow::bail!("{kind:?} has no form on slices")
        }
    }
    Ok(())
}
