//! Transports other than the mesh's own connections that bring messages of ranks on other hosts.

use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Served by the watcher.
pub(crate) trait Carrier: Send + Sync {
    /// Receives what has arrived. Returns how much that was.
    fn serve(&self) -> usize;

    /// Whether a waiting thread has received messages since the last call.
    fn was_visited(&self) -> bool;

    /// Whether the watcher may sleep, briefly, until the descriptor is readable. Otherwise there is something to receive.
    fn may_sleep(&self) -> bool;

    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Ranks that are lost, and how: each once.
    fn lost(&self) -> Vec<(usize, String)>;
}

/// The longest sleep of the watcher, since not everything wakes it.
const NAP: Duration = Duration::from_millis(20);
/// The same while other threads receive the messages. Waking the watcher for these would only slow them down.
const LEFT_ALONE: Duration = Duration::from_millis(1);
/// How often a carrier is served in a row.
const ROUNDS: usize = 64;

/// Receives what has arrived.
pub(super) fn drain(carrier: &dyn Carrier) {
    let _ = (0..ROUNDS).take_while(|_| carrier.serve() > 0).count();
}

/// Receives what has arrived. Returns what to sleep on, and for how long at most.
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
