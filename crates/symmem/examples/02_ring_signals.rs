//! A ring: every rank stores into its neighbour's memory and signals that it has done so.
//!
//! Nobody waits for all ranks, only for the one before it. This is a protocol of our own over raw pointers, so it
//! takes `unsafe`: the compiler cannot know that a signal comes between a store and the load that reads it.
//!
//! `cargo run --release -- run -n 4 -- target/release/examples/02_ring_signals`, or alone.

use std::time::Duration;

use symmem::World;

/// Signals of one channel are independent of those of another, and of barriers.
const CHANNEL: usize = 0;
/// No wait is without an end.
const LIMIT: Duration = Duration::from_secs(10);

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);

    // One element per step: nothing is written twice, so no step can overtake another.
    let x = world.alloc::<u64>(n)?.rendezvous(&world)?;
    let (to_next, mine) = (x.peer_ptr(next)?, x.peer_ptr(rank)?);

    // What came from behind goes on ahead; after n - 1 steps everyone has seen every value.
    let (mut passing, mut sum) = (rank as u64, rank as u64);
    for step in 0..n - 1 {
        // SAFETY: `x` has n elements.
        let slot = unsafe { to_next.add(step) };
        // SAFETY: the neighbour does not read this element before the signal below.
        unsafe { slot.write(passing) };
        world.put_signal(next, CHANNEL, LIMIT)?; // release: what was written before ...
        world.wait_signal(previous, CHANNEL, LIMIT)?; // ... acquire: is seen after
        // SAFETY: `x` has n elements.
        let slot = unsafe { mine.add(step) };
        // SAFETY: the signal said that this element is written, and it is written only once.
        passing = unsafe { slot.read() };
        sum += passing;
    }
    let expected = (0..n as u64).sum::<u64>();
    assert_eq!(sum, expected);
    println!("rank {rank} of {n}: the sum that went round the ring is {sum}");

    // The last store to `x` may still be unread by a neighbour; its own mapping keeps the memory.
    Ok(())
}
