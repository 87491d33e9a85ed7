//! Measures what [`Costs`] are made of: two threads, each kept on a core of its own, do what ranks do, in short rounds.
//!
//! What a line costs is the difference between many lines and few, over the difference in lines: whatever both have in
//! common, such as flags and reading the clock, drops out. Medians over the rounds ignore those that were interrupted.
//! The threads end with the measurement, so nobody has to be given its cores back.

use std::cell::Cell;
use std::hint::spin_loop;
use std::thread::{scope, yield_now};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{Costs, lists};
use crate::error::{Error, Result};
use crate::sync::Ordering;
use crate::sync::shared::AtomicU64;

/// How long the two threads measure, on two cores and on one.
const APART: Duration = Duration::from_millis(150);
const TOGETHER: Duration = Duration::from_millis(50);
/// Flags that a rank has for each of few peers and of many.
const FLAGS: [usize; 2] = [1, 8];
/// Lines of a stream: few and many, around the sizes at which the algorithms cross.
const LINES: [usize; 2] = [8, 64];
/// Lines of a message that is staged: no more than a core takes from a peer at once. Beyond, each waits for the one
/// before, and other ways are better anyway.
const STAGED: [usize; 2] = [4, 16];
/// Exchanges or round trips in a row, timed together.
const ROW: u32 = 16;
/// Lines that push others out of the first cache.
const MANY: usize = 1024;
/// A flag that goes there and back faster travels between cores that share a cache, or between two threads of one. In
/// picoseconds.
const NEAR: u64 = 170_000;

/// What was found.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// The costs.
    pub costs: Costs,
    /// Between which cores.
    pub cores: [usize; 2],
    /// How long a flag takes there and back, in picoseconds.
    pub round_trip: u32,
    /// The two cores shared a cache for most of the time. On a virtual machine that may last for minutes only: nothing to
    /// plan with.
    pub near: bool,
}

/// Measures for some 200 milliseconds, on two of the cores that this thread may use.
pub fn measure() -> Result<Measured> {
    let cores = two_cores()?;
    let rounds = on(cores, |side| side.rounds(APART, Side::round))?;
    let (apart, together): (Vec<Round>, _) =
        rounds.into_iter().partition(|round| round.trip >= NEAR);
    let near = together.len() > apart.len();
    let rounds = if near { together } else { apart };
    let [core, _] = cores;
    let switches = on([core, core], |side| side.rounds(TOGETHER, Side::switches))?;
    // Between two exchanges the core switches threads once: the second thread finds the first, and goes on to the next exchange.
    let switch = median(switches.into_iter());
    let median = |of: fn(&Round) -> u64| median(rounds.iter().map(of));
    let exchange = median(|r| r.exchange[0]);
    let flag = each([exchange, median(|r| r.exchange[1])], FLAGS);
    let line = |of: [fn(&Round) -> u64; 2], lines| whole(each(of.map(median), lines));
    let costs = Costs {
        exchange: whole(exchange.saturating_sub(2 * flag)),
        flag: whole(flag),
        switch: whole(switch),
        staged: line([|r| r.staged[0], |r| r.staged[1]], STAGED),
        fresh: line([|r| r.fresh[0], |r| r.fresh[1]], STAGED),
        settled: line([|r| r.settled[0], |r| r.settled[1]], LINES),
        moved: line([|r| r.moved[0], |r| r.moved[1]], LINES),
    };
    Ok(Measured { costs, cores, round_trip: whole(median(|r| r.trip)), near })
}

/// Two cores that this thread may use; not two threads of one, as far as the kernel knows and there are others.
fn two_cores() -> Result<[usize; 2]> {
    let allowed = sched_getaffinity(None).map_err(Error::system("asking for the allowed cores"))?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
    let first = cores.next().unwrap_or_default();
    let others: Vec<usize> = cores.collect();
    let path = format!("/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list");
    let siblings = std::fs::read_to_string(path).unwrap_or_default();
    let second = others.iter().find(|&&core| !lists(&siblings, core)).or(others.first());
    second.map(|&second| [first, second]).ok_or_else(|| Error::Unavailable {
        what: "measuring what passes between cores".into(),
        why: "this process may use one core only; allow it two (taskset, cpuset)".into(),
    })
}

