//! The store's server: one thread, one `poll` loop, a limited number of clients.
//!
//! Nothing a client sends, or fails to read, keeps the others waiting: sockets never block, input is judged
//! before it is kept, and a client that breaks the protocol is dropped with a warning. Clients on this machine must be of
//! the server's own user. What all clients may cost together is limited in memory and in descriptors; where the limit is
//! reached, those go first who have not shown that they are clients, or hold the most.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::CALL_LIMIT;
use super::limits::{CLIENTS_LEN, Refusal, TABLE_LEN};
use super::local_peer::{Peer, Sockets};
use super::session::Session;
use super::stream::{Address, Listener, Stream};
use super::table::{Table, Waiter};
use super::trim::Trim;
use crate::error::{Error, Result};
use crate::private;
use crate::sync::Deadline;

/// How long no client is let in after the system had no room for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How many are let in at a time, before the clients that are here are served.
const ACCEPTED_AT_ONCE: usize = 64;
/// How long a client may take to show that it is one. PyTorch's do so at once, and may then be silent for hours.
const VALIDATION: Duration = Duration::from_secs(10);
/// The most connections, unless the process may have fewer.
const MAX_CLIENTS: usize = 8192;
/// While clients hold this much together, only the one with the longest query is read from, and those with short ones.
const BUSY: usize = CLIENTS_LEN / 2;
const SHORT: usize = 64 << 10;
/// How long the one with the longest query may keep the others from sending theirs.
const STALL: Duration = Duration::from_secs(2);
/// How often at most clients that are dropped are told of.
const WARN_EVERY: Duration = Duration::from_secs(1);

/// A running server. Dropping it ends its thread and closes every connection.
#[must_use = "dropping the server ends it"]
pub struct TcpServer {
    address: Address,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// The process whose thread it is; a fork of it has none.
    process: u32,
}

impl TcpServer {
    /// Starts a server on `addr`, such as `0.0.0.0:29500`, `[::]:0` or `localhost:0`; port 0 means any.
    /// `unix:` and a path is a Unix socket, for ranks that share a directory and no network.
    pub fn bind(addr: &str) -> Result<Self> {
        Self::bind_by(addr, Deadline::after(CALL_LIMIT))
    }

    /// As [`bind`](Self::bind), where the look-up of a name may take until `deadline`.
    pub(crate) fn bind_by(addr: &str, deadline: Deadline) -> Result<Self> {
        let named = |call: &str| format!("{call} of the store server on {addr}");
        let bound = Listener::bind(addr, deadline);
        let (listener, address) = bound.map_err(Error::system(named("bind")))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(Error::system(named("eventfd")))?);
        let service = Service::new(listener, &address, Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("symmem-store".to_owned())
            .spawn(move || service.run())
            .map_err(Error::system(named("start of the thread")))?;
        Ok(Self { address, stop, thread: Some(thread), process: std::process::id() })
    }

    /// Where the server listens, unless at a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self.address {
            Address::Tcp(address) => Some(address),
            Address::Unix(_) => None,
        }
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return std::mem::forget(self.thread.take());
        }
        // An event, not the closing of a pipe: a forked child would hold the pipe open.
        if let Err(error) = rustix::io::write(&*self.stop, &1u64.to_ne_bytes()) {
            tracing::warn!(%error, address = %self.address, "the store server cannot be stopped");
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!(address = %self.address, "the store server's thread panicked");
        }
    }
}

/// What the thread owns.
struct Service {
    listener: Listener,
    /// Those at our port, unless it is a Unix socket.
    sockets: Option<Sockets>,
    stop: Arc<OwnedFd>,
    table: Table,
    clients: HashMap<Waiter, Client>,
    /// How many clients there have been: their names.
    accepted: Waiter,
    accept_after: Option<Instant>,
    /// What the clients cost together.
    cost: usize,
    trim: Trim,
    warned: Option<Instant>,
    /// How many have been dropped without a warning since the last one.
    untold: usize,
}

struct Client {
    stream: Stream,
    /// Where it is, unless at a Unix socket.
    peer: Option<SocketAddr>,
    session: Session,
    /// When it was heard last.
    active: Instant,
    cost: usize,
}

/// Why a client is let go.
enum End {
    Closed,
    Broken(io::Error),
    Refused(Refusal),
    /// To make room for others.
    Evicted(&'static str),
}

/// What `poll` has found.
struct Ready {
    stop: bool,
    accept: bool,
    clients: Vec<Waiter>,
}

impl Service {
    fn new(listener: Listener, address: &Address, stop: Arc<OwnedFd>) -> Self {
        let sockets = match address {
            Address::Tcp(address) => Some(Sockets::at(address.port())),
            Address::Unix(_) => None,
        };
        Self {
            listener,
            sockets,
            stop,
            table: Table::with_limit(TABLE_LEN),
            clients: HashMap::new(),
            accepted: 0,
            accept_after: None,
            cost: 0,
            trim: Trim::new(),
            warned: None,
            untold: 0,
        }
    }

