//! The handshake of two ranks of different hosts over TCP: each proves that it belongs to the job, and says which rank it is.
//!
//! ```text
//!  caller (the higher rank)                      called
//!  opening: mark, own rank, rank that is meant,
//!           proof of the secret if there is one  ─────►
//!                                               ◄───── its proof, if there is a secret
//!                     from here on, packets are encrypted if there is a secret
//!  Hello: token, own rank                       ─────►
//!                                               ◄───── Welcome: token, own rank
//! ```
//!
//! Anybody may connect. Until its Hello is valid, a connection gets no answer, its frames must be short, and it changes nothing. An
//! encrypted Hello proves that its sender knows the secret and is not replaying another connection.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::Gone;
use super::secret::{Bond, Proof};
use super::socket::{Packet, Received};
use super::stream::Stream;
use crate::sync::Deadline;

/// The first bytes of an opening, which no other program sends by chance.
const MARK: [u8; 8] = *b"symmem 1";

/// What this rank presents, and expects of its peers.
pub(super) struct Terms {
    pub(super) rank: usize,
    pub(super) token: u128,
    /// The key derived from the job's secret, if there is one.
    pub(super) key: Option<[u8; 32]>,
}

impl Terms {
    fn bond(&self, from: usize, to: usize) -> Option<Bond<'_>> {
        self.key.as_ref().map(|key| Bond { key, token: self.token, from, to })
    }
}

const NO_PROOF: &str =
    "it did not prove that it knows the secret of SYMMEM_SECRET or SYMMEM_SECRET_FILE";

/// The state of a connection.
pub(super) enum Progress {
    Waiting,
    /// It is established, with this rank.
    Done(usize),
    /// It was closed; another attempt may succeed.
    Ended,
    /// It cannot be established, because of this error or this answer of the peer.
    Failed(Errno),
    Refused(String),
    /// The peer gives up, and so does this rank.
    Bye(Gone),
}

fn opening(from: usize, to: usize, proof: &[u8]) -> Vec<u8> {
    let numbers = [from, to].map(|rank| (rank as u32).to_le_bytes());
    [&MARK[..], &numbers.concat(), proof].concat()
}

/// The caller, the called rank and the proof in an opening.
fn read_opening(frame: &[u8]) -> Option<(usize, usize, &[u8])> {
    let (from, rest) = frame.strip_prefix(&MARK)?.split_first_chunk::<4>()?;
    let (to, proof) = rest.split_first_chunk::<4>()?;
    let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) as usize;
    Some((number(from), number(to), proof))
}

#[cfg(fuzzing)]
pub(super) fn fuzz_opening(frame: &[u8]) {
    if let Some((from, to, proof)) = read_opening(frame) {
        assert_eq!(opening(from, to, proof), frame);
        let bond = Bond { key: &[7; 32], token: 5, from, to };
        assert!(bond.answer(proof).is_none(), "a proof without the secret");
    }
}

/// A connection that this rank makes to a lower one.
pub(super) struct Caller {
    pub(super) peer: usize,
    pub(super) stream: Stream,
    stands: bool,
    has_greeted: bool,
    /// The proof that the peer has to answer first.
    proof: Option<Proof>,
}

impl Caller {
    pub(super) fn new(peer: usize, stream: Stream) -> Self {
        Self { peer, stream, stands: false, has_greeted: false, proof: None }
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
            if !self.open(terms, deadline) {
                return Progress::Ended;
            }
        }
        if self.proof.is_some() {
            match self.stream.receive_open() {
                Ok(None) => return Progress::Waiting,
                Ok(Some(answer)) => {
                    let keys = self.proof.take().and_then(|proof| proof.finish(&answer));
                    let Some(keys) = keys else { return Progress::Refused(NO_PROOF.to_owned()) };
                    self.stream.seal_with(keys);
                    if !self.greet(terms, deadline) {
                        return Progress::Ended;
                    }
                }
                Err(Received::End) => return Progress::Ended,
                Err(Received::Silence) => return Progress::Failed(Errno::TIMEDOUT),
                Err(_) => return Progress::Refused(NO_PROOF.to_owned()),
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
            // It may have too many connections.
            Received::End => Progress::Ended,
            Received::Silence => Progress::Failed(Errno::TIMEDOUT),
            Received::Packet(..) | Received::Garbage(_) => {
                Progress::Refused("it does not know the job's token".to_owned())
            }
        }
    }
}

