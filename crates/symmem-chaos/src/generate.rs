//! Makes a program of a seed.

use symmem::{Algorithm, DType, ReduceOp};
use symmem_chaos::random::Random;

use symmem_chaos::api;
use symmem_chaos::program::{
    Cut, Fault, Lane, LaneGroup, Messages, Mode, Op, Policy, Program, Round, Slot, Spec, Step,
    Trouble, Waiting, Work,
};
/// Divisible by every number of ranks.
const BLOCKS: usize = 60;
/// Nothing takes so long where nothing goes wrong.
const LONG: u64 = 2_000;
/// The callback that may end a wait is called at least ten times a second: by then it has ended.
const INTERRUPTED: u64 = 150;

/// Leaves out all calls that differ, of whatever step.
pub const AGREE: Cut = Cut::Variant(999);

struct Maker {
    random: Random,
    ranks: usize,
    mode: Mode,
    calls: usize,
    faults: Vec<Fault>,
    /// Limits are short in the round that is being made.
    hurried: bool,
    /// Memory that is there, in the lane that is being made.
    slots: Vec<Slot>,
}

/// The program of a specification.
pub fn generate(spec: &Spec) -> Program {
    let mut random = Random(spec.seed);
    random.next();
    let (ranks, mode) = (spec.ranks, spec.mode);
    let mut maker = Maker {
        random,
        ranks,
        mode,
        calls: 0,
        faults: Vec::new(),
        hurried: false,
        slots: Vec::new(),
    };
    let lanes = maker.lanes();
    let jitter = maker.one_in(2);
    let faults = maker.faults;
    let mut program = Program { spec: spec.clone(), ranks, lanes, faults, jitter }.reduced();
    if spec.without.contains(&AGREE) {
        let rounds = program.lanes.iter_mut().flat_map(|lane| &mut lane.rounds);
        rounds.flat_map(|round| &mut round.steps).for_each(|step| step.variants.clear());
    }
    program
}

