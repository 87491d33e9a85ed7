//! Another user of the machine against a running job: what it tries, and that nothing comes of it.
//!
//! Needs root, to be two other users; skipped otherwise. It runs for ten seconds, or `SYMMEM_HOSTILE_SECONDS`:
//! `cargo xtask hostile --seconds N`. See "Who is trusted" in docs/safety.md for what is claimed here.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

#[path = "hostile/attacks.rs"]
mod attacks;
#[path = "hostile/owner.rs"]
mod owner;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use symmem_testing::Random;

/// What a process of this program does; its arguments are in further variables.
const ROLE: &str = "SYMMEM_HOSTILE_ROLE";
const OWNER: u32 = 54_321;
const STRANGER: u32 = 65_534;
/// How much memory the launcher, or another host of a store, may take.
const MOST_MEMORY: u64 = 64 << 20;

/// Where everything happens.
struct Site {
    dir: PathBuf,
    program: PathBuf,
    test: &'static str,
}

impl Site {
    /// With a directory for temporary files as `/tmp` is, and one with the owner's files.
    fn new(test: &'static str) -> Self {
        let dir = std::env::temp_dir().join(format!("hostile-{:016x}", Random::unseeded().next()));
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        for (name, mode) in [("", 0o755), ("tmp", 0o1777), ("home", 0o755)] {
            std::fs::create_dir(dir.join(name)).unwrap();
            set(&dir.join(name), mode);
        }
        std::os::unix::fs::chown(dir.join("home"), Some(OWNER), Some(OWNER)).unwrap();
        // Where it was built, the others may have no access.
        let program = dir.join("program");
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        set(&program, 0o755);
        Self { dir, program, test }
    }

    fn start(&self, user: u32, role: &str, env: &[(&str, String)]) -> Child {
        let mut command = Command::new(&self.program);
        command.args([self.test, "--exact", "--nocapture", "--test-threads=1"]);
        command.env_clear().env(ROLE, role).env("TMPDIR", self.dir.join("tmp"));
        command.env("HOME_DIR", self.dir.join("home")).envs(env.iter().cloned());
        command.env("RUST_BACKTRACE", "0").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).uid(user).gid(user);
        // While another test forks, its child may hold the copy of the program open for writing.
        for _ in 0..100 {
            match command.spawn() {
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                started => return started.unwrap(),
            }
        }
        panic!("the copy of the program stays open for writing");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A process that is killed when the test is over, however it ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Identity and contents of all that is in the owner's directory.
fn fingerprint(dir: &Path) -> Vec<(PathBuf, u64, u32, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let about = std::fs::symlink_metadata(&path).unwrap();
            let is_file = about.file_type().is_file();
            let contents = if is_file { std::fs::read(&path).unwrap() } else { vec![] };
            (path, about.ino(), about.mode(), contents)
        })
        .collect();
    all.sort();
    all
}

fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10
}

/// The first lines of a process that say `name=value`.
fn announced(child: &mut Child, names: &[&str]) -> Vec<String> {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let values = names
        .iter()
        .map(|name| {
            let value = lines.find_map(|l| Some(l.split_once(&format!("{name}="))?.1.to_owned()));
            value.unwrap_or_else(|| panic!("no {name}"))
        })
        .collect();
    // A process that continues to write must not be stopped by a full pipe.
    std::thread::spawn(move || lines.for_each(|line| println!("{line}")));
    values
}

fn seconds() -> u64 {
    let set = std::env::var("SYMMEM_HOSTILE_SECONDS").ok();
    set.map_or(10, |s| s.parse().expect("a number of seconds"))
}

/// Plays the part that this process was started for, if any.
fn play() -> bool {
    let Ok(role) = std::env::var(ROLE) else { return false };
    // Nothing of this outlives the test.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    match role.as_str() {
        "launcher" => owner::launch(),
        "rank" => owner::join(),
        "guest" => owner::join_if_possible(),
        attack => attacks::run(attack),
    }
    std::process::exit(0);
}

