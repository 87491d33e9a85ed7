//! Connecting the mesh: every rank listens, publishes where in the store, connects to the ranks below
//! it and accepts those above. Each end proves the job's token and its user. No step waits without a deadline.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::endpoint::{self, Endpoint};
use super::socket::{self, Packet, Received};
use super::{Gone, Mesh};
use crate::error::{Error, Result};
use crate::store::{PrefixStore, SharedStore, Store};
use crate::sync::Deadline;

const OP: &str = "connect";
/// How often a rank that does not come is asked whether it still lives.
const PROBE: Duration = Duration::from_millis(40);
/// How many are asked at a time, so that large worlds are not busy with asking.
const PROBED_AT_ONCE: usize = 16;

/// What a rank needs to find the others.
pub(crate) struct Bootstrap {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) store: SharedStore,
    /// A directory that all ranks share, in place of a private one.
    pub(crate) socket_dir: Option<PathBuf>,
    pub(crate) deadline: Deadline,
}

/// What a rank publishes of itself.
#[derive(Serialize, Deserialize)]
struct Address {
    host: String,
    path: PathBuf,
}

/// Or why it cannot be reached.
type Published = Result<Address, String>;

/// Why the job could not be connected; the first verdict, found in the store, is everyone's.
#[derive(Serialize, Deserialize)]
struct Verdict {
    blamed: Vec<usize>,
    how: String,
    timed_out: bool,
}

/// Connects this rank with all others of its machine. Collective over the world.
pub(crate) fn connect(bootstrap: &Bootstrap) -> Result<Mesh> {
    let deadline = bootstrap.deadline.start();
    let store = own_world(bootstrap)?;
    let token = agree_on_token(bootstrap.rank, &store, deadline)?;
    let host = host_id();
    let opened = Endpoint::open(bootstrap.socket_dir.as_deref());
    let address = |e: &Endpoint| Address { host: host.clone(), path: e.path().to_owned() };
    let published: Published = opened.as_ref().map(address).map_err(Error::to_string);
    store.set(&address_key(bootstrap.rank), &encode(&published))?;
    let endpoint = opened?;
    let addresses = addresses(bootstrap, &store, deadline)?;
    let local = |a: &Address| a.host == host;
    let mut joining = Joining {
        rank: bootstrap.rank,
        token,
        endpoint,
        paths: addresses.into_iter().map(|a| local(&a).then_some(a.path)).collect(),
        connected: (0..bootstrap.size).map(|_| None).collect(),
        greeted: Vec::new(),
        strangers: Vec::new(),
        next_probe: Instant::now() + PROBE,
        probe_from: 0,
    };
    match joining.run(deadline) {
        Ok(()) => Mesh::sockets(bootstrap.rank, joining.connected),
        Err(verdict) => Err(joining.give_up(verdict, &store, deadline)),
    }
}

/// The n-th world of a job on one rank is the n-th on all: each has its own keys.
fn own_world(bootstrap: &Bootstrap) -> Result<PrefixStore> {
    // A job that torchrun starts again finds the keys of its former life, which may have ended unevenly.
    let life = std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    let n = bootstrap.store.add(&format!("symmem/worlds/{life}/{}", bootstrap.rank), 1)?;
    Ok(PrefixStore::new(format!("symmem/world/{life}/{n}"), bootstrap.store.clone()))
}

fn address_key(rank: usize) -> String {
    format!("address/{rank}")
}

fn agree_on_token(rank: usize, store: &PrefixStore, deadline: Deadline) -> Result<u128> {
    if rank == 0 {
        store.set("token", &endpoint::random()?.to_le_bytes())?;
    }
    let bytes = store.get("token", deadline).map_err(|e| waiting_for(e, vec![0]))?;
    bytes.try_into().map(u128::from_le_bytes).map_err(|bytes: Vec<u8>| Error::Protocol {
        with: "the store".into(),
        expected: "a job token of 16 bytes".into(),
        got: format!("{} bytes", bytes.len()),
    })
}

