//! How two ranks of different hosts meet over TCP: each shows that it belongs to the job, and which rank it is.
//!
//! ```text
//!  caller (the higher rank)                      called
//!  opening: mark, own rank, rank that is meant  ─────►
//!  Hello: token, own rank                       ─────►
//!                                               ◄───── Welcome: token, own rank
//! ```
//!
//! Whoever calls may be anybody. Until a valid Hello it gets nothing, its frames are short, and it changes nothing.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::Gone;
use super::socket::{Packet, Received};
use super::stream::Stream;
use crate::sync::Deadline;

/// What an opening begins with: no other program says it by chance.
const MARK: [u8; 8] = *b"symmem 1";
const OPENING: usize = MARK.len() + 2 * size_of::<u32>();

/// What this rank shows, and expects.
pub(super) struct Terms {
    pub(super) rank: usize,
    pub(super) token: u128,
}

/// How far a connection has come.
pub(super) enum Progress {
    Waiting,
    /// It stands, with this rank.
    Done(usize),
    /// It ended; another attempt may succeed.
    Ended,
    /// It can never be, and which error of the connection, or which words of the other end, say so.
    Failed(Errno),
    Refused(String),
    /// The other end gives up, and so this.
    Bye(Gone),
}

fn opening(from: usize, to: usize) -> Vec<u8> {
    let numbers = [from, to].map(|rank| (rank as u32).to_le_bytes());
    [&MARK[..], &numbers.concat()].concat()
}

/// Who calls whom, by an opening.
fn read_opening(frame: &[u8]) -> Option<(usize, usize)> {
    let rest = frame.strip_prefix(&MARK).filter(|_| frame.len() == OPENING)?;
    let (from, to) = rest.split_first_chunk::<4>()?;
    let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) as usize;
    Some((number(from), number(to.first_chunk()?)))
}

/// A connection that this rank makes to one below it.
pub(super) struct Caller {
    pub(super) peer: usize,
    pub(super) stream: Stream,
    stands: bool,
}

impl Caller {
    pub(super) fn new(peer: usize, stream: Stream) -> Self {
        Self { peer, stream, stands: false }
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.stream.as_fd(), if self.stands { PollFlags::IN } else { PollFlags::OUT })
    }

    pub(super) fn advance(&mut self, terms: &Terms, deadline: Deadline) -> Progress {
        if !self.stands {
            match connected(&self.stream) {
                None => return Progress::Waiting,
                Some(Err(e)) => return Progress::Failed(e),
                Some(Ok(())) => self.stands = true,
            }
            let hello = Packet::Hello { token: terms.token, rank: terms.rank };
            let opened = self.stream.send_open(&opening(terms.rank, self.peer));
            if !opened || self.stream.send(&hello, deadline).is_err() {
                return Progress::Ended;
            }
        }
        match self.stream.receive() {
            Received::Nothing => Progress::Waiting,
            Received::Packet(Packet::Welcome { token, rank }, _)
                if token == terms.token && rank == self.peer =>
            {
                self.stream.trust();
                Progress::Done(rank)
            }
            Received::Packet(Packet::Bye(gone), _) => Progress::Bye(gone),
            // It may have had too many connections.
            Received::End => Progress::Ended,
            Received::Silence => Progress::Failed(Errno::TIMEDOUT),
            Received::Packet(..) | Received::Garbage(_) => {
                Progress::Refused("it does not know the job's token".to_owned())
            }
        }
    }
}

/// Whether a connection that was begun stands, once that is decided.
pub(super) fn connected(socket: impl AsFd) -> Option<Result<(), Errno>> {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let decided = poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&now));
    (decided == Ok(1)).then(|| sockopt::socket_error(&socket).and_then(|error| error))
}

/// A connection that somebody makes to this rank.
pub(super) struct Stranger {
    pub(super) stream: Stream,
    pub(super) since: Instant,
    /// Who it says that it is.
    rank: Option<usize>,
}

impl Stranger {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, since: Instant::now(), rank: None }
    }

    /// `is_awaited` says which ranks may call.
    pub(super) fn advance(
        &mut self,
        terms: &Terms,
        is_awaited: impl Fn(usize) -> bool,
        deadline: Deadline,
    ) -> Progress {
        let refused = || Progress::Refused("it does not belong to this job".to_owned());
        if self.rank.is_none() {
            match self.stream.receive_open() {
                Ok(None) => return Progress::Waiting,
                Ok(Some(frame)) => match read_opening(&frame) {
                    Some((from, to)) if to == terms.rank && is_awaited(from) => {
                        self.rank = Some(from);
                    }
                    _ => return refused(),
                },
                Err(Received::End | Received::Silence) => return Progress::Ended, // a probe
                Err(_) => return refused(),
            }
        }
        match self.stream.receive() {
            Received::Nothing => Progress::Waiting,
            Received::Packet(Packet::Hello { token, rank }, _)
                if token == terms.token && self.rank == Some(rank) && is_awaited(rank) =>
            {
                let welcome = Packet::Welcome { token, rank: terms.rank };
                self.stream.trust();
                match self.stream.send(&welcome, deadline) {
                    Ok(()) => Progress::Done(rank),
                    Err(_) => Progress::Ended,
                }
            }
            Received::End | Received::Silence => Progress::Ended,
            Received::Packet(..) | Received::Garbage(_) => refused(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opening_says_who_calls_whom_and_nothing_else_does() {
        let said = opening(70_000, 3);
        assert_eq!(read_opening(&said), Some((70_000, 3)));
        for len in 0..said.len() {
            assert_eq!(read_opening(&said[..len]), None);
        }
        assert_eq!(read_opening(&[&said[..], &[0]].concat()), None);
        assert_eq!(read_opening(&[b"symmem 2", &said[8..]].concat()), None);
    }
}