impl Maker {
    fn one_in(&mut self, n: usize) -> bool {
        self.random.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.below(of.len())]
    }

    fn lanes(&mut self) -> Vec<Lane> {
        let count = self.pick(&[1, 1, 1, 1, 2, 2, 3]);
        let mut in_step = true;
        (0..count)
            .map(|number| {
                let place = match number {
                    0 => LaneGroup::World,
                    // A call that the other lane gives up ends theirs: which ones, nobody knows.
                    1 if in_step && self.one_in(2) => LaneGroup::Channels,
                    _ => LaneGroup::Group(self.mask()),
                };
                self.slots.clear();
                let rounds = self.rounds(number, place, count == 1);
                in_step &= number > 0 || rounds.iter().all(|round| !round.faulty);
                Lane { number, place, rounds }
            })
            .collect()
    }

    /// Some of the ranks, at least one.
    fn mask(&mut self) -> usize {
        let all = (1 << self.ranks) - 1;
        if self.one_in(2) { all } else { (self.random.below(all) + 1) & all }
    }

    fn rounds(&mut self, lane: usize, place: LaneGroup, alone: bool) -> Vec<Round> {
        let count = 1 + self.random.below(4);
        let last = count - 1;
        (0..count)
            .map(|i| {
                // Where nothing brings a group back in step, nothing comes after a round with faults.
                let faulty = self.one_in(2) && (api::RESYNC || i == last || self.one_in(4));
                let round = self.round(lane, place, faulty, alone && i == last);
                if faulty {
                    self.slots.clear();
                }
                round
            })
            .collect()
    }

    fn round(&mut self, lane: usize, place: LaneGroup, faulty: bool, last: bool) -> Round {
        let policy = self.pick(&[Policy::Stop, Policy::Ignore, Policy::Ignore, Policy::Retry]);
        self.hurried = faulty;
        let limit = if faulty { self.pick(&[15, 30, 60]) } else { LONG };
        let first = self.calls;
        let count = 1 + self.random.below(8);
        let mut steps: Vec<Step> = (0..count).map(|_| self.step(place)).collect();
        if faulty {
            self.troubles(lane, first, limit, last);
        } else if self.one_in(3) {
            self.lateness(lane, first);
        }
        if last && !faulty && self.one_in(25) {
            let kinds = [Waiting::Rendezvous, Waiting::Slices, Waiting::Barrier, Waiting::Forming];
            let op = Op::Behind { first: self.pick(&kinds), second: self.pick(&kinds) };
            steps.push(Step { call: self.next_call(), op, variants: Vec::new() });
        }
        Round { policy, limit, steps, faulty }
    }

    fn next_call(&mut self) -> usize {
        self.calls += 1;
        self.calls - 1
    }

    fn step(&mut self, place: LaneGroup) -> Step {
        let call = self.next_call();
        if place == LaneGroup::Channels {
            let op = self.on_channels();
            return Step { call, op, variants: Vec::new() };
        }
        let op = self.op();
        let mut variants = Vec::new();
        if self.one_in(12) && self.ranks > 1 && may_differ(&op, &self.slots) {
            for _ in 0..self.pick(&[1, 1, 2]) {
                let rank = self.random.below(self.ranks);
                if let Some(other) = self.variant(&op) {
                    variants.push((rank, other));
                }
            }
        }
        if let Op::Memory { slot, work } = op {
            self.has(slot);
            if let Work::Apart { other, .. } = work {
                self.has(other);
            }
        }
        Step { call, op, variants }
    }

    fn has(&mut self, slot: Slot) {
        if !self.slots.contains(&slot) {
            self.slots.push(slot);
        }
    }

    fn on_channels(&mut self) -> Op {
        let channel = 8 + self.random.below(3);
        match self.random.below(3) {
            0 => Op::BarrierOn { channel },
            1 => self.messages(),
            _ => Op::Signals { channel, distance: 1 + self.random.below(3) },
        }
    }

    fn op(&mut self) -> Op {
        let (dtype, op) = self.typed();
        match self.random.below(30) {
            24 => {
                let (len, root) = (self.len(dtype), self.random.below(6));
                match self.random.below(3) {
                    0 => Op::Reduce { dtype, len, op, root },
                    1 => Op::Gather { dtype, len: len / 2, root },
                    _ => Op::Scatter { dtype, len: len / 4, root },
                }
            }
            25 => Op::Scan { dtype, len: self.len(dtype), op, exclusive: self.one_in(2) },
            28 | 29 => self.messages(),
            26 | 27 => Op::AllToAllV { dtype, len: self.len(dtype) / 4 },
            0..=3 => Op::AllReduce { dtype, len: self.len(dtype), op },
            4 => Op::AllGather { dtype, len: self.len(dtype) / 2 },
            5 => Op::ReduceScatter { dtype, len: self.len(dtype) / 4, op },
            6 => Op::Broadcast { dtype, len: self.len(dtype), root: self.random.below(6) },
            7 => Op::AllToAll { dtype, len: self.len(dtype) / 4 },
            8..=17 => self.on_memory(),
            18 => match self.slots.len() {
                0 => Op::Barrier,
                n => {
                    let at = self.random.below(n);
                    Op::Drop { number: self.slots.swap_remove(at).number }
                }
            },
            19 | 20 => Op::Barrier,
            21 => Op::BarrierOn { channel: 1 + self.random.below(3) },
            22 => Op::Signals { channel: self.random.below(3), distance: 1 + self.random.below(3) },
            _ => Op::Subgroup { mask: self.mask(), used: !self.one_in(4) },
        }
    }

    fn messages(&mut self) -> Op {
        let dtype = self.pick(DType::ALL);
        let (len, distance) = (self.len(dtype), self.random.below(4));
        Op::Messages(Messages { dtype, len, distance, any: self.one_in(3) })
    }

    fn typed(&mut self) -> (DType, ReduceOp) {
        let dtype = self.pick(DType::ALL);
        (dtype, self.operator(dtype))
    }

    fn operator(&mut self, dtype: DType) -> ReduceOp {
        let mut ops = ReduceOp::ALL.to_vec();
        ops.retain(|op| op.applies_to(dtype.kind()));
        self.pick(&ops)
    }

    /// From none to several pieces of the staging buffers.
    fn len(&mut self, dtype: DType) -> usize {
        // Where limits are short the work itself must take no time to speak of, even without optimisation.
        let most = if self.hurried { 150_000 } else { usize::MAX };
        let bytes = match self.random.below(20) {
            0 => 0,
            1..=7 => self.random.below(25),
            8..=13 => self.random.below(2500),
            14..=17 => self.random.below(30_000),
            18 => self.random.below(140_000),
            _ => self.random.below(500_000),
        };
        bytes % most / dtype.size()
    }

    fn slot(&mut self) -> Slot {
        if !self.slots.is_empty() && !self.one_in(4) {
            let at = self.random.below(self.slots.len());
            return self.slots[at];
        }
        let dtype = self.pick(DType::ALL);
        let len = self.len(dtype) % 150_000; // it may be used again where limits are short
        let len = if self.one_in(3) { len } else { len.next_multiple_of(BLOCKS) };
        // Its number says what it is: two of one number are one.
        let number = self.calls * 8 + self.random.below(8);
        Slot { number, dtype, len, pool: self.one_in(3) }
    }

    fn on_memory(&mut self) -> Op {
        let slot = self.slot();
        let (op, root) = (self.operator(slot.dtype), self.random.below(6));
        let algorithms =
            [Algorithm::Auto, Algorithm::Staged, Algorithm::OneShot, Algorithm::TwoShot];
        let work = match self.random.below(if slot.len.is_multiple_of(BLOCKS) { 16 } else { 12 }) {
            0..=2 => Work::AllReduce { op, algorithm: self.pick(&algorithms) },
            3 => Work::AllReduceInto { op },
            4 => Work::AllGather,
            5 => Work::Broadcast { root },
            6 => Work::Reduce { op, root },
            7 => Work::Gather { root },
            8 | 9 => Work::Share,
            10 => Work::Open { channel: self.random.below(3) },
            11 => {
                let other = self.slot();
                match other.number == slot.number || other.dtype != slot.dtype {
                    true => Work::Open { channel: 0 },
                    false => Work::Apart { other, channel: self.random.below(3) },
                }
            }
            12 => Work::ReduceScatter { op },
            13 => Work::AllToAll,
            14 => Work::Scatter { root },
            _ => Work::AllReduce { op, algorithm: Algorithm::TwoShot },
        };
        Op::Memory { slot, work }
    }

    /// What a rank calls that does not keep to the plan: something that ranks compare is another.
    fn variant(&mut self, op: &Op) -> Option<Op> {
        let mut other = match (*op, self.random.below(3)) {
            (Op::AllReduce { dtype, len, op }, 0) => Op::AllReduce { dtype, len: len + 1, op },
            (Op::AllReduce { dtype, len, op }, 1) => {
                let op = if op == ReduceOp::Sum { ReduceOp::Product } else { ReduceOp::Sum };
                Op::AllReduce { dtype, len, op }
            }
            (Op::AllReduce { dtype: DType::F32, len, op }, _) if (op as usize) < 5 => {
                Op::AllReduce { dtype: DType::I32, len, op }
            }
            (Op::Broadcast { dtype, len, root }, _) => Op::Broadcast { dtype, len, root: root + 1 },
            (Op::AllGather { dtype, len }, _) => Op::AllGather { dtype, len: len + 7 },
            (Op::Memory { slot, work }, 0 | 1) => {
                let fits = |s: &&Slot| s.dtype == slot.dtype && s.number != slot.number;
                let same = self.slots.iter().find(fits).copied();
                Op::Memory { slot: same?, work }
            }
            _ => self.other_operation(),
        };
        if let Op::Memory { slot, work } = &mut other {
            let blocks =
                matches!(work, Work::ReduceScatter { .. } | Work::AllToAll | Work::Scatter { .. });
            if matches!(work, Work::Apart { .. }) || blocks && !slot.len.is_multiple_of(BLOCKS) {
                return None;
            }
        }
        (other != *op).then_some(other)
    }

    fn other_operation(&mut self) -> Op {
        let slots = self.slots.clone();
        match self.random.below(5) {
            0 => Op::Barrier,
            1 => Op::AllReduce { dtype: DType::U16, len: 33, op: ReduceOp::Xor },
            2 => Op::Broadcast { dtype: DType::I8, len: 5, root: 0 },
            3 if !slots.is_empty() => Op::Memory { slot: self.pick(&slots), work: Work::Share },
            _ if !slots.is_empty() => {
                // No all-reduce: `Auto` and the algorithm that it chooses are the same call.
                let work = Work::Gather { root: 0 };
                Op::Memory { slot: self.pick(&slots), work }
            }
            _ => Op::Barrier,
        }
    }

    /// Ranks that come late, but in time.
    fn lateness(&mut self, lane: usize, first: usize) {
        for _ in 0..1 + self.random.below(3) {
            let (rank, call) = self.somewhere(first);
            let trouble = Trouble::Late(1 + self.random.below(4) as u64);
            self.faults.push(Fault { rank, lane, call, trouble });
        }
    }

    fn somewhere(&mut self, first: usize) -> (usize, usize) {
        (self.random.below(self.ranks), first + self.random.below(self.calls - first))
    }

    fn troubles(&mut self, lane: usize, first: usize, limit: u64, may_leave: bool) {
        for _ in 0..self.pick(&[1, 1, 1, 2, 3]) {
            let (rank, call) = self.somewhere(first);
            let offset = self.random.below(3000) as u64;
            let long = 2 * limit + self.random.below(20) as u64;
            let processes = self.mode == Mode::Processes;
            let trouble = match self.random.below(8) {
                0 | 1 if processes => Trouble::Kill(offset),
                2 | 3 if processes => Trouble::Stop(offset, long),
                4 => Trouble::Interrupt(self.random.below(10) as u64),
                5 => Trouble::Short(1 + self.random.below(6) as u64),
                6 if may_leave => Trouble::Leave,
                7 => Trouble::Late(1 + self.random.below(5) as u64),
                _ => Trouble::Late(long),
            };
            self.faults.push(Fault { rank, lane, call, trouble });
            if matches!(trouble, Trouble::Interrupt(_) | Trouble::Short(_)) && self.ranks > 1 {
                self.has_to_wait(rank, lane, call, trouble, long);
            }
        }
    }

    /// Where nobody is late there is no wait to end.
    fn has_to_wait(&mut self, rank: usize, lane: usize, call: usize, trouble: Trouble, long: u64) {
        let late = (rank + 1 + self.random.below(self.ranks - 1)) % self.ranks;
        let interrupted = matches!(trouble, Trouble::Interrupt(_));
        let trouble = Trouble::Late(if interrupted { INTERRUPTED } else { long });
        self.faults.push(Fault { rank: late, lane, call, trouble });
        if interrupted {
            // Nobody else gives up before.
            let all = (0..self.ranks).map(|rank| {
                let trouble = Trouble::Short(2 * INTERRUPTED);
                Fault { rank, lane, call, trouble }
            });
            self.faults.extend(all);
        }
    }
}

