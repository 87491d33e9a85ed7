//! Every rank has a vector; afterwards every rank has the sum of them all.
//!
//! Alone, or as ranks: `cargo run --release -- run -n 4 -- target/release/examples/05_all_reduce`

use symmem::{ReduceOp, World};

const LEN: usize = 1_000_000;

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());
    let value = |rank: usize, i: usize| (i % 1000) as f32 + 0.1 * rank as f32;

    // In symmetric memory each rank sums its share of the elements, straight from all ranks' memory, and stores the
    // sums straight into it. Nothing is copied on the way.
    let mut x = world.alloc::<f32>(LEN)?.rendezvous(&world)?;
    for (i, v) in x.local_mut().iter_mut().enumerate() {
        *v = value(rank, i);
    }
    x.all_reduce(ReduceOp::Sum)?;

    // Any slice will do, too. It goes through memory that the group keeps for that, piece by piece.
    let mut slice: Vec<f32> = (0..LEN).map(|i| value(rank, i)).collect();
    world.all_reduce(&mut slice, ReduceOp::Sum)?;

    // Element i is ((x0 + x1) + x2) + ... in the order of the ranks, always: the same bits on every rank, by every way.
    for (i, (sum, other)) in x.local().iter().zip(&slice).enumerate() {
        let expected = (1..n).fold(value(0, i), |sum, rank| sum + value(rank, i));
        assert_eq!(sum.to_bits(), expected.to_bits());
        assert_eq!(sum.to_bits(), other.to_bits());
    }
    println!("rank {rank} of {n}: {LEN} sums, the last is {:.1}", x.local()[LEN - 1]);
    Ok(())
}
