//! Servers that come late, go away, or were never there.

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use symmem::store::{Store, TcpServer, TcpStore};
use symmem::{Deadline, Error};

use super::site::{LONG, client, server};

/// Whether the error says that the connection ended, or could not be made anew.
fn is_end(error: &Error) -> bool {
    match error {
        Error::Protocol { with, got, .. } => {
            with.starts_with("store at ") && got == "end of connection"
        }
        Error::System { call, .. } => call.contains("store at "),
        _ => false,
    }
}

#[test]
fn a_server_that_ends_during_a_wait_is_an_error_at_once() {
    let server = server();
    let store = client(&server);
    thread::scope(|scope| {
        let waits = [
            scope.spawn(|| store.wait(&["never"], Deadline::NEVER).unwrap_err()),
            scope.spawn(|| store.get("never", LONG).map(drop).unwrap_err()),
            scope.spawn(|| store.multi_get(&["never"], LONG).map(drop).unwrap_err()),
        ];
        thread::sleep(Duration::from_millis(50));
        drop(server);
        for wait in waits {
            let error = wait.join().unwrap();
            assert!(is_end(&error), "{error}");
        }
    });
    for _ in 0..3 {
        let error = store.set("k", b"v").unwrap_err();
        assert!(is_end(&error), "{error}");
    }
}

#[test]
fn a_client_outlives_its_server_and_finds_the_next_one() {
    let server = server();
    let address = server.local_addr().unwrap().to_string();
    let store = client(&server);
    store.set("k", b"v").unwrap();
    drop(server);
    assert!(is_end(&store.check(&["k"]).unwrap_err()));
    let _server = TcpServer::bind(&address).unwrap();
    assert!(!store.check(&["k"]).unwrap());
}

#[test]
fn a_client_waits_for_a_server_that_comes_late() {
    let address = server().local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let store = scope.spawn(|| TcpStore::connect(&address, LONG).unwrap());
        thread::sleep(Duration::from_millis(50));
        let _server = TcpServer::bind(&address).unwrap();
        assert_eq!(store.join().unwrap().num_keys().unwrap(), 0);
    });
}

#[test]
fn a_server_that_never_comes_is_named_with_the_cause() {
    let address = server().local_addr().unwrap().to_string();
    let error = TcpStore::connect(&address, Deadline::within(Duration::from_millis(100)));
    let text = error.err().unwrap().to_string();
    assert!(text.starts_with(&format!("store at {address} is not available: ")), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn an_address_without_a_port_is_a_usage_error() {
    for address in ["localhost", "", "1.2.3.4:port"] {
        let error = TcpStore::connect(address, LONG).err().unwrap();
        assert!(matches!(error, Error::Usage { op: "connect", .. }), "{address}: {error}");
    }
}

#[test]
fn a_port_in_use_is_a_system_error() {
    let server = server();
    let error = TcpServer::bind(&server.local_addr().unwrap().to_string()).err().unwrap();
    assert!(matches!(error, Error::System { .. }), "{error}");
}

#[test]
fn a_server_is_reached_by_name_and_over_ip_6() {
    for host in ["localhost", "127.0.0.1", "[::1]", "::1"] {
        let Ok(server) = TcpServer::bind(&format!("{host}:0")) else {
            assert!(host.contains("::1"), "only IPv6 may be missing");
            eprintln!("no IPv6 on this machine");
            continue;
        };
        let address = format!("{host}:{}", server.local_addr().unwrap().port());
        let store = TcpStore::connect(&address, LONG).unwrap();
        store.set("host", host.as_bytes()).unwrap();
        assert_eq!(store.address(), address);
    }
    let server = TcpServer::bind("0.0.0.0:0").unwrap();
    TcpStore::connect(&format!("localhost:{}", server.local_addr().unwrap().port()), LONG).unwrap();
}

#[test]
fn a_client_that_dies_while_it_waits_leaves_the_others_alone() {
    let server = server();
    let store = client(&server);
    for _ in 0..50 {
        let mut dying = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let wait = [b"\0\xce\xf7\x85\x3c\x06", &1u64.to_ne_bytes()[..], &2u64.to_ne_bytes(), b"/k"];
        std::io::Write::write_all(&mut dying, &wait.concat()).unwrap();
    }
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
}

fn server_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
    };
    tasks.map(name).filter(|name| name.trim() == "symmem-store").count()
}

