//! The guard: the process that the user started. It starts this program again to do the work, passes signals on to it, and
//! ends when the worker has ended.
//!
//! Each of the two ends the job when the other is gone, however it went, because each adopts orphans: when the worker dies,
//! all that is left of the job are children of the guard; when the guard dies, the worker's standard input ends, and the
//! worker kills all below it.

use std::io::{Read, Write, stderr, stdin};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, getpid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGCHLD, SIGTSTP};

use crate::descendants;
use crate::{Request, Requests, Signals, spawn};

/// The name of the hidden subcommand whose arguments are those of the worker.
pub const SUBCOMMAND: &str = "guarded";

/// What the worker may take beyond the grace period to end when told to. It takes less unless something blocks it.
const PATIENCE: Duration = Duration::from_secs(12);
/// The same after a second request, which leaves no grace.
const IMPATIENCE: Duration = Duration::from_secs(6);

/// Runs this program again with the same arguments, as the worker. `grace` is what it gives ranks to end.
pub fn watch(grace: Duration) -> Result<ExitCode> {
    let mut signals = Signals::catch_also(&[SIGTSTP])?;
    descendants::adopt()?;
    // The other end closes with this process, which is how the worker learns of it.
    let (end, _held) = std::io::pipe().context("cannot make the worker's pipe")?;
    // Not `current_exe`: that name is gone once the program has been rebuilt.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("symmem").arg(SUBCOMMAND).args(std::env::args_os().skip(1)).stdin(end);
    spawn::detach(&mut command);
    let worker = command.spawn().context("cannot start the worker process")?;
    let status =
        Watch { worker, grace, requests: Requests::default(), kill_at: None }.run(&mut signals)?;
    descendants::end_all();
    Ok(code(status))
}

struct Watch {
    worker: Child,
    grace: Duration,
    requests: Requests,
    /// When a worker that has been told to end is killed.
    kill_at: Option<Instant>,
}

impl Watch {
    fn run(mut self, signals: &mut Signals) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.worker.try_wait().context("cannot wait for the worker")? {
                return Ok(status);
            }
            signals.wait(self.kill_at)?;
            signals.take().into_iter().for_each(|signal| self.pass_on(signal));
            if self.kill_at.is_some_and(|at| at <= Instant::now()) {
                self.kill_at = None;
                self.send(Signal::KILL);
            }
        }
    }

    fn pass_on(&mut self, signal: i32) {
        if signal == SIGCHLD {
            return;
        }
        if signal == SIGTSTP {
            self.send(Signal::STOP);
            // Returns when somebody continues us.
            let _ = kill_process(getpid(), Signal::STOP);
            return self.send(Signal::CONT);
        }
        let patience = match self.requests.take(signal) {
            Request::First => self.grace.checked_add(PATIENCE),
            Request::Again => Some(IMPATIENCE),
            Request::Echo | Request::Other => None,
        };
        if let Some(at) = patience.and_then(|patience| Instant::now().checked_add(patience)) {
            self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.send(signal);
            // Someone may have stopped it.
            self.send(Signal::CONT);
        }
    }

    fn send(&self, signal: Signal) {
        // It is not reaped yet, so it can only fail if the worker has ended.
        let _ = kill_process(Pid::from_child(&self.worker), signal);
    }
}

/// What a shell would report.
fn code(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        say(format!("the launcher was killed by {}", crate::signal_name(signal)));
        return ExitCode::from(128 | signal as u8);
    }
    ExitCode::from(status.code().unwrap_or(1) as u8)
}

/// Writes to standard error, but does not wait long for somebody who does not read it.
pub(super) fn say(text: String) {
    let (told, heard) = mpsc::channel();
    thread::spawn(move || {
        let _ = writeln!(stderr(), "symmem: {text}");
        let _ = told.send(());
    });
    let _ = heard.recv_timeout(Duration::from_secs(1));
}

/// Makes this process a worker: it ends all its descendants, and itself, when the guard is gone.
pub fn obey() -> Result<()> {
    descendants::adopt()?;
    // So that it can do so even if somebody has stopped it.
    set_parent_process_death_signal(Some(Signal::CONT))?;
    let wait = || {
        // Nothing is ever written there. Any end of it will do, an error too.
        let _ = stdin().lock().read(&mut [0]);
        descendants::end_all();
        // Whatever the other threads are at, and however deep in it they are.
        let _ = kill_process(getpid(), Signal::KILL);
    };
    thread::Builder::new().name("symmem-guarded".into()).spawn(wait)?;
    Ok(())
}
