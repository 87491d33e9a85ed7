//! The launcher's one loop: it reads the ranks' output, passes signals on and notices who ends, and how.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM};

use super::job::StoreAddress;
use super::output::{Printer, Stream};
use super::rank::Rank;
use super::{Failure, Job, Outcome, Signals, farewell, signals, spawn};
use crate::guard::Guard;

/// How long ranks may go on after the first failure: those that wait for the lost one hear of it from the library, and
/// shall be able to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs `job` to its end, failure or success: no process of it is left then.
///
/// The ranks are bound to the calling thread: should it end, they are killed.
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
    let mut launch = Launch {
        job,
        signals,
        guard: Some(Guard::start()?),
        ranks: Vec::with_capacity(job.ranks),
        printer: Printer::new(),
        buffer: vec![0; 64 << 10],
        failed: Vec::new(),
        sent: Vec::new(),
        stop_requests: 0,
        interrupted: None,
        end_at: None,
        kill_at: None,
        over: false,
    };
    launch.start(&address)?;
    while !(launch.over && launch.printer.is_idle()) {
        for event in launch.wait()? {
            launch.handle(event)?;
        }
        launch.ranks.iter_mut().for_each(|rank| rank.written.show_fresh(watch));
        launch.look_at_clock();
    }
    let outcome = launch.outcome();
    if job.nodes > 1 && (job.node > 0 || outcome.code() == 0) {
        // Our ranks are done either way; this only decides how long the others have a store.
        if let Err(error) = farewell::part(job, &address.to_string(), signals) {
            tracing::warn!("leaving before the other nodes: {error:#}");
        }
    }
    Ok(outcome)
}

struct Launch<'a> {
    job: &'a Job,
    signals: &'a mut Signals,
    /// `Some` until the end.
    guard: Option<Guard>,
    ranks: Vec<Rank>,
    printer: Printer,
    buffer: Vec<u8>,
    /// Indices of the ranks that failed, first to last.
    failed: Vec<usize>,
    /// The signals that the ranks got from us.
    sent: Vec<i32>,
    stop_requests: usize,
    interrupted: Option<i32>,
    /// When ranks that have not ended by themselves after another's failure are asked to.
    end_at: Option<Instant>,
    /// When patience is over with ranks that have been asked to end, or with readers of their output.
    kill_at: Option<Instant>,
    /// Whether all ranks have ended and all their output has been read.
    over: bool,
}

/// What the loop was woken by.
#[derive(Clone, Copy)]
enum Event {
    Signal,
    Writable(Stream),
    Readable(usize, Stream),
}

