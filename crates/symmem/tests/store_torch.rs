//! Live in both directions with PyTorch: torch's clients on our server, our client on torch's servers.
//!
//! Needs a Python with torch (`SYMMEM_TEST_PYTHON`, or `python3`); without one each test says so and passes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

#[cfg(target_endian = "little")]
#[path = "store/conversation.rs"]
mod conversation;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use symmem::store::{PrefixStore, Store, TcpServer, TcpStore};
use symmem::{Deadline, Error};

const LONG: Deadline = Deadline::within(Duration::from_secs(60));
const SHORT: Deadline = Deadline::within(Duration::from_millis(50));

/// The Python to use, or `None`, with the reason printed, if it has no torch.
fn python() -> Option<&'static str> {
    static PYTHON: OnceLock<Result<String, String>> = OnceLock::new();
    let found = PYTHON.get_or_init(|| {
        let python = std::env::var("SYMMEM_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let import =
            Command::new(&python).args(["-c", "from torch.distributed import TCPStore"]).output();
        match import {
            Ok(output) if output.status.success() => Ok(python),
            Ok(_) => Err(format!("{python} has no torch.distributed")),
            Err(error) => Err(format!("{python}: {error}")),
        }
    });
    found.as_deref().map_err(|why| eprintln!("skipped: {why}; set SYMMEM_TEST_PYTHON")).ok()
}

/// A Python process that does what it is told line by line. Killed when dropped.
struct Script {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Script {
    fn start(python: &str, program: &str, args: &[&str]) -> Self {
        let mut command = Command::new(python);
        command.args(["-u", "-c", program]).args(args);
        // torch says at length whenever a connection ends, which is what some of these tests are about.
        command.env("TORCH_CPP_LOG_LEVEL", "FATAL");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python starts");
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Runs one statement and waits until it is done.
    fn tell(&mut self, statement: &str) {
        writeln!(self.input, "{statement}").unwrap();
        assert_eq!(self.line(), "done", "{statement}");
    }

    fn finish(mut self) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
        assert_eq!(rest.trim(), "fine");
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const CLIENT: &str = r#"
import sys, threading, time
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore

def connect():
    return TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False,
                    timeout=timedelta(seconds=60))

def fails(call):
    try:
        call()
    except Exception:
        return True

def later(call):
    def run():
        time.sleep(0.1)
        call()
    threading.Thread(target=run).start()

a, b = connect(), connect()
assert a.num_keys() == 0
a.set("k", "v")
assert a.get("k") == b"v" and b.get("k") == b"v"
later(lambda: b.set("later", "now"))
assert a.get("later") == b"now"
assert a.add("n", 5) == 5 and b.add("n", -7) == -2 and a.get("n") == b"-2"
assert a.check(["k", "n"]) and not a.check(["k", "missing"]) and a.check([])
assert a.compare_set("c", "old", "new") == b"old" and not a.check(["c"])
assert a.compare_set("c", "", "one") == b"one"
assert a.compare_set("c", "x", "two") == b"one"
assert a.compare_set("c", "one", "two") == b"two"
assert a.delete_key("c") and not a.delete_key("c")
assert a.has_extended_api()
a.append("log", "one"); a.append("log", ", two")
assert a.get("log") == b"one, two"
a.multi_set(["m1", "m2"], ["1", "22"])
assert a.multi_get(["m2", "m1"]) == [b"22", b"1"]
assert a.num_keys() == 6, a.num_keys()
b.wait(["k", "m1", "m2"])
assert fails(lambda: a.wait(["never"], timedelta(milliseconds=100)))
assert a.get("k") == b"v"
later(lambda: b.multi_set(["w1", "w2"], ["", ""]))
a.wait(["w1", "k", "w2"], timedelta(seconds=60))
a.set_timeout(timedelta(milliseconds=100))
assert fails(lambda: a.get("never")) and a.check(["k"])
assert len(a.clone().get("k")) == 1
PrefixStore("some", PrefixStore("prefix", b)).set("inner", "torch")
a.set("big", "x" * (4 << 20))
assert b.get("big") == b"x" * (4 << 20)
a.set("text", "no number")
assert fails(lambda: a.add("text", 1)) and b.get("text") == b"no number"
workers = TCPStore("127.0.0.1", int(sys.argv[1]), world_size=1, is_master=False)
workers.set("torch", "was here")
print("fine")
"#;

#[test]
fn torch_clients_do_everything_on_our_server() {
    let Some(python) = python() else { return };
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    let script = Script::start(python, CLIENT, &[&port]);
    let store = TcpStore::connect(&server.local_addr().unwrap().to_string(), LONG).unwrap();
    assert_eq!(store.get("torch", LONG).unwrap(), b"was here");
    // torch puts the outer prefix last into the key: prefix/some/inner.
    let part = PrefixStore::new("prefix/some", std::sync::Arc::new(store));
    assert_eq!(part.get("inner", LONG).unwrap(), b"torch");
    script.finish();
}

const SERVER: &str = r#"
import sys
from datetime import timedelta
from torch.distributed import TCPStore
try:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                     timeout=timedelta(seconds=60), use_libuv=sys.argv[1] == "True")
except Exception as error:
    print("unsupported", error)
    sys.exit()
print(store.port)
for line in sys.stdin:
    exec(line)
    print("done")
print("fine")
"#;

/// Runs `f` with a client of each kind of server that torch has.
fn on_torch_servers(f: impl Fn(Script, TcpStore)) {
    let Some(python) = python() else { return };
    for libuv in ["True", "False"] {
        let mut script = Script::start(python, SERVER, &[libuv]);
        let port = script.line();
        if port.starts_with("unsupported") {
            eprintln!("skipped: use_libuv={libuv}: {port}");
            continue;
        }
        let store = TcpStore::connect(&format!("127.0.0.1:{port}"), LONG).unwrap();
        f(script, store);
    }
}

#[test]
fn our_client_does_everything_on_torch_servers() {
    on_torch_servers(|mut script, store| {
        store.set("k", b"v").unwrap();
        script.tell("assert store.get('k') == b'v'");
        script.tell("store.set('t', 'torch')");
        assert_eq!(store.get("t", LONG).unwrap(), b"torch");
        assert_eq!(store.add("n", 5).unwrap(), 5);
        script.tell("assert store.add('n', 2) == 7");
        assert_eq!(store.get("n", LONG).unwrap(), b"7");
        assert!(store.check(&["k", "n", "t"]).unwrap());
        assert!(store.check(&[]).unwrap());
        assert!(!store.check(&["missing"]).unwrap());
        assert_eq!(store.compare_set("c", b"old", b"new").unwrap(), b"old");
        assert_eq!(store.compare_set("c", b"", b"one").unwrap(), b"one");
        assert_eq!(store.compare_set("c", b"x", b"two").unwrap(), b"one");
        assert_eq!(store.compare_set("c", b"one", b"two").unwrap(), b"two");
        assert!(store.delete("c").unwrap());
        assert!(!store.delete("c").unwrap());
        store.append("log", b"one").unwrap();
        store.append("log", b", two").unwrap();
        store.multi_set(&[("m1", b"1"), ("m2", b"")]).unwrap();
        assert_eq!(
            store.multi_get(&["log", "m2", "m1"], LONG).unwrap(),
            [&b"one, two"[..], b"", b"1"]
        );
        script.tell("assert store.num_keys() == 6");
        assert_eq!(store.num_keys().unwrap(), 6);
        store.wait(&["k", "m1"], LONG).unwrap();
        store.wait(&[], LONG).unwrap();
        let big = vec![9; 4 << 20];
        store.set("big", &big).unwrap();
        assert!(store.get("big", LONG).unwrap() == big);
        store.set("text", b"no number").unwrap();
        let error = store.add("text", 1).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert_eq!(store.get("text", LONG).unwrap(), b"no number");
    });
}

#[test]
fn our_client_works_after_a_wait_on_torch_servers_that_timed_out() {
    on_torch_servers(|mut script, store| {
        for round in 0..3 {
            let key = format!("late {round}");
            let error = store.wait(&["never", &key], SHORT).unwrap_err();
            assert!(matches!(error, Error::Timeout { op: "wait", .. }), "{error}");
            let error = store.get(&key, SHORT).unwrap_err();
            assert!(matches!(error, Error::Timeout { op: "get", .. }), "{error}");
            script.tell(&format!("store.set('{key}', 'v')"));
            assert_eq!(store.add("n", 1).unwrap(), round + 1);
            assert_eq!(store.get(&key, LONG).unwrap(), b"v");
        }
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| store.wait(&["go", "n"], LONG));
            std::thread::sleep(Duration::from_millis(50));
            script.tell("store.set('go', '')");
            waiter.join().unwrap().unwrap();
        });
    });
}

