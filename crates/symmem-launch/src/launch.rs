//! The launcher's one loop: it reads the ranks' output, passes signals on and notices who ends, and how.

use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGPIPE};

use super::job::{OnFailure, StoreAddress};
use super::nodes::{self, Heard, News, Nodes};
use super::output::{Printer, Stream};
use super::rank::Rank;
use super::{End, Failure, Job, Outcome, Request, Requests, Signals, guard, signals, spawn};
use crate::descendants;

/// How long ranks may go on after the first failure: those that wait for the lost one hear of it from the library, and
/// should be able to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a job that was told to end waits for readers of its output, at most.
const READERS: Duration = Duration::from_secs(5);
/// The same if it was told twice, and the least in any case.
const READERS_AT_ONCE: Duration = Duration::from_secs(1);

/// Runs `job` to its end, failure or success: no process of it is left then, nor any other that this process has started.
///
/// The ranks are bound to the calling thread: should it end, they are killed. What they have started is for the
/// [guard](crate::guard) to find.
pub fn launch(job: &Job, signals: &mut Signals) -> Result<Outcome> {
    launch_watched(job, signals, &mut |_, _| {})
}

/// As [`launch`], and hands every line that is collected to `watch`, with its rank, as soon as it is there.
pub fn launch_watched(
    job: &Job,
    signals: &mut Signals,
    watch: &mut dyn FnMut(usize, &[u8]),
) -> Result<Outcome> {
    let (address, _store) = job.host_store()?;
    let nodes = Nodes::join(job, &address.to_string())?;
    let mut launch = Launch {
        job,
        signals,
        ranks: Vec::with_capacity(job.ranks),
        printer: Printer::new()?,
        buffer: vec![0; 64 << 10],
        failed: Vec::new(),
        sent: Vec::new(),
        requests: Requests::default(),
        told: Signal::TERM,
        interrupted: None,
        at_once: false,
        end_at: None,
        kill_at: None,
        leave_at: None,
        over: false,
        nodes,
        bad_since: None,
        cause: None,
        is_cut_off: false,
    };
    launch.start(&address)?;
    while !(launch.over && launch.printer.is_idle()) {
        for event in launch.wait()? {
            launch.handle(event)?;
        }
        if launch.over {
            launch.read_rest();
        }
        launch.ranks.iter_mut().for_each(|rank| rank.written.show_fresh(watch));
        launch.look_at_clock();
    }
    if job.nodes > 1 {
        launch.part(&address.to_string());
    }
    Ok(launch.outcome())
}

struct Launch<'a> {
    job: &'a Job,
    signals: &'a mut Signals,
    ranks: Vec<Rank>,
    printer: Printer,
    buffer: Vec<u8>,
    /// Indices of the ranks that failed, first to last.
    failed: Vec<usize>,
    /// The signals that the ranks got from us.
    sent: Vec<i32>,
    requests: Requests,
    /// The last signal that asked the ranks to end.
    told: Signal,
    interrupted: Option<i32>,
    /// Whether the second request to end has come.
    at_once: bool,
    /// When ranks that have not ended by themselves after another's failure are asked to.
    end_at: Option<Instant>,
    /// When patience is over with ranks that have been asked to end.
    kill_at: Option<Instant>,
    /// When patience is over with ranks that have been killed, or, when all have ended, with readers of their output.
    leave_at: Option<Instant>,
    /// Whether all ranks have ended, and all that they had started.
    over: bool,
    nodes: Option<Nodes>,
    /// When the job was found to be failing, or was told to end.
    bad_since: Option<Instant>,
    /// The first failure of all nodes, as far as it is known.
    cause: Option<News>,
    /// Whether node 0, which hosts the store, has gone.
    is_cut_off: bool,
}

/// What the loop was woken by.
#[derive(Clone, Copy)]
enum Event {
    Signal,
    News,
    Target(Stream),
    Readable(usize, Stream),
}

