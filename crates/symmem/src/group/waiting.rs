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
    /// Of a message.
    tag: Option<u64>,
    /// Since when it has been slow.
    since: Option<Instant>,
    note: Option<Note<'a>>,
}

impl<'a> Waiting<'a> {
    #[inline]
    pub(super) fn new(group: &'a Group, op: &'static str, channel: Option<usize>) -> Self {
        Self { group, op, channel, tag: None, since: None, note: None }
    }

    /// Of a message with this tag.
    pub(super) fn for_message(group: &'a Group, op: &'static str, tag: u64) -> Self {
        Self { tag: Some(tag), ..Self::new(group, op, None) }
    }

    /// Whether those who have not arrived can no longer come. Asked now and then by waits that are slow.
    #[cold]
    pub(super) fn is_hopeless(&mut self, arrived: &dyn Fn(usize) -> bool) -> bool {
        self.say(arrived);
        self.group.0.health.is_fatal(|rank| !arrived(rank))
    }

    /// As `is_hopeless` if one of those who have not arrived is enough.
    #[cold]
    pub(super) fn is_hopeless_for_any(&mut self, arrived: &dyn Fn(usize) -> bool) -> bool {
        self.say(arrived);
        let health = &self.group.0.health;
        let mut missing = (0..self.group.size()).filter(|&rank| !arrived(rank));
        health.trouble() && missing.all(|rank| health.is_fatal(|awaited| awaited == rank))
    }

    /// Writes a note if the wait is long.
    fn say(&mut self, arrived: &dyn Fn(usize) -> bool) {
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.note.is_none() && since.elapsed() > LONG {
            let missing = (0..self.group.size()).filter(|&rank| !arrived(rank));
            let missing: Vec<String> = missing.take(8).map(|rank| rank.to_string()).collect();
            let (op, group) = (self.op, self.group.name());
            let on = self.channel.map_or(String::new(), |channel| format!(" on channel {channel}"));
            let tagged = self.tag.map_or(String::new(), |tag| format!(" with tag {tag}"));
            let missing = missing.join(", ");
            let text =
                format!("in {op}{on}{tagged} of group {group:?}, waiting for rank {missing}");
            self.note = self.group.context().note(&text);
        }
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
        arrived: &dyn Fn(usize) -> bool,
    ) -> Error {
        match stop {
            Stop::Lost => {
                let loss = self.explained_loss(&|rank| !arrived(rank));
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

    /// What this rank's threads wait for.
    #[cold]
    pub(crate) fn own_waits(&self) -> Vec<String> {
        self.context().doing(self.context().mesh.rank())
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
