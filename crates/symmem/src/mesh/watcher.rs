//! The one thread of a mesh over sockets: it receives messages and notices deaths.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::carrier::{self, Carrier};
use super::group_messages::GroupMessages;
use super::inbox::{Gone, Inbox, Message};
use super::landing::Landing;
use super::socket::{self, Packet, Received};
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::sync::Ordering;
use crate::sync::atomic::AtomicBool;

pub(super) struct Watcher {
    thread: Option<JoinHandle<()>>,
    peers: Arc<Peers>,
}

/// The connections of a rank, for the watcher thread and for threads that cannot wait for it.
pub(super) struct Peers {
    inbox: Arc<Inbox>,
    peers: Vec<Peer>,
    /// Ranks of other hosts that have gone because of a loss which this rank has not noticed yet.
    farewells: Mutex<Vec<Farewell>>,
    /// A byte written to it wakes the thread: [`END`] or [`LOOK`]. Closing it would not be enough, since a forked child may hold
    /// it open.
    teller: std::io::PipeWriter,
    /// Whether the thread sleeps until an event. Meanwhile it sends no held-back messages.
    is_asleep: AtomicBool,
    /// Another transport that brings messages.
    carrier: Mutex<Option<Arc<dyn Carrier>>>,
}

const END: u8 = 0;
const LOOK: u8 = 1;

/// The goodbye of a rank that went because of `cause`.
struct Farewell {
    rank: usize,
    gone: Gone,
    cause: usize,
    since: Instant,
}

/// How long after the goodbye the loss of its cause may be noticed.
const GRACE: Duration = Duration::from_millis(200);

struct Peer {
    rank: usize,
    line: Line,
    process: Option<OwnedFd>,
    /// Held while a packet goes from the socket to the inbox, so that packets stay in order.
    reading: Mutex<()>,
    /// A waiting thread has polled it since the watcher did.
    was_looked_at: AtomicBool,
}

/// For how long the watcher leaves a connection to waiting threads that poll it. It wakes once in this time to check that they do.
const LEFT_ALONE: Duration = Duration::from_millis(1);

/// The connection to a peer.
pub(super) enum Line {
    Socket(Arc<OwnedFd>),
    /// To the host of this name.
    Stream(Arc<Stream>, String),
}

impl Line {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(socket) => socket.as_fd(),
            Self::Stream(stream, _) => stream.as_fd(),
        }
    }

    fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(..))
    }

    /// The next packet. Messages to groups that come before it are delivered.
    fn receive(&self, groups: &dyn GroupMessages) -> Received {
        match self {
            Self::Socket(socket) => socket::receive(socket),
            Self::Stream(stream, _) => stream.receive_and(groups),
        }
    }

    fn send_held(&self) {
        if let Self::Stream(stream, _) = self {
            stream.send_held();
        }
    }

    fn end(&self) {
        match self {
            Self::Socket(socket) => socket::end(socket),
            Self::Stream(stream, _) => stream.end(),
        }
    }

    fn process(&self) -> Option<OwnedFd> {
        match self {
            Self::Socket(socket) => socket::peer_process(socket),
            Self::Stream(..) => None,
        }
    }

    /// Whether it ended because its host no longer answers.
    fn is_silent(&self, gone: &Gone) -> bool {
        self.is_stream() && !gone.left && gone.how == self.silence()
    }

    /// The description of a peer whose host no longer answers.
    fn silence(&self) -> String {
        match self {
            Self::Socket(_) => "its connection failed".to_owned(),
            Self::Stream(_, host) => format!("its host {host} is unreachable"),
        }
    }
}

impl Watcher {
    pub(super) fn start(inbox: Arc<Inbox>, lines: Vec<(usize, Line)>) -> Result<Self> {
        let (told, teller) = std::io::pipe().map_err(Error::system("pipe"))?;
        let peer = |(rank, line): (usize, Line)| Peer {
            rank,
            process: line.process(),
            line,
            reading: Mutex::new(()),
            was_looked_at: AtomicBool::new(false),
        };
        let peers = lines.into_iter().map(peer).collect();
        let (farewells, carrier) = (Mutex::default(), Mutex::default());
        let is_asleep = AtomicBool::new(false);
        let peers = Arc::new(Peers { inbox, peers, farewells, teller, is_asleep, carrier });
        let watched = Arc::clone(&peers);
        let thread = std::thread::Builder::new()
            .name("symmem-watcher".into())
            .stack_size(1 << 20)
            .spawn(move || {
                let mut here: Vec<&Peer> = watched.peers.iter().collect();
                // Data that came with the handshake has been read from the socket, so `poll` does not report it again.
                here.retain(|peer| !peer.line.is_stream() || watched.serve(peer, false));
                while !watched.ended_or_served(&told, &mut here) {
                    watched.take_farewells();
                }
            })
            .map_err(Error::system("starting the watcher thread"))?;
        Ok(Self { thread: Some(thread), peers })
    }

