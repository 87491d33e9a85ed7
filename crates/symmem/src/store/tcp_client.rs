//! The client of a store server, ours or torch's.
//!
//! Calls of several threads go over several connections, so that nobody's wait holds up anyone else: a call
//! takes an idle connection or opens one, and puts it back when the answer is complete. Because a call may
//! go another way than the one before it, `set` and its like return only once the server has carried them out.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::connection::{Connection, Waited, last_moment};
use super::limits::{check_entries, check_entry, check_key, check_keys, check_value};
use super::stream::Address;
use super::wire::{Kind, Message, NOT_READY, READY};
use super::{SharedStore, Store, timed_out};
use crate::error::{Error, Result};
use crate::sync::Deadline;

/// How long a call without a deadline may take, unless [`TcpStore::with_limit`] says otherwise.
pub const CALL_LIMIT: Duration = Duration::from_secs(300);

/// Connections kept for later calls; more are open only while more threads call at once.
const MAX_IDLE: usize = 4;

/// The first and the longest pause between two attempts to connect.
const RETRY: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// A store on a server, shared with all its other clients, torch's `TCPStore` among them.
pub struct TcpStore {
    server: Arc<Server>,
    /// How long a call without a deadline may take, and when all are over.
    limit: Duration,
    last: Deadline,
}

struct Server {
    address: String,
    /// What errors call it.
    name: String,
    peer: Address,
    /// This end's address, over TCP.
    local: Option<IpAddr>,
    idle: Mutex<Vec<Connection>>,
}

impl TcpStore {
    /// Connects to the server at `addr` (`host:port`, or `unix:` and a path), trying again until it is there or the deadline passes.
    pub fn connect(addr: &str, deadline: Deadline) -> Result<Self> {
        Self::connect_as(addr, format!("store at {addr}"), deadline)
    }

    /// As [`connect`](Self::connect), to a server that errors call `with`.
    pub(crate) fn connect_as(addr: &str, with: String, deadline: Deadline) -> Result<Self> {
        let deadline = deadline.start();
        let mut nap = RETRY.0;
        loop {
            let why = match reach(addr, &with, deadline) {
                Ok((peer, connection)) => {
                    let (address, local) = (addr.to_owned(), connection.local_address());
                    let idle = Mutex::new(vec![connection]);
                    let server = Arc::new(Server { address, name: with, peer, local, idle });
                    return Ok(Self { server, limit: CALL_LIMIT, last: Deadline::NEVER });
                }
                Err(error) if may_pass(&error) => error.to_string(),
                Err(error) => return Err(error),
            };
            if deadline.expired() {
                let why = format!("no connection after {:.1?}; last: {why}", deadline.elapsed());
                return Err(Error::Unavailable { what: with, why });
            }
            std::thread::sleep(deadline.nap(nap));
            nap = (nap * 2).min(RETRY.1);
        }
    }

