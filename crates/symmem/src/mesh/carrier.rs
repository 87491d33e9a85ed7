//! What else brings messages of ranks of other hosts, besides the mesh's connections.

use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Served by the watcher.
pub(crate) trait Carrier: Send + Sync {
    /// Takes in what has come; how much that was.
    fn serve(&self) -> usize;

    /// Whether a thread that waits has done so since this was asked last.
    fn was_visited(&self) -> bool;

    /// Whether one may sleep until the descriptor is readable, but not for long; else there is something to take in.
    fn may_sleep(&self) -> bool;

    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Ranks that are lost, and how: each once.
    fn lost(&self) -> Vec<(usize, String)>;
}

/// How long the watcher sleeps at most: not everything wakes it.
const NAP: Duration = Duration::from_millis(20);
/// The same while others take in what comes: to be woken by it would only take their time.
const LEFT_ALONE: Duration = Duration::from_millis(1);
/// How often a carrier is served in a row.
const ROUNDS: usize = 64;

/// Takes in what has come.
pub(super) fn drain(carrier: &dyn Carrier) {
    let _ = (0..ROUNDS).take_while(|_| carrier.serve() > 0).count();
}

/// Takes in what has come; what to be woken by, and after how long at most.
pub(super) fn serve(carrier: &dyn Carrier) -> (Option<BorrowedFd<'_>>, Duration) {
    for _ in 0..ROUNDS {
        if carrier.serve() > 0 {
            continue;
        }
        if carrier.was_visited() {
            break;
        }
        if carrier.may_sleep() {
            return (Some(carrier.descriptor()), NAP);
        }
    }
    (None, LEFT_ALONE)
}
