//! Packets over TCP: between ranks of different hosts.
//!
//! | what | how |
//! |---|---|
//! | a packet | one frame, encrypted with the connection's keys if the job has a secret |
//! | flow control | the receiver acknowledges what it has received. Without that, a stopped process whose buffer is full would look like a host that is gone |
//! | a host that is gone | its kernel no longer answers: [`GONE`] |
//! | the last message | the sender waits for the peer to read it before it closes the connection: [`linger`] |

#[cfg(test)]
mod group_tests;
mod sending;

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvAncillaryBuffer, RecvFlags, Shutdown, sockopt};

use super::Gone;
use super::frames::{self, Frames};
use super::group_messages::{GroupMessages, NoGroups};
use super::outbound::{Outbound, WIDEST, WINDOW, cost_of};
use super::secret::Keys;
use super::socket::{self, Packet, Received};
use crate::error::Result;
use crate::sync::Deadline;
use crate::sync::Ordering;
use crate::sync::atomic::{AtomicBool, AtomicU64};

/// A host whose kernel has not answered for this long is gone. Kernels answer for stopped processes too.
const GONE: Duration = Duration::from_secs(5);
/// The first keep-alive probe on a silent connection comes after `IDLE`, the next ones after `AGAIN` each.
const IDLE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_secs(1);
const ASKED: u32 = 3;
/// The buffer of a connection that is asked for, in each direction. Kernels may grant less; all have room for `WINDOW`.
const BUFFER: usize = 2 << 20;
/// What encryption adds to a packet.
pub(super) const SEAL: usize = 16;
/// The longest frame before the other end is authenticated.
pub(super) const SHORT: usize = 256;
/// The longest packet, and the longest message to a group that is encrypted: Noise has frames of up to 64 KiB.
pub(super) const LONGEST: usize = 60 << 10;
/// The longest message to a group that is not. A sender whose window is the smallest must have room for it as long as less than half of
/// that is not acknowledged.
pub(super) const LONGEST_OPEN: usize = 120 << 10;
const _: () = assert!(cost_of(LONGEST_OPEN) <= WINDOW / 2 && LONGEST + SEAL <= LONGEST_OPEN);
/// From so many bytes on, the rest of a frame is worth receiving elsewhere.
const WORTH_DIVERTING: usize = 4 << 10;
/// How many sixteenths of the window are received before the acknowledgement is sent alone, and before it goes with other messages.
const ALONE: u64 = 8;
const ALONG: u64 = 1;
/// How long a leaving rank waits for all its peers together to read its goodbye.
const LINGER: Duration = Duration::from_millis(200);

/// What must be set before a socket listens or connects.
pub(super) fn prepare(socket: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_socket_recv_buffer_size(socket, BUFFER)?;
    sockopt::set_socket_send_buffer_size(socket, BUFFER)
}

/// One connection to a rank of another host, in use by several threads.
pub(super) struct Stream {
    socket: OwnedFd,
    /// The keys of the packets, once both ends have proved that they know the job's secret.
    keys: OnceLock<Keys>,
    inbound: Mutex<Inbound>,
    outbound: Mutex<Outbound>,
    /// Something is held back. Read without the lock.
    has_held: AtomicBool,
    /// Notified when the peer has acknowledged something, or never will.
    room: Condvar,
    /// How much the peer may have under way to us.
    window: u64,
    /// How much was received, which is changed under the lock of `inbound`, and how much of that was acknowledged, which is changed
    /// under that of `outbound`.
    taken: AtomicU64,
    told: AtomicU64,
}

struct Inbound {
    frames: Frames,
    /// Whether the other end is authenticated as a rank of this job.
    is_trusted: bool,
    /// How many packets were decrypted.
    opened: u64,
}

/// What a packet of `len` bytes counts for.
fn cost(packet: &Packet, len: usize) -> u64 {
    match packet {
        Packet::Message { .. } => cost_of(len),
        _ => 0,
    }
}

/// The first byte of messages to a group. No packet begins with it.
const TO_GROUP: u8 = 0xff;

/// Bytes of what messages to a group begin with.
const HEAD: usize = 17;
/// Room for that in a frame.
const ROOM_FOR_HEAD: usize = 64;
/// The most bytes of a message to a group that is not encrypted.
#[cfg(test)]
pub(crate) const MOST: usize = LONGEST_OPEN - ROOM_FOR_HEAD;

