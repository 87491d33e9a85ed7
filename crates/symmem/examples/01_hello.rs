//! Every rank writes into its own buffer and reads everyone else's.
//!
//! Alone: `cargo run --release --example 01_hello`. As four processes:
//! `cargo build --release --examples && cargo run --release -- run -n 4 -- target/release/examples/01_hello`

use symmem::World;

fn main() -> symmem::Result<()> {
    // The launcher tells each process its rank; a process that nobody launched is a world of one.
    let world = World::from_env()?;

    // Memory that peers can map. The rendezvous does so: all ranks call it, once.
    let mut x = world.alloc::<u64>(1024)?.rendezvous(&world)?;

    // In this phase the part of each rank is its own: an ordinary slice.
    x.local_mut().fill(world.rank() as u64 + 1);

    // A barrier, after which everyone may read everyone and nobody may write.
    let shared = x.share()?;
    let mut sum = 0;
    for rank in 0..world.size() {
        sum += shared.peer(rank)?[0];
    }
    let n = world.size() as u64;
    assert_eq!(sum, n * (n + 1) / 2);
    println!("hello from rank {} of {n}: all ranks together hold {sum}", world.rank());
    Ok(())
}
