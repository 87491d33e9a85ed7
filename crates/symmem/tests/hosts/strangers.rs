//! Who connects to a rank and is none: it delays nobody and changes nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use symmem::store::{Store, TcpStore};
use symmem_testing::{Job, Ranks, test_name};

use super::{join, ms, rank, store_barrier, works};

/// Those of these ports at which a process of this machine listens.
fn listening(ports: std::ops::Range<u16>) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let port = fields.next()?.split_once(':')?.1;
        let is_listening = fields.nth(1)? == "0A";
        let port = u16::from_str_radix(port, 16).ok()?;
        (is_listening && ports.contains(&port)).then_some(port)
    };
    table.lines().filter_map(port).collect()
}

fn attack(port: u16, number: usize) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let long = [&u32::MAX.to_le_bytes()[..], &[7; 3000]].concat();
    let opening = |from: u32, to: u32| {
        [&20_u32.to_le_bytes()[..], b"symmem 1\0\0\0\0", &from.to_le_bytes(), &to.to_le_bytes()]
            .concat()
    };
    let said = match number % 6 {
        0 => Vec::new(), // nothing at all
        1 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        2 => long,
        3 => vec![0; 4096],
        4 => opening(3, 0),
        // A rank of the job by its own account, that does not go on.
        _ => {
            let [from, to] = [3_u32, 0].map(u32::to_le_bytes);
            [&16_u32.to_le_bytes()[..], b"symmem 1", &from, &to].concat()
        }
    };
    let _ = stream.write_all(&said);
    Some(stream)
}

/// Stops rank 3 while the others listen for it, and calls them, many more times than they keep connections. How often it could.
fn disturb(job: &mut Job, ports: std::ops::Range<u16>) -> usize {
    let watch = TcpStore::connect(&job.store, symmem::Deadline::after(ms(5000))).unwrap();
    let signal = |signal| {
        let pid = rustix::process::Pid::from_raw(job.pids[3] as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    };
    let begin = Instant::now();
    while !watch.check(&["symmem/world//1/address/3"]).unwrap() {
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
    signal(rustix::process::Signal::STOP);
    let begin = Instant::now();
    let (mut held, mut made, mut goes_on) = (Vec::new(), 0, false);
    while begin.elapsed() < Duration::from_secs(4) && !watch.check(&["test/joined/all"]).unwrap() {
        for port in listening(ports.clone()) {
            for _ in 0..8 {
                held.extend(attack(port, made));
                made += 1;
            }
        }
        if held.len() > 600 {
            held.drain(..300);
        }
        if !goes_on && begin.elapsed() > ms(1500) {
            signal(rustix::process::Signal::CONT);
            goes_on = true;
        }
        std::thread::sleep(ms(1));
    }
    for stream in &mut held {
        stream.set_nonblocking(true).unwrap();
        let got = stream.read(&mut [0; 64]);
        assert!(!matches!(got, Ok(1..)), "a stranger was told something");
    }
    if !goes_on {
        signal(rustix::process::Signal::CONT);
    }
    made
}

#[test]
fn strangers_that_call_delay_nobody_and_get_nothing() {
    let first = 21_000 + (std::process::id() % 300) as u16 * 8;
    let ports = format!("{first}-{}", first + 7);
    for _ in 0..10 {
        let mut made = 0;
        let meanwhile = |job: &mut Job| made = disturb(job, first..first + 8);
        let ranks = Ranks::new(4).env("SYMMEM_TIMEOUT", 30).env("SYMMEM_PORTS", &ports);
        ranks.meanwhile(meanwhile).start(test_name!(), || {
            if rank() == 3 {
                std::thread::sleep(ms(500));
            }
            let begin = Instant::now();
            let world = join(2).unwrap();
            println!("joined after {:?}", begin.elapsed());
            assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
            store_barrier(&world, "joined");
            works(&world.host_group().unwrap());
            world.check().unwrap();
            store_barrier(&world, "end");
        });
        println!("{made} attempts");
        if made > 100 {
            return;
        }
        // Rank 3 was too fast to be stopped.
    }
    panic!("nobody could be disturbed");
}

const SECRET: &str = "correct horse battery staple";

#[test]
fn ranks_with_a_secret_join_over_hosts() {
    Ranks::new(4).env("SYMMEM_SECRET", SECRET).start(test_name!(), || {
        for round in 0..3 {
            let world = join(1 + round).unwrap();
            works(&world.host_group().unwrap());
            world.check().unwrap();
            store_barrier(&world, &format!("end {round}"));
        }
    });
}

/// Rank 2, alone on its host, has another secret, or none.
#[test]
fn a_wrong_secret_is_refused_on_both_sides_by_rank_and_variable() {
    for other in ["another secret of another job", ""] {
        Ranks::new(3).env("OTHER", other).env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
            let secret = if rank() == 2 { std::env::var("OTHER").unwrap() } else { SECRET.into() };
            super::set("SYMMEM_SECRET", &secret);
            let begin = Instant::now();
            let e = join(2).unwrap_err().to_string();
            println!("{e}");
            assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
            assert!(e.contains("SYMMEM_SECRET") && e.contains("SYMMEM_SECRET_FILE"), "{e}");
            assert!(e.contains(if rank() == 2 { "rank 0" } else { "rank 2" }), "{e}");
        });
    }
}
