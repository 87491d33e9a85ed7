//! The suite over UCX, and what needs two processes. Where there is no UCX, the tests say so and do nothing.

use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use symmem_sys::ucx::fake::Network;
use symmem_sys::ucx::{Engine, Events, Posted, Settings, Ucx, load};

use super::peer::{Peer, settings};
use super::recorder::{LONG, Recorder, Side, Start, drive, pattern};
use super::suite;

fn ucx() -> Option<Arc<Ucx>> {
    static SAID: OnceLock<Option<Arc<Ucx>>> = OnceLock::new();
    let said = SAID.get_or_init(|| match load() {
        Ok(ucx) => {
            println!("UCX {} in {:?}", ucx.version(), ucx.path());
            Some(ucx)
        }
        Err(missing) => {
            assert!(std::env::var_os("SYMMEM_UCX").is_none(), "{missing}");
            println!("skipped: {missing}");
            None
        }
    });
    said.clone()
}

type Make<'a> = &'a (dyn Fn(Arc<dyn Events>) -> Arc<dyn Engine> + Sync);

fn start<'a>(ucx: &Ucx, make: Make<'a>) -> Start<'a> {
    // Where a rendezvous that fails would end the process, the engine does without.
    let minor = ucx.version().minor;
    Start { make, rendezvous: !(15..22).contains(&minor) }
}

