//! The signals that the launcher passes on, and their names.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// The signals that go on to the ranks.
const FORWARDED: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// Catches signals so that a poll loop can handle them.
///
/// From here on this process no longer dies of them: a program that launches several jobs makes one
/// of these, passes it to each, and stops when an outcome says it was interrupted.
pub struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Starts catching.
    pub fn catch() -> Result<Self> {
        let (read, write) = UnixStream::pair().context("cannot make a pipe for signals")?;
        // Under `nohup` the job is meant to survive its terminal.
        let wanted = |signal: &i32| *signal != SIGHUP || !is_ignored(SIGHUP);
        let caught = FORWARDED.into_iter().filter(wanted).chain([SIGCHLD]);
        SignalDelivery::with_pipe(read, write, SignalOnly, caught)
            .map(Self)
            .context("cannot catch signals")
    }

    /// Readable when a signal has come.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }

    /// The signals that came since the last call.
    pub(super) fn take(&mut self) -> Vec<i32> {
        self.0.pending().collect()
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
    fn signals_have_names_and_unknown_ones_numbers() {
        assert_eq!(name(9), "SIGKILL");
        assert_eq!(name(11), "SIGSEGV");
        assert_eq!(name(40), "signal 40");
    }
}
