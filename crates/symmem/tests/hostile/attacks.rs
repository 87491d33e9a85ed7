//! What the stranger tries. An attack that gets what it wants ends with an error; the others go on until they are killed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::FromRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use symmem_testing::Random;

const VALIDATE: u32 = 0x3C85_F7CE;

pub fn run(attack: &str) {
    match attack {
        "read" => read(),
        "fill" => fill(false),
        "fill_open" => fill(true),
        "flood" => flood(false),
        "flood_open" => flood(true),
        "hoard" => hoard(),
        "garbage" | "garbage_open" => garbage(),
        "plant" => plant(),
        "forge" => forge(),
        "forward" => {
            let listener: i32 = std::env::var("LISTENER").unwrap().parse().unwrap();
            // SAFETY: the launcher has left this descriptor to this process, and nothing here uses it yet.
            let listener = unsafe { TcpListener::from_raw_fd(listener) };
            super::owner::forward(&listener, port());
        }
        other => panic!("{other}"),
    }
}

fn port() -> u16 {
    std::env::var("PORT").unwrap().parse().unwrap()
}

/// Counts what this process tries, and says every second how much that is: its end comes without notice.
fn attempt() {
    static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
    if ATTEMPTS.fetch_add(1, Ordering::Relaxed) == 0 {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                println!("attempts={}", ATTEMPTS.load(Ordering::Relaxed));
            }
        });
    }
}

/// A connection that waits for nothing long.
fn connect() -> Option<TcpStream> {
    attempt();
    let stream = TcpStream::connect(("127.0.0.1", port())).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    Some(stream)
}

fn query(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![kind];
    for field in fields {
        bytes.extend_from_slice(&(field.len() as u64).to_ne_bytes());
        bytes.extend_from_slice(field);
    }
    bytes
}

fn validate() -> Vec<u8> {
    [&[0][..], &VALIDATE.to_ne_bytes()].concat()
}

/// A query of several keys.
fn counted(kind: u8, keys: &[&[u8]]) -> Vec<u8> {
    let fields = query(kind, keys);
    [&fields[..1], &(keys.len() as u64).to_ne_bytes(), &fields[1..]].concat()
}

/// Asks for the token, the number of keys, anything: not one byte may come back.
fn read() {
    let keys: [&[u8]; 3] =
        [b"/symmem/world/0/1/token", b"/symmem/world//1/token", b"/symmem/worlds//0"];
    loop {
        for key in keys {
            let Some(mut stream) = connect() else { continue };
            let ask = [validate(), query(3, &[key]), vec![7], query(1, &[key, b"forged"])].concat();
            let _ = stream.write_all(&ask);
            let mut answer = [0; 64];
            if let Ok(len @ 1..) = stream.read(&mut answer) {
                println!("the store answered {:?}", &answer[..len]);
                std::process::exit(1);
            }
        }
    }
}

