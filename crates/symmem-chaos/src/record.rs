//! What a rank notes of its calls: when it entered and left each, and what came of it.
//!
//! Notes of ranks that are processes go through files, so that those of a killed one are kept.

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use symmem::{Error, Group};

use crate::api;

/// Nanoseconds of a clock that all processes share.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

thread_local! {
    /// Kept open: what a process looks up below `/proc` makes the kernel take the longer to forget it when it is killed.
    static SCHEDULED: Option<std::fs::File> = std::fs::File::open("/proc/thread-self/schedstat").ok();
}

/// For how long this thread was ready to run and did not get a core, since it began.
pub fn starved() -> u64 {
    let mut bytes = [0; 100];
    let read = SCHEDULED.with(|file| file.as_ref()?.read_at(&mut bytes, 0).ok());
    let text = std::str::from_utf8(&bytes[..read.unwrap_or(0)]).unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|delay| delay.parse().ok()).unwrap_or(0)
}

/// Errors, as far as the judge tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Mismatch,
    Timeout,
    Interrupted,
    OutOfStep,
    PeerLost,
    PeerFailed,
    Usage,
    Other,
}

const KINDS: [(Kind, &str); 8] = [
    (Kind::Mismatch, "Mismatch"),
    (Kind::Timeout, "Timeout"),
    (Kind::Interrupted, "Interrupted"),
    (Kind::OutOfStep, "OutOfStep"),
    (Kind::PeerLost, "PeerLost"),
    (Kind::PeerFailed, "PeerFailed"),
    (Kind::Usage, "Usage"),
    (Kind::Other, "Other"),
];

impl Kind {
    pub fn name(self) -> &'static str {
        KINDS.iter().find(|(kind, _)| *kind == self).map_or("?", |(_, name)| name)
    }
}

/// What came of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Entered and not left: the rank died in it.
    Open,
    Ok,
    /// `Ok`, with other elements than those of this call, or something that was held changed.
    Wrong(String),
    Err {
        kind: Kind,
        ranks: Vec<usize>,
        after: Option<u64>,
        text: String,
    },
}

/// One call of one rank.
#[derive(Clone, Debug)]
pub struct Record {
    pub rank: usize,
    pub lane: usize,
    /// Its number in the program, and which of several library calls of one step.
    pub call: usize,
    pub part: usize,
    pub name: String,
    pub enter: u64,
    pub leave: u64,
    /// For how long the thread did not get a core meanwhile.
    pub starved: u64,
    /// Nanoseconds that the call was given.
    pub limit: u64,
    /// World ranks of the group.
    pub members: Vec<usize>,
    pub outcome: Outcome,
}

/// What else happens in a run.
#[derive(Clone, Debug)]
pub enum Event {
    Call(Record),
    /// This rank is about to be killed.
    Killed {
        rank: usize,
        at: u64,
    },
    /// This rank leaves in order.
    Left {
        rank: usize,
        at: u64,
    },
    /// The process was stopped, or got no core, for so long up to this moment.
    Stall {
        at: u64,
        length: u64,
    },
    /// The ranks of a group that was shrunk.
    Members {
        rank: usize,
        lane: usize,
        call: usize,
        ranks: Vec<usize>,
    },
    /// Something that is wrong in itself.
    Fault {
        rank: usize,
        text: String,
    },
}

/// Where notes go.
pub trait Log: Send + Sync {
    fn note(&self, event: Event);
}

/// Of ranks that are threads.
#[derive(Default)]
pub struct Memory(Mutex<Vec<Event>>);

impl Memory {
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Log for Memory {
    fn note(&self, event: Event) {
        // Entering is told again with leaving: nobody dies here.
        if !matches!(&event, Event::Call(record) if record.outcome == Outcome::Open) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        }
    }
}

/// Of ranks that are processes: one line each.
pub struct File(pub std::fs::File);

impl Log for File {
    fn note(&self, event: Event) {
        let mut line = encode(&event);
        line.push('\n');
        let _ = (&self.0).write_all(line.as_bytes()); // one write: lines of several threads do not mix
    }
}

fn list(ranks: &[usize]) -> String {
    let words: Vec<String> = ranks.iter().map(usize::to_string).collect();
    if words.is_empty() { "-".into() } else { words.join("+") }
}

fn ranks(text: &str) -> Vec<usize> {
    text.split('+').filter_map(|word| word.parse().ok()).collect()
}

