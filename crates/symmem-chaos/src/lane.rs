//! One thread of one rank: makes the calls of its lane, notes what comes of them, and checks what it gets.

use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use symmem::{Deadline, Error, Group, Pool, Symmetric, World};

use crate::api;
use crate::board::{Board, Next, Status};
use crate::element::{Source, mix};
use crate::memory::Held;
use crate::program::{Lane, LaneGroup, Op, Policy, Program, Round, Step, Trouble};
use crate::record::{Event, Kind, Log, Outcome, Record, failed, now, starved};
use crate::slices;

/// What all lanes of a rank share.
pub struct Rank<'a> {
    pub rank: usize,
    pub program: &'a Program,
    pub board: &'a Board,
    pub log: &'a dyn Log,
}

/// Where a lane is, and what it holds.
pub struct Runner<'a> {
    pub own: &'a Rank<'a>,
    pub lane: &'a Lane,
    pub group: Group,
    pub slots: HashMap<usize, Box<dyn Held>>,
    pub pool: Pool,
    /// Memory that goes along wherever the group shrinks to.
    kept: Option<Symmetric<u32>>,
    /// Of the call that is being made.
    pub call: usize,
    part: usize,
    pub limit: Duration,
    /// The worst that happened in this round.
    status: Status,
    /// Channels for signals are not used again after a failure.
    generation: usize,
    /// Calls are made again where that goes on with them.
    retry: bool,
}

