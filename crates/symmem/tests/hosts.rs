//! Worlds whose ranks are on several hosts: processes of this machine that get different host names, and connect over TCP.
//!
//! As root, also processes in two network namespaces with a cable between them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

mod hosts {
    use std::time::Duration;

    use symmem::{Error, Group, World};

    mod counterparts;
    mod joining;
    mod killing;
    mod large;
    mod losses;
    mod messages;
    mod namespaces;
    mod settings;
    mod strangers;
    mod ucx;

    fn rank() -> usize {
        std::env::var("RANK").unwrap().parse().unwrap()
    }

    fn set(name: &str, value: &str) {
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var(name, value) };
    }

    /// Joins the world with the ranks below `first` on one host and the others on another.
    fn join(first: usize) -> symmem::Result<World> {
        set("SYMMEM_HOST", if rank() < first { "a" } else { "b" });
        World::from_env()
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Everything that host memory is for.
    fn works(group: &Group) {
        let n = group.size();
        let mut sum = [group.rank() as u64, 1];
        group.all_reduce(&mut sum, symmem::ReduceOp::Sum).unwrap();
        assert_eq!(sum, [(n * (n - 1) / 2) as u64, n as u64]);
        let mut x = group.alloc::<u64>(1000).unwrap().rendezvous(group).unwrap();
        x.local_mut().fill(1 + group.rank() as u64);
        x.all_reduce(symmem::ReduceOp::Sum).unwrap();
        assert!(x.local().iter().all(|&v| v == (n * (n + 1) / 2) as u64));
        drop(x);
        let (next, last) = ((group.rank() + 1) % n, (group.rank() + n - 1) % n);
        group.put_signal(next, 1, ms(10_000)).unwrap();
        group.wait_signal(last, 1, ms(10_000)).unwrap();
        group.barrier().unwrap();
    }

    /// The lost rank that the group names, once it does.
    fn lost_in(group: &Group) -> (usize, String) {
        let begin = std::time::Instant::now();
        loop {
            match group.check() {
                Err(Error::PeerLost { rank, how, .. }) => break (rank, how),
                Err(other) => panic!("{other}"),
                Ok(()) => assert!(begin.elapsed() < ms(20_000), "nobody was lost"),
            }
            std::thread::sleep(ms(1));
        }
    }

    /// A barrier of all ranks, through the store.
    fn store_barrier(world: &World, what: &str) {
        let here = world.store().add(&format!("test/{what}"), 1).unwrap();
        if here == world.size() as i64 {
            world.store().set(&format!("test/{what}/all"), b"1").unwrap();
        }
        let limit = symmem::Deadline::after(ms(30_000));
        world.store().wait(&[&format!("test/{what}/all")], limit).unwrap();
    }
}
