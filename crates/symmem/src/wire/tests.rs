//! Messages over an engine that delays, reorders, loses and kills.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use symmem_sys::ucx::fake::{Fake, Network, Script};
use symmem_sys::ucx::{Answer, Data, Endpoint, Engine, Events, Failure, ReceiveBuffer};

use super::Transport;
use super::message::{Header, Kind};
use super::outbound::{WINDOW, cost};
use super::ucx::Ucx;
use crate::error::Error;
use crate::mesh::{Carrier, Gone, PeerObserver};
use crate::sync::Deadline;

const TAG: u64 = 77;

type Heard = Arc<Mutex<Vec<(usize, u128, Vec<u8>)>>>;

struct Rank {
    ucx: Arc<Ucx>,
    fake: Arc<Fake>,
    heard: Heard,
}

impl Rank {
    fn new(network: &Network, own: usize, size: usize) -> Self {
        let (heard, fake): (Heard, OnceLock<Arc<Fake>>) = Default::default();
        let myself: Arc<OnceLock<Weak<Ucx>>> = Arc::default();
        let (told, me) = (Arc::clone(&heard), Arc::clone(&myself));
        // Group 2 wants every message back.
        let sink = move |from: usize, group: u128, bytes: &[u8]| {
            if group == 2 {
                me.get().and_then(Weak::upgrade).unwrap().post(from, 3, bytes.to_vec());
            }
            told.lock().unwrap().push((from, group, bytes.to_vec()));
            if group == 13 { Err("bad luck".to_owned()) } else { Ok(()) }
        };
        let start = |events| {
            let engine = Arc::new(network.start(events).unwrap());
            fake.set(Arc::clone(&engine)).unwrap();
            let engine: Arc<dyn Engine> = engine;
            Ok(engine)
        };
        let ucx = Ucx::new((own, size), |rank| rank != own, TAG, Box::new(sink), start).unwrap();
        let ucx = Arc::new(ucx);
        myself.set(Arc::downgrade(&ucx)).unwrap();
        Self { ucx, fake: fake.into_inner().unwrap(), heard }
    }

    fn all(network: &Network, size: usize) -> Vec<Self> {
        let ranks: Vec<Self> = (0..size).map(|own| Self::new(network, own, size)).collect();
        for (own, rank) in ranks.iter().enumerate() {
            for (other, peer) in ranks.iter().enumerate().filter(|(other, _)| *other != own) {
                rank.ucx.connect(other, peer.ucx.address()).unwrap();
            }
        }
        ranks
    }

    fn count(&self) -> usize {
        self.heard.lock().unwrap().len()
    }

    fn numbers(&self) -> Vec<u8> {
        self.heard.lock().unwrap().iter().map(|(_, _, bytes)| bytes[0]).collect()
    }
}

/// Has all ranks take in what comes until it is so.
fn until(ranks: &[Rank], what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < Duration::from_secs(30), "not in 30 s");
        ranks.iter().for_each(|rank| rank.ucx.progress(&[]));
    }
}

fn settle(ranks: &[Rank]) {
    (0..100).for_each(|_| ranks.iter().for_each(|rank| rank.ucx.progress(&[])));
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_millis(20))
}

#[test]
fn messages_are_told_in_order_whatever_the_network_does() {
    const EACH: usize = 200;
    for seed in 0..20 {
        let network = Network::new(seed);
        network.set(Script { delay: 7, reorder: true, pending: 300, inline: 3000, lost: 0 });
        let ranks = Rank::all(&network, 3);
        let message = |from: usize, i: usize| {
            let len = 2 + (i * 977 + from * 31 + seed as usize) % 9000;
            let mut bytes = vec![from as u8; len];
            bytes[0] = i as u8;
            bytes
        };
        for i in 0..EACH {
            for (from, rank) in ranks.iter().enumerate() {
                for to in (0..3).filter(|to| *to != from) {
                    rank.ucx.post(to, 1, message(from, i));
                }
            }
            if i % 16 == 0 {
                ranks[i % 3].ucx.progress(&[]);
            }
        }
        until(&ranks, || ranks.iter().all(|rank| rank.count() == 2 * EACH));
        for (own, rank) in ranks.iter().enumerate() {
            let heard = rank.heard.lock().unwrap();
            for from in (0..3).filter(|from| *from != own) {
                let told = heard.iter().filter(|(by, ..)| *by == from).enumerate();
                for (i, (_, group, bytes)) in told {
                    assert_eq!((*group, bytes), (1, &message(from, i)), "seed {seed}");
                }
            }
            assert!(rank.ucx.lost().is_empty());
        }
    }
}

