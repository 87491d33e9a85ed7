//! Models of the signal protocol: loom runs the very code of `signal/mod.rs` under every schedule and every outcome that
//! the memory orderings allow, up to a number of preemptions. Run by `cargo xtask loom`.
//!
//! Nothing here spins or looks at a clock: a wake-up that gets lost is a deadlock, which loom reports.
#![cfg(loom)]

use std::sync::Arc;

use symmem::Deadline;
use symmem::model::{Slot, Stop};

#[path = "loom/model.rs"]
mod model;
#[path = "loom/ring.rs"]
mod ring;
#[path = "loom/steps.rs"]
mod steps;

use model::*;

fn crossed(rank: &Rank) {
    rank.data.write(rank.rank, 7);
    rank.barrier();
    for other in 0..2 {
        assert_eq!(rank.data.read(other), 7);
    }
}

#[test]
fn a_barrier_orders_data() {
    assert!(TWO.explore(crossed));
}

#[test]
fn a_barrier_orders_data_when_the_first_look_is_enough() {
    Model { looks: 1, ..TWO }.explore(crossed);
}

#[test]
fn a_barrier_of_three_orders_data() {
    let slept = THREE.explore(|rank| {
        rank.data.write(rank.rank, 7);
        rank.barrier();
        assert_eq!((0..3).map(|r| rank.data.read(r)).sum::<u32>(), 21);
    });
    assert!(slept);
}

/// Everyone writes, everyone reads, and writes again: as phases do.
fn three_times(rank: &Rank) {
    rank.data.write(rank.rank, 1);
    rank.barrier();
    assert_eq!(rank.data.read(1 - rank.rank), 1);
    rank.barrier();
    rank.data.write(rank.rank, 2);
    rank.barrier();
    assert_eq!(rank.data.read(1 - rank.rank), 2);
}

#[test]
fn barriers_follow_each_other_in_the_same_slots() {
    assert!(TWO.explore(three_times));
}

/// There is no barrier but the exchanges themselves.
fn exchanged(rank: &Rank) {
    for epoch in 1..=3 {
        assert_eq!(rank.carry(0, NEVER), Ok(epoch));
    }
}

#[test]
fn what_is_written_is_seen_and_stays_until_all_have_read_it() {
    assert!(Model { preemptions: 2, ..TWO }.explore(exchanged));
}

#[test]
fn barriers_go_on_when_the_epochs_wrap_around() {
    for epoch in [u32::MAX - 1, u32::MAX, i32::MAX as u32 - 1] {
        assert!(Model { epoch, preemptions: 2, ..TWO }.explore(three_times));
    }
}

#[test]
fn channels_of_one_group_are_kept_apart() {
    // Two threads of each rank; the channels' barriers are reached in opposite orders.
    let slept = Model { channels: 1, preemptions: 2, ..TWO }.explore_threads(|group| {
        let threads = group.into_iter().enumerate().flat_map(|(r, rank)| {
            [0, 1].map(|channel| {
                let rank = Arc::clone(&rank);
                Box::new(move || {
                    rank.data.write(2 * channel + r, 5);
                    let ended = rank.signals.barrier(channel, &mut NEVER.clone(), |_| false);
                    assert_eq!(ended, Ok(()));
                    assert_eq!(rank.data.read(2 * channel + 1 - r), 5);
                }) as Thread
            })
        });
        threads.collect()
    });
    assert!(slept);
}

#[test]
fn threads_of_one_rank_take_turns_on_a_channel() {
    // The second thread counts on, so it cannot pass with the one barrier that rank 1 holds. Nobody waits for its
    // turn here: loom does not run a loop that only others can end.
    let passed = passed();
    TWO.explore_threads(move |group| {
        let [zero, one] = <[Arc<Rank>; 2]>::try_from(group).ok().unwrap();
        let ended = Arc::new(std::sync::Mutex::new(0));
        let zeros = [Arc::clone(&zero), zero].map(|zero| {
            let ended = Arc::clone(&ended);
            Box::new(move || {
                if zero.barrier_by(passed) == Ok(()) {
                    let mut ended = ended.lock().unwrap();
                    *ended += 1;
                    assert_eq!(*ended, 1, "both synchronised with rank 1 in its only barrier");
                }
            }) as Thread
        });
        zeros.into_iter().chain([Box::new(move || one.barrier()) as Thread]).collect()
    });
}

