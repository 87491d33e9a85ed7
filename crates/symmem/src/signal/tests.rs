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
    rank.barrier(0, 0, limit.into(), || false)
}

#[test]
fn what_is_laid_out_counts_though_the_call_expired() {
    let group = group(2, 0);
    let desk = [SharedWord::new(0), SharedWord::new(0)];
    let exchange = |rank: usize, value: u32, limit: Duration| {
        group[rank].exchange(
            0,
            7,
            limit.into(),
            || false,
            |to, _| {
                if to == rank {
                    desk[rank].store(value, Ordering::Relaxed);
                }
            },
            |_| desk.each_ref().map(|word| word.load(Ordering::Relaxed)),
        )
    };
    assert!(matches!(exchange(0, 1, Duration::from_millis(5)), Err(Stop::Expired { .. })));
    assert_eq!(exchange(1, 2, LONG), Ok([1, 2]));
    assert_eq!(exchange(0, 3, LONG), Ok([1, 2]));
}

#[test]
fn an_expired_barrier_names_who_is_missing_and_is_resumed() {
    let group = group(3, 0);
    let soon = Duration::from_millis(5);
    let missing = |met| match met {
        Err(Stop::Expired { missing, .. }) => missing,
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
        assert!(matches!(second, Err(Stop::Expired { missing, .. }) if missing == [0]));
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
    assert_eq!(noted, [Some(2), Some(2), Some(0)]);
}
