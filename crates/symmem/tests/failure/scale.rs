//! Many more ranks than cores.

use std::time::{Duration, Instant};

use symmem::{Deadline, World};
use symmem_testing::{Ranks, test_name};

fn everything_works(world: World) {
    let begin = Instant::now();
    let (own, n) = (world.rank(), world.size());
    let (next, previous) = ((own + 1) % n, (own + n - 1) % n);
    let minute = Deadline::within(Duration::from_secs(60));
    (0..10).for_each(|_| world.barrier().unwrap());
    let mut x = world.alloc::<u64>(100).unwrap().rendezvous(&world).unwrap();
    for round in 0..5 {
        x.local_mut().fill(own as u64 + 1000 * round);
        let shared = x.share().unwrap();
        for rank in 0..n {
            let expected = rank as u64 + 1000 * round;
            assert!(shared.peer(rank).unwrap().iter().all(|v| *v == expected));
        }
        x = shared.release().unwrap();
    }
    for _ in 0..10 {
        world.put_signal(next, 0, minute).unwrap();
        world.wait_signal(previous, 0, minute).unwrap();
    }
    world.barrier().unwrap();
    if own == 0 {
        println!("{n} ranks took {:?}", begin.elapsed());
    }
}

#[test]
fn sixteen_ranks_work_on_any_number_of_cores() {
    Ranks::new(16).run(test_name!(), everything_works);
}

#[test]
fn seventy_two_ranks_work_on_any_number_of_cores() {
    Ranks::new(72).run(test_name!(), everything_works);
}
