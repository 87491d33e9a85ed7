//! The bytes of every query and answer on a little-endian machine. `store_torch` holds them against torch.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

pub const VALIDATE: &[u8] = b"\0\xce\xf7\x85\x3c";

/// Lengths and numbers are 8 bytes; this writes one in one.
macro_rules! n {
    ($n:literal) => {
        concat!($n, "\0\0\0\0\0\0\0")
    };
}

/// What a client sends and what comes back, in order, on one connection to an empty store.
pub fn conversation() -> Vec<(&'static str, String, Vec<u8>)> {
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

pub fn receive(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Plays the server of a conversation: what is expected, then what is answered. `PING` is answered with its word.
pub fn play(listener: &TcpListener, script: &[(&[u8], &[u8])]) {
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
