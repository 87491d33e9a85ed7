//! What bare sockets take for the same bytes: one TCP connection between rank 0 and the first rank of the second host, on
//! which both spin.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::board::Board;
use super::measure::Case;

/// How the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From rank 0 and back.
    RoundTrip,
    /// Both ways at once.
    Exchange,
    /// From rank 0.
    Stream,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::RoundTrip => "round-trip",
            Self::Exchange => "exchange",
            Self::Stream => "stream",
        }
    }

    /// That of this name.
    pub(super) fn of(name: &str) -> Self {
        match name {
            "round-trip" => Self::RoundTrip,
            "exchange" => Self::Exchange,
            _ => Self::Stream,
        }
    }
}

/// How long a connection may take, and one call.
const PATIENCE: Duration = Duration::from_secs(30);

/// One rank's part of moving bytes; most ranks have none.
pub(super) struct Sockets<'a> {
    board: &'a Board<'a>,
    way: Way,
    end: Option<End>,
    right: bool,
}

struct End {
    stream: TcpStream,
    is_first: bool,
    out: Vec<u8>,
    into: Vec<u8>,
    count: u8,
}

impl<'a> Sockets<'a> {
    /// Connects rank 0 and rank `peer`; to be called by all ranks.
    pub(super) fn new(board: &'a Board<'a>, peer: usize, way: Way, bytes: usize) -> Result<Self> {
        let first = match std::env::var("MASTER_ADDR").ok().and_then(|text| text.parse().ok()) {
            Some(address) => address,
            None => Ipv4Addr::LOCALHOST,
        };
        let listener = if board.rank() == 0 { Some(TcpListener::bind((first, 0))?) } else { None };
        let port = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        let port = board.agree(port.map_or(0, |address| address.port().into())) as u16;
        let stream = match &listener {
            Some(listener) => Some(accept(listener)?),
            None if board.rank() == peer => {
                let to = SocketAddr::from((first, port));
                let stream = TcpStream::connect_timeout(&to, PATIENCE);
                Some(stream.context("cannot connect a bare socket")?)
            }
            None => None,
        };
        let is_first = board.rank() == 0;
        let end = |stream: TcpStream| -> Result<End> {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            Ok(End { stream, is_first, out: vec![0; bytes], into: vec![0; bytes], count: 0 })
        };
        Ok(Self { board, way, end: stream.map(end).transpose()?, right: true })
    }
}

fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let limit = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < limit => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error).context("nobody connects a bare socket"),
        }
    }
}

impl End {
    /// Sends and receives as much as is asked for, whichever is possible.
    fn transfer(&mut self, send: bool, receive: bool, patient: bool) -> Result<()> {
        let mut sent = if send { 0 } else { self.out.len() };
        let mut got = if receive { 0 } else { self.into.len() };
        let mut turns = 0_u32;
        let begin = Instant::now();
        while sent < self.out.len() || got < self.into.len() {
            let mut moved = false;
            if sent < self.out.len()
                && let Some(n) =
                    passed(self.stream.write(self.out.get(sent..).unwrap_or_default()))?
            {
                (sent, moved) = (sent + n, true);
            }
            if got < self.into.len()
                && let Some(n) =
                    passed(self.stream.read(self.into.get_mut(got..).unwrap_or_default()))?
            {
                ensure!(n > 0, "the other end of a bare socket is gone");
                (got, moved) = (got + n, true);
            }
            if !moved {
                turns = turns.wrapping_add(1);
                if turns.is_multiple_of(1 << 16) && begin.elapsed() > PATIENCE {
                    bail!("nothing moves on a bare socket");
                }
                if patient { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        }
        Ok(())
    }
}

fn passed(result: std::io::Result<usize>) -> Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error).context("a bare socket fails"),
    }
}

impl Case for Sockets<'_> {
    /// Each sample has bytes of its own.
    fn prepare(&mut self) -> Result<()> {
        if let Some(end) = &mut self.end {
            end.count = end.count.wrapping_add(1);
            let mark = if end.is_first { end.count } else { !end.count };
            end.out.fill(mark);
        }
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        let patient = self.board.is_oversubscribed();
        let Some(end) = &mut self.end else { return Ok(()) };
        match (self.way, end.is_first) {
            (Way::Exchange, _) => end.transfer(true, true, patient),
            (Way::Stream, first) => end.transfer(first, !first, patient),
            (Way::RoundTrip, first) => {
                end.transfer(first, !first, patient)?;
                end.transfer(!first, first, patient)
            }
        }
    }

    fn check(&mut self) -> Result<bool> {
        if let Some(end) = self.end.as_ref().filter(|end| self.way != Way::Stream || !end.is_first)
        {
            let expected = if end.is_first { !end.count } else { end.count };
            self.right &= end.into.iter().fold(true, |right, byte| right & (*byte == expected));
        }
        Ok(self.right)
    }
}
