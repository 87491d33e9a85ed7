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
    signals: OnceLock<Weak<Signals<Self>>>,
}

/// Messages under way, by sender and receiver.
struct Lines {
    under_way: Vec<Vec<Mutex<VecDeque<PadUpdate>>>>,
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

    fn send(&self, to: usize, update: &PadUpdate) {
        self.lines.under_way[self.rank][to].lock().unwrap().push_back(update.clone());
    }

    fn progress(&self) {
        let from = self.lines.any() % self.hosts.len();
        if self.lines.any().is_multiple_of(3) {
            return; // it is still under way
        }
        let Some(signals) = self.signals.get().and_then(Weak::upgrade) else { return };
        // One at a time for each pair, as a connection is read.
        let mut line = self.lines.under_way[from][self.rank].lock().unwrap();
        if let Some(update) = line.pop_front() {
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
    let lines = Arc::new(Lines { under_way, seed: AtomicU32::new(seed) });
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

const PLACEMENTS: [&[usize]; 5] = [&[0, 1], &[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 1, 2], &[0, 1, 1]];

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
    for update in [
        PadUpdate::Arrived { channel: far, epoch, call, tiny: None },
        PadUpdate::Arrived { channel: usize::MAX, epoch, call, tiny: None },
        PadUpdate::Arrived { channel: 0, epoch: 0, call, tiny: None },
        PadUpdate::Arrived { channel: 0, epoch: u32::MAX, call, tiny: None },
        PadUpdate::Arrived { channel: 0, epoch, call, tiny },
        PadUpdate::Words { first: 0, words: vec![1] },
        PadUpdate::Words { first: Layout::POISON, words: vec![1] },
        PadUpdate::Words { first: Layout::FAREWELL, words: vec![1; 2] },
        PadUpdate::Words { first: usize::MAX, words: vec![1; 2] },
        PadUpdate::Slot { pad: GROUP, channel: far - 1, act: SlotAct::Put },
        PadUpdate::Slot { pad: 5, channel: 0, act: SlotAct::Put },
        PadUpdate::GaveUp { out: 0, left: vec![] },
        PadUpdate::GaveUp { out: 3, left: vec![] },
        PadUpdate::GaveUp { out: 2, left: vec![(far, 1)] },
    ] {
        assert_eq!(signals.apply(1, &update), Err(InvalidMessage), "{update:?}");
        assert_eq!(before(), then, "{update:?}");
    }
}
