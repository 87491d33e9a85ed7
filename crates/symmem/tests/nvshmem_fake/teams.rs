//! Teams: groups that NVSHMEM's own collectives work on.

use symmem::Error;
use symmem_sys::nvshmem::{Nvshmem, Team};
use symmem_testing::test_name;

use super::{counts, library, open, ranks};

#[test]
fn two_halves_work_at_once() {
    ranks(4).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let half = world.rank() % 2;
        let group = world.subgroup(&[half, half + 2]).unwrap();
        let mut x = gpu.alloc::<u32>(&world, 8).unwrap().rendezvous(&group).unwrap();
        x.write(&[world.rank() as u32; 8], &stream).unwrap();
        // The first that needs a team makes it, together with all ranks.
        x.nvshmem().unwrap().broadcast(1, &stream).unwrap();
        assert_eq!(x.read(&stream).unwrap(), [half as u32 + 2; 8]);
        x.nvshmem().unwrap().barrier(&stream).unwrap();
        assert_eq!(counts(c"nvshmem_team_split_strided").0, 2, "each team by all ranks, once");
        world.barrier().unwrap();
    });
}

#[test]
fn a_rank_of_no_team_takes_part_in_making_one() {
    ranks(3).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let x = gpu.alloc::<u32>(&world, 8).unwrap();
        if world.rank() == 2 {
            gpu.make_team(None).unwrap();
        } else {
            let group = world.subgroup(&[0, 1]).unwrap();
            gpu.make_team(Some(&group)).unwrap();
            let x = x.symmetric(&group).unwrap();
            x.nvshmem().unwrap().barrier(&stream).unwrap();
        }
        world.barrier().unwrap();
    });
}

#[test]
fn ranks_at_odd_distances_make_no_team_and_are_told_so() {
    ranks(4).run(test_name!(), |world| {
        let (_, gpu, stream) = open(&world);
        let x = gpu.alloc::<u32>(&world, 8).unwrap();
        let mut own = gpu.alloc::<u32>(&world, 1).unwrap();
        if world.rank() != 2 {
            let group = world.subgroup(&[0, 1, 3]).unwrap();
            let x = x.symmetric(&group).unwrap();
            let e = x.nvshmem().unwrap().barrier(&stream).unwrap_err();
            assert!(matches!(e, Error::Unavailable { .. }), "{e}");
            assert!(e.to_string().contains("a constant stride apart"), "{e}");
            x.barrier(&stream).unwrap(); // by a kernel, it works
            // Puts and gets need no team, and ranks are the group's: to the last, which is rank 3.
            own.write(&[world.rank() as u32 + 5], &stream).unwrap();
            let at = 2 * group.rank();
            x.nvshmem().unwrap().put(2, at, own.view(), &stream).unwrap();
            x.nvshmem().unwrap().quiet(&stream).unwrap();
            stream.synchronize().unwrap();
            group.barrier().unwrap();
            x.nvshmem().unwrap().get(2, 2, own.view_mut(), &stream).unwrap();
            assert_eq!(own.read(&stream).unwrap(), [6], "what rank 1 has put");
            if world.rank() == 3 {
                assert_eq!(x.read(&stream).unwrap(), [5, 0, 6, 0, 8, 0, 0, 0]);
            }
            group.barrier().unwrap();
        }
        world.barrier().unwrap();
    });
}

#[test]
fn a_team_that_cannot_be_made_is_an_error_on_all_ranks() {
    let plan = "nvshmem_team_split_strided:1";
    ranks(2).env("SYMMEM_FAKE_NVSHMEM_FAIL", plan).run(test_name!(), |world| {
        let (_, gpu, _) = open(&world);
        // Of two ranks, one is too few for a team, and both are the world.
        let alone = world.subgroup(&[world.rank()]).unwrap();
        let e = gpu.make_team(Some(&alone)).unwrap_err().to_string();
        assert!(e.contains("more than one rank"), "{e}");
        let e = gpu.make_team(Some(&world)).unwrap_err().to_string();
        assert!(e.contains("NVSHMEM_MAX_TEAMS"), "{e}");
        world.barrier().unwrap();
    });
}

#[test]
fn there_are_at_most_32_teams() {
    ranks(1).start(test_name!(), || {
        let nvshmem = Nvshmem::open_file(&library()).unwrap();
        nvshmem.init(&nvshmem.unique_id().unwrap(), 0, 1).unwrap();
        assert!(nvshmem.init(&nvshmem.unique_id().unwrap(), 0, 1).is_err(), "once in a process");
        let split = || nvshmem.split(Team::WORLD, 0, 1, 1);
        let teams: Vec<Team> = std::iter::from_fn(|| split().ok().flatten()).collect();
        assert_eq!(teams.len(), 32 - 6, "besides those that there are");
        assert_eq!(nvshmem.team(teams[3]).unwrap(), (0, 1));
        assert_eq!(nvshmem.translate(teams[3], 0, Team::WORLD).unwrap(), Some(0));
        // SAFETY: nothing uses it.
        unsafe { nvshmem.team_destroy(teams[7]) }.unwrap();
        assert_eq!(split().unwrap(), Some(teams[7]));
        assert!(nvshmem.split(Team::WORLD, 0, 1, 2).is_err(), "more than there are");
        // SAFETY: nothing uses anything.
        unsafe { nvshmem.finalize() }.unwrap();
    });
}
