//! Ranks on several hosts: the protocols over messages that are late, each pair's in order and those of different pairs in any.

#![allow(clippy::unwrap_used, reason = "a broken test may panic")]

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use super::*;
use crate::sync::SharedWord;

const LONG: Duration = Duration::from_secs(60);

/// What one rank sees: pads of its host, which are shared, and mirrors of the others.
struct FarPads {
    rank: usize,
    hosts: Vec<usize>,
    words: Vec<Arc<Vec<SharedWord>>>,
    lines: Arc<Lines>,
    /// To each rank, but for arrivals.
    sent: Vec<AtomicU32>,
    signals: OnceLock<Weak<Signals<Self>>>,
}

/// Messages under way, by sender and receiver.
struct Lines {
    under_way: Vec<Vec<Mutex<VecDeque<PadUpdate>>>>,
    /// Held by the thread that reads a line.
    reading: Vec<Vec<Mutex<()>>>,
    seed: AtomicU32,
}

impl Lines {
    /// Some number, another each time.
    fn any(&self) -> usize {
        let mut n = self.seed.fetch_add(0x9e37_79b9, Ordering::Relaxed);
        n = (n ^ (n >> 16)).wrapping_mul(0x85eb_ca6b);
        (n ^ (n >> 13)) as usize
    }
}

impl Pads for FarPads {
    type Word = SharedWord;

    fn word(&self, owner: usize, index: usize) -> &SharedWord {
        &self.words[owner][index]
    }

    fn is_far(&self, owner: usize) -> bool {
        self.hosts[owner] != self.hosts[self.rank]
    }

    fn host(&self, rank: usize) -> usize {
        self.hosts[rank]
    }

    fn sent(&self, to: usize) -> u64 {
        self.sent[to].load(Ordering::Relaxed).into()
    }

    fn send(&self, to: usize, update: &PadUpdate) {
        self.lines.under_way[self.rank][to].lock().unwrap().push_back(update.clone());
        self.sent[to].fetch_add(u32::from(!update.is_arrival()), Ordering::Relaxed);
    }

    fn progress(&self, _from: &[usize]) {
        let from = self.lines.any() % self.hosts.len();
        if self.lines.any().is_multiple_of(3) {
            return; // it is still under way
        }
        let Some(signals) = self.signals.get().and_then(Weak::upgrade) else { return };
        // One at a time for each pair, as a connection is read.
        let _reading = self.lines.reading[from][self.rank].lock().unwrap();
        let next = self.lines.under_way[from][self.rank].lock().unwrap().pop_front();
        if let Some(update) = next {
            signals.apply(from, &update).unwrap();
        }
    }
}

/// The ranks of a group on these hosts.
fn group(hosts: &[usize], seed: u32) -> Vec<Arc<Signals<FarPads>>> {
    let n = hosts.len();
    let layout = Layout::new(n, 2);
    let pad = || Arc::new((0..layout.words()).map(|_| SharedWord::new(0)).collect::<Vec<_>>());
    let own: Vec<_> = (0..n).map(|_| pad()).collect();
    let under_way = (0..n).map(|_| (0..n).map(|_| Mutex::default()).collect()).collect();
    let reading = (0..n).map(|_| (0..n).map(|_| Mutex::default()).collect()).collect();
    let lines = Arc::new(Lines { under_way, reading, seed: AtomicU32::new(seed) });
    let rank = |rank: usize| {
        let sees = |owner: usize| match hosts[owner] == hosts[rank] {
            true => Arc::clone(&own[owner]),
            false => pad(),
        };
        let pads = FarPads {
            rank,
            hosts: hosts.to_vec(),
            words: (0..n).map(sees).collect(),
            lines: Arc::clone(&lines),
            sent: (0..n).map(|_| AtomicU32::new(0)).collect(),
            signals: OnceLock::new(),
        };
        let signals = Arc::new(Signals::new(pads, rank, layout, Patience::looks(3000)));
        let _ = signals.pads.signals.set(Arc::downgrade(&signals));
        signals
    };
    (0..n).map(rank).collect()
}

fn on_all(group: &[Arc<Signals<FarPads>>], work: impl Fn(&Signals<FarPads>) + Sync) {
    std::thread::scope(|scope| {
        for signals in group {
            scope.spawn(|| work(signals));
        }
    });
}

const PLACEMENTS: [&[usize]; 8] = [
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 1, 2],
    &[0, 1, 1],
    &[0, 0, 0, 1],
    &[0, 1, 0, 0, 1],
    &[0, 0, 1, 2, 2, 1],
];