#[test]
fn what_comes_behind_a_lost_message_is_not_told() {
    let network = Network::new(1);
    let ranks = Rank::all(&network, 2);
    ranks[0].ucx.post(1, 1, vec![0]);
    network.lose(&ranks[0].fake, &ranks[1].fake, 1);
    (1..9).for_each(|i| ranks[0].ucx.post(1, 1, vec![i]));
    settle(&ranks);
    assert_eq!(ranks[1].numbers(), [0]);
}

#[test]
fn whoever_is_told_something_can_answer_at_once() {
    let network = Network::new(2);
    network.set(Script { delay: 3, reorder: true, ..Script::default() });
    let ranks = Rank::all(&network, 2);
    (0..50).for_each(|i| ranks[0].ucx.post(1, 2, vec![i; 300]));
    until(&ranks, || ranks[0].count() == 50);
    assert_eq!(ranks[0].numbers(), (0..50).collect::<Vec<u8>>());
}

#[test]
fn a_stopped_peer_is_sent_a_window_and_no_more() {
    let network = Network::new(3);
    let ranks = Rank::all(&network, 2);
    let bytes = 100 << 10;
    let mut sent = 0;
    let error = loop {
        match ranks[0].ucx.send(1, 1, &[[&[], &vec![sent as u8; bytes]]], soon()) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert_eq!(sent, WINDOW / cost(bytes));
    // What is posted nevertheless stays here.
    ranks[0].ucx.post(1, 1, vec![0; bytes]);
    assert_eq!(ranks[0].fake.pending() as u64, sent);
    until(&ranks, || ranks[1].count() as u64 == sent + 1);
    settle(&ranks);
    ranks[0].ucx.send(1, 1, &[[&[1], &vec![1; bytes - 1]]], soon()).unwrap();
}

#[test]
fn a_peer_whose_connection_fails_is_lost_unless_the_mesh_knows_better() {
    for mesh_knows in [false, true] {
        let network = Network::new(4);
        let ranks = Rank::all(&network, 3);
        network.kill(&ranks[1].fake);
        settle(&ranks[..1]);
        assert!(ranks[0].ucx.lost().is_empty(), "the mesh may know how it went");
        if mesh_knows {
            ranks[0].ucx.gone(1, &Gone::lost("so long"), None);
        }
        std::thread::sleep(Duration::from_millis(120));
        let lost = ranks[0].ucx.lost();
        match (mesh_knows, &lost[..]) {
            (true, []) => {}
            (false, [(1, how)]) => assert!(how.starts_with("its UCX connection failed"), "{how}"),
            _ => panic!("{lost:?}"),
        }
        // Nothing waits for the one that is gone, and the others go on.
        ranks[0].ucx.gone(1, &Gone::lost("so long"), None);
        ranks[0].ucx.post(1, 1, vec![0]);
        ranks[0].ucx.send(1, 1, &[[&[0; 999], &[0]]], soon()).unwrap();
        ranks[0].ucx.post(2, 1, vec![1]);
        settle(&ranks);
        assert_eq!(ranks[2].numbers(), [1]);
        assert!(ranks[0].ucx.lost().is_empty());
    }
}

#[test]
fn a_lost_peers_endpoint_is_closed_and_its_bodies_come_back() {
    let network = Network::new(5);
    network.set(Script { inline: 100, ..Script::default() });
    let ranks = Rank::all(&network, 2);
    (0..5).for_each(|i| ranks[0].ucx.post(1, 1, vec![i; 5000]));
    assert_eq!(ranks[0].fake.pending(), 5);
    ranks[0].ucx.gone(1, &Gone::lost("its host is unreachable"), None);
    settle(&ranks[..1]);
    assert_eq!(ranks[0].fake.pending(), 0);
}

#[test]
fn a_message_that_no_group_understands_makes_its_sender_lost() {
    let network = Network::new(6);
    let ranks = Rank::all(&network, 2);
    ranks[0].ucx.post(1, 13, vec![1]);
    ranks[0].ucx.post(1, 1, vec![2]);
    settle(&ranks);
    assert_eq!(ranks[1].ucx.lost(), [(0, "it sent an invalid message: bad luck".to_owned())]);
    assert_eq!(ranks[1].numbers(), [1], "nothing is told after it");
}

#[test]
fn all_that_was_told_is_taken_in_before_a_goodbye() {
    let network = Network::new(7);
    network.set(Script { delay: 9, reorder: true, ..Script::default() });
    let ranks = Rank::all(&network, 2);
    let total = 2 * WINDOW as usize / (50 << 10);
    (0..total).for_each(|i| ranks[0].ucx.post(1, 1, vec![i as u8; 50 << 10]));
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| {
            ranks[0].ucx.finish(Deadline::after(Duration::from_secs(30)));
            ranks[1].count()
        });
        until(&ranks[1..], || leaving.is_finished());
        assert_eq!(leaving.join().unwrap(), total);
    });
    // One that does not answer is not waited for any longer.
    let begin = Instant::now();
    ranks[0].ucx.finish(soon());
    assert!(begin.elapsed() >= Duration::from_millis(20));
}

