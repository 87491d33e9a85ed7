//! The one way in which everything is timed.
//!
//! Before each sample all ranks synchronise. The sample runs from the last rank's start to the last rank's end, and a tiny call
//! is made several times in a row. What prepares and what checks is not timed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use symmem::{Group, Symmetric};

use super::board::Board;
use super::clock;
use super::record::Sample;
use super::rows::Measure;

/// Something to time, as one rank sees it. All ranks do each step.
pub(super) trait Case {
    /// Before each sample; not timed.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// What is timed.
    fn call(&mut self) -> Result<()>;

    /// Reads the result as its owner would; timed apart.
    fn read(&mut self) {}

    /// After each sample, whether the results were right; not timed.
    fn check(&mut self) -> Result<bool>;

    /// Before the first sample and after the last, whether results of fresh inputs are right; not timed.
    fn verify(&mut self) -> Result<bool> {
        Ok(true)
    }

    /// Microseconds that this rank took for making a call, where that is not all of it.
    fn host_us(&self) -> Option<f64> {
        None
    }

    /// `count` calls in a row.
    fn calls(&mut self, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| self.call())
    }
}

/// How long all measures together may wait for the host to part the cores.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one of them may.
const PATIENCE_EACH: Duration = Duration::from_secs(1);

/// What one round gave.
pub(super) struct Taken {
    /// Rank 0's to know.
    pub(super) samples: Vec<Sample>,
    /// The same to the end of reading the result, where that is timed.
    pub(super) with_read: Option<Vec<Sample>>,
    /// Whether this rank's results were right.
    pub(super) verified: bool,
}

/// Without the reading of the result, and with it.
type Samples = (Vec<Sample>, Vec<Sample>);

/// One rank's part of all measuring.
pub(super) struct Bench<'a> {
    pub(super) group: &'a Group,
    pub(super) board: &'a Board<'a>,
    readings: Readings,
    /// What is left of [`PATIENCE`].
    patience: Duration,
    quick: bool,
}

/// Where the ranks put their clocks' readings together.
enum Readings {
    Symmetric(Option<Symmetric<u64>>),
    /// Between hosts, which are all on one machine here.
    Shared(&'static [AtomicU64]),
}

/// The readings of one sample: start, end, end of the reading, whether near.
const READINGS: usize = 4;
/// No measure takes more samples in a round.
const MOST: usize = 1000;

impl<'a> Bench<'a> {
    pub(super) fn new(group: &'a Group, board: &'a Board<'a>, quick: bool) -> Result<Self> {
        let readings = Readings::Symmetric(Some(group.alloc(READINGS * MOST)?.rendezvous(group)?));
        Ok(Self::with(group, board, readings, quick))
    }

    /// Of ranks of several hosts, which share some memory besides.
    pub(super) fn between_hosts(
        group: &'a Group,
        board: &'a Board<'a>,
        readings: &'static [AtomicU64],
        quick: bool,
    ) -> Self {
        Self::with(group, board, Readings::Shared(readings), quick)
    }

    /// The bytes of a rank's readings.
    pub(super) fn readings_size() -> usize {
        READINGS * MOST * size_of::<u64>()
    }

    fn with(group: &'a Group, board: &'a Board<'a>, readings: Readings, quick: bool) -> Self {
        let patience = if quick { Duration::ZERO } else { PATIENCE };
        Self { group, board, readings, patience, quick }
    }

    /// Takes the samples of one round.
    pub(super) fn measure(&mut self, measure: &Measure, case: &mut dyn Case) -> Result<Taken> {
        let mut verified = case.verify()?;
        let count = self.warm_up(measure, case)?;
        // Between hosts it matters little.
        let on_host = measure.on.is_none() && matches!(self.readings, Readings::Symmetric(_));
        if on_host {
            self.settle();
        }
        let mut readings = Vec::with_capacity(READINGS * count);
        for _ in 0..count {
            case.prepare()?;
            let near = on_host && self.board.synchronize_and_look();
            if !on_host {
                self.board.barrier();
            }
            let start = clock::now();
            case.calls(measure.batch)?;
            let end = clock::now();
            let mut end_of_read = end;
            if measure.read {
                case.read();
                end_of_read = clock::now();
            }
            self.board.barrier();
            verified &= case.check()?;
            readings.extend([start, end, end_of_read, u64::from(near)]);
        }
        verified &= case.verify()?;
        let (samples, with_read) = self.gather(&readings, measure)?;
        Ok(Taken { samples, with_read: measure.read.then_some(with_read), verified })
    }

