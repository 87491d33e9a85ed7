//! The owner's side: a launcher that hosts the store, ranks, and files of no concern to anybody else.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use symmem::store::TcpServer;
use symmem::{Error, ReduceOp, World};

use super::OWNER;

/// Files, of which one looks like a rank's, and a socket that nobody serves.
pub fn prepare(home: &Path) {
    let own = |path: &Path| chown(path, Some(OWNER), Some(OWNER)).unwrap();
    for (name, mode) in [("public", 0o644), ("secret", 0o600), ("s", 0o644)] {
        let path = home.join(name);
        std::fs::write(&path, name).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        own(&path);
    }
    drop(std::os::unix::net::UnixListener::bind(home.join("socket")).unwrap());
    own(&home.join("socket"));
}

/// Hosts a store, and forwards connections to it: they count as the owner's, as all do at a server that asks nobody.
pub fn launch() {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let forwarder = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("port={port}\nforwarded={}", forwarder.local_addr().unwrap().port());
    std::io::stdout().flush().unwrap();
    // In a process of its own, whose memory is not the launcher's.
    let mut helper = std::process::Command::new("/proc/self/exe");
    let listener = rustix::io::fcntl_dupfd_cloexec(&forwarder, 100).unwrap();
    let _ = rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty());
    drop(forwarder);
    helper.args(std::env::args().skip(1)).env(super::ROLE, "forward").env("PORT", port.to_string());
    let mut helper = helper.env("LISTENER", "100").spawn().unwrap();
    drop(listener);
    let _ = helper.wait();
    loop {
        std::thread::park();
    }
}

/// Passes bytes on in both directions.
pub fn forward(listener: &TcpListener, port: u16) {
    for client in listener.incoming().flatten() {
        let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
        let ends = [(&client, &server), (&server, &client)]
            .map(|(from, to)| Some((from.try_clone().ok()?, to.try_clone().ok()?)));
        for (mut from, mut to) in ends.into_iter().flatten() {
            let copy = move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = from.shutdown(std::net::Shutdown::Both);
                let _ = to.shutdown(std::net::Shutdown::Both);
            };
            let _ = std::thread::Builder::new().stack_size(128 << 10).spawn(copy);
        }
    }
}

fn rank() -> usize {
    std::env::var("RANK").unwrap().parse().unwrap()
}

fn work(world: &World) -> symmem::Result<()> {
    let mut x = world.alloc::<u64>(5000)?.rendezvous(world)?;
    x.local_mut().fill(1 << rank());
    x.all_reduce(ReduceOp::Sum)?;
    assert!(x.local().iter().all(|sum| *sum == 7), "somebody else's memory");
    world.barrier()
}

/// Joins, the last one late, and works.
pub fn join() {
    if rank() == 2 {
        std::thread::sleep(Duration::from_millis(300));
    }
    let world = World::from_env().unwrap();
    assert_eq!((world.rank(), world.size()), (rank(), 3));
    work(&world).unwrap();
}

/// Joins, unless it is kept from it; then it is told so in time and nothing has happened.
pub fn join_if_possible() {
    let begin = std::time::Instant::now();
    match World::from_env() {
        Ok(world) => match work(&world) {
            Ok(()) => println!("joined"),
            Err(e @ (Error::PeerLost { .. } | Error::Timeout { .. })) => println!("{e}"),
            Err(e) => panic!("{e}"),
        },
        Err(Error::Timeout { waiting_for, .. }) if waiting_for.is_empty() => {
            panic!("nobody is named")
        }
        Err(e) => println!("{e}"),
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}