fn head(group: u128) -> [u8; HEAD] {
    let mut head = [TO_GROUP; HEAD];
    head[1..].copy_from_slice(&group.to_le_bytes());
    head
}

fn read_head(frame: &[u8]) -> Option<(u128, &[u8])> {
    let (group, bytes) = frame.strip_prefix(&[TO_GROUP])?.split_first_chunk()?;
    Some((u128::from_le_bytes(*group), bytes))
}

/// A frame that has come.
enum Came<'f> {
    Here(&'f [u8]),
    /// Its end elsewhere: the length of all of it.
    Elsewhere(usize),
}

/// Receives what there is, in both parts one after the other, without waiting.
fn receive_bytes(
    socket: &OwnedFd,
    [first, mut second]: [IoSliceMut<'_>; 2],
) -> Result<usize, Errno> {
    if first.is_empty() {
        return Ok(net::recv(socket, &mut *second, RecvFlags::DONTWAIT)?.1);
    }
    let mut parts = [first, second];
    let mut none = RecvAncillaryBuffer::default();
    Ok(net::recvmsg(socket, &mut parts, &mut none, RecvFlags::DONTWAIT)?.bytes)
}

impl Stream {
    /// A connection whose other end is not authenticated.
    pub(super) fn new(socket: OwnedFd) -> Result<Self, Errno> {
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, IDLE)?;
        sockopt::set_tcp_keepintvl(&socket, AGAIN)?;
        sockopt::set_tcp_keepcnt(&socket, ASKED)?;
        sockopt::set_tcp_user_timeout(&socket, GONE.as_millis() as u32)?;
        let frames = Frames::new(SHORT);
        let inbound = Inbound { frames, is_trusted: false, opened: 0 };
        let (inbound, outbound) = (Mutex::new(inbound), Mutex::new(Outbound::new()));
        // What lies in the kernel counts for more than its bytes.
        let window = (sockopt::socket_recv_buffer_size(&socket)? as u64 / 4).clamp(WINDOW, WIDEST);
        let keys = OnceLock::new();
        let has_held = AtomicBool::new(false);
        let (room, taken, told) = (Condvar::new(), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { socket, keys, inbound, outbound, has_held, room, window, taken, told })
    }

    /// The other end is authenticated as a rank of this job: it may send long frames.
    pub(super) fn trust(&self) {
        let mut inbound = self.inbound();
        inbound.frames.allow(LONGEST_OPEN);
        inbound.is_trusted = true;
    }

    /// From here on, nothing is received into memory that was lent: see [`Landing::lent`](super::landing::Landing::lent).
    pub(super) fn end_loan(&self) {
        self.inbound().frames.end_loan();
    }

    /// The most bytes of a message to a group, once the other end is authenticated.
    pub(super) fn most(&self) -> usize {
        let longest = if self.keys.get().is_some() { LONGEST } else { LONGEST_OPEN };
        longest - ROOM_FOR_HEAD
    }

    /// How much the peer may have under way to us.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// From here on, packets are encrypted.
    pub(super) fn seal_with(&self, keys: Keys) {
        let _ = self.keys.set(keys); // once
    }

    // Nothing is done under these locks that could leave them half changed.
    fn inbound(&self) -> MutexGuard<'_, Inbound> {
        self.inbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outbound(&self) -> MutexGuard<'_, Outbound> {
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an unencrypted frame of the handshake. False if the connection does not take it.
    pub(super) fn send_open(&self, frame: &[u8]) -> bool {
        let mut out = self.outbound();
        frames::append(&mut out.rest, &[frame]);
        self.flush(&mut out);
        out.rest.is_empty() && !out.is_over
    }

    /// Receives one unencrypted frame if there is one, without waiting.
    pub(super) fn receive_open(&self) -> Result<Option<Vec<u8>>, Received> {
        let mut inbound = self.inbound();
        Ok(match self.next_frame(&mut inbound.frames, None)? {
            Some(Came::Here(frame)) => Some(frame.to_vec()),
            Some(Came::Elsewhere(_)) | None => None,
        })
    }

    /// Receives one packet if there is one, without waiting.
    pub(super) fn receive(&self) -> Received {
        self.receive_and(&NoGroups)
    }

    /// As `receive`. Delivers messages to groups that come before the packet.
    pub(super) fn receive_and(&self, groups: &dyn GroupMessages) -> Received {
        let mut inbound = self.inbound();
        let Inbound { frames, is_trusted, opened } = &mut *inbound;
        loop {
            // What is encrypted has to be decrypted first.
            let diverts = *is_trusted && self.keys.get().is_none();
            let frame = match self.next_frame(frames, diverts.then_some(groups)) {
                Ok(Some(Came::Here(frame))) => frame,
                Ok(Some(Came::Elsewhere(len))) => {
                    self.note_received(cost_of(len.saturating_sub(HEAD)));
                    continue;
                }
                Ok(None) => return Received::Nothing,
                Err(ended) => return ended,
            };
            let unsealed;
            let frame = match self.keys.get() {
                None => frame,
                Some(keys) => {
                    let Some(packet) = keys.open(*opened, frame) else {
                        return Received::Garbage("not sealed by it".to_owned());
                    };
                    *opened += 1;
                    unsealed = packet;
                    &unsealed
                }
            };
            // Other packets contain lists, and reading one allocates its announced length.
            if !*is_trusted && !Packet::is_short(frame) {
                return Received::Garbage("no greeting".to_owned());
            }
            if let Some((group, bytes)) = read_head(frame) {
                let cost = cost_of(bytes.len());
                if let Err(why) = groups.deliver(group, bytes) {
                    return Received::Garbage(why);
                }
                self.note_received(cost);
                continue;
            }
            match postcard::from_bytes::<Packet>(frame) {
                Ok(Packet::Taken { total, window }) if self.note_taken(total, window) => {}
                Ok(Packet::Taken { total, window }) => {
                    let what = format!("{total} bytes said to be taken in, and {window} to fit");
                    return Received::Garbage(what);
                }
                Ok(packet) => {
                    self.note_received(cost(&packet, frame.len()));
                    let memory = packet.fabric();
                    return Received::Packet(packet, memory);
                }
                Err(e) => return Received::Garbage(format!("{} bytes: {e}", frame.len())),
            }
        }
    }

    /// The next frame. The rest of one that has begun is received where `groups` say.
    fn next_frame<'f>(
        &self,
        frames: &'f mut Frames,
        groups: Option<&dyn GroupMessages>,
    ) -> Result<Option<Came<'f>>, Received> {
        while !frames.has_next() {
            if let Some(len) = frames.take_diverted() {
                return Ok(Some(Came::Elsewhere(len)));
            }
            if frames.take_is_drained() {
                return Ok(None); // to ask at once whether more has come would take as long as a message is under way
            }
            if let Some((groups, (begun, rest))) = groups.zip(frames.begun()) {
                let begun = read_head(begun).filter(|_| rest >= WORTH_DIVERTING);
                let place = begun.and_then(|(group, bytes)| groups.land(group, bytes, rest));
                frames.divert(place);
            }
            match receive_bytes(&self.socket, frames.space()) {
                Ok(0) => return Err(Received::End),
                Ok(len) => frames.fill(len),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                    return Err(Received::Silence);
                }
                Err(_) => return Err(Received::End),
            }
        }
        let frame = frames.next().transpose().map_err(Received::Garbage)?;
        Ok(frame.map(Came::Here))
    }

    /// Notes what the peer acknowledges, and how much it has room for. False if it cannot have received so much, or have so much room.
    fn note_taken(&self, total: u64, window: u64) -> bool {
        let mut out = self.outbound();
        let makes_sense =
            (out.taken..=out.sent).contains(&total) && (WINDOW..=WIDEST).contains(&window);
        if makes_sense {
            (out.taken, out.window) = (total, window);
            self.flush(&mut out);
            self.send_later(&mut out);
            if out.waiting > 0 {
                self.room.notify_all();
            }
        }
        makes_sense
    }

    /// Something was received that counts for so much. If nothing is sent that takes the acknowledgement along, it is sent after half
    /// the window: before the peer has to wait, for no message counts for more than the other half.
    fn note_received(&self, cost: u64) {
        let taken = self.taken.load(Ordering::Relaxed) + cost; // under the lock of `inbound`
        self.taken.store(taken, Ordering::Relaxed);
        if cost > 0 && self.is_due(taken, self.told.load(Ordering::Relaxed), ALONE) {
            let mut out = self.outbound();
            self.tell_taken(&mut out, ALONE);
            self.flush(&mut out);
        }
    }

    /// Whether as many sixteenths of what the peer may have under way are not acknowledged.
    fn is_due(&self, taken: u64, told: u64, sixteenths: u64) -> bool {
        // The first word tells of the window.
        let window = if told == 0 { WINDOW } else { self.window };
        taken - told >= window / 16 * sixteenths
    }

    /// Acknowledges what was received, if so many sixteenths of the window are due. There is always room for that: it is short, and the
    /// peer has sent at most one window since the last acknowledgement.
    fn tell_taken(&self, out: &mut Outbound, sixteenths: u64) {
        let (taken, told) = (self.taken.load(Ordering::Relaxed), self.told.load(Ordering::Relaxed));
        if !self.is_due(taken, told, sixteenths) {
            return;
        }
        self.told.store(taken, Ordering::Relaxed);
        let packet = Packet::Taken { total: taken, window: self.window };
        if let Ok(bytes) = socket::encode(&packet, LONGEST) {
            self.append(out, &[&bytes]);
        }
    }

    /// Sends the goodbye. A peer that cannot receive it notices the closed connection instead.
    pub(super) fn say_goodbye(&self, gone: &Gone) {
        let _ = self.send(&Packet::Bye(gone.clone()), Deadline::after(socket::GOODBYE));
    }

    /// Shuts the connection down, also for other processes that hold it.
    pub(super) fn end(&self) {
        let _ = net::shutdown(&self.socket, Shutdown::Both);
        self.outbound().is_over = true;
        self.room.notify_all();
    }

    /// Discards what has arrived. Returns whether the other end has closed.
    fn is_drained(&self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return e != Errno::AGAIN,
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits briefly until the peers have closed their ends. Closing a connection with unread data resets it, and the reset could
/// overtake the last message.
pub(super) fn linger<'a>(streams: impl Iterator<Item = &'a Stream>) {
    let mut open: Vec<&Stream> = streams.collect();
    for stream in &open {
        let _ = net::shutdown(&stream.socket, Shutdown::Write);
    }
    let until = Deadline::after(LINGER);
    loop {
        open.retain(|stream| !stream.is_drained());
        if open.is_empty() || until.expired() {
            return;
        }
        let mut fds: Vec<_> = open.iter().map(|s| PollFd::new(*s, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&socket::timespec(until.nap(LINGER))));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::super::outbound::OVERHEAD;
    use super::*;
    use crate::error::Error;
    use crate::mesh::{Phase, Scope, Subject};

    /// Two ends of a connection that trust each other.
    pub(super) fn pair() -> (Stream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let two = listener.accept().unwrap().0;
        let ends = [one, two].map(|end| {
            let stream = Stream::new(end.into()).unwrap();
            stream.trust();
            stream
        });
        ends.into()
    }

    fn message(number: u64, len: usize) -> Packet {
        let subject = Subject { scope: Scope::Group(7), number };
        Packet::Message { subject, phase: Phase::Proposal, body: vec![5; len], fabric: None }
    }

    pub(super) fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(50))
    }

    /// What has come, waiting for it if nothing has.
    fn next(stream: &Stream) -> Received {
        loop {
            match stream.receive() {
                Received::Nothing => {
                    let fd = PollFd::new(stream, PollFlags::IN);
                    assert_ne!(poll(&mut [fd], Some(&socket::timespec(10 * GONE))), Ok(0));
                }
                other => return other,
            }
        }
    }

    #[test]
    fn the_largest_message_comes_whole_and_a_larger_one_is_refused() {
        let (one, two) = pair();
        let most = LONGEST - 32;
        one.send(&message(1, most), soon()).unwrap();
        let came = next(&two);
        assert!(
            matches!(came, Received::Packet(Packet::Message { body, .. }, _) if body.len() == most)
        );
        assert!(matches!(one.send(&message(2, LONGEST), soon()), Err(Error::Usage { .. })));
    }

    /// However long a peer is stopped, the kernel has room for all that is sent to it: it never sees a full connection, which
    /// it would give up as a dead one.
    #[test]
    fn a_peer_that_takes_nothing_in_is_sent_no_more_than_its_window() {
        let (one, two) = pair();
        for len in [0, 100, 3000, LONGEST - 100] {
            let mut sent = 0;
            let e = loop {
                match one.send(&message(sent, len), soon()) {
                    Ok(()) => sent += 1,
                    Err(e) => break e,
                }
            };
            assert!(matches!(e, Error::Timeout { .. }), "{e}");
            let window = one.outbound().window;
            assert!(sent > 0 && sent * (len as u64 + OVERHEAD) <= window, "{sent} of {len}");
            assert!(one.outbound().rest.is_empty(), "the kernel has no room");
            for number in 0..sent {
                let came = next(&two);
                assert!(matches!(came, Received::Packet(Packet::Message { subject, .. }, _)
                    if subject.number == number));
            }
            assert!(matches!(two.receive(), Received::Nothing));
            // Both count the same again, up to what is not worth telling.
            assert!(matches!(one.receive(), Received::Nothing));
            let mut out = one.outbound();
            assert!(out.sent - out.taken < out.window / 4 * 3);
            out.taken = out.sent;
            out.taken = two.taken.load(Ordering::Relaxed);
            two.told.store(out.taken, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_sender_goes_on_when_its_peer_takes_something_in() {
        let (one, two) = pair();
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                for number in 0..1000 {
                    one.send(&message(number, 500), Deadline::NEVER).unwrap();
                }
            });
            // Takes note of what the peer has taken in.
            let watcher = scope.spawn(|| while !matches!(one.receive(), Received::End) {});
            for number in 0..1000 {
                assert!(matches!(next(&two), Received::Packet(Packet::Message { subject, .. }, _)
                    if subject.number == number));
            }
            sender.join().unwrap();
            two.end();
            watcher.join().unwrap();
        });
    }

    #[test]
    fn a_peer_that_says_to_have_taken_in_what_was_never_sent_is_no_peer() {
        for (total, window) in [(1, WINDOW), (0, WINDOW - 1), (0, WIDEST + 1)] {
            let (one, two) = pair();
            two.send(&Packet::Taken { total, window }, soon()).unwrap();
            assert!(matches!(next(&one), Received::Garbage(what) if what.contains("taken in")));
        }
    }

    #[test]
    fn a_goodbye_is_heard_from_one_who_did_not_read_everything() {
        let (one, two) = pair();
        one.send(&message(1, 1000), soon()).unwrap();
        two.say_goodbye(&Gone { left: true, how: "so long".into(), because_of: None });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                linger(std::iter::once(&two));
                drop(two.socket.try_clone());
            });
            let heard = next(&one);
            assert!(
                matches!(heard, Received::Packet(Packet::Bye(gone), _) if gone.how == "so long")
            );
            one.end();
        });
    }

    #[test]
    fn leaving_waits_only_a_moment_for_a_peer_that_does_not_close() {
        let (one, _two) = pair();
        let begin = std::time::Instant::now();
        linger(std::iter::once(&one));
        assert!(begin.elapsed() >= LINGER); // not sooner, and not for ever
    }

    #[test]
    fn a_stranger_may_say_little_at_a_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Stream::new(listener.accept().unwrap().0.into()).unwrap();
        std::io::Write::write_all(&mut other, &(SHORT as u32 + 1).to_le_bytes()).unwrap();
        let refused = loop {
            match stream.receive_open() {
                Ok(None) => std::thread::yield_now(),
                other => break other,
            }
        };
        assert!(matches!(refused, Err(Received::Garbage(what)) if what.contains("257")));
    }

    #[test]
    fn a_stranger_that_sends_a_message_is_refused_unread() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stranger = Stream::new(other.into()).unwrap();
        let stream = Stream::new(listener.accept().unwrap().0.into()).unwrap();
        stranger.send(&message(1, 10), soon()).unwrap();
        assert!(matches!(next(&stream), Received::Garbage(what) if what == "no greeting"));
    }

    /// Its kernel answers for it, and its window is never closed.
    #[test]
    fn a_peer_that_takes_nothing_in_for_longer_than_a_host_may_be_silent_is_there() {
        let (one, two) = pair();
        let mut sent = 0;
        while one.send(&message(sent, 200), soon()).is_ok() {
            sent += 1;
        }
        std::thread::sleep(GONE + Duration::from_secs(2));
        assert!(matches!(one.receive(), Received::Nothing));
        for number in 0..sent {
            let came = next(&two);
            assert!(matches!(came, Received::Packet(Packet::Message { subject, .. }, _)
                if subject.number == number));
        }
        one.send(&message(sent, 200), soon()).unwrap_err();
        assert!(matches!(one.receive(), Received::Nothing));
        one.send(&message(sent, 200), soon()).unwrap();
    }
}
