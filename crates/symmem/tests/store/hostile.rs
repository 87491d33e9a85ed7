//! Clients and servers that break the protocol harm only themselves.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use symmem::store::{Store, TcpServer, TcpStore};
use symmem::{Deadline, Error};

use super::site::{LONG, client, server};

const VALIDATE: u32 = 0x3C85_F7CE;

fn raw(server: &TcpServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn validated(server: &TcpServer) -> TcpStream {
    let mut stream = raw(server);
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
    validated(&server).write_all(&whole).unwrap();
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
        assert!(matches!(error, Error::Timeout { op: "num_keys", .. }), "{error}");
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
