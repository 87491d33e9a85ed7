//! What a child does between fork and exec: the only unsafe code of this program.
#![allow(unsafe_code)] // `pre_exec`; relies on none of the S-invariants

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Resource, Rlimit, Signal};
use rustix::process::{
    getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit, setsid,
};

/// Lets the child lead its own process group and die with the calling thread.
///
/// `inherited` is the limit of descriptors that it should have.
pub(super) fn bind_to_launcher(command: &mut Command, inherited: Rlimit) {
    let launcher = getpid();
    let bind = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the line above, and then no signal will come.
        if getppid() != Some(launcher) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        setrlimit(Resource::Nofile, inherited)?;
        Ok(())
    };
    command.process_group(0);
    // SAFETY: the closure makes three system calls and touches neither the heap nor a lock.
    unsafe { command.pre_exec(bind) };
}

/// Puts the child in a session of its own, where no signal of a terminal reaches it.
pub(crate) fn detach(command: &mut Command) {
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(|| Ok(setsid().map(|_| ())?)) };
}

/// Lets this process hold `count` descriptors, if it may; returns the limit it was started with.
pub(super) fn allow_descriptors(count: usize) -> Rlimit {
    let inherited = getrlimit(Resource::Nofile);
    let wanted = inherited.maximum.unwrap_or(u64::MAX).min(count as u64);
    if inherited.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit { current: Some(wanted), ..inherited };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the limit of descriptors");
        }
    }
    inherited
}