impl Launch<'_> {
    fn start(&mut self, address: &StoreAddress) -> Result<()> {
        let inherited = spawn::allow_descriptors(4 * self.job.ranks + 64);
        for local in 0..self.job.ranks {
            let mut command = self.job.command(local, address)?;
            spawn::bind_to_launcher(&mut command, inherited);
            self.ranks.push(Rank::start(self.job.rank(local), command, self.job.collect)?);
        }
        Ok(())
    }

    /// Sleeps until there is something to do. Signals come first: who failed first should be said first.
    fn wait(&self) -> Result<Vec<Event>> {
        let mut events = vec![Event::Signal];
        let mut fds = vec![PollFd::from_borrowed_fd(self.signals.fd(), PollFlags::IN)];
        if let Some(nodes) = self.nodes.as_ref().filter(|_| !self.over) {
            events.push(Event::News);
            fds.push(PollFd::from_borrowed_fd(nodes.fd(), PollFlags::IN));
        }
        for (target, fd, flags) in self.printer.targets() {
            events.push(Event::Target(target));
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
        for (index, rank) in self.ranks.iter().enumerate().filter(|_| !self.over) {
            for (stream, fd) in rank.pipes().filter(|(stream, _)| !self.printer.is_full(*stream)) {
                events.push(Event::Readable(index, stream));
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        let next = [self.end_at, self.kill_at, self.leave_at].into_iter().flatten().min();
        signals::sleep_until(&mut fds, next)?;
        let ready = events.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(event, _)| event).collect())
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Signal => return self.take_signals(),
            Event::News => self.take_news(),
            Event::Target(target) => {
                if !self.printer.advance(target) {
                    self.close(target);
                }
            }
            // Those before it may have written much.
            Event::Readable(_, stream) if self.printer.is_full(stream) => {}
            Event::Readable(index, stream) => {
                if let Some(rank) = self.ranks.get_mut(index) {
                    rank.read(stream, &mut self.buffer, &mut self.printer);
                }
            }
        }
        Ok(())
    }

    /// Nobody reads `target` any more. As if the ranks had written there themselves, who writes on is killed.
    fn close(&mut self, target: Stream) {
        self.sent.push(SIGPIPE);
        for stream in Stream::BOTH {
            if self.printer.leads_to(stream, target) {
                self.ranks.iter_mut().for_each(|rank| rank.close(stream, &mut self.printer));
            }
        }
        self.printer.abandon(target);
    }

    fn abandon_output(&mut self) {
        Stream::BOTH.into_iter().for_each(|target| self.printer.abandon(target));
    }

    fn take_signals(&mut self) -> Result<()> {
        let (ended, requests): (Vec<_>, Vec<_>) =
            self.signals.take().into_iter().partition(|&signal| signal == SIGCHLD);
        requests.into_iter().for_each(|signal| self.pass_on(signal));
        if ended.is_empty() || self.over {
            return Ok(());
        }
        let ranks: Vec<_> = self.ranks.iter().map(|rank| rank.group).collect();
        descendants::reap_except(&ranks);
        self.look_at_ranks()
    }

    /// What other nodes tell. Their failures are ours.
    fn take_news(&mut self) {
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
    fn fail(&mut self) {
        // Ranks that were told to end have been told how long they may take.
        if self.bad_since.is_none() && self.interrupted.is_none() {
            self.end_at = Instant::now().checked_add(LAST_WORDS);
        }
        self.bad_since.get_or_insert_with(Instant::now);
    }

    /// Leaves together with the other nodes, and learns from them why the job failed.
    fn part(&mut self, store: &str) {
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

    /// A signal to the launcher is meant for the ranks.
    fn pass_on(&mut self, signal: i32) {
        tracing::debug!(signal = signals::name(signal), "passed on to the ranks");
        let request = self.requests.take(signal);
        if request != Request::Other {
            self.interrupted = Some(signal);
        }
        match (request, Signal::from_named_raw(signal)) {
            (Request::Echo, _) | (_, None) => {}
            // Only unread output holds us, and nobody wants it.
            (Request::First | Request::Again, _) if self.over => self.abandon_output(),
            (Request::Other, Some(_)) if self.over => {}
            (Request::Other, Some(signal)) => self.send(signal),
            (Request::First, Some(signal)) => {
                self.tell_nodes(signal, false);
                self.tell_to_end(signal);
            }
            (Request::Again, Some(signal)) => {
                self.tell_nodes(signal, true);
                self.at_once = true;
                let name = signals::name(signal.as_raw());
                self.printer.say(&format!("{name} again: killing the ranks"));
                self.kill();
            }
        }
    }

    fn tell_nodes(&mut self, signal: Signal, again: bool) {
        self.bad_since.get_or_insert_with(Instant::now);
        if let Some(nodes) = &self.nodes {
            nodes.tell(News::Told { node: self.job.node, signal: signal.as_raw(), again });
        }
    }

    fn send(&mut self, signal: Signal) {
        self.sent.push(signal.as_raw());
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }

    /// Lets the ranks end by themselves, for as long as the grace period.
    fn tell_to_end(&mut self, signal: Signal) {
        self.told = signal;
        self.send(signal);
        // One that is stopped would not notice.
        self.ranks.iter().for_each(|rank| rank.signal(Signal::CONT));
        self.end_at = None;
        // A grace beyond what the clock can say has no end.
        self.kill_at = self.kill_at.or_else(|| Instant::now().checked_add(self.job.grace));
    }

    fn kill(&mut self) {
        self.kill_at = None;
        self.send(Signal::KILL);
        self.leave_at = Some(Instant::now() + descendants::DYING);
    }

    fn look_at_ranks(&mut self) -> Result<()> {
        let mut failures = Vec::new();
        for index in 0..self.ranks.len() {
            let ended = self.ranks.get_mut(index).map(Rank::has_just_ended).transpose()?;
            let failure = if ended == Some(true) { self.failure(index) } else { None };
            failures.extend(failure.map(|failure| (index, failure)));
        }
        // Of those noticed in one moment, one that crashed is the likelier cause than one that gave up.
        failures.sort_by_key(|(_, failure)| !failure.is_crash());
        for (index, failure) in failures {
            self.take_failure(index, failure);
        }
        if self.ranks.iter().all(|rank| rank.end.is_some()) {
            self.finish();
        }
        Ok(())
    }

    fn take_failure(&mut self, index: usize, failure: Failure) {
        self.failed.push(index);
        let (first, keep) = (self.failed.len() == 1, self.job.on_failure == OnFailure::Keep);
        // Ended by us for the failure of another node.
        let is_consequence = self.cause.is_some() && failure.is_due_to(&self.sent);
        if first && !is_consequence || keep && !failure.is_due_to(&self.sent) {
            self.tell(index, failure);
        }
        if first && !keep && !is_consequence {
            if let Some(nodes) = &self.nodes {
                nodes.tell(News::Failed { node: self.job.node, failure });
            }
            self.fail();
        }
    }

    fn failure(&self, index: usize) -> Option<Failure> {
        let rank = self.ranks.get(index)?;
        let end = rank.end.filter(|end| !end.is_success())?;
        Some(Failure { rank: rank.written.rank, end })
    }

    fn tell(&mut self, index: usize, failure: Failure) {
        let Some(rank) = self.ranks.get_mut(index) else { return };
        rank.drain(&mut self.buffer, &mut self.printer);
        self.printer.say(&format!("{failure}"));
        let tail = &rank.written.tail;
        if tail.is_empty() || failure.is_due_to(&self.sent) {
            return;
        }
        self.printer.say(&format!("the last lines of rank {}:", failure.rank));
        tail.lines().for_each(|line| self.printer.quote(line));
    }

    fn end_others(&mut self) {
        let running = self.running();
        if !running.is_empty() {
            self.printer.say(&format!("ending {}", list(&running)));
            self.tell_to_end(Signal::TERM);
        }
    }

    fn running(&self) -> Vec<usize> {
        let running = self.ranks.iter().filter(|rank| rank.end.is_none());
        running.map(|rank| rank.written.rank).collect()
    }

    fn look_at_clock(&mut self) {
        let now = Instant::now();
        let is_past = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_past(self.end_at) {
            self.end_at = None;
            self.end_others();
        }
        if is_past(self.kill_at) {
            let (running, told) = (list(&self.running()), signals::name(self.told.as_raw()));
            self.printer
                .say(&format!("killing {running}: no end {:?} after {told}", self.job.grace));
            self.kill();
        }
        if is_past(self.leave_at) {
            self.leave_at = None;
            if self.over { self.abandon_output() } else { self.leave() }
        }
    }

    /// The kernel does not let go of ranks that have been killed, or does not let us kill them.
    fn leave(&mut self) {
        for (index, rank) in self.ranks.iter_mut().enumerate().filter(|(_, r)| r.end.is_none()) {
            rank.end = Some(End::Signal { number: Signal::KILL.as_raw(), core: false });
            self.failed.push(index);
        }
        self.finish();
    }

    /// All ranks have ended: what they left behind goes too, and the rest of the output is read.
    fn finish(&mut self) {
        self.over = true;
        (self.end_at, self.kill_at) = (None, None);
        self.end_processes();
        // Output that nobody reads must not keep an interrupted job.
        let most = if self.at_once { READERS_AT_ONCE } else { self.job.grace };
        let most = most.clamp(READERS_AT_ONCE, READERS);
        self.leave_at = self.interrupted.map(|_| Instant::now() + most);
        let (others, lost) = (self.other_failures(), self.lost());
        if self.job.on_failure == OnFailure::Keep {
            if !lost.is_empty() && self.code() == 0 {
                let verb = if lost.len() == 1 { "was" } else { "were" };
                let finished = list(&self.finished());
                self.printer.say(&format!("{} {verb} lost; {finished} finished", list(&lost)));
            }
        } else if !others.is_empty() {
            let others: Vec<_> =
                others.iter().map(|f| format!("rank {} ({})", f.rank, f.end)).collect();
            self.printer.say(&format!("also failed: {}", others.join(", ")));
        }
    }

    fn end_processes(&mut self) {
        let left = descendants::end_all();
        if !left.is_empty() {
            let left: Vec<_> = left.into_iter().map(|pid| pid.as_raw_nonzero()).collect();
            self.printer.say(&format!("these processes cannot be killed: {left:?}"));
        }
    }

    /// Reads on as long as there is room, and then lets the output come to its end.
    fn read_rest(&mut self) {
        for rank in &mut self.ranks {
            rank.read_rest(&mut self.buffer, &mut self.printer);
        }
        if self.ranks.iter().all(|rank| rank.pipes().next().is_none()) {
            self.printer.finish();
        }
    }

    fn failures(&self) -> impl Iterator<Item = Failure> {
        self.failed.iter().filter_map(|&index| self.failure(index))
    }

    /// The ranks that ended well.
    fn finished(&self) -> Vec<usize> {
        let well = self.ranks.iter().filter(|rank| rank.end.is_some_and(End::is_success));
        well.map(|rank| rank.written.rank).collect()
    }

    /// The ranks without which the others had to go on: the first that failed, and all that crashed.
    fn lost(&self) -> Vec<usize> {
        let gone = self.failures().enumerate().filter(|(at, failure)| {
            (*at == 0 || failure.is_crash()) && !failure.is_due_to(&self.sent)
        });
        let mut lost: Vec<_> = gone.map(|(_, failure)| failure.rank).collect();
        lost.sort_unstable();
        lost
    }

    /// The exit code of the job.
    fn code(&self) -> u8 {
        let (first, lost) = (self.failures().next(), self.lost());
        let survivor = self.failures().find(|failure| !lost.contains(&failure.rank));
        let decisive = match self.job.on_failure {
            OnFailure::Keep if !self.finished().is_empty() => survivor,
            OnFailure::Keep => survivor.or(first),
            OnFailure::Kill => first,
        };
        let own = decisive.map_or(0, |failure| failure.end.code());
        match &self.cause {
            Some(News::Failed { failure, .. }) => failure.end.code(),
            _ if self.is_cut_off && decisive.is_none_or(|f| f.is_due_to(&self.sent)) => 1,
            _ => own,
        }
    }

    /// The failures after the first that are not our own doing.
    fn other_failures(&self) -> Vec<Failure> {
        self.failures().skip(1).filter(|failure| !failure.is_due_to(&self.sent)).collect()
    }

    fn outcome(mut self) -> Outcome {
        let first = self.failures().next();
        Outcome {
            code: self.code(),
            first,
            others: self.other_failures(),
            interrupted: self.interrupted,
            stdout: self
                .ranks
                .iter_mut()
                .filter_map(|rank| rank.written.collected.take())
                .collect(),
        }
    }
}

impl Drop for Launch<'_> {
    fn drop(&mut self) {
        // Some could not be started, or something else has gone wrong.
        if !self.over {
            descendants::end_all();
        }
    }
}

/// `rank 3`, `ranks 0, 3`.
fn list(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}