#[test]
fn a_killed_server_process_ends_a_wait() {
    on_torch_servers(|script, store| {
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| store.get("never", Deadline::NEVER));
            std::thread::sleep(Duration::from_millis(50));
            drop(script);
            let error = waiter.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::Protocol { .. } | Error::System { .. }), "{error}");
        });
        store.num_keys().unwrap_err();
    });
}

#[cfg(target_endian = "little")]
#[test]
fn torch_servers_answer_with_the_bytes_that_our_tests_expect() {
    use conversation::{VALIDATE, conversation, receive};
    on_torch_servers(|_script, store| {
        let mut stream = std::net::TcpStream::connect(store.address()).unwrap();
        stream.write_all(VALIDATE).unwrap();
        for (name, query, answer) in conversation() {
            // torch's server without libuv ends the connection instead; nobody depends on either.
            if name == "GET of nothing" {
                continue;
            }
            stream.write_all(query.as_bytes()).unwrap();
            assert_eq!(receive(&mut stream, answer.len()), answer, "{name}");
        }
    });
}

#[cfg(target_endian = "little")]
#[test]
fn torch_clients_send_the_bytes_that_our_tests_expect() {
    use conversation::{VALIDATE, conversation, play};
    let Some(python) = python() else { return };
    let program = r#"
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
store.set("k", "val")
assert store.get("k") == b"val"
assert store.compare_set("k", "val", "w") == b"w"
assert store.add("n", 7) == 7
assert store.check(["k", "n"]) and not store.check(["x"])
try:
    store.wait(["x"], timedelta(milliseconds=50))
    sys.exit(1)
except Exception:
    pass
assert store.num_keys() == 2
assert store.delete_key("n") and not store.delete_key("n")
store.append("k", "!")
store.multi_set(["a", "b"], ["1", ""])
print("fine")
"#;
    let conversation = conversation();
    let exchange = |name| {
        let (_, query, answer) = conversation.iter().find(|(n, ..)| *n == name).unwrap();
        (query.as_bytes(), &answer[..])
    };
    let mut script = vec![(VALIDATE, &b"ping"[..])];
    script.extend(["SET", "WAIT", "GET", "COMPARE_SET", "ADD", "CHECK"].map(exchange));
    script.extend(["CHECK for nothing", "WAIT in vain", "CANCEL_WAIT"].map(exchange));
    script.extend(["GETNUMKEYS", "DELETE_KEY", "DELETE_KEY of nothing"].map(exchange));
    script.extend(["APPEND", "MULTI_SET"].map(exchange));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let client = Script::start(python, program, &[&port]);
    play(&listener, &script);
    client.finish();
}