    /// Sets how long a call without a deadline may take; 0 means for ever.
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = if limit.is_zero() { Duration::MAX } else { limit };
        self
    }

    /// The server's address, as given to [`connect`](Self::connect).
    pub fn address(&self) -> &str {
        &self.server.address
    }

    /// The pool may be used after a panic elsewhere: what lies in it is whole.
    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.server.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one request, whose answer is there by `last`, on a connection that no other thread uses.
    fn request<T>(
        &self,
        op: &'static str,
        last: Deadline,
        request: impl FnOnce(&mut Connection) -> Result<T>,
    ) -> Result<T> {
        let Server { name, peer, .. } = &*self.server;
        // The server may have let go of one that was silent for long.
        let idle = std::iter::from_fn(|| self.idle().pop())
            .find_map(|mut idle| if idle.is_open() { Some(idle) } else { None });
        let result = idle.map_or_else(|| Connection::open(peer, name, last), Ok);
        let result = result.and_then(|mut connection| {
            let result = request(&mut connection);
            let mut idle = self.idle();
            match &result {
                Ok(_) if connection.is_in_step() => {
                    if idle.len() < MAX_IDLE {
                        idle.push(connection);
                    }
                }
                // The others have most likely ended too. If not, they cost little to replace.
                Err(Error::Protocol { .. } | Error::System { .. }) => idle.clear(),
                Ok(_) | Err(_) => {}
            }
            result
        });
        result.map_err(|error| match error {
            // Not that something has not happened yet: nobody says so.
            Error::Timeout { after, .. } if last.remaining() == Some(Duration::ZERO) => {
                let why = format!("no answer to {op} within {after:.1?}");
                Error::Unavailable { what: name.clone(), why }
            }
            other => other,
        })
    }

    /// When a call that is given no deadline is over.
    fn limit(&self) -> Deadline {
        Deadline::after(self.last.nap(self.limit))
    }

    /// The caller's deadline, and when the call is over at the latest.
    fn deadlines(&self, deadline: Deadline) -> (Deadline, Deadline) {
        let deadline = deadline.start();
        let last = last_moment(deadline);
        // A server that is slow once is no reason to give up while there is time: see `until`.
        let longer =
            self.last.remaining().is_some_and(|all| last.remaining().is_some_and(|l| l < all));
        (deadline, if longer { self.last } else { last })
    }

    /// Sends `message`, whose answer is read by `answer`.
    fn ask<T>(
        &self,
        op: &'static str,
        message: &Message,
        answer: impl FnOnce(&mut Connection, Deadline) -> Result<T>,
    ) -> Result<T> {
        let until = self.limit();
        self.request(op, until, |connection| {
            connection.send(op, message, until)?;
            answer(connection, until)
        })
    }

    /// Sends `message`, which has no answer.
    fn tell(&self, op: &'static str, message: Message) -> Result<()> {
        let until = self.limit();
        self.request(op, until, |connection| connection.confirm(op, message, until))
    }

    fn ask_number(&self, op: &'static str, message: &Message) -> Result<i64> {
        self.ask(op, message, |connection, until| {
            connection.receive(op, until).map(i64::from_ne_bytes)
        })
    }

    /// Waits for all `keys`, then asks `query` for their values.
    fn read(
        &self,
        op: &'static str,
        keys: &[&str],
        deadline: Deadline,
        query: &Message,
    ) -> Result<Vec<Vec<u8>>> {
        check_keys(op, keys)?;
        let (deadline, last) = self.deadlines(deadline);
        loop {
            let values = self.request(op, last, |connection| {
                if connection.wait(op, keys, deadline, last)? == Waited::Expired {
                    return Ok(None);
                }
                // Without a deadline only the wait may last: an answer that is due may not.
                let until = deadline.remaining().map_or_else(|| self.limit(), |_| last);
                connection.send(op, query, until)?;
                let values = keys.iter().map(|_| connection.receive_value(op, until));
                values.collect::<Result<Vec<_>>>().map(Some)
            })?;
            let values = values.ok_or_else(|| timed_out(op, deadline))?;
            // A key deleted since the wait reads as empty: then wait again.
            let read = keys.iter().zip(&values);
            let empty: Vec<&str> = read.filter(|(_, v)| v.is_empty()).map(|(k, _)| *k).collect();
            if empty.is_empty() || self.check(&empty)? {
                return Ok(values);
            }
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("set", key, value)?;
        self.tell("set", Message::new(Kind::Set).key(key).value(value))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let query = Message::new(Kind::Get).key(key);
        let mut values = self.read("get", &[key], deadline, &query)?;
        Ok(values.pop().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check_key("add", key)?;
        let sum = self.ask_number("add", &Message::new(Kind::Add).key(key).amount(amount));
        sum.map_err(|error| match error {
            // The protocol knows no other way to refuse.
            Error::Protocol { with, got, .. } => {
                let expected = format!("a sum (of the number under {key:?}, if it is one)");
                Error::Protocol { with, expected, got }
            }
            other => other,
        })
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        check_keys("wait", keys)?;
        let (deadline, last) = self.deadlines(deadline);
        let wait = |connection: &mut Connection| connection.wait("wait", keys, deadline, last);
        match self.request("wait", last, wait)? {
            Waited::Appeared => Ok(()),
            Waited::Expired => Err(timed_out("wait", deadline)),
        }
    }

    fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>> {
        check_entry("compare_set", key, new)?;
        check_value("compare_set", expected)?;
        let query = Message::new(Kind::CompareSet).key(key).value(expected).value(new);
        self.ask("compare_set", &query, |c, until| c.receive_value("compare_set", until))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        self.ask("check", &Message::new(Kind::Check).keys(keys), |connection, until| {
            match connection.receive("check", until)? {
                [READY] => Ok(true),
                [NOT_READY] => Ok(false),
                [other] => Err(connection.protocol("ready or not ready", other.to_string())),
            }
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        check_key("delete", key)?;
        self.ask_number("delete", &Message::new(Kind::Delete).key(key)).map(|deleted| deleted > 0)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("append", key, value)?;
        self.tell("append", Message::new(Kind::Append).key(key).value(value))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let query = Message::new(Kind::MultiGet).keys(keys);
        self.read("multi_get", keys, deadline, &query)
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        check_entries("multi_set", entries)?;
        let query = Message::new(Kind::MultiSet).count(entries.len());
        let query = entries.iter().fold(query, |query, (key, value)| query.key(key).value(value));
        self.tell("multi_set", query)
    }

    fn num_keys(&self) -> Result<i64> {
        self.ask_number("num_keys", &Message::new(Kind::NumKeys))
    }

    fn until(&self, deadline: Deadline) -> Option<SharedStore> {
        let (_, last) = self.deadlines(deadline);
        Some(Arc::new(Self { server: Arc::clone(&self.server), limit: self.limit, last }))
    }

    fn local_address(&self) -> Option<IpAddr> {
        self.server.local
    }

    fn describe(&self) -> String {
        self.server.name.clone()
    }
}

/// One attempt at each of the addresses that `addr` stands for.
fn reach(addr: &str, with: &str, deadline: Deadline) -> Result<(Address, Connection)> {
    let peers = Address::resolve(addr, deadline).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidInput => Error::Usage {
            op: "connect",
            rank: None,
            expected: "an address host:port, or unix: and a path".to_owned(),
            got: format!("{addr:?}"),
        },
        _ => Error::system(format!("look-up of {addr}"))(error),
    })?;
    let why = "the name has no address".to_owned();
    let mut last = Error::Unavailable { what: with.to_owned(), why };
    for peer in peers {
        match Connection::open(&peer, with, deadline) {
            Ok(connection) => return Ok((peer, connection)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether another attempt may succeed where this one failed. A server that has just started, or is about to
/// end, may close the connection; one that answers something else is no store.
fn may_pass(error: &Error) -> bool {
    match error {
        Error::Protocol { got, .. } => got == "end of connection",
        Error::Usage { .. } => false,
        _ => true,
    }
}

impl std::fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpStore").field("address", &self.server.address).finish_non_exhaustive()
    }
}
