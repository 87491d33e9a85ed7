//! Ranks, or the store, that fail while the world comes to be.

use std::time::Instant;

use symmem::{Error, World};
use symmem_testing::{Random, Ranks, die, die_after, stop_until, test_name};

use super::{SOON, lost_in, ms, timed_out_in};

fn rank() -> usize {
    std::env::var("RANK").unwrap().parse().unwrap()
}

#[test]
fn a_rank_that_died_before_connecting_is_named_at_the_deadline() {
    Ranks::new(3).dying(&[1]).env("SYMMEM_TIMEOUT", 2).start(test_name!(), || {
        if rank() == 1 {
            die();
        }
        assert_eq!(timed_out_in(ms(2000), World::from_env), [1]);
        symmem_testing::assert_nothing_is_held();
    });
}

#[test]
fn a_rank_that_is_stopped_before_connecting_is_named_at_the_deadline() {
    Ranks::new(3).env("SYMMEM_TIMEOUT", 2).start(test_name!(), || {
        if rank() == 1 {
            stop_until(ms(3500));
            World::from_env().unwrap_err();
        } else {
            assert_eq!(timed_out_in(ms(2000), World::from_env), [1]);
        }
        symmem_testing::assert_nothing_is_held();
    });
}

/// Every moment of the set-up is tried: a rank that has connected is told when it uses the world.
#[test]
fn a_rank_that_dies_while_connecting_is_named_by_all() {
    let mut random = Random::unseeded();
    for round in 0..25 {
        let (victim, delay) = (random.below(4), random.below(12_000) as u64);
        let ranks = Ranks::new(4).dying(&[victim]).may_leave_files();
        let ranks = ranks.env("DEATH", delay).env("VICTIM", victim).env("SYMMEM_TIMEOUT", 4);
        ranks.start(test_name!(), || {
            let set = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
            let victim = set("VICTIM") as usize;
            if rank() == victim {
                die_after(std::time::Duration::from_micros(set("DEATH")));
            }
            let failed = World::from_env().and_then(|world| {
                loop {
                    world.barrier()?;
                }
            });
            let error: Error =
                failed.map(|never: std::convert::Infallible| match never {}).unwrap_err();
            let blamed = match &error {
                Error::PeerLost { rank, .. } => vec![*rank],
                Error::Timeout { waiting_for, .. } => waiting_for.clone(),
                other => panic!("{other}"),
            };
            assert_eq!(blamed, [victim], "{error}");
            symmem_testing::assert_nothing_is_held();
        });
        println!("round {round}: rank {victim} after {delay} µs");
    }
}

/// The same with a rank that stops: it holds up the others until their deadline, wherever it stopped.
#[test]
fn a_rank_that_stops_while_connecting_is_named_by_all() {
    let mut random = Random::unseeded();
    for _ in 0..4 {
        let (victim, delay) = (random.below(3), random.below(8_000) as u64);
        let ranks = Ranks::new(3).env("DELAY", delay).env("VICTIM", victim);
        ranks.env("SYMMEM_TIMEOUT", 1).start(test_name!(), || {
            let set = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
            let victim = set("VICTIM") as usize;
            if rank() == victim {
                std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_micros(set("DELAY")));
                    stop_until(ms(2500));
                });
                let _ = World::from_env().and_then(|world| world.barrier());
                return;
            }
            let failed = World::from_env().and_then(|world| {
                loop {
                    if let Err(e) = world.barrier() {
                        std::thread::sleep(ms(500)); // a rank that leaves is missed by those that still wait
                        break Err::<(), _>(e);
                    }
                }
            });
            let blamed = match failed {
                Err(Error::Timeout { waiting_for, .. }) => waiting_for,
                // Told by one whose deadline came first.
                Err(Error::PeerLost { rank, .. }) => vec![rank],
                Err(other) => panic!("{other}"),
                Ok(()) => unreachable!(),
            };
            // A rank that the stopped one holds up in an earlier step has not answered either.
            assert!(blamed.contains(&victim), "{blamed:?} without {victim}");
        });
    }
}

#[test]
fn the_death_of_the_store_while_ranks_connect_is_told_soon() {
    let kill = |job: &mut symmem_testing::Job| {
        std::thread::sleep(ms(500));
        job.server = None;
    };
    Ranks::new(3).env("SYMMEM_TIMEOUT", 20).meanwhile(kill).start(test_name!(), || {
        if rank() == 2 {
            std::thread::sleep(ms(1000));
            return; // it could only wait for a store to appear
        }
        let begin = Instant::now();
        let e = World::from_env().unwrap_err();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        assert!(e.to_string().contains("store"), "{e}");
        symmem_testing::assert_nothing_is_held();
    });
}

