//! The signals that the launcher passes on, and their names.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// The signals that go on to the ranks.
const FORWARDED: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
/// Those of them that ask a program to end.
pub(super) const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Catches signals so that a poll loop can handle them.
///
/// From here on this process no longer dies of them: a program that launches several jobs makes one
/// of these, passes it to each, and stops when an outcome says it was interrupted.
pub struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Starts catching.
    pub fn catch() -> Result<Self> {
        Self::catch_also(&[])
    }

    /// Starts catching, `others` too.
    pub fn catch_also(others: &[i32]) -> Result<Self> {
        let (read, write) = UnixStream::pair().context("cannot make a pipe for signals")?;
        // Under `nohup` the job is meant to survive its terminal.
        let wanted = |signal: &i32| *signal != SIGHUP || !is_ignored(SIGHUP);
        let caught = FORWARDED.iter().chain(others).copied().filter(wanted).chain([SIGCHLD]);
        SignalDelivery::with_pipe(read, write, SignalOnly, caught)
            .map(Self)
            .context("cannot catch signals")
    }

    /// Readable when a signal has come.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }

    /// Sleeps until a signal has come, or until `at`.
    pub fn wait(&self, at: Option<Instant>) -> Result<()> {
        sleep_until(&mut [PollFd::new(&self.fd(), PollFlags::IN)], at)
    }

    /// The signals that came since the last call.
    pub fn take(&mut self) -> Vec<i32> {
        self.0.pending().collect()
    }
}

/// Polls `fds` until one is ready, a signal has come, or it is `at`.
pub(super) fn sleep_until(fds: &mut [PollFd<'_>], at: Option<Instant>) -> Result<()> {
    // Rounded up, so that nobody wakes just before the time.
    let left =
        |at: Instant| at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    let timeout = at.map(left).map(|left| Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot poll"),
    }
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To end.
    First,
    /// To end at once: the second Ctrl-C, or the second SIGTERM.
    Again,
    /// Nothing new.
    Echo,
    /// Something other than to end.
    Other,
}

/// Counts the requests to end.
#[derive(Default)]
pub struct Requests(Option<Instant>);

impl Requests {
    /// Who sends a signal to a process and to its group, as `timeout` and terminals do, means one.
    const ECHO: Duration = Duration::from_millis(100);

    /// What `signal` asks for after those before it.
    pub fn take(&mut self, signal: i32) -> Request {
        if !ENDING.contains(&signal) {
            return Request::Other;
        }
        // SIGHUP and SIGQUIT are never impatience: a terminal that goes away sends the first more than once.
        if ![SIGINT, SIGTERM].contains(&signal) {
            return Request::First;
        }
        if self.0.is_some_and(|before| before.elapsed() < Self::ECHO) {
            return Request::Echo;
        }
        let before = self.0.replace(Instant::now());
        if before.is_none() { Request::First } else { Request::Again }
    }
}

/// Whether this process was started with `signal` ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// `SIGKILL` for 9.
pub fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal)
        .map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_interrupt_is_a_second_one() {
        let mut requests = Requests::default();
        let taken = [SIGUSR1, SIGHUP, SIGINT, SIGTERM].map(|signal| requests.take(signal));
        assert_eq!(taken, [Request::Other, Request::First, Request::First, Request::Echo]);
        std::thread::sleep(2 * Requests::ECHO);
        assert_eq!([SIGQUIT, SIGTERM].map(|s| requests.take(s)), [Request::First, Request::Again]);
    }

    #[test]
    fn signals_have_names_and_unknown_ones_numbers() {
        assert_eq!(name(9), "SIGKILL");
        assert_eq!(name(11), "SIGSEGV");
        assert_eq!(name(40), "signal 40");
    }
}
