//! Clients and servers that break the protocol harm only themselves.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use symmem::store::{Store, TcpServer, TcpStore};
use symmem::{Deadline, Error};

use super::site::{LONG, client, server};

const VALIDATE: u32 = 0x3C85_F7CE;

fn raw(server: &TcpServer) -> TcpStream {
    raw_at(server.local_addr().unwrap())
}

fn validated(server: &TcpServer) -> TcpStream {
    validated_at(server.local_addr().unwrap())
}

fn raw_at(server: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(server).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn validated_at(server: SocketAddr) -> TcpStream {
    let mut stream = raw_at(server);
    stream.write_all(&[&[0], &VALIDATE.to_ne_bytes()[..]].concat()).unwrap();
    stream
}

fn query(kind: u8, lengths_and_bytes: &[(u64, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![kind];
    for (len, content) in lengths_and_bytes {
        bytes.extend_from_slice(&len.to_ne_bytes());
        bytes.extend_from_slice(content);
    }
    bytes
}

/// Fails if the server keeps the connection.
fn assert_dropped(mut stream: TcpStream, why: &str) {
    match stream.read(&mut [0; 64]) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{why}: expected the end of the connection, got {other:?}"),
    }
}

#[test]
fn garbage_is_dropped_and_a_good_client_goes_on() {
    let server = server();
    let good = client(&server);
    let huge = [u64::MAX, 1 << 63, 1 << 40, 65 << 20];
    let mut garbage: Vec<(String, Vec<u8>)> =
        (14..=255).step_by(7).map(|kind| (format!("kind {kind}"), vec![kind])).collect();
    for len in huge {
        for kind in [1, 2, 3, 4, 8, 9] {
            garbage.push((format!("kind {kind} with a key of {len}"), query(kind, &[(len, b"x")])));
        }
        for kind in [1, 2, 9] {
            let bytes = query(kind, &[(1, b"k"), (len, b"x")]);
            garbage.push((format!("kind {kind} with a value of {len}"), bytes));
        }
        for kind in [5, 6, 10, 11] {
            garbage.push((format!("kind {kind} of {len} keys"), query(kind, &[(len, b"")])));
        }
    }
    garbage.push(("a wrong word".to_owned(), b"\0\x01\x02\x03\x04".to_vec()));
    let wait = query(6, &[(1, b""), (7, b"missing")]);
    garbage.push(("two waits".to_owned(), [wait.clone(), wait].concat()));
    for (i, (why, bytes)) in garbage.iter().enumerate() {
        let mut stream = validated(&server);
        stream.write_all(bytes).unwrap();
        assert_dropped(stream, why);
        assert_eq!(good.add("n", 1).unwrap(), i as i64 + 1);
    }
}

#[test]
fn whoever_does_not_validate_first_is_dropped() {
    let server = server();
    let good = client(&server);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &query(1, &[(1, b"k"), (1, b"v")]), b"\x07"] {
        let mut stream = raw(&server);
        stream.write_all(bytes).unwrap();
        assert_dropped(stream, "no validation");
    }
    assert_eq!(good.num_keys().unwrap(), 0);
}

#[test]
fn a_query_cut_off_at_any_byte_changes_nothing() {
    let server = server();
    let good = client(&server);
    let whole = query(11, &[(2, b""), (2, b"/a"), (1, b"1"), (2, b"/b"), (3, b"333")]);
    for len in 0..whole.len() {
        validated(&server).write_all(&whole[..len]).unwrap();
        good.set("alive", b"").unwrap();
    }
    let mut stream = validated(&server);
    stream.write_all(&whole).unwrap();
    good.wait(&["a", "b"], LONG).unwrap();
    assert_eq!(good.num_keys().unwrap(), 3);
}

#[test]
fn a_client_that_sends_byte_by_byte_holds_up_nobody() {
    let server = server();
    let good = client(&server);
    let mut slow = validated(&server);
    slow.set_nodelay(true).unwrap();
    for (i, byte) in query(1, &[(5, b"/slow"), (3, b"yes")]).into_iter().enumerate() {
        assert!(!good.check(&["slow"]).unwrap());
        slow.write_all(&[byte]).unwrap();
        assert_eq!(good.add("n", 1).unwrap(), i as i64 + 1);
    }
    assert_eq!(good.get("slow", LONG).unwrap(), b"yes");
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody() {
    let server = server();
    let good = client(&server);
    good.set("big", &vec![1; 4 << 20]).unwrap();
    let mut deaf = validated(&server);
    deaf.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let gets = query(3, &[(4, b"/big")]).repeat(1000);
    // Until the server stops listening to it. Its answers would take 4 GiB for each round.
    let mut rounds = 0;
    while deaf.write_all(&gets).is_ok() {
        good.add("n", 1).unwrap();
        rounds += 1;
        assert!(rounds < 10_000, "the server reads on although nobody takes the answers");
    }
    assert_eq!(good.get("big", LONG).unwrap().len(), 4 << 20);
    // It is heard again as soon as it reads.
    let mut answer = vec![0; 8 + (4 << 20)];
    for _ in 0..20 {
        deaf.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], (4u64 << 20).to_ne_bytes());
    }
}

