//! Gradients of layers are summed over the ranks while the next layer is computed. Writes to standard error what that saves.
//!
//! Alone, or as ranks: `cargo run --release -- run -n 2 -- target/release/examples/09_overlap`

use std::time::{Duration, Instant};

use symmem::{Pending, Queue, ReduceOp, World};

const LAYERS: usize = 8;
const LEN: usize = 1 << 17;
const ROUNDS: usize = 16;

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());
    let queue = world.queue()?;
    let mut gradients = vec![vec![0.0_f32; LEN]; LAYERS];
    let mut expected = gradients.clone();

    let mut times: [Vec<Duration>; 5] = Default::default();
    for _ in 0..ROUNDS {
        world.barrier()?;
        times[0].push(time(|| {
            gradients.iter_mut().enumerate().for_each(|(layer, out)| compute(rank, layer, out));
            world.barrier()
        })?);
        times[1].push(time(|| one_after_the_other(&world, &mut expected))?);
        times[2].push(time(|| overlapped(&queue, rank, &mut gradients))?);
        assert!(gradients == expected); // the same bits
        world.barrier()?;
        times[3].push(time(|| world.all_reduce(&mut [1.0_f32; 16], ReduceOp::Sum))?);
        times[4]
            .push(time(|| queue.all_reduce(vec![1.0_f32; 16], ReduceOp::Sum).wait().map(drop))?);
    }
    println!(
        "rank {rank} of {n}: {LAYERS} layers, the last sum is {}",
        gradients[LAYERS - 1][LEN - 1]
    );
    if rank == 0 {
        let [compute, sum, overlap, call, job] = times.map(median);
        eprintln!(
            "computed in {compute:.1?}, and summed afterwards in {sum:.1?}, or meanwhile in {overlap:.1?}"
        );
        eprintln!("an all-reduce of 64 bytes: a call takes {call:.1?}, a job {job:.1?}");
    }
    Ok(())
}

fn one_after_the_other(world: &World, gradients: &mut [Vec<f32>]) -> symmem::Result<()> {
    for (layer, gradient) in gradients.iter_mut().enumerate() {
        compute(world.rank(), layer, gradient);
        world.all_reduce(gradient, ReduceOp::Sum)?;
    }
    Ok(())
}

/// Each layer is summed in the background from the moment at which it is ready.
fn overlapped(queue: &Queue, rank: usize, gradients: &mut [Vec<f32>]) -> symmem::Result<()> {
    queue.scope(|scope| {
        let mut pending = Vec::new();
        for (layer, gradient) in gradients.iter_mut().enumerate() {
            compute(rank, layer, gradient);
            pending.push(scope.submit(|group| group.all_reduce(gradient, ReduceOp::Sum)));
        }
        pending.into_iter().try_for_each(Pending::wait)
    })
}

/// Stands for the work on a layer.
fn compute(rank: usize, layer: usize, out: &mut [f32]) {
    for (i, value) in out.iter_mut().enumerate() {
        let x = (i % 1000) as f32 / 1000.0 + layer as f32;
        *value = (0..4).fold(rank as f32, |sum, k| sum * 0.5 + x / (k as f32 + 1.0));
    }
}

fn time(work: impl FnOnce() -> symmem::Result<()>) -> symmem::Result<Duration> {
    let begin = Instant::now();
    work().map(|()| begin.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
