//! Connecting with ranks of other hosts over TCP, as `connect.rs` does within a host: this rank connects to lower ranks and accepts
//! higher ones. Anybody may connect, so the number and the life of unauthenticated connections are limited.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::connect::is_our_own;
use super::handshake::{Caller, Progress, Stranger, Terms, connected};
use super::records::Verdict;
use super::stream::{self, Stream};
use super::{Gone, address};
use crate::sync::Deadline;

/// How often a rank that has not connected is probed.
const PROBE: Duration = Duration::from_millis(200);
/// How many ranks are probed at a time.
const PROBED_AT_ONCE: usize = 16;
/// How soon this rank connects again to one that closed a connection without a message.
const RETRY: Duration = Duration::from_millis(20);
/// The most unauthenticated connections, and how long each has to authenticate. If there are more, the oldest are closed: a
/// real rank sends at once, and connects again.
const STRANGERS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);
/// How many connections are accepted before those that are there are served.
const ACCEPTED_AT_ONCE: usize = 32;

pub(super) struct Far {
    terms: Terms,
    listener: OwnedFd,
    /// Where the ranks of other hosts listen; nothing for those of this host.
    addresses: Vec<Option<SocketAddr>>,
    connected: Vec<Option<Stream>>,
    /// Lower ranks that this rank has to connect to, and the earliest time for each.
    uncalled: Vec<(usize, Instant)>,
    callers: Vec<Caller>,
    strangers: VecDeque<Stranger>,
    /// Ranks that are being probed.
    probes: Vec<(usize, OwnedFd)>,
    next_probe: Instant,
    probe_from: usize,
}

