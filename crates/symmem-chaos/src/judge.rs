//! Knows what every call may return, given what every rank did and when.

use std::collections::{BTreeMap, HashMap};

use crate::names::{Key, count_barriers, is_barrier, is_collective, short, signal_of};
use crate::report::{Report, Violation};
use crate::steps::Steps;
use crate::times::{MS, ms, union};
use symmem_chaos::program::{Op, Program, Round, Step, Trouble};
use symmem_chaos::record::{Event, Kind, Outcome, Record};

/// How much later than it noted a rank may have done something, without having waited for a core.
const SLACK: u64 = 20 * MS;

struct Case<'a> {
    program: &'a Program,
    /// All attempts of all ranks, by lane, call and part.
    calls: BTreeMap<Key, Vec<&'a Record>>,
    killed: HashMap<usize, u64>,
    left: HashMap<usize, u64>,
    /// When something on the machine stood still: begin and end, in order and apart.
    stalls: Vec<(u64, u64)>,
    /// Which barrier of its channel a call was for, by rank, lane and the time when it began: one that timed out is gone on
    /// with by the next call.
    barriers: HashMap<(usize, usize, u64), usize>,
    steps: Steps<'a>,
    found: Vec<(u64, Violation)>,
}

/// What a run came to.
pub fn judge(program: &Program, events: &[Event]) -> Report {
    let mut case = Case::new(program, events);
    let records: Vec<&Record> = case.calls.values().flatten().copied().collect();
    let mut report = Report { calls: records.len() as u64, ..Report::default() };
    for fault in &program.faults {
        let name = format!("{:?}", fault.trouble);
        let name = name.split('(').next().unwrap_or_default().to_owned();
        *report.faults.entry(name).or_default() += 1;
    }
    let steps = program.lanes.iter().flat_map(|l| &l.rounds).flat_map(|r| &r.steps);
    let differ = steps.filter(|step| !step.variants.is_empty()).count() as u64;
    *report.faults.entry("Differ".into()).or_default() += differ;
    for record in records {
        if let Outcome::Err { kind, .. } = &record.outcome {
            *report.errors.entry(kind.name().into()).or_default() += 1;
        }
        case.one(record);
    }
    for event in events {
        match event {
            Event::Fault { rank, text } => case.fault(*rank, text),
            Event::Members { rank, ranks, .. } => case.members(*rank, ranks),
            _ => {}
        }
    }
    report.violations = case.first();
    report
}

impl<'a> Case<'a> {
    fn new(program: &'a Program, events: &'a [Event]) -> Self {
        let mut calls: BTreeMap<Key, Vec<&Record>> = BTreeMap::new();
        let (mut killed, mut left, mut stalls) = (HashMap::new(), HashMap::new(), Vec::new());
        for event in events {
            match event {
                Event::Call(record) => {
                    let of = calls.entry((record.lane, record.call, record.part)).or_default();
                    // What was noted on entering is replaced by what was noted on leaving.
                    of.retain(|r| (r.rank, r.enter) != (record.rank, record.enter));
                    of.push(record);
                }
                Event::Killed { rank, at } => drop(killed.insert(*rank, *at)),
                Event::Left { rank, at } => drop(left.insert(*rank, *at)),
                Event::Stall { at, length } => stalls.push((at.saturating_sub(*length), *at)),
                Event::Members { .. } | Event::Fault { .. } => {}
            }
        }
        let (stalls, barriers) = (union(stalls), count_barriers(&calls));
        let steps = Steps::new(program, &calls);
        Self { program, calls, killed, left, stalls, barriers, steps, found: Vec::new() }
    }

    /// For how long something stood still in this time.
    fn stalled(&self, from: u64, to: u64) -> u64 {
        let overlap = |(begin, end): &(u64, u64)| (*end).min(to).saturating_sub((*begin).max(from));
        self.stalls.iter().map(overlap).sum()
    }

    fn wrong(&mut self, record: &Record, class: &str, why: &str) {
        let Record { rank, lane, call, part, name, outcome, enter, leave, limit, starved, .. } =
            record;
        let text = format!(
            "rank {rank}, thread {lane}, call {call}.{part} {name}: {why}; it took {:.1} ms of {:.1} (no core for {:.1}): {outcome:?}",
            ms(leave.saturating_sub(*enter)),
            ms(*limit),
            ms(*starved)
        );
        self.found.push((*leave, Violation { class: class.to_owned(), text }));
    }

