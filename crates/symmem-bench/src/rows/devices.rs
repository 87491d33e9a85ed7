//! The barrier and the collectives on memory of devices: eager calls, or graphs of twenty that are replayed.
//!
//! A sample is many calls and one wait for the stream's end. Results are compared bit by bit with what the host makes of
//! the same inputs, before the first sample and after the last. The floor is a copy on the device of as many bytes as a rank
//! of the collective has to move at least.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use bytemuck::cast_slice as bytes;
use symmem::cuda::Algorithm;
use symmem::cuda::{Buffer, Graph, Symmetric};
use symmem::{Group, ReduceOp};

use super::super::board::Board;
use super::super::clock;
use super::super::device::{self, Device};
use super::super::measure::Case;
use super::super::report::median;
use super::super::settings::{Memory, Settings, algorithm};
use super::super::value::{Value, with_dtype};
use super::data::{Kind, ROOT};
use super::{Make, Measure, OnDevice};

/// Calls in one graph.
const IN_GRAPH: usize = 20;
/// Calls in a sample, to which size: many, so that the launch and the wait hardly count.
const IN_GRAPHS: [(usize, usize); 2] = [(1 << 20, 25 * IN_GRAPH), (16 << 20, 5 * IN_GRAPH)];
/// The same of eager calls: fewer than the driver takes without waiting for the device.
const EAGER: [(usize, usize); 1] = [(16 << 20, 200)];

/// For each type and size the floor and then the library; of the barrier the library alone.
pub(super) fn measures(name: &'static str, settings: &Settings) -> Vec<Measure> {
    let on = OnDevice { graph: settings.graph, device: settings.device };
    let one = |dtype, bytes: usize, system: &'static str, make: Make| {
        let of = |list: &[(usize, usize)]| {
            list.iter().find(|(most, _)| bytes <= *most).map_or(IN_GRAPH, |found| found.1)
        };
        Measure {
            system,
            collective: name,
            bytes,
            dtype,
            on: Some(on),
            batch: if on.graph { of(&IN_GRAPHS) } else { of(&EAGER) },
            samples: 100,
            least: 5,
            time: settings.time(),
            warm: settings.time() / 4,
            make: Some(make),
            ..Measure::TINY
        }
    };
    if name == "barrier" {
        return vec![one("-", 0, "symmem", barrier)];
    }
    let both = |dtype, bytes| {
        let memory = Memory::Symmetric.name();
        let algorithm = settings.algorithm_of(name);
        let ours = Measure { memory, algorithm, ..one(dtype, bytes, "symmem", collective) };
        [Measure { memory, ..one(dtype, bytes, "limits", floor) }, ours]
    };
    let types = settings.dtypes().into_iter();
    types.flat_map(|t| settings.sizes().into_iter().flat_map(move |b| both(t, b))).collect()
}

/// One call, put into the stream; and what is asked about its results.
trait Work {
    fn enqueue(&mut self, device: &Device) -> symmem::Result<()>;

    /// Waits until all is done, and says what went wrong in it.
    fn finish(&self, device: &Device) -> Result<()>;

    /// Fills in the next inputs.
    fn refill(&mut self, device: &Device) -> Result<()>;

    /// Whether the results of `calls` calls since are right.
    fn right(&mut self, device: &Device, calls: usize) -> Result<bool>;
}

/// How any work is timed.
struct Timed<'a> {
    graph: Option<Graph>,
    work: Box<dyn Work + 'a>,
    device: &'static Device,
    /// Nanoseconds of a call until it returned.
    host: Vec<f64>,
}

impl<'a> Timed<'a> {
    fn new(
        on: Option<OnDevice>,
        device: &'static Device,
        mut work: Box<dyn Work + 'a>,
    ) -> Result<Self> {
        for _ in 0..3 {
            work.enqueue(device)?; // loads the kernel, which a capture cannot
        }
        work.finish(device)?;
        let mut graph = None;
        if on.is_some_and(|on| on.graph) {
            let twenty = || (0..IN_GRAPH).try_for_each(|_| work.enqueue(device));
            graph = Some(device.stream.capture(twenty)?);
        }
        Ok(Self { graph, work, device, host: Vec::new() })
    }
}

impl Case for Timed<'_> {
    fn call(&mut self) -> Result<()> {
        self.calls(1)
    }

    /// With a graph, as many as it has or several times that.
    fn calls(&mut self, count: usize) -> Result<()> {
        let begin = clock::now();
        match &self.graph {
            Some(graph) => (0..count.div_ceil(IN_GRAPH))
                .try_for_each(|_| self.device.launch(graph, &self.work))?,
            None => {
                for _ in 0..count {
                    self.work.enqueue(self.device)?;
                }
                self.host.push((clock::now() - begin) as f64 / count as f64);
            }
        }
        self.work.finish(self.device)
    }

    fn check(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn verify(&mut self) -> Result<bool> {
        self.work.refill(self.device)?;
        self.calls(1)?;
        let calls = if self.graph.is_some() { IN_GRAPH } else { 1 };
        self.work.right(self.device, calls)
    }

    fn host_us(&self) -> Option<f64> {
        median(self.host.clone()).map(|ns| ns.round() / 1e3)
    }
}

