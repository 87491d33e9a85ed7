//! The model: three ranks, their pads, and what they may do next.

use stateright::{Model, Property};

pub const N: usize = 3;

/// What the protocol does beyond the plain idea of it; the tests leave them out one by one.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Nobody begins a call after a resynchronisation before all have reset their numbers.
    pub second_count: bool,
    /// The word that describes a call has its number in it.
    pub numbered_words: bool,
    /// Before a rank gives up a call, it checks whether another rank already has, and then reports that.
    pub ask_before_blame: bool,
    /// A rank that gives up checks once more, and continues if no rank is missing any more.
    pub last_look: bool,
    /// A rank that learns that the group is out of step passes it on before it reports it.
    pub pass_it_on: bool,
    /// A resynchronisation that timed out goes on where it was.
    pub resume_resync: bool,
    /// A rank that resynchronises of its own accord first says so, as one that gave up a call does.
    pub resync_tells: bool,
}

impl Rules {
    pub const ALL: Self = Self {
        second_count: true,
        numbered_words: true,
        ask_before_blame: true,
        last_look: true,
        pass_it_on: true,
        resume_resync: true,
        resync_tells: true,
    };
}

/// How often something may happen, and how many calls a rank makes in each generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    pub timeouts: u8,
    pub differ: u8,
    pub deaths: u8,
    pub stops: u8,
    /// Resynchronisations that nothing made necessary.
    pub resyncs: u8,
    pub calls: u8,
}

/// What ranks compare: the operation, the exchange within it, and (by the rules) the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Word {
    epoch: u8,
    op: u8,
    exchange: u8,
}

/// Two exchanges, and cannot be resumed.
const DIRECT: u8 = 1;
/// One exchange, and can be resumed.
const BARRIER: u8 = 2;
/// As `DIRECT`, with other arguments.
const OTHER: u8 = 3;

fn exchanges(op: u8) -> u8 {
    if op == BARRIER { 1 } else { 2 }
}

/// What the program calls at `index`.
fn planned(index: u8) -> u8 {
    if index.is_multiple_of(2) { DIRECT } else { BARRIER }
}

/// A rank's pad: what the others have written there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
struct Pad {
    flag: [u8; N],
    word: [[Word; 2]; N],
    out: Option<(u8, u8)>,
    sync: [u8; N],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// Between calls.
    Idle,
    /// A barrier timed out, and will be resumed.
    Pending,
    /// Writing the word (even) or the flag (odd) of pad `step / 2`.
    Arriving(u8),
    Waiting,
    /// A call that cannot be resumed timed out.
    Expired,
    /// Writing the out word: 0 decides in pad 0, then pad by pad.
    Abandoning(u8),
    /// As the steps after 0 of that, by a rank that has been told.
    Telling(u8),
    /// Raising the count of this phase in one pad after the other.
    Raising(u8, u8),
    Syncing(u8),
    /// Timed out in this phase, to be called again.
    SyncPaused(u8),
    Finished,
    Lost,
    Dead,
}

/// What a rank had arrived at, whatever the protocol makes of it: for the properties only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Arrival {
    epoch: u8,
    generation: u8,
    index: u8,
    op: u8,
    exchange: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rank {
    at: At,
    stopped: bool,
    epoch: u8,
    generation: u8,
    index: u8,
    op: u8,
    exchange: u8,
    /// The generation in which it was told that the group is out of step, one more than that.
    told: u8,
    arrivals: Vec<Arrival>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    ranks: [Rank; N],
    pads: [Pad; N],
    left: Budget,
    lie: bool,
    blame: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Step(usize),
    /// Begins a call with other arguments than planned.
    Differ(usize),
    TimeOut(usize),
    /// Makes another call instead of resuming a barrier.
    Switch(usize),
    /// Resynchronises although nobody has given up a call.
    Resync(usize),
    Die(usize),
    Stop(usize),
}

pub struct Protocol {
    pub rules: Rules,
    pub budget: Budget,
}

impl State {
    /// The pads of others, in order.
    fn peer(own: usize, step: u8) -> usize {
        (0..N).filter(|r| *r != own).nth(step as usize).unwrap()
    }

    fn gone(&self, r: usize) -> bool {
        matches!(self.ranks[r].at, At::Dead | At::Finished | At::Lost)
    }

