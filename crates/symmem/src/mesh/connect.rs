//! Connecting the mesh: every rank listens, publishes its address in the store, connects to the lower
//! ranks and accepts the higher ones. Each end proves the job's token and its user. No step waits without a deadline.
//! With ranks of other hosts it does the same over TCP, in `far.rs`; where there are none, nobody listens there.
//!
//! Addresses from the store are not trusted: they are used only if they lead to a socket in a private directory of this user.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::endpoint::{self, Endpoint};
use super::far::Far;
use super::handshake::Terms;
use super::host::{self, Hosts};
use super::records::{Address, Ended, Listening, Published, Records, Verdict};
use super::socket::{self, Packet, Received};
use super::{Gone, Mesh, address};
use crate::error::{Error, Result};
use crate::store::SharedStore;
use crate::sync::Deadline;

pub(super) const OP: &str = "connect";
/// How often a rank that has not connected is probed.
const PROBE: Duration = Duration::from_millis(40);
/// How many ranks are probed at a time, so that probing stays cheap in large worlds.
const PROBED_AT_ONCE: usize = 16;
/// How soon this rank connects again to one whose queue of connections was full.
const RETRY: Duration = Duration::from_millis(2);

/// What a rank needs to find the others.
pub(crate) struct Bootstrap {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) store: SharedStore,
    /// A directory that all ranks share, in place of a private one.
    pub(crate) socket_dir: Option<PathBuf>,
    pub(crate) deadline: Deadline,
}

/// Connects this rank with all others. Collective over the world.
pub(crate) fn connect(bootstrap: &Bootstrap) -> Result<Mesh> {
    let deadline = bootstrap.deadline.start();
    let records = Records::open(bootstrap, deadline)?;
    let host = host::identity();
    let opened = host.and_then(|host| Ok((host, Endpoint::open(bootstrap.socket_dir.as_deref())?)));
    let has_secret = records.has_secret();
    let address = |(host, e): &(String, Endpoint)| Address {
        host: host.clone(),
        path: e.path().to_owned(),
        has_secret,
    };
    let published: Published = opened.as_ref().map(address).map_err(Error::to_string);
    records.publish(&published)?;
    let (_, endpoint) = opened?;
    // Before our socket is closed, so that nobody blames this rank for that.
    let ended = |ended| match ended {
        Ended::Error(error) => error,
        Ended::Verdict(verdict) => records.settle(verdict).error(bootstrap.rank, deadline),
    };
    let (token, addresses) = records.gather().map_err(ended)?;
    let hosts = Hosts::new(addresses.iter().map(|address| address.host.as_str()));
    let far = match hosts.count() {
        1 => None,
        _ => {
            let is_gone = |rank: usize| {
                let address =
                    addresses.get(rank).filter(|_| hosts.are_together(bootstrap.rank, rank))?;
                let refused = matches!(endpoint::connect(&address.path), Err(Errno::CONNREFUSED));
                refused.then(|| Verdict::lost(bootstrap.rank, rank, "its socket is closed"))
            };
            let far = listen_to_hosts(bootstrap, &records, &hosts, token, &is_gone);
            Some(far.map_err(ended)?)
        }
    };
    let local = |rank: usize| hosts.are_together(bootstrap.rank, rank);
    let path = |(rank, address): (usize, Address)| local(rank).then_some(address.path);
    let mut joining = Joining {
        rank: bootstrap.rank,
        token,
        endpoint,
        ungreeted: (0..bootstrap.rank).filter(|&rank| local(rank)).collect(),
        paths: addresses.into_iter().enumerate().map(path).collect(),
        connected: (0..bootstrap.size).map(|_| None).collect(),
        greeted: Vec::new(),
        strangers: Vec::new(),
        next_probe: Instant::now() + PROBE,
        probe_from: 0,
        far,
    };
    match joining.run(deadline) {
        Ok(()) => {
            let streams = joining.far.map(Far::into_connected).unwrap_or_default();
            let mesh = Mesh::connected(bootstrap.rank, joining.connected, streams, hosts)?;
            let key = records.key_between_hosts();
            Ok(Mesh { tag: tag(token, key), is_sealed: key.is_some(), ..mesh })
        }
        Err(verdict) => {
            // Tells all peers why, before the connections close. The first verdict is also ours.
            let verdict = records.settle(verdict);
            joining.say_goodbye(&verdict);
            Err(verdict.error(bootstrap.rank, deadline))
        }
    }
}