#[test]
fn a_world_outlives_its_store() {
    let kill = |job: &mut symmem_testing::Job| {
        std::thread::sleep(ms(700));
        job.server = None;
    };
    Ranks::new(3).meanwhile(kill).run(test_name!(), |world| {
        for _ in 0..30 {
            let x = world.alloc::<u32>(100).unwrap().rendezvous(&world).unwrap();
            x.share().unwrap().release().unwrap();
            world.subgroup(&[0, 1, 2]).unwrap().barrier().unwrap();
            std::thread::sleep(ms(50));
        }
    });
}

#[test]
fn the_world_goes_on_without_rank_0_that_hosted_the_store() {
    Ranks::new(3).rank_0_hosts_the_store().dying(&[0]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 0 {
            std::thread::sleep(ms(50));
            die();
        }
        assert_eq!(lost_in(|| world.barrier()), 0);
        let group = world.shrink().unwrap();
        assert_eq!(group.world_ranks(), [1, 2]);
        let x = group.alloc::<u32>(10).unwrap().rendezvous(&group).unwrap();
        x.share().unwrap().release().unwrap();
    });
}

/// What joining ended with, in few words: the variant and the ranks that it names.
fn told(result: Result<World, Error>) -> String {
    match result {
        Ok(_) => "joined".into(),
        Err(Error::Timeout { waiting_for, .. }) => format!("waited for {waiting_for:?}"),
        Err(Error::PeerLost { rank, how, .. }) => format!("lost {rank}: {how}"),
        Err(other) => format!("{other}"),
    }
}

/// A rank gives up at its own deadline, and so its socket is closed when the slow one comes: nobody may call it lost.
#[test]
fn a_rank_that_gave_up_because_of_another_is_not_blamed() {
    for slow in 0..3 {
        // The slow one is later than one deadline and within the other.
        let ranks = Ranks::new(3).env("SLOW", slow);
        ranks.start(test_name!(), || {
            let slow: usize = std::env::var("SLOW").unwrap().parse().unwrap();
            let (hasty, patient) = ((slow + 1) % 3, (slow + 2) % 3);
            let timeout = if rank() == hasty { ms(2000) } else { ms(20_000) };
            if rank() == slow {
                std::thread::sleep(ms(4000));
            }
            let begin = Instant::now();
            let options = World::builder().timeout(timeout);
            let told = told(options.join_env());
            println!("rank {} after {:?}: {told}", rank(), begin.elapsed());
            assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
            if rank() == slow {
                let expected = format!("rank {hasty} gave up on this one");
                assert!(told.contains(&expected), "{told}");
            } else {
                assert_eq!(told, format!("waited for [{slow}]"), "rank {} of {patient}", rank());
            }
        });
    }
}

/// Stopped again and again while it connects, and yet alive: the others wait for it.
#[test]
fn a_rank_that_is_slow_is_not_lost() {
    let mut random = Random::unseeded();
    for _ in 0..6 {
        let (victim, delay) = (random.below(3), random.below(10_000) as u64);
        let ranks = Ranks::new(3).env("DELAY", delay).env("VICTIM", victim);
        ranks.env("SYMMEM_TIMEOUT", 30).start(test_name!(), || {
            let set = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
            if rank() == set("VICTIM") as usize {
                std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_micros(set("DELAY")));
                    stop_until(ms(300));
                    std::thread::sleep(ms(1));
                    stop_until(ms(300));
                });
            }
            World::from_env().unwrap().barrier().unwrap();
        });
    }
}

#[test]
fn a_timeout_always_names_somebody() {
    for delay in [0, 200, 900, 980, 1000, 1020, 1100] {
        let ranks = Ranks::new(3).env("SYMMEM_TIMEOUT", 1).env("DELAY", delay);
        ranks.start(test_name!(), || {
            if rank() == 2 {
                std::thread::sleep(ms(std::env::var("DELAY").unwrap().parse().unwrap()));
            }
            if let Err(e) = World::from_env().and_then(|world| world.barrier()) {
                println!("{e}");
                assert!(e.to_string().contains("rank"), "{e}");
                match e {
                    Error::Timeout { waiting_for, .. } => assert!(!waiting_for.is_empty()),
                    Error::PeerLost { rank: lost, .. } => assert_ne!(lost, rank()),
                    _ => {}
                }
            }
        });
    }
}

/// A store that takes connections and says nothing: the error says that it is the store, and in time.
#[test]
fn a_store_that_does_not_answer_is_named_at_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    Ranks::new(2).env("SYMMEM_TIMEOUT", 2).env("MASTER_PORT", port).start(test_name!(), || {
        let begin = Instant::now();
        let e = World::from_env().unwrap_err();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        let address = format!("store at 127.0.0.1:{}", std::env::var("MASTER_PORT").unwrap());
        assert!(e.to_string().contains(&address), "{e}");
    });
}