#[test]
fn data_comes_with_its_flag_wherever_the_ranks_are() {
    for (seed, hosts) in (1..).zip(PLACEMENTS) {
        on_all(&group(hosts, seed), |signals| {
            let n = hosts.len();
            for round in 1..25 {
                let guard = signals.lock_channel(signals.sequence(), LONG.into()).unwrap();
                let tiny = [round * 100 + signals.rank as u64; Layout::PAYLOAD / 8];
                let epoch = guard.exchange(7, Some(&tiny), &mut LONG.into(), |_| false).unwrap();
                for rank in (0..n).filter(|&rank| rank != signals.rank) {
                    let words: [u32; 2] = std::array::from_fn(|i| {
                        let at = signals.layout.payload(rank, epoch) + i;
                        signals.pads.word(signals.rank, at).load(Ordering::Relaxed)
                    });
                    let value = u64::from(words[0]) | u64::from(words[1]) << 32;
                    assert_eq!(value, round * 100 + rank as u64, "of rank {rank} in {hosts:?}");
                }
            }
        });
    }
}

/// The next barrier of the sequence.
fn exchange(signals: &Signals<FarPads>, call: u32, limit: Duration) -> Result<u32, Stop> {
    let guard = signals.lock_channel(signals.sequence(), LONG.into()).unwrap();
    guard.exchange(call, None, &mut limit.into(), |_| false)
}

/// Whichever rank it was sent to, and whether its sender tells that rank itself otherwise or not.
#[test]
fn what_was_sent_before_a_barrier_has_come_after_it() {
    for (seed, hosts) in (50..).zip(PLACEMENTS) {
        let n = hosts.len();
        on_all(&group(hosts, seed), |signals| {
            let (own, text) = (signals.rank, Layout::note(0));
            for round in 1..40 {
                // Every rank knows to whom the others send in this round: mostly to nobody.
                let target = |from: usize| (round as usize * 7 + from * 3) % (3 * n);
                let update = PadUpdate::Words { first: text, words: vec![round] };
                if signals.far_peers().any(|rank| rank == target(own)) {
                    signals.pads.send(target(own), &update);
                }
                exchange(signals, 7, LONG).unwrap();
                for from in signals.far_peers().filter(|&from| target(from) == own) {
                    let [got] = signals.load_words(from, text);
                    assert_eq!(got, round, "rank {own}, of rank {from} in {hosts:?}");
                }
                exchange(signals, 7, LONG).unwrap();
            }
        });
    }
}

/// Whoever told this rank of the arrival, and whenever.
#[test]
fn what_neighbours_were_sent_before_a_barrier_has_landed_when_this_rank_has_waited_for_that() {
    for (seed, hosts) in (150..).zip(PLACEMENTS) {
        let (n, group) = (hosts.len(), group(hosts, seed));
        on_all(&group, |signals| {
            let own = signals.rank;
            for round in 1..40_u32 {
                // To any rank: then its sender tells all of that host itself.
                let to = (round as usize * 7 + own * 3) % (3 * n);
                if signals.far_peers().any(|rank| rank == to) {
                    let update = PadUpdate::Words { first: Layout::note(0), words: vec![round] };
                    signals.pads.send(to, &update);
                }
                let epoch = exchange(signals, 7, LONG).unwrap();
                signals.await_landed(&mut LONG.into(), |_| false).unwrap();
                for (source, near) in signals
                    .far_peers()
                    .flat_map(|far| signals.near_ranks().map(move |near| (far, near)))
                {
                    let hearer = signals.hearer(source);
                    let known = signals.is_flagged(near, signals.sequence(), source, epoch);
                    assert!(
                        hearer != Some(near) || known,
                        "{own}, of {source} at {near}: {hosts:?}"
                    );
                }
            }
        });
    }
}

#[test]
fn who_has_not_received_what_it_hears_is_missing_for_its_neighbours() {
    let group = group(&[0, 0, 1, 1], 3);
    let (channel, call, tiny, for_host) = (group[0].sequence(), 7, None, false);
    let arrived = PadUpdate::Arrived { channel, epoch: 1, call, tiny, for_host };
    for signals in &group[..2] {
        let guard = signals.lock_channel(channel, LONG.into()).unwrap();
        guard.arrive(call, None);
    }
    // Rank 1 hears from rank 3, and rank 0 from rank 2.
    for from in [2, 3] {
        group[1].apply(from, &arrived).unwrap();
    }
    assert_eq!(exchange(&group[1], call, LONG), Ok(1));
    assert!(group[1].has_heard_all(1) && !group[1].has_heard_all(0));
    let mut soon = Duration::from_millis(5).into();
    let waited = group[1].await_landed(&mut soon, |_| false);
    assert!(matches!(waited, Err(Stop::GivenUp { missing, .. }) if missing == [0]));
    let waited = group[1].await_landed(&mut LONG.into(), |done| !done(0) && done(1));
    assert_eq!(waited, Err(Stop::Lost));
    group[0].apply(2, &arrived).unwrap();
    assert_eq!(group[1].await_landed(&mut LONG.into(), |_| true), Ok(()));
}

