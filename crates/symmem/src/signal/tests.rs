use std::sync::Arc;

use super::*;
use crate::sync::SharedWord;

const LONG: Duration = Duration::from_secs(30);

#[derive(Clone)]
struct PlainPads(Arc<Vec<Vec<SharedWord>>>);

impl Pads for PlainPads {
    type Word = SharedWord;

    fn word(&self, owner: usize, index: usize) -> &SharedWord {
        &self.0[owner][index]
    }
}

/// All ranks of a group, which has held `epoch` barriers.
fn group(ranks: usize, epoch: u32) -> Vec<Signals<PlainPads>> {
    let layout = Layout::new(ranks, 1);
    let pad = || (0..layout.words()).map(|_| SharedWord::new(0)).collect();
    let pads = PlainPads(Arc::new((0..ranks).map(|_| pad()).collect()));
    (0..ranks).map(|rank| Signals::modelled(pads.clone(), rank, layout, epoch, 1)).collect()
}

fn barrier(rank: &Signals<PlainPads>, limit: Duration) -> Result<(), Stop> {
    rank.barrier(0, &mut limit.into(), |_| false)
}

#[test]
fn what_was_written_counts_though_the_call_gave_up() {
    let group = group(2, 0);
    let staging = [SharedWord::new(0), SharedWord::new(0)];
    let exchange = |rank: usize, value: u32, limit: Duration| {
        let guard = group[rank].lock_channel(1, limit.into()).unwrap();
        if !guard.is_unfinished() {
            staging[rank].store(value, Ordering::Relaxed);
        }
        let epoch = guard.exchange(7, None, &mut limit.into(), |_| false)?;
        assert_eq!(epoch, 1);
        Ok(staging.each_ref().map(|word| word.load(Ordering::Relaxed)))
    };
    assert!(matches!(exchange(0, 1, Duration::from_millis(5)), Err(Stop::GivenUp { .. })));
    assert_eq!(exchange(1, 2, LONG), Ok([1, 2]));
    assert_eq!(exchange(0, 3, LONG), Ok([1, 2]));
}

fn call(rank: &Signals<PlainPads>, word: u32, limit: Duration) -> Result<(), Stop> {
    let guard = rank.lock_channel(rank.sequence(), limit.into())?;
    guard.exchange(word, None, &mut limit.into(), |_| false).map(drop)
}

#[test]
fn a_channel_has_one_holder_however_many_ask() {
    let group = group(2, 0);
    let holder = group[0].try_lock_channel(0).unwrap();
    assert!(group[0].try_lock_channel(0).is_none() && group[0].try_lock_channel(0).is_none());
    let stop = group[0].lock_channel(0, Duration::from_millis(5).into()).err();
    assert!(matches!(stop, Some(Stop::GivenUp { missing, .. }) if missing == [0]));
    drop(holder);
    assert!(group[0].try_lock_channel(0).is_some());
}

#[test]
fn two_that_differ_find_out_before_the_third_has_come() {
    let group = group(3, 0);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| call(&group[0], 7, LONG));
        assert_eq!(call(&group[1], 8, LONG), Err(Stop::Differs { rank: 0 }));
        assert_eq!(first.join().unwrap(), Err(Stop::Differs { rank: 1 }));
    });
    // A second call waits for the third rank: it would overwrite what that one has not read.
    let soon = Duration::from_millis(5);
    assert!(
        matches!(call(&group[0], 9, soon), Err(Stop::GivenUp { missing, .. }) if missing == [2])
    );
    assert_eq!(call(&group[2], 7, LONG), Err(Stop::Differs { rank: 1 }));
    std::thread::scope(|scope| {
        let calls: Vec<_> = group.iter().map(|rank| scope.spawn(|| call(rank, 9, LONG))).collect();
        calls.into_iter().for_each(|call| assert_eq!(call.join().unwrap(), Ok(())));
    });
}