    fn missing(&self, own: usize) -> Vec<usize> {
        let epoch = self.ranks[own].epoch;
        (0..N).filter(|&r| r != own && self.pads[own].flag[r] < epoch).collect()
    }

    fn late_to_sync(&self, own: usize, phase: u8) -> Vec<usize> {
        let want = Self::count(self.ranks[own].generation, phase);
        (0..N).filter(|&r| r != own && self.pads[own].sync[r] < want).collect()
    }

    /// The count of a phase: the generation is raised between the two.
    fn count(generation: u8, phase: u8) -> u8 {
        if phase == 1 { 2 * (generation + 1) - 1 } else { 2 * generation }
    }

    fn is_out(&self, own: usize) -> bool {
        self.pads[own].out.is_some_and(|(generation, _)| generation == self.ranks[own].generation)
    }

    /// What a rank finds in another's word for its own epoch.
    fn differs(&self, own: usize, r: usize, rules: &Rules) -> bool {
        let me = &self.ranks[own];
        let theirs = self.pads[own].word[r][me.epoch as usize % 2];
        let numbered = !rules.numbered_words || theirs.epoch == me.epoch;
        !(numbered && theirs.op == me.op && theirs.exchange == me.exchange)
    }

    /// A rank that has come and whose call is another: this ends the wait at once.
    fn disagrees(&self, own: usize, rules: &Rules) -> bool {
        let epoch = self.ranks[own].epoch;
        let here = |r: &usize| *r != own && self.pads[own].flag[*r] >= epoch;
        (0..N).filter(here).any(|r| self.differs(own, r, rules))
    }
}

impl Protocol {
    /// Whether a rank can do something without the help of a clock.
    fn can_step(&self, s: &State, r: usize) -> bool {
        let rank = &s.ranks[r];
        if rank.stopped {
            return false;
        }
        let lost = |missing: Vec<usize>| missing.iter().any(|&m| s.gone(m));
        match rank.at {
            At::Finished | At::Lost | At::Dead => false,
            At::Waiting => {
                let missing = s.missing(r);
                missing.is_empty() || s.disagrees(r, &self.rules) || s.is_out(r) || lost(missing)
            }
            At::Syncing(phase) => {
                let late = s.late_to_sync(r, phase);
                late.is_empty() || lost(late)
            }
            _ => true,
        }
    }

    fn begin(&self, s: &mut State, r: usize, op: u8) {
        if s.is_out(r) {
            return self.tell(s, r);
        }
        let rank = &mut s.ranks[r];
        rank.op = op;
        rank.exchange = 0;
        self.arrive(s, r);
    }

    fn arrive(&self, s: &mut State, r: usize) {
        let rank = &mut s.ranks[r];
        rank.epoch += 1;
        let (epoch, generation, index) = (rank.epoch, rank.generation, rank.index);
        let (op, exchange) = (rank.op, rank.exchange);
        rank.arrivals.push(Arrival { epoch, generation, index, op, exchange });
        rank.at = At::Arriving(0);
    }

    /// A rank learns that the group is out of step; it resynchronises.
    fn tell(&self, s: &mut State, r: usize) {
        s.ranks[r].told = s.ranks[r].generation + 1;
        s.ranks[r].at = if self.rules.pass_it_on { At::Telling(0) } else { At::Raising(1, 0) };
    }

    /// The call is over, or its next exchange begins.
    fn pass(&self, s: &mut State, r: usize, ok: bool) {
        if ok {
            self.check_ok(s, r);
        }
        let rank = &mut s.ranks[r];
        if ok && rank.exchange + 1 < exchanges(rank.op) {
            rank.exchange += 1;
            return self.arrive(s, r);
        }
        rank.index += 1;
        rank.at = if rank.index == self.budget.calls { At::Finished } else { At::Idle };
    }

    /// All ranks have arrived with this very call.
    fn check_ok(&self, s: &mut State, r: usize) {
        let own = *s.ranks[r].arrivals.last().unwrap();
        let same = |rank: &Rank| rank.arrivals.contains(&own);
        s.lie |= !s.ranks.iter().all(same);
    }

