//! Jobs that lose one rank after another, at random moments, until one is left.
//!
//! Every round is one death. The survivors report it, shrink, bring their memory to the new group, check it and go on.
//! No rank may hang, blame one that lives, find wrong data, or hold anything at the end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests, and what they share")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use symmem::{Deadline, Error, Group, Paused, Shared, Symmetric, World};
use symmem_testing::{Ended, Random, Ranks, assert_nothing_is_held, die, mark, test_name};

const RANKS: usize = 8;
const MINUTE: Deadline = Deadline::within(Duration::from_secs(60));
const SEED: &str = "SYMMEM_SOAK_SEED";

/// What all ranks do when one of them dies.
#[derive(Clone, Copy, Debug)]
enum Work {
    Barrier,
    Signals,
    Rendezvous,
    Phases,
    Subgroup,
}

/// One death: who, at what, how long after the ranks have begun with it.
#[derive(Clone, Copy, Debug)]
struct Death {
    victim: usize,
    work: Work,
    delay: Duration,
    /// Already while the others come together after the death before.
    early: bool,
}

/// All ranks of a job know the same plan.
fn plan(seed: u64) -> Vec<Death> {
    let mut random = Random(seed);
    let mut ranks: Vec<usize> = (0..RANKS).collect();
    let death = |_| Death {
        victim: ranks.swap_remove(random.below(ranks.len())),
        work: [Work::Barrier, Work::Signals, Work::Rendezvous, Work::Phases, Work::Subgroup]
            [random.below(5)],
        delay: Duration::from_micros(random.below(3000) as u64),
        early: random.below(3) == 0,
    };
    (1..RANKS).map(death).collect()
}

/// The memory of a rank, in whatever phase a death left it.
enum Memory {
    Symmetric(Symmetric<u64>),
    Sharing(Paused<Shared<u64>>),
    Releasing(Paused<Symmetric<u64>>),
}

struct Rank {
    world_rank: usize,
    group: Group,
    /// Empty only within a call.
    memory: Option<Memory>,
    /// How often the memory was written since the group was formed.
    writes: u64,
    /// What was last written.
    written: u64,
}

impl Rank {
    fn new(world: &World) -> symmem::Result<Self> {
        let memory = world.alloc::<u64>(500)?.rendezvous(world)?;
        world.barrier()?; // nobody dies before all have come so far
        Ok(Self {
            world_rank: world.rank(),
            group: (**world).clone(),
            memory: Some(Memory::Symmetric(memory)),
            writes: 0,
            written: 0,
        })
    }

    /// Works until a rank is lost.
    fn work(&mut self, work: Work) -> Error {
        loop {
            let done = match work {
                Work::Barrier => self.group.barrier(),
                Work::Signals => self.signals(),
                Work::Rendezvous => self.rendezvous(),
                Work::Phases => self.phases(),
                Work::Subgroup => self.subgroup(),
            };
            if let Err(e) = done {
                return e;
            }
        }
    }

    fn signals(&self) -> symmem::Result<()> {
        let (own, n) = (self.group.rank(), self.group.size());
        self.group.put_signal((own + 1) % n, 0, MINUTE)?;
        self.group.wait_signal((own + n - 1) % n, 0, MINUTE)
    }

    fn rendezvous(&self) -> symmem::Result<()> {
        let x = self.group.alloc::<u32>(100)?.rendezvous(&self.group)?;
        x.share()?.release()?;
        Ok(())
    }

    fn subgroup(&self) -> symmem::Result<()> {
        let all: Vec<usize> = (0..self.group.size()).collect();
        self.group.subgroup(&all)?.barrier().map_err(|mut e| {
            // Numbered as in the group, of which the subgroup has all members.
            if let Error::PeerLost { during, .. } = &mut e {
                *during = "subgroup";
            }
            e
        })
    }

    /// Writes, shares, reads what all wrote, and takes the memory back.
    fn phases(&mut self) -> symmem::Result<()> {
        let Some(Memory::Symmetric(mut memory)) = self.memory.take() else { panic!("phase") };
        self.writes += 1;
        self.written = value(self.world_rank, self.writes);
        memory.local_mut().fill(self.written);
        let shared = match memory.share() {
            Ok(shared) => shared,
            Err(failed) => {
                self.memory = Some(Memory::Sharing(failed.kept));
                return Err(failed.error);
            }
        };
        for (rank, &world_rank) in self.group.world_ranks().iter().enumerate() {
            let expected = value(world_rank, self.writes);
            let part = shared.peer(rank).unwrap();
            assert!(part.iter().all(|v| *v == expected), "wrong data of rank {world_rank}");
        }
        match shared.release() {
            Ok(memory) => self.memory = Some(Memory::Symmetric(memory)),
            Err(failed) => {
                self.memory = Some(Memory::Releasing(failed.kept));
                return Err(failed.error);
            }
        }
        Ok(())
    }

