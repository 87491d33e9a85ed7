//! Knows what every call may return, given what every rank did and when.

mod blame;

use std::collections::{BTreeMap, HashMap};

use crate::names::{
    Key, count_barriers, count_generations, is_barrier, is_collective, sender_of, short, signal_of,
};
use crate::report::{Report, Violation};
use crate::steps::{Steps, is_before_forming};
use crate::times::{MS, ms, union};
use symmem_chaos::program::{Op, Program, Round, Step, Trouble};
use symmem_chaos::record::{Event, Kind, Outcome, Record};

/// How much later than it noted a rank may have done something, without having waited for a core.
const SLACK: u64 = 20 * MS;
/// The first part of a call that is not the step's own: what brings the group back in step, or makes it smaller.
const RECOVERY: usize = 90;

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
        let generations = count_generations(&calls);
        let (stalls, barriers) = (union(stalls), count_barriers(&calls, &generations));
        let steps = Steps::new(program, &calls, generations);
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
        let others = self.in_call(record).filter(|r| r.rank != *rank).map(|r| {
            let after = ms(r.enter) - ms(*enter);
            let (took, starved) = (ms(r.leave.saturating_sub(r.enter)), ms(r.starved));
            let Record { rank, outcome, .. } = r;
            format!("\n    rank {rank}: {after:+.1} ms, took {took:.1} (no core for {starved:.1}): {outcome:?}")
        });
        let text = others.fold(text, |text, other| text + &other);
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
        self.in_call(record).filter(|r| r.rank == rank).collect()
    }

    /// What all ranks did in the same call. After a loss ranks shrink their group as often as it takes, and one may come to the
    /// last group in one step and another in two: there the calls of a group are known by its members.
    fn in_call(&self, record: &Record) -> impl Iterator<Item = &'a Record> {
        let Record { lane, call, part, ref name, ref members, .. } = *record;
        let again = part >= RECOVERY;
        let parts = if again { RECOVERY..=usize::MAX } else { part..=part };
        let of_parts = self.calls.range((lane, call, *parts.start())..=(lane, call, *parts.end()));
        let same = move |r: &&Record| !again || r.name == *name && r.members == *members;
        of_parts.flat_map(|(_, records)| records).copied().filter(same)
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

    /// The attempts of rank `from` to send the message that this call waits for.
    fn sent(&self, record: &Record, from: usize) -> impl Iterator<Item = &'a Record> {
        let of_step =
            self.calls.range((record.lane, record.call, 0)..(record.lane, record.call, RECOVERY));
        let to = format!("send>{}", record.rank);
        let of_step = of_step.flat_map(|(_, records)| records).copied();
        of_step.filter(move |r| r.rank == from && r.name == to)
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
        if let Some(from) = sender_of(record) {
            if !self.sent(record, from).any(|r| r.enter <= record.leave) {
                self.wrong(record, "a message that nobody has sent", &format!("rank {from}"));
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

    /// Where nothing goes wrong every call succeeds, and calls that differ are found out by all.
    fn quiet(&mut self, record: &'a Record) {
        let Some((round, step)) = self.place(record.lane, record.call) else { return };
        let behind = matches!(step.op, Op::Behind { .. });
        let lost = self.killed.values().any(|at| *at <= record.leave);
        if round.faulty || lost || behind || record.leave == 0 || record.part >= RECOVERY {
            return;
        }
        // The machine itself was too slow to tell: this rank, or one that it waited for, got no core.
        let starved = self.in_call(record).map(|r| r.starved).max().unwrap_or(0);
        if starved + self.stalled(record.enter, record.leave) > record.limit / 4 {
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
            "message of call",
            "shared part",
            "no world",
        ];
        let text = &text.replace("did not come to the end", "hangs: it did not come to the end");
        let class = words.iter().find(|word| text.contains(**word)).unwrap_or(&"fault");
        if *class == "shared part" && self.shared_in_another_step(rank, text) {
            return;
        }
        // Peers may have sent memory for a rendezvous that is pending to the end, for a group in which they still wait, or for
        // messages that this rank never asked for: the world's are kept as long as the world.
        let offered = || {
            self.steps.ends_in_rendezvous(rank) || self.is_awaited(rank) || self.has_unread(rank)
        };
        if text.contains("all is dropped but the world") && offered() {
            return;
        }
        let violation =
            Violation { class: (*class).to_owned(), text: format!("rank {rank}: {text}") };
        self.found.push((0, violation));
    }

    /// Whether a peer sent messages to this rank, which has not looked for any of that peer since.
    fn has_unread(&self, rank: usize) -> bool {
        let all = || self.calls.values().flatten();
        let to = format!("send>{rank}");
        let looked = |sent: &Record| {
            let from = |r: &&Record| r.rank == rank && r.lane == sent.lane;
            let mut own = all().copied().filter(from);
            own.any(|r| sender_of(r) == Some(sent.rank) && r.enter > sent.leave)
        };
        let mut sent = all().filter(|r| r.rank != rank && r.name == to);
        sent.any(|sent| !looked(sent))
    }

    /// Whether peers were waiting for this rank in a smaller group when it left. They had formed the group that they shrink,
    /// and this rank never can, because somebody was lost before it had all pads: it does not know of the smaller one. What
    /// they sent for that is held until they give up, or this rank leaves.
    fn is_awaited(&self, rank: usize) -> bool {
        let shrinks = || self.calls.values().flatten().filter(|r| r.name == "shrink");
        let left = self.left.get(&rank).copied().unwrap_or(u64::MAX);
        let waits = |r: &Record| {
            r.rank != rank && r.members.contains(&rank) && r.enter <= left && r.leave >= left
        };
        let mut refused = shrinks().filter(|r| r.rank == rank && is_before_forming(r));
        refused.any(|own| shrinks().any(|r| r.lane == own.lane && waits(r)))
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
mod tests;