#[test]
fn a_shared_mirror_is_free_once_all_ranks_of_the_host_have_reached_the_barrier_before() {
    let group = group(&[0, 0, 1, 1], 3);
    for rank in [0, 1] {
        assert!(group[0].have_all_left(1) && !group[0].have_all_left(2));
        let guard = group[rank].lock_channel(group[rank].sequence(), LONG.into()).unwrap();
        guard.arrive(7, None);
    }
    assert!(group[0].have_all_left(2) && group[1].have_all_left(2));
}

#[test]
fn a_rank_that_takes_nothing_in_makes_nobody_take_others_for_missing() {
    for (seed, (hosts, stopped)) in (80..).zip([
        (&[0, 0, 1, 1][..], 2),
        (&[0, 0, 1, 1], 0),
        (&[0, 1, 0, 1], 1),
        (&[0, 0, 0, 1], 0),
        (&[0, 0, 1, 2, 2, 1], 2),
    ]) {
        let gone_on = AtomicU32::new(0);
        on_all(&group(hosts, seed), |signals| {
            exchange(signals, 7, LONG).unwrap();
            if signals.rank == stopped {
                let guard = signals.lock_channel(signals.sequence(), LONG.into()).unwrap();
                guard.arrive(8, None);
                while (gone_on.load(Ordering::Relaxed) as usize) < hosts.len() - 1 {
                    yield_now();
                }
                drop(guard);
                exchange(signals, 8, LONG).unwrap(); // the same one
            } else {
                exchange(signals, 8, LONG).unwrap();
                gone_on.fetch_add(1, Ordering::Relaxed);
                // Others may ask whether it has come.
                while (gone_on.load(Ordering::Relaxed) as usize) < hosts.len() - 1 {
                    signals.progress(0);
                }
            }
            exchange(signals, 8, LONG).unwrap();
        });
    }
}

#[test]
fn a_rank_that_is_missing_is_named_alone_by_all() {
    for (seed, hosts) in (90..).zip([&[0, 0, 1, 1][..], &[0, 1, 1, 1], &[0, 1, 2, 0]]) {
        for late in [0, 1, 3] {
            let given_up = AtomicU32::new(0);
            on_all(&group(hosts, seed), |signals| {
                exchange(signals, 7, LONG).unwrap();
                let have_given_up = || given_up.load(Ordering::Relaxed) as usize == hosts.len() - 1;
                if signals.rank != late {
                    let ended = exchange(signals, 8, Duration::from_millis(400));
                    let Err(Stop::GivenUp { missing, .. }) = ended else { panic!("{ended:?}") };
                    assert_eq!(missing, [late], "rank {} in {hosts:?}", signals.rank);
                    given_up.fetch_add(1, Ordering::Relaxed);
                }
                while !have_given_up() {
                    signals.progress(0);
                }
                assert!(exchange(signals, 8, LONG).is_ok());
            });
        }
    }
}

#[test]
fn ranks_that_differ_are_told_so_wherever_they_are() {
    for (seed, hosts) in (120..).zip(PLACEMENTS) {
        for other in 0..hosts.len() {
            on_all(&group(hosts, seed), |signals| {
                exchange(signals, 7, LONG).unwrap();
                let is_other = signals.rank == other;
                let ended = exchange(signals, if is_other { 9 } else { 8 }, LONG);
                let Err(Stop::Differs { rank }) = ended else { panic!("{ended:?} in {hosts:?}") };
                assert_eq!(rank == other, !is_other);
                for call in 10..14 {
                    exchange(signals, call, LONG).unwrap();
                }
            });
        }
    }
}

#[test]
fn signals_are_taken_as_often_as_they_are_put() {
    for (seed, hosts) in (7..).zip(PLACEMENTS) {
        on_all(&group(hosts, seed), |signals| {
            let n = hosts.len();
            let (next, last) = ((signals.rank + 1) % n, (signals.rank + n - 1) % n);
            for _ in 0..20 {
                let put = signals.slot_on(next, 1);
                assert_eq!(signals.put(&put, next, LONG.into(), || false), Ok(()));
                let take = signals.slot_of(last, 1);
                assert_eq!(signals.take(&take, last, LONG.into(), || false), Ok(()));
            }
            // A second signal has no place before the first is taken.
            signals.barrier(0, &mut LONG.into(), |_| false).unwrap();
            assert!(signals.put_now(&signals.slot_on(next, 0), next));
            assert!(!signals.put_now(&signals.slot_on(next, 0), next));
        });
    }
}

