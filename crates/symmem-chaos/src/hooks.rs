//! How a rank that is a process comes to be killed or stopped.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use crate::board::Board;
use crate::record::{Event, File, Log, now};

/// What a rank that is a process has for its faults.
pub struct Hooks {
    pub board: Board,
    pub log: File,
}

static HOOKS: Mutex<Option<Arc<Hooks>>> = Mutex::new(None);

/// Of the program that this process runs now.
pub fn set(hooks: Option<Arc<Hooks>>) {
    *HOOKS.lock().unwrap_or_else(PoisonError::into_inner) = hooks;
}

fn hooks() -> Option<Arc<Hooks>> {
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Kills this process so many microseconds from now.
pub fn die_after(rank: usize, microseconds: u64) {
    let Some(hooks) = hooks() else { return };
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(microseconds));
        hooks.log.note(Event::Killed { rank, at: now() });
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// Has this process stopped so many microseconds from now, for so many milliseconds.
pub fn stop_after(rank: usize, microseconds: u64, milliseconds: u64) {
    let Some(hooks) = hooks() else { return };
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(microseconds));
        hooks.board.ask_to_stop(rank, milliseconds);
    });
}