#[test]
fn a_dropped_server_leaves_no_thread_and_no_port() {
    // Other tests have servers too, so this one runs by itself.
    const ALONE: &str = "SYMMEM_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "failure::a_dropped_server_leaves_no_thread_and_no_port";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    for _ in 0..10 {
        let server = server();
        let stores = [client(&server), client(&server)];
        stores[0].wait(&["never"], Deadline::within(Duration::from_millis(1))).unwrap_err();
        assert_eq!(server_threads(), 1);
        let address = server.local_addr().unwrap();
        drop(server);
        // The system lists a thread for a moment after it was joined.
        let limit = LONG.start();
        while server_threads() > 0 {
            assert!(!limit.expired(), "the server's thread is still there");
            thread::yield_now();
        }
        TcpStream::connect(address).unwrap_err();
        TcpListener::bind(address).unwrap();
        assert!(is_end(&stores[1].num_keys().unwrap_err()));
    }
}

/// A directory of this user that nobody else may enter, or that all may write to.
fn directory(mode: u32) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let name = thread::current().name().unwrap_or("main").replace("::", "-");
    let path = std::env::temp_dir().join(format!("{name:.40}-{mode:o}-{}", std::process::id()));
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    path
}

#[test]
fn a_unix_socket_left_by_a_crash_makes_room_and_one_in_use_does_not() {
    let dir = directory(0o700);
    let path = dir.join("store");
    let address = format!("unix:{}", path.display());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "a crash leaves the file");
    let server = TcpServer::bind(&address).unwrap();
    assert_eq!(server.local_addr(), None);
    let error = TcpServer::bind(&address).err().unwrap();
    assert!(matches!(error, Error::System { .. }), "{error}");
    TcpStore::connect(&address, LONG).unwrap().set("key", b"value").unwrap();
    drop(server);
    assert!(!path.exists(), "a server takes its file along");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_server_takes_the_place_of_no_file_and_removes_none() {
    for mode in [0o700, 0o777] {
        let dir = directory(mode);
        std::fs::write(dir.join("file"), "mine").unwrap();
        std::os::unix::fs::symlink(dir.join("file"), dir.join("link")).unwrap();
        std::os::unix::fs::symlink(dir.join("nowhere"), dir.join("dangling")).unwrap();
        std::fs::create_dir(dir.join("folder")).unwrap();
        for name in ["file", "link", "dangling", "folder"] {
            let address = format!("unix:{}", dir.join(name).display());
            let error = TcpServer::bind(&address).err().unwrap();
            assert!(matches!(error, Error::System { .. }), "{name}: {error}");
            assert!(std::fs::symlink_metadata(dir.join(name)).is_ok(), "{name} is gone");
        }
        assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"mine");
        // A socket that somebody else may have put here stays too.
        let planted = dir.join("planted");
        drop(std::os::unix::net::UnixListener::bind(&planted).unwrap());
        let bound = TcpServer::bind(&format!("unix:{}", planted.display()));
        assert_eq!(bound.is_ok(), mode == 0o700);
        // Nor is what has come to lie at a server's path the server's.
        let path = dir.join("store");
        let server = TcpServer::bind(&format!("unix:{}", path.display())).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        drop(server);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        drop(bound);
        std::fs::remove_dir_all(dir).unwrap();
    }
}

/// The queue of its connections is full, and it accepts none of them.
#[test]
fn a_unix_server_that_accepts_nobody_is_given_up_at_the_deadline() {
    let dir = directory(0o700);
    let path = dir.join("store");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _queued: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn({
                let path = path.clone();
                move || std::os::unix::net::UnixStream::connect(path)
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(100));
    let begin = std::time::Instant::now();
    let address = format!("unix:{}", path.display());
    let error = TcpStore::connect(&address, Deadline::within(Duration::from_millis(300)));
    assert!(matches!(error.err(), Some(Error::Unavailable { .. })));
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    let begin = std::time::Instant::now();
    assert!(TcpServer::bind(&address).is_err(), "it is in use");
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    drop(listener);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_wait_in_memory_ends_when_its_caller_says_so() {
    let store = symmem::store::MemoryStore::new();
    let begin = std::time::Instant::now();
    let wait = || store.get("never", Deadline::within(Duration::from_secs(60)));
    symmem::interruptible(|| true, wait).unwrap_err();
    let forever = || store.wait(&["never"], Deadline::NEVER);
    symmem::interruptible(|| true, forever).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
