//! Ranks as processes.

use std::time::Duration;

use symmem::{Error, ReduceOp};
use symmem_testing::{Ranks, die, test_name};

use super::{SOON, kind, out_of_step, soon};

#[test]
fn processes_overlap_calls_with_jobs() {
    Ranks::new(3).run(test_name!(), |world| {
        let queue = world.queue().unwrap();
        let mut data = vec![world.rank() as f32; 200_000];
        queue.scope(|scope| {
            let pending = scope.submit(|group| group.all_reduce(&mut data, ReduceOp::Sum));
            for _ in 0..100 {
                world.barrier().unwrap();
            }
            pending.wait().unwrap();
        });
        assert!(data.iter().all(|sum| *sum == 3.0));
    });
}

#[test]
fn the_death_of_a_rank_ends_its_peers_jobs_at_once() {
    Ranks::new(3).dying(&[1]).run(test_name!(), |world| {
        let queue = world.queue().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [3]);
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            die();
        }
        let pending: Vec<_> = (0..20).map(|_| queue.all_reduce(vec![1], ReduceOp::Sum)).collect();
        for job in pending {
            match soon(|| job.wait()) {
                Err(Error::PeerLost { rank, .. }) => assert_eq!(rank, 1),
                other => panic!("expected a lost rank, got {other:?}"),
            }
        }
        let last = queue.submit(|group| group.barrier());
        soon(|| drop(queue));
        assert_eq!(kind(last.wait()), symmem::ErrorKind::PeerLost);
        let survivors = world.shrink().unwrap();
        let queue = survivors.queue().unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [2]);
    });
}

#[test]
fn ranks_of_several_hosts_have_queues() {
    Ranks::new(3).env("SYMMEM_ADDR", "127.0.0.1").start(test_name!(), || {
        let host = if std::env::var("RANK").unwrap() == "2" { "b" } else { "a" };
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_HOST", host) };
        let world = symmem::World::from_env().unwrap();
        assert_eq!(world.hosts().len(), 2);
        let queue = world.queue().unwrap();
        let mut data = vec![world.rank() as u64; 50_000];
        let reduced = queue.submit(move |group| {
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            Ok(data)
        });
        let mut small = [1];
        world.all_reduce(&mut small, ReduceOp::Sum).unwrap();
        assert_eq!((small, reduced.wait().unwrap()[49_999]), ([3], 3));
        let rank = world.rank();
        let job = queue.submit(move |group| match rank {
            2 => panic!("by design"),
            _ => group.barrier(),
        });
        let result = soon(|| job.wait());
        match rank {
            2 => assert_eq!(kind(result), symmem::ErrorKind::Panicked),
            _ => assert_eq!(out_of_step(result).0, 2),
        }
        queue.resync().done_by(SOON).unwrap();
        assert_eq!(queue.all_reduce(vec![1], ReduceOp::Sum).wait().unwrap(), [3]);
    });
}
