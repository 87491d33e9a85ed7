//! Heat spreads along a rod that is cut into one piece per rank.
//!
//! Each round has two phases. In the first each rank writes its own piece. In the second everyone reads everyone.
//! The type of the value is the phase, so a program that writes while others read does not compile.
//!
//! `cargo run --release -- run -n 4 -- target/release/examples/03_shared_phases`, or alone.

use symmem::{Symmetric, World};

const CELLS: usize = 20;
const ROUNDS: usize = 400;

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let mut rod: Symmetric<f64> = world.alloc(CELLS)?.rendezvous(&world)?;
    if world.rank() == 0 {
        rod.local_mut()[CELLS / 2] = 1.0; // all heat in one cell; memory is zero at first
    }
    let mut next = vec![0.0; CELLS];
    for _ in 0..ROUNDS {
        let shared = rod.share()?; // `rod` is gone: nobody can write
        let here = shared.local();
        // The ends of the rod keep their heat: beyond them it is as warm as at them.
        let (first, last) = (here[0], here[CELLS - 1]);
        let left = match world.rank() {
            0 => first,
            rank => shared.peer(rank - 1)?[CELLS - 1],
        };
        let right = match world.rank() + 1 {
            end if end == world.size() => last,
            rank => shared.peer(rank)?[0],
        };
        for (i, cell) in next.iter_mut().enumerate() {
            let before = if i == 0 { left } else { here[i - 1] };
            let after = if i + 1 == CELLS { right } else { here[i + 1] };
            *cell = here[i] + 0.25 * (before - here[i]) + 0.25 * (after - here[i]);
        }
        rod = shared.release()?; // all have read: each rank owns its piece again
        rod.local_mut().copy_from_slice(&next);
    }

    // No heat is lost, on whatever piece it is now.
    let shared = rod.share()?;
    let mut total = 0.0;
    for rank in 0..world.size() {
        total += shared.peer(rank)?.iter().sum::<f64>();
    }
    assert!((total - 1.0).abs() < 1e-9, "{total}");
    let own: f64 = shared.local().iter().sum();
    println!(
        "rank {} of {}: {own:.3} of the heat is here, {total:.3} in all after {ROUNDS} rounds",
        world.rank(),
        world.size()
    );
    Ok(())
}
