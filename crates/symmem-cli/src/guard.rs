//! The guard: a process that kills a job's process groups when the launcher is gone, however it went.
//!
//! It is this same program under a hidden subcommand, in a session of its own. It reads group numbers
//! from a pipe whose other end only the launcher holds; the kernel closes that end when the launcher
//! dies, even of SIGKILL, and then the guard kills the groups and ends. So it never outlives the job.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::run::spawn;

/// The name of the hidden subcommand.
pub const SUBCOMMAND: &str = "guard";

/// The launcher's end of the guard. Dropping it makes the guard kill the groups, and waits for that.
pub struct Guard {
    pipe: Option<OwnedFd>,
    process: Child,
}

impl Guard {
    /// Starts the guard.
    pub fn start() -> Result<Self> {
        let (end, pipe) = std::io::pipe().context("cannot make the guard's pipe")?;
        // Not `current_exe`: that name is gone once the program has been rebuilt.
        let mut command = Command::new("/proc/self/exe");
        command.arg(SUBCOMMAND).current_dir("/");
        // It must not keep the launcher's own output open.
        command.stdin(end).stdout(Stdio::null()).stderr(Stdio::null());
        spawn::detach(&mut command);
        let process = command.spawn().context("cannot start the guard process")?;
        Ok(Self { pipe: Some(pipe.into()), process })
    }

    /// A copy of the pipe, for a child that tells its group to the guard.
    pub fn pipe(&self) -> Result<OwnedFd> {
        let pipe = self.pipe.as_ref().context("the guard is already dismissed")?;
        pipe.as_fd().try_clone_to_owned().context("cannot copy the guard's pipe")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        if let Err(error) = self.process.wait() {
            tracing::warn!(%error, "cannot wait for the guard");
        }
    }
}

/// The hidden subcommand: reads group numbers until the pipe closes, then kills the groups.
pub fn watch() -> Result<ExitCode> {
    // Caught and never looked at: `killall symmem` must not take the guard before the launcher has gone.
    let _ignored = signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    let mut groups = Vec::new();
    let mut number = [0; size_of::<i32>()];
    let mut pipe = std::io::stdin().lock();
    while pipe.read_exact(&mut number).is_ok() {
        // Groups 0 and 1 would mean "my own" and "everyone".
        groups.extend(
            Pid::from_raw(i32::from_ne_bytes(number).max(0)).filter(|group| !group.is_init()),
        );
    }
    for group in groups {
        // Fails only for a group that has ended by itself.
        let _ = kill_process_group(group, Signal::KILL);
    }
    Ok(ExitCode::SUCCESS)
}
