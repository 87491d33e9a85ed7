//! Ranks as threads over one mapping, for the thread sanitizer: `cargo xtask tsan`. Without it, just a test.
//!
//! Data are plain memory, so every access that the protocols do not order is reported. There is no test harness,
//! because the sanitizer sees nothing of what std's compiled parts do, such as waiting for a contended `Mutex`;
//! `tsan.supp` says what is not reported for that reason.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::time::{Duration, Instant};

use symmem::{Pool, Result, World};

const RANKS: usize = 3;
const ROUNDS: u64 = 50;
const LIMIT: Duration = Duration::from_secs(60);

fn phases_show_every_rank_what_every_rank_wrote(world: &World) -> Result<()> {
    let mut x = world.alloc::<u64>(256)?.rendezvous(world)?;
    for round in 0..ROUNDS {
        x.local_mut().fill(round * 10 + world.rank() as u64);
        let shared = x.share()?;
        for rank in 0..RANKS {
            assert!(shared.peer(rank)?.iter().all(|&e| e == round * 10 + rank as u64));
        }
        x = shared.release()?;
    }
    Ok(())
}

fn signals_order_what_raw_pointers_write(world: &World) -> Result<()> {
    let x = world.alloc::<u64>(8)?.rendezvous(world)?;
    let (right, left) = ((world.rank() + 1) % RANKS, (world.rank() + RANKS - 1) % RANKS);
    let (theirs, ours) = (x.peer_ptr(right)?, x.peer_ptr(world.rank())?);
    for round in 0..ROUNDS {
        // SAFETY: the word is ours until the signal and the right neighbour's until it signals back.
        unsafe { theirs.write(round) };
        world.put_signal(right, 0, LIMIT)?;
        world.wait_signal(left, 0, LIMIT)?;
        // SAFETY: as above, seen from the other side.
        assert_eq!(unsafe { ours.read() }, round);
        world.put_signal(left, 1, LIMIT)?;
        world.wait_signal(right, 1, LIMIT)?;
    }
    world.barrier()
}

fn the_allocations_pad_orders_data(world: &World) -> Result<()> {
    let x = world.alloc::<u64>(8)?.rendezvous(world)?;
    let pad = x.handle().signal_pad();
    if world.rank() == 0 {
        let theirs = x.peer_ptr(1)?;
        for round in 0..ROUNDS {
            // SAFETY: ours until the signal, and again after the answer.
            unsafe { theirs.write(round) };
            pad.put(1, 0, LIMIT)?;
            pad.wait(1, 0, LIMIT)?;
        }
    } else if world.rank() == 1 {
        let ours = x.peer_ptr(1)?;
        for round in 0..ROUNDS {
            pad.wait(0, 0, LIMIT)?;
            // SAFETY: ours between signal and answer.
            assert_eq!(unsafe { ours.read() }, round);
            pad.put(0, 0, LIMIT)?;
        }
    }
    world.barrier()
}

fn messages_are_read_as_they_were_written(world: &World) -> Result<()> {
    let (right, left) = ((world.rank() + 1) % RANKS, (world.rank() + RANKS - 1) % RANKS);
    // What the threads share is made by a `OnceLock` at the first message.
    world.send_by(&[0_u64], world.rank(), 2, LIMIT)?;
    world.recv_by(&mut [0_u64], world.rank(), 2, LIMIT)?;
    std::thread::scope(|scope| {
        // Some take many fragments, and some are kept until they are asked for.
        let len = |round: u64| 1 + (round as usize % 3) * 40_000;
        let sending = scope.spawn(move || {
            (0..ROUNDS).try_for_each(|round| {
                world.send_by(&vec![round; len(round)], right, round % 2, LIMIT)
            })
        });
        for round in (0..ROUNDS).map(|round| round ^ 1) {
            let mut data = vec![0; len(round)];
            world.recv_by(&mut data, left, round % 2, LIMIT)?;
            assert!(data.iter().all(|value| *value == round));
        }
        sending.join().unwrap()
    })?;
    world.barrier()
}

/// An address that a thread may take along.
#[derive(Clone, Copy)]
struct SharedWord(*mut u64);

// SAFETY: the barriers order what is done through it.
unsafe impl Send for SharedWord {}

impl SharedWord {
    fn write(self, value: u64) {
        // SAFETY: the caller's rank is the only one to write it, between two barriers.
        unsafe { self.0.write(value) };
    }