fn device_of(measure: &Measure) -> Result<&'static Device> {
    device::of_rank(measure.on.and_then(|on| on.device))
}

fn barrier<'a>(
    measure: &Measure,
    group: &'a Group,
    board: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    let device = device_of(measure)?;
    let memory = device.gpu.alloc(group, 1)?.rendezvous(group)?;
    let work = Barrier { memory, board, count: FIRST };
    Ok(Box::new(Timed::new(measure.on, device, Box::new(work))?))
}

/// No number that other rows leave behind.
const FIRST: u32 = 1000;

struct Barrier<'a> {
    memory: Symmetric<u32>,
    board: &'a Board<'a>,
    count: u32,
}

impl Work for Barrier<'_> {
    fn enqueue(&mut self, device: &Device) -> symmem::Result<()> {
        self.memory.barrier(&device.stream)
    }

    fn finish(&self, device: &Device) -> Result<()> {
        Ok(self.memory.synchronize(&device.stream)?)
    }

    /// Each rank in turn is late, so that the others have to wait for someone.
    fn refill(&mut self, _: &Device) -> Result<()> {
        self.count += 1;
        if self.count as usize % self.board.ranks() == self.board.rank() {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.board.counter(self.board.rank()).store(self.count, Ordering::Release);
        Ok(())
    }

    /// A number that each rank writes before the barrier is what all read once it is done.
    fn right(&mut self, _: &Device, _: usize) -> Result<bool> {
        let counters = (0..self.board.ranks()).map(|rank| self.board.counter(rank));
        let right = counters.fold(true, |all, c| all & (c.load(Ordering::Acquire) == self.count));
        self.board.barrier(); // nobody writes the next number before all have read this one
        Ok(right)
    }
}

fn floor<'a>(measure: &Measure, group: &'a Group, _: &'a Board<'a>) -> Result<Box<dyn Case + 'a>> {
    let device = device_of(measure)?;
    let bytes = least_copy(Kind::of(measure), measure.bytes, group.size());
    let memory = device.gpu.alloc(group, 2 * bytes)?.rendezvous(group)?;
    Ok(Box::new(Timed::new(measure.on, device, Box::new(Copied { memory, bytes }))?))
}

/// Half of what one rank has to read and write at least; of a broadcast, one that is not the root.
fn least_copy(kind: Kind, block: usize, ranks: usize) -> usize {
    match kind {
        Kind::AllReduce | Kind::Broadcast => block,
        Kind::ReduceScatter => (ranks + 1) * block / 2,
        _ => ranks * block,
    }
}

/// A copy on the device.
struct Copied {
    memory: Symmetric<u8>,
    bytes: usize,
}

impl Work for Copied {
    fn enqueue(&mut self, device: &Device) -> symmem::Result<()> {
        device.copy(&self.memory, self.bytes)
    }

    fn finish(&self, device: &Device) -> Result<()> {
        Ok(device.stream.synchronize()?)
    }

    fn refill(&mut self, _: &Device) -> Result<()> {
        Ok(())
    }

    fn right(&mut self, _: &Device, _: usize) -> Result<bool> {
        Ok(true)
    }
}

fn collective<'a>(
    measure: &Measure,
    group: &'a Group,
    _: &'a Board<'a>,
) -> Result<Box<dyn Case + 'a>> {
    fn typed<'a, T: Value>(measure: &Measure, group: &'a Group) -> Result<Box<dyn Case + 'a>> {
        let device = device_of(measure)?;
        let kind = Kind::of(measure);
        let block = measure.bytes / size_of::<T>();
        let (inputs, outputs) = kind.blocks(group);
        let work = Collective::<T> {
            kind,
            group,
            memory: device.gpu.alloc(group, inputs * block)?.rendezvous(group)?,
            out: device.gpu.alloc(group, (outputs * block).max(1))?,
            algorithm: algorithm(measure.algorithm),
            block,
            turn: 0,
        };
        Ok(Box::new(Timed::new(measure.on, device, Box::new(work))?))
    }
    with_dtype!(measure.dtype, T => typed::<T>(measure, group))
}

struct Collective<'a, T: Value> {
    kind: Kind,
    group: &'a Group,
    memory: Symmetric<T>,
    out: Buffer<T>,
    algorithm: Algorithm,
    /// Elements of a block.
    block: usize,
    turn: usize,
}

impl<T: Value> Collective<'_, T> {
    /// What rank `rank` has in this turn: numbers whose sums are exact where the order of additions is the switch's.
    fn pattern(&self, rank: usize) -> Vec<T> {
        if self.algorithm == Algorithm::Multimem {
            return (0..PERIOD).map(|i| T::of((i / 3 + rank + self.turn) as u8 % 4)).collect();
        }
        pattern(&bits(rank, self.turn))
    }
}