    fn place(&self, lane: usize, call: usize) -> Option<(&'a Round, &'a Step)> {
        let lane = self.program.lanes.iter().find(|l| l.number == lane)?;
        let mut rounds = lane.rounds.iter();
        rounds.find_map(|r| r.steps.iter().find(|s| s.call == call).map(|step| (r, step)))
    }

    /// What a rank did in the same call: for a barrier, in the same one of its channel.
    fn of_rank(&self, record: &Record, rank: usize) -> Vec<&'a Record> {
        if is_barrier(&record.name) {
            let number = |r: &Record| self.barriers.get(&(r.rank, r.lane, r.enter));
            let own = number(record);
            let same = |r: &&&Record| {
                r.rank == rank && r.lane == record.lane && r.name == record.name && number(r) == own
            };
            return self.calls.values().flatten().filter(same).copied().collect();
        }
        let key = (record.lane, record.call, record.part);
        self.calls.get(&key).into_iter().flatten().filter(|r| r.rank == rank).copied().collect()
    }

    fn one(&mut self, record: &'a Record) {
        self.deadline(record);
        match &record.outcome {
            Outcome::Open => {}
            Outcome::Ok => self.ok(record),
            Outcome::Wrong(_) if self.steps.may_be_shifted(record) => {}
            Outcome::Wrong(text) => self.wrong(record, "ok with other data", text),
            Outcome::Err { kind, ranks, after, text } => {
                self.error(record, *kind, ranks, *after, text);
            }
        }
        if let Some(earlier) = self.steps.out_of_step_since(record) {
            let told = matches!(
                record.outcome,
                Outcome::Open | Outcome::Err { kind: Kind::OutOfStep | Kind::PeerLost, .. }
            );
            if !told {
                let Record { rank, call, part, name, .. } = earlier;
                let why = format!("rank {rank} had given up call {call}.{part} {name}");
                self.wrong(record, "not told that the group is out of step", &why);
            }
        }
        self.quiet(record);
    }

    /// Every call ends in time.
    fn deadline(&mut self, record: &Record) {
        if record.leave == 0 {
            return;
        }
        let round = self.place(record.lane, record.call).map(|(round, _)| round);
        let in_round = |call: usize| round.is_some_and(|r| r.steps.iter().any(|s| s.call == call));
        let injected = |trouble: Trouble| match trouble {
            Trouble::Late(time) | Trouble::Stop(_, time) => time * MS,
            _ => 0,
        };
        let faults = self.program.faults.iter().filter(|f| in_round(f.call));
        let injected: u64 = faults.map(|f| injected(f.trouble)).sum();
        let took = record.leave - record.enter;
        let pauses = record.starved + self.stalled(record.enter, record.leave) + injected;
        if took > record.limit + record.limit / 10 + 100 * MS + pauses {
            let class = format!("deadline missed in {}", short(&record.name));
            self.wrong(record, &class, "it ended too late");
        }
        let ends = self.program.faults_of(record.rank, record.call);
        let end = ends.filter_map(|f| match f.trouble {
            Trouble::Interrupt(time) => Some(time * MS),
            _ => None,
        });
        let most = end.max().map(|end| end + 160 * MS + pauses);
        if most.is_some_and(|most| took > most) {
            self.wrong(record, "an interruption was not noticed", "it ended too late");
        }
    }

    /// All ranks were in this very call.
    fn ok(&mut self, record: &'a Record) {
        if let Some(from) = signal_of(record) {
            // Signals that nobody took in time are taken by later waits: only their number says something.
            let all = || self.calls.values().flatten().filter(|r| r.lane == record.lane);
            let to = format!("put_signal>{}", record.rank);
            let put = |r: &&&Record| r.rank == from && r.name == to && r.enter <= record.leave;
            let took = |r: &&&Record| {
                (r.rank, &r.name) == (record.rank, &record.name)
                    && r.outcome == Outcome::Ok
                    && r.leave <= record.leave
            };
            if all().filter(took).count() > all().filter(put).count() {
                self.wrong(record, "a signal that nobody has put", &format!("rank {from}"));
            }
            return;
        }
        if !is_collective(&record.name) {
            return;
        }
        let shifted = self.steps.may_be_shifted(record);
        for &member in &record.members {
            let mut theirs = match shifted {
                true => self.steps.alike(record, member),
                false => self.of_rank(record, member),
            };
            theirs.retain(|r| r.enter <= record.leave);
            if theirs.is_empty() {
                self.wrong(record, "ok without a rank", &format!("rank {member} was not in it"));
            } else if theirs.iter().all(|r| r.name != record.name) {
                let why = format!("rank {member} called {}", theirs[0].name);
                self.wrong(record, "ok although calls differ", &why);
            }
        }
    }

    fn error(
        &mut self,
        record: &'a Record,
        kind: Kind,
        ranks: &[usize],
        after: Option<u64>,
        text: &str,
    ) {
        match kind {
            Kind::Timeout => self.timeout(record, ranks, after),
            Kind::PeerLost => self.lost(record, ranks),
            Kind::Mismatch => {
                self.mismatch(record, ranks);
                if text.contains(" with another ") {
                    self.wrong(record, "a mismatch without values", "it does not say what differs");
                }
            }
            Kind::PeerFailed => {
                let failed = |r: &&Record| matches!(r.outcome, Outcome::Err { .. } | Outcome::Open);
                for &rank in ranks {
                    let gone = self.killed.contains_key(&rank) || self.left.contains_key(&rank);
                    if !gone && !self.of_rank(record, rank).iter().any(failed) {
                        self.wrong(
                            record,
                            "a rank is said to have failed",
                            &format!("rank {rank} had not"),
                        );
                    }
                }
            }
            Kind::OutOfStep => {
                for &rank in ranks {
                    if !self.steps.gave_up(record, rank) && !self.gave_up_in_step(record, rank) {
                        self.wrong(
                            record,
                            "out of step by nobody",
                            &format!("rank {rank} had not given up a call"),
                        );
                    }
                }
            }
            Kind::Usage => {
                if !self.failed_before(record.lane, record.rank, record.enter) {
                    self.wrong(record, "refused", "nothing had failed before");
                }
            }
            Kind::Interrupted => {
                let asked =
                    |f: &symmem_chaos::program::Fault| matches!(f.trouble, Trouble::Interrupt(_));
                if !self.program.faults_of(record.rank, record.call).any(asked) {
                    self.wrong(record, "interrupted", "nobody had asked for it");
                }
            }
            Kind::Other => self.wrong(record, "an error that no fault explains", text),
        }
    }

    /// Whether `rank` gave up a call of the same step by the end of this one: the step may have a group of its own.
    fn gave_up_in_step(&self, record: &Record, rank: usize) -> bool {
        let of_step =
            self.calls.range((record.lane, record.call, 0)..=(record.lane, record.call, 89));
        let gave_up = |r: &Record| {
            matches!(&r.outcome, Outcome::Err { kind: Kind::Timeout | Kind::Interrupted, .. })
        };
        let mut of_step = of_step.flat_map(|(_, records)| records);
        of_step.any(|r| r.rank == rank && r.enter <= record.leave && gave_up(r))
    }

    /// Whether a call of this rank ended so that the group may be out of step.
    fn failed_before(&self, lane: usize, rank: usize, before: u64) -> bool {
        let failed = |r: &&Record| match &r.outcome {
            Outcome::Err { kind, .. } => *kind != Kind::Mismatch && r.leave <= before,
            _ => false,
        };
        self.calls.values().flatten().any(|r| r.rank == rank && r.lane == lane && failed(r))
    }

    /// It lasted as long as it should, and names only ranks that had not come.
    fn timeout(&mut self, record: &'a Record, ranks: &[usize], after: Option<u64>) {
        let interrupt = |t: Trouble| matches!(t, Trouble::Interrupt(_));
        let ended = self.program.faults_of(record.rank, record.call).any(|f| interrupt(f.trouble));
        if !ended && after.is_some_and(|after| after < record.limit - record.limit / 10) {
            self.wrong(record, "a timeout before its time", "it did not wait");
        }
        if ranks.is_empty() {
            self.wrong(record, "a timeout that names nobody", "no rank is said to be missing");
        }
        for &rank in ranks.iter().filter(|r| **r != record.rank) {
            if let Some(from) = signal_of(record) {
                let before = (record.lane, record.call, record.part - 1);
                let put = self.calls.get(&before).into_iter().flatten();
                let mut put = put.filter(|r| r.rank == from && r.outcome == Outcome::Ok);
                let clean = !self.failed_before(record.lane, record.rank, record.enter);
                if clean && put.any(|r| r.leave + SLACK + record.starved < record.leave) {
                    let class = "a timeout blames a rank that had signalled";
                    self.wrong(record, class, &format!("rank {rank}"));
                }
                continue;
            }
            let shifted = self.steps.may_be_shifted(record);
            if is_collective(&record.name) && !shifted && self.had_come(record, rank) {
                let class =
                    format!("a timeout blames a rank that had come to {}", short(&record.name));
                self.wrong(record, &class, &format!("rank {rank}"));
            }
        }
    }

    /// Whether `rank` had been in this call for a while and had not left it by an error.
    fn had_come(&self, record: &Record, rank: usize) -> bool {
        self.of_rank(record, rank).iter().any(|theirs| {
            let stalled = self.stalled(theirs.enter, record.leave);
            let slack = SLACK + theirs.starved + record.starved + stalled;
            let long_ago = theirs.enter + slack < record.leave;
            let same = theirs.name == record.name;
            let stayed = match &theirs.outcome {
                Outcome::Open => false,
                Outcome::Ok | Outcome::Wrong(_) => true,
                Outcome::Err { .. } => theirs.leave >= record.leave,
            };
            same && long_ago && stayed
        })
    }

    fn lost(&mut self, record: &'a Record, ranks: &[usize]) {
        for &rank in ranks {
            let killed = self.killed.get(&rank).is_some_and(|at| *at <= record.leave);
            let left = self.left.get(&rank).is_some_and(|at| *at <= record.leave);
            if !killed && !left && !self.dropped_group(record, rank) {
                self.wrong(record, "a living rank is said to be lost", &format!("rank {rank}"));
            }
            let done = |r: &&Record| r.outcome == Outcome::Ok && r.name == record.name;
            let shifted = self.steps.may_be_shifted(record);
            let came = !shifted && self.of_rank(record, rank).iter().any(done);
            if left && !killed && came && is_collective(&record.name) {
                let why = format!("rank {rank} had been in it, and left later");
                self.wrong(record, "a rank that had come is said to be lost", &why);
            }
        }
        if !is_collective(&record.name) {
            return;
        }
        let key = (record.lane, record.call, record.part);
        let dead = |rank: &usize| self.killed.contains_key(rank);
        if !ranks.iter().all(dead) {
            return;
        }
        let others: Vec<usize> = self
            .calls
            .get(&key)
            .into_iter()
            .flatten()
            .filter_map(|r| match &r.outcome {
                Outcome::Err { kind: Kind::PeerLost, ranks, .. } => ranks.first().copied(),
                _ => None,
            })
            .collect();
        if let Some(other) =
            others.iter().filter(|r| dead(r)).find(|r| ranks.first().is_some_and(|own| own < *r))
        {
            let why = format!("another survivor names rank {other}");
            self.wrong(record, "survivors name different ranks", &why);
        }
    }

    /// Whether the call was on a group of its own step, which `rank` gave up after an error, and dropped.
    fn dropped_group(&self, record: &Record, rank: usize) -> bool {
        let subgroup = self
            .place(record.lane, record.call)
            .is_some_and(|(_, step)| matches!(step.op, Op::Subgroup { .. }));
        let of_step =
            self.calls.range((record.lane, record.call, 0)..=(record.lane, record.call, 99));
        let failed = |r: &&&Record| {
            r.rank == rank && matches!(r.outcome, Outcome::Err { .. }) && r.leave <= record.leave
        };
        subgroup && of_step.flat_map(|(_, records)| records).any(|r| failed(&r))
    }

    fn mismatch(&mut self, record: &'a Record, ranks: &[usize]) {
        for &rank in ranks {
            // In a group of its own step, what gave up before the group was formed was never made.
            let of_step = matches!(
                self.place(record.lane, record.call),
                Some((_, Step { op: Op::Subgroup { .. }, .. }))
            );
            let parts = if of_step { 0..=99 } else { record.part..=record.part };
            let key = |part: &usize| (record.lane, record.call, *part);
            let theirs = self.calls.range(key(parts.start())..=key(parts.end()));
            let theirs = theirs.flat_map(|(_, records)| records).filter(|r| r.rank == rank);
            let other = |r: &&Record| r.name != record.name && r.enter <= record.leave;
            let shifted = self.steps.may_be_shifted(record);
            if !shifted && !theirs.copied().any(|r| other(&r)) {
                let why = format!("rank {rank} made the same call, or none");
                self.wrong(record, "a mismatch of calls that are the same", &why);
            }
        }
    }

    /// Where nothing goes wrong every call succeeds, and calls that differ are found out by all.
    fn quiet(&mut self, record: &'a Record) {
        let Some((round, step)) = self.place(record.lane, record.call) else { return };
        let behind = matches!(step.op, Op::Behind { .. });
        let lost = self.killed.values().any(|at| *at <= record.leave);
        if round.faulty || lost || behind || record.leave == 0 || record.part >= 90 {
            return;
        }
        // The machine itself was too slow to tell.
        if record.starved + self.stalled(record.enter, record.leave) > record.limit / 4 {
            return;
        }
        let key = (record.lane, record.call, record.part);
        let names = self.calls.get(&key).into_iter().flatten().map(|r| &r.name);
        let differ = is_collective(&record.name)
            && !step.variants.is_empty()
            && names.into_iter().any(|name| *name != record.name);
        match &record.outcome {
            Outcome::Ok if differ => {
                self.wrong(record, "ok although calls differ", "in a quiet round")
            }
            Outcome::Err { kind: Kind::Mismatch, .. } if differ => {}
            Outcome::Err { kind, .. } if differ => {
                let class = format!("calls that differ end as {}", kind.name());
                self.wrong(record, &class, "it should be a mismatch");
            }
            Outcome::Err { kind, .. } => {
                let class = format!("{} where nothing went wrong", kind.name());
                self.wrong(record, &class, "it should be ok");
            }
            _ => {}
        }
    }

    fn fault(&mut self, rank: usize, text: &str) {
        let words = [
            "panic",
            "left over",
            "held memory",
            "memory that call",
            "signal put through",
            "shared part",
            "no world",
        ];
        let text = &text.replace("did not come to the end", "hangs: it did not come to the end");
        let class = words.iter().find(|word| text.contains(**word)).unwrap_or(&"fault");
        if *class == "shared part" && self.shared_in_another_step(rank, text) {
            return;
        }
        // Peers may have sent memory for a rendezvous that is pending to the end.
        if text.contains("all is dropped but the world") && self.steps.ends_in_rendezvous(rank) {
            return;
        }
        let violation =
            Violation { class: (*class).to_owned(), text: format!("rank {rank}: {text}") };
        self.found.push((0, violation));
    }

    /// Whether what was seen in a peer's part may be that of another step of the peer's: `text` begins with the call.
    fn shared_in_another_step(&self, rank: usize, text: &str) -> bool {
        let call = text.strip_prefix("call ").and_then(|t| t.split(':').next()?.parse().ok());
        let shared =
            |r: &&&Record| r.rank == rank && Some(r.call) == call && r.name.starts_with("share@");
        let mut records = self.calls.values().flatten().filter(shared);
        records.any(|r| self.steps.may_be_shifted(r))
    }

    /// A group that was shrunk has this rank, and nobody who was dead long before.
    fn members(&mut self, rank: usize, ranks: &[usize]) {
        if !ranks.contains(&rank) {
            self.fault(rank, &format!("shrunk to {ranks:?}, without itself"));
        }
    }

    /// The first violation, which the later ones may follow from, and the first of each grave kind.
    fn first(mut self) -> Vec<Violation> {
        const GRAVE: [&str; 4] = ["ok ", "held memory", "shared part", "panic"];
        self.found.sort_by_key(|(at, _)| *at);
        let mut violations: Vec<Violation> = Vec::new();
        for (_, violation) in self.found {
            let grave = GRAVE.iter().any(|word| violation.class.starts_with(word));
            let known = violations.iter().any(|v| v.class == violation.class);
            if violations.is_empty() || grave && !known {
                violations.push(violation);
            }
        }
        violations
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::generate;
    use symmem_chaos::program::{Lane, Mode, Place, Policy, Spec};

    /// Two ranks, one call, and nothing that goes wrong by plan.
    fn program(faulty: bool) -> Program {
        let spec = Spec { mode: Mode::Threads, ranks: 2, seed: 1, without: Vec::new() };
        let steps = vec![Step { call: 0, op: Op::Barrier, variants: Vec::new() }];
        let round = Round { policy: Policy::Stop, limit: 50, steps, faulty };
        let lanes = vec![Lane { number: 0, place: Place::World, rounds: vec![round] }];
        Program { lanes, faults: Vec::new(), ..generate(&spec) }
    }

    fn call(rank: usize, enter: u64, leave: u64, outcome: Outcome) -> Event {
        Event::Call(Record {
            rank,
            lane: 0,
            call: 0,
            part: 0,
            name: "barrier".into(),
            enter: enter * MS,
            leave: leave * MS,
            starved: 0,
            limit: 50 * MS,
            members: vec![0, 1],
            outcome,
        })
    }

    fn timeout(rank: usize, after: u64) -> Outcome {
        let (kind, text) = (Kind::Timeout, String::new());
        Outcome::Err { kind, ranks: vec![rank], after: Some(after * MS), text }
    }

    fn classes(faulty: bool, events: &[Event]) -> Vec<String> {
        let report = judge(&program(faulty), events);
        report.violations.into_iter().map(|v| v.class).collect()
    }

    #[test]
    fn ranks_that_all_come_may_succeed() {
        let events = [call(0, 10, 30, Outcome::Ok), call(1, 20, 30, Outcome::Ok)];
        assert_eq!(classes(false, &events), Vec::<String>::new());
    }

    #[test]
    fn success_without_a_rank_is_a_lie() {
        assert_eq!(classes(true, &[call(0, 10, 30, Outcome::Ok)]), ["ok without a rank"]);
        let events = [call(0, 10, 30, Outcome::Ok), call(1, 40, 50, Outcome::Ok)];
        assert_eq!(classes(true, &events), ["ok without a rank"]);
    }

    #[test]
    fn a_rank_that_is_late_may_be_blamed_and_one_that_had_come_may_not() {
        let late = [call(0, 10, 60, timeout(1, 50)), call(1, 100, 150, timeout(0, 50))];
        assert_eq!(classes(true, &late), Vec::<String>::new());
        let there = [call(0, 10, 60, timeout(1, 50)), call(1, 12, 62, timeout(0, 50))];
        assert_eq!(classes(true, &there), ["a timeout blames a rank that had come to barrier"]);
    }

    #[test]
    fn a_sum_that_was_given_up_ends_all_calls() {
        let named = |event: Event| match event {
            Event::Call(record) => {
                Event::Call(Record { name: "all_reduce[u8,1,sum]".into(), ..record })
            }
            other => other,
        };
        let told = Outcome::Err {
            kind: Kind::OutOfStep,
            ranks: vec![0],
            after: None,
            text: String::new(),
        };
        let first = named(call(0, 10, 60, timeout(1, 50)));
        let events = [first.clone(), named(call(1, 100, 101, told.clone()))];
        assert_eq!(classes(true, &events), Vec::<String>::new());
        let events = [first, named(call(1, 100, 150, timeout(0, 50)))];
        assert_eq!(classes(true, &events), ["not told that the group is out of step"]);
        let events = [call(0, 100, 150, timeout(1, 50)), named(call(1, 10, 11, told))];
        assert_eq!(classes(true, &events), ["out of step by nobody"]);
    }

    #[test]
    fn an_error_needs_a_reason_and_its_time() {
        let early = [call(0, 10, 30, timeout(1, 20)), call(1, 100, 110, timeout(0, 50))];
        assert_eq!(classes(true, &early), ["a timeout before its time"]);
        let quiet = [call(0, 10, 60, timeout(1, 50)), call(1, 100, 150, timeout(0, 50))];
        assert_eq!(classes(false, &quiet), ["Timeout where nothing went wrong"]);
        let slow = [call(0, 10, 400, timeout(1, 390)), call(1, 500, 550, timeout(0, 50))];
        assert_eq!(classes(true, &slow), ["deadline missed in barrier"]);
    }

    #[test]
    fn a_rank_that_lives_is_not_lost() {
        let lost =
            Outcome::Err { kind: Kind::PeerLost, ranks: vec![1], after: None, text: String::new() };
        let events = [call(0, 10, 20, lost.clone()), call(1, 30, 80, timeout(0, 50))];
        assert_eq!(classes(true, &events), ["a living rank is said to be lost"]);
        let events = [call(0, 10, 20, lost), Event::Killed { rank: 1, at: 5 * MS }];
        assert_eq!(classes(true, &events), Vec::<String>::new());
    }
}
