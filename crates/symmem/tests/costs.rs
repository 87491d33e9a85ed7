//! Ranks that know different costs come to the same plan.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use symmem::internals::Costs;
use symmem::{Group, ReduceOp, World};
use symmem_testing::{Ranks, test_name};

/// Nothing is worth a second barrier.
const DEAR_BARRIERS: Costs =
    Costs { exchange: u32::MAX, switch: u32::MAX, staged: 1, fresh: 1, ..Costs::BUILT_IN };
/// Nothing is worth being staged.
const DEAR_LINES: Costs =
    Costs { exchange: 1, flag: 1, switch: 1, staged: u32::MAX, ..Costs::BUILT_IN };

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What is logged while `work` runs.
fn logged(work: impl FnOnce()) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, work);
    String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
}

/// Adds up and gathers 2 KiB of each rank, checks both, and gives back what was logged.
fn reduce_and_gather(group: &Group) -> String {
    let mut x = group.alloc::<u32>(512).unwrap().rendezvous(group).unwrap();
    let (ranks, rank) = (group.size() as u32, group.rank() as u32);
    let said = logged(|| {
        for round in 0..5 {
            x.local_mut().iter_mut().zip(round..).for_each(|(x, i)| *x = i * (rank + 1));
            x.all_reduce(ReduceOp::Sum).unwrap();
            let sum = ranks * (ranks + 1) / 2;
            assert!(x.local().iter().zip(round..).all(|(x, i)| *x == i * sum));
        }
    });
    x.local_mut().fill(rank);
    let mut all = vec![u32::MAX; 512 * group.size()];
    x.all_gather(&mut all).unwrap();
    assert!(all.chunks(512).zip(0..).all(|(part, rank)| part.iter().all(|x| *x == rank)));
    said
}

#[test]
fn ranks_with_different_costs_plan_with_those_of_the_groups_first() {
    Ranks::new(3).env("COSTS_IN", "{dir}").start(test_name!(), || {
        let rank = std::env::var("RANK").unwrap();
        let path = PathBuf::from(std::env::var_os("COSTS_IN").unwrap()).join(format!("of-{rank}"));
        match rank.as_str() {
            "0" => DEAR_BARRIERS.write(&path).unwrap(),
            "1" => DEAR_LINES.write(&path).unwrap(),
            _ => std::fs::write(&path, "version 1\nprocessor none\nlaid").unwrap(),
        }
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_COSTS", &path) };
        let world = World::from_env().unwrap();
        let said = reduce_and_gather(&world);
        assert_eq!(said.matches("chosen=Staged").count(), 5, "{said}");
        if rank != "0" {
            let said = reduce_and_gather(&world.subgroup(&[1, 2]).unwrap());
            assert_eq!(said.matches("chosen=TwoShot").count(), 5, "{said}");
        }
        world.barrier().unwrap();
        std::fs::remove_file(path).unwrap();
    });
}

/// An exchange costs nothing, and fetching a line all the more: each rank reduces its share, however short.
#[test]
fn shares_of_every_length_reach_all_ranks() {
    const CHEAP_EXCHANGES: Costs = Costs {
        exchange: 1,
        flag: 1,
        switch: 1,
        staged: 1,
        fresh: u32::MAX / 64,
        ..Costs::BUILT_IN
    };
    Ranks::new(5).env("COSTS_IN", "{dir}").start(test_name!(), || {
        let rank = std::env::var("RANK").unwrap();
        let path = PathBuf::from(std::env::var_os("COSTS_IN").unwrap()).join(format!("of-{rank}"));
        CHEAP_EXCHANGES.write(&path).unwrap();
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_COSTS", &path) };
        let world = World::from_env().unwrap();
        for len in 1..400_u32 {
            let mut data: Vec<u32> = (0..len).map(|i| i * (world.rank() as u32 + 1)).collect();
            world.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let wrong = data.iter().zip(0..).find(|(got, i)| **got != i * 15);
            assert_eq!(wrong, None, "of {len}");
        }
        world.barrier().unwrap();
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn a_file_that_cannot_be_used_is_told_once_and_changes_nothing() {
    Ranks::new(2).env("COSTS_IN", "{dir}").start(test_name!(), || {
        let rank = std::env::var("RANK").unwrap();
        let path = PathBuf::from(std::env::var_os("COSTS_IN").unwrap()).join(format!("of-{rank}"));
        std::fs::write(&path, "no costs at all").unwrap();
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_COSTS", &path) };
        let said = logged(|| {
            let world = World::from_env().unwrap();
            for _ in 0..3 {
                reduce_and_gather(&world.subgroup(&[0, 1]).unwrap());
            }
            world.barrier().unwrap();
        });
        let warnings = said.lines().filter(|line| line.contains("WARN"));
        let warnings: Vec<_> =
            warnings.filter(|line| line.contains("is ignored: it does")).collect();
        assert_eq!(warnings.len(), if rank == "0" { 1 } else { 0 }, "{said}");
        std::fs::remove_file(path).unwrap();
    });
}
