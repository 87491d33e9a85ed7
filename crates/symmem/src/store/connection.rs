//! One connection to a store server: sends queries and reads answers, each within a deadline.
//!
//! After an error it is out of step with the server and must be dropped.

use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::limits::{MESSAGE_LEN, at_most};
use super::local_peer::Peer;
use super::stream::{Address, Stream};
use super::timed_out;
use super::wire::{Kind, MAGIC, Message, STOP_WAITING, WAIT_CANCELED};
use crate::error::{Error, Result};
use crate::private;
use crate::sync::Deadline;

/// The most time for one attempt to connect.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// The most that a call may last beyond its deadline, and how much that is of short ones (a twelfth, and this).
const OVERTIME: Duration = Duration::from_secs(5);
const SHORT_OVERTIME: Duration = Duration::from_millis(90);

/// The pieces in which input is read.
const CHUNK: usize = 64 << 10;

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waited {
    Appeared,
    Expired,
}

pub(super) struct Connection {
    stream: Stream,
    /// The server, for errors.
    with: String,
    input: Vec<u8>,
    /// How much of `input` has been used.
    used: usize,
    pings: u32,
}

impl Connection {
    /// Connects to `peer`, which errors call `with`, and checks that a store answers there.
    pub(super) fn open(peer: &Address, with: &str, until: Deadline) -> Result<Self> {
        let connect = || Error::system(format!("connect to {with}"));
        // No address of a host with several may use up the time for the others; zero would mean for ever.
        let limit = until.nap(OPEN_LIMIT).max(Duration::from_millis(1));
        let until = Deadline::after(limit);
        let stream = Stream::connect(peer, until).map_err(connect())?;
        // Any start will do; one of our own makes a trace of the wire easier to read.
        let pings = std::process::id() << 16;
        let mut connection = Self { stream, with: with.to_owned(), input: vec![], used: 0, pings };
        connection.confirm("connect", Message::new(Kind::Validate).word(MAGIC), until)?;
        // After its answer, because only then somebody has certainly taken the connection.
        match connection.stream.server() {
            Peer::User(uid) if !private::is_trusted(uid) => {
                let expected = format!("a server of user {}", private::user());
                Err(connection.protocol(expected, format!("one of user {uid}")))
            }
            Peer::Nobody => Err(connection.end()),
            Peer::User(_) | Peer::Remote => Ok(connection),
        }
    }

    /// This end's address, over TCP.
    pub(super) fn local_address(&self) -> Option<IpAddr> {
        self.stream.local_address()
    }

