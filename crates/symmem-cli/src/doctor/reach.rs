//! `symmem doctor --listen` and `--peer`: whether two nodes reach each other, and how fast. All times are taken by the one
//! that calls, so the clocks of the two need not agree.
//!
//! The caller sends commands: a character and a number. `p`: answer so many messages of eight bytes. `t`: take so many bytes, and
//! then say so. `g`: give so many bytes. Whoever says anything else, or nothing for a while, is sent away.

use std::io::{ErrorKind, Read, Write, stdout};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::sockopt;
use symmem::internals::host_identity;

use super::{Row, row};

/// What both ends say first.
const GREETING: &[u8; 16] = b"symmem doctor 1\n";
/// How long an end that says nothing is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long `--listen` waits for a caller, and how long one may take.
const LISTENING: Duration = Duration::from_secs(600);
const VISIT: Duration = Duration::from_secs(60);
/// Bytes of a message there and back.
const MESSAGE: usize = 8;
/// The most messages of one order, and how long the caller sends them.
const MESSAGES: u64 = 2000;
const PINGING: Duration = Duration::from_secs(1);
const PINGING_ITSELF: Duration = Duration::from_millis(100);
/// Bytes of one order at first, at most, and how long one should take.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 1 << 30;
const STREAMING: Duration = Duration::from_millis(500);
/// Bytes that are read and written at once.
const PIECE: usize = 256 << 10;

/// Waits for a caller, and answers until it is content.
pub(super) fn listen(port: u16) -> Result<ExitCode> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .with_context(|| format!("cannot listen at port {port}"))?;
    let port = listener.local_addr()?.port();
    say(&format!("waiting for: symmem doctor --peer ADDRESS-OF-THIS-NODE:{port}\n"))?;
    listener.set_nonblocking(true)?;
    let limit = Instant::now() + LISTENING;
    while Instant::now() < limit {
        match listener.accept() {
            Ok((stream, from)) => {
                stream.set_nonblocking(false)?;
                let from = from.ip().to_canonical();
                match serve(&stream) {
                    Ok(()) => {
                        say(&format!("{from} has tried the network to this node\n"))?;
                        return Ok(ExitCode::SUCCESS);
                    }
                    Err(error) => say(&format!("{from} was sent away: {error:#}\n"))?,
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error).context("cannot accept a caller"),
        }
    }
    bail!("nobody called within {LISTENING:?}")
}

fn say(text: &str) -> Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot print")
}

/// Follows the orders of one caller.
fn serve(mut stream: &TcpStream) -> Result<()> {
    prepare(stream)?;
    let mut greeting = [0; GREETING.len()];
    stream.read_exact(&mut greeting).context("no greeting")?;
    ensure!(greeting == *GREETING, "it is no symmem doctor of this version");
    stream.write_all(GREETING)?;
    let name = host_identity().unwrap_or_default();
    let mut about = [b' '; 64];
    about.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    stream.write_all(&about)?;
    let begin = Instant::now();
    let mut piece = vec![0; PIECE];
    loop {
        let mut order = [0; 9];
        if stream.read(order.get_mut(..1).unwrap_or_default())? == 0 {
            return Ok(());
        }
        stream.read_exact(order.get_mut(1..).unwrap_or_default())?;
        ensure!(begin.elapsed() < VISIT, "it takes longer than {VISIT:?}");
        let [what, number @ ..] = order;
        let number = u64::from_le_bytes(number);
        match what {
            b'p' if number <= MESSAGES => {
                for _ in 0..number {
                    let mut message = [0; MESSAGE];
                    spin(stream, |mut s| s.read(&mut message[..]), MESSAGE, begin)?;
                    stream.write_all(&message)?;
                }
            }
            b't' if number <= MOST => {
                take(stream, number, &mut piece, begin)?;
                stream.write_all(&[b'!'; MESSAGE])?;
            }
            b'g' if number <= MOST => give(stream, number, &piece, begin)?,
            _ => bail!("it gave an order that there is not"),
        }
    }
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(())
}