/// Whether ranks that differ can find out in the step's first call: what it uses is there already.
fn may_differ(op: &Op, slots: &[Slot]) -> bool {
    match op {
        Op::Memory { work: Work::Apart { .. }, .. } => false,
        Op::Memory { slot, .. } => slots.contains(slot),
        Op::AllReduce { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } => true,
        Op::Broadcast { .. } | Op::AllToAll { .. } | Op::AllToAllV { .. } | Op::Barrier => true,
        Op::Reduce { .. } | Op::Gather { .. } | Op::Scatter { .. } | Op::Scan { .. } => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_program_again() {
        for seed in 0..200 {
            let spec = Spec { mode: Mode::Processes, ranks: 4, seed, without: Vec::new() };
            assert_eq!(generate(&spec).to_string(), generate(&spec).to_string());
        }
    }

    #[test]
    fn what_is_left_out_is_not_there() {
        let spec = Spec { mode: Mode::Threads, ranks: 3, seed: 7, without: Vec::new() };
        let calls =
            |p: &Program| p.lanes.iter().flat_map(|l| &l.rounds).map(|r| r.steps.len()).sum();
        let whole: usize = calls(&generate(&spec));
        let less = Spec { without: vec![Cut::Call(0)], ..spec };
        assert_eq!(calls(&generate(&less)), whole - 1);
    }
}
