//! Everything that this process has started, and what that has started in turn, wherever it has gone.
//!
//! A process can leave its process group and its session, and its parent can end, but it cannot leave the tree: an orphan
//! becomes a child of its nearest ancestor that [adopts](adopt). So who adopts and has no children has no descendants.
//! The number of a child cannot pass to a stranger before it is reaped, so signals to children never go astray.

use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, kill_process_group,
    set_child_subreaper, waitid,
};

/// How long processes that were killed may take to be gone. Only the kernel can keep them longer.
pub const DYING: Duration = Duration::from_secs(2);

/// Makes this process the parent of its descendants' orphans.
pub fn adopt() -> Result<()> {
    set_child_subreaper(Some(getpid())).context("cannot become the parent of orphans")
}

/// Reaps the adopted children that have ended.
pub fn reap_except(own: &[Pid]) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    for child in children().into_iter().filter(|child| !own.contains(child)) {
        // Nothing to reap is no error, and nothing else can go wrong with a child.
        let _ = waitid(WaitId::Pid(child), options);
    }
}

/// Kills and reaps all descendants. Returns the children that are still there after [`DYING`].
pub fn end_all() -> Vec<Pid> {
    let limit = Instant::now() + DYING;
    for pass in 0_u32.. {
        let children = children();
        for &child in &children {
            // The group first, at one go: those in it cannot fork their way out. Fails where the child leads none.
            let _ = kill_process_group(child, Signal::KILL);
            let _ = kill_process(child, Signal::KILL);
        }
        if !reap() {
            break;
        }
        if Instant::now() > limit {
            return children;
        }
        // Processes that fork and exit all the time are caught by being quick, others need a moment to die.
        if pass < 100 { yield_now() } else { sleep(Duration::from_millis(1)) }
    }
    Vec::new()
}

/// Reaps all children that have ended; whether there are others.
fn reap() -> bool {
    loop {
        match waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// The children of all threads, ended ones that nobody has reaped among them.
fn children() -> Vec<Pid> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists = threads
        .flatten()
        .map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let numbers = |list: String| -> Vec<_> {
        list.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    lists.flat_map(numbers).filter_map(Pid::from_raw).collect()
}
