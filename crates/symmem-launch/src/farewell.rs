//! How the launchers of several nodes part: node 0 hosts the store, so it leaves last.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail};
use symmem::Deadline;
use symmem::store::{Store, TcpStore};

use super::{Job, Signals, signals};

/// Counts the launchers whose ranks have all ended.
const ENDED: &str = "symmem/launchers/ended";

/// How long node 0 waits for nodes that may be gone without a word.
const PATIENCE: Duration = Duration::from_secs(300);

/// Tells node 0 that this node is done; node 0 waits for all the others.
pub(super) fn part(job: &Job, store: &str, signals: &mut Signals) -> Result<()> {
    // It has been there all the time, so if it is not there now, node 0 has gone.
    let store = TcpStore::connect(store, Deadline::after(Duration::from_secs(1)))?;
    let mut ended = store.add(ENDED, 1)?;
    let nodes = i64::try_from(job.nodes)?;
    let deadline = Deadline::after(PATIENCE);
    while job.node == 0 && ended < nodes {
        if deadline.expired() {
            bail!("{} of {nodes} nodes have not ended after {PATIENCE:?}", nodes - ended);
        }
        let ending = |signal: &&i32| signals::ENDING.contains(signal);
        if let Some(&signal) = signals.take().iter().find(ending) {
            bail!("{} while waiting for {} other nodes", signals::name(signal), nodes - ended);
        }
        sleep(Duration::from_millis(20));
        ended = store.add(ENDED, 0)?;
    }
    Ok(())
}