fn signalled(rank: &Rank) {
    if rank.rank == 0 {
        rank.data.write(0, 7);
        rank.put(1);
    } else {
        rank.wait(0);
        assert_eq!(rank.data.read(0), 7);
    }
}

#[test]
fn a_signal_orders_data() {
    assert!(TWO.explore(signalled));
}

#[test]
fn a_signal_orders_data_when_the_first_look_is_enough() {
    Model { looks: 1, ..TWO }.explore(signalled);
}

#[test]
fn a_full_slot_holds_the_sender_back_and_is_used_again() {
    let slept = TWO.explore(|rank| {
        for i in 0..2 {
            if rank.rank == 0 {
                rank.data.write(i, 7);
                rank.put(1);
            } else {
                rank.wait(0);
                assert_eq!(rank.data.read(i), 7);
            }
        }
    });
    assert!(slept);
}

#[test]
fn a_sender_asleep_before_a_full_slot_is_woken() {
    let slept = TWO.explore_threads(|group| {
        let [zero, one] = <[Arc<Rank>; 2]>::try_from(group).ok().unwrap();
        zero.put(1); // the slot is full, and its owner awake
        vec![Box::new(move || zero.put(1)), Box::new(move || one.wait(0))]
    });
    assert!(slept);
}

#[test]
fn signals_cross() {
    let slept = TWO.explore(|rank| {
        let other = 1 - rank.rank;
        rank.data.write(rank.rank, 7);
        rank.put(other);
        rank.wait(other);
        assert_eq!(rank.data.read(other), 7);
    });
    assert!(slept);
}

#[test]
fn threads_asleep_at_one_bell_are_all_woken() {
    let slept = Model { channels: 1, ..TWO }.explore_threads(|group| {
        let [zero, one] = <[Arc<Rank>; 2]>::try_from(group).ok().unwrap();
        let also_one = Arc::clone(&one);
        vec![
            Box::new(move || {
                zero.put(1);
                assert_eq!(
                    zero.signals.put(&zero.signals.slot_on(1, 1), 1, NEVER, || false),
                    Ok(())
                );
            }),
            Box::new(move || one.wait(0)),
            Box::new(move || {
                assert_eq!(
                    also_one.signals.take(&also_one.signals.slot_of(0, 1), 0, NEVER, || false),
                    Ok(())
                )
            }),
        ]
    });
    assert!(slept);
}

#[test]
fn two_groups_on_one_channel_do_not_disturb_each_other() {
    let slept = TWO.explore_threads(|first| {
        let second = TWO.group();
        let threads = first.into_iter().zip(second).map(|(first, second)| {
            Box::new(move || match first.rank {
                0 => {
                    first.data.write(0, 1);
                    first.put(1);
                    second.barrier();
                }
                _ => {
                    second.barrier();
                    first.wait(0);
                    assert_eq!(first.data.read(0), 1);
                }
            }) as Thread
        });
        threads.collect()
    });
    assert!(slept);
}

/// A slot of an allocation's pad.
fn slot(word: &ModelWord) -> Slot<'_, ModelWord> {
    Slot { word, pad: 1, channel: 0 }
}

#[test]
fn two_groups_signal_in_the_pad_of_one_allocation() {
    // Each group its own word of that pad; two threads of rank 1 wait, each at the bell of its group.
    let slept = TWO.explore_threads(|first| {
        let second = TWO.group();
        let pad = Arc::new([ModelWord::new(), ModelWord::new()]);
        let groups = || [&first, &second].into_iter().enumerate();
        let receivers: Vec<_> = groups()
            .map(|(i, group)| {
                let (rank, pad) = (Arc::clone(&group[1]), Arc::clone(&pad));
                Box::new(move || {
                    assert_eq!(rank.signals.take(&slot(&pad[i]), 0, NEVER, || false), Ok(()));
                    assert_eq!(rank.data.read(i), 3);
                }) as Thread
            })
            .collect();
        let senders: Vec<_> = groups().map(|(_, group)| Arc::clone(&group[0])).collect();
        let send = Box::new(move || {
            for (i, rank) in senders.iter().enumerate().rev() {
                rank.data.write(i, 3);
                assert_eq!(rank.signals.put(&slot(&pad[i]), 1, NEVER, || false), Ok(()));
            }
        }) as Thread;
        receivers.into_iter().chain([send]).collect()
    });
    assert!(slept);
}

