//! Leftovers of other jobs, and strangers that speak to sockets which are not theirs.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, send,
    socket_with,
};
use symmem::World;
use symmem::store::Store;
use symmem_testing::{Job, Ranks, test_name};

use super::ms;

fn works(world: World) {
    let x = world.alloc::<u32>(10).unwrap().rendezvous(&world).unwrap();
    x.share().unwrap().release().unwrap();
    world.barrier().unwrap();
}

fn unix_socket() -> std::os::fd::OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// A socket file as a crashed rank leaves it, `age` old.
fn leave_socket(path: &Path, age: Duration) {
    let socket = unix_socket();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 1).unwrap();
    make_old(path, age);
}

fn make_old(path: &Path, age: Duration) {
    let then = (SystemTime::now() - age).duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let then = rustix::fs::Timespec { tv_sec: then.as_secs() as i64, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
    let flags = rustix::fs::AtFlags::empty();
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

const HOUR: Duration = Duration::from_secs(3600);

/// The harness finds the directory empty afterwards: what was old is gone.
#[test]
fn what_crashed_jobs_left_behind_is_removed() {
    let leave = |dir: &Path| {
        for number in 0..3 {
            let private = dir.join(format!("symmem-{number:032x}"));
            std::fs::DirBuilder::new().mode(0o700).create(&private).unwrap();
            if number > 0 {
                leave_socket(&private.join("s"), HOUR);
            }
            make_old(&private, HOUR);
        }
    };
    Ranks::new(3).prepare(leave).run(test_name!(), works);
}

#[test]
fn what_crashed_jobs_left_in_a_shared_directory_is_removed() {
    let ranks = Ranks::new(3).env("SYMMEM_SOCKET_DIR", "{dir}").prepare(|dir| {
        for number in 0..10 {
            let private = dir.join(format!("symmem-{number:032x}"));
            std::fs::DirBuilder::new().mode(0o700).create(&private).unwrap();
            leave_socket(&private.join("s"), HOUR);
            make_old(&private, HOUR);
        }
    });
    ranks.run(test_name!(), works);
}

/// What is young may be about to be used, and what is not provably ours is not ours.
#[test]
fn other_files_are_left_alone() {
    const NAMES: [&str; 5] = [
        "symmem-young",
        "other",
        "symmem-notes",
        "symmem-old",
        "symmem-0123456789abcdef0123456789abcdef",
    ];
    let leave = |dir: &Path| {
        leave_socket(&dir.join(NAMES[0]), Duration::ZERO);
        for name in [NAMES[1], NAMES[2], NAMES[4]] {
            std::fs::write(dir.join(name), "").unwrap();
            make_old(&dir.join(name), HOUR);
        }
        leave_socket(&dir.join(NAMES[3]), HOUR);
    };
    let look = |job: &mut Job| {
        std::thread::sleep(ms(500));
        for name in NAMES {
            std::fs::remove_file(job.dir.join(name)).unwrap();
        }
    };
    let ranks = Ranks::new(2).env("SYMMEM_SOCKET_DIR", "{dir}").prepare(leave).meanwhile(look);
    ranks.run(test_name!(), works);
}

/// A client of the store that says where ranks are, to which they then connect; they delete nothing there.
#[test]
fn a_forged_address_leads_to_no_file() {
    let forge = |job: &mut Job| {
        let deadline = symmem::Deadline::within(Duration::from_secs(20));
        let store = symmem::store::TcpStore::connect(&job.store, deadline).unwrap();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let victim = job.dir.join("victim");
        std::fs::write(&victim, "mine").unwrap();
        let link = job.dir.join(format!("symmem-{:032x}", 5));
        std::os::unix::fs::symlink(&job.dir, &link).unwrap();
        // Rank 1 does not come; this is what a postcard of its address is.
        let text = |s: &str| [&[s.len() as u8][..], s.as_bytes()].concat();
        let mut n = 0;
        // Never a file that anybody needs: a rank that follows a forged address may run as root.
        let elsewhere = std::env::temp_dir().join(format!("symmem-victim-{}", std::process::id()));
        std::fs::write(&elsewhere, "mine").unwrap();
        for path in [victim.clone(), link.join("victim"), link.join("s"), elsewhere.clone()] {
            n += 1;
            let address = [vec![0], text(&boot), text(path.to_str().unwrap())].concat();
            store.set(&format!("symmem/world//{n}/address/1"), &address).unwrap();
        }
        std::thread::sleep(ms(4000));
        std::fs::remove_file(link).unwrap();
        for file in [victim, elsewhere] {
            assert_eq!(std::fs::read(&file).unwrap(), b"mine");
            std::fs::remove_file(file).unwrap();
        }
    };
    Ranks::new(2).env("SYMMEM_TIMEOUT", 5).meanwhile(forge).start(test_name!(), || {
        if std::env::var("RANK").unwrap() == "1" {
            return;
        }
        std::thread::sleep(ms(500)); // the addresses are forged by then
        for _ in 0..4 {
            let e = World::from_env().unwrap_err().to_string();
            println!("{e}");
            assert!(e.contains("rank 1"), "{e}");
        }
    });
}

fn sockets_below(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let below = entries.flat_map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => sockets_below(&entry.path()),
        Ok(kind) if kind.is_socket() => vec![entry.path()],
        _ => vec![],
    });
    below.collect()
}