impl Launch<'_> {
    fn start(&mut self, address: &StoreAddress) -> Result<()> {
        let guard = self.guard.as_ref().context("no guard")?;
        let inherited = spawn::allow_descriptors(4 * self.job.ranks + 64);
        for local in 0..self.job.ranks {
            let mut command = self.job.command(local, address)?;
            spawn::bind_to_launcher(&mut command, guard.pipe()?, inherited);
            self.ranks.push(Rank::start(self.job.rank(local), command, self.job.collect)?);
        }
        Ok(())
    }

    /// Sleeps until there is something to do. Signals come first: who failed first should be said first.
    fn wait(&self) -> Result<Vec<Event>> {
        let mut events = vec![Event::Signal];
        let mut fds = vec![PollFd::from_borrowed_fd(self.signals.fd(), PollFlags::IN)];
        for (target, fd) in self.printer.targets() {
            events.push(Event::Writable(target));
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::OUT));
        }
        for (index, rank) in self.ranks.iter().enumerate() {
            for (stream, fd) in rank.pipes().filter(|(stream, _)| !self.printer.is_full(*stream)) {
                events.push(Event::Readable(index, stream));
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        let next = [self.end_at, self.kill_at].into_iter().flatten().min();
        let timeout = next.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot poll"),
        }
        let ready = events.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(event, _)| event).collect())
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Signal => return self.take_signals(),
            Event::Writable(target) => {
                if !self.printer.write_some(target) {
                    self.close(target);
                }
            }
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
        if ended.is_empty() { Ok(()) } else { self.look_at_ranks() }
    }

    /// A signal to the launcher is meant for the ranks.
    fn pass_on(&mut self, signal: i32) {
        tracing::debug!(signal = signals::name(signal), "passed on to the ranks");
        if [SIGINT, SIGTERM, SIGHUP, SIGQUIT].contains(&signal) {
            self.interrupted = Some(signal);
        }
        if self.over {
            // Only unread output holds us, and nobody wants it.
            return self.abandon_output();
        }
        self.stop_requests += usize::from([SIGINT, SIGTERM].contains(&signal));
        if self.stop_requests > 1 {
            self.printer.say(&format!("{} again: killing the ranks", signals::name(signal)));
            self.send(Signal::KILL);
        } else if let Some(signal) = Signal::from_named_raw(signal) {
            self.send(signal);
        }
    }

    fn send(&mut self, signal: Signal) {
        self.sent.push(signal.as_raw());
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }

    fn look_at_ranks(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if rank.has_just_ended()? {
                rank.drain(&mut self.buffer, &mut self.printer);
                ended.push(index);
            }
        }
        let failures =
            ended.into_iter().filter_map(|index| self.failure(index).map(|f| (index, f)));
        let mut failures: Vec<_> = failures.collect();
        // Of those noticed in one moment, one that crashed is the likelier cause than one that gave up.
        failures.sort_by_key(|(_, failure)| !failure.is_crash());
        for (index, failure) in failures {
            self.failed.push(index);
            if self.failed.len() == 1 {
                self.tell_first(index, failure);
                self.end_at = match self.interrupted {
                    Some(_) => Some(Instant::now()), // all have been told
                    None => Instant::now().checked_add(LAST_WORDS),
                };
            }
        }
        if !self.over && self.ranks.iter().all(|rank| rank.end.is_some()) {
            self.finish();
        }
        Ok(())
    }

    fn failure(&self, index: usize) -> Option<Failure> {
        let rank = self.ranks.get(index)?;
        let end = rank.end.filter(|end| !end.is_success())?;
        Some(Failure { rank: rank.written.rank, end })
    }

    fn tell_first(&mut self, index: usize, failure: Failure) {
        self.printer.say(&format!("{failure}"));
        let Some(rank) = self.ranks.get(index) else { return };
        let tail = &rank.written.tail;
        if tail.is_empty() || failure.is_due_to(&self.sent) {
            return;
        }
        self.printer.say(&format!("the last lines of rank {}:", failure.rank));
        tail.lines().for_each(|line| self.printer.quote(line));
    }

    fn end_others(&mut self) {
        let running = self.running();
        if running.is_empty() {
            return;
        }
        self.printer.say(&format!("ending {}", list(&running)));
        self.send(Signal::TERM);
        // A grace beyond what the clock can say has no end.
        self.kill_at = Instant::now().checked_add(self.job.grace);
    }

    fn running(&self) -> Vec<usize> {
        let running = self.ranks.iter().filter(|rank| rank.end.is_none());
        running.map(|rank| rank.written.rank).collect()
    }

    fn look_at_clock(&mut self) {
        if self.end_at.is_some_and(|at| at <= Instant::now()) {
            self.end_at = None;
            self.end_others();
        }
        if self.kill_at.is_some_and(|at| at <= Instant::now()) {
            self.kill_at = None;
            if self.over {
                return self.abandon_output();
            }
            let (running, grace) = (self.running(), self.job.grace);
            self.printer
                .say(&format!("killing {}: no end {grace:?} after SIGTERM", list(&running)));
            self.send(Signal::KILL);
        }
    }

    /// All ranks have ended: what they left behind goes too, and the rest of the output is read.
    fn finish(&mut self) {
        self.over = true;
        self.end_at = None;
        // Output that nobody reads must not keep an interrupted job.
        self.kill_at = self.interrupted.and_then(|_| Instant::now().checked_add(self.job.grace));
        for rank in &mut self.ranks {
            rank.signal(Signal::KILL);
            rank.drain(&mut self.buffer, &mut self.printer);
            Stream::BOTH.into_iter().for_each(|stream| rank.close(stream, &mut self.printer));
        }
        let others = self.other_failures();
        if !others.is_empty() {
            let others: Vec<_> =
                others.iter().map(|f| format!("rank {} ({})", f.rank, f.end)).collect();
            self.printer.say(&format!("also failed: {}", others.join(", ")));
        }
    }

    /// The failures after the first that are not our own doing.
    fn other_failures(&self) -> Vec<Failure> {
        let later = self.failed.iter().skip(1).filter_map(|&index| self.failure(index));
        later.filter(|failure| !failure.is_due_to(&self.sent)).collect()
    }

    fn outcome(mut self) -> Outcome {
        Outcome {
            first: self.failed.first().and_then(|&index| self.failure(index)),
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
        self.ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
        // The guard kills the groups too, hence before their numbers are given back.
        self.guard = None;
        self.ranks.iter_mut().for_each(Rank::reap);
        // What the ranks had started dies in its own time, and is reaped by a stranger who may not bother.
        let limit = Instant::now() + Duration::from_millis(100);
        while self.ranks.iter().any(Rank::has_heirs) && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    // Rounded up, so that the loop does not wake just before the time.
    let duration = duration + Duration::from_millis(1);
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// `rank 3`, `ranks 0, 3`.
fn list(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}
