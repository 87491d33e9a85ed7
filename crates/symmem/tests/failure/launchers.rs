//! Ranks as their launchers start them, worlds one after the other, and ranks in containers.

use symmem::World;
use symmem_testing::{Ranks, test_name};

fn works(world: &World) {
    let mut x = world.alloc::<u64>(10).unwrap().rendezvous(world).unwrap();
    x.local_mut().fill(world.rank() as u64);
    let shared = x.share().unwrap();
    for rank in 0..world.size() {
        assert_eq!(shared.peer(rank).unwrap(), [rank as u64; 10]);
    }
    shared.release().unwrap();
}

/// Turns torchrun's variables, which the harness sets, into another launcher's.
fn as_launched_by(rank: &str, size: &str, local_rank: &str) {
    let names = [("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local_rank)];
    for (from, to) in names {
        let value = std::env::var(from).unwrap();
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::remove_var(from) };
        // SAFETY: as above.
        unsafe { std::env::set_var(to, value) };
    }
}

macro_rules! launched_by {
    ($($name:ident: $rank:literal, $size:literal, $local_rank:literal;)*) => {
        $(#[test]
        fn $name() {
            for hosted in [true, false] {
                let ranks = Ranks::new(2);
                let ranks = if hosted { ranks } else { ranks.rank_0_hosts_the_store() };
                ranks.start(test_name!(), || {
                    as_launched_by($rank, $size, $local_rank);
                    let world = World::from_env().unwrap();
                    assert_eq!(world.size(), 2);
                    assert_eq!(world.local_rank(), world.rank());
                    works(&world);
                });
            }
        })*
    };
}

launched_by! {
    torchrun_starts_ranks: "RANK", "WORLD_SIZE", "LOCAL_RANK";
    open_mpi_starts_ranks: "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK";
    pmi_starts_ranks: "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID";
    slurm_starts_ranks: "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID";
}

/// Its directory stays, for the next job of the user.
#[test]
fn ranks_that_are_told_of_no_store_use_one_that_only_their_user_can_reach() {
    let look = |job: &mut symmem_testing::Job| {
        use std::os::unix::fs::PermissionsExt;
        let user = rustix::process::geteuid().as_raw();
        let dir = job.dir.join(format!("symmem-{user}"));
        while !dir.exists() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert_eq!(std::fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700);
    };
    let ranks = Ranks::new(3).env("MASTER_ADDR", "").env("MASTER_PORT", "").may_leave_files();
    ranks.rank_0_hosts_the_store().meanwhile(look).start(test_name!(), || {
        as_launched_by("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID");
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("MPI_LOCALNRANKS", "3") };
        works(&World::from_env().unwrap());
        let dir = std::env::var("TMPDIR").unwrap();
        let user = rustix::process::geteuid().as_raw();
        let own = std::path::Path::new(&dir).join(format!("symmem-{user}"));
        // Somebody else's directory in its place.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&own, open).unwrap();
        let e = World::from_env().unwrap_err().to_string();
        assert!(e.contains("mode 0700"), "{e}");
    });
}

#[test]
fn worlds_follow_one_another_over_one_store() {
    Ranks::new(3).start(test_name!(), || {
        for _ in 0..5 {
            let world = World::from_env().unwrap();
            if world.rank() < 2 {
                world.subgroup_builder(&[0, 1]).name("pair").build().unwrap().barrier().unwrap();
            }
            works(&world);
        }
        symmem_testing::assert_nothing_is_held();
    });
}

#[test]
fn worlds_follow_one_another_over_the_store_of_rank_0() {
    Ranks::new(3).rank_0_hosts_the_store().start(test_name!(), || {
        for _ in 0..5 {
            works(&World::from_env().unwrap());
        }
    });
}

const CONTAINER: [&str; 6] = ["unshare", "--user", "--map-root-user", "--pid", "--net", "--fork"];

/// Why no ranks can be started in containers here, if so.
fn no_containers() -> Option<String> {
    let [program, arguments @ ..] = CONTAINER;
    match std::process::Command::new(program).args(arguments).arg("true").output() {
        Ok(done) if done.status.success() => None,
        Ok(done) => Some(String::from_utf8_lossy(&done.stderr).into_owned()),
        Err(e) => Some(e.to_string()),
    }
}

#[test]
fn ranks_in_containers_share_only_a_directory() {
    if let Some(reason) = no_containers() {
        println!("skipped: unshare: {reason}");
        return;
    }
    let ranks = Ranks::new(3).under(&CONTAINER).store_in_dir().env("SYMMEM_SOCKET_DIR", "{dir}");
    ranks.run(test_name!(), |world| {
        works(&world);
        world.subgroup(&[0, 1, 2]).unwrap().barrier().unwrap();
    });
}

#[test]
fn a_death_in_a_container_is_told_to_the_others() {
    if let Some(reason) = no_containers() {
        println!("skipped: unshare: {reason}");
        return;
    }
    let ranks = Ranks::new(3).under(&CONTAINER).store_in_dir().env("SYMMEM_SOCKET_DIR", "{dir}");
    ranks.run(test_name!(), |world| {
        works(&world);
        if world.rank() == 1 {
            // The first process of its container, it does not get its own signals.
            std::process::exit(0);
        }
        assert_eq!(super::lost_in(|| world.barrier()), 1);
        works_without_rank_1(&world);
    });
}

fn works_without_rank_1(world: &World) {
    let group = world.shrink().unwrap();
    assert_eq!(group.world_ranks(), [0, 2]);
    group.barrier().unwrap();
}