/// A number that nobody else can guess if the job has a secret.
fn tag(token: u128, key: Option<[u8; 32]>) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("symmem 2026 tag of messages between hosts");
    hasher.update(&token.to_le_bytes()).update(&key.unwrap_or_default());
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Listens for ranks of other hosts, and looks up where they listen. `is_gone` knows about ranks of this host.
fn listen_to_hosts(
    bootstrap: &Bootstrap,
    records: &Records,
    hosts: &Hosts,
    token: u128,
    is_gone: &dyn Fn(usize) -> Option<Verdict>,
) -> Result<Far, Ended> {
    let rank = bootstrap.rank;
    let opened = address::listen(rank, &bootstrap.store);
    let listening: Listening =
        opened.as_ref().map(|(_, address)| *address).map_err(Error::to_string);
    records.publish_listening(&listening)?;
    let (listener, _) = opened?;
    let all = records.gather_listening(is_gone)?;
    if let Some((misplaced, at)) = address::misplaced(&all).and_then(|r| Some((r, all.get(r)?))) {
        return Err(Ended::Error(Error::Unavailable {
            what: format!("a connection between hosts to rank {misplaced}"),
            why: format!(
                "it listens at {at}, where other hosts do not reach it; set {} there",
                address::NAMES
            ),
        }));
    }
    let far = |(peer, at): (usize, SocketAddr)| (!hosts.are_together(rank, peer)).then_some(at);
    let addresses = all.into_iter().enumerate().map(far).collect();
    let key = records.key_between_hosts();
    if key.is_none() && rank == 0 {
        tracing::warn!(
            "connections between hosts are not encrypted, and anyone who can read the store can join them; set \
             SYMMEM_SECRET_FILE to a file with a secret"
        );
    }
    Ok(Far::new(Terms { rank, token, key }, listener, addresses))
}

struct Joining {
    rank: usize,
    token: u128,
    endpoint: Endpoint,
    /// Where the ranks of this machine listen.
    paths: Vec<Option<PathBuf>>,
    connected: Vec<Option<OwnedFd>>,
    /// Ranks below us that we have not connected to.
    ungreeted: Vec<usize>,
    /// Ranks below us that have our hello.
    greeted: Vec<(usize, OwnedFd)>,
    /// Connections that have sent nothing yet.
    strangers: Vec<OwnedFd>,
    next_probe: Instant,
    probe_from: usize,
    /// The ranks of other hosts, where there are any.
    far: Option<Far>,
}

impl Joining {
    fn run(&mut self, deadline: Deadline) -> Result<(), Verdict> {
        loop {
            self.greet(deadline)?;
            if let Some(far) = &mut self.far {
                far.advance(deadline)?;
            }
            let missing = self.all_missing();
            if missing.is_empty() {
                return Ok(());
            }
            if deadline.expired() {
                if let Some(far) = &self.far {
                    far.explain();
                }
                let how = format!("no answer after {:.1?}", deadline.elapsed());
                return Err(Verdict { by: self.rank, blamed: missing, how, timed_out: true });
            }
            self.wait(deadline);
            self.accept()?;
            self.hear_strangers(deadline);
            self.hear_greeted()?;
            self.probe()?;
        }
    }

    fn all_missing(&self) -> Vec<usize> {
        let far = self.far.iter().flat_map(Far::missing);
        let mut all: Vec<usize> = self.missing().into_iter().chain(far).collect();
        all.sort_unstable();
        all
    }

    /// Those of this host.
    fn missing(&self) -> Vec<usize> {
        let here = |peer| self.connected.get(peer).is_some_and(Option::is_some);
        (0..self.paths.len())
            .filter(|&p| p != self.rank && !here(p))
            .filter(|&p| self.paths.get(p).is_some_and(Option::is_some))
            .collect()
    }

    /// Connects to the lower ranks. If the queue of one is full, tries again later and serves others meanwhile.
    fn greet(&mut self, deadline: Deadline) -> Result<(), Verdict> {
        for peer in std::mem::take(&mut self.ungreeted) {
            let Some(path) = self.paths.get(peer).and_then(Option::as_ref) else { continue };
            match endpoint::connect(path) {
                Ok(socket) if !socket::peer_is_same_user(&socket) => {
                    return Err(self.lost(peer, "it runs under another user"));
                }
                Ok(socket) => {
                    let hello = Packet::Hello { token: self.token, rank: self.rank };
                    let sent = socket::send(&socket, &hello, None, deadline);
                    sent.map_err(|e| self.lost(peer, &e.to_string()))?;
                    self.greeted.push((peer, socket));
                }
                Err(Errno::AGAIN | Errno::INTR) => self.ungreeted.push(peer),
                Err(e) => return Err(self.unreachable(peer, e)),
            }
        }
        Ok(())
    }

    /// The verdict if the socket of `peer` cannot be reached.
    fn unreachable(&self, peer: usize, e: Errno) -> Verdict {
        if is_our_own(e) {
            return self.lost(self.rank, &format!("socket: {e}"));
        }
        let path = self.paths.get(peer).and_then(Option::as_ref);
        let at = path.map(|path| path.display().to_string()).unwrap_or_default();
        let how = match e {
            Errno::CONNREFUSED => "its socket is closed".to_owned(),
            Errno::NOENT => {
                let hint = "in another container? let SYMMEM_SOCKET_DIR name a shared directory; on another host with the \
                            same boot id? give each host a SYMMEM_HOST of its own";
                format!("no socket at {at} ({hint})")
            }
            Errno::PERM | Errno::LOOP | Errno::NOTDIR => {
                format!("{at}, its address in the store, is no socket of this user")
            }
            e => format!("connecting to {at}: {e}"),
        };
        self.lost(peer, &how)
    }