/// Sends what no rank sends to every socket that the ranks listen at, until they have connected.
fn pester(job: &mut Job) {
    let garbage: [&[u8]; 4] = [
        &[0xff; 300],
        b"GET / HTTP/1.1\r\n\r\n",
        // A hello with another job's token, from rank 1; and from a rank that does not exist.
        &[0, 9, 1],
        &[0, 9, 0xff, 0xff, 3],
    ];
    let mut silent = Vec::new();
    let begin = Instant::now();
    let mut sent = 0;
    while begin.elapsed() < ms(1200) {
        for path in sockets_below(&job.dir) {
            for bytes in garbage {
                let socket = unix_socket();
                if connect(&socket, &SocketAddrUnix::new(&path).unwrap()).is_ok() {
                    let _ = send(&socket, bytes, SendFlags::NOSIGNAL);
                    sent += 1;
                }
                if silent.len() < 50 {
                    silent.push(socket); // and says no more
                }
            }
        }
        if let Ok(mut store) = std::net::TcpStream::connect(&job.store) {
            let _ = store.write_all(&[0xee; 1000]);
        }
        std::thread::sleep(ms(5));
    }
    println!("{sent} packets of garbage were taken");
    assert!(sent > 0);
}

#[test]
fn garbage_does_not_keep_ranks_from_connecting() {
    Ranks::new(4).meanwhile(pester).start(test_name!(), || {
        // One comes late, so that the others listen meanwhile.
        if std::env::var("RANK").unwrap() == "3" {
            std::thread::sleep(ms(1000));
        }
        works(World::from_env().unwrap());
        symmem_testing::assert_nothing_is_held();
    });
}

const SECRET: &str = "a secret of the job";

#[test]
fn ranks_with_a_secret_join_worlds_one_after_the_other() {
    Ranks::new(3).env("SYMMEM_SECRET", SECRET).start(test_name!(), || {
        for _ in 0..3 {
            works(World::from_env().unwrap());
        }
        symmem_testing::assert_nothing_is_held();
    });
}

