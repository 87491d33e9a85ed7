//! Two network namespaces with a cable between them, which is unplugged. Needs root and `ip`; skipped otherwise.

use std::process::{Command, Stdio};
use std::time::Instant;

use symmem::Deadline;
use symmem::store::{Store, TcpStore};
use symmem_testing::{Job, Random, Ranks, test_name};

use super::{join, lost_in, ms, rank, set, store_barrier, works};

/// The namespaces, for as long as the test lasts.
struct Cable {
    name: String,
}

impl Cable {
    fn new() -> Result<Self, String> {
        let cable = Self { name: format!("symmem-{:06x}", Random::unseeded().next() & 0xff_ffff) };
        let tag = &cable.name[7..];
        for end in ["0", "1"] {
            ip(&["netns", "add", &cable.end(end)])?;
        }
        let names = ["0", "1"].map(|end| format!("sy{tag}{end}"));
        ip(&["link", "add", &names[0], "type", "veth", "peer", "name", &names[1]])?;
        for (end, name) in ["0", "1"].into_iter().zip(&names) {
            let inside = cable.end(end);
            ip(&["link", "set", name, "netns", &inside])?;
            ip(&["-n", &inside, "link", "set", name, "name", "cable"])?;
            let address = format!("10.213.77.{}/24", 1 + end.parse::<u8>().unwrap());
            ip(&["-n", &inside, "addr", "add", &address, "dev", "cable"])?;
            ip(&["-n", &inside, "link", "set", "cable", "up"])?;
            ip(&["-n", &inside, "link", "set", "lo", "up"])?;
        }
        Ok(cable)
    }

    fn end(&self, end: &str) -> String {
        format!("{}-{end}", self.name)
    }

    fn plug(&self, state: &str) {
        ip(&["-n", &self.end("1"), "link", "set", "cable", state]).unwrap();
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in ["0", "1"] {
            let _ = ip(&["netns", "del", &self.end(end)]);
        }
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    let ran = Command::new("ip").args(words).stdin(Stdio::null()).output();
    let output = ran.map_err(|e| format!("ip: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {said}", words.join(" "))) }
}

/// In a rank the namespaces exist already; where they cannot be made, the test is skipped.
fn cable() -> Option<Result<Cable, String>> {
    if std::env::var("SYMMEM_TEST").is_ok() {
        return Some(Err("made by the test".to_owned()));
    }
    let cable = Cable::new();
    if let Err(why) = &cable {
        println!("skipped: {why}");
        return None;
    }
    Some(cable)
}

/// Starts a rank in the namespace of its host.
fn enter(cable: &Result<Cable, String>) -> String {
    let name = cable.as_ref().map_or("", |cable| &cable.name);
    format!("exec ip netns exec {name}-$((RANK / 2)) \"$@\"")
}

/// Nothing is set but the store's address: every rank listens at the address by which it reaches that.
#[test]
fn hosts_meet_at_the_addresses_by_which_they_reach_the_store() {
    let Some(cable) = cable() else { return };
    let ranks = Ranks::new(4).rank_0_hosts_the_store().env("MASTER_ADDR", "10.213.77.1");
    let ranks = ranks.env("SYMMEM_SECRET", "correct horse battery staple");
    ranks.under(&["sh", "-c", &enter(&cable), "sh"]).start(test_name!(), || {
        let world = join(2).unwrap();
        assert_eq!(world.hosts(), [[0, 1], [2, 3]]);
        works(&world.host_group().unwrap());
        store_barrier(&world, "end");
        std::thread::sleep(ms(if rank() == 0 { 300 } else { 0 })); // the store stays until all have passed the barrier
    });
    drop(cable);
}

/// A short break is none; a long one makes every rank of the other host lost, whose host is named.
#[test]
fn an_unplugged_host_is_lost_within_six_seconds_and_a_stumble_is_not() {
    let Some(cable) = cable() else { return };
    let unplug = |job: &mut Job| {
        let Ok(cable) = &cable else { return };
        let limit = Deadline::after(ms(30_000));
        let store = TcpStore::connect(&job.store, limit).unwrap();
        store.wait(&["test/joined/all"], limit).unwrap();
        cable.plug("down");
        std::thread::sleep(ms(2500));
        cable.plug("up");
        std::thread::sleep(ms(4000));
        store.set("test/stumbled", b"1").unwrap();
        store.wait(&["test/ready/all"], limit).unwrap();
        cable.plug("down");
        store.set("test/unplugged", b"1").unwrap();
    };
    let ranks = Ranks::new(4).store_in_dir().env("SYMMEM_IFACE", "cable");
    ranks.under(&["sh", "-c", &enter(&cable), "sh"]).meanwhile(unplug).start(test_name!(), || {
        set("SYMMEM_PORTS", "40000-40003");
        let world = join(2).unwrap();
        assert_eq!(world.hosts(), [[0, 1], [2, 3]]);
        let here = world.host_group().unwrap();
        works(&here);
        store_barrier(&world, "joined");
        let limit = Deadline::after(ms(30_000));
        world.store().wait(&["test/stumbled"], limit).unwrap();
        world.check().unwrap();
        store_barrier(&world, "ready");
        world.store().wait(&["test/unplugged"], limit).unwrap();
        let begin = Instant::now();
        let (lost, how) = lost_in(&world);
        let took = begin.elapsed();
        println!("rank {lost} after {took:?}: {how}");
        let (others, host) = if rank() < 2 { ([2, 3], "b") } else { ([0, 1], "a") };
        assert!(others.contains(&lost), "{lost}");
        assert!(how.contains(&format!("its host {host} is unreachable")), "{how}");
        assert!(took < ms(6000), "{took:?}");
        works(&here);
    });
    drop(cable);
}

/// Each half has lost the other, and only one of them may go on: that which reaches the store.
#[test]
fn of_two_halves_only_the_one_with_the_store_goes_on() {
    let Some(cable) = cable() else { return };
    let unplug = |_: &mut Job| {
        let Ok(cable) = &cable else { return };
        std::thread::sleep(ms(2000));
        cable.plug("down");
    };
    let ranks = Ranks::new(4).rank_0_hosts_the_store().env("MASTER_ADDR", "10.213.77.1");
    let ranks = ranks.under(&["sh", "-c", &enter(&cable), "sh"]).meanwhile(unplug);
    ranks.start(test_name!(), || {
        let world = join(2).unwrap();
        let begin = Instant::now();
        let lost = loop {
            match world.barrier() {
                Ok(()) => assert!(begin.elapsed() < ms(20_000), "nobody was lost"),
                Err(lost) => break lost,
            }
        };
        let symmem::Error::PeerLost { rank: lost, .. } = lost else { panic!("{lost}") };
        let here = rank() < 2;
        assert_eq!(lost < 2, !here, "rank {lost} is of this half");
        let decided = world.shrink_by(ms(4000));
        if here {
            let survivors = decided.unwrap();
            assert_eq!(survivors.world_ranks(), [0, 1]);
            works(&survivors);
            std::thread::sleep(ms(5000)); // the store is there until the others have asked
        } else {
            let refused = decided.unwrap_err();
            assert_eq!(refused.kind(), symmem::ErrorKind::Unavailable, "{refused}");
            assert!(refused.to_string().contains("does not reach the store"), "{refused}");
            works(&world.host_group().unwrap());
        }
    });
    drop(cable);
}