/// Someone who knows an address, and sends what he likes.
struct Stranger(Fake, Endpoint);

struct Deaf;

impl Events for Deaf {
    fn message(&self, _header: &[u8], _data: Data<'_>) -> Answer {
        Answer::Refuse
    }
    fn received(&self, _: u64, _: ReceiveBuffer, _: symmem_sys::ucx::Result<()>) {}
    fn sent(&self, _token: u64, _result: symmem_sys::ucx::Result<()>) {}
    fn failed(&self, _endpoint: Endpoint, _why: Failure) {}
}

impl Stranger {
    fn of(network: &Network, rank: &Rank) -> Self {
        let fake = network.start(Arc::new(Deaf)).unwrap();
        let endpoint = fake.connect(rank.ucx.address()).unwrap();
        Self(fake, endpoint)
    }

    fn send(&self, header: &[u8], body: Vec<u8>) {
        self.0.post(self.1, header, body.into(), 0).unwrap();
    }
}

#[test]
fn messages_of_strangers_are_counted_and_do_nothing() {
    let network = Network::new(8);
    network.set(Script { inline: 100, ..Script::default() });
    let ranks = Rank::all(&network, 2);
    let stranger = Stranger::of(&network, &ranks[1]);
    let header = |tag, from| {
        let kind = Kind::Short;
        Header { tag, from, kind, sequence: 0, taken: 0, group: 1 }.encode(b"hello")
    };
    for bad in [header(TAG + 1, 0), header(TAG, 1), header(TAG, 9), vec![], vec![7; 30]] {
        stranger.send(&bad, vec![0; 1000]);
    }
    settle(&ranks);
    assert_eq!((ranks[1].ucx.strangers(), ranks[1].count()), (5, 0));
    assert!(ranks[1].ucx.lost().is_empty());
    ranks[0].ucx.post(1, 1, vec![1]);
    settle(&ranks);
    assert_eq!(ranks[1].numbers(), [1]);
}

#[test]
fn what_no_rank_of_the_job_sends_makes_it_lost() {
    let header =
        |kind, sequence, taken| Header { tag: TAG, from: 0, kind, sequence, taken, group: 1 };
    let cases: [(Vec<Header>, usize, &str); 5] = [
        (vec![header(Kind::Long, 0, 0), header(Kind::Long, 0, 0)], 10, "twice"),
        (vec![header(Kind::Long, 3, 0), header(Kind::Long, 3, 0)], 10, "twice"),
        (vec![header(Kind::Long, 1 << 40, 0)], 10, "before it was asked for more"),
        (vec![header(Kind::Credit, 0, 5)], 0, "said to be taken in"),
        (vec![header(Kind::Long, 0, 0)], 1 << 20, "a message of 1048576 bytes"),
    ];
    for (headers, bytes, why) in cases {
        let network = Network::new(9);
        let ranks = Rank::all(&network, 2);
        let stranger = Stranger::of(&network, &ranks[1]);
        headers.iter().for_each(|header| stranger.send(&header.encode(&[]), vec![1; bytes]));
        settle(&ranks);
        let lost = ranks[1].ucx.lost();
        assert!(matches!(&lost[..], [(0, how)] if how.contains(why)), "{lost:?}");
    }
    // What is held back has a bound.
    let network = Network::new(10);
    network.set(Script { inline: 100, ..Script::default() });
    let ranks = Rank::all(&network, 2);
    let stranger = Stranger::of(&network, &ranks[1]);
    for number in 1..100 {
        stranger.send(&header(Kind::Long, number, 0).encode(&[]), vec![1; 200 << 10]);
    }
    settle(&ranks);
    let lost = ranks[1].ucx.lost();
    assert!(matches!(&lost[..], [(0, how)] if how.contains("asked for more")), "{lost:?}");
}

#[test]
fn the_watcher_sleeps_until_something_comes_unless_others_look() {
    let network = Network::new(11);
    let ranks = Rank::all(&network, 2);
    settle(&ranks);
    assert!(ranks[1].ucx.was_visited() && !ranks[1].ucx.was_visited());
    assert!(ranks[1].ucx.may_sleep());
    let is_readable = |rank: &Rank| {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::from_borrowed_fd(rank.ucx.descriptor(), PollFlags::IN)];
        poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap() == 1
    };
    assert!(!is_readable(&ranks[1]));
    ranks[0].ucx.post(1, 1, vec![1]);
    assert!(is_readable(&ranks[1]));
    assert!(!ranks[1].ucx.may_sleep());
    assert!(ranks[1].ucx.serve() > 0);
    assert_eq!(ranks[1].numbers(), [1]);
    assert!(!ranks[1].ucx.was_visited());
}