impl Far {
    pub(super) fn new(terms: Terms, listener: OwnedFd, addresses: Vec<Option<SocketAddr>>) -> Self {
        let now = Instant::now();
        let below = 0..terms.rank;
        let is_far = |rank: &usize| addresses.get(*rank).is_some_and(Option::is_some);
        Self {
            listener,
            connected: addresses.iter().map(|_| None).collect(),
            uncalled: below.filter(is_far).map(|rank| (rank, now)).collect(),
            addresses,
            terms,
            callers: Vec::new(),
            strangers: VecDeque::new(),
            probes: Vec::new(),
            next_probe: now + PROBE,
            probe_from: 0,
        }
    }

    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let ranks = self.addresses.iter().zip(&self.connected).enumerate();
        ranks.filter(|(_, (address, here))| address.is_some() && here.is_none()).map(|(r, _)| r)
    }

    pub(super) fn into_connected(self) -> Vec<Option<Stream>> {
        self.connected
    }

    /// Makes all progress that is possible without waiting.
    pub(super) fn advance(&mut self, deadline: Deadline) -> Result<(), Verdict> {
        self.call()?;
        self.accept()?;
        self.hear_strangers(deadline);
        self.hear_called(deadline)?;
        self.probe()
    }

    /// What to wait for, and for how long at most.
    pub(super) fn wait_for<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Duration {
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        fds.extend(self.callers.iter().map(|caller| {
            let (fd, flags) = caller.interest();
            PollFd::from_borrowed_fd(fd, flags)
        }));
        fds.extend(self.strangers.iter().map(|s| PollFd::new(&s.stream, PollFlags::IN)));
        fds.extend(self.probes.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT)));
        let moments = self.uncalled.iter().map(|(_, then)| *then).chain([self.next_probe]);
        let next = moments.min().unwrap_or(self.next_probe);
        next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn call(&mut self) -> Result<(), Verdict> {
        let now = Instant::now();
        for (peer, then) in std::mem::take(&mut self.uncalled) {
            if then > now {
                self.uncalled.push((peer, then));
                continue;
            }
            let Some(Some(address)) = self.addresses.get(peer) else { continue };
            match begin(*address).and_then(Stream::new) {
                Ok(stream) => self.callers.push(Caller::new(peer, stream)),
                Err(e) => return Err(self.unreachable(peer, e)),
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<(), Verdict> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..ACCEPTED_AT_ONCE {
            match net::accept_with(&self.listener, flags).and_then(Stream::new) {
                Ok(stream) => self.strangers.push_back(Stranger::new(stream)),
                Err(e) if is_our_own(e) => {
                    return Err(self.lost(self.terms.rank, &format!("accept: {e}")));
                }
                Err(_) => return Ok(()), // no connection, or one that is closed already
            }
        }
        Ok(())
    }

    fn hear_strangers(&mut self, deadline: Deadline) {
        for mut stranger in std::mem::take(&mut self.strangers) {
            let is_awaited = |rank: usize| {
                rank > self.terms.rank && self.missing().any(|missing| missing == rank)
            };
            match stranger.advance(&self.terms, is_awaited, deadline) {
                Progress::Waiting if stranger.since.elapsed() < PATIENCE => {
                    self.strangers.push_back(stranger);
                }
                Progress::Done(rank) => self.connected[rank] = Some(stranger.stream),
                Progress::Refused(why) => tracing::warn!("refused a connection: {why}"),
                _ => {}
            }
        }
        while self.strangers.len() > STRANGERS {
            self.strangers.pop_front();
        }
    }

    /// If it fails, keeps all its connections: peers that know this rank expect its goodbye.
    fn hear_called(&mut self, deadline: Deadline) -> Result<(), Verdict> {
        let mut next = 0;
        while let Some(caller) = self.callers.get_mut(next) {
            let peer = caller.peer;
            match caller.advance(&self.terms, deadline) {
                Progress::Waiting => next += 1,
                Progress::Done(rank) => {
                    self.connected[rank] = Some(self.callers.swap_remove(next).stream);
                }
                Progress::Ended => {
                    self.callers.swap_remove(next);
                    self.uncalled.push((peer, Instant::now() + RETRY));
                }
                Progress::Failed(e) => return Err(self.unreachable(peer, e)),
                Progress::Refused(how) => return Err(self.lost(peer, &how)),
                Progress::Bye(Gone { how, because_of, .. }) => {
                    return Err(self.lost(because_of.unwrap_or(peer), &how));
                }
            }
        }
        Ok(())
    }

    /// Probes ranks that have to connect to this one: do they still listen?
    fn probe(&mut self) -> Result<(), Verdict> {
        for (peer, socket) in std::mem::take(&mut self.probes) {
            match connected(&socket) {
                None => self.probes.push((peer, socket)),
                Some(Ok(())) => {}
                Some(Err(e)) => return Err(self.unreachable(peer, e)),
            }
        }
        if Instant::now() < self.next_probe {
            return Ok(());
        }
        self.next_probe = Instant::now() + PROBE;
        let asked = |rank: usize| self.probes.iter().any(|(peer, _)| *peer == rank);
        let above = |rank: &usize| *rank > self.terms.rank && !asked(*rank);
        let waited: Vec<usize> = self.missing().filter(above).collect();
        let start = self.probe_from.checked_rem(waited.len()).unwrap_or(0);
        self.probe_from = start + PROBED_AT_ONCE;
        for &peer in waited.iter().cycle().skip(start).take(waited.len().min(PROBED_AT_ONCE)) {
            let Some(Some(address)) = self.addresses.get(peer) else { continue };
            match begin(*address) {
                Ok(socket) => self.probes.push((peer, socket)),
                // A failed probe is no reason to give up.
                Err(e) if is_our_own(e) => {}
                Err(e) => return Err(self.unreachable(peer, e)),
            }
        }
        Ok(())
    }

    /// The verdict if `peer` cannot be reached.
    fn unreachable(&self, peer: usize, e: Errno) -> Verdict {
        // No port of our own is left, or no address of that family.
        if is_our_own(e) || e == Errno::ADDRNOTAVAIL {
            return self.lost(self.terms.rank, &format!("socket: {e}"));
        }
        let address = self.addresses.get(peer).copied().flatten();
        let at = address.map(|address| address.to_string()).unwrap_or_default();
        let how = match e {
            Errno::CONNREFUSED => format!("nobody listens at {at}"),
            e => format!("connecting to {at}: {e}; {} there chooses the address", address::NAMES),
        };
        self.lost(peer, &how)
    }

    fn lost(&self, peer: usize, how: &str) -> Verdict {
        Verdict::lost(self.terms.rank, peer, how)
    }

    /// Says at the deadline where each missing rank was looked for.
    pub(super) fn explain(&self) {
        for rank in self.missing() {
            let Some(Some(address)) = self.addresses.get(rank) else { continue };
            tracing::warn!(
                "no connection with rank {rank} of another host, which listens at {address}; a firewall may need SYMMEM_PORTS, \
                 another address {} there",
                address::NAMES
            );
        }
    }

    /// Tells all peers to which it has sent its hello that this rank gives up. They may count it as connected.
    pub(super) fn say_goodbye(&self, gone: &Gone) {
        let greeted = self.callers.iter().filter(|caller| caller.has_greeted());
        let told = || self.connected.iter().flatten().chain(greeted.clone().map(|c| &c.stream));
        told().for_each(|stream| stream.say_goodbye(gone));
        stream::linger(told());
    }
}

/// Begins to connect.
fn begin(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    stream::prepare(&socket)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(e) => Err(e),
    }
}
