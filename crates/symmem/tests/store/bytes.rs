//! Our server and our client, byte by byte.
#![cfg(target_endian = "little")]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use symmem::Deadline;
use symmem::store::{Store, TcpStore};

use super::conversation::{VALIDATE, conversation, play, receive};
use super::site::{LONG, server};

#[test]
fn the_server_answers_each_query_with_the_recorded_bytes() {
    let server = server();
    let mut stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
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
    let mut stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (mut queries, mut answers) = (VALIDATE.to_vec(), vec![]);
    for (_, query, answer) in conversation() {
        queries.extend_from_slice(query.as_bytes());
        answers.extend_from_slice(&answer);
    }
    stream.write_all(&queries).unwrap();
    assert_eq!(receive(&mut stream, answers.len()), answers);
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
