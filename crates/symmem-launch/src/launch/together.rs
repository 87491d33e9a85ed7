//! The job's other nodes: what their launchers tell, and leaving together with them.

use std::time::Instant;

use rustix::process::Signal;

use super::super::nodes::{self, Heard, News, Nodes};
use super::super::{descendants, guard};
use super::{LAST_WORDS, Launch};

impl Launch<'_> {
    /// What other nodes tell. Their failures are ours.
    pub(super) fn take_news(&mut self) {
        for heard in self.nodes.as_ref().map(Nodes::take).unwrap_or_default() {
            match heard {
                Heard::News(News::Left) => {}
                Heard::News(news @ News::Failed { .. }) => {
                    self.printer.say(&news.to_string());
                    self.cause.get_or_insert(news);
                    self.fail();
                }
                Heard::News(news @ News::Told { signal, again, .. }) => {
                    self.printer.say(&news.to_string());
                    self.interrupted = Some(signal);
                    self.bad_since.get_or_insert_with(Instant::now);
                    match Signal::from_named_raw(signal) {
                        Some(_) if again => {
                            self.at_once = true;
                            self.kill();
                        }
                        Some(signal) => self.tell_to_end(signal),
                        None => {}
                    }
                }
                Heard::Gone(why) => {
                    self.printer.say(&format!("node 0 is gone: {why}"));
                    self.is_cut_off = true;
                    self.fail();
                }
            }
        }
    }

    /// The job has failed: ranks that have not ended soon are told to.
    pub(super) fn fail(&mut self) {
        // Ranks that were told to end have been told how long they may take.
        if self.bad_since.is_none() && self.interrupted.is_none() {
            self.end_at = Instant::now().checked_add(LAST_WORDS);
        }
        self.bad_since.get_or_insert_with(Instant::now);
    }

    /// Leaves together with the other nodes, and learns from them why the job failed.
    pub(super) fn part(&mut self, store: &str) {
        // As long as they may take to end, and a moment.
        let most = self.job.grace.saturating_add(LAST_WORDS + 2 * descendants::DYING);
        let limit = self.bad_since.and_then(|since| since.checked_add(most));
        let shares = self.nodes.is_some();
        // Without others to agree with, this only decides how long they have a store.
        if !shares && self.job.node == 0 && self.code() != 0 && self.interrupted.is_some() {
            return;
        }
        match nodes::part(self.job, store, self.nodes.take(), limit, self.signals) {
            Ok(cause) => self.cause = cause.or(self.cause.take()),
            Err(error) => tracing::warn!("leaving before the other nodes: {error:#}"),
        }
        if let Some(cause) = &self.cause {
            guard::say(format!("the job failed: {cause}"));
        }
    }

    /// A signal to one launcher is meant for the ranks of all.
    pub(super) fn tell_nodes(&mut self, signal: Signal, again: bool) {
        self.bad_since.get_or_insert_with(Instant::now);
        if let Some(nodes) = &self.nodes {
            nodes.tell(News::Told { node: self.job.node, signal: signal.as_raw(), again });
        }
    }
}
