//! The bytes of every query and answer, as recorded from torch 2.15 on a little-endian machine.
#![cfg(target_endian = "little")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use symmem::Deadline;
use symmem::store::{Store, TcpStore};

use super::site::{LONG, server};

const VALIDATE: &[u8] = b"\0\xce\xf7\x85\x3c";

/// Lengths and numbers are 8 bytes; this writes one in one.
macro_rules! n {
    ($n:literal) => {
        concat!($n, "\0\0\0\0\0\0\0")
    };
}

/// What a client sends and what comes back, in order, on one connection to an empty store.
fn conversation() -> Vec<(&'static str, String, Vec<u8>)> {
    let exchange = |name, query: &str, answer: &[u8]| (name, query.to_owned(), answer.to_vec());
    vec![
        exchange("PING", "\x0d\x04\x03\x02\x01", b"\x04\x03\x02\x01"),
        exchange("SET", concat!("\x01", n!("\x02"), "/k", n!("\x03"), "val"), b""),
        exchange("GET", concat!("\x03", n!("\x02"), "/k"), b"\x03\0\0\0\0\0\0\0val"),
        exchange("GET of nothing", concat!("\x03", n!("\x02"), "/x"), &[0; 8]),
        exchange(
            "COMPARE_SET",
            concat!("\x02", n!("\x02"), "/k", n!("\x03"), "val", n!("\x01"), "w"),
            b"\x01\0\0\0\0\0\0\0w",
        ),
        exchange("ADD", concat!("\x04", n!("\x02"), "/n", n!("\x07")), b"\x07\0\0\0\0\0\0\0"),
        exchange("CHECK", concat!("\x05", n!("\x02"), n!("\x02"), "/k", n!("\x02"), "/n"), b"\0"),
        exchange("CHECK for nothing", concat!("\x05", n!("\x01"), n!("\x02"), "/x"), b"\x01"),
        exchange("WAIT", concat!("\x06", n!("\x01"), n!("\x02"), "/k"), b"\0"),
        exchange("WAIT in vain", concat!("\x06", n!("\x01"), n!("\x02"), "/x"), b""),
        exchange("CANCEL_WAIT", "\x0c", b"\x01"),
        exchange("GETNUMKEYS", "\x07", b"\x02\0\0\0\0\0\0\0"),
        exchange("DELETE_KEY", concat!("\x08", n!("\x02"), "/n"), b"\x01\0\0\0\0\0\0\0"),
        exchange("DELETE_KEY of nothing", concat!("\x08", n!("\x02"), "/n"), &[0; 8]),
        exchange("APPEND", concat!("\x09", n!("\x02"), "/k", n!("\x01"), "!"), b""),
        exchange(
            "MULTI_SET",
            concat!(
                "\x0b",
                n!("\x02"),
                n!("\x02"),
                "/a",
                n!("\x01"),
                "1",
                n!("\x02"),
                "/b",
                n!("\0")
            ),
            b"",
        ),
        exchange(
            "MULTI_GET",
            concat!("\x0a", n!("\x03"), n!("\x02"), "/k", n!("\x02"), "/a", n!("\x02"), "/b"),
            b"\x02\0\0\0\0\0\0\0w!\x01\0\0\0\0\0\0\x001\0\0\0\0\0\0\0\0",
        ),
    ]
}

fn receive(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn the_server_answers_each_query_with_the_recorded_bytes() {
    let server = server();
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.write_all(VALIDATE).unwrap();
    for (name, query, answer) in conversation() {
        stream.write_all(query.as_bytes()).unwrap();
        assert_eq!(receive(&mut stream, answer.len()), answer, "{name}");
    }
    // Nothing was sent beyond the answers.
    stream.write_all(b"\x0d\x09\x09\x09\x09").unwrap();
    assert_eq!(receive(&mut stream, 4), [9; 4]);
}

#[test]
fn the_server_answers_queries_that_come_all_at_once() {
    let server = server();
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    let (mut queries, mut answers) = (VALIDATE.to_vec(), vec![]);
    for (_, query, answer) in conversation() {
        queries.extend_from_slice(query.as_bytes());
        answers.extend_from_slice(&answer);
    }
    stream.write_all(&queries).unwrap();
    assert_eq!(receive(&mut stream, answers.len()), answers);
}

/// Plays the server of a conversation: what is expected, then what is answered. `PING` is answered with its word.
fn play(listener: &TcpListener, script: &[(&[u8], &[u8])]) {
    let (mut stream, _) = listener.accept().unwrap();
    for (query, answer) in script {
        assert_eq!(receive(&mut stream, query.len()), *query);
        if answer == b"ping" {
            assert_eq!(receive(&mut stream, 1), [13]);
            let word = receive(&mut stream, 4);
            stream.write_all(&word).unwrap();
        } else {
            stream.write_all(answer).unwrap();
        }
    }
}

#[test]
fn the_client_sends_each_query_as_recorded() {
    let conversation = conversation();
    let of = |name| conversation.iter().find(|(n, ..)| *n == name).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = |name| (of(name).1.as_bytes(), &of(name).2[..]);
    let told = |name| (of(name).1.as_bytes(), &b"ping"[..]);
    let script = [
        (VALIDATE, &b"ping"[..]),
        told("SET"),
        asked("WAIT"),
        asked("GET"),
        asked("COMPARE_SET"),
        asked("ADD"),
        asked("CHECK"),
        asked("CHECK for nothing"),
        asked("WAIT in vain"),
        asked("CANCEL_WAIT"),
        asked("WAIT in vain"),
        // The key came in the last moment: both answers.
        (of("CANCEL_WAIT").1.as_bytes(), b"\0\x01"),
        asked("GETNUMKEYS"),
        asked("DELETE_KEY"),
        asked("DELETE_KEY of nothing"),
        told("APPEND"),
        told("MULTI_SET"),
        (b"\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k", b"\0"),
        (b"\x0a\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k", b"\x01\0\0\0\0\0\0\0w"),
    ];
    std::thread::scope(|scope| {
        scope.spawn(|| play(&listener, &script));
        let store = TcpStore::connect(&address, LONG).unwrap();
        let short = Deadline::within(Duration::from_millis(20));
        store.set("k", b"val").unwrap();
        assert_eq!(store.get("k", LONG).unwrap(), b"val");
        assert_eq!(store.compare_set("k", b"val", b"w").unwrap(), b"w");
        assert_eq!(store.add("n", 7).unwrap(), 7);
        assert!(store.check(&["k", "n"]).unwrap());
        assert!(!store.check(&["x"]).unwrap());
        store.wait(&["x"], short).unwrap_err();
        store.wait(&["x"], short).unwrap();
        assert_eq!(store.num_keys().unwrap(), 2);
        assert!(store.delete("n").unwrap());
        assert!(!store.delete("n").unwrap());
        store.append("k", b"!").unwrap();
        store.multi_set(&[("a", b"1"), ("b", b"")]).unwrap();
        assert_eq!(store.multi_get(&["k"], LONG).unwrap(), [b"w"]);
    });
}