    /// Goes on with the survivors: a new group, the same memory, and in it what was written.
    fn recover(&mut self) {
        loop {
            self.group = self.group.shrink().unwrap();
            match self.bring_memory() {
                Ok(()) => break,
                Err(e) => self.report(&e),
            }
        }
        self.writes = 0;
        let Some(Memory::Symmetric(memory)) = &self.memory else { panic!("phase") };
        let (own, written) = (memory.local(), self.written);
        assert!(own.iter().all(|v| *v == written), "wrong data of our own: {} {written}", own[0]);
    }

    fn bring_memory(&mut self) -> symmem::Result<()> {
        let group = &self.group;
        let (memory, error) = match self.memory.take() {
            Some(Memory::Symmetric(memory)) => match memory.rendezvous(group) {
                Ok(memory) => (Memory::Symmetric(memory), None),
                Err(failed) => (Memory::Symmetric(failed.kept), Some(failed.error)),
            },
            Some(Memory::Sharing(memory)) => match memory.rendezvous(group) {
                Ok(memory) => (Memory::Symmetric(memory), None),
                Err(failed) => (Memory::Releasing(failed.kept), Some(failed.error)),
            },
            Some(Memory::Releasing(memory)) => match memory.rendezvous(group) {
                Ok(memory) => (Memory::Symmetric(memory), None),
                Err(failed) => (Memory::Releasing(failed.kept), Some(failed.error)),
            },
            None => panic!("no memory"),
        };
        self.memory = Some(memory);
        error.map_or(Ok(()), Err)
    }

    /// Tells the test whom this rank was told to have lost.
    fn report(&self, e: &Error) {
        let Error::PeerLost { rank, during, how, .. } = e else { panic!("{e}") };
        mark("noticed", format_args!("{} in {during}: {how}", self.group.world_ranks()[*rank]));
    }
}

fn value(world_rank: usize, writes: u64) -> u64 {
    (world_rank as u64) << 32 | writes
}

/// From now on the victim works until its time has come.
fn arm(own: usize, delay: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        mark("killed", own);
        die()
    });
}

fn live_and_die() {
    let deaths = plan(std::env::var(SEED).unwrap().parse().unwrap());
    let world = World::from_env().unwrap();
    let own = world.rank();
    let mut rank = Rank::new(&world).unwrap();
    drop(world);
    let mut armed = false;
    for (i, death) in deaths.iter().enumerate() {
        while rank.group.world_ranks().contains(&death.victim) {
            if death.victim == own && !armed {
                armed = true;
                arm(own, death.delay);
            }
            let e = rank.work(death.work);
            rank.report(&e);
            if let Some(next) = deaths.get(i + 1).filter(|d| d.early && d.victim == own && !armed) {
                armed = true;
                arm(own, next.delay / 4);
            }
            rank.recover();
        }
    }
    assert_eq!(rank.group.world_ranks(), [own]);
    rank.phases().unwrap();
    drop(rank);
    assert_nothing_is_held();
}

/// How long after the death each notice came; none may come before it.
fn check(ended: &[Ended]) -> Vec<Duration> {
    let killed: HashMap<String, Duration> =
        ended.iter().flat_map(|e| e.marks("killed")).map(|(at, who)| (who, at)).collect();
    let notice = |(rank, (at, note)): (usize, (Duration, String))| {
        let (blamed, why) = note.split_once(' ').unwrap();
        let died = killed.get(blamed).filter(|died| **died <= at);
        let story = || ended.iter().map(|e| format!("--- rank {}\n{}", e.rank, e.output));
        let died = died.unwrap_or_else(|| {
            let story: String = story().collect();
            panic!("rank {rank} blamed rank {blamed}, which lived, {why}\n{story}")
        });
        at - *died
    };
    let marks = ended.iter().flat_map(|e| e.marks("noticed").into_iter().map(|m| (e.rank, m)));
    marks.map(notice).collect()
}

fn soak(test: &str, rounds: usize) {
    let given = std::env::var(SEED).ok().and_then(|s| s.parse().ok());
    let mut random = given.map_or_else(Random::unseeded, Random);
    let begin = Instant::now();
    let (mut deaths, mut latencies) = (0, Vec::new());
    while deaths < rounds {
        let seed = random.0;
        println!("{deaths} of {rounds} deaths after {:.1?}; {SEED}={seed}", begin.elapsed());
        let dying: Vec<usize> = plan(seed).iter().map(|death| death.victim).collect();
        let ended = Ranks::new(RANKS).dying(&dying).env(SEED, seed).start(test, live_and_die);
        latencies.extend(check(&ended));
        deaths += dying.len();
        random.next();
    }
    latencies.sort();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    println!(
        "{deaths} deaths in {:.1?}; {} notices: median {:.1?}, 99 of 100 within {:.1?}, all within {:.1?}",
        begin.elapsed(),
        latencies.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

#[test]
fn survivors_of_any_death_go_on() {
    soak(test_name!(), 40);
}

#[test]
#[ignore = "long: SYMMEM_SOAK_ROUNDS deaths, 1000 if not set"]
fn survivors_of_a_thousand_deaths_go_on() {
    let rounds = std::env::var("SYMMEM_SOAK_ROUNDS").ok().and_then(|r| r.parse().ok());
    soak(test_name!(), rounds.unwrap_or(1000));
}