    pub(super) fn peers(&self) -> &Arc<Peers> {
        &self.peers
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.peers.tell_thread(END);
        // Never by the thread itself: the observers that it notifies own no mesh.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Peers {
    fn tell_thread(&self, what: u8) {
        let _ = std::io::Write::write_all(&mut &self.teller, &[what]);
    }

    /// From here on, the thread also serves this.
    pub(super) fn carry(&self, carrier: Option<Arc<dyn Carrier>>) {
        *self.carrier.lock().unwrap_or_else(PoisonError::into_inner) = carrier;
        self.tell_thread(LOOK);
    }

    fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        self.carrier.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Receives what a rank has sent, unless another thread does. For threads that poll.
    pub(super) fn look_at(&self, rank: usize) {
        let Some(peer) = self.peers.iter().find(|peer| peer.rank == rank) else { return };
        peer.line.send_held();
        peer.was_looked_at.store(true, Ordering::Relaxed);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.tell_thread(LOOK); // so that it leaves the connection to us
        }
        if let Ok(_reading) = peer.reading.try_lock() {
            self.serve_locked(peer, false);
        }
    }

    /// Sends what is held back, unless the thread will.
    pub(super) fn send_held_if_idle(&self, stream: &Stream) {
        if self.is_asleep.load(Ordering::SeqCst) {
            stream.send_held();
        }
    }

    /// Receives what these ranks have sent, in case the thread has not done so yet.
    pub(super) fn take_in(&self, from: &[usize]) {
        for peer in self.peers.iter().filter(|peer| from.contains(&peer.rank)) {
            self.serve(peer, false);
        }
    }