    /// Makes calls until the caches know them; returns how many samples there is time for, the same on all ranks.
    fn warm_up(&self, measure: &Measure, case: &mut dyn Case) -> Result<usize> {
        let mut samples = |count: u32| -> Result<Duration> {
            let begin = clock::now();
            for _ in 0..count {
                case.prepare()?;
                self.board.barrier();
                case.calls(measure.batch)?;
                self.board.barrier();
                case.check()?;
            }
            Ok(Duration::from_nanos((clock::now() - begin).max(1)) / count)
        };
        let fitting = |time: Duration, one: Duration, most: u32| {
            (time.as_nanos() / one.as_nanos().max(1)).min(most.into()) as u32
        };
        let one = samples(3)?;
        if self.quick {
            return Ok(5);
        }
        let warm = self.board.agree(fitting(measure.warm, one, 200).max(2));
        let one = samples(warm)?;
        let count = fitting(measure.time, one, measure.samples.min(MOST) as u32);
        Ok(self.board.agree(count.max(measure.least as u32)) as usize)
    }

    /// A core that slept is often moved: gives the host some time to part near ones.
    fn settle(&mut self) {
        const NAP: Duration = Duration::from_millis(5);
        let mut left = self.patience.min(PATIENCE_EACH);
        while self.board.agree(self.board.synchronize_and_look().into()) != 0 && left > NAP {
            std::thread::sleep(NAP);
            left -= NAP;
            self.patience -= NAP;
        }
    }

    /// Puts all ranks' readings together: a sample ends with the last rank, and begins when the last one does.
    fn gather(&mut self, readings: &[u64], measure: &Measure) -> Result<Samples> {
        let readings_of = match &mut self.readings {
            Readings::Shared(shared) => {
                return gather_shared(self.board, shared, readings, measure);
            }
            Readings::Symmetric(own) => own,
        };
        let mut own = readings_of.take().context("an earlier round failed")?;
        let part = own.local_mut().get_mut(..readings.len());
        part.context("too many samples")?.copy_from_slice(readings);
        let shared = own.share()?;
        let ranks: Vec<_> =
            (0..self.board.ranks()).map(|rank| shared.peer(rank)).collect::<Result<_, _>>()?;
        let samples = sum_up(&ranks, readings.len() / READINGS, measure);
        *readings_of = Some(shared.release()?);
        Ok(samples)
    }
}

/// As [`Bench::gather`], through memory that all ranks share besides.
fn gather_shared(
    board: &Board<'_>,
    shared: &[AtomicU64],
    readings: &[u64],
    measure: &Measure,
) -> Result<Samples> {
    let each = READINGS * MOST;
    let part = |rank: usize| shared.get(rank * each..)?.get(..readings.len());
    let own = part(board.rank()).context("too many samples")?;
    // Relaxed: the barriers order them.
    own.iter().zip(readings).for_each(|(word, reading)| word.store(*reading, Ordering::Relaxed));
    board.barrier();
    let read =
        |rank| Some(part(rank)?.iter().map(|w| w.load(Ordering::Relaxed)).collect::<Vec<_>>());
    let all: Vec<_> = (0..board.ranks()).filter_map(read).collect();
    board.barrier();
    let ranks: Vec<_> = all.iter().map(Vec::as_slice).collect();
    Ok(sum_up(&ranks, readings.len() / READINGS, measure))
}

/// The samples of all ranks' readings.
fn sum_up(ranks: &[&[u64]], count: usize, measure: &Measure) -> Samples {
    let sample = |index: usize, end: usize| {
        let latest = |what: usize| {
            ranks.iter().filter_map(|part| part.get(READINGS * index + what)).max().copied()
        };
        let of_first =
            |what: usize| ranks.first().and_then(|part| part.get(READINGS * index + what));
        let begin = if measure.one_way { of_first(0).copied() } else { latest(0) };
        let time = latest(end).unwrap_or(0).saturating_sub(begin.unwrap_or(0));
        let near = of_first(3);
        Sample { ns: time as f64 / measure.batch as f64, as_near: near == Some(&1) }
    };
    let all = |end| (0..count).map(|index| sample(index, end)).collect();
    (all(1), all(2))
}