/// The one that gives up has left the barrier before, so all have reached it, and none is told that it is out of step there.
#[test]
fn a_call_that_is_given_up_ends_no_barrier_that_came_before() {
    for (seed, hosts) in (20..).zip(PLACEMENTS) {
        for round in 0..20 {
            on_all(&group(hosts, seed + 100 * round), |signals| {
                assert_eq!(signals.barrier(1, &mut LONG.into(), |_| false), Ok(()));
                let guard = signals.lock_channel(signals.sequence(), LONG.into()).unwrap();
                guard.exchange(7, None, &mut LONG.into(), |_| false).unwrap();
                if signals.rank == 0 {
                    signals.give_up();
                }
                drop(guard);
                let told = signals.wait(
                    &mut LONG.into(),
                    || signals.out_of_step() == Some(0),
                    || false,
                    || true,
                );
                assert_eq!(told, Ended::Ready);
            });
        }
    }
}

#[test]
fn what_no_rank_tells_changes_nothing() {
    let group = group(&[0, 1], 3);
    let signals = &group[0];
    let before = || -> Vec<u32> {
        signals
            .pads
            .words
            .iter()
            .flat_map(|pad| pad.iter().map(|w| w.load(Ordering::Relaxed)))
            .collect()
    };
    let (then, far) = (before(), signals.layout.channels + 1);
    let (epoch, call, tiny) = (1, 0, Some([1; Layout::PAYLOAD / 8]));
    let for_host = false;
    for update in [
        PadUpdate::Arrived { channel: far, epoch, call, tiny: None, for_host },
        PadUpdate::Arrived { channel: usize::MAX, epoch, call, tiny: None, for_host },
        PadUpdate::Arrived { channel: 0, epoch: 0, call, tiny: None, for_host },
        PadUpdate::Arrived { channel: 0, epoch: u32::MAX, call, tiny: None, for_host },
        PadUpdate::Arrived { channel: 0, epoch, call, tiny, for_host },
        PadUpdate::Words { first: 0, words: vec![1] },
        PadUpdate::Words { first: Layout::POISON, words: vec![1] },
        PadUpdate::Words { first: Layout::FAREWELL, words: vec![1; 2] },
        PadUpdate::Words { first: usize::MAX, words: vec![1; 2] },
        PadUpdate::Slot { pad: GROUP, channel: far - 1, act: SlotAct::Put },
        PadUpdate::Slot { pad: 5, channel: 0, act: SlotAct::Put },
        PadUpdate::Arrived { channel: 2, epoch, call, tiny: None, for_host: true },
        PadUpdate::Awaited(1),
        PadUpdate::NotArrived(1),
        PadUpdate::GaveUp { out: 0, left: vec![] },
        PadUpdate::GaveUp { out: 3, left: vec![] },
        PadUpdate::GaveUp { out: 2, left: vec![(far, 1)] },
    ] {
        assert_eq!(signals.apply(1, &update), Err(InvalidMessage), "{update:?}");
        assert_eq!(before(), then, "{update:?}");
    }
}

#[test]
fn an_arrival_that_no_rank_reaches_changes_nothing() {
    let group = group(&[0, 0, 1, 1], 3);
    let (channel, call, tiny) = (group[0].sequence(), 0, None);
    for (from, epoch, for_host) in [(2, 3, false), (2, 1 << 30, true), (3, 1, true)] {
        let update = PadUpdate::Arrived { channel, epoch, call, tiny, for_host };
        assert_eq!(group[0].apply(from, &update), Err(InvalidMessage), "{update:?}");
        assert!(!group[0].has_come(channel, from, 1) && !group[1].has_come(channel, from, 1));
    }
    // One that was known, and one that comes before the one before it.
    for (epoch, so_far) in [(0, 0), (2, 0), (1, 2), (1, 2)] {
        let update = PadUpdate::Arrived { channel, epoch, call, tiny, for_host: true };
        assert_eq!(group[0].apply(2, &update), Ok(()));
        assert!(!group[0].has_reached(channel, 2, so_far + 1));
        assert!(group[0].has_reached(channel, 2, so_far));
    }
    assert!(group[1].has_come(channel, 2, 1));
}