/// Rank 2 is late for a call in which the others differ, and comes just before they give up the next one.
#[test]
fn a_rank_that_waits_for_a_late_one_is_not_blamed_for_the_next_call() {
    let group = group(4, 0);
    let soon = Duration::from_millis(5);
    let missing = |rank: usize| match call(&group[rank], 9, soon) {
        Err(Stop::GivenUp { missing, .. }) => missing,
        other => panic!("{other:?}"),
    };
    group[1].announce_next(true);
    assert_eq!(missing(0), [2, 3], "rank 1 has made the call");
    group[2].announce_next(true);
    group[3].announce_next(true);
    assert_eq!(missing(0), [1, 2, 3], "all have made it, and all are too slow");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| call(&group[0], 9, soon));
        std::thread::sleep(2 * soon); // the deadline is over, and still they come
        let others = [1, 2, 3].map(|rank| {
            let rank = &group[rank];
            scope.spawn(move || call(rank, 9, LONG))
        });
        assert_eq!(first.join().unwrap(), Ok(()));
        others.into_iter().for_each(|call| assert_eq!(call.join().unwrap(), Ok(())));
    });
    group[1].announce_next(true);
    group[1].announce_next(false);
    group[2].announce_next(true);
    assert_eq!(missing(0), [1, 3], "rank 1 has given it up");
}

#[test]
fn the_same_call_in_full_is_the_same_and_another_is_not() {
    let described = |words: [[u32; 16]; 2]| {
        let group = group(2, 0);
        let calls: Vec<_> = std::thread::scope(|scope| {
            let run = |(rank, words): (&'_ Signals<PlainPads>, [u32; 16])| {
                let guard = rank.lock_channel(rank.sequence(), LONG.into()).unwrap();
                guard.describe(&words);
                guard.exchange(IN_FULL, None, &mut LONG.into(), |_| false).map(drop)
            };
            let threads: Vec<_> =
                group.iter().zip(words).map(|call| scope.spawn(move || run(call))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        calls
    };
    assert_eq!(described([[5; 16]; 2]), [Ok(()), Ok(())]);
    let differ = [Err(Stop::Differs { rank: 1 }), Err(Stop::Differs { rank: 0 })];
    let mut other = [5; 16];
    other[15] = 6;
    assert_eq!(described([[5; 16], other]), differ);
}

#[test]
fn a_call_that_was_given_up_ends_the_waits_of_all_until_they_are_in_step() {
    let group = group(3, 0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&group[0], 7, LONG));
        assert!(matches!(call(&group[1], 7, Duration::from_millis(5)), Err(Stop::GivenUp { .. })));
        group[1].give_up();
        group[2].give_up();
        assert_eq!(waiting.join().unwrap(), Err(Stop::OutOfStep { rank: 1 }));
    });
    assert!(group.iter().all(|rank| rank.out_of_step() == Some(1)));
    assert!(group[1].is_void(), "rank 2 has never come");
    resync(&group);
    assert!(group.iter().all(|rank| rank.out_of_step().is_none()));
    std::thread::scope(|scope| {
        let calls: Vec<_> = group.iter().map(|rank| scope.spawn(|| call(rank, 9, LONG))).collect();
        calls.into_iter().for_each(|call| assert_eq!(call.join().unwrap(), Ok(())));
    });
}

fn resync(group: &[Signals<PlainPads>]) {
    let quiet = 2 * group[0].generation() + 1;
    std::thread::scope(|scope| {
        for rank in group {
            scope.spawn(move || {
                rank.resync_round(quiet, &mut LONG.into(), |_| false).unwrap();
                rank.reset();
                rank.resync_round(quiet + 1, &mut LONG.into(), |_| false).unwrap();
                rank.begin_generation();
            });
        }
    });
}