fn encode(event: &Event) -> String {
    match event {
        Event::Call(r) => {
            let mut line = format!(
                "c {} {} {} {} {} {} {} {} {} {} ",
                r.rank,
                r.lane,
                r.call,
                r.part,
                r.name,
                r.enter,
                r.leave,
                r.starved,
                r.limit,
                list(&r.members)
            );
            let _ = match &r.outcome {
                Outcome::Open => write!(line, "open"),
                Outcome::Ok => write!(line, "ok"),
                Outcome::Wrong(text) => write!(line, "wrong {}", flat(text)),
                Outcome::Err { kind, ranks, after, text } => {
                    let after = after.map_or("-".to_owned(), |a| a.to_string());
                    write!(line, "err {} {} {after} {}", kind.name(), list(ranks), flat(text))
                }
            };
            line
        }
        Event::Killed { rank, at } => format!("k {rank} {at}"),
        Event::Left { rank, at } => format!("l {rank} {at}"),
        Event::Stall { at, length } => format!("s {at} {length}"),
        Event::Members { rank, lane, call, ranks } => {
            format!("m {rank} {lane} {call} {}", list(ranks))
        }
        Event::Fault { rank, text } => format!("f {rank} {}", flat(text)),
    }
}

fn flat(text: &str) -> String {
    text.replace('\n', "\\n")
}

/// The event of a line; none of one that was cut off.
pub fn decode(line: &str) -> Option<Event> {
    let mut words = line.split(' ');
    let tag = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    match tag {
        "k" => Some(Event::Killed { rank: number()? as usize, at: number()? }),
        "l" => Some(Event::Left { rank: number()? as usize, at: number()? }),
        "s" => Some(Event::Stall { at: number()?, length: number()? }),
        "m" => {
            let (rank, lane, call) = (number()? as usize, number()? as usize, number()? as usize);
            Some(Event::Members { rank, lane, call, ranks: ranks(words.next()?) })
        }
        "f" => {
            let rank = number()? as usize;
            Some(Event::Fault { rank, text: words.collect::<Vec<_>>().join(" ") })
        }
        _ => call(words).map(Event::Call),
    }
}

fn call<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Record> {
    let mut places = [0; 4];
    for place in &mut places {
        *place = words.next()?.parse().ok()?;
    }
    let [rank, lane, call, part] = places;
    let name = words.next()?.to_owned();
    let mut times = [0; 4];
    for time in &mut times {
        *time = words.next()?.parse().ok()?;
    }
    let [enter, leave, starved, limit] = times;
    let members = ranks(words.next()?);
    let outcome = match words.next()? {
        "open" => Outcome::Open,
        "ok" => Outcome::Ok,
        "wrong" => Outcome::Wrong(words.collect::<Vec<_>>().join(" ")),
        _ => {
            let named = words.next()?;
            let kind = KINDS.iter().find(|(_, name)| *name == named)?.0;
            let (ranks, after) = (ranks(words.next()?), words.next()?.parse().ok());
            Outcome::Err { kind, ranks, after, text: words.collect::<Vec<_>>().join(" ") }
        }
    };
    Some(Record { rank, lane, call, part, name, enter, leave, starved, limit, members, outcome })
}

/// The outcome of an error in `group`, whose ranks it gives their numbers in the world.
pub fn failed(error: &Error, group: &Group) -> Outcome {
    let (kind, named, after) = api::kind(error);
    let world = |rank: &usize| group.world_ranks().get(*rank).copied().unwrap_or(usize::MAX);
    Outcome::Err {
        kind,
        ranks: named.iter().map(world).collect(),
        after: after.map(|a| a.as_nanos() as u64),
        text: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_read_again() {
        let outcome = Outcome::Err {
            kind: Kind::Timeout,
            ranks: vec![1, 4],
            after: Some(5),
            text: "no answer\nat all".into(),
        };
        let record = Record {
            rank: 1,
            lane: 2,
            call: 3,
            part: 0,
            name: "barrier".into(),
            enter: 10,
            leave: 20,
            starved: 1,
            limit: 5,
            members: vec![0, 1, 4],
            outcome,
        };
        let line = encode(&Event::Call(record));
        let Some(Event::Call(read)) = decode(&line) else { panic!("{line}") };
        assert_eq!((read.rank, read.lane, read.call, read.limit), (1, 2, 3, 5));
        let Outcome::Err { ranks, text, .. } = read.outcome else { panic!("{line}") };
        assert_eq!((ranks, text.as_str()), (vec![1, 4], "no answer\\nat all"));
        assert!(decode("c 1 2").is_none());
    }
}