/// Reads a message of `len` bytes without sleeping, as a rank that waits does at first.
fn spin(
    stream: &TcpStream,
    mut read: impl FnMut(&TcpStream) -> std::io::Result<usize>,
    len: usize,
    begin: Instant,
) -> Result<()> {
    stream.set_nonblocking(true)?;
    let limit = Instant::now() + PATIENCE;
    let result = loop {
        match read(stream) {
            Ok(count) if count == len => break Ok(()),
            Ok(_) => break Err(anyhow::anyhow!("a message came in pieces, or not at all")),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if Instant::now() > limit || begin.elapsed() > VISIT {
                    break Err(anyhow::anyhow!("no message within {PATIENCE:?}"));
                }
                thread::yield_now(); // the other end may be on this core
            }
            Err(error) => break Err(error.into()),
        }
    };
    stream.set_nonblocking(false)?;
    result
}

fn take(mut stream: &TcpStream, bytes: u64, piece: &mut [u8], begin: Instant) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let most = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = stream.read(piece.get_mut(..most).unwrap_or_default()).map_err(silence)?;
        ensure!(count > 0, "the connection ended in the middle");
        ensure!(begin.elapsed() < VISIT, "it takes longer than {VISIT:?}");
        left -= count as u64;
    }
    Ok(())
}

fn give(mut stream: &TcpStream, bytes: u64, piece: &[u8], begin: Instant) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let most = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        stream.write_all(piece.get(..most).unwrap_or_default()).map_err(silence)?;
        ensure!(begin.elapsed() < VISIT, "it takes longer than {VISIT:?}");
        left -= most as u64;
    }
    Ok(())
}

/// Where small messages have passed, large packets are what is lost.
fn silence(error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => anyhow::anyhow!(
            "small messages pass and large ones do not: something on the way drops large packets; lower the MTU of the interface"
        ),
        _ => error.into(),
    }
}

/// What a caller found out.
struct Findings {
    local: SocketAddr,
    peer: SocketAddr,
    /// The identity of the other host.
    host: String,
    connected: Duration,
    /// Ascending.
    trips: Vec<Duration>,
    /// Bytes a second, there and back.
    there: f64,
    back: f64,
    mtu: Option<u32>,
    congestion: Option<String>,
}

/// Tries the network to a node that listens; one row for each finding.
pub(super) fn peer(name: &str) -> Result<Vec<Row>> {
    let addresses = name
        .to_socket_addrs()
        .with_context(|| format!("{name} is no host:port that is known here"))?;
    let mut last = None;
    for address in addresses {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => {
                return Ok(call(&stream, PINGING).with_context(|| address.to_string())?.rows());
            }
            Err(error) => last = Some((address, error)),
        }
    }
    let Some((address, error)) = last else { bail!("{name} has no address") };
    let why = match error.kind() {
        ErrorKind::ConnectionRefused => "nobody listens there: start symmem doctor --listen on that node".to_owned(),
        ErrorKind::TimedOut => {
            "no answer: a firewall drops the packets, or the node is down; open the port, and those of SYMMEM_PORTS".to_owned()
        }
        _ => error.to_string(),
    };
    bail!("cannot reach {address}: {why}")
}

/// The same over this machine's loopback.
pub(super) fn trial() -> Result<String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let address = listener.local_addr()?;
    let stream = TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect")?;
    let (accepted, _) = listener.accept().context("cannot accept")?;
    let server = thread::spawn(move || serve(&accepted));
    let found = call(&stream, PINGING_ITSELF)?;
    drop(stream);
    server.join().map_err(|_| anyhow::anyhow!("the other end failed"))??;
    Ok(format!("round trip {}, {}", time(found.median()), speed(found.there)))
}

fn call(mut stream: &TcpStream, pinging: Duration) -> Result<Findings> {
    let begin = Instant::now();
    prepare(stream)?;
    stream.write_all(GREETING)?;
    let mut answer = [0; GREETING.len() + 64];
    stream.read_exact(&mut answer).context("it does not answer as symmem doctor --listen does")?;
    let (greeting, host) = answer.split_at(GREETING.len());
    ensure!(greeting == GREETING, "it is no symmem doctor of this version");
    let connected = begin.elapsed();
    let trips = ping(stream, begin, pinging)?;
    let mut piece = vec![0; PIECE];
    let there = best(|bytes| {
        order(stream, b't', bytes)?;
        give(stream, bytes, &piece, begin)?;
        let mut done = [0; MESSAGE];
        stream.read_exact(&mut done).map_err(silence)
    })?;
    let back = best(|bytes| {
        order(stream, b'g', bytes)?;
        take(stream, bytes, &mut piece, begin)
    })?;
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let mtu = if peer.is_ipv4() { sockopt::ip_mtu(stream) } else { sockopt::ipv6_mtu(stream) };
    Ok(Findings {
        local,
        peer,
        host: String::from_utf8_lossy(host).trim().to_owned(),
        connected,
        trips,
        there,
        back,
        mtu: mtu.ok(),
        congestion: sockopt::tcp_congestion(stream).ok(),
    })
}