fn over_loopback(check: fn(Start<'_>)) {
    let Some(ucx) = ucx() else { return };
    check(start(&ucx, &|events| Arc::new(ucx.start(&settings(), events).unwrap())));
}

macro_rules! suite {
    ($($check:ident)*) => {$(
        #[test]
        fn $check() {
            over_loopback(suite::$check);
        }
    )*};
}

suite! {
    bodies_of_all_sizes_arrive_intact
    messages_go_both_ways_at_once
    several_threads_use_one_engine
    closing_ends_what_is_pending
    a_message_that_is_refused_is_a_failure_of_its_sender
    what_is_no_address_is_refused
    calls_that_make_no_sense_are_refused
    the_descriptor_wakes_a_sleeper
    bodies_go_straight_to_their_places
    a_body_belongs_to_the_engine_until_it_is_sent
    events_cannot_call_and_may_panic
    an_engine_ends_once_and_with_all_that_is_pending
}

fn side(ucx: &Arc<Ucx>) -> Side {
    Side::new(start(ucx, &|events| Arc::new(ucx.start(&settings(), events).unwrap())))
}

#[test]
fn two_processes_exchange_messages() {
    let Some(ucx) = ucx() else { return };
    let side = side(&ucx);
    let peer = Peer::start(side.engine.address());
    let to = side.engine.connect(&peer.address).unwrap();
    for (number, bytes) in (0..).zip(suite::SIZES) {
        side.post(to, b"there and back", pattern(number, bytes), number).unwrap();
        side.until("it is back", |log| log.messages.len() == 1);
        let (header, body) = side.events.log().messages.pop().unwrap();
        assert_eq!(header, b"there and back");
        assert!(body == pattern(number, bytes), "{bytes} bytes");
    }
    const ROUNDS: u32 = 100;
    let mut best = Duration::MAX;
    for _ in 0..100 {
        let begun = Instant::now();
        for round in 0..ROUNDS {
            side.post(to, &round.to_le_bytes(), vec![0; 8], 0).unwrap();
            while side.events.log().messages.pop().is_none() {
                side.engine.progress().unwrap();
                assert!(begun.elapsed() < LONG);
            }
        }
        best = best.min(begun.elapsed() / ROUNDS);
    }
    println!("UCX {}: a round trip of 8 bytes takes {best:?}", ucx.version());
}

#[test]
fn a_peer_that_is_killed_ends_what_is_pending() {
    let Some(ucx) = ucx() else { return };
    let side = side(&ucx);
    for size in [64, 60_000, 1 << 20, 8 << 20] {
        let mut peer = Peer::start(side.engine.address());
        let to = side.engine.connect(&peer.address).unwrap();
        side.post(to, b"first", vec![], 0).unwrap();
        side.until("the peer is there", |log| !log.messages.is_empty());
        side.until("nothing is pending", |_| side.engine.pending() == 0);
        side.events.log().sent.clear();
        let mut pending = 0;
        let begun = Instant::now();
        let mut killed = None;
        let failure = loop {
            match side.post(to, b"stream", vec![1; size], 1) {
                Ok(Posted::Pending) => pending += 1,
                Ok(Posted::Sent) => {}
                Err(failure) => break failure,
            }
            if killed.is_none() && begun.elapsed() > Duration::from_millis(30) {
                peer.kill();
                killed = Some(Instant::now());
            }
            // No more memory than that.
            while side.engine.pending() > 16 && begun.elapsed() < LONG {
                if killed.is_none() && begun.elapsed() > Duration::from_millis(30) {
                    break;
                }
                side.engine.progress().unwrap();
            }
            side.engine.progress().unwrap();
            assert!(begun.elapsed() < LONG, "nobody has noticed");
        };
        assert!(failure.is_disconnected(), "{failure}");
        let noticed = killed.unwrap().elapsed();
        side.until("all has ended", |log| log.sent.len() == pending);
        let mut log = side.events.log();
        assert_eq!(log.failed.pop().unwrap().0, to);
        let failures = log.sent.iter().filter(|(_, result)| result.is_err()).count();
        println!("{size} bytes: noticed after {noticed:?}, {failures} of {pending} failed");
        log.messages.clear();
        log.sent.clear();
        drop(log);
        side.until("nothing is pending", |_| side.engine.pending() == 0);
    }
}

#[test]
fn a_peer_that_was_never_there_is_found_out() {
    let Some(ucx) = ucx() else { return };
    let side = side(&ucx);
    let mut peer = Peer::start(side.engine.address());
    peer.kill();
    let address = peer.address.clone();
    drop(peer);
    // Depending on the version it is this call or a later event that says so.
    let Ok(to) = side.engine.connect(&address) else { return };
    if let Ok(Posted::Pending) = side.post(to, b"anybody?", vec![1; 100], 1) {
        side.until("it has ended", |log| log.sent.len() == 1);
        assert!(side.events.log().sent.pop().unwrap().1.is_err());
    }
    side.until("the endpoint has failed", |log| log.failed.len() == 1);
}

#[test]
fn a_peer_with_another_version_is_refused_by_name() {
    let Some(ucx) = ucx() else { return };
    // The fake engine says that it is the oldest version.
    let other = Network::new(1).start(Arc::new(Recorder::default())).unwrap();
    if ucx.version().understands(other.version()) {
        return;
    }
    let failure = side(&ucx).engine.connect(other.address()).unwrap_err();
    let expected = format!("the peer has UCX 1.12, this process has {}", ucx.version());
    assert!(failure.to_string().contains(&expected), "{failure}");
}

const LOADING: &str = "SYMMEM_TEST_UCX_LOADING";

/// With the one variable that keeps it from patching the C library.
#[test]
fn loading_it_changes_nothing_in_a_process() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["real::a_process_that_loads_it", "--exact", "--nocapture"]);
    let output = again.env(LOADING, "1").env("UCX_MEM_EVENTS", "n").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

#[test]
fn a_process_that_loads_it() {
    if std::env::var_os(LOADING).is_none() {
        return;
    }
    let before = (caught_signals(), code());
    let Some(ucx) = ucx() else { return };
    let side = Side::new(start(&ucx, &|events| {
        Arc::new(ucx.start(&Settings::default(), events).unwrap())
    }));
    let other = self::side(&ucx);
    let to = side.engine.connect(other.engine.address()).unwrap();
    side.post(to, b"", vec![1; 8 << 20], 0).unwrap();
    drive("it is there", &[&other, &side], |log| log.messages.len() == 1);
    let after = (caught_signals(), code());
    assert_eq!(before.1, after.1, "code of the C library was changed");
    assert_eq!(after.0 & !before.0, 0, "signals {:#x} are caught now", after.0);
}

fn caught_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap()
}

/// How functions begin that manage memory.
fn code() -> [[u8; 16]; 4] {
    let this = libloading::os::unix::Library::this();
    ["mmap", "munmap", "brk", "madvise"].map(|name| {
        // SAFETY: it is only looked at.
        let function = unsafe { this.get::<*const [u8; 16]>(name.as_bytes()) }.unwrap();
        // SAFETY: code can be read, and functions of so few bytes have others behind them.
        unsafe { std::ptr::read(*function) }
    })
}