    fn wait(&self, s: &mut State, r: usize) {
        let missing = s.missing(r);
        if s.disagrees(r, &self.rules) {
            self.pass(s, r, false);
        } else if missing.is_empty() {
            self.pass(s, r, true);
        } else if s.is_out(r) {
            self.tell(s, r);
        } else {
            s.ranks[r].at = At::Lost;
        }
    }

    fn synced(&self, s: &mut State, r: usize, phase: u8) {
        if !s.late_to_sync(r, phase).is_empty() {
            s.ranks[r].at = At::Lost;
            return;
        }
        if phase == 1 {
            let seen = s.pads[r].flag.iter().copied().max().unwrap_or(0);
            let rank = &mut s.ranks[r];
            rank.epoch = rank.epoch.max(seen) + 1;
            rank.generation += 1;
            rank.index = 0;
            rank.at = if self.rules.second_count { At::Raising(2, 0) } else { At::Idle };
        } else {
            s.ranks[r].at = At::Idle;
        }
    }

    fn time_out(&self, s: &mut State, r: usize) {
        match s.ranks[r].at {
            At::Syncing(phase) => s.ranks[r].at = At::SyncPaused(phase),
            _ if self.rules.last_look && s.missing(r).is_empty() => self.wait(s, r),
            _ if s.ranks[r].op == BARRIER => {
                let decided = s.pads[0].out.is_some_and(|(g, _)| g == s.ranks[r].generation);
                if !(decided && self.rules.ask_before_blame) {
                    self.check_blame(s, r);
                }
                s.ranks[r].at = At::Pending;
            }
            _ => {
                if !self.rules.ask_before_blame {
                    self.check_blame(s, r);
                }
                s.ranks[r].at = At::Expired;
            }
        }
    }

    /// Those whom a timeout names are neither none nor ranks that did not come because they were told not to.
    fn check_blame(&self, s: &mut State, r: usize) {
        let generation = s.ranks[r].generation;
        let missing = s.missing(r);
        let refused = |m: &usize| s.ranks[*m].told == generation + 1;
        s.blame |= missing.is_empty() || missing.iter().any(refused);
    }

