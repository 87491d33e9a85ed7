//! The one thread of a mesh over sockets: takes in letters and notices deaths.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

use super::inbox::{Gone, Inbox, Letter};
use super::socket::{self, Packet, Received};
use crate::error::{Error, Result};

pub(super) struct Watcher {
    /// Closing it ends the thread.
    stop: Option<std::io::PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

struct Peer {
    rank: usize,
    socket: Arc<OwnedFd>,
    process: Option<OwnedFd>,
}

impl Watcher {
    pub(super) fn start(inbox: Arc<Inbox>, sockets: Vec<(usize, Arc<OwnedFd>)>) -> Result<Self> {
        let (ended, stop) = std::io::pipe().map_err(Error::system("pipe"))?;
        let peer = |(rank, socket): (usize, Arc<OwnedFd>)| Peer {
            rank,
            process: socket::peer_process(&socket),
            socket,
        };
        let mut peers: Vec<Peer> = sockets.into_iter().map(peer).collect();
        let thread = std::thread::Builder::new()
            .name("symmem-watcher".into())
            .stack_size(256 << 10)
            .spawn(move || while !ended_or_served(&inbox, &ended, &mut peers) {})
            .map_err(Error::system("starting the watcher thread"))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        // The last owner of a world may be the watcher itself, on its way through a mourner.
        let own =
            self.thread.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id());
        if let Some(thread) = self.thread.take().filter(|_| !own) {
            let _ = thread.join();
        }
    }
}

/// Waits for something to happen and deals with it; true when the mesh is being taken down.
fn ended_or_served(inbox: &Inbox, ended: &std::io::PipeReader, peers: &mut Vec<Peer>) -> bool {
    let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
    for peer in peers.iter() {
        fds.push(PollFd::new(&*peer.socket, PollFlags::IN));
        // A missing one is watched in place by the socket again, to keep two entries a peer.
        let process: &OwnedFd = peer.process.as_ref().unwrap_or(&peer.socket);
        fds.push(PollFd::new(process, PollFlags::IN));
    }
    if poll(&mut fds, None).is_err() {
        return false; // interrupted, or short of memory: look again
    }
    let woken: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    drop(fds);
    let Some((&stop, pairs)) = woken.split_first() else { return true };
    if stop {
        return true;
    }
    let mut pairs = pairs.chunks_exact(2);
    peers.retain(|peer| {
        let (readable, ended) = match pairs.next() {
            Some([socket, process]) => (*socket, *process && peer.process.is_some()),
            _ => (false, false),
        };
        let open = !readable || take_in(inbox, peer);
        if open && ended && take_in(inbox, peer) {
            inbox.mark_gone(peer.rank, Gone::lost("its process ended"));
        }
        open && !ended
    });
    false
}

/// Takes in all that has arrived; false when the connection is over.
fn take_in(inbox: &Inbox, peer: &Peer) -> bool {
    loop {
        match socket::receive(&peer.socket) {
            Received::Packet(Packet::Letter { subject, phase, body }, memory) => {
                inbox.deliver(peer.rank, subject, phase, Letter::new(body, memory));
            }
            Received::Packet(Packet::Bye { how, because_of }, _) => {
                inbox.mark_gone(peer.rank, Gone { left: true, how, because_of });
                return false;
            }
            Received::Packet(other, _) => {
                inbox.mark_gone(peer.rank, Gone::lost(format!("it sent {other:?} out of turn")));
                return false;
            }
            Received::Garbage(what) => {
                inbox.mark_gone(peer.rank, Gone::lost(format!("it sent garbage, {what}")));
                return false;
            }
            Received::End => {
                inbox.mark_gone(peer.rank, Gone::lost("its connection closed"));
                return false;
            }
            Received::Nothing => return true,
        }
    }
}
