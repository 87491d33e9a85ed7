//! Two threads of one rank on one group: the one with the short limit must not wait for the other.

use std::time::Duration;

use symmem::{Deadline, Group, ReduceOp};

use crate::lane::Runner;
use crate::program::Waiting;

const LONG: Duration = Duration::from_millis(500);
const SHORT: Duration = Duration::from_millis(40);

/// Rank 0 waits twice; the others do not come before it is over.
pub fn run(runner: &mut Runner<'_>, first: Waiting, second: Waiting, _limit: u64) {
    let group = runner.group.clone();
    if group.size() == 1 {
        return;
    }
    if group.rank() != 0 {
        std::thread::sleep(LONG + Duration::from_millis(150));
        return;
    }
    let formed = group.subgroup(&(0..group.size()).collect::<Vec<_>>());
    let Ok(unformed) = formed else { return runner.fault("subgroup in behind".into()) };
    std::thread::scope(|scope| {
        group.set_timeout(LONG);
        scope.spawn(|| wait(&group, &unformed, first, LONG));
        std::thread::sleep(Duration::from_millis(30));
        runner.limit = SHORT;
        let name = format!("behind[{first:?},{second:?}]");
        runner.timed(&group, name, || wait(&group, &unformed, second, SHORT), |()| None);
    });
}

fn wait(group: &Group, unformed: &Group, what: Waiting, limit: Duration) -> symmem::Result<()> {
    match what {
        Waiting::Rendezvous => {
            group.alloc::<u8>(10)?.rendezvous(group)?;
            Ok(())
        }
        Waiting::Slices => group.all_reduce(&mut [0_u8; 100], ReduceOp::Sum),
        Waiting::Barrier => group.barrier_on(0, Deadline::within(limit)),
        Waiting::Forming => unformed.barrier_on(0, Deadline::within(limit)),
    }
}