    fn step(&self, s: &mut State, r: usize) {
        let rank = s.ranks[r].clone();
        match rank.at {
            At::Idle => self.begin(s, r, planned(rank.index)),
            At::Pending if s.is_out(r) => self.tell(s, r),
            At::Pending => s.ranks[r].at = At::Waiting,
            At::Arriving(step) => {
                let to = State::peer(r, step / 2);
                if step % 2 == 0 {
                    let word = Word { epoch: rank.epoch, op: rank.op, exchange: rank.exchange };
                    s.pads[to].word[r][rank.epoch as usize % 2] = word;
                } else {
                    s.pads[to].flag[r] = rank.epoch;
                }
                let done = step as usize + 1 == 2 * (N - 1);
                s.ranks[r].at = if done { At::Waiting } else { At::Arriving(step + 1) };
            }
            At::Waiting => self.wait(s, r),
            At::Expired | At::Abandoning(0) => {
                let decided = s.pads[0].out.is_some_and(|(g, _)| g == rank.generation);
                let came = self.rules.last_look && s.missing(r).is_empty();
                if rank.at == At::Expired && self.rules.ask_before_blame && !decided && !came {
                    self.check_blame(s, r);
                }
                if !decided {
                    s.pads[0].out = Some((rank.generation, r as u8));
                }
                s.ranks[r].at = At::Abandoning(1);
            }
            At::Abandoning(pad) | At::Telling(pad) => {
                s.ranks[r].told = rank.generation + 1;
                if pad > 0 || rank.at == At::Telling(pad) {
                    let now = |pad: usize| s.pads[pad].out.filter(|(g, _)| *g == rank.generation);
                    if let Some(word) = now(0).or(now(r)) {
                        s.pads[pad as usize].out = Some(word);
                    }
                }
                let next = match rank.at {
                    At::Telling(_) => At::Telling(pad + 1),
                    _ => At::Abandoning(pad + 1),
                };
                s.ranks[r].at = if pad as usize + 1 == N { At::Raising(1, 0) } else { next };
            }
            At::Raising(phase, step) => {
                let to = State::peer(r, step);
                s.pads[to].sync[r] = State::count(rank.generation, phase);
                let done = step as usize + 1 == N - 1;
                s.ranks[r].at =
                    if done { At::Syncing(phase) } else { At::Raising(phase, step + 1) };
            }
            At::Syncing(phase) => self.synced(s, r, phase),
            At::SyncPaused(phase) if self.rules.resume_resync => s.ranks[r].at = At::Syncing(phase),
            At::SyncPaused(_) => s.ranks[r].at = At::Raising(1, 0),
            At::Finished | At::Lost | At::Dead => {}
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let rank = Rank {
            at: At::Idle,
            stopped: false,
            epoch: 0,
            generation: 0,
            index: 0,
            op: 0,
            exchange: 0,
            told: 0,
            arrivals: Vec::new(),
        };
        let ranks = std::array::from_fn(|_| rank.clone());
        let pads = std::array::from_fn(|_| Pad::default());
        vec![State { ranks, pads, left: self.budget, lie: false, blame: false }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for r in 0..N {
            let rank = &s.ranks[r];
            if self.can_step(s, r) {
                actions.push(Action::Step(r));
            }
            if rank.stopped || s.gone(r) {
                continue;
            }
            let waits = matches!(rank.at, At::Waiting | At::Syncing(_));
            if rank.at == At::Idle && s.left.differ > 0 {
                actions.push(Action::Differ(r));
            }
            if rank.at == At::Idle && s.left.resyncs > 0 {
                actions.push(Action::Resync(r));
            }
            if waits && s.left.timeouts > 0 {
                actions.push(Action::TimeOut(r));
            }
            if rank.at == At::Pending {
                actions.push(Action::Switch(r));
            }
            if s.left.deaths > 0 {
                actions.push(Action::Die(r));
            }
            if s.left.stops > 0 {
                actions.push(Action::Stop(r));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut s = last.clone();
        match action {
            Action::Step(r) => self.step(&mut s, r),
            Action::Differ(r) => {
                s.left.differ -= 1;
                self.begin(&mut s, r, OTHER);
            }
            Action::TimeOut(r) => {
                s.left.timeouts -= 1;
                self.time_out(&mut s, r);
            }
            Action::Switch(r) => s.ranks[r].at = At::Abandoning(0),
            Action::Resync(r) => {
                s.left.resyncs -= 1;
                let tells = self.rules.resync_tells;
                s.ranks[r].at = if tells { At::Abandoning(0) } else { At::Raising(1, 0) };
            }
            Action::Die(r) => {
                s.left.deaths -= 1;
                s.ranks[r].at = At::Dead;
            }
            Action::Stop(r) => {
                s.left.stops -= 1;
                s.ranks[r].stopped = true;
            }
        }
        Some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("ok means the same call", |_, s: &State| !s.lie),
            Property::always("blame", |_, s: &State| !s.blame),
            Property::always("in step", |_, s: &State| in_step(s)),
            Property::always("progress", progress),
            Property::always("prompt", prompt),
        ]
    }
}

/// Ranks that are about to make the same call of the same generation have counted to the same number.
fn in_step(s: &State) -> bool {
    let idle = |r: &&Rank| r.at == At::Idle;
    s.ranks.iter().filter(idle).all(|a| {
        let same = |b: &&Rank| (b.generation, b.index) == (a.generation, a.index);
        s.ranks.iter().filter(idle).filter(same).all(|b| b.epoch == a.epoch)
    })
}

/// When nothing more happens by itself, nobody waits, unless for a rank that is stopped.
fn progress(model: &Protocol, s: &State) -> bool {
    let stuck = (0..N).all(|r| !model.can_step(s, r));
    !stuck || (0..N).all(|r| s.gone(r)) || s.ranks.iter().any(|r| r.stopped)
}

/// Where one rank has been told that the group is out of step, nobody needs a clock to leave a call of that generation:
/// when nothing more happens by itself, no rank that could move is still waiting in it.
fn prompt(model: &Protocol, s: &State) -> bool {
    let stuck = (0..N).all(|r| !model.can_step(s, r));
    let told = |generation: u8| {
        let reported = |r: &Rank| {
            r.told == generation + 1 && !matches!(r.at, At::Abandoning(_) | At::Telling(_))
        };
        s.ranks.iter().any(|r| !r.stopped && reported(r))
    };
    let waits = |r: &Rank| !r.stopped && r.at == At::Waiting && told(r.generation);
    !stuck || !s.ranks.iter().any(waits)
}