    /// Waits for an event and handles it. Returns true when the mesh is being shut down.
    fn ended_or_served(&self, told: &std::io::PipeReader, peers: &mut Vec<&Peer>) -> bool {
        let mut fds = vec![PollFd::new(told, PollFlags::IN)];
        let mut limit = (!self.farewells().is_empty()).then_some(GRACE / 10);
        let carrier = self.carrier();
        let carried = carrier.as_ref().map(|carrier| carrier::serve(&**carrier));
        if let Some((_, nap)) = carried {
            limit = Some(limit.map_or(nap, |limit| limit.min(nap)));
        }
        for peer in peers.iter() {
            let line = peer.line.fd();
            let flags = match peer.was_looked_at.swap(false, Ordering::Relaxed) {
                false => PollFlags::IN,
                true => {
                    limit = Some(limit.map_or(LEFT_ALONE, |limit| limit.min(LEFT_ALONE)));
                    PollFlags::empty()
                }
            };
            fds.push(PollFd::from_borrowed_fd(line, flags));
            // A missing one is watched in place by the connection again, to keep two entries a peer.
            let (process, flags) = match &peer.process {
                Some(process) => (process.as_fd(), PollFlags::IN),
                None => (line, flags),
            };
            fds.push(PollFd::from_borrowed_fd(process, flags));
        }
        let descriptor = carried.and_then(|(descriptor, _)| descriptor);
        fds.extend(descriptor.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        self.is_asleep.store(limit.is_none(), Ordering::SeqCst);
        // From here on, a thread that holds a message back sends it itself.
        self.peers.iter().for_each(|peer| peer.line.send_held());
        let polled = poll(&mut fds, limit.map(socket::timespec).as_ref());
        self.is_asleep.store(false, Ordering::SeqCst);
        if polled.is_err() {
            return false; // interrupted, or short of memory: look again
        }
        let woken: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let Some((&is_told, pairs)) = woken.split_first() else { return true };
        if is_told {
            let mut what = [END];
            let _ = std::io::Read::read(&mut &*told, &mut what);
            if what == [END] {
                return true;
            }
        }
        let mut pairs = pairs.chunks_exact(2);
        peers.retain(|peer| {
            let (readable, ended) = match pairs.next() {
                Some([socket, process]) => (*socket, *process && peer.process.is_some()),
                _ => (false, false),
            };
            !(readable || ended) || self.serve(peer, ended)
        });
        for (rank, how) in carrier.map(|carrier| carrier.lost()).unwrap_or_default() {
            if let Some(at) = peers.iter().position(|peer| peer.rank == rank) {
                self.lose(peers.swap_remove(at), how);
            }
        }
        false
    }

    /// A carrier has lost a peer. The peer may have sent a goodbye.
    fn lose(&self, peer: &Peer, how: String) {
        if self.serve(peer, false) {
            peer.line.end(); // so that it learns that it is over
            self.inbox.mark_gone(peer.rank, Gone::lost(how));
        }
    }

    /// Receives what a peer has sent. Returns false, and notes it, if the peer has gone.
    fn serve(&self, peer: &Peer, ended: bool) -> bool {
        let _reading = peer.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.serve_locked(peer, ended)
    }

    /// As `serve`, with the connection's lock held.
    fn serve_locked(&self, peer: &Peer, ended: bool) -> bool {
        let closed = take_in(&self.inbox, peer);
        let gone = closed.or_else(|| ended.then(|| Gone::lost("its process ended")));
        let Some(gone) = gone else { return true };
        if let Some(carrier) = self.carrier().filter(|_| peer.line.is_stream()) {
            carrier::drain(&*carrier); // its earlier messages come first
        }
        // If the peer lives after all, or its child holds the connection, they notice the end.
        peer.line.end();
        if self.farewells().iter().any(|farewell| farewell.rank == peer.rank) {
            return false; // its goodbye was received
        }
        match gone.because_of.filter(|&cause| self.is_hearsay(peer, cause)) {
            Some(cause) => {
                let farewell = Farewell { rank: peer.rank, gone, cause, since: Instant::now() };
                self.farewells().push(farewell);
                self.tell_thread(LOOK);
            }
            None if peer.line.is_silent(&gone) => self.lose_host_of(peer, &gone),
            None => self.inbox.mark_gone(peer.rank, gone),
        }
        false
    }

    /// Whether a peer goes because of a rank that is not on its host. That rank may only be unreachable for the peer. If it has
    /// died, this rank notices very soon.
    fn is_hearsay(&self, peer: &Peer, cause: usize) -> bool {
        let line = |rank| self.peers.iter().find(|peer| peer.rank == rank).map(|peer| &peer.line);
        match (&peer.line, line(cause)) {
            (Line::Socket(_), Some(Line::Socket(_))) | (_, None) => false,
            (Line::Stream(_, a), Some(Line::Stream(_, b))) if a == b => false,
            _ => self.inbox.gone(cause).is_none(),
        }
    }

    /// All ranks of a host are lost with it, in rank order, so that all ranks name the same one.
    fn lose_host_of(&self, peer: &Peer, gone: &Gone) {
        let Line::Stream(_, host) = &peer.line else { return };
        let of_host = |other: &&Peer| matches!(&other.line, Line::Stream(_, name) if name == host);
        for other in self.peers.iter().filter(of_host) {
            other.line.end();
            self.inbox.mark_gone(other.rank, gone.clone());
        }
    }

    /// Handles delayed goodbyes: when their cause is known to be lost, or when it has not been noticed in time.
    fn take_farewells(&self) {
        let mut farewells = self.farewells();
        let is_settled = |farewell: &mut Farewell| {
            farewell.since.elapsed() > GRACE || self.inbox.gone(farewell.cause).is_some()
        };
        let settled: Vec<Farewell> = farewells.extract_if(.., is_settled).collect();
        for Farewell { rank, gone, .. } in &settled {
            self.inbox.mark_gone(*rank, Gone { because_of: None, ..gone.clone() });
        }
    }

    fn farewells(&self) -> MutexGuard<'_, Vec<Farewell>> {
        // Nothing is done under the lock that could leave it half changed.
        self.farewells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The groups, for the messages of one rank.
struct From<'a> {
    rank: usize,
    inbox: &'a Inbox,
}

impl GroupMessages for From<'_> {
    fn deliver(&self, group: u128, bytes: &[u8]) -> Result<(), String> {
        self.inbox.deliver_to_group(self.rank, group, bytes)
    }

    fn land(&self, group: u128, beginning: &[u8], rest: usize) -> Option<Landing> {
        self.inbox.land(self.rank, group, beginning, rest)
    }
}