/// Runs `work` on both cores at the same time, and gives what both found.
fn on<T: Send>(cores: [usize; 2], work: impl Fn(&Side<'_>) -> Vec<T> + Sync) -> Result<Vec<T>> {
    let table = Table::new();
    let (table, work) = (&table, &work);
    let run = |me: usize| {
        let bound = bind(cores[me]);
        let side = Side { me, table, epoch: Cell::new(0) };
        // A side that could not start says so: the other would wait for ever.
        table.bound[me].0.store(if bound.is_ok() { 1 } else { 2 }, Ordering::Release);
        let both = [0, 1].map(|who| {
            loop {
                match table.bound[who].0.load(Ordering::Acquire) {
                    0 => yield_now(),
                    said => break said == 1,
                }
            }
        });
        bound.map(|()| if both == [true; 2] { work(&side) } else { Vec::new() })
    };
    let run = &run;
    let found = scope(|scope| {
        let threads = [0, 1].map(|me| scope.spawn(move || run(me)));
        threads.map(|thread| thread.join().map_err(|_| ended()).flatten())
    });
    let [mut all, more] = found;
    if let Ok(all) = &mut all {
        all.extend(more?);
    }
    all.and_then(|all| if all.is_empty() { Err(ended()) } else { Ok(all) })
}

fn ended() -> Error {
    Error::Unavailable {
        what: "a measurement".into(),
        why: "one of its two threads ended early".into(),
    }
}

fn bind(core: usize) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).map_err(Error::system(format!("staying on core {core}")))
}

/// A word in lines of its own: processors fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Flag(AtomicU64);

#[derive(Default)]
#[repr(align(64))]
struct Line([AtomicU64; 8]);

impl Line {
    /// As much as two vector instructions do.
    fn write(&self, value: u64) {
        self.0[0].store(value, Ordering::Relaxed);
        self.0[4].store(value, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed).wrapping_add(self.0[4].load(Ordering::Relaxed))
    }
}

fn lines(count: usize) -> Vec<Line> {
    std::iter::repeat_with(Line::default).take(count).collect()
}

/// What the two threads share; of each pair the first is of the first thread.
struct Table {
    bound: [Flag; 2],
    stop: Flag,
    ball: [Flag; 2],
    /// In `flags[r]` thread r finds the other's flags.
    flags: [[Flag; FLAGS[1]]; 2],
    /// Two for each thread, in switches.
    stages: [[Vec<Line>; 2]; 2],
    parts: [Vec<Line>; 2],
    scratch: [Vec<Line>; 2],
}

impl Table {
    fn new() -> Self {
        Self {
            bound: Default::default(),
            stop: Flag::default(),
            ball: Default::default(),
            flags: Default::default(),
            stages: [(); 2].map(|()| [(); 2].map(|()| lines(LINES[1]))),
            parts: [(); 2].map(|()| lines(2 * LINES[1])),
            scratch: [(); 2].map(|()| lines(MANY)),
        }
    }
}

/// What one thread found in one round, in picoseconds; by few and many flags, or few and many lines.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    trip: u64,
    exchange: [u64; 2],
    staged: [u64; 2],
    fresh: [u64; 2],
    settled: [u64; 2],
    moved: [u64; 2],
}

/// One of the two threads.
struct Side<'a> {
    me: usize,
    table: &'a Table,
    epoch: Cell<u64>,
}