#[test]
fn poison_wakes_who_sleeps() {
    let slept = TWO.explore(|rank| {
        let signals = &rank.signals;
        if rank.rank == 0 {
            signals.poison(0);
        } else {
            assert_eq!(rank.watchful_barrier(), Err(Stop::Lost));
            assert_eq!(signals.poisoned(), Some(0));
        }
    });
    assert!(slept);
}

#[test]
fn poison_wakes_a_sender_before_a_full_slot() {
    let slept = TWO.explore(|rank| {
        let signals = &rank.signals;
        if rank.rank == 1 {
            signals.poison(1);
        } else {
            rank.put(1);
            let ended =
                signals.put(&signals.slot_on(1, 0), 1, NEVER, || signals.poisoned().is_some());
            assert_eq!(ended, Err(Stop::Lost));
        }
    });
    assert!(slept);
}

#[test]
fn what_came_before_the_poison_counts() {
    for looks in [0, 1] {
        Model { looks, ..TWO }.explore(|rank| {
            let signals = &rank.signals;
            if rank.rank == 0 {
                rank.data.write(0, 7);
                rank.put(1);
                signals.poison(0);
            } else {
                let ended =
                    signals.take(&signals.slot_of(0, 0), 0, NEVER, || signals.poisoned().is_some());
                assert_eq!(ended, Ok(()));
                assert_eq!(rank.data.read(0), 7);
            }
        });
    }
}

#[test]
fn an_arrival_before_the_poison_counts() {
    let passed = passed();
    let slept = TWO.explore(move |rank| {
        let signals = &rank.signals;
        if rank.rank == 0 {
            rank.data.write(0, 7);
            let _ = rank.barrier_by(passed); // arrives, and dies whether or not it saw the other
            signals.poison(0);
        } else {
            assert_eq!(rank.watchful_barrier(), Ok(()));
            assert_eq!(rank.data.read(0), 7);
        }
    });
    assert!(slept);
}

#[test]
fn a_barrier_that_a_loss_cut_short_is_left_by_all() {
    // Rank 0 is lost behind the barrier. Rank 1 may learn of that before it sees rank 2 arrive, so not all need to
    // succeed; but a rank that does has seen all data, and nobody stays behind.
    let slept = Model { preemptions: 2, ..THREE }.explore(|rank| {
        let signals = &rank.signals;
        rank.data.write(rank.rank, 7);
        match rank.watchful_barrier() {
            Ok(()) => assert_eq!((0..3).map(|r| rank.data.read(r)).sum::<u32>(), 21),
            ended => assert!(rank.rank != 0 && ended == Err(Stop::Lost)),
        }
        if rank.rank == 0 {
            signals.poison(0);
        }
    });
    assert!(slept);
}

#[test]
fn the_first_loss_noted_stays() {
    THREE.explore(|rank| match rank.rank {
        2 => {
            let first = rank.signals.poisoned();
            let later = rank.signals.poisoned();
            assert!(first.is_none() || first == later, "{first:?} then {later:?}");
        }
        lost => rank.signals.poison(lost),
    });
}

#[test]
fn different_calls_are_noticed_by_both() {
    let slept = TWO.explore(|rank| {
        let calls = [4, 9];
        for _ in 0..2 {
            let ended = rank.call(calls[rank.rank], NEVER);
            assert_eq!(ended, Err(Stop::Differs { rank: 1 - rank.rank }));
        }
        rank.barrier(); // and the channel still works
    });
    assert!(slept);
}

#[test]
fn a_call_is_compared_with_the_one_of_the_same_barrier() {
    // The words of both parities are written again while a slow rank still compares.
    TWO.explore(|rank| {
        for call in 2..=4 {
            assert_eq!(rank.call(call, NEVER), Ok(()));
        }
    });
}

