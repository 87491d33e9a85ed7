//! Calls that are given up, ranks that disagree, and how a group comes back in step.

use super::*;

/// What the threads of a model found, for the last one to compare.
type Found<T> = Arc<std::sync::Mutex<Vec<T>>>;

/// Notes an answer that must be the same for all who ask.
fn agree<T: PartialEq + std::fmt::Debug>(found: &Found<T>, answer: T) {
    let mut found = found.lock().unwrap();
    found.push(answer);
    assert!(found.iter().all(|other| *other == found[0]), "{found:?}");
}

/// What a rank may do with its memory after the first barrier of a collective.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Entered {
    /// It goes to work on all ranks' memory.
    Passed,
    /// It has its memory back: nobody is at work on it, or will be.
    Void,
    /// Neither.
    Suspended,
}

/// As the library enters a collective: a rank that has seen all flags looks once more whether one gave the call up.
fn enter(rank: &Rank, deadline: Deadline) -> Entered {
    let signals = &rank.signals;
    match rank.call(7, deadline) {
        Ok(()) if signals.given_up_meanwhile().is_none() => Entered::Passed,
        Ok(()) => Entered::Suspended,
        Err(_) => {
            signals.give_up();
            if signals.is_void() { Entered::Void } else { Entered::Suspended }
        }
    }
}

/// Rank 0 gives up at once. Nobody passes where another has its memory back, however late flags arrive.
fn one_gives_up(model: Model) {
    let passed = passed();
    LATE_STORES.set(true);
    model.explore_threads(move |group| {
        let found: Found<Entered> = Arc::default();
        let threads = group.into_iter().map(|rank| {
            let found = Arc::clone(&found);
            Box::new(move || {
                let entered = enter(&rank, if rank.rank == 0 { passed } else { NEVER });
                if entered != Entered::Suspended {
                    agree(&found, entered);
                }
                if entered == Entered::Passed {
                    rank.signals.give_up(); // wakes a peer that went to sleep before our flag arrived
                }
            }) as Thread
        });
        threads.collect()
    });
    LATE_STORES.set(false);
}

#[test]
fn nobody_passes_a_call_that_a_peer_found_void() {
    one_gives_up(TWO);
    one_gives_up(Model { looks: 2, ..TWO });
}

#[test]
fn nobody_of_three_passes_a_call_that_a_peer_found_void() {
    one_gives_up(Model { preemptions: 1, ..THREE });
}

#[test]
fn giving_up_wakes_a_sleeper_and_all_name_the_same_rank() {
    let slept = Model { preemptions: 2, ..THREE }.explore_threads(|group| {
        let found: Found<Option<usize>> = Arc::default();
        let threads = group.into_iter().map(|rank| {
            let found = Arc::clone(&found);
            Box::new(move || {
                if rank.rank == 2 {
                    match rank.call(7, NEVER) {
                        Err(Stop::OutOfStep { rank }) => agree(&found, Some(rank)),
                        other => panic!("{other:?}"),
                    }
                } else {
                    rank.signals.give_up(); // two of them, at once
                    assert_eq!(rank.signals.out_of_step(), rank.signals.decided_out_of_step());
                    agree(&found, rank.signals.out_of_step());
                }
            }) as Thread
        });
        threads.collect()
    });
    assert!(slept);
}

/// As `Group::resync` does it.
fn resync(rank: &Rank) {
    let signals = &rank.signals;
    let quiet = 2 * signals.generation() + 1;
    if signals.out_of_step().is_none() {
        signals.give_up();
    }
    assert_eq!(signals.resync_round(quiet, &mut NEVER.clone(), |_| false), Ok(()));
    signals.reset();
    assert_eq!(signals.resync_round(quiet + 1, &mut NEVER.clone(), |_| false), Ok(()));
    signals.begin_generation();
    assert_eq!(signals.out_of_step(), None);
}

#[test]
fn after_a_resync_the_next_call_carries_its_own_data() {
    // Rank 0 has reached a call that rank 1 never makes. A rank that is slow to leave the second round may find the flag of
    // the next call there already.
    let passed = passed();
    let slept = Model { preemptions: 2, ..TWO }.explore(move |rank| {
        if rank.rank == 0 {
            let alone = rank.carry(7, passed);
            assert!(
                matches!(alone, Err(Stop::GivenUp { .. } | Stop::OutOfStep { .. })),
                "{alone:?}"
            );
        }
        resync(rank);
        assert_eq!(rank.carry(8, NEVER), Ok(2));
    });
    assert!(slept);
}

#[test]
fn ranks_resync_whether_or_not_their_last_call_was_completed() {
    let passed = passed();
    Model { preemptions: 2, ..TWO }.explore_threads(move |group| {
        let found: Found<bool> = Arc::default();
        let threads = group.into_iter().map(|rank| {
            let found = Arc::clone(&found);
            Box::new(move || {
                let called = rank.call(7, if rank.rank == 0 { passed } else { NEVER });
                let signals = &rank.signals;
                if called.is_err() {
                    signals.give_up();
                }
                assert_eq!(signals.resync_round(1, &mut NEVER.clone(), |_| false), Ok(()));
                agree(&found, called.is_ok() || signals.was_completed());
                signals.reset();
                assert_eq!(signals.resync_round(2, &mut NEVER.clone(), |_| false), Ok(()));
                signals.begin_generation();
            }) as Thread
        });
        threads.collect()
    });
}

#[test]
fn ranks_that_disagree_do_not_leave_a_late_one_behind() {
    // Ranks 0 and 1 find out twice without waiting for rank 2. What they say in their third call takes the place of what
    // they said in the first.
    Model { preemptions: 1, ..THREE }.explore(|rank| {
        for _ in 0..2 {
            match (rank.rank, rank.call([7, 8, 7][rank.rank], NEVER)) {
                (1, Err(Stop::Differs { rank: 0 | 2 })) => {}
                (0 | 2, Err(Stop::Differs { rank: 1 })) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(rank.call(9, NEVER), Ok(()));
    });
}

#[test]
fn two_who_note_different_losses_agree_on_the_first() {
    let slept = Model { preemptions: 2, ..THREE }.explore_threads(|group| {
        let found: Found<Option<usize>> = Arc::default();
        let threads = group.into_iter().map(|rank| {
            let found = Arc::clone(&found);
            Box::new(move || {
                match rank.rank {
                    2 => assert_eq!(rank.watchful_barrier(), Err(Stop::Lost)),
                    other => rank.signals.poison(other),
                }
                agree(&found, rank.signals.poisoned());
            }) as Thread
        });
        threads.collect()
    });
    assert!(slept);
}

#[test]
fn losses_have_one_order_for_all() {
    THREE.explore_threads(|group| {
        let found: Found<Vec<usize>> = Arc::default();
        let seen = [&[2][..], &[1, 2], &[]];
        let threads = group.into_iter().zip(seen).map(|(rank, seen)| {
            let found = Arc::clone(&found);
            Box::new(move || {
                seen.iter().for_each(|&lost| rank.signals.note_loss(lost));
                let order: Vec<_> = rank.signals.losses().collect();
                assert!(seen.iter().all(|lost| order.contains(lost)), "{order:?}");
                let mut found = found.lock().unwrap();
                found.push(order);
                found.sort_by_key(Vec::len);
                assert!(found.windows(2).all(|pair| pair[1].starts_with(&pair[0])), "{found:?}");
            }) as Thread
        });
        threads.collect()
    });
}
