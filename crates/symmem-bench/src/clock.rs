//! The clock that all processes of a machine share, and the core that a rank runs on.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::raw;

/// Nanoseconds, on the same scale in every process.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    raw::load_fence(); // nothing of what is timed starts before the clock has been read
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Whether each of `ranks` ranks can have a core of its own. To be asked before this thread is pinned to one.
pub(super) fn has_core_each(ranks: usize) -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| ranks <= cores.get())
}

/// Keeps this thread on one of the cores that it may use, the ranks going around them: where there are more ranks than
/// cores, some kernels would leave several ranks on one core and another idle.
///
/// To be called once the world is joined: the library counts the cores then, to know how patiently to wait.
pub(super) fn pin(rank: usize) -> Result<()> {
    let allowed = sched_getaffinity(None).context("cannot ask for this process's cores")?;
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let core = *cores.get(rank % cores.len().max(1)).context("this process may use no core")?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).with_context(|| format!("cannot stay on core {core}"))
}