impl<T: Value> Work for Collective<'_, T> {
    fn enqueue(&mut self, device: &Device) -> symmem::Result<()> {
        let (memory, out, stream) = (&mut self.memory, self.out.view_mut(), &device.stream);
        match self.kind {
            Kind::AllReduce => memory.all_reduce_with(ReduceOp::Sum, self.algorithm, stream),
            Kind::ReduceScatter => {
                memory.reduce_scatter_with(ReduceOp::Sum, out, self.algorithm, stream)
            }
            Kind::AllGather => memory.all_gather_with(out, self.algorithm, stream),
            Kind::Broadcast => memory.broadcast(ROOT, stream),
            _ => memory.all_to_all(out, stream),
        }
    }

    fn finish(&self, device: &Device) -> Result<()> {
        Ok(self.memory.synchronize(&device.stream)?)
    }

    fn refill(&mut self, device: &Device) -> Result<()> {
        self.turn += 1;
        let own = self.pattern(self.group.rank());
        Ok(self.memory.write(&repeated(&own, self.memory.len()), &device.stream)?)
    }

    fn right(&mut self, device: &Device, calls: usize) -> Result<bool> {
        let (rank, block) = (self.group.rank(), self.block);
        let of = |rank| self.pattern(rank);
        let mut sum = of(rank);
        if self.kind.adds() {
            // In place, each call adds up what the one before has left with all.
            let times = if self.kind == Kind::AllReduce { calls } else { 1 };
            (0..times).try_for_each(|_| self.group.all_reduce(&mut sum, ReduceOp::Sum))?;
        }
        let stream = &device.stream;
        if matches!(self.kind, Kind::AllReduce | Kind::Broadcast) {
            let got = self.memory.read(stream)?;
            let expected = if self.kind == Kind::AllReduce { sum } else { of(ROOT) };
            let right = repeats(bytes(&got), bytes(&expected), 0);
            // What is timed would soon be infinite otherwise.
            let zeros = vec![T::of(0); if self.kind == Kind::AllReduce { got.len() } else { 0 }];
            if !zeros.is_empty() {
                self.memory.write(&zeros, stream)?;
            }
            return Ok(right);
        }
        let got = self.out.read(stream)?;
        let block = block * size_of::<T>();
        Ok(match self.kind {
            Kind::ReduceScatter => repeats(bytes(&got), bytes(&sum), rank * block),
            kind => bytes(&got).chunks(block).enumerate().all(|(from, part)| {
                let first = if kind == Kind::AllToAll { rank * block } else { 0 };
                repeats(part, bytes(&of(from)), first)
            }),
        })
    }
}

/// After so many elements an input repeats; a prime, so that no two blocks look alike.
const PERIOD: usize = 8191;

/// What the elements are made of that rank `rank` has in turn `turn`.
fn bits(rank: usize, turn: usize) -> Vec<u64> {
    let bits = |index: usize| {
        let seed = (turn << 32 | rank << 16 | index) as u64 + 1;
        let mixed = (seed ^ seed >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ mixed >> 32
    };
    (0..PERIOD).map(bits).collect()
}

fn pattern<T: Value>(bits: &[u64]) -> Vec<T> {
    bits.iter().map(|&bits| T::sample(bits)).collect()
}

fn repeated<T: Copy>(pattern: &[T], len: usize) -> Vec<T> {
    let mut all = pattern.repeat(len.div_ceil(pattern.len()));
    all.truncate(len);
    all
}

/// Whether these are the bytes of a repeated pattern, from its byte `first` on.
fn repeats(got: &[u8], pattern: &[u8], first: usize) -> bool {
    let (_, begun) = pattern.split_at(first % pattern.len());
    let (head, rest) = got.split_at(begun.len().min(got.len()));
    begun.starts_with(head) && rest.chunks(pattern.len()).all(|part| pattern.starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_repeats_from_where_it_is_said_to() {
        let own = pattern::<f32>(&bits(1, 2));
        let all = repeated(&own, 3 * PERIOD + 7);
        let repeats = |got: &[f32], pattern: &[f32], first: usize| {
            repeats(bytes(got), bytes(pattern), first * size_of::<f32>())
        };
        assert!(repeats(&all, &own, 0) && repeats(&all[20_000..], &own, 20_000));
        assert!(repeats(&all[5..9], &own, 5) && !repeats(&all[5..], &own, 6));
        let mut wrong = all.clone();
        wrong[2 * PERIOD] += 1.0;
        assert!(!repeats(&wrong, &own, 0) && !repeats(&all, &pattern(&bits(2, 2)), 0));
    }

    #[test]
    fn a_copy_moves_what_a_rank_has_to() {
        let least = |kind| least_copy(kind, 1000, 4);
        assert_eq!(least(Kind::AllReduce), 1000);
        assert_eq!(least(Kind::ReduceScatter), 2500);
        assert_eq!([least(Kind::AllGather), least(Kind::AllToAll)], [4000; 2]);
    }
}