#[test]
fn a_barrier_left_by_its_deadline_is_resumed() {
    let passed = passed();
    let slept = TWO.explore(move |rank| {
        rank.data.write(rank.rank, 7);
        if rank.rank == 0 {
            match rank.barrier_by(passed) {
                Ok(()) => {}
                Err(Stop::GivenUp { missing, .. }) => {
                    // It may have come in between, but nobody else can be missing.
                    assert!(missing.iter().all(|&r| r == 1));
                    rank.barrier();
                }
                Err(other) => panic!("{other:?}"),
            }
        } else {
            rank.barrier();
        }
        assert_eq!(rank.data.read(1 - rank.rank), 7);
        rank.barrier(); // both count alike
        rank.data.write(rank.rank, 8);
    });
    assert!(slept);
}

#[test]
fn a_call_that_was_given_up_is_resumed_before_the_next() {
    let passed = passed();
    TWO.explore(move |rank| {
        // Whether or not rank 0 gave up its first call, both count two.
        let first = if rank.rank == 0 { passed } else { NEVER };
        if rank.call(5, first).is_err() {
            assert_eq!(rank.call(5, NEVER), Ok(()));
        }
        assert_eq!(rank.call(6, NEVER), Ok(()));
    });
}

#[test]
fn a_signal_given_up_by_the_receiver_is_not_lost() {
    let passed = passed();
    let slept = TWO.explore(move |rank| {
        if rank.rank == 0 {
            rank.data.write(0, 7);
            rank.put(1);
        } else {
            if rank.signals.take(&rank.signals.slot_of(0, 0), 0, passed, || false).is_err() {
                rank.wait(0);
            }
            assert_eq!(rank.data.read(0), 7);
        }
    });
    assert!(slept);
}

/// Compares all answers. A rank that dies on the way is one that does not go on until the others are done, and
/// those schedules are among the explored ones: nobody waits for anybody in `decide`.
fn all_decide(model: Model, views: &'static [&'static [usize]]) {
    model.explore_threads(move |group| {
        let answers = Arc::new(std::sync::Mutex::new(Vec::new()));
        let threads = group.into_iter().zip(views).map(|(rank, view)| {
            let answers = Arc::clone(&answers);
            Box::new(move || {
                let answer = rank.decide(view);
                assert_eq!(rank.decide(&[]), answer, "asked again");
                let mut answers = answers.lock().unwrap();
                answers.push(answer.clone());
                assert!(views.contains(&&*answer), "{answer:?} is nobody's proposal");
                assert!(answers.iter().all(|other| *other == answer), "{answers:?}");
            }) as Thread
        });
        threads.collect()
    });
}

#[test]
fn two_ranks_decide_alike() {
    all_decide(TWO, &[&[0], &[0, 1]]);
}

#[test]
fn three_ranks_decide_alike_though_one_dies_anywhere_on_the_way() {
    all_decide(THREE, &[&[0, 1], &[0, 1, 2], &[1, 2]]);
}

#[test]
fn survivors_decide_alike_if_the_owner_of_the_decision_never_comes() {
    THREE.explore_threads(|group| {
        let answers = Arc::new(std::sync::Mutex::new(Vec::new()));
        let survivors = group.into_iter().skip(1).zip([&[1, 2][..], &[0, 1, 2]]);
        let threads = survivors.map(|(rank, view)| {
            let answers = Arc::clone(&answers);
            Box::new(move || {
                let answer = rank.decide(view);
                let mut answers = answers.lock().unwrap();
                answers.push(answer);
                assert!(answers.iter().all(|other| *other == answers[0]), "{answers:?}");
            }) as Thread
        });
        threads.collect()
    });
}

#[test]
fn threads_of_one_rank_decide_alike() {
    // Both see losses at different moments; their rank has one proposal only.
    TWO.explore_threads(|group| {
        let answers = Arc::new(std::sync::Mutex::new(Vec::new()));
        let threads = [&[0, 1][..], &[0]].into_iter().map(|view| {
            let (rank, answers) = (Arc::clone(&group[0]), Arc::clone(&answers));
            Box::new(move || {
                let answer = rank.decide(view);
                let mut answers = answers.lock().unwrap();
                answers.push(answer);
                assert!(answers.iter().all(|other| *other == answers[0]), "{answers:?}");
            }) as Thread
        });
        threads.collect()
    });
}