/// Receives all that has arrived. Returns how the connection ended, if it did.
fn take_in(inbox: &Inbox, peer: &Peer) -> Option<Gone> {
    loop {
        match peer.line.receive(&From { rank: peer.rank, inbox }) {
            Received::Packet(Packet::Message { subject, phase, body, .. }, memory) => {
                inbox.deliver(peer.rank, subject, phase, Message::new(body, memory));
            }
            Received::Packet(Packet::Bye(gone), _) => return Some(gone),
            Received::Packet(other, _) => {
                return Some(Gone::lost(format!("it sent {other:?} out of turn")));
            }
            Received::Garbage(what) => {
                return Some(Gone::lost(format!("it sent an invalid message: {what}")));
            }
            Received::End => return Some(Gone::lost("its connection closed")),
            Received::Silence => return Some(Gone::lost(peer.line.silence())),
            Received::Nothing => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    use super::*;
    use crate::mesh::host::Hosts;
    use crate::mesh::{Mesh, Phase, Scope};
    use crate::sync::Deadline;

    /// What a rank is told of a peer that sends these bytes; and whether the peer sees its connection end.
    fn told_of_one_who_sends(bytes: &[u8]) -> (Gone, bool) {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let inbox: Arc<Inbox> = Arc::default();
        let _watcher =
            Watcher::start(Arc::clone(&inbox), vec![(5, Line::Socket(Arc::new(ours)))]).unwrap();
        send(&theirs, bytes, SendFlags::NOSIGNAL).unwrap();
        let begin = Instant::now();
        let gone = loop {
            match inbox.gone(5) {
                Some(gone) => break gone,
                None if begin.elapsed() > Duration::from_secs(10) => panic!("not noticed"),
                None => std::thread::yield_now(),
            }
        };
        (gone, matches!(socket::receive(&theirs), Received::End))
    }

    /// The thread has no core, or waits for something else: here, until a packet of rank 1 is dealt with.
    #[test]
    fn what_lies_in_the_socket_at_the_deadline_has_come() {
        let flags = SocketFlags::CLOEXEC;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (to_one, one) = pair();
        let (to_two, two) = pair();
        let sockets = vec![None, Some(to_one), Some(to_two)];
        let mesh = Mesh::connected(0, sockets, vec![], Hosts::one(3)).unwrap();
        let peers = Arc::clone(mesh.watcher.lock().unwrap().as_ref().unwrap().peers());
        let _busy = peers.peers[0].reading.lock().unwrap();
        let subject = mesh.inbox().begin(Scope::Group(7));
        for socket in [&one, &two] {
            let (subject, body) = (subject.clone(), vec![5]);
            let message = Packet::Message { subject, phase: Phase::Proposal, body, fabric: None };
            socket::send(socket, &message, None, Deadline::NEVER).unwrap();
        }
        let limit = Deadline::after(Duration::from_millis(1));
        let messages = mesh.collect(&subject, Phase::Proposal, &[2], limit, &|| false).unwrap();
        assert_eq!(messages[0].body, [5]);
    }

    #[test]
    fn garbage_makes_a_peer_lost_for_that_reason_at_both_ends() {
        let (gone, ended) = told_of_one_who_sends(&[0xff; 100]);
        assert!(
            !gone.left && gone.how.contains("it sent an invalid message: 100 bytes"),
            "{}",
            gone.how
        );
        assert!(ended);
    }

    #[test]
    fn a_packet_out_of_turn_makes_a_peer_lost() {
        let hello = postcard::to_stdvec(&Packet::Hello { token: 1, rank: 2 }).unwrap();
        let (gone, ended) = told_of_one_who_sends(&hello);
        assert!(!gone.left && gone.how.contains("out of turn"), "{}", gone.how);
        assert!(ended);
    }

    #[test]
    fn a_goodbye_is_heard_from_one_who_did_not_read_everything() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        send(&ours, b"unread", SendFlags::NOSIGNAL).unwrap();
        socket::say_goodbye(&theirs, &Gone { left: true, how: "so long".into(), because_of: None });
        drop(theirs);
        let heard = socket::receive(&ours);
        assert!(matches!(heard, Received::Packet(Packet::Bye(gone), _) if gone.how == "so long"));
        assert!(matches!(socket::receive(&ours), Received::End));
    }

    #[test]
    fn a_goodbye_says_how() {
        let bye = Packet::Bye(Gone { left: true, how: "so long".into(), because_of: None });
        let (gone, _) = told_of_one_who_sends(&postcard::to_stdvec(&bye).unwrap());
        assert!(gone.left);
        assert_eq!(gone.how, "so long");
    }
}
