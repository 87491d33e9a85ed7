//! Ranks that die or stop in the midst of work.

use std::time::Duration;

use symmem::{Deadline, Error, ReduceOp, World};
use symmem_testing::{Ended, Ranks, assert_nothing_is_held, die, latencies, stop_until, test_name};

use super::{lost_in, ms, timed_out_in};

const MINUTE: Deadline = Deadline::within(Duration::from_secs(60));

fn report(ended: &[Ended]) {
    println!("noticed after {:?}", latencies(ended));
}

/// Rank 1 dies after `delay` while the others are in `call`; they all name it, then and later.
fn dies(test: &str, delay: Duration, call: impl Fn(&World) -> symmem::Result<()>) {
    let ended = Ranks::new(4).dying(&[1]).run(test, |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(delay);
            die();
        }
        assert_eq!(lost_in(|| call(&world)), 1);
        assert_eq!(lost_in(|| world.barrier()), 1);
        assert_eq!(lost_in(|| world.check()), 1);
        assert_eq!(lost_in(|| world.alloc::<u8>(1).unwrap().rendezvous(&world)), 1);
        drop(world);
        assert_nothing_is_held();
    });
    report(&ended);
}

#[test]
fn a_death_in_a_barrier_is_told_to_all() {
    dies(test_name!(), ms(20), |world| world.barrier());
}

#[test]
fn a_death_is_told_to_those_who_sleep() {
    dies(test_name!(), ms(1500), |world| world.barrier());
}

#[test]
fn a_death_in_a_rendezvous_is_told_to_all() {
    dies(test_name!(), ms(20), |world| {
        world.alloc::<u32>(1000)?.rendezvous(world).map(drop).map_err(Into::into)
    });
}

#[test]
fn a_death_before_an_answer_is_told_to_all() {
    dies(test_name!(), ms(20), |world| {
        if world.rank() == 0 {
            world.put_signal(1, 0, MINUTE)?;
        }
        world.wait_signal(1, 0, MINUTE)
    });
}

#[test]
fn a_death_is_told_to_one_who_waits_for_somebody_else() {
    dies(test_name!(), ms(20), |world| world.wait_signal((world.rank() + 2) % 4, 0, MINUTE));
}

#[test]
fn a_death_while_a_slot_is_full_is_told() {
    dies(test_name!(), ms(100), |world| {
        world.put_signal(1, 0, MINUTE)?;
        world.put_signal(1, 0, MINUTE)
    });
}

#[test]
fn a_death_while_a_subgroup_forms_is_told_to_all() {
    dies(test_name!(), ms(20), |world| world.subgroup(&[0, 1, 2, 3])?.ready());
}

#[test]
fn two_deaths_at_once_are_told() {
    let ended = Ranks::new(5).dying(&[1, 3]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if [1, 3].contains(&world.rank()) {
            std::thread::sleep(ms(50));
            die();
        }
        assert!([1, 3].contains(&lost_in(|| world.barrier())));
        let group = world.shrink().unwrap();
        // A rank that was told of one death only may have proposed the other rank: the next attempt is without it.
        let group = if group.size() == 3 { group } else { group.shrink().unwrap() };
        assert_eq!(group.world_ranks(), [0, 2, 4]);
        group.barrier().unwrap();
    });
    report(&ended);
}

/// Survivors learn of two deaths in different orders, and name the same rank all the same, in every kind of wait.
#[test]
fn of_two_deaths_all_survivors_name_the_same() {
    for _ in 0..5 {
        Ranks::new(5).dying(&[1, 3]).run(test_name!(), |world| {
            let pair = world.subgroup(&[0, 1, 2, 3, 4]).unwrap();
            pair.barrier().unwrap();
            let odd = world.subgroup(&[0, 1, 2, 3, 4]).unwrap();
            world.barrier().unwrap();
            if [1, 3].contains(&world.rank()) {
                std::thread::sleep(ms(20));
                die();
            }
            std::thread::sleep(ms([0, 0, 15, 0, 25][world.rank()]));
            let first = match world.rank() {
                0 => lost_in(|| pair.barrier()),
                2 => lost_in(|| world.alloc::<u8>(1).unwrap().rendezvous(&world)),
                _ => lost_in(|| world.subgroup(&[0, 1, 2, 3, 4]).unwrap().ready()),
            };
            assert_eq!(lost_in(|| world.barrier()), first);
            assert_eq!(lost_in(|| pair.barrier()), first);
            assert_eq!(lost_in(|| odd.barrier()), first);
            let group = world.shrink().unwrap();
            let group = if group.size() == 3 { group } else { group.shrink().unwrap() };
            let mut named = [first as u64];
            group.all_reduce(&mut named, ReduceOp::Max).unwrap();
            assert_eq!(named[0], first as u64, "another survivor named another rank");
        });
    }
}

#[test]
fn the_last_survivor_goes_on_alone() {
    Ranks::new(2).dying(&[0]).run(test_name!(), |world| {
        let mut x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(7);
        world.barrier().unwrap();
        if world.rank() == 0 {
            die();
        }
        assert_eq!(lost_in(|| world.barrier()), 0);
        let alone = world.shrink().unwrap();
        assert_eq!((alone.rank(), alone.size()), (0, 1));
        let x = x.rendezvous(&alone).unwrap().share().unwrap();
        assert_eq!(x.peer(0).unwrap(), [7; 10]);
        alone.put_signal(0, 0, MINUTE).unwrap();
        alone.wait_signal(0, 0, MINUTE).unwrap();
        drop((x, alone, world));
        assert_nothing_is_held();
    });
}

