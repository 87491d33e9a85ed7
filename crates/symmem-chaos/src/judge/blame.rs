//! Errors: whether they are of the right kind, and name those who are to blame.

use super::{Case, SLACK};
use crate::names::{is_collective, is_resumable, sender_of, short, signal_of};
use crate::steps::{is_before_forming, may_have_given_up};
use symmem_chaos::program::{Op, Step, Trouble};
use symmem_chaos::record::{Kind, Outcome, Record};

impl<'a> Case<'a> {
    pub(super) fn error(
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
        let gave_up = |r: &Record| may_have_given_up(r, record.leave);
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
                // Where a put or a wait gave up before, this wait may be for a later put than that of its own step.
                let failed = |rank, by| self.failed_before(record.lane, rank, by);
                let clean = !failed(record.rank, record.enter) && !failed(from, record.leave);
                if clean && put.any(|r| r.leave + SLACK + record.starved < record.leave) {
                    let class = "a timeout blames a rank that had signalled";
                    self.wrong(record, class, &format!("rank {rank}"));
                }
                continue;
            }
            if sender_of(record) == Some(rank) && self.had_sent(record, rank) {
                let class = "a timeout blames a rank that had sent";
                self.wrong(record, class, &format!("rank {rank}"));
            }
            let shifted = self.steps.may_be_shifted(record);
            if is_collective(&record.name) && !shifted && self.had_come(record, rank) {
                let class =
                    format!("a timeout blames a rank that had come to {}", short(&record.name));
                self.wrong(record, &class, &format!("rank {rank}"));
            }
        }
    }

    /// Whether `rank` had sent a while ago what this call waits for. For the first message of two ranks, a thread whose time without a
    /// core no call counts has to receive something, too.
    fn had_sent(&self, record: &Record, rank: usize) -> bool {
        let stalled = self.stalled(record.enter, record.leave);
        let long_ago = |r: &Record| r.leave + 3 * SLACK + record.starved + stalled < record.leave;
        self.sent(record, rank).any(|r| r.outcome == Outcome::Ok && long_ago(r))
    }

    /// Whether `rank` had been in this call for a while and had not left it by an error.
    fn had_come(&self, record: &Record, rank: usize) -> bool {
        let complete = self.complete(record);
        self.of_rank(record, rank).iter().any(|theirs| {
            let (since, starved) = match complete {
                Some((last, starved)) => (last.max(theirs.enter), starved),
                None => (theirs.enter, theirs.starved + record.starved),
            };
            let stalled = self.stalled(theirs.enter, record.leave);
            // What ranks send each other in a rendezvous is read by threads whose time without a core no call counts, once for
            // what each brings and once for how it went.
            let rounds = if short(&record.name) == "rendezvous" { 3 } else { 1 };
            let long_ago = since + rounds * SLACK + starved + stalled < record.leave;
            let same = theirs.name == record.name;
            let stayed = match &theirs.outcome {
                Outcome::Open => false,
                Outcome::Ok | Outcome::Wrong(_) => true,
                Outcome::Err { .. } => theirs.leave >= record.leave,
            };
            same && long_ago && stayed
        })
    }

    /// When the last rank came to a call of several steps, if all came before `record` ended, and for how long ranks had no core
    /// in it. Each step begins when all have made the one before: until the last rank came, nobody could do more than wait for
    /// it, and this call may have ended in a later step, for which those that had come long ago had had no time; and whoever
    /// has no core in one step keeps all others from the next. Barriers and changes of phase have one step.
    fn complete(&self, record: &Record) -> Option<(u64, u64)> {
        if is_resumable(&record.name) && short(&record.name) != "rendezvous" {
            return None;
        }
        let (mut last, mut starved) = (0, 0);
        for &rank in &record.members {
            let theirs = self.of_rank(record, rank);
            last = last.max(theirs.iter().map(|r| r.enter).min()?);
            starved += theirs.iter().map(|r| r.starved).sum::<u64>();
        }
        (last <= record.leave).then_some((last, starved))
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
        if let Some(from) = sender_of(record).filter(|from| ranks.contains(from))
            && self.had_sent(record, from)
        {
            let why = format!("rank {from} had sent what this waits for");
            self.wrong(record, "a message is lost with its sender", &why);
        }
        if !is_collective(&record.name) {
            return;
        }
        let dead = |rank: &usize| self.killed.contains_key(rank);
        if !ranks.iter().all(dead) {
            return;
        }
        let others: Vec<usize> = self
            .in_call(record)
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

    /// Whether the call was on a group of its own step, which `rank` gave up after an error, and dropped; or on that of its
    /// thread, with which the rank's thread was through before it had formed the group. Others may have formed it by then.
    fn dropped_group(&self, record: &Record, rank: usize) -> bool {
        let subgroup = self
            .place(record.lane, record.call)
            .is_some_and(|(_, step)| matches!(step.op, Op::Subgroup { .. }));
        let of_step =
            self.calls.range((record.lane, record.call, 0)..=(record.lane, record.call, 99));
        let failed = |r: &Record| {
            r.rank == rank && matches!(r.outcome, Outcome::Err { .. }) && r.leave <= record.leave
        };
        if subgroup && of_step.flat_map(|(_, records)| records).any(|r| failed(r)) {
            return true;
        }
        let of_thread = |r: &&&Record| r.rank == rank && r.lane == record.lane;
        let mut of_thread = self.calls.values().flatten().filter(of_thread).peekable();
        let began = of_thread.peek().is_some();
        began && of_thread.all(|r| failed(r) && is_before_forming(r))
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
}