    fn run(mut self) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let ready = match self.poll() {
                Ok(ready) => ready,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::warn!(%error, "the store server cannot poll and ends");
                    return;
                }
            };
            if ready.stop {
                return;
            }
            for id in ready.clients {
                self.serve(id, &mut buffer);
            }
            self.expire();
            self.trim.trim();
            if ready.accept {
                self.accept();
            }
        }
    }

    fn poll(&mut self) -> Result<Ready, Errno> {
        let pause = self.accept_after.map(|until| until.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|left| !left.is_zero());
        let accepting = if pause.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut ids = Vec::with_capacity(self.clients.len());
        let mut fds = Vec::with_capacity(self.clients.len() + 2);
        fds.push(PollFd::new(&*self.stop, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, accepting));
        let longest = self.longest();
        for (id, client) in &self.clients {
            let may_send = longest.is_none_or(|longest| *id == longest || client.cost < SHORT);
            ids.push(*id);
            fds.push(PollFd::new(&client.stream, client.interest(may_send)));
        }
        let unvalidated = self.clients.values().any(|client| !client.session.is_validated());
        let expiry = (unvalidated || longest.is_some()).then_some(VALIDATION / 10);
        let limit = [pause, expiry].into_iter().flatten().min();
        let limit = limit.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut fds, limit.as_ref())?;
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = events.next().unwrap_or_default();
        let accept = events.next().unwrap_or_default();
        let clients = ids.into_iter().zip(events).filter(|(_, event)| *event);
        Ok(Ready { stop, accept, clients: clients.map(|(id, _)| id).collect() })
    }

    /// Lets in those who wait, as far as they are of our user.
    fn accept(&mut self) {
        self.accept_after = None;
        let mut arrived = Vec::new();
        while arrived.len() < ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok(client) => arrived.push(client),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    self.cannot_accept(&error);
                    break;
                }
            }
        }
        if arrived.is_empty() {
            return;
        }
        if let Some(sockets) = &mut self.sockets {
            sockets.renew();
        }
        for (stream, peer) in arrived {
            match stream.client(&self.sockets) {
                Peer::Remote => self.admit(stream, peer),
                Peer::User(uid) if private::is_trusted(uid) => self.admit(stream, peer),
                Peer::User(uid) => {
                    stream.abort();
                    self.warn(&format!("a client of user {}", private::user()), &format!("{uid}"));
                }
                Peer::Nobody => {} // it has gone again
            }
        }
    }

    fn cannot_accept(&mut self, error: &io::Error) {
        self.warn("a free descriptor for a client", &error.to_string());
        self.accept_after = Instant::now().checked_add(ACCEPT_PAUSE);
        // Silent clients may be the reason, unless there are few: then the process itself uses the descriptors.
        let hoard = self.clients.len() > 256;
        let idle = self.least_deserving().filter(|id| {
            hoard || self.clients.get(id).is_some_and(|client| !client.session.is_validated())
        });
        if let Some(id) = idle {
            self.dismiss(id, End::Evicted("free descriptors"));
        }
    }

    fn admit(&mut self, stream: Stream, peer: Option<SocketAddr>) {
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4 * 3;
        let most = usize::try_from(allowed).unwrap_or(MAX_CLIENTS).clamp(16, MAX_CLIENTS);
        while self.clients.len() >= most {
            let Some(id) = self.least_deserving() else { break };
            self.dismiss(id, End::Evicted("fewer connections"));
        }
        self.accepted += 1;
        let session = Session::new(self.accepted);
        let client = Client { stream, peer, session, active: Instant::now(), cost: 0 };
        self.clients.insert(self.accepted, client);
    }

    /// Who has not shown in the longest time that it is a client; or else, of the host with the most connections, the one
    /// that is silent the longest, rather not in a wait.
    fn least_deserving(&self) -> Option<Waiter> {
        let clients = || self.clients.iter();
        let strangers = clients().filter(|(_, client)| !client.session.is_validated());
        if let Some((id, _)) = strangers.min_by_key(|(_, client)| client.active) {
            return Some(*id);
        }
        let mut hosts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        clients().for_each(|(_, client)| *hosts.entry(client.host()).or_default() += 1);
        let busiest = hosts.into_iter().max_by_key(|(_, count)| *count)?.0;
        let of_host = clients().filter(|(_, client)| client.host() == busiest);
        let idle = of_host.min_by_key(|(_, client)| (client.session.is_waiting(), client.active));
        idle.map(|(id, _)| *id)
    }

    /// The client that holds the most, where all together hold so much that the others have to wait.
    fn longest(&self) -> Option<Waiter> {
        let longest = || self.clients.iter().max_by_key(|(_, client)| client.cost);
        (self.cost + self.table.unlisted() > BUSY).then(longest)?.map(|(id, _)| *id)
    }

    /// Lets go of those who have not shown in time that they are clients, and of one who holds up the others.
    fn expire(&mut self) {
        let late = |client: &Client| {
            !client.session.is_validated() && client.active.elapsed() > VALIDATION
        };
        let late: Vec<Waiter> =
            self.clients.iter().filter(|(_, client)| late(client)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.dismiss(id, End::Evicted("a first query in time")));
        if let Some(id) = self.stalled() {
            self.dismiss(id, End::Evicted("the rest of a long query, or that answers are read"));
        }
    }

    /// Whom to drop because the one with the longest query sends no more of it: of that one and those who do not read long
    /// answers, the one that has been silent the longest. The query may be an honest one, and slow only because the machine is.
    fn stalled(&self) -> Option<Waiter> {
        let longest = self.longest()?;
        if self.clients.get(&longest)?.active.elapsed() <= STALL {
            return None;
        }
        // A value is kept as a whole until its last byte is sent.
        let holds_up = |id: &Waiter, client: &Client| *id == longest || client.session.shared() > 0;
        let held_up_by = self.clients.iter().filter(|(id, client)| holds_up(id, client));
        held_up_by.min_by_key(|(_, client)| client.active).map(|(id, _)| *id)
    }

    fn serve(&mut self, id: Waiter, buffer: &mut [u8]) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.session.is_validated() {
            client.active = Instant::now();
        }
        if let Err(end) = client.serve(&mut self.table, buffer) {
            self.dismiss(id, end);
        }
        self.count(id);
        // Also after a dismissal: what the client had set before counts.
        for woken in self.table.take_woken() {
            let Some(client) = self.clients.get_mut(&woken) else { continue };
            client.session.stop_waiting();
            if let Err(end) = client.flush() {
                self.dismiss(woken, end);
            }
            self.count(woken);
        }
        while self.cost + self.table.unlisted() > CLIENTS_LEN {
            // Whichever is more: what clients hold themselves, or values that are only in their answers.
            let own = self.cost > self.table.unlisted();
            let held = |client: &Client| if own { client.cost } else { client.session.shared() };
            let most = self.clients.iter().max_by_key(|(_, client)| held(client));
            let Some((id, _)) = most else { return };
            self.dismiss(*id, End::Evicted("less memory held by clients"));
        }
    }

    fn count(&mut self, id: Waiter) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let cost = client.session.cost();
        self.trim.freed(client.cost.saturating_sub(cost));
        self.cost = self.cost - client.cost + cost;
        client.cost = cost;
    }

    fn dismiss(&mut self, id: Waiter, end: End) {
        self.table.cancel(id);
        let Some(Client { stream, peer, cost, .. }) = self.clients.remove(&id) else { return };
        self.cost -= cost;
        self.trim.freed(cost);
        if let End::Evicted(_) | End::Refused(_) = end {
            stream.abort();
        }
        let peer = peer.map_or("a local client".to_owned(), |peer| peer.to_string());
        match end {
            End::Closed => tracing::debug!(%peer, "a store client left"),
            End::Broken(error) => tracing::debug!(%peer, %error, "a store client was lost"),
            End::Refused(Refusal { expected, got }) => self.warn(&expected, &got),
            End::Evicted(expected) => self.warn(expected, &peer),
        }
    }

    /// Says why a client is dropped, but not as often as clients wish.
    fn warn(&mut self, expected: &str, got: &str) {
        if self.warned.is_some_and(|last| last.elapsed() < WARN_EVERY) {
            self.untold += 1;
            return;
        }
        let others = std::mem::take(&mut self.untold);
        tracing::warn!(expected, got, others, "the store server drops a client");
        self.warned = Some(Instant::now());
    }
}

