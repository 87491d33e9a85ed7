//! Who connects to a rank and is none: it delays nobody and changes nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use symmem::store::{Store, TcpStore};
use symmem_testing::{Job, Ranks, test_name};

use super::{join, meet, ms, rank, works};

/// The ports at which processes of this machine listen on the loopback address, but for the store's.
fn listening(store: u16) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (address, port) = fields.next()?.split_once(':')?;
        let is_listening = fields.nth(1)? == "0A";
        let port = u16::from_str_radix(port, 16).ok()?;
        (is_listening && address == "0100007F" && port != store).then_some(port)
    };
    table.lines().filter_map(port).collect()
}

fn attack(port: u16, number: usize) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let long = [&u16::MAX.to_le_bytes()[..], &[7; 3000]].concat();
    let opening = |from: u32, to: u32| {
        [&20_u16.to_le_bytes()[..], b"symmem 1\0\0\0\0", &from.to_le_bytes(), &to.to_le_bytes()]
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
            [&16_u16.to_le_bytes()[..], b"symmem 1", &from, &to].concat()
        }
    };
    let _ = stream.write_all(&said);
    Some(stream)
}

/// While rank 3 is late, strangers call rank 0, many more than it keeps.
#[test]
fn strangers_that_call_delay_nobody_and_get_nothing() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let disturb = |job: &mut Job| {
        let store: u16 = job.store.rsplit_once(':').unwrap().1.parse().unwrap();
        let begin = Instant::now();
        let (mut held, mut made) = (Vec::new(), 0);
        let watch = TcpStore::connect(&job.store, symmem::Deadline::after(ms(5000))).unwrap();
        while begin.elapsed() < Duration::from_secs(6)
            && !watch.check(&["test/joined/all"]).unwrap()
        {
            for port in listening(store) {
                for _ in 0..8 {
                    held.extend(attack(port, made));
                    made += 1;
                }
            }
            if held.len() > 600 {
                held.drain(..300);
            }
            std::thread::sleep(ms(1));
        }
        println!("{made} attempts");
        assert!(made > 100, "{made}");
        for stream in &mut held {
            // Whatever it said, nobody has answered.
            stream.set_nonblocking(true).unwrap();
            let got = stream.read(&mut [0; 64]);
            assert!(!matches!(got, Ok(1..)), "a stranger was told something");
        }
        STOP.store(true, Ordering::Relaxed);
    };
    Ranks::new(4).env("SYMMEM_TIMEOUT", 30).meanwhile(disturb).start(test_name!(), || {
        if rank() == 3 {
            std::thread::sleep(ms(1500));
        }
        let begin = Instant::now();
        let world = join(2).unwrap();
        println!("joined after {:?}", begin.elapsed());
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        meet(&world, "joined");
        works(&world.host_group().unwrap());
        world.check().unwrap();
        meet(&world, "end");
    });
}
