//! The store's server: one thread, one `poll` loop, any number of clients.
//!
//! Nothing a client sends, or fails to read, keeps the others waiting: sockets never block, input is judged
//! before it is kept, and a client that breaks the protocol is dropped with a warning.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::limits::Refusal;
use super::session::Session;
use super::stream::{Address, Listener, Stream};
use super::table::{Table, Waiter};
use crate::error::{Error, Result};

/// How long no client is let in after the system had no room for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running server. Dropping it ends its thread and closes every connection.
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
        let named = |call: &str| format!("{call} of the store server on {addr}");
        let (listener, address) = Listener::bind(addr).map_err(Error::system(named("bind")))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(Error::system(named("eventfd")))?);
        let service = Service::new(listener, Arc::clone(&stop));
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
        if let Address::Unix(path) = &self.address {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What the thread owns.
struct Service {
    listener: Listener,
    stop: Arc<OwnedFd>,
    table: Table,
    clients: HashMap<Waiter, Client>,
    /// How many clients there have been: their names.
    accepted: Waiter,
    accept_after: Option<Instant>,
}

struct Client {
    stream: Stream,
    peer: String,
    session: Session,
}

/// Why a client is let go.
enum End {
    Closed,
    Broken(io::Error),
    Refused(Refusal),
}

/// What `poll` has found.
struct Ready {
    stop: bool,
    accept: bool,
    clients: Vec<Waiter>,
}

impl Service {
    fn new(listener: Listener, stop: Arc<OwnedFd>) -> Self {
        let (table, clients) = (Table::default(), HashMap::new());
        Self { listener, stop, table, clients, accepted: 0, accept_after: None }
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
        for (id, client) in &self.clients {
            ids.push(*id);
            fds.push(PollFd::new(&client.stream, client.interest()));
        }
        let limit = pause.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut fds, limit.as_ref())?;
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = events.next().unwrap_or_default();
        let accept = events.next().unwrap_or_default();
        let clients = ids.into_iter().zip(events).filter(|(_, event)| *event);
        Ok(Ready { stop, accept, clients: clients.map(|(id, _)| id).collect() })
    }

    fn accept(&mut self) {
        self.accept_after = None;
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => self.admit(stream, peer),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::warn!(%error, "the store server cannot accept a client");
                    self.accept_after = Instant::now().checked_add(ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: Stream, peer: String) {
        self.accepted += 1;
        let session = Session::new(self.accepted);
        self.clients.insert(self.accepted, Client { stream, peer, session });
    }

    fn serve(&mut self, id: Waiter, buffer: &mut [u8]) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if let Err(end) = client.turn(&mut self.table, buffer) {
            self.dismiss(id, end);
        }
        // Also after a dismissal: what the client had set before counts.
        for woken in self.table.take_woken() {
            let Some(client) = self.clients.get_mut(&woken) else { continue };
            client.session.stop_waiting();
            if let Err(end) = client.flush() {
                self.dismiss(woken, end);
            }
        }
    }

    fn dismiss(&mut self, id: Waiter, end: End) {
        self.table.cancel(id);
        let Some(Client { peer, .. }) = self.clients.remove(&id) else { return };
        match end {
            End::Closed => tracing::debug!(%peer, "a store client left"),
            End::Broken(error) => tracing::debug!(%peer, %error, "a store client was lost"),
            End::Refused(Refusal { expected, got }) => {
                tracing::warn!(%peer, expected, got, "the store server drops a client");
            }
        }
    }
}

impl Client {
    fn interest(&self) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, !self.session.is_paused());
        flags.set(PollFlags::OUT, !self.session.unsent().is_empty());
        flags
    }

    /// Sends, reads once, answers, sends.
    fn turn(&mut self, table: &mut Table, buffer: &mut [u8]) -> Result<(), End> {
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