/// Every rank's address, in rank order; at the deadline, says who did not publish one.
fn addresses(
    bootstrap: &Bootstrap,
    store: &PrefixStore,
    deadline: Deadline,
) -> Result<Vec<Address>> {
    let keys: Vec<String> = (0..bootstrap.size).map(address_key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let values = store.multi_get(&keys, deadline).map_err(|e| {
        let absent = |key: &&str| !store.check(&[key]).unwrap_or(true);
        let missing = keys.iter().enumerate().filter(|(_, key)| absent(key)).map(|(r, _)| r);
        waiting_for(e, missing.collect())
    })?;
    let reachable = |(rank, value): (usize, &Vec<u8>)| {
        decode::<Published>(value, "a rank's address")?.map_err(|reason| Error::PeerFailed {
            op: OP,
            rank,
            reason,
        })
    };
    values.iter().enumerate().map(reachable).collect()
}

/// Names the ranks that a wait for the store was really about.
fn waiting_for(error: Error, ranks: Vec<usize>) -> Error {
    match error {
        Error::Timeout { after, .. } => {
            Error::Timeout { op: OP, channel: None, waiting_for: ranks, after, doing: Vec::new() }
        }
        other => other,
    }
}

struct Joining {
    rank: usize,
    token: u128,
    endpoint: Endpoint,
    /// Where the ranks of this machine listen.
    paths: Vec<Option<PathBuf>>,
    connected: Vec<Option<OwnedFd>>,
    /// Ranks below us that have our hello.
    greeted: Vec<(usize, OwnedFd)>,
    /// Whoever has connected to us without a word yet.
    strangers: Vec<OwnedFd>,
    next_probe: Instant,
    probe_from: usize,
}

impl Joining {
    fn run(&mut self, deadline: Deadline) -> Result<(), Verdict> {
        for peer in 0..self.rank {
            if let Some(path) = self.paths.get(peer).cloned().flatten() {
                let socket = self.greet(peer, &path, deadline)?;
                self.greeted.push((peer, socket));
            }
        }
        loop {
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if deadline.expired() {
                let how = format!("no answer after {:.1?}", deadline.elapsed());
                return Err(Verdict { blamed: missing, how, timed_out: true });
            }
            self.wait(deadline);
            self.accept()?;
            self.hear_strangers(deadline);
            self.hear_greeted()?;
            self.probe()?;
        }
    }

    fn missing(&self) -> Vec<usize> {
        let here = |peer| self.connected.get(peer).is_some_and(Option::is_some);
        (0..self.paths.len())
            .filter(|&p| p != self.rank && !here(p))
            .filter(|&p| self.paths.get(p).is_some_and(Option::is_some))
            .collect()
    }

    fn greet(&self, peer: usize, path: &Path, deadline: Deadline) -> Result<OwnedFd, Verdict> {
        let blame = |how: String| Verdict { blamed: vec![peer], how, timed_out: false };
        loop {
            match endpoint::connect(path) {
                Ok(socket) => {
                    if !socket::peer_is_same_user(&socket) {
                        return Err(blame("it runs under another user".into()));
                    }
                    let hello = Packet::Hello { token: self.token, rank: self.rank };
                    let sent = socket::send(&socket, &hello, None, deadline);
                    return sent.map(|()| socket).map_err(|e| blame(e.to_string()));
                }
                // Its queue of connections is full: it has not come to accepting yet.
                Err(Errno::AGAIN | Errno::INTR) if !deadline.expired() => {
                    std::thread::sleep(deadline.nap(Duration::from_millis(2)));
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    let how = format!("no answer after {:.1?}", deadline.elapsed());
                    return Err(Verdict { timed_out: true, ..blame(how) });
                }
                Err(e) if is_our_own(e) => return Err(lost(self.rank, &format!("socket: {e}"))),
                Err(Errno::NOENT) => {
                    let hint =
                        "in another container? let SYMMEM_SOCKET_DIR name a shared directory";
                    return Err(blame(format!("no socket at {} ({hint})", path.display())));
                }
                Err(e) => return Err(blame(format!("connecting to {}: {e}", path.display()))),
            }
        }
    }

    /// Sleeps until something arrives, or it is time to probe.
    fn wait(&self, deadline: Deadline) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.endpoint.listener(), PollFlags::IN)];
        let waiting = self.greeted.iter().map(|(_, fd)| fd).chain(&self.strangers);
        fds.extend(waiting.map(|fd| PollFd::new(fd, PollFlags::IN)));
        let nap = deadline.nap(self.next_probe.saturating_duration_since(Instant::now()));
        let _ = poll(&mut fds, Some(&socket::timespec(nap)));
    }

    fn accept(&mut self) -> Result<(), Verdict> {
        loop {
            match self.endpoint.accept() {
                Ok(socket) if socket::peer_is_same_user(&socket) => self.strangers.push(socket),
                Ok(_) => tracing::warn!("refused a connection from another user"),
                Err(e) if is_our_own(e) => return Err(lost(self.rank, &format!("accept: {e}"))),
                Err(_) => return Ok(()), // nobody, or nobody any more
            }
        }
    }

    fn hear_strangers(&mut self, deadline: Deadline) {
        for socket in std::mem::take(&mut self.strangers) {
            match socket::receive(&socket) {
                Received::Nothing => self.strangers.push(socket),
                Received::End => {} // a probe
                Received::Packet(Packet::Hello { token, rank }, _)
                    if token == self.token
                        && self.missing().contains(&rank)
                        && rank > self.rank =>
                {
                    let welcome = Packet::Welcome { token, rank: self.rank };
                    match socket::send(&socket, &welcome, None, deadline) {
                        Ok(()) => self.connected[rank] = Some(socket),
                        Err(e) => tracing::warn!("answering rank {rank}: {e}"),
                    }
                }
                Received::Packet(..) | Received::Garbage(_) => {
                    tracing::warn!("refused a connection that does not belong to this job");
                }
            }
        }
    }

    fn hear_greeted(&mut self) -> Result<(), Verdict> {
        for (peer, socket) in std::mem::take(&mut self.greeted) {
            match socket::receive(&socket) {
                Received::Nothing => self.greeted.push((peer, socket)),
                Received::Packet(Packet::Welcome { token, rank }, _)
                    if token == self.token && rank == peer =>
                {
                    self.connected[peer] = Some(socket);
                }
                Received::End => return Err(lost(peer, "its connection closed")),
                Received::Packet(..) | Received::Garbage(_) => {
                    return Err(lost(peer, "it does not know the job's token"));
                }
            }
        }
        Ok(())
    }

    /// Asks ranks that we wait for whether their sockets still listen.
    fn probe(&mut self) -> Result<(), Verdict> {
        if Instant::now() < self.next_probe {
            return Ok(());
        }
        self.next_probe = Instant::now() + PROBE;
        let waited: Vec<usize> = self.missing().into_iter().filter(|&p| p > self.rank).collect();
        let start = self.probe_from.checked_rem(waited.len()).unwrap_or(0);
        self.probe_from = start + PROBED_AT_ONCE;
        for &peer in waited.iter().cycle().skip(start).take(waited.len().min(PROBED_AT_ONCE)) {
            let Some(path) = self.paths.get(peer).and_then(Option::as_ref) else { continue };
            if let Err(Errno::CONNREFUSED | Errno::NOENT) = endpoint::connect(path) {
                return Err(lost(peer, "its socket is closed"));
            }
        }
        Ok(())
    }

    /// Tells everyone why, before our closed connections do; takes the first verdict as ours.
    fn give_up(&self, verdict: Verdict, store: &PrefixStore, deadline: Deadline) -> Error {
        let first = store.compare_set("verdict", &[], &encode(&verdict));
        let verdict = first.and_then(|v| decode(&v, "a verdict")).unwrap_or(verdict);
        let how = format!("it gave up connecting: {}", verdict.how);
        let because_of = verdict.blamed.first().copied();
        let gone = Gone { left: true, how, because_of };
        // Those who have all their connections, by their own account, know of no verdict.
        let greeted = self.greeted.iter().map(|(_, socket)| socket);
        let peers = self.connected.iter().flatten().chain(greeted);
        peers.for_each(|socket| socket::say_goodbye(socket, &gone));
        // The dead cannot tidy up after themselves.
        self.paths.iter().flatten().for_each(|path| endpoint::remove_if_dead(path));
        match verdict.blamed.as_slice() {
            [rank] if *rank == self.rank && !verdict.timed_out => Error::Unavailable {
                what: "a connection to the other ranks".into(),
                why: verdict.how,
            },
            [rank, ..] if !verdict.timed_out => {
                Error::PeerLost { rank: *rank, during: OP, how: verdict.how }
            }
            _ => Error::Timeout {
                op: OP,
                channel: None,
                waiting_for: verdict.blamed,
                after: deadline.elapsed(),
                doing: Vec::new(),
            },
        }
    }
}

/// Whether a call failed for want of something of this process or machine, and not because of the other end.
fn is_our_own(e: Errno) -> bool {
    matches!(e, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
}

fn lost(peer: usize, how: &str) -> Verdict {
    Verdict { blamed: vec![peer], how: how.to_owned(), timed_out: false }
}

/// Tells machines apart: host names repeat, boot ids do not. A connection still has to succeed.
fn host_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Fails only for types that cannot be serialised at all.
    postcard::to_stdvec(value).unwrap_or_default()
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|e| Error::Protocol {
        with: "the store".into(),
        expected: what.into(),
        got: format!("{} bytes: {e}", bytes.len()),
    })
}
