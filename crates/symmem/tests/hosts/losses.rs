//! Ranks that die or stop, as the ranks of both hosts see it.

use symmem::Error;
use symmem_testing::{Random, Ranks, die, die_after, stop_until, test_name};

use super::{join, lost_in, ms, rank, store_barrier, works};

#[test]
fn a_killed_rank_is_named_on_both_hosts() {
    for victim in [0, 3] {
        Ranks::new(4).dying(&[victim]).env("VICTIM", victim).start(test_name!(), || {
            let victim: usize = std::env::var("VICTIM").unwrap().parse().unwrap();
            let world = join(2).unwrap();
            let here = world.host_group().unwrap();
            works(&here);
            store_barrier(&world, "working");
            if rank() == victim {
                die();
            }
            let begin = std::time::Instant::now();
            let (lost, how) = lost_in(&world);
            assert_eq!(lost, victim, "{how}");
            println!("told after {:?}: {how}", begin.elapsed());
            if (rank() < 2) == (victim < 2) {
                let Err(Error::PeerLost { rank, .. }) = here.barrier() else { panic!("not lost") };
                assert_eq!(rank, victim % 2);
                let survivors = here.shrink().unwrap();
                assert_eq!(survivors.size(), 1);
                works_alone(&survivors);
            } else {
                works(&here);
            }
            std::thread::sleep(ms(300));
        });
    }
}

fn works_alone(group: &symmem::Group) {
    let mut sum = [3_u32];
    group.all_reduce(&mut sum, symmem::ReduceOp::Sum).unwrap();
    assert_eq!(sum, [3]);
}

/// Longer than a host may be silent.
#[test]
fn a_stopped_rank_is_not_lost() {
    Ranks::new(3).start(test_name!(), || {
        let world = join(1).unwrap();
        store_barrier(&world, "joined");
        if rank() == 2 {
            stop_until(ms(8000));
        } else {
            for _ in 0..85 {
                world.check().unwrap();
                std::thread::sleep(ms(100));
            }
        }
        works(&world.host_group().unwrap());
        store_barrier(&world, "end");
    });
}

/// Every moment of the set-up gets its turn: nobody waits until the deadline, unless the rank died before it could be asked.
#[test]
fn a_rank_that_dies_while_hosts_connect_is_named_by_all() {
    let mut random = Random::unseeded();
    for round in 0..15 {
        let (victim, delay) = (random.below(4), random.below(15_000) as u64);
        let ranks = Ranks::new(4).dying(&[victim]).may_leave_files();
        let ranks = ranks.env("DEATH", delay).env("VICTIM", victim).env("SYMMEM_TIMEOUT", 4);
        println!("round {round}: rank {victim} after {delay} µs");
        ranks.start(test_name!(), || {
            let set = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
            let victim = set("VICTIM") as usize;
            if rank() == victim {
                die_after(std::time::Duration::from_micros(set("DEATH")));
            }
            let blamed = match join(2) {
                Ok(world) => vec![lost_in(&world).0],
                Err(Error::PeerLost { rank, .. }) => vec![rank],
                Err(Error::Timeout { waiting_for, .. }) => waiting_for,
                Err(other) => panic!("{other}"),
            };
            assert_eq!(blamed, [victim]);
            symmem_testing::assert_nothing_is_held();
        });
    }
}

#[test]
fn a_rank_that_stops_before_it_connects_is_named_at_the_deadline() {
    Ranks::new(3).env("SYMMEM_TIMEOUT", 2).start(test_name!(), || {
        if rank() == 2 {
            stop_until(ms(3500));
            join(1).unwrap_err();
            return;
        }
        let begin = std::time::Instant::now();
        match join(1) {
            Err(Error::Timeout { waiting_for, .. }) => assert_eq!(waiting_for, [2]),
            other => panic!("{other:?}"),
        }
        assert!(begin.elapsed() < ms(15_000), "{:?}", begin.elapsed());
    });
}
