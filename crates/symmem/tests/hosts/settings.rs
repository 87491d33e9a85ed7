//! Where ranks listen for other hosts: what is set wrong is told by the name of its variable, to all ranks.

use std::net::TcpListener;

use symmem::ErrorKind;
use symmem_testing::{Ranks, test_name};

use super::{join, rank, set};

/// What rank 1 is told that has this set, while rank 0 is told that rank 1 could not do its part.
fn told(test: &str, name: &'static str, value: &'static str, says: &[&str]) {
    Ranks::new(2).env("SYMMEM_TIMEOUT", 20).start(test, || {
        if rank() == 1 {
            set(name, value);
        }
        let begin = std::time::Instant::now();
        let e = join(1).unwrap_err();
        println!("{e}");
        assert!(begin.elapsed().as_secs() < 10);
        let text = e.to_string();
        assert!(says.iter().all(|part| text.contains(part)), "{text}");
        if rank() == 0 {
            assert_eq!(e.kind(), ErrorKind::PeerFailed, "{text}");
            assert!(text.contains("rank 1"), "{text}");
        }
    });
}

#[test]
fn an_address_of_another_host_is_told_with_those_of_this_one() {
    told(test_name!(), "SYMMEM_ADDR", "192.0.2.1", &["SYMMEM_ADDR=192.0.2.1", "lo 127.0.0.1"]);
}

#[test]
fn an_address_that_is_none_is_told() {
    told(test_name!(), "SYMMEM_ADDR", "node7", &["SYMMEM_ADDR", "\"node7\"", "lo 127.0.0.1"]);
}

#[test]
fn an_interface_that_is_none_is_told_with_those_there_are() {
    told(test_name!(), "SYMMEM_IFACE", "wan9", &["SYMMEM_IFACE", "\"wan9\"", "lo 127.0.0.1"]);
}

#[test]
fn ports_that_are_none_are_told() {
    told(test_name!(), "SYMMEM_PORTS", "9-8", &["SYMMEM_PORTS", "40000-40099", "\"9-8\""]);
}

#[test]
fn a_host_with_other_characters_is_told() {
    Ranks::new(2).start(test_name!(), || {
        set("SYMMEM_HOST", if rank() == 1 { "two words" } else { "a" });
        let e = symmem::World::from_env().unwrap_err().to_string();
        assert!(e.contains("SYMMEM_HOST") && e.contains("two words"), "{e}");
    });
}

#[test]
fn ports_are_taken_from_the_range_and_its_end_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    Ranks::new(3).env("TAKEN", port).start(test_name!(), || {
        let port: u16 = std::env::var("TAKEN").unwrap().parse().unwrap();
        set("SYMMEM_PORTS", &format!("{port}-{port}"));
        let e = join(1).unwrap_err().to_string();
        assert!(e.contains(&format!("SYMMEM_PORTS={port}-{port} are in use")), "{e}");
        set("SYMMEM_PORTS", "23400-23500");
        let _ = join(1).unwrap();
    });
}

/// As in two containers: one boot id, and no directory in common.
#[test]
fn ranks_of_one_identity_that_cannot_meet_are_told_of_the_variables() {
    let alone =
        ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none \"$TMPDIR\" && exec \"$@\"", "sh"];
    let mut trial = std::process::Command::new(alone[0]);
    let trial = trial.args(&alone[1..]).arg("true").env("TMPDIR", "/tmp").output();
    if !trial.as_ref().is_ok_and(|output| output.status.success()) {
        return println!("skipped: {trial:?}");
    }
    Ranks::new(2).under(&alone).env("SYMMEM_TIMEOUT", 10).start(test_name!(), || {
        let begin = std::time::Instant::now();
        let e = symmem::World::from_env().unwrap_err().to_string();
        assert!(begin.elapsed().as_secs() < 8, "{:?}", begin.elapsed());
        println!("{e}");
        assert!(e.contains("SYMMEM_HOST") && e.contains("SYMMEM_SOCKET_DIR"), "{e}");
        set("SYMMEM_HOST", &format!("host-{}", rank()));
        let world = symmem::World::from_env().unwrap();
        assert_eq!(world.hosts(), [[0], [1]]);
    });
}