    /// Whether the server has not ended the connection since it was last used.
    pub(super) fn is_open(&mut self) -> bool {
        let waits =
            |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted);
        self.stream.read(&mut [0]).is_err_and(|e| waits(&e))
    }

    /// Sends queries that have no answer, and waits until the server has carried them out.
    ///
    /// Without this, what one connection has set could be missing on another.
    pub(super) fn confirm(
        &mut self,
        op: &'static str,
        queries: Message,
        until: Deadline,
    ) -> Result<()> {
        self.pings = self.pings.wrapping_add(1);
        self.send(op, &queries.then(Kind::Ping).word(self.pings), until)?;
        let word = u32::from_ne_bytes(self.receive(op, until)?);
        if word == self.pings {
            return Ok(());
        }
        Err(self.protocol(format!("the word {:#x}", self.pings), format!("{word:#x}")))
    }

    pub(super) fn send(
        &mut self,
        op: &'static str,
        message: &Message,
        until: Deadline,
    ) -> Result<()> {
        at_most(MESSAGE_LEN, message.bytes().len() as u64, "a query length")
            .map_err(|refusal| refusal.usage(op))?;
        let mut rest = message.bytes();
        while !rest.is_empty() {
            // std sends with MSG_NOSIGNAL: a server that is gone is an error, not a signal.
            match self.stream.write(rest) {
                Ok(len) => rest = rest.get(len..).unwrap_or_default(),
                Err(error) => self.pause(op, error, PollFlags::OUT, until)?,
            }
        }
        Ok(())
    }

    /// Waits for keys until `deadline`; afterwards, also then, the connection is in step, or this fails by `last`.
    pub(super) fn wait(
        &mut self,
        op: &'static str,
        keys: &[&str],
        deadline: Deadline,
        last: Deadline,
    ) -> Result<Waited> {
        self.send(op, &Message::new(Kind::Wait).keys(keys), last)?;
        match self.receive(op, deadline) {
            Ok([STOP_WAITING]) => Ok(Waited::Appeared),
            Ok([other]) => Err(self.protocol("the end of a wait", other.to_string())),
            Err(Error::Timeout { .. } | Error::Interrupted { .. }) => self.cancel_wait(op, last),
            Err(error) => Err(error),
        }
    }

    fn cancel_wait(&mut self, op: &'static str, until: Deadline) -> Result<Waited> {
        self.send(op, &Message::new(Kind::CancelWait), until)?;
        let [first] = self.receive(op, until)?;
        if first == WAIT_CANCELED {
            return Ok(Waited::Expired);
        }
        // The keys appeared in the last moment; the server answers both queries.
        let [second] = self.receive(op, until)?;
        if (first, second) == (STOP_WAITING, WAIT_CANCELED) {
            return Ok(Waited::Appeared);
        }
        Err(self.protocol("the end of a cancelled wait", format!("{first}, {second}")))
    }

    /// The next `N` bytes.
    pub(super) fn receive<const N: usize>(
        &mut self,
        op: &'static str,
        until: Deadline,
    ) -> Result<[u8; N]> {
        loop {
            if let Some(bytes) = self.unused().first_chunk().copied() {
                self.used += N;
                return Ok(bytes);
            }
            self.fill(op, until)?;
        }
    }

    /// A length and that many bytes; memory grows with what comes, not with what was promised.
    pub(super) fn receive_value(&mut self, op: &'static str, until: Deadline) -> Result<Vec<u8>> {
        let len = u64::from_ne_bytes(self.receive(op, until)?);
        let mut left = at_most(MESSAGE_LEN, len, "a value length")
            .map_err(|refusal| self.protocol(refusal.expected, refusal.got))?;
        let mut value = Vec::with_capacity(left.min(CHUNK));
        loop {
            let part = self.unused();
            let part = part.get(..left).unwrap_or(part);
            value.extend_from_slice(part);
            let len = part.len();
            self.used += len;
            left -= len;
            if left == 0 {
                return Ok(value);
            }
            self.fill(op, until)?;
        }
    }

    /// Whether the server has sent nothing beyond what was asked.
    pub(super) fn is_in_step(&self) -> bool {
        self.unused().is_empty()
    }

    pub(super) fn protocol(&self, expected: impl Into<String>, got: impl Into<String>) -> Error {
        Error::Protocol { with: self.with.clone(), expected: expected.into(), got: got.into() }
    }

    fn unused(&self) -> &[u8] {
        self.input.get(self.used..).unwrap_or_default()
    }

    /// Reads more input, at least one byte.
    fn fill(&mut self, op: &'static str, until: Deadline) -> Result<()> {
        self.input.drain(..self.used);
        self.used = 0;
        let old = self.input.len();
        self.input.resize(old + CHUNK, 0);
        let outcome = loop {
            match self.stream.read(self.input.get_mut(old..).unwrap_or_default()) {
                Ok(0) => break Err(self.end()),
                Ok(len) => break Ok(len),
                Err(error) => {
                    if let Err(error) = self.pause(op, error, PollFlags::IN, until) {
                        break Err(error);
                    }
                }
            }
        };
        // Also after a timeout, which need not be the end of the connection.
        self.input.truncate(old + outcome.as_ref().map_or(0, |len| *len));
        outcome.map(drop)
    }

    /// After a read or write that failed: waits until it can be tried again, if it can.
    fn pause(
        &self,
        op: &'static str,
        error: std::io::Error,
        flags: PollFlags,
        until: Deadline,
    ) -> Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => return Ok(()),
            ErrorKind::WouldBlock => {}
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Err(self.end()),
            _ => return Err(Error::system(format!("talking to {}", self.with))(error)),
        }
        if until.expired() {
            return Err(timed_out(op, until));
        }
        let limit = Timespec::try_from(until.nap(Duration::from_millis(50))).ok();
        match poll(&mut [PollFd::new(&self.stream, flags)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system(format!("poll on {}", self.with))(error)),
        }
    }

    fn end(&self) -> Error {
        self.protocol("an answer", "end of connection")
    }
}

/// When a call that may take until `deadline` is over at the latest, the deadline being fresh. The difference is for what
/// is due at once: without it, a short deadline would cost a connection each time.
pub(super) fn last_moment(deadline: Deadline) -> Deadline {
    let Some(left) = deadline.remaining() else { return Deadline::NEVER };
    let overtime = left.saturating_add(deadline.elapsed()) / 12;
    let overtime = overtime.saturating_add(SHORT_OVERTIME).min(OVERTIME);
    Deadline::after(left.saturating_add(overtime))
}