/// Opens connections, as many as it may, and says nothing more.
fn fill(validated: bool) {
    let mut held = std::collections::VecDeque::new();
    loop {
        if let Some(mut stream) = connect() {
            if validated {
                let _ = stream.write_all(&validate());
            }
            held.push_back(stream);
        }
        if held.len() > 800 {
            held.pop_front();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Fills the machine's tables of sockets with connections to itself, which readers of those tables have to pass over.
fn hoard() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut held = Vec::new();
    loop {
        match TcpStream::connect(address).and_then(|near| Ok((near, listener.accept()?))) {
            Ok(pair) if held.len() < 200_000 => {
                attempt();
                held.push(pair);
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Asks for much and reads nothing; sends queries that never end; fills the table.
fn flood(open: bool) {
    let mut random = Random::unseeded();
    let mut held = std::collections::VecDeque::new();
    loop {
        let Some(mut stream) = connect() else { continue };
        let key = format!("/k{}", random.below(1000)).into_bytes();
        let value = vec![7; 1 << random.below(22)];
        let big: &[u8] = b"/big";
        let bytes = match random.below(5) {
            0 => query(1, &[big, &vec![1; 4 << 20]]),
            1 | 2 => counted(10, &vec![big; 15]),
            3 => query(1, &[&key, &value]),
            _ => [query(1, &[&key]), (8u64 << 20).to_ne_bytes().to_vec(), value].concat(),
        };
        let _ = stream.write_all(&[validate(), bytes].concat());
        held.push_back(stream);
        if held.len() > 100 {
            held.pop_front();
        }
        if open {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn garbage() {
    let mut random = Random::unseeded();
    loop {
        let Some(mut stream) = connect() else { continue };
        let start = if random.below(2) == 0 { vec![] } else { validate() };
        let noise: Vec<u8> = (0..random.below(3000)).map(|_| random.next() as u8).collect();
        let _ = stream.write_all(&[start, noise].concat());
    }
}

/// Puts files, links and sockets where ranks look, with names like theirs; looks into what is theirs.
fn plant() {
    let tmp: PathBuf = std::env::var("TMPDIR").unwrap().into();
    let home: PathBuf = std::env::var("HOME_DIR").unwrap().into();
    let mut random = Random::unseeded();
    let _ = std::fs::create_dir(tmp.join(format!("symmem-{}", super::OWNER)));
    let old = |path: &Path| {
        let then = rustix::fs::Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        let _ = rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags);
    };
    let number =
        |random: &mut Random| format!("symmem-{:016x}{:016x}", random.next(), random.next());
    for round in 0.. {
        attempt();
        let path = tmp.join(number(&mut random));
        let _ = match round % 4 {
            0 => symlink(&home, &path),
            1 => symlink(home.join("public"), &path),
            2 => std::fs::create_dir(&path)
                .and_then(|()| symlink(home.join("public"), path.join("s"))),
            _ => std::fs::write(&path, ""),
        };
        old(&path);
        for entry in std::fs::read_dir(&tmp).into_iter().flatten().flatten() {
            // What is the owner's must be closed to us: neither to be listed nor to be connected to nor to be moved.
            let own = std::os::unix::fs::MetadataExt::uid(&match entry.metadata() {
                Ok(about) => about,
                Err(_) => continue,
            });
            let moved = tmp.join("moved");
            if own == super::OWNER
                && (std::fs::read_dir(entry.path()).is_ok()
                    || std::os::unix::net::UnixStream::connect(entry.path().join("s")).is_err_and(
                        |e| {
                            e.kind() != std::io::ErrorKind::PermissionDenied
                                && e.kind() != std::io::ErrorKind::NotFound
                        },
                    )
                    || std::fs::rename(entry.path(), moved).is_ok())
            {
                println!("{} is open to us", entry.path().display());
                std::process::exit(1);
            }
        }
        if round % 200 == 199 {
            for entry in std::fs::read_dir(&tmp).into_iter().flatten().flatten() {
                let _ = std::fs::remove_file(entry.path());
                let _ = std::fs::remove_file(entry.path().join("s"));
                let _ = std::fs::remove_dir(entry.path());
            }
        }
        if std::fs::read(home.join("secret")).is_ok()
            || std::fs::remove_file(home.join("public")).is_ok()
        {
            println!("the owner's files are open to us");
            std::process::exit(1);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Writes what ranks write: addresses that lead to the owner's files, tokens, numbers of worlds, verdicts.
fn forge() {
    let home: PathBuf = std::env::var("HOME_DIR").unwrap().into();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let text = |s: &str| [&[s.len() as u8][..], s.as_bytes()].concat();
    let paths = ["public", "secret", "socket", "s", ".", "nothing"].map(|name| home.join(name));
    let mut random = Random::unseeded();
    loop {
        let Some(mut stream) = connect() else { continue };
        let mut bytes = validate();
        for _ in 0..50 {
            let (life, rank) = (random.below(40), random.below(3));
            let world = format!("/symmem/world/{life}/{}", 1 + random.below(2));
            let path = paths[random.below(paths.len())].to_str().unwrap().to_owned();
            let address = [vec![0], text(&boot), text(&path)].concat();
            bytes.extend(match random.below(7) {
                0 | 1 => query(1, &[format!("{world}/address/{rank}").as_bytes(), &address]),
                2 => query(1, &[format!("{world}/token").as_bytes(), &[7; 16]]),
                3 => query(1, &[format!("{world}/verdict").as_bytes(), &[0, 1, 2, 0, 0]]),
                4 => query(1, &[format!("/symmem/worlds/{life}/{rank}").as_bytes(), b"77"]),
                5 => query(8, &[format!("{world}/address/{rank}").as_bytes()]),
                _ => query(1, &[format!("{world}/address/{rank}").as_bytes(), &[1; 40]]),
            });
        }
        let _ = stream.write_all(&bytes);
        std::thread::sleep(Duration::from_millis(1));
    }
}