#[test]
fn a_client_that_ends_its_own_wait_gets_its_answers_in_order() {
    let server = server();
    let mut stream = validated(&server);
    let wait = query(6, &[(1, b""), (2, b"/k")]);
    let set = query(1, &[(2, b"/k"), (1, b"v")]);
    stream.write_all(&[wait, set, b"\x0c".to_vec()].concat()).unwrap();
    let mut answers = [9; 2];
    stream.read_exact(&mut answers).unwrap();
    assert_eq!(answers, [0, 1], "first the end of the wait, then that of its cancellation");
}

#[test]
fn an_answer_beyond_the_limit_is_refused() {
    let server = server();
    let good = client(&server);
    good.set("big", &vec![1; 4 << 20]).unwrap();
    let mut greedy = validated(&server);
    let keys: Vec<(u64, &[u8])> = vec![(4, b"/big"); 17];
    greedy.write_all(&query(10, &[&[(17, &b""[..])], &keys[..]].concat())).unwrap();
    assert_dropped(greedy, "an answer of 68 MiB");
    assert!(good.check(&["big"]).unwrap());
}

/// A server that answers every connection with `answer` and whatever follows.
fn with_server(answer: &'static [u8], f: impl FnOnce(&str)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut greeting = [0; 10];
            stream.read_exact(&mut greeting).unwrap();
            let word: &[u8] = if answer.is_empty() { b"" } else { &greeting[6..] };
            stream.write_all(&[word, answer].concat()).unwrap();
            // Until the client leaves.
            let _ = stream.read_to_end(&mut vec![]);
        });
        f(&address);
    });
}

#[test]
fn a_promise_of_a_huge_value_is_a_protocol_error() {
    with_server(b"\0\xff\xff\xff\xff\xff\xff\xff\x7f", |address| {
        let store = TcpStore::connect(address, LONG).unwrap();
        let error = store.get("k", LONG).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("store at {address}: ")), "{error}");
    });
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    with_server(b"", |address| {
        let deadline = Deadline::within(Duration::from_millis(100));
        let error = TcpStore::connect(address, deadline).err().unwrap();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains(address), "{error}");
    });
}

#[test]
fn a_call_to_a_server_that_has_gone_silent_ends_at_the_limit() {
    with_server(b"\x01", |address| {
        let store = TcpStore::connect(address, LONG).unwrap();
        let store = store.with_limit(Duration::from_millis(100));
        // The answer to the first call is there already; to the second, nothing comes.
        assert!(!store.check(&["k"]).unwrap());
        let error = store.num_keys().unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(address) && text.contains("no answer to num_keys"), "{text}");
    });
}

#[test]
fn a_service_that_is_no_store_is_named_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
            let _ = stream.read_to_end(&mut vec![]);
        });
        let error = TcpStore::connect(&address, LONG).err().unwrap();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    });
}