    /// Sleeps until something arrives, or it is time to probe.
    fn wait(&self, deadline: Deadline) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.endpoint.listener(), PollFlags::IN)];
        let waiting = self.greeted.iter().map(|(_, fd)| fd).chain(&self.strangers);
        fds.extend(waiting.map(|fd| PollFd::new(fd, PollFlags::IN)));
        let nap = deadline.nap(self.next_probe.saturating_duration_since(Instant::now()));
        let nap = if self.ungreeted.is_empty() { nap } else { nap.min(RETRY) };
        let nap = self.far.as_ref().map_or(nap, |far| nap.min(far.wait_for(&mut fds)));
        let _ = poll(&mut fds, Some(&socket::timespec(nap)));
    }

    fn accept(&mut self) -> Result<(), Verdict> {
        loop {
            match self.endpoint.accept() {
                Ok(socket) if socket::peer_is_same_user(&socket) => self.strangers.push(socket),
                Ok(_) => tracing::warn!("refused a connection from another user"),
                Err(e) if is_our_own(e) => {
                    return Err(self.lost(self.rank, &format!("accept: {e}")));
                }
                Err(_) => return Ok(()), // no connection, or one that is closed already
            }
        }
    }

    fn hear_strangers(&mut self, deadline: Deadline) {
        for socket in std::mem::take(&mut self.strangers) {
            match socket::receive(&socket) {
                Received::Nothing => self.strangers.push(socket),
                Received::End | Received::Silence => {} // a probe
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

    /// If it fails, keeps all connections with a greeting: those peers expect our goodbye.
    fn hear_greeted(&mut self) -> Result<(), Verdict> {
        let mut next = 0;
        while let Some((peer, socket)) = self.greeted.get(next) {
            let peer = *peer;
            match socket::receive(socket) {
                Received::Nothing => next += 1,
                Received::Packet(Packet::Welcome { token, rank }, _)
                    if token == self.token && rank == peer =>
                {
                    self.connected[peer] = Some(self.greeted.swap_remove(next).1);
                }
                Received::Packet(Packet::Bye(Gone { how, because_of, .. }), _) => {
                    return Err(self.lost(because_of.unwrap_or(peer), &how));
                }
                Received::End | Received::Silence => {
                    return Err(self.lost(peer, "its connection closed"));
                }
                Received::Packet(..) | Received::Garbage(_) => {
                    return Err(self.lost(peer, "it does not know the job's token"));
                }
            }
        }
        Ok(())
    }

    /// Probes the sockets of ranks that this rank waits for: do they still listen?
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
            match endpoint::connect(path) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                // A failed probe is no reason to give up.
                Err(e) if is_our_own(e) => {}
                Err(e) => return Err(self.unreachable(peer, e)),
            }
        }
        Ok(())
    }

    fn lost(&self, peer: usize, how: &str) -> Verdict {
        Verdict::lost(self.rank, peer, how)
    }

    /// Ranks that have all their connections do not look for a verdict, so this tells them.
    fn say_goodbye(&self, verdict: &Verdict) {
        let how = format!("it gave up connecting: {}", verdict.how);
        let because_of = verdict.blamed.first().copied();
        let gone = Gone { left: true, how, because_of };
        let greeted = self.greeted.iter().map(|(_, socket)| socket);
        let peers = self.connected.iter().flatten().chain(greeted);
        peers.for_each(|socket| socket::say_goodbye(socket, &gone));
        if let Some(far) = &self.far {
            far.say_goodbye(&gone);
        }
    }
}

/// Whether a call failed because of this process or machine, and not because of the other end.
pub(super) fn is_our_own(e: Errno) -> bool {
    matches!(e, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn all_who_were_greeted_are_told_why_a_rank_gives_up() {
        let flags = SocketFlags::CLOEXEC;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let pairs: Vec<_> = (0..3).map(|_| pair()).collect();
        let (ours, mut theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        drop(theirs.remove(1)); // rank 1 has died
        let mut joining = Joining {
            rank: 3,
            token: 7,
            endpoint: Endpoint::open(None).unwrap(),
            paths: vec![],
            connected: vec![],
            ungreeted: vec![],
            greeted: ours.into_iter().enumerate().collect(),
            strangers: vec![],
            next_probe: Instant::now(),
            probe_from: 0,
            far: None,
        };
        let verdict = joining.hear_greeted().unwrap_err();
        assert_eq!(verdict.blamed, [1]);
        joining.say_goodbye(&verdict);
        for socket in &theirs {
            let told = socket::receive(socket);
            let because = |gone: &Gone| gone.because_of == Some(1);
            assert!(matches!(told, Received::Packet(Packet::Bye(gone), _) if because(&gone)));
        }
    }
}