#[test]
fn generations_come_round_without_an_old_word_that_counts_again() {
    let group = group(2, 0);
    for _ in 0..3 {
        group[1].give_up();
        assert_eq!(group[0].out_of_step(), Some(1));
        resync(&group);
    }
    assert_eq!(group[0].pads.word(0, Layout::OUT).load(Ordering::Relaxed), 0);
    group[0].generation.store(u32::MAX, Ordering::Relaxed);
    group[0].give_up();
    assert_eq!(group[0].out_of_step(), Some(0));
}

#[test]
fn a_barrier_that_all_have_reached_is_not_void() {
    let group = group(2, 0);
    assert!(matches!(call(&group[0], 7, Duration::from_millis(5)), Err(Stop::GivenUp { .. })));
    assert_eq!(call(&group[1], 7, LONG), Ok(()));
    group[0].give_up();
    assert!(!group[0].is_void());
    assert!(group[0].was_completed());
}

#[test]
fn an_expired_barrier_names_who_is_missing_and_is_resumed() {
    let group = group(3, 0);
    let soon = Duration::from_millis(5);
    let missing = |result| match result {
        Err(Stop::GivenUp { missing, .. }) => missing,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(barrier(&group[0], soon)), [1, 2]);
    assert_eq!(missing(barrier(&group[2], soon)), [1]);
    assert_eq!(missing(barrier(&group[0], soon)), [1]);
    assert_eq!(barrier(&group[1], LONG), Ok(()));
    assert_eq!(barrier(&group[0], LONG), Ok(()));
    assert_eq!(barrier(&group[2], LONG), Ok(()));
}

#[test]
fn barriers_go_on_when_the_epochs_wrap_around() {
    let group = group(2, u32::MAX - 3);
    std::thread::scope(|scope| {
        for rank in &group {
            scope.spawn(|| (0..8).for_each(|_| assert_eq!(barrier(rank, LONG), Ok(()))));
        }
    });
    assert_eq!(group[0].channels[0].epoch.load(Ordering::Relaxed), 4);
}

#[test]
fn a_thread_waits_for_its_turn_until_its_deadline() {
    let group = group(2, 0);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| barrier(&group[0], LONG));
        while !group[0].channels[0].busy.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let second = barrier(&group[0], Duration::from_millis(5));
        assert!(matches!(second, Err(Stop::GivenUp { missing, .. }) if missing == [0]));
        assert_eq!(barrier(&group[1], LONG), Ok(()));
        assert_eq!(first.join().unwrap(), Ok(()));
    });
}

#[test]
fn threads_of_one_rank_take_turns_on_a_channel() {
    let group = group(2, 0);
    let barriers = |rank: usize, times: usize| {
        (0..times).for_each(|_| assert_eq!(barrier(&group[rank], LONG), Ok(())));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| barriers(0, 100));
        scope.spawn(|| barriers(0, 100));
        scope.spawn(|| barriers(1, 200));
    });
    assert_eq!(group[0].channels[0].epoch.load(Ordering::Relaxed), 200);
}

#[test]
fn the_first_proposal_wins_and_stays() {
    let group = group(70, 0);
    let odd: Vec<_> = (0..70).filter(|rank| rank % 2 == 1).collect();
    assert_eq!(group[33].decide(0, |rank| rank % 2 == 1), odd);
    assert_eq!(group[0].decide(0, |_| true), odd);
    assert_eq!(group[33].decide(0, |_| true), odd);
    assert_eq!(group[0].decide(69, |rank| rank == 69), [69]);
}

#[test]
fn the_first_loss_noted_stays() {
    let group = group(3, 0);
    group[0].poison(2);
    group[1].poison(0);
    let noted: Vec<_> = group.iter().map(Signals::poisoned).collect();
    assert_eq!(noted, [Some(2); 3]);
}

#[test]
fn losses_have_one_order_for_all() {
    let group = group(4, 0);
    for (by, lost) in [(1, 3), (0, 2), (1, 2), (2, 3), (0, 1)] {
        group[by].note_loss(lost);
    }
    for rank in &group {
        assert_eq!(rank.losses().collect::<Vec<_>>(), [3, 2, 1]);
    }
}