/// Calls that are given a deadline end by it, also where nobody answers, and say that it is the store.
#[test]
fn a_wait_at_a_server_that_has_gone_silent_ends_at_its_deadline() {
    with_server(b"\x01", |address| {
        let store = TcpStore::connect(address, LONG).unwrap();
        assert!(!store.check(&["k"]).unwrap());
        let begin = std::time::Instant::now();
        let error = store.get("k", Deadline::within(Duration::from_millis(500))).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    });
}

#[test]
fn calls_without_a_deadline_end_with_the_limit_that_the_store_was_given() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut greeting = [0; 10];
            stream.read_exact(&mut greeting).unwrap();
            stream.write_all(&greeting[6..]).unwrap();
            let _ = stream.read_to_end(&mut vec![]);
        });
        let store = TcpStore::connect(&address, LONG).unwrap();
        let store = store.until(Deadline::after(Duration::from_millis(300))).unwrap();
        let begin = std::time::Instant::now();
        let error = store.add("n", 1).unwrap_err();
        assert!(error.to_string().contains("no answer to add"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    });
}

const ALONE: &str = "SYMMEM_TEST_ALONE";
const MOST_MEMORY: u64 = 64 << 20;

/// A server in a process of its own: its memory and its descriptors are not those of its clients and attackers.
struct Alone {
    process: Child,
    address: SocketAddr,
}

impl Alone {
    /// This program again, with at most so many descriptors.
    fn start(descriptors: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "hostile::serve_alone", "--ignored", "--nocapture"]);
        command.env(ALONE, descriptors.to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
        let address = lines.map_while(Result::ok).find_map(|line| {
            let (_, address) = line.split_once("address=")?;
            address.parse().ok()
        });
        Self { process, address: address.expect("the server's address") }
    }

    fn raw(&self) -> TcpStream {
        raw_at(self.address)
    }

    fn validated(&self) -> TcpStream {
        validated_at(self.address)
    }

    fn client(&self) -> TcpStore {
        TcpStore::connect(&self.address.to_string(), LONG).unwrap()
    }

    /// Fails if the server has ever taken more memory than it may.
    fn assert_small(&self) {
        let status = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(status).unwrap();
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let most = most.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        println!("{} MiB", most >> 20);
        assert!(most < MOST_MEMORY, "{most} bytes");
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// No test, but what the process of [`Alone`] does: it serves until its input ends, also because the test was killed.
#[test]
#[ignore = "a part of other tests, which start it"]
fn serve_alone() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Ok(descriptors) = std::env::var(ALONE) else { return };
    let current = Some(descriptors.parse().unwrap());
    setrlimit(Resource::Nofile, Rlimit { current, ..getrlimit(Resource::Nofile) }).unwrap();
    let server = server();
    println!("\naddress={}", server.local_addr().unwrap());
    let _ = std::io::stdin().read_to_end(&mut vec![]);
}

#[test]
fn answers_that_nobody_reads_cost_no_memory() {
    let server = Alone::start(1000);
    let good = server.client();
    good.set("big", &vec![1; 4 << 20]).unwrap();
    let keys: Vec<(u64, &[u8])> = vec![(4, b"/big"); 15];
    let multi_get = query(10, &[&[(15, &b""[..])], &keys[..]].concat());
    let mut deaf: Vec<TcpStream> = (0..60).map(|_| server.validated()).collect();
    deaf.iter_mut().for_each(|stream| stream.write_all(&multi_get).unwrap());
    for _ in 0..50 {
        assert_eq!(good.get("big", LONG).unwrap().len(), 4 << 20);
    }
    server.assert_small();
}

/// Answers keep the values that they were given, so each replaced value that somebody does not read costs its memory.
#[test]
fn values_that_only_unread_answers_have_are_limited_together() {
    let server = Alone::start(1000);
    let good = server.client();
    let mut deaf = Vec::new();
    for _ in 0..40 {
        good.set("big", &vec![1; 4 << 20]).unwrap();
        let mut stream = server.validated();
        stream.write_all(&query(3, &[(4, b"/big")])).unwrap();
        deaf.push(stream);
        good.check(&["big"]).unwrap();
    }
    assert_eq!(good.get("big", LONG).unwrap().len(), 4 << 20);
    server.assert_small();
}