#[test]
fn a_death_in_a_shared_phase_leaves_the_memory_to_the_survivors() {
    Ranks::new(4).dying(&[2]).run(test_name!(), |world| {
        let own = world.rank() as u64;
        let mut x = world.alloc::<u64>(1000).unwrap().rendezvous(&world).unwrap();
        x.local_mut().fill(own);
        let shared = x.share().unwrap();
        if own == 2 {
            std::thread::sleep(ms(30));
            die();
        }
        // What the dead one wrote can still be read.
        let failed = shared.release().err().unwrap();
        assert!(matches!(failed.error, Error::PeerLost { rank: 2, .. }), "{}", failed.error);
        let group = world.shrink().unwrap();
        let mut x = failed.kept.rendezvous(&group).unwrap();
        assert!(x.local().iter().all(|v| *v == own));
        x.local_mut().fill(own + 100);
        let shared = x.share().unwrap();
        for (rank, &world_rank) in group.world_ranks().iter().enumerate() {
            assert!(shared.peer(rank).unwrap().iter().all(|v| *v == world_rank as u64 + 100));
        }
        shared.release().unwrap();
    });
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline_and_may_come_back() {
    let limit = ms(1000);
    Ranks::new(3).run(test_name!(), |world| {
        world.barrier().unwrap();
        let x = world.alloc::<u32>(10).unwrap();
        if world.rank() == 1 {
            stop_until(ms(2500));
        } else {
            assert_eq!(timed_out_in(limit, || world.barrier_on(0, limit)), [1]);
            assert_eq!(timed_out_in(limit, || world.wait_signal(1, 1, limit)), [1]);
        }
        world.barrier().unwrap();
        let x = x.rendezvous(&world).unwrap();
        x.share().unwrap().release().unwrap();
    });
}

#[test]
fn a_rank_that_stops_in_a_rendezvous_fails_it_for_all_and_the_next_one_works() {
    let ranks = Ranks::new(3).env("SYMMEM_TIMEOUT", 1);
    ranks.run(test_name!(), |world| {
        let x = world.alloc::<u32>(10).unwrap();
        if world.rank() == 1 {
            stop_until(ms(2000));
        }
        let failed = x.rendezvous(&world).err().unwrap();
        match &failed.error {
            Error::PeerFailed { .. } => assert_eq!(world.rank(), 1),
            Error::Timeout { waiting_for, .. } => assert_eq!(*waiting_for, [1]),
            other => panic!("{other}"),
        }
        world.barrier_on(0, MINUTE).unwrap();
        let x = failed.kept.rendezvous(&world).unwrap();
        x.share().unwrap().release().unwrap();
    });
}

fn is_socket(fd: i32) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    link.is_ok_and(|target| target.to_string_lossy().starts_with("socket:"))
}

/// A child that the dead rank started keeps all its connections open.
#[test]
fn a_death_is_noticed_though_a_child_holds_the_connections() {
    use std::os::fd::BorrowedFd;
    use std::os::unix::process::CommandExt;

    use rustix::io::{FdFlags, fcntl_setfd};
    let ended = Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        world.barrier().unwrap();
        if world.rank() == 1 {
            let mut child = std::process::Command::new("sleep");
            child.arg("3").stdin(std::process::Stdio::null());
            child.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            let sockets: Vec<i32> = (3..256).filter(|fd| is_socket(*fd)).collect();
            let inherit = move || {
                // SAFETY: nobody uses or closes these descriptors in the child before it becomes another program.
                let mut fds = sockets.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) });
                fds.try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()).map_err(Into::into))
            };
            // SAFETY: it makes system calls only.
            unsafe { child.pre_exec(inherit) };
            std::mem::forget(child.spawn().unwrap());
            die();
        }
        assert_eq!(lost_in(|| world.barrier()), 1);
    });
    report(&ended);
}

/// Median and maximum of the time from a death to the notice of each survivor.
#[test]
#[ignore = "a measurement"]
fn deaths_are_noticed_within_milliseconds() {
    let mut all = Vec::new();
    for _ in 0..50 {
        let ended = Ranks::new(4).dying(&[1]).run(test_name!(), |world| {
            world.barrier().unwrap();
            if world.rank() == 1 {
                std::thread::sleep(ms(50));
                die();
            }
            assert_eq!(lost_in(|| world.barrier()), 1);
        });
        all.extend(latencies(&ended));
    }
    all.sort();
    println!(
        "{} notices: median {:?}, maximum {:?}",
        all.len(),
        all[all.len() / 2],
        all[all.len() - 1]
    );
}

#[test]
fn a_death_in_a_collective_leaves_the_survivors_their_memory() {
    let ended = Ranks::new(4).dying(&[1]).run(test_name!(), |world| {
        let mut x = world.alloc::<u64>(100_000).unwrap().rendezvous(&world).unwrap();
        let own = world.rank() as u64;
        x.local_mut().fill(own);
        world.barrier().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(ms(20));
            die();
        }
        assert_eq!(lost_in(|| x.all_reduce(ReduceOp::Sum)), 1);
        assert_eq!(x.local().len(), 100_000);
        assert!(x.local().iter().all(|v| *v == own), "nobody came to the work");
        assert_eq!(lost_in(|| x.all_reduce(ReduceOp::Sum)), 1);
        x.local_mut().fill(own + 1);
        let survivors = world.shrink().unwrap();
        let mut x = x.rendezvous(&survivors).unwrap();
        x.all_reduce(ReduceOp::Sum).unwrap();
        assert!(x.local().iter().all(|v| *v == 1 + 3 + 4));
        drop((x, survivors, world));
        assert_nothing_is_held();
    });
    report(&ended);
}