thread_local! {
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Elements of what goes along.
const KEPT: usize = 100;

fn kept_by(rank: usize) -> [u32; KEPT] {
    std::array::from_fn(|i| mix((rank * KEPT + i) as u64) as u32)
}

fn shall_end() -> bool {
    END.get().is_some_and(|at| Instant::now() >= at)
}

/// Runs the lane to its end. False if the rank has left the program.
pub fn run(own: &Rank<'_>, lane: &Lane, world: &World) -> bool {
    let group = match lane.place {
        LaneGroup::World | LaneGroup::Channels => (**world).clone(),
        LaneGroup::Group(mask) => {
            let ranks: Vec<usize> = (0..own.program.ranks).filter(|r| mask >> r & 1 == 1).collect();
            if !ranks.contains(&own.rank) {
                return true;
            }
            let name = format!("lane {}", lane.number);
            match world.subgroup_builder(&ranks).name(name).build() {
                Ok(group) => group,
                Err(e) => {
                    own.log.note(Event::Fault { rank: own.rank, text: format!("subgroup: {e}") });
                    return true;
                }
            }
        }
    };
    let pool = Pool::new(&group, 1 << 16);
    let mut runner = Runner {
        own,
        lane,
        group,
        slots: HashMap::new(),
        pool,
        kept: None,
        call: 0,
        part: 0,
        limit: Duration::ZERO,
        status: Status::Clean,
        generation: 0,
        retry: false,
    };
    if own.program.lanes.len() == 1 {
        runner.keep_some();
    }
    let went_on = runner.rounds();
    own.board.retire(own.rank, lane.number);
    went_on
}

impl Runner<'_> {
    fn rounds(&mut self) -> bool {
        let count = self.lane.rounds.len();
        for (i, round) in self.lane.rounds.iter().enumerate() {
            if !self.round(round) {
                return false;
            }
            // After the last round nobody waits for anybody: that a job ends is a case of its own.
            if i + 1 == count {
                break;
            }
            let members = self.group.world_ranks().to_vec();
            let own = self.own;
            let next = own.board.agree(&members, own.rank, self.lane.number, i, self.status);
            if round.faulty {
                self.drop_all();
            }
            match next {
                Some(Next::GoOn) => {}
                // Barriers and signals that gave up leave nobody out of step.
                Some(Next::Resync) if self.lane.place == LaneGroup::Channels => {}
                Some(Next::Resync) if api::RESYNC => {
                    self.call = round.steps.last().map_or(0, |s| s.call);
                    self.part = 90;
                    if !self.recover("resync", api::resync) {
                        return true;
                    }
                }
                // The other thread shrinks the group that both use. Were both to do it, ranks would have to agree on whose
                // call comes first, as for any collective.
                Some(Next::Shrink) if self.lane.place == LaneGroup::Channels => return true,
                Some(Next::Shrink) => {
                    self.call = round.steps.last().map_or(0, |s| s.call);
                    self.part = 91;
                    if !self.shrink() {
                        return true;
                    }
                }
                Some(Next::Resync) => return true,
                None => {
                    self.fault("a rank did not come to the end of its round".into());
                    return true;
                }
            }
            self.status = Status::Clean;
        }
        true
    }

    fn drop_all(&mut self) {
        self.slots.clear();
        self.generation += 1;
    }

    /// Allocates what goes along, before anything goes wrong.
    fn keep_some(&mut self) {
        let Some(step) = self.lane.rounds.first().and_then(|round| round.steps.first()) else {
            return;
        };
        (self.call, self.part, self.limit) = (step.call, 80, Duration::from_secs(20));
        let group = self.group.clone();
        let Ok(mut buffer) = group.alloc::<u32>(KEPT) else { return self.fault("alloc".into()) };
        buffer.local_mut().copy_from_slice(&kept_by(self.own.rank));
        let bring = || buffer.rendezvous(&group).map_err(Error::from);
        self.kept = self.timed(&group, "rendezvous[kept]".into(), bring, |_| None);
    }

    /// Takes it along to a smaller group, and looks at all parts of it there.
    fn take_along(&mut self, group: &Group) -> bool {
        let Some(memory) = self.kept.take() else { return true };
        let mut left = None;
        let bring = || {
            let moved = memory.rendezvous(group);
            moved.map_err(|failed| {
                left = Some(failed.kept);
                failed.error
            })
        };
        let moved = self.timed(group, "rendezvous[kept]".into(), bring, |_| None);
        let Some(moved) = moved else {
            self.kept = left;
            return false;
        };
        let own = self.own;
        let look = || {
            let shared = moved.share()?;
            for (rank, &world) in group.world_ranks().iter().enumerate() {
                if shared.peer(rank)? != kept_by(world) {
                    let text = format!("held memory that goes along: rank {world}'s part changed");
                    own.log.note(Event::Fault { rank: own.rank, text });
                }
            }
            Ok(shared.release()?)
        };
        self.kept = self.timed(group, "shared[kept]".into(), look, |_| None);
        self.kept.is_some()
    }

    fn recover(&mut self, name: &str, f: fn(&Group, Duration) -> symmem::Result<()>) -> bool {
        self.limit = Duration::from_secs(20);
        self.drop_all();
        let (group, limit) = (self.group.clone(), self.limit);
        self.timed(&group, name.to_owned(), || f(&group, limit), |()| None).is_some()
    }

    fn shrink(&mut self) -> bool {
        self.limit = Duration::from_secs(20);
        self.drop_all();
        for _ in 0..self.own.program.ranks {
            let (group, limit) = (self.group.clone(), Deadline::within(self.limit));
            let made = self.timed(&group, "shrink".into(), || group.shrink_by(limit), |_| None);
            let Some(group) = made else { return false };
            self.note_members(&group);
            self.pool = Pool::new(&group, 1 << 16);
            self.group = group.clone();
            let ready =
                self.timed(&group, "barrier".into(), || group.barrier_on(0, limit), |()| None);
            if ready.is_some() && self.take_along(&group) {
                return true;
            }
            if self.status != Status::Lost {
                return false;
            }
        }
        false
    }

    fn note_members(&self, group: &Group) {
        self.own.log.note(Event::Members {
            rank: self.own.rank,
            lane: self.lane.number,
            call: self.call,
            ranks: group.world_ranks().to_vec(),
        });
    }

    pub fn fault(&self, text: String) {
        self.own.log.note(Event::Fault { rank: self.own.rank, text });
    }

    fn round(&mut self, round: &Round) -> bool {
        self.retry = round.policy == Policy::Retry;
        let mut failed = false;
        for step in &round.steps {
            if failed && round.policy != Policy::Ignore {
                break;
            }
            self.call = step.call;
            self.part = 0;
            self.limit = Duration::from_millis(round.limit);
            self.status = self.status.max(Status::Clean);
            if !self.before(step) {
                return false;
            }
            let before = self.status;
            let op = Program::op_of(step, self.own.rank);
            self.make(&op, round.limit);
            END.set(None);
            failed |= self.status > before;
            self.check_held();
        }
        true
    }

    /// What goes wrong before or during the step. False if the rank leaves.
    fn before(&mut self, step: &Step) -> bool {
        let own = self.own;
        if own.program.jitter {
            let bits = mix(own.program.spec.seed ^ mix((step.call * 64 + own.rank) as u64));
            if bits.is_multiple_of(8) {
                std::thread::sleep(Duration::from_micros(bits >> 8 & 255));
            }
        }
        for fault in own.program.faults_of(own.rank, step.call) {
            match fault.trouble {
                Trouble::Late(time) => std::thread::sleep(Duration::from_millis(time)),
                Trouble::Short(time) => self.limit = Duration::from_millis(time),
                Trouble::Interrupt(time) => {
                    END.set(Some(Instant::now() + Duration::from_millis(time)));
                }
                Trouble::Leave => {
                    own.log.note(Event::Left { rank: own.rank, at: now() });
                    own.board.gone(own.rank);
                    return false;
                }
                Trouble::Kill(after) => crate::hooks::die_after(own.rank, after),
                Trouble::Stop(after, time) => crate::hooks::stop_after(own.rank, after, time),
            }
        }
        true
    }

    /// What nobody else may have changed.
    pub fn check_held(&self) {
        let kept = self.kept.as_ref().map(Symmetric::local);
        if kept.is_some_and(|kept| kept != kept_by(self.own.rank)) {
            self.fault(format!("held memory that goes along changed after call {}", self.call));
        }
        for (number, held) in &self.slots {
            if let Some(text) = held.changed() {
                let at = self.call;
                self.fault(format!("held memory {number} changed after call {at}: {text}"));
            }
        }
    }

    pub fn source(&self) -> Source {
        Source { seed: self.own.program.spec.seed, call: self.call as u64 }
    }

    pub fn channel(&self, channel: usize) -> usize {
        let channels = self.group.channels();
        (channel + 11 * self.generation) % channels
    }

    /// Makes one call of the library. `check` looks at what came of it, and says what is wrong with that.
    pub fn timed<R>(
        &mut self,
        group: &Group,
        name: String,
        f: impl FnOnce() -> symmem::Result<R>,
        check: impl FnOnce(&R) -> Option<String>,
    ) -> Option<R> {
        let part = self.part;
        self.part += 1;
        let mut record = Record {
            rank: self.own.rank,
            lane: self.lane.number,
            call: self.call,
            part,
            name,
            enter: 0,
            leave: 0,
            starved: 0,
            limit: self.limit.as_nanos() as u64,
            members: group.world_ranks().to_vec(),
            outcome: Outcome::Open,
        };
        let before = starved();
        record.enter = now();
        self.own.log.note(Event::Call(record.clone()));
        // Calls on channels have deadlines of their own; the group's limit is the other lane's.
        if self.lane.place != LaneGroup::Channels {
            group.set_timeout(self.limit);
        }
        let result = if END.get().is_some() { symmem::interruptible(shall_end, f) } else { f() };
        record.leave = now();
        record.starved = starved() - before;
        record.outcome = match &result {
            Ok(got) => check(got).map_or(Outcome::Ok, Outcome::Wrong),
            Err(e) => self.judge_error(e, group),
        };
        self.own.log.note(Event::Call(record));
        result.ok()
    }

    fn judge_error(&mut self, e: &Error, group: &Group) -> Outcome {
        let outcome = failed(e, group);
        let Outcome::Err { kind, .. } = &outcome else { return outcome };
        let status = match kind {
            Kind::Mismatch => Status::Clean,
            Kind::PeerLost => Status::Lost,
            _ => Status::Dirty,
        };
        self.status = self.status.max(status);
        outcome
    }

    fn make(&mut self, op: &Op, limit: u64) {
        let group = self.group.clone();
        let deadline = Deadline::within(self.limit);
        match *op {
            Op::Memory { slot, work } => crate::memory::work(self, slot, work),
            Op::Drop { number } => drop(self.slots.remove(&number)),
            Op::Barrier => self.barrier(&group, 0),
            Op::BarrierOn { channel } => {
                let channel = self.channel(channel);
                self.barrier(&group, channel);
            }
            Op::Signals { channel, distance } => {
                let (channel, n) = (self.channel(channel), group.size());
                let to = (group.rank() + distance) % n;
                let from = (group.rank() + n - distance % n) % n;
                let [to_name, from_name] = [to, from].map(|r| group.world_ranks()[r]);
                let put = || group.put_signal(to, channel, deadline);
                self.timed(&group, format!("put_signal>{to_name}"), put, |()| None);
                let wait = || group.wait_signal(from, channel, deadline);
                self.timed(&group, format!("wait_signal<{from_name}"), wait, |()| None);
            }
            Op::Messages(messages) => crate::messages::run(self, messages),
            Op::Subgroup { mask, used } => self.subgroup(mask, used),
            Op::Behind { first, second } => crate::behind::run(self, first, second, limit),
            _ => slices::run(self, op),
        }
    }

    fn barrier(&mut self, group: &Group, channel: usize) {
        let name = if channel == 0 { "barrier".to_owned() } else { format!("barrier#{channel}") };
        let deadline = Deadline::within(self.limit);
        self.resumed(group, name, |_| Some(group.barrier_on(channel, deadline)));
    }

    /// As `timed`, again and again where the round says so: `f` begins the call, and then goes on with it.
    pub fn resumed<R>(
        &mut self,
        group: &Group,
        name: String,
        mut f: impl FnMut(usize) -> Option<symmem::Result<R>>,
    ) -> Option<R> {
        let before = self.status;
        let most = Duration::from_millis(600).as_nanos() / self.limit.as_nanos().max(1);
        for attempt in 0..if self.retry { most.clamp(2, 30) as usize } else { 1 } {
            let part = self.part;
            let mut over = false;
            let call = || {
                let ended = || Error::usage("chaos", "something to go on with", "nothing");
                f(attempt).unwrap_or_else(|| Err(ended())).inspect_err(|e| {
                    over = !matches!(api::kind(e).0, Kind::Timeout | Kind::Interrupted);
                })
            };
            let done = self.timed(group, name.clone(), call, |_| None);
            if done.is_some() {
                self.status = before; // it came to its end after all
            }
            if done.is_some() || over {
                return done;
            }
            self.part = part; // the same call again
        }
        None
    }

    fn subgroup(&mut self, mask: usize, used: bool) {
        let n = self.group.size();
        let ranks: Vec<usize> = (0..n).filter(|r| mask >> r & 1 == 1).collect();
        if !ranks.contains(&self.group.rank()) {
            return;
        }
        let name = format!("s{}.{}", self.lane.number, self.call);
        let group = match self.group.subgroup_builder(&ranks).name(name).build() {
            Ok(group) => group,
            Err(e) => return self.fault(format!("subgroup: {e}")),
        };
        if used {
            let before = self.status;
            self.timed(&group, "barrier.sub".into(), || group.barrier(), |()| None);
            slices::all_reduce::<u32>(self, &group, 70, symmem::ReduceOp::Sum);
            // What fails there leaves our own group as it was, unless a rank is lost.
            self.status = if self.group.check().is_err() { Status::Lost } else { before };
        }
    }
}
