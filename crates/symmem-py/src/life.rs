//! The lifetime of a world: it ends when it is closed, when nothing of it is left, or with the process.
#![allow(unsafe_code)] // S2 (a closed world refuses every call)

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use symmem::store::TcpServer;

use crate::error::usage;
use crate::process_group::Lines;

/// A world that this process joined. It lives as long as a group or handle of it.
pub(crate) struct Life {
    world: symmem::World,
    closed: AtomicBool,
    /// Those that are open: they end before the world.
    queues: Mutex<Vec<Weak<symmem::Queue>>>,
    /// Those of its process groups, whose calls end before the world.
    lines: Mutex<Vec<Weak<Lines>>>,
    /// The process that joined; a fork of it has not.
    process: u32,
    /// The store, where this rank hosts it.
    _server: Option<TcpServer>,
}

impl Life {
    /// A world that this process has just joined; it is left when the process ends.
    pub(crate) fn new(world: symmem::World, server: Option<TcpServer>) -> Arc<Self> {
        let (closed, queues, lines) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let process = process();
        let life = Arc::new(Self { world, closed, queues, lines, process, _server: server });
        let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        worlds.retain(|world| world.strong_count() > 0);
        worlds.push(Arc::downgrade(&life));
        life
    }

    pub(crate) fn world(&self) -> &symmem::World {
        &self.world
    }

    /// Aborts the queue when the world is closed.
    pub(crate) fn add_queue(&self, queue: &Arc<symmem::Queue>) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// Aborts their calls when the world is closed.
    pub(crate) fn add_lines(&self, lines: &Arc<Lines>) {
        let mut all = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|lines| lines.strong_count() > 0);
        all.push(Arc::downgrade(lines));
    }

    fn end_lines(&self) {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let lines: Vec<_> = lines.iter().filter_map(Weak::upgrade).collect();
        lines.iter().for_each(|lines| lines.abort());
        lines.iter().for_each(|lines| lines.drain(true));
    }

    fn end_queues(&self) {
        let queues =
            std::mem::take(&mut *self.queues.lock().unwrap_or_else(PoisonError::into_inner));
        let queues: Vec<_> = queues.iter().filter_map(Weak::upgrade).collect();
        queues.iter().for_each(|queue| queue.abort());
        // Runs when the call that was aborted has ended.
        queues.iter().for_each(|queue| drop(queue.submit(|_| Ok(())).wait()));
    }

    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::Relaxed) {
            if self.process == process() {
                self.end_lines();
                self.end_queues();
            }
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
        self.check_process(py, op)
    }

    /// Refuses what a forked process has from its parent.
    pub(crate) fn check_process(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
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