    fn read(self) -> u64 {
        // SAFETY: nobody writes it between these two barriers.
        unsafe { self.0.read() }
    }
}

/// Everyone writes its word and reads all words, each behind a barrier on `channel`.
fn cross(world: &World, channel: usize, words: &[SharedWord]) -> Result<()> {
    for round in 0..ROUNDS {
        words[world.rank()].write(round);
        world.barrier_on(channel, LIMIT)?;
        assert!(words.iter().all(|word| word.read() == round));
        world.barrier_on(channel, LIMIT)?;
    }
    Ok(())
}

fn threads_of_one_rank_use_channels_of_their_own(world: &World) -> Result<()> {
    let x = world.alloc::<u64>(64)?.rendezvous(world)?;
    let words = |channel: usize| -> Result<Vec<SharedWord>> {
        (0..RANKS).map(|r| Ok(SharedWord(x.handle().view(r, 8 * channel, 1)?.as_ptr()))).collect()
    };
    let (first, second) = (words(2)?, words(5)?);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || cross(world, 5, &second));
        cross(world, 2, &first)?;
        other.join().unwrap()
    })?;
    world.barrier()
}

fn threads_of_one_rank_take_turns_on_a_channel(world: &World) -> Result<()> {
    let barriers = || (0..ROUNDS).try_for_each(|_| world.barrier_on(3, LIMIT));
    std::thread::scope(|scope| {
        let other = scope.spawn(barriers);
        barriers()?;
        other.join().unwrap()
    })?;
    world.barrier()
}

fn pools_and_ids_give_the_same_memory_again(world: &World) -> Result<()> {
    let pool = Pool::new(world, 1 << 16);
    for round in 0..8 {
        let mut x = pool.alloc::<u64>(128)?.rendezvous(world)?;
        let mut y = world.alloc_persistent::<u64>(7, 128)?.rendezvous(world)?;
        x.local_mut().fill(round);
        y.local_mut().fill(round + 1);
        let (x, y) = (x.share()?, y.share()?);
        let peer = (world.rank() + 1) % RANKS;
        assert!(x.peer(peer)?.iter().all(|&e| e == round));
        assert!(y.peer(peer)?.iter().all(|&e| e == round + 1));
        let _owned = (x.release()?, y.release()?);
    }
    Ok(())
}

fn groups_come_and_go(world: &World) -> Result<()> {
    for round in 0..8 {
        let out = (round % RANKS as u64) as usize;
        if world.rank() == out {
            continue;
        }
        let members: Vec<_> = (0..RANKS).filter(|&r| r != out).collect();
        let group = world.subgroup(&members)?;
        let mut x = group.alloc::<u64>(32)?.rendezvous(&group)?;
        x.local_mut().fill(round);
        let shared = x.share()?;
        assert!(shared.peer(1 - group.rank())?.iter().all(|&e| e == round));
        drop(shared.release()?);
    }
    world.barrier()
}

fn a_barrier_that_timed_out_is_resumed(world: &World) -> Result<()> {
    for round in 0..5 {
        if world.rank() == round % RANKS {
            std::thread::sleep(Duration::from_millis(5));
        }
        while let Err(error) = world.barrier_on(1, Duration::from_millis(1)) {
            assert!(error.to_string().contains("barrier"), "{error}");
        }
    }
    world.barrier()
}

type Check = fn(&World) -> Result<()>;

fn main() {
    let checks: &[(&str, Check)] = &[
        ("phases", phases_show_every_rank_what_every_rank_wrote),
        ("signals", signals_order_what_raw_pointers_write),
        ("allocation pads", the_allocations_pad_orders_data),
        ("messages", messages_are_read_as_they_were_written),
        ("channels", threads_of_one_rank_use_channels_of_their_own),
        ("turns", threads_of_one_rank_take_turns_on_a_channel),
        ("pools and ids", pools_and_ids_give_the_same_memory_again),
        ("groups", groups_come_and_go),
        ("time-outs", a_barrier_that_timed_out_is_resumed),
    ];
    for (name, check) in checks {
        let start = Instant::now();
        let options = World::builder().backend("process").timeout(LIMIT);
        let ended = options.threads(RANKS, |world| check(&world)).unwrap();
        ended.into_iter().for_each(|result| result.unwrap());
        println!("{name}: {:.1} s", start.elapsed().as_secs_f32());
    }
}
