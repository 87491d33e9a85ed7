//! Joining, and what works in which group.

use symmem::{Error, ErrorKind};
use symmem_testing::{Ranks, test_name};

use super::{join, ms, rank, set, store_barrier, works};

#[test]
fn two_hosts_of_two_ranks_join_and_work_within_each_host() {
    Ranks::new(4).start(test_name!(), || {
        let world = join(2).unwrap();
        assert_eq!((world.size(), world.rank()), (4, rank()));
        assert_eq!(world.hosts(), [[0, 1], [2, 3]]);
        let local: Vec<bool> = (0..5).map(|rank| world.is_local(rank)).collect();
        let first = rank() < 2;
        assert_eq!(local, [first, first, !first, !first, false]);
        let here = world.host_group().unwrap();
        assert_eq!(here.world_ranks(), if first { [0, 1] } else { [2, 3] });
        assert_eq!(here.hosts(), [[0, 1]]);
        works(&here);
        works(&world);
        world.check().unwrap();
        store_barrier(&world, "end");
        drop(here);
        world.leave().unwrap();
        symmem_testing::assert_nothing_is_held();
    });
}

/// Ranks of a host need not be neighbours, and a host may have one.
#[test]
fn ranks_are_on_hosts_in_any_order() {
    Ranks::new(5).start(test_name!(), || {
        set("SYMMEM_HOST", ["x", "y", "x", "z", "y"][rank()]);
        let world = symmem::World::from_env().unwrap();
        assert_eq!(world.hosts(), [vec![0, 2], vec![1, 4], vec![3]]);
        works(&world.host_group().unwrap());
        let others = world.subgroup(&[1, 2, 3, 4]);
        if let Ok(others) = &others {
            assert_eq!(others.hosts(), [vec![1], vec![0, 3], vec![2]]);
        }
        assert_eq!(others.is_ok(), rank() > 0);
        store_barrier(&world, "end");
    });
}

/// What needs addresses says so, and what to call instead.
#[test]
fn pointers_to_another_host_are_refused_by_name() {
    Ranks::new(4).start(test_name!(), || {
        let world = join(2).unwrap();
        let (far, host) = if rank() < 2 { (2, "b") } else { (0, "a") };
        let told = |e: Error| {
            let text = e.to_string();
            assert_eq!(e.kind(), ErrorKind::Unavailable, "{text}");
            assert!(text.contains(&format!("the memory of rank {far}")), "{text}");
            assert!(text.contains(&format!("({host}); get and put reach it")), "{text}");
        };
        let x = world.alloc::<u64>(8).unwrap().rendezvous(&world).unwrap();
        assert!(x.handle().buffer_ptrs()[rank()] != 0 && x.handle().buffer_ptrs()[far] == 0);
        told(x.peer_ptr(far).unwrap_err());
        told(x.handle().view::<u64>(far, 0, 1).unwrap_err());
        told(x.handle().signal_pad().words(far).unwrap_err());
        let shared = x.share().unwrap();
        told(shared.peer(far).unwrap_err());
        told(shared.peers().unwrap_err());
        told(shared.view::<u8>(far, 0, 1).unwrap_err());
        assert_eq!(shared.peer(rank() ^ 1).unwrap(), [0; 8]); // the other rank of this host
        shared.release().unwrap();
    });
}

#[test]
fn worlds_over_hosts_follow_one_another() {
    Ranks::new(3).start(test_name!(), || {
        for round in 0..4 {
            let world = join(1 + round % 2).unwrap();
            works(&world.host_group().unwrap());
            world.check().unwrap();
        }
        symmem_testing::assert_nothing_is_held();
    });
}

/// A rank that leaves in order, early, is not lost on any host.
#[test]
fn a_rank_that_leaves_is_not_lost() {
    for round in 0..5 {
        Ranks::new(4).env("ROUND", round).start(test_name!(), || {
            let world = join(2).unwrap();
            let here = world.host_group().unwrap();
            works(&here);
            store_barrier(&world, "worked");
            if rank() == std::env::var("ROUND").unwrap().parse::<usize>().unwrap() % 4 {
                return;
            }
            std::thread::sleep(ms(300));
            world.check().unwrap();
            here.check().unwrap();
            std::thread::sleep(ms(300));
        });
    }
}

#[test]
fn a_store_at_a_socket_file_needs_an_address() {
    Ranks::new(2).store_in_dir().start(test_name!(), || {
        let e = join(1).unwrap_err().to_string();
        assert!(e.contains("SYMMEM_ADDR or SYMMEM_IFACE"), "{e}");
        set("SYMMEM_IFACE", "lo");
        let world = join(1).unwrap();
        assert_eq!(world.hosts(), [[0], [1]]);
    });
}
