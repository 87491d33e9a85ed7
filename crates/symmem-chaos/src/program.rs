//! Programs: what every rank calls, and what goes wrong meanwhile. All of it follows from a seed.

use std::fmt;

use symmem::{Algorithm, DType, ReduceOp};

/// Symmetric memory that a step uses; allocated where it is not there yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub number: usize,
    pub dtype: DType,
    pub len: usize,
    /// Cut from a pool.
    pub pool: bool,
}

/// A message from each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Messages {
    pub dtype: DType,
    pub len: usize,
    pub distance: usize,
    /// The receiver takes one of any rank.
    pub any: bool,
}

/// What ranks call together. Roots and lengths fit every number of ranks: blocks are multiplied by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    AllReduce {
        dtype: DType,
        len: usize,
        op: ReduceOp,
    },
    AllGather {
        dtype: DType,
        len: usize,
    },
    ReduceScatter {
        dtype: DType,
        len: usize,
        op: ReduceOp,
    },
    Broadcast {
        dtype: DType,
        len: usize,
        root: usize,
    },
    AllToAll {
        dtype: DType,
        len: usize,
    },
    Reduce {
        dtype: DType,
        len: usize,
        op: ReduceOp,
        root: usize,
    },
    Gather {
        dtype: DType,
        len: usize,
        root: usize,
    },
    Scatter {
        dtype: DType,
        len: usize,
        root: usize,
    },
    Scan {
        dtype: DType,
        len: usize,
        op: ReduceOp,
        exclusive: bool,
    },
    /// `all_to_all_v`, with counts made from `len`.
    AllToAllV {
        dtype: DType,
        len: usize,
    },
    Memory {
        slot: Slot,
        work: Work,
    },
    Drop {
        number: usize,
    },
    Barrier,
    BarrierOn {
        channel: usize,
    },
    /// A signal to the rank so far ahead, and one from the rank so far behind.
    Signals {
        channel: usize,
        distance: usize,
    },
    Messages(Messages),
    /// A group of the ranks in the mask, used and dropped.
    Subgroup {
        mask: usize,
        used: bool,
    },
    /// One thread of a rank waits with a long limit, and another behind it with a short one; nobody else comes.
    Behind {
        first: Waiting,
        second: Waiting,
    },
}

/// On symmetric memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    AllReduce {
        op: ReduceOp,
        algorithm: Algorithm,
    },
    AllReduceInto {
        op: ReduceOp,
    },
    AllGather,
    ReduceScatter {
        op: ReduceOp,
    },
    Broadcast {
        root: usize,
    },
    AllToAll,
    Reduce {
        op: ReduceOp,
        root: usize,
    },
    Gather {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    /// Share, read all, and release.
    Share,
    /// Open, put to the next rank, signal, get, and close.
    Open {
        channel: usize,
    },
    /// A signal put through this memory is not taken through another.
    Apart {
        other: Slot,
        channel: usize,
    },
}

/// What a thread of [`Op::Behind`] waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    Rendezvous,
    Slices,
    Barrier,
    Forming,
}

/// One step of all ranks.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its number, which is part of its data.
    pub call: usize,
    pub op: Op,
    /// Ranks that call something else.
    pub variants: Vec<(usize, Op)>,
}

/// What a rank does after an error of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Makes no further call in it.
    Stop,
    /// Makes the others as if nothing had been.
    Ignore,
    /// Makes the same call again where that goes on with it, else stops.
    Retry,
}

/// Steps without any agreement in between but that of the library.
#[derive(Clone, Debug)]
pub struct Round {
    pub policy: Policy,
    /// Milliseconds that each call has.
    pub limit: u64,
    pub steps: Vec<Step>,
    /// Something goes wrong in it: memory is not used beyond it.
    pub faulty: bool,
}

/// The group that a lane uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneGroup {
    World,
    /// A group of its own, of the ranks in the mask.
    Group(usize),
    /// Channels of the world's group that no other lane uses.
    Channels,
}

/// What one thread of every rank does.
#[derive(Clone, Debug)]
pub struct Lane {
    pub number: usize,
    pub place: LaneGroup,
    pub rounds: Vec<Round>,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trouble {
    /// Milliseconds before the call.
    Late(u64),
    /// The process stops, so many microseconds into the call, for so many milliseconds.
    Stop(u64, u64),
    /// The process is killed, so many microseconds into the call.
    Kill(u64),
    /// The caller ends the wait after so many milliseconds.
    Interrupt(u64),
    /// A limit of its own, in milliseconds.
    Short(u64),
    /// The rank ends in order instead of making the call.
    Leave,
}

#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub rank: usize,
    pub lane: usize,
    pub call: usize,
    pub trouble: Trouble,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Threads,
    Processes,
}

