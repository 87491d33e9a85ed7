//! Packets over Unix sockets: framing, the descriptors that travel with them, and the credentials of the other end.
#![allow(unsafe_code)] // one socket option that rustix has no call for

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use super::{Gone, Phase, Subject};
use crate::error::{Error, Result};
use crate::memory::Exported;
use crate::private;
use crate::sync::Deadline;

/// The largest packet. Sockets keep packet boundaries, so one read is one packet.
pub(super) const PACKET: usize = 16 << 10;
/// How long a leaving rank waits for a peer to take its goodbye.
pub(super) const GOODBYE: Duration = Duration::from_millis(20);

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Packet {
    /// First from the connecting rank.
    Hello { token: u128, rank: usize },
    /// The answer.
    Welcome { token: u128, rank: usize },
    Message {
        subject: Subject,
        phase: Phase,
        body: Vec<u8>,
        /// The handle of the memory that comes with it, where that is no descriptor.
        fabric: Option<Vec<u8>>,
    },
    /// Last, from a rank that can still say so.
    Bye(Gone),
    /// Between hosts: how much the sender of this has taken in so far, and how much more it has room for.
    Taken { total: u64, window: u64 },
}

impl Packet {
    /// Whether these are the bytes of a packet of those before all others, or a goodbye: none with a list in it.
    pub(super) fn is_short(bytes: &[u8]) -> bool {
        const HELLO: u8 = 0;
        const WELCOME: u8 = 1;
        const BYE: u8 = 3;
        matches!(bytes.first(), Some(&(HELLO | WELCOME | BYE)))
    }

    /// The memory that came as bytes.
    pub(super) fn fabric(&self) -> Option<Exported> {
        match self {
            Self::Message { fabric: Some(handle), .. } => {
                handle.as_slice().try_into().ok().map(Exported::Bytes)
            }
            _ => None,
        }
    }
}

/// What one look at a socket brought.
pub(super) enum Received {
    Packet(Packet, Option<Exported>),
    Nothing,
    /// The other end is closed.
    End,
    /// The other end's host does not answer any more.
    Silence,
    /// Not a packet of ours.
    Garbage(String),
}

/// The bytes of a packet, of which there may be so many.
pub(super) fn encode(packet: &Packet, most: usize) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(packet).unwrap_or_default();
    if !bytes.is_empty() && bytes.len() <= most {
        return Ok(bytes);
    }
    Err(Error::Usage {
        op: "send",
        rank: None,
        expected: format!("a message of at most {most} bytes"),
        got: format!("{} bytes", bytes.len()),
    })
}

/// Sends one packet whole, waiting for room until the deadline.
pub(super) fn send(
    socket: &OwnedFd,
    packet: &Packet,
    memory: Option<Exported>,
    deadline: Deadline,
) -> Result<()> {
    let bytes = encode(packet, PACKET)?;
    let descriptor = match &memory {
        Some(Exported::Descriptor(fd)) => Some(fd.as_fd()),
        // Cannot travel: the message goes without, and whoever needs the memory says so.
        Some(Exported::Mapping(_)) => None,
        // In the packet itself.
        Some(Exported::Bytes(_)) | None => None,
    };
    let deadline = deadline.start();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &descriptor {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            // The watcher tells of the loss; here it only means that nobody reads this any more.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOBUFS) => match deadline.expiry() {
                None => wait_writable(socket, deadline),
                Some(why) => return Err(why.error("send", vec![], deadline.elapsed())),
            },
            Err(e) => return Err(Error::system("sendmsg to a peer")(e)),
        }
    }
}

/// Tells a peer that we go. One that does not take it learns as much from the closed connection.
pub(super) fn say_goodbye(socket: &OwnedFd, gone: &Gone) {
    let _ = send(socket, &Packet::Bye(gone.clone()), None, Deadline::after(GOODBYE));
}

/// Ends a connection at both ends, whoever else holds it.
pub(super) fn end(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

fn wait_writable(socket: &OwnedFd, deadline: Deadline) {
    let nap = deadline.nap(Duration::from_millis(100));
    let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&timespec(nap)));
}

pub(super) fn timespec(d: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: d.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: d.subsec_nanos().into(),
    }
}

/// Takes one packet if there is one; never waits.
pub(super) fn receive(socket: &OwnedFd) -> Received {
    match receive_once(socket) {
        // The kernel looks for packets first and for the end afterwards. If the other end sends its goodbye and closes in
        // between, the goodbye is still there.
        Received::End => receive_once(socket),
        received => received,
    }
}

fn receive_once(socket: &OwnedFd) -> Received {
    let mut bytes = [0; PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
        // FarMessage once, and before what it sent last: the other end has closed without reading all that we sent.
        Err(Errno::CONNRESET) => return receive_once(socket),
        Err(_) => return Received::End,
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if got.bytes == 0 {
        return Received::End;
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // No free descriptor in this process: the message goes on without its memory, and whoever needs it says so.
        tracing::warn!("a descriptor was lost: this process is at its limit of open files");
    }
    match postcard::from_bytes::<Packet>(bytes.get(..got.bytes).unwrap_or_default()) {
        Ok(packet) => {
            let memory = descriptor.map(Exported::Descriptor).or_else(|| packet.fabric());
            Received::Packet(packet, memory)
        }
        Err(e) => Received::Garbage(format!("{} bytes: {e}", got.bytes)),
    }
}

/// Whether the other end runs under our own user.
pub(super) fn peer_is_same_user(socket: &OwnedFd) -> bool {
    private::peer_user(socket) == Some(private::user())
}

/// A descriptor that becomes readable when the process at the other end has ended, where the kernel gives one.
///
/// It sees what the socket does not: a dead rank whose own child still holds the connection open.
pub(super) fn peer_process(socket: &OwnedFd) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut pidfd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let fd = socket.as_raw_fd();
    // SAFETY: `pidfd` is an int of the length given, and the descriptor is open.
    let answer = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut pidfd).cast(), &raw mut len)
    };
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    (answer == 0 && pidfd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(pidfd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Scope;

    /// On a kernel that looks for packets before it looks for the end, a few of these rounds hit the gap.
    #[test]
    fn a_goodbye_right_before_the_end_is_heard() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (to_leaver, leavers) = std::sync::mpsc::channel::<OwnedFd>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for socket in leavers {
                    say_goodbye(&socket, &Gone::lost("so long"));
                }
            });
            for round in 0..100_000 {
                let flags = SocketFlags::CLOEXEC;
                let (ours, theirs) =
                    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
                to_leaver.send(theirs).unwrap();
                let first = loop {
                    match receive(&ours) {
                        Received::Nothing => {}
                        received => break received,
                    }
                };
                assert!(matches!(first, Received::Packet(Packet::Bye(_), _)), "round {round}");
            }
            drop(to_leaver);
        });
    }

    #[test]
    fn packets_without_lists_are_told_by_their_first_byte() {
        let is_short = |packet: &Packet| Packet::is_short(&encode(packet, PACKET).unwrap());
        assert!(is_short(&Packet::Hello { token: 1, rank: 2 }));
        assert!(is_short(&Packet::Welcome { token: 1, rank: 2 }));
        assert!(is_short(&Packet::Bye(Gone::lost("so long"))));
        let subject = Subject { scope: Scope::Group(7), number: 1 };
        let (phase, body, fabric) = (Phase::Proposal, vec![5], None);
        assert!(!is_short(&Packet::Message { subject, phase, body, fabric }));
        assert!(!is_short(&Packet::Taken { total: 1, window: 1 }) && !Packet::is_short(&[]));
    }
}
