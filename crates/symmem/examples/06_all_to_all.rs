//! A mixture of experts: each rank has tokens and some experts, every token goes to one expert, wherever that is, and
//! what the expert made of it comes back.
//!
//! How many tokens go where is known to their sender only. So the numbers, the splits, lie in symmetric memory too.
//!
//! Alone, or as ranks: `cargo run --release -- run -n 4 -- target/release/examples/06_all_to_all`

use symmem::World;

/// Elements of a token.
const WIDTH: usize = 8;
const TOKENS: usize = 50;
/// Experts of each rank.
const EXPERTS: usize = 2;
/// Each expert's tokens begin at a multiple of so many, as fast matrix products like it.
const ALIGN: usize = 4;

/// The expert for a token, by its number among the experts of all ranks. Here anything; in a model, a learned choice.
fn choice(rank: usize, token: usize, experts: usize) -> usize {
    (token * token + 3 * rank) % experts
}

fn element(rank: usize, token: usize, column: usize) -> f32 {
    (rank * 10_000 + token * 10 + column) as f32
}

/// What an expert does.
fn expert(number: usize, x: f32) -> f32 {
    x * 2.0 + number as f32
}

fn main() -> symmem::Result<()> {
    let world = World::from_env()?;
    let (rank, n) = (world.rank(), world.size());

    // The tokens in the order of their experts, and how many there are for each expert.
    let mut order: Vec<usize> = (0..TOKENS).collect();
    order.sort_by_key(|token| choice(rank, *token, n * EXPERTS));
    let mut tokens = world.alloc::<f32>(TOKENS * WIDTH)?.rendezvous(&world)?;
    let mut splits = world.alloc::<i64>(n * EXPERTS)?.rendezvous(&world)?;
    for (row, token) in tokens.local_mut().chunks_exact_mut(WIDTH).zip(&order) {
        splits.local_mut()[choice(rank, *token, n * EXPERTS)] += 1;
        row.iter_mut().enumerate().for_each(|(c, v)| *v = element(rank, *token, c));
    }

    // Room for all tokens of all ranks, should they all want our experts, and what is left free between experts.
    // Were there less, and too little, every rank would get an error that says so.
    let room = n * TOKENS + EXPERTS * ALIGN;
    let mut there = world.alloc::<f32>(room * WIDTH)?.rendezvous(&world)?;
    // How many tokens came for each expert from each rank, and then where they begin in `there`.
    let mut came = world.alloc::<i64>(2 * n * EXPERTS)?.rendezvous(&world)?;
    tokens.all_to_all_v_2d(WIDTH, &mut splits, ALIGN, there.local_mut(), came.local_mut())?;

    // Each expert works on its tokens.
    let mut worked_on = 0;
    let (counts, offsets) = came.local().split_at(n * EXPERTS);
    for (i, (count, offset)) in counts.iter().zip(offsets).enumerate() {
        let rows = *offset as usize * WIDTH..(*offset + *count) as usize * WIDTH;
        let number = rank * EXPERTS + i / n;
        there.local_mut()[rows].iter_mut().for_each(|x| *x = expert(number, *x));
        worked_on += count;
    }

    // The way back needs no bookkeeping: what told us how the tokens came tells how they go.
    let mut back = vec![0.0; TOKENS * WIDTH];
    let mut returned = vec![0; 2 * n * EXPERTS];
    there.all_to_all_v_2d_offset(WIDTH, &mut came, &mut back, &mut returned)?;

    // Every token is where it was, after its expert.
    for (row, token) in back.chunks_exact(WIDTH).zip(&order) {
        let number = choice(rank, *token, n * EXPERTS);
        for (column, x) in row.iter().enumerate() {
            assert_eq!(*x, expert(number, element(rank, *token, column)));
        }
    }
    println!("rank {rank} of {n}: {TOKENS} tokens came back, {worked_on} were worked on here");
    Ok(())
}