/// What is run, from a seed, and possibly with parts left out.
#[derive(Clone, Debug)]
pub struct Program {
    pub spec: Spec,
    pub ranks: usize,
    pub lanes: Vec<Lane>,
    pub faults: Vec<Fault>,
    /// Ranks sleep for a little before some of their calls.
    pub jitter: bool,
}

/// Names a program: written and read again as `p:6:123-s4-f0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub mode: Mode,
    pub ranks: usize,
    pub seed: u64,
    pub without: Vec<Cut>,
}

/// A part that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Call(usize),
    Fault(usize),
    Lane(usize),
    Variant(usize),
    Jitter,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.mode == Mode::Threads { 't' } else { 'p' };
        write!(f, "{mode}:{}:{}", self.ranks, self.seed)?;
        self.without.iter().try_for_each(|cut| match cut {
            Cut::Call(n) => write!(f, "-s{n}"),
            Cut::Fault(n) => write!(f, "-f{n}"),
            Cut::Lane(n) => write!(f, "-l{n}"),
            Cut::Variant(n) => write!(f, "-v{n}"),
            Cut::Jitter => write!(f, "-j0"),
        })
    }
}

impl std::str::FromStr for Spec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let wrong = || anyhow::anyhow!("expected a program such as t:4:123-s2-f0, got {text:?}");
        let mut words = text.split('-');
        let head: Vec<&str> = words.next().unwrap_or_default().split(':').collect();
        let [mode, ranks, seed] = head[..] else { return Err(wrong()) };
        let mode = match mode {
            "t" => Mode::Threads,
            "p" => Mode::Processes,
            _ => return Err(wrong()),
        };
        let cut = |word: &str| {
            let number = word.get(1..)?.parse().ok()?;
            match word.get(..1)? {
                "s" => Some(Cut::Call(number)),
                "f" => Some(Cut::Fault(number)),
                "l" => Some(Cut::Lane(number)),
                "v" => Some(Cut::Variant(number)),
                "j" => Some(Cut::Jitter),
                _ => None,
            }
        };
        let without: Option<Vec<Cut>> = words.map(cut).collect();
        let (ranks, seed) = (ranks.parse()?, seed.parse()?);
        Ok(Self { mode, ranks, seed, without: without.ok_or_else(wrong)? })
    }
}

impl Program {
    /// Leaves out what the specification leaves out.
    pub fn reduced(mut self) -> Self {
        let cuts = self.spec.without.clone();
        let has = |cut: Cut| cuts.contains(&cut);
        let faults = std::mem::take(&mut self.faults).into_iter().enumerate();
        self.faults =
            faults.filter(|(i, _)| !has(Cut::Fault(*i))).map(|(_, fault)| fault).collect();
        self.jitter &= !has(Cut::Jitter);
        self.lanes.retain(|lane| !has(Cut::Lane(lane.number)));
        for round in self.lanes.iter_mut().flat_map(|lane| &mut lane.rounds) {
            round.steps.retain(|step| !has(Cut::Call(step.call)));
            for step in round.steps.iter_mut().filter(|step| has(Cut::Variant(step.call))) {
                step.variants.clear();
            }
        }
        self.lanes.iter_mut().for_each(|lane| lane.rounds.retain(|r| !r.steps.is_empty()));
        self.faults.retain(|f| self.lanes.iter().any(|lane| lane.number == f.lane));
        self
    }

    pub fn faults_of(&self, rank: usize, call: usize) -> impl Iterator<Item = &Fault> {
        self.faults.iter().filter(move |f| f.rank == rank && f.call == call)
    }

    /// What `rank` calls in a step.
    pub fn op_of(step: &Step, rank: usize) -> Op {
        step.variants.iter().find(|(r, _)| *r == rank).map_or(step.op, |(_, op)| *op)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.spec.mode == Mode::Threads { "threads" } else { "processes" };
        writeln!(f, "{} ranks, {mode}{}", self.ranks, if self.jitter { ", jitter" } else { "" })?;
        for lane in &self.lanes {
            writeln!(f, "thread {} of every rank, on {:?}:", lane.number, lane.place)?;
            for round in &lane.rounds {
                let kind = if round.faulty { ", faults" } else { "" };
                writeln!(f, "  round of {} ms, on errors {:?}{kind}", round.limit, round.policy)?;
                for step in &round.steps {
                    writeln!(f, "    {:3} {:?}", step.call, step.op)?;
                    for (rank, op) in &step.variants {
                        writeln!(f, "        rank {rank}: {op:?}")?;
                    }
                    for fault in self.faults.iter().filter(|fault| fault.call == step.call) {
                        writeln!(f, "        rank {}: {:?}", fault.rank, fault.trouble)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_read_as_it_is_written() {
        let text = "p:6:123-s4-f0-l1-j0-v7";
        let spec: Spec = text.parse().unwrap();
        assert_eq!(spec.to_string(), text);
        assert!("x:6:1".parse::<Spec>().is_err() && "t:6:1-q1".parse::<Spec>().is_err());
    }
}