impl Client {
    fn host(&self) -> Option<IpAddr> {
        self.peer.map(|peer| peer.ip().to_canonical())
    }

    fn interest(&self, may_send: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, may_send && !self.session.is_paused());
        flags.set(PollFlags::OUT, !self.session.unsent().is_empty());
        flags
    }

    /// Sends, reads once, answers, sends.
    fn serve(&mut self, table: &mut Table, buffer: &mut [u8]) -> Result<(), End> {
        self.flush()?;
        if !self.session.is_paused() {
            self.read(buffer)?;
        }
        while !self.session.answer(table).map_err(End::Refused)? {
            self.flush()?;
            if self.session.is_paused() {
                return Ok(());
            }
        }
        self.flush()
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), End> {
        match self.stream.read(buffer) {
            Ok(0) => Err(End::Closed),
            Ok(len) => {
                self.session.feed(buffer.get(..len).unwrap_or_default());
                Ok(())
            }
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(End::Broken(error)),
        }
    }

    fn flush(&mut self) -> Result<(), End> {
        while !self.session.unsent().is_empty() {
            // std sends with MSG_NOSIGNAL: a client that is gone is an error, not a signal.
            match self.stream.write(self.session.unsent()) {
                Ok(len) => self.session.mark_sent(len),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(End::Broken(error)),
            }
        }
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl std::fmt::Debug for TcpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpServer").field("address", &self.local_addr()).finish_non_exhaustive()
    }
}
