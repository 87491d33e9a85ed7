//! The lifetime of a world: it ends when it is closed, when nothing of it is left, or with the process.
#![allow(unsafe_code)] // S2 (a closed world refuses every call)

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use symmem::store::TcpServer;

use crate::error::usage;

/// A world that this process joined. It lives as long as a group or handle of it.
pub(crate) struct Life {
    world: symmem::World,
    closed: AtomicBool,
    /// The process that joined; a fork of it has not.
    process: u32,
    /// The store, where this rank hosts it.
    _server: Option<TcpServer>,
}

impl Life {
    /// A world that this process has just joined; it is left when the process ends.
    pub(crate) fn new(world: symmem::World, server: Option<TcpServer>) -> Arc<Self> {
        let closed = AtomicBool::new(false);
        let life = Arc::new(Self { world, closed, process: process(), _server: server });
        let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        worlds.retain(|world| world.strong_count() > 0);
        worlds.push(Arc::downgrade(&life));
        life
    }

    pub(crate) fn world(&self) -> &symmem::World {
        &self.world
    }

    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::Relaxed) {
            // SAFETY: as its users were told, nothing touches the memory of a world that they have closed.
            unsafe { self.world.leave_unchecked() };
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Relaxed) && self.process == process()
    }

    pub(crate) fn check_open(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(usage(py, op, "a world that was not closed", "one that was"));
        }
        if self.process != process() {
            let got = "one of the process that this one was forked from";
            return Err(usage(py, op, "a world that this process joined", got));
        }
        Ok(())
    }
}

/// The id of this process. Cached, because the system call takes longer than all other checks of a call.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn process() -> u32 {
    PROCESS.load(Ordering::Relaxed)
}

/// Records the id of this process. The package calls it at import and after every fork.
#[pyfunction]
pub(crate) fn note_process() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
}

/// All worlds of this process, to be left when it ends.
static WORLDS: Mutex<Vec<Weak<Life>>> = Mutex::new(Vec::new());

impl Life {
    /// All worlds of this process that are alive.
    pub(crate) fn all() -> Vec<Arc<Self>> {
        let worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        worlds.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Leaves all worlds in order. The package registers it to run at exit.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>) {
    let worlds = std::mem::take(&mut *WORLDS.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| worlds.iter().filter_map(Weak::upgrade).for_each(|life| life.close()));
}
