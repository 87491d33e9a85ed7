//! Ranks that are killed or stopped at any moment of their work over several hosts. `SYMMEM_KILLS` says how many jobs there are;
//! `SYMMEM_TOLD_AFTER` names a file to which each survivor appends after how many microseconds it was told.

use std::io::Write;
use std::time::{Duration, SystemTime};

use symmem::{Error, Group, ReduceOp, Result, World};
use symmem_testing::{Random, Ranks, die, stop_until, test_name};

use super::{ms, rank, set, works};

fn kills() -> usize {
    std::env::var("SYMMEM_KILLS").map_or(8, |n| n.parse().unwrap())
}

fn number(name: &str) -> u64 {
    std::env::var(name).unwrap().parse().unwrap()
}

/// The machine's clock, which all its processes read alike.
fn clock() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// How soon a survivor was told, for whoever wants to know.
fn note(told_after: Duration) {
    if let Some(file) = std::env::var_os("SYMMEM_TOLD_AFTER") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
        file.write_all(format!("{}\n", told_after.as_micros()).as_bytes()).unwrap();
    }
}

/// Joins with the ranks dealt to so many hosts.
fn join_on(hosts: usize) -> Result<World> {
    set("SYMMEM_HOST", &format!("host-{}", rank() % hosts));
    World::from_env()
}

/// One round of everything, checked.
fn work(group: &Group, round: u64) -> Result<()> {
    let (n, own) = (group.size(), group.rank());
    let sum: u64 = (0..n as u64).map(|rank| rank + round).sum();
    group.barrier()?;
    let mut data = vec![own as u64 + round; 1 + (round as usize * 701) % 40_000];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!(data.iter().all(|&value| value == sum), "a wrong sum");
    let (next, last) = ((own + 1) % n, (own + n - 1) % n);
    group.put_signal(next, 0, ms(20_000))?;
    group.wait_signal(last, 0, ms(20_000))?;
    let mut x = group.alloc::<u64>(500)?.rendezvous(group).map_err(|failed| failed.error)?;
    x.local_mut().fill(own as u64 + round);
    x.all_reduce(ReduceOp::Sum)?;
    assert!(x.local().iter().all(|&value| value == sum), "a wrong sum");
    let open = x.open().map_err(|failed| failed.error)?;
    open.put_signal(next, 7, &[round, own as u64], 1, ms(20_000))?;
    open.wait_signal(last, 1, ms(20_000))?;
    let mut got = [0; 2];
    open.get(own, 7, &mut got)?;
    assert_eq!(got, [round, last as u64]);
    open.close().map_err(|failed| failed.error)?;
    Ok(())
}

#[test]
fn killed_ranks_are_named_by_all_who_go_on_without_them() {
    let mut random = Random::unseeded();
    for job in 0..kills() {
        let (n, hosts) = (4 + random.below(2), 2 + random.below(2));
        let (victim, delay) = (random.below(n), random.below(120_000));
        println!("job {job}: rank {victim} of {n} on {hosts} hosts after {delay} µs");
        let ranks = Ranks::new(n).dying(&[victim]).may_leave_files();
        let ranks = ranks.env("DEATH", delay).env("VICTIM", victim).env("HOSTS", hosts);
        ranks.env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
            let victim = number("VICTIM") as usize;
            let world = join_on(number("HOSTS") as usize).unwrap();
            let store = world.store().clone();
            if rank() == victim {
                let store = store.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_micros(number("DEATH")));
                    let now = clock().as_micros() as u64;
                    store.set("test/death", &now.to_le_bytes()).unwrap();
                    die()
                });
            }
            let mut rounds = 0..;
            let lost = rounds.find_map(|round| work(&world, round).err()).unwrap();
            let told = clock();
            let Error::PeerLost { rank: lost, how, .. } = &lost else { panic!("{lost}") };
            assert_eq!(*lost, victim, "{how}");
            let death = store.get("test/death", symmem::Deadline::after(ms(5000))).unwrap();
            let death = Duration::from_micros(u64::from_le_bytes(death.try_into().unwrap()));
            note(told.saturating_sub(death));
            let survivors = world.shrink().unwrap();
            assert!(!survivors.world_ranks().contains(&victim));
            assert_eq!(survivors.size(), world.size() - 1);
            for round in 0..3 {
                work(&survivors, round).unwrap();
            }
            works(&survivors);
        });
    }
}

#[test]
fn stopped_ranks_are_waited_for() {
    let mut random = Random::unseeded();
    for _ in 0..kills().div_ceil(4) {
        let (n, victim, delay) = (4, random.below(4), random.below(60_000));
        let ranks = Ranks::new(n).env("DELAY", delay).env("VICTIM", victim);
        ranks.env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
            let world = join_on(2).unwrap();
            let stopping = (rank() == number("VICTIM") as usize).then(|| {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_micros(number("DELAY")));
                    stop_until(ms(700));
                })
            });
            let begin = std::time::Instant::now();
            let mut round = 0;
            loop {
                work(&world, round).unwrap();
                round += 1;
                let mut done = [u8::from(begin.elapsed() > ms(1500))];
                world.all_reduce(&mut done, ReduceOp::Max).unwrap();
                if done == [1] {
                    break;
                }
            }
            if let Some(thread) = stopping {
                thread.join().unwrap();
            }
        });
    }
}