impl Caller {
    /// Sends the opening. With a secret, the rest follows once the peer has proved that it knows the secret. False if the
    /// connection was closed.
    fn open(&mut self, terms: &Terms, deadline: Deadline) -> bool {
        let Some(bond) = terms.bond(terms.rank, self.peer) else {
            return self.stream.send_open(&opening(terms.rank, self.peer, &[]))
                && self.greet(terms, deadline);
        };
        let Some((proof, message)) = bond.call() else { return false };
        self.proof = Some(proof);
        self.stream.send_open(&opening(terms.rank, self.peer, &message))
    }

    fn greet(&mut self, terms: &Terms, deadline: Deadline) -> bool {
        let hello = Packet::Hello { token: terms.token, rank: terms.rank };
        self.has_greeted = self.stream.send(&hello, deadline).is_ok();
        self.has_greeted
    }

    /// Whether the peer may count this rank as connected.
    pub(super) fn has_greeted(&self) -> bool {
        self.has_greeted
    }
}

/// Whether a non-blocking `connect` has succeeded, once it has completed.
pub(super) fn connected(socket: impl AsFd) -> Option<Result<(), Errno>> {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let decided = poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&now));
    (decided == Ok(1)).then(|| sockopt::socket_error(&socket).and_then(|error| error))
}

/// A connection to this rank that is not authenticated yet.
pub(super) struct Stranger {
    pub(super) stream: Stream,
    pub(super) since: Instant,
    /// The rank that it claims to be.
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
                    Some((from, to, proof)) if to == terms.rank && is_awaited(from) => {
                        if !self.answer(terms.bond(from, to), proof) {
                            return Progress::Refused(format!("as rank {from}, {NO_PROOF}"));
                        }
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

impl Stranger {
    /// Answers a caller's proof with our own. False if the proof is invalid.
    fn answer(&self, bond: Option<Bond<'_>>, proof: &[u8]) -> bool {
        let Some(bond) = bond else { return proof.is_empty() };
        let Some((keys, message)) = bond.answer(proof) else { return false };
        let sent = self.stream.send_open(&message);
        self.stream.seal_with(keys);
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opening_says_who_calls_whom_and_nothing_else_does() {
        let said = opening(70_000, 3, b"proof");
        assert_eq!(read_opening(&said), Some((70_000, 3, &b"proof"[..])));
        for len in 0..16 {
            assert_eq!(read_opening(&said[..len]), None);
        }
        assert_eq!(read_opening(&[b"symmem 2", &said[8..]].concat()), None);
    }

    /// The outcome on both sides if rank 1 connects to rank 0 with these keys.
    fn outcome(caller: Option<[u8; 32]>, called: Option<[u8; 32]>) -> (Progress, Progress) {
        let terms = |rank, key| Terms { rank, token: 9, key };
        let (caller_terms, called_terms) = (terms(1, caller), terms(0, called));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut caller = Caller::new(0, Stream::new(one.into()).unwrap());
        let two = listener.accept().unwrap().0;
        let mut called = Some(Stranger::new(Stream::new(two.into()).unwrap()));
        let mut told = Progress::Waiting;
        let until = Deadline::after(std::time::Duration::from_secs(10));
        loop {
            let progress = caller.advance(&caller_terms, until);
            if let Some(stranger) = &mut called {
                told = stranger.advance(&called_terms, |rank| rank == 1, until);
                if !matches!(told, Progress::Waiting | Progress::Done(_)) {
                    called = None; // refused, and so closed
                }
            }
            if !matches!(progress, Progress::Waiting) || until.expired() {
                return (progress, told);
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn ranks_connect_with_the_same_secret_or_none() {
        for key in [None, Some([7; 32])] {
            assert!(matches!(outcome(key, key), (Progress::Done(0), _)));
        }
    }

    #[test]
    fn ranks_with_other_secrets_get_nothing_from_each_other() {
        let keys = [None, Some([7; 32]), Some([8; 32])];
        for (caller, called) in keys.iter().flat_map(|a| keys.map(|b| (*a, b))) {
            if caller != called {
                let (caller, called) = outcome(caller, called);
                assert!(matches!(caller, Progress::Ended | Progress::Refused(_)));
                let Progress::Refused(why) = called else { panic!("not refused") };
                assert!(why.contains("SYMMEM_SECRET_FILE") && why.contains("rank 1"), "{why}");
            }
        }
    }
}