/// Watches the launcher and starts job after job, while `attacks` of the stranger go on.
///
/// `role` is what a rank does, and `limit` the longest that one may take.
fn besiege(site: &Site, attacks: &[&str], role: &str, open: bool, secret: bool, limit: Duration) {
    owner::prepare(&site.dir.join("home"));
    let before = fingerprint(&site.dir.join("home"));
    let mut launcher = Running(site.start(OWNER, "launcher", &[]));
    let ports = announced(&mut launcher.0, &["port", "forwarded"]);
    let seen = if open { &ports[1] } else { &ports[0] };
    let start = |attack: &&str| Running(site.start(STRANGER, attack, &[("PORT", seen.clone())]));
    let mut strangers: Vec<Running> = attacks.iter().map(start).collect();
    let (begin, mut jobs, mut most, mut slowest) = (Instant::now(), 0, 0, Duration::ZERO);
    while begin.elapsed() < Duration::from_secs(seconds()) {
        let env = |rank: usize| {
            let mut env = vec![
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "3".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("MASTER_PORT", ports[0].clone()),
                ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
                ("TORCHELASTIC_RESTART_COUNT", jobs.to_string()),
                ("SYMMEM_TIMEOUT", if open { "2".into() } else { "30".into() }),
            ];
            env.extend(secret.then(|| ("SYMMEM_SECRET", "correct horse battery staple".into())));
            env
        };
        let mut ranks: Vec<Running> =
            (0..3).map(|rank| Running(site.start(OWNER, role, &env(rank)))).collect();
        let started = Instant::now();
        for (rank, running) in ranks.iter_mut().enumerate() {
            let status = loop {
                most = most.max(resident(launcher.0.id()));
                if let Some(status) = running.0.try_wait().unwrap() {
                    break status;
                }
                assert!(started.elapsed() < limit, "rank {rank} is still there after {limit:?}");
                std::thread::sleep(Duration::from_millis(3));
            };
            let mut said = String::new();
            running.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
            assert!(status.success(), "rank {rank} of job {jobs}: {status}\n{said}");
        }
        slowest = slowest.max(started.elapsed());
        jobs += 1;
    }
    println!("{jobs} jobs, the slowest in {slowest:.1?}; the launcher took {} MiB", most >> 20);
    assert!(launcher.0.try_wait().unwrap().is_none(), "the launcher has ended");
    assert!(most < MOST_MEMORY, "the launcher took {most} bytes");
    for (attack, stranger) in attacks.iter().zip(&mut strangers) {
        let ended = stranger.0.try_wait().unwrap();
        let _ = stranger.0.kill();
        let mut said = String::new();
        stranger.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(ended.is_none(), "{attack} ended with {ended:?}: {said}");
        let attempts = said.lines().filter_map(|line| line.strip_prefix("attempts=")).next_back();
        println!("{attack}: {} attempts", attempts.unwrap_or("no"));
    }
    assert_eq!(fingerprint(&site.dir.join("home")), before, "the owner's files have changed");
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root can be two other users");
    }
    root
}

/// A user of the same machine: it is not let into the store, and late ranks are.
#[test]
fn another_user_reads_writes_and_deletes_nothing_and_late_ranks_join() {
    if play() || !is_root() {
        return;
    }
    let site = Site::new("another_user_reads_writes_and_deletes_nothing_and_late_ranks_join");
    let attacks = ["read", "fill", "flood", "garbage", "plant", "hoard", "hoard"];
    besiege(&site, &attacks, "rank", false, false, Duration::from_secs(60));
}

/// Somebody who is let into the store, as into that of torchrun: it can keep a job from starting, and no more.
#[test]
fn whoever_can_write_to_an_open_store_can_only_deny_service() {
    if play() || !is_root() {
        return;
    }
    for secret in [false, true] {
        let site = Site::new("whoever_can_write_to_an_open_store_can_only_deny_service");
        let attacks = ["forge", "fill_open", "flood_open", "garbage_open", "plant"];
        besiege(&site, &attacks, "guest", true, secret, Duration::from_secs(60));
    }
}