impl Side<'_> {
    /// Rounds of both threads until the time is up; the first of them is the clock for both.
    fn rounds<T>(&self, limit: Duration, round: fn(&Self) -> T) -> Vec<T> {
        let begin = Instant::now();
        let mut found = Vec::new();
        loop {
            if self.me == 0 && !found.is_empty() && begin.elapsed() > limit {
                self.table.stop.0.store(1, Ordering::Relaxed);
            }
            self.synchronize(1, yield_now); // here they may share a core
            if self.table.stop.0.load(Ordering::Relaxed) == 1 {
                return found;
            }
            found.push(round(self));
        }
    }

    /// Tells the other with so many flags, and waits for as many of its.
    fn synchronize(&self, flags: usize, wait: fn()) {
        let epoch = self.epoch.get() + 1;
        self.epoch.set(epoch);
        let [theirs, ours] = [1 - self.me, self.me].map(|who| &self.table.flags[who][..flags]);
        // Release and acquire: what was written before is seen after, as between ranks.
        theirs.iter().for_each(|flag| flag.0.store(epoch, Ordering::Release));
        for flag in ours {
            while flag.0.load(Ordering::Acquire) < epoch {
                wait();
            }
        }
    }

    fn synchronize_apart(&self) {
        self.synchronize(1, spin_loop);
    }

    /// Exchanges between threads that share a core, in picoseconds each.
    fn switches(&self) -> u64 {
        let begin = Instant::now();
        (0..ROW).for_each(|_| self.synchronize(1, yield_now));
        since(begin) / u64::from(ROW)
    }

    fn round(&self) -> Round {
        let mut round = Round { trip: self.trip(), ..Round::default() };
        for (i, &flags) in FLAGS.iter().enumerate() {
            self.synchronize_apart();
            let begin = Instant::now();
            (0..ROW).for_each(|_| self.synchronize(flags, spin_loop));
            round.exchange[i] = since(begin) / u64::from(ROW);
        }
        for (i, &lines) in LINES.iter().enumerate() {
            (round.staged[i], round.fresh[i]) = self.staged(i, STAGED[i]);
            round.moved[i] = self.moved(lines);
            round.settled[i] = self.settled(lines);
        }
        round
    }

    /// A flag there and back.
    fn trip(&self) -> u64 {
        let [theirs, ours] = [1 - self.me, self.me].map(|who| &self.table.ball[who].0);
        let last = ours.load(Ordering::Relaxed);
        self.synchronize_apart();
        let begin = Instant::now();
        for count in last + 1..=last + u64::from(ROW) {
            if self.me == 0 {
                theirs.store(count, Ordering::Release);
            }
            while ours.load(Ordering::Acquire) < count {
                spin_loop();
            }
            if self.me == 1 {
                theirs.store(count, Ordering::Release);
            }
        }
        since(begin) / u64::from(ROW)
    }

    /// Copies lines to one staging, and adds up ours and those that the other has staged: what each of the two takes.
    fn staged(&self, staging: usize, lines: usize) -> (u64, u64) {
        let [own, theirs] = [self.me, 1 - self.me].map(|who| &self.table.stages[who][staging]);
        let part = &self.table.parts[self.me][..lines];
        part.iter().for_each(|line| line.write(self.epoch.get()));
        self.synchronize_apart();
        let begin = Instant::now();
        own.iter().zip(part).for_each(|(own, part)| own.write(part.read()));
        self.synchronize_apart();
        let (staged, begin) = (since(begin), Instant::now());
        for (part, theirs) in part.iter().zip(theirs) {
            part.write(part.read().wrapping_add(theirs.read()));
        }
        let fresh = since(begin);
        (staged, fresh)
    }

    /// Adds up a share of both parts and stores it in both.
    fn moved(&self, lines: usize) -> u64 {
        let [own, theirs] = [self.me, 1 - self.me].map(|who| &self.table.parts[who]);
        own[..2 * lines].iter().for_each(|line| line.write(self.epoch.get()));
        let share = self.me * lines..(self.me + 1) * lines;
        self.synchronize_apart();
        let begin = Instant::now();
        for (own, theirs) in own[share.clone()].iter().zip(&theirs[share]) {
            let sum = own.read().wrapping_add(theirs.read());
            own.write(sum);
            theirs.write(sum);
        }
        self.synchronize_apart();
        since(begin)
    }

    /// Copies what the other wrote some time ago.
    fn settled(&self, lines: usize) -> u64 {
        let [own, theirs] = [self.me, 1 - self.me].map(|who| &self.table.parts[who][..lines]);
        let scratch = &self.table.scratch[self.me];
        own.iter().for_each(|line| line.write(self.epoch.get()));
        scratch.iter().rev().for_each(|line| line.write(self.epoch.get()));
        self.synchronize_apart();
        let begin = Instant::now();
        scratch.iter().zip(theirs).for_each(|(to, line)| to.write(line.read()));
        since(begin)
    }
}

fn since(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// What one more costs, where `counts` of them cost `costs`.
fn each(costs: [u64; 2], counts: [usize; 2]) -> u64 {
    costs[1].saturating_sub(costs[0]) / (counts[1] - counts[0]) as u64
}

fn whole(picoseconds: u64) -> u32 {
    u32::try_from(picoseconds).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_more_costs_is_the_slope_and_never_less_than_nothing() {
        assert_eq!(each([100, 170], [1, 8]), 10);
        assert_eq!(each([170, 100], [1, 8]), 0);
        assert_eq!(median([3, 1, 2].into_iter()), 2);
        assert_eq!(median(std::iter::empty()), 0);
    }

    #[test]
    fn every_cost_is_found_and_the_callers_cores_stay_as_they_are() {
        let allowed = || {
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect::<Vec<_>>()
        };
        let before = allowed();
        match measure() {
            Ok(found) => {
                assert!(found.cores.iter().all(|core| before.contains(core)));
                assert!(found.cores[0] != found.cores[1]);
                assert!(found.round_trip > 0 && found.costs.switch > 0, "{found:?}");
            }
            Err(e) => assert!(before.len() < 2 && e.to_string().contains("one core only"), "{e}"),
        }
        assert_eq!(allowed(), before);
    }
}