/// A client that pauses within a long query, while others do not read their answers, is not the one to drop.
#[test]
fn a_long_query_that_pauses_outlives_those_who_do_not_read() {
    let server = server();
    let good = client(&server);
    let mut deaf = Vec::new();
    for _ in 0..4 {
        good.set("big", &vec![1; 4 << 20]).unwrap();
        let mut stream = validated(&server);
        stream.write_all(&query(3, &[(4, b"/big")])).unwrap();
        deaf.push(stream);
        good.check(&["big"]).unwrap();
    }
    good.set("big", b"").unwrap();
    let mut slow = validated(&server);
    let value = vec![1; 1 << 20];
    slow.write_all(&query(1, &[(5, b"/slow"), (2 << 20, &value)])).unwrap();
    // Longer than the server waits for the rest of a query that keeps others from sending theirs.
    std::thread::sleep(Duration::from_millis(3500));
    slow.write_all(&value).unwrap();
    let deadline = Deadline::within(Duration::from_secs(10));
    assert_eq!(good.get("slow", deadline).unwrap().len(), 2 << 20);
}

#[test]
fn queries_that_never_end_are_limited_together_and_long_ones_of_others_still_come_through() {
    let server = Alone::start(1000);
    let part = [query(1, &[(2, b"/x")]), (8u64 << 20).to_ne_bytes().to_vec(), vec![0; 7 << 20]];
    let part = part.concat();
    let mut endless: Vec<TcpStream> = (0..6).map(|_| server.validated()).collect();
    for stream in &mut endless {
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(&part);
    }
    let good = server.client();
    good.set("small", &[1; 1000]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| good.set("big", &vec![1; 6 << 20]).unwrap());
        for stream in &mut endless {
            let _ = stream.write(&part);
        }
    });
    assert_eq!(good.get("big", LONG).unwrap().len(), 6 << 20);
    server.assert_small();
}

#[test]
fn a_store_that_is_full_refuses_more_and_keeps_what_it_has() {
    let server = Alone::start(1000);
    let good = server.client();
    good.set("mine", b"kept").unwrap();
    let greedy = server.client();
    let refused = (0..100).find(|i| greedy.set(&format!("k{i}"), &vec![0; 1 << 20]).is_err());
    assert!(refused.is_some_and(|at| at >= 16), "{refused:?}");
    let tiny = (0..200_000).find(|i| greedy.set(&format!("t{i}"), &[0; 500]).is_err());
    assert!(tiny.is_some());
    assert_eq!(good.get("mine", LONG).unwrap(), b"kept");
    assert!(good.delete("k0").unwrap());
    good.set("mine", b"changed").unwrap();
    server.assert_small();
}

#[test]
fn idle_connections_make_room_for_those_who_come_late() {
    let server = Alone::start(100);
    let good = server.client();
    good.set("mine", b"kept").unwrap();
    // Twice what the server can hold, each time.
    for silent in [true, false] {
        let mut idle = Vec::new();
        for _ in 0..5 {
            for _ in 0..40 {
                idle.push(if silent { server.raw() } else { server.validated() });
            }
            let late = server.client();
            assert_eq!(late.get("mine", LONG).unwrap(), b"kept");
        }
        assert_eq!(good.get("mine", LONG).unwrap(), b"kept");
    }
}

#[test]
fn whoever_says_nothing_is_let_go() {
    let server = server();
    let stream = raw(&server);
    let mut known = validated(&server);
    assert_dropped(stream, "silence");
    known.write_all(&query(13, &[])).unwrap();
    known.write_all(&7u32.to_ne_bytes()).unwrap();
    let mut answer = [0; 4];
    known.read_exact(&mut answer).unwrap();
    assert_eq!(answer, 7u32.to_ne_bytes(), "a client may be silent for as long as it likes");
}
