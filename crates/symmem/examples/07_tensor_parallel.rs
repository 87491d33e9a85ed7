//! Two layers of a neural network, y = relu(x · A) · B, cut into one piece per rank.
//!
//! Each rank has some columns of A and the same rows of B. So it computes its part of the hidden layer alone, and from
//! that a summand of every output. The sum of these over the ranks is the result: one all-reduce for two layers.
//!
//! Alone, or as ranks: `cargo run --release -- run -n 4 -- target/release/examples/07_tensor_parallel`

use std::ops::Range;

use symmem::{ReduceOp, World};

const BATCH: usize = 16;
const WIDTH: usize = 48;
const HIDDEN: usize = 100; // need not be divisible by the number of ranks

/// Weights and inputs that need not be stored anywhere: small numbers that look like noise.
fn noise(seed: usize, row: usize, column: usize) -> f32 {
    let x = (seed * 7919 + row * 104_729 + column * 1_299_709) % 1000;
    x as f32 / 1000.0 - 0.5
}

/// The summand of y that the hidden units in `units` contribute.
fn layers(y: &mut [f32], units: Range<usize>) {
    let relu = |row: usize, unit: usize| -> f32 {
        let sum: f32 = (0..WIDTH).map(|k| noise(1, row, k) * noise(2, k, unit)).sum();
        sum.max(0.0)
    };
    for (row, y) in y.chunks_exact_mut(WIDTH).enumerate() {
        for unit in units.clone() {
            let hidden = relu(row, unit);
            y.iter_mut().enumerate().for_each(|(j, y)| *y += hidden * noise(3, unit, j));
        }
    }
}

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());
    let mut y = world.alloc::<f32>(BATCH * WIDTH)?.rendezvous(&world)?; // zero at first

    // This rank's hidden units.
    let units = rank * HIDDEN / n..(rank + 1) * HIDDEN / n;
    layers(y.local_mut(), units.clone());
    y.all_reduce(ReduceOp::Sum)?;

    // The same in one piece. The sums are made in another order, so the last bits may differ.
    let mut whole = vec![0.0; BATCH * WIDTH];
    layers(&mut whole, 0..HIDDEN);
    let difference = y.local().iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 1e-4, "{difference}");

    // But all ranks have the same bits: they stay in step however many layers follow.
    let mut first = y.local().to_vec();
    world.broadcast(&mut first, 0)?;
    assert!(first.iter().zip(y.local()).all(|(a, b)| a.to_bits() == b.to_bits()));
    println!(
        "rank {rank} of {n}: {} of {HIDDEN} hidden units, same result as in one piece",
        units.len()
    );
    Ok(())
}