fn order(mut stream: &TcpStream, what: u8, number: u64) -> Result<()> {
    let mut order = vec![what];
    order.extend(number.to_le_bytes());
    Ok(stream.write_all(&order)?)
}

/// The times there and back, in ascending order.
fn ping(mut stream: &TcpStream, begin: Instant, pinging: Duration) -> Result<Vec<Duration>> {
    let mut trips = Vec::new();
    let limit = Instant::now() + pinging;
    while trips.len() < MESSAGES as usize && Instant::now() < limit {
        // A few at a time, so that a slow network is not tried for minutes.
        order(stream, b'p', 10)?;
        for _ in 0..10 {
            let mut message = (trips.len() as u64).to_le_bytes();
            let sent = Instant::now();
            stream.write_all(&message)?;
            spin(stream, |mut s| s.read(&mut message[..]), MESSAGE, begin)?;
            trips.push(sent.elapsed());
            ensure!(
                message == (trips.len() as u64 - 1).to_le_bytes(),
                "a message came back changed"
            );
        }
    }
    trips.sort_unstable();
    Ok(trips)
}

/// The bytes a second of as many as take a while.
fn best(mut move_bytes: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let mut bytes = LEAST;
    loop {
        let begin = Instant::now();
        move_bytes(bytes)?;
        let took = begin.elapsed();
        if took >= STREAMING / 4 || bytes >= MOST {
            return Ok(bytes as f64 / took.as_secs_f64());
        }
        bytes = (bytes * 4).min(MOST);
    }
}

impl Findings {
    fn median(&self) -> Duration {
        self.trips.get(self.trips.len() / 2).copied().unwrap_or_default()
    }

    fn rows(&self) -> Vec<Row> {
        let at = |hundredths: usize| {
            time(self.trips.get(self.trips.len() * hundredths / 100).copied().unwrap_or_default())
        };
        let [local, peer] = [self.local, self.peer].map(|address| address.ip().to_canonical());
        let own = host_identity().unwrap_or_default();
        let mut rows = vec![
            row(
                "reach",
                "yes",
                format!("{local} to {peer}, greeted after {}", time(self.connected)),
            ),
            row(
                "round trip",
                &time(self.median()),
                format!(
                    "median of {} messages of {MESSAGE} bytes, both ends spinning; 10 % up to {}, 99 % up to {}",
                    self.trips.len(),
                    at(10),
                    at(99)
                ),
            ),
            row("there", &speed(self.there), "bytes a second to that node, one connection"),
            row("back", &speed(self.back), "the same from there"),
        ];
        let mtu = self.mtu.map_or_else(|| "unknown".to_owned(), |mtu| mtu.to_string());
        rows.push(row(
            "MTU",
            &mtu,
            "bytes of a packet on the way there, as far as the kernel knows",
        ));
        if let Some(name) = &self.congestion {
            let slow = if name == "bbr" {
                "slow for bursts of small messages; see symmem doctor"
            } else {
                "of this connection"
            };
            rows.push(row("congestion control", name, slow));
        }
        if own == self.host {
            let details = "both nodes have the same boot id or SYMMEM_HOST: as ranks of one host they would look for shared \
                           memory; give each a SYMMEM_HOST of its own";
            rows.push(row("host", "the same", details));
        } else {
            rows.push(row("host", "another", format!("{} there, {own} here", self.host)));
        }
        rows
    }
}

fn time(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    if us < 1000.0 { format!("{us:.1} µs") } else { format!("{:.2} ms", us / 1000.0) }
}

fn speed(bytes: f64) -> String {
    if bytes < 1e9 {
        format!("{:.0} MB/s", bytes / 1e6)
    } else {
        format!("{:.2} GB/s", bytes / 1e9)
    }
}
