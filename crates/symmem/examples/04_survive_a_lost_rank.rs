//! One rank is killed in the middle of the work. The others are told who, and finish without it.
//!
//! `cargo run --release -- run -n 4 --on-failure keep -- target/release/examples/04_survive_a_lost_rank`
//!
//! The launcher reports the killed rank, and its exit code is 0, because the others finish. Without `--on-failure keep` it
//! would end them a second after the loss, and its exit code would be that of the killed rank.

use rustix::process::{Signal, getpid, kill_process};
use symmem::{Error, Group, Result, Symmetric, World};

const ROUNDS: u64 = 1000;
/// Where the last rank dies.
const FATAL_ROUND: u64 = 500;

fn main() -> Result<()> {
    let world = World::from_env()?;
    if world.size() == 1 {
        println!("rank 0 of 1: nobody would survive; start several ranks with `symmem run -n 4`");
        return Ok(());
    }
    let doomed = world.size() - 1;
    let mut group: Group = (*world).clone();
    let mut x: Symmetric<u64> = world.alloc(1)?.rendezvous(&group)?;

    // Everyone counts to ROUNDS, in step: before each round all look at all.
    while x.local()[0] < ROUNDS {
        if world.rank() == doomed && x.local()[0] == FATAL_ROUND {
            let _ = kill_process(getpid(), Signal::KILL);
        }
        x = match round(x) {
            Ok(x) => x,
            Err(Lost { x, error }) => {
                println!("rank {}: {error}", world.rank());
                // All survivors come here. They agree on who is left ...
                group = group.shrink()?;
                // ... and take the same memory, with what it holds, into the smaller group.
                x.rendezvous(&group)?
            }
        };
    }
    let count = x.local()[0];
    assert_eq!((count, group.size()), (ROUNDS, world.size() - 1));
    println!(
        "rank {}: counted to {count} with {} of {} ranks",
        world.rank(),
        group.size(),
        world.size()
    );
    group.barrier()
}

/// A peer was lost. The memory is not: an error of `share` or `release` gives it back.
struct Lost {
    x: Memory,
    error: Error,
}

/// The memory as it was when the call failed: in one of two phases, neither of which had begun.
enum Memory {
    Unshared(symmem::Paused<symmem::Shared<u64>>),
    Unreleased(symmem::Paused<Symmetric<u64>>),
}

impl Memory {
    fn rendezvous(self, group: &Group) -> Result<Symmetric<u64>> {
        match self {
            Self::Unshared(paused) => Ok(paused.rendezvous(group)?),
            Self::Unreleased(paused) => Ok(paused.rendezvous(group)?),
        }
    }
}

/// One step of the count: all go on from the highest number that anyone has reached. So it does not matter whether a
/// loss kept some ranks from a step that others had done.
fn round(x: Symmetric<u64>) -> std::result::Result<Symmetric<u64>, Lost> {
    let shared = x.share().map_err(|f| Lost { x: Memory::Unshared(f.kept), error: f.error })?;
    let most = (0..shared.group().size()).filter_map(|r| shared.peer(r).ok()).map(|part| part[0]);
    let most = most.max().unwrap_or(0);
    let mut x =
        shared.release().map_err(|f| Lost { x: Memory::Unreleased(f.kept), error: f.error })?;
    x.local_mut()[0] = most + 1;
    Ok(x)
}
