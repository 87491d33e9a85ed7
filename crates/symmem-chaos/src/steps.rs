//! Where the ranks are in the sequence of their group's calls, as far as that follows from what came of them.

use std::collections::{BTreeMap, HashMap};

use crate::names::{Key, is_collective, is_resumable};
use symmem_chaos::program::{Op, Policy, Program};
use symmem_chaos::record::{Kind, Outcome, Record};

/// The calls of each group's sequence, in the order in which they began.
pub struct Steps<'a> {
    calls: Vec<&'a Record>,
    /// Signals through memory: a rank that does not get one does not close the memory, which is a call of the sequence.
    signals: Vec<&'a Record>,
    /// Round by lane and call, and whether its ranks go on after an error.
    rounds: HashMap<(usize, usize), (usize, bool)>,
    /// See [`count_generations`](crate::names::count_generations).
    generations: HashMap<(usize, usize, u64), usize>,
}

fn kind(record: &Record) -> Option<Kind> {
    match &record.outcome {
        Outcome::Err { kind, .. } => Some(*kind),
        _ => None,
    }
}

/// Whether the group had not even been formed.
pub fn is_before_forming(record: &Record) -> bool {
    matches!(&record.outcome, Outcome::Err { text, .. } if text.starts_with("subgroup"))
}

fn is_same_group(a: &Record, b: &Record) -> bool {
    a.lane == b.lane && a.members == b.members
}

fn gave_up(record: &Record) -> bool {
    matches!(kind(record), Some(Kind::Timeout | Kind::Interrupted))
}

/// Whether a call was given up by then. A rank that was killed in one whose time was over may have died before it noted that.
pub fn may_have_given_up(record: &Record, by: u64) -> bool {
    let over = record.enter + record.limit - record.limit / 10;
    gave_up(record) || record.outcome == Outcome::Open && over <= by
}

impl<'a> Steps<'a> {
    pub fn new(
        program: &Program,
        all: &BTreeMap<Key, Vec<&'a Record>>,
        generations: HashMap<(usize, usize, u64), usize>,
    ) -> Self {
        let mut rounds = HashMap::new();
        let (mut apart, mut memory) = (Vec::new(), Vec::new());
        for lane in &program.lanes {
            for (i, round) in lane.rounds.iter().enumerate() {
                for step in &round.steps {
                    let goes_on = round.policy == Policy::Ignore;
                    rounds.insert((lane.number, step.call), (i, goes_on));
                    if matches!(step.op, Op::Subgroup { .. } | Op::Behind { .. }) {
                        apart.push((lane.number, step.call));
                    }
                    if matches!(step.op, Op::Memory { .. }) {
                        memory.push((lane.number, step.call));
                    }
                }
            }
        }
        let is_step = |r: &Record| {
            let other = apart.contains(&(r.lane, r.call)) || r.name.starts_with("barrier#");
            r.name == "resync" || is_collective(&r.name) && !other && r.part < 90
        };
        let mut records: Vec<&Record> = all.values().flatten().copied().collect();
        records.sort_by_key(|r| r.enter);
        let is_signal =
            |r: &&Record| r.name.contains("_signal") && memory.contains(&(r.lane, r.call));
        let signals = records.iter().copied().filter(is_signal).collect();
        records.retain(|r| is_step(r));
        Self { calls: records, signals, rounds, generations }
    }

    fn generation(&self, record: &Record) -> Option<usize> {
        self.generations.get(&(record.rank, record.lane, record.enter)).copied()
    }

    fn is_step(&self, record: &Record) -> bool {
        self.calls.iter().any(|r| std::ptr::eq(*r, record))
    }

    fn is_signal(&self, record: &Record) -> bool {
        self.signals.iter().any(|r| std::ptr::eq(*r, record))
    }

    /// The calls of the same round of the same sequence.
    fn of_round(&self, record: &Record) -> impl Iterator<Item = &'a Record> {
        let calls = self.calls.iter().copied();
        calls.filter(|r| self.is_same_round(r, record))
    }

    fn is_same_round(&self, a: &Record, b: &Record) -> bool {
        let round = |r: &Record| self.rounds.get(&(r.lane, r.call));
        a.lane == b.lane && round(a) == round(b)
    }

    /// Whether a rank went on after an error that left the others where they were: from there on, its calls need not be
    /// those of the same step of the others.
    pub fn may_be_shifted(&self, record: &Record) -> bool {
        let goes_on = self.rounds.get(&(record.lane, record.call)).is_some_and(|(_, goes)| *goes);
        let shifts = |r: &Record| {
            let one_sided = gave_up(r) || matches!(kind(r), Some(Kind::PeerFailed | Kind::Usage));
            one_sided && (is_resumable(&r.name) || is_before_forming(r)) && r.enter <= record.leave
        };
        let left_open = |r: &Record| gave_up(r) && r.enter <= record.leave;
        let mut signals = self.signals.iter().filter(|r| self.is_same_round(r, record));
        let mut shifted = || self.of_round(record).any(shifts) || signals.any(|r| left_open(r));
        goes_on && (self.is_step(record) || self.is_signal(record)) && shifted()
    }

    /// What a rank has called in this round by the end of `record` that looks the same.
    pub fn alike(&self, record: &Record, rank: usize) -> Vec<&'a Record> {
        let same = |r: &&Record| r.rank == rank && r.name == record.name;
        self.of_round(record).filter(same).collect()
    }

    /// A call with data of the same group that a rank had given up before this one began, and no resync since.
    pub fn out_of_step_since(&self, record: &Record) -> Option<&'a Record> {
        if !self.is_step(record) || record.name == "resync" {
            return None;
        }
        let generation = self.generation(record);
        let before = |r: &&&Record| {
            is_same_group(r, record) && self.generation(r) == generation && r.leave < record.enter
        };
        let data = |r: &&&Record| gave_up(r) && !is_resumable(&r.name) && !is_before_forming(r);
        self.calls.iter().filter(before).find(data).copied()
    }

    /// Whether a rendezvous that this rank gave up was not followed by a call that succeeded.
    pub fn ends_in_rendezvous(&self, rank: usize) -> bool {
        let ends = |lane: usize| {
            let own = self.calls.iter().rev().filter(|r| r.rank == rank && r.lane == lane);
            own.take_while(|r| r.outcome != Outcome::Ok)
                .any(|r| r.name.starts_with("rendezvous") && r.leave != 0)
        };
        self.rounds.keys().any(|(lane, _)| ends(*lane))
    }

    /// Whether `rank` had given up a call when `record` ended, or had called resync.
    pub fn gave_up(&self, record: &Record, rank: usize) -> bool {
        let generation = self.generation(record);
        let theirs =
            |r: &&&Record| r.rank == rank && is_same_group(r, record) && r.enter <= record.leave;
        let reason = |r: &Record| r.name == "resync" || may_have_given_up(r, record.leave);
        self.calls.iter().filter(theirs).any(|r| self.generation(r) >= generation && reason(r))
    }
}
