//! Work that is captured once and launched many times.
#![allow(unsafe_code)] // S4

use std::cell::{Cell, RefCell};
use std::sync::Weak;

use symmem_sys::cuda::{self as sys, GraphExec};

use crate::cuda::group::comm::Comm;
use crate::cuda::stream::Stream;
use crate::error::Result;

thread_local! {
    /// How many captures this thread is in the middle of.
    static CAPTURES: Cell<usize> = const { Cell::new(0) };
    /// The groups whose calls it has made since the first of them began.
    static USED: RefCell<Vec<Weak<Comm>>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread is within [`Stream::capture`]: the driver ends a capture if its thread waits or allocates.
pub(crate) fn is_capturing() -> bool {
    CAPTURES.get() > 0
}

/// Notes, within a capture, a group whose kernels will run when the graph does.
#[inline]
pub(crate) fn note_use(comm: &Weak<Comm>) {
    if is_capturing() {
        USED.with_borrow_mut(|used| {
            if !used.iter().any(|known| known.ptr_eq(comm)) {
                used.push(comm.clone());
            }
        });
    }
}

/// Counts a capture, until it goes.
struct Capturing;

impl Capturing {
    fn new() -> Self {
        CAPTURES.set(CAPTURES.get() + 1);
        Self
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        CAPTURES.set(CAPTURES.get() - 1);
        if CAPTURES.get() == 0 {
            USED.take();
        }
    }
}

/// Captured work, ready to be launched. It does not keep the memory that the work accesses alive: the caller must.
#[derive(Debug)]
pub struct Graph {
    exec: GraphExec,
    gpu: crate::cuda::Gpu,
    /// The groups whose calls it repeats.
    groups: Vec<Weak<Comm>>,
}

impl Stream {
    /// Captures what `work` puts into this stream instead of doing it.
    ///
    /// ```no_run
    /// # use symmem::{ReduceOp, World, cuda::Gpu};
    /// # let world = World::from_env()?;
    /// # let gpu = Gpu::open(0)?;
    /// # let stream = gpu.stream()?;
    /// # let mut x = gpu.alloc::<f32>(&world, 1024)?.rendezvous(&world)?;
    /// let graph = stream.capture(|| x.all_reduce(ReduceOp::Sum, &stream))?;
    /// for _ in 0..10 {
    ///     // SAFETY: `x` is alive, and nothing else uses it in the meantime.
    ///     unsafe { graph.launch(&stream)? };
    /// }
    /// stream.synchronize()?;
    /// # Ok::<(), symmem::Error>(())
    /// ```
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let gpu = self.gpu();
        gpu.before_capture(self.raw());
        gpu.call(|driver| driver.capture_begin(self.raw()))?;
        let capturing = Capturing::new();
        let worked = work();
        let groups = USED.with_borrow(Vec::clone);
        drop(capturing);
        let graph = gpu.call(|driver| driver.capture_end(self.raw()));
        let graph = match worked {
            Ok(()) => graph?,
            Err(e) => {
                // It says more than what the end of a broken capture does.
                graph.into_iter().for_each(|graph| destroy(gpu, graph));
                return Err(e);
            }
        };
        let exec = gpu.call(|driver| driver.graph_instantiate(graph));
        destroy(gpu, graph);
        Ok(Graph { exec: exec?, gpu: gpu.clone(), groups })
    }
}

fn destroy(gpu: &crate::cuda::Gpu, graph: sys::Graph) {
    // SAFETY: S4: ours, from a capture, and not used again.
    gpu.give_back(|driver| unsafe { driver.graph_destroy(graph) });
}

impl Graph {
    /// Does all of it once, in `stream`. If a group whose calls it repeats has failed, or any other group on the device, this
    /// returns its error and launches nothing.
    ///
    /// # Safety
    /// Everything that the captured work accesses still exists, and all ranks whose kernels it waits for launch theirs.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        const OP: &str = "launch";
        for comm in self.groups.iter().filter_map(Weak::upgrade) {
            comm.check_alone(OP)?;
            comm.is_used_in(stream.id());
        }
        self.gpu.check_failures_in(OP)?;
        // SAFETY: as the caller promises.
        unsafe { self.replay(stream) }
    }

    /// Likewise, for a caller that has looked whether something failed.
    ///
    /// # Safety
    /// See [`Graph::launch`].
    pub(crate) unsafe fn replay(&self, stream: &Stream) -> Result<()> {
        self.gpu.opened.occupancy.forget((stream.id(), None)); // of its kernels nothing is known here
        self.gpu.call(|driver| {
            // SAFETY: as the caller promises.
            unsafe { driver.graph_launch(self.exec, stream.raw()) }
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: S4: ours, and not used again; a launch that is under way is still done.
        self.gpu.give_back(|driver| unsafe { driver.graph_exec_destroy(self.exec) });
    }
}
