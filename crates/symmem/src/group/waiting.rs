//! Waits of a group: who is to blame when one fails, and what a rank says of its own while it lasts.
//!
//! One rule for blame, for every wait: a rank that was lost broke the group, no matter which rank waits for which. Of the others, only
//! one that has not arrived can be at fault.

use std::time::{Duration, Instant};

use super::Group;
use super::context::Note;
use crate::error::Error;
use crate::signal::Stop;

/// A wait that lasts longer says so in shared memory.
const LONG: Duration = Duration::from_millis(2);

/// One wait of a call.
pub(super) struct Waiting<'a> {
    group: &'a Group,
    op: &'static str,
    channel: Option<usize>,
    /// Since when it has been slow.
    since: Option<Instant>,
    note: Option<Note<'a>>,
}

impl<'a> Waiting<'a> {
    #[inline]
    pub(super) fn new(group: &'a Group, op: &'static str, channel: Option<usize>) -> Self {
        Self { group, op, channel, since: None, note: None }
    }

    /// Whether those who have not arrived can no longer come. Asked now and then by waits that are slow.
    #[cold]
    pub(super) fn is_hopeless(&mut self, arrived: &dyn Fn(usize) -> bool) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.note.is_none() && since.elapsed() > LONG {
            let missing = (0..self.group.size()).filter(|&rank| !arrived(rank));
            let missing: Vec<String> = missing.take(8).map(|rank| rank.to_string()).collect();
            let (op, group) = (self.op, self.group.name());
            let on = self.channel.map_or(String::new(), |channel| format!(" on channel {channel}"));
            let missing = missing.join(", ");
            let text = format!("in {op}{on} of group {group:?}, waiting for rank {missing}");
            self.note = self.group.context().note(&text);
        }
        self.group.0.health.is_fatal(|rank| !arrived(rank))
    }
}

impl Group {
    /// The error of a wait that ended without success; `arrived` says who had come.
    #[cold]
    pub(super) fn stopped(
        &self,
        stop: Stop,
        op: &'static str,
        channel: Option<usize>,
        arrived: impl Fn(usize) -> bool,
    ) -> Error {
        match stop {
            Stop::Lost => {
                let loss = self.explained_loss(|rank| !arrived(rank));
                let (rank, how) = loss.unwrap_or_default();
                Error::PeerLost { rank, during: op, how }
            }
            Stop::GivenUp { why, after, missing } => match why.error(op, missing, after) {
                Error::Timeout { op, waiting_for, after, .. } => {
                    let doing = waiting_for.iter().map(|&rank| self.whereabouts(rank)).collect();
                    Error::Timeout { op, channel, waiting_for, after, doing }
                }
                Error::Interrupted { op, waiting_for, after, .. } => {
                    Error::Interrupted { op, channel, waiting_for, after }
                }
                other => other,
            },
            Stop::OutOfStep { rank } => self.out_of_step(op, rank),
            // Only calls of the sequence differ, and they say in what.
            Stop::Differs { rank } => Error::Mismatch {
                op,
                what: "operation",
                rank,
                ours: op.to_owned(),
                theirs: "another".to_owned(),
            },
        }
    }

    /// What a rank is doing, by what it left in shared memory.
    fn whereabouts(&self, rank: usize) -> String {
        let doing = self.world_ranks().get(rank).map(|&world| self.context().doing(world));
        let doing = match doing.unwrap_or_default() {
            notes if notes.is_empty() => "outside of the library, or about to leave it".to_owned(),
            notes => notes.join(" and "),
        };
        let last = match self.last_call(rank).filter(|_| rank != self.rank()) {
            Some((number, call)) => format!("its last call here was number {number}, {call}"),
            None => "it has made no call here yet".to_owned(),
        };
        format!("rank {rank} is {doing}; {last}")
    }
}