#[test]
fn a_secret_may_be_in_a_file_that_nobody_else_can_read() {
    let write = |dir: &Path| {
        use std::os::unix::fs::OpenOptionsExt;
        for (name, mode) in [("private", 0o600), ("public", 0o644)] {
            let mut options = std::fs::OpenOptions::new();
            let file = options.write(true).create_new(true).mode(mode).open(dir.join(name));
            file.unwrap().write_all(SECRET.as_bytes()).unwrap();
        }
    };
    let tidy = |job: &mut Job| {
        std::thread::sleep(ms(3000));
        for name in ["private", "public"] {
            std::fs::remove_file(job.dir.join(name)).unwrap();
        }
    };
    let ranks = Ranks::new(2).env("SYMMEM_SECRET_FILE", "{dir}/private");
    ranks.prepare(write).meanwhile(tidy).start(test_name!(), || {
        works(World::from_env().unwrap());
        let path = std::env::var("SYMMEM_SECRET_FILE").unwrap().replace("private", "public");
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_SECRET_FILE", path) };
        let e = World::from_env().unwrap_err().to_string();
        assert!(e.contains("mode 0600"), "{e}");
    });
}

/// Every value that ranks with a secret read, replaced by one that others can make.
#[test]
fn what_others_write_is_noticed_by_ranks_with_a_secret() {
    for key in ["worlds//0", "world//1/token", "world//1/address/1", "world//1/verdict"] {
        let forge = |job: &mut Job| {
            let deadline = symmem::Deadline::within(Duration::from_secs(20));
            let store = symmem::store::TcpStore::connect(&job.store, deadline).unwrap();
            for _ in 0..60 {
                store.set(&format!("symmem/{key}"), &[1; 40]).unwrap();
                std::thread::sleep(ms(20));
            }
        };
        let ranks = Ranks::new(2).env("SYMMEM_SECRET", SECRET).env("SYMMEM_TIMEOUT", 5);
        ranks.meanwhile(forge).start(test_name!(), || {
            if std::env::var("RANK").unwrap() == "1" {
                return;
            }
            std::thread::sleep(ms(200));
            let e = World::from_env().unwrap_err().to_string();
            println!("{e}");
            // Rank 1 is missing as well, which is told first where the forged value is read last.
            assert!(e.contains("the seal of this job") || e.contains("rank 1"), "{e}");
        });
    }
}

#[test]
fn ranks_with_different_secrets_are_told_so() {
    Ranks::new(2).env("SYMMEM_TIMEOUT", 5).start(test_name!(), || {
        let secret = format!("{SECRET} {}", std::env::var("RANK").unwrap());
        // SAFETY: this process has no other thread that reads the environment.
        unsafe { std::env::set_var("SYMMEM_SECRET", secret) };
        let e = World::from_env().unwrap_err().to_string();
        assert!(e.contains("ranks have different secrets"), "{e}");
    });
}

/// Two jobs of one user whose stores were made to agree on everything by somebody else.
#[test]
fn a_rank_of_another_job_of_the_same_user_is_not_taken_for_one_of_ours() {
    let other = symmem::store::TcpServer::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let port = other.local_addr().unwrap().port();
    let mix = |job: &mut Job| {
        let deadline = symmem::Deadline::within(Duration::from_secs(20));
        let connect = |address: &str| symmem::store::TcpStore::connect(address, deadline).unwrap();
        let stores = [connect(&job.store), connect(&address)];
        // Rank 0 is in the one job, rank 1 in the other.
        let key = |rank| format!("symmem/world//1/address/{rank}");
        let found = [0, 1].map(|rank| stores[rank].get(&key(rank), deadline).unwrap());
        stores.iter().for_each(|store| store.set("symmem/world//1/token", &[7]).unwrap());
        [0, 1].iter().for_each(|&rank| stores[1 - rank].set(&key(rank), &found[rank]).unwrap());
    };
    let ranks = Ranks::new(2).env("SYMMEM_TIMEOUT", 4).env("OTHER", port);
    ranks.meanwhile(mix).start(test_name!(), || {
        if std::env::var("RANK").unwrap() == "1" {
            let port = std::env::var("OTHER").unwrap();
            // SAFETY: this process has no other thread that reads the environment.
            unsafe { std::env::set_var("MASTER_PORT", port) };
        }
        let e = World::from_env().map(drop).unwrap_err().to_string();
        assert!(e.contains("rank") && !e.contains("no answer"), "{e}");
    });
}
