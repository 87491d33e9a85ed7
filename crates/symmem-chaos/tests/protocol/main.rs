//! An abstract model of how ranks number their calls, abandon them and resynchronise, explored in full by a model checker.
//!
//! The real protocol runs under loom (`crates/symmem/tests/loom.rs`), which knows about memory orderings but reaches only few
//! calls. This model knows nothing of orderings: every write is one step, and steps of all ranks interleave in every way. It
//! reaches several calls, timeouts at any wait, ranks that disagree, die, or stop for good. Each rule of the protocol is a
//! switch, and for each there is a test that the checker finds the flaw when the rule is left out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod model;

use model::{Budget, Protocol, Rules};
use stateright::{Checker, Model};

/// All rules, and a model that has to keep every promise.
fn holds(budget: Budget) {
    let checker = Protocol { rules: Rules::ALL, budget }.checker().threads(2).spawn_bfs().join();
    println!("{} states, {budget:?}", checker.unique_state_count());
    checker.assert_properties();
}

/// The promises that a model breaks, with the shortest way to each.
fn broken(rules: Rules, budget: Budget) -> Vec<&'static str> {
    let checker = Protocol { rules, budget }.checker().threads(2).spawn_bfs().join();
    let found = checker.discoveries();
    for (name, path) in &found {
        println!("--- {name}, after {} steps:", path.clone().into_actions().len());
        for action in path.clone().into_actions() {
            println!("  {action:?}");
        }
    }
    found.into_keys().collect()
}

fn finds(promise: &str, rules: Rules, budget: Budget) {
    let broken = broken(rules, budget);
    assert!(broken.contains(&promise), "broken: {broken:?}");
}

const NOTHING: Budget =
    Budget { timeouts: 0, differ: 0, deaths: 0, stops: 0, resyncs: 0, calls: 3 };

#[test]
fn calls_that_agree_and_wait_long_enough_all_succeed() {
    holds(NOTHING);
}

#[test]
fn a_call_that_is_abandoned_brings_all_ranks_to_resynchronise() {
    holds(Budget { timeouts: 1, calls: 2, ..NOTHING });
}

#[test]
fn two_calls_that_are_abandoned_at_once_bring_all_ranks_to_resynchronise() {
    holds(Budget { timeouts: 2, calls: 1, ..NOTHING });
}

#[test]
fn ranks_that_disagree_all_find_out() {
    holds(Budget { differ: 2, calls: 3, ..NOTHING });
}

#[test]
fn ranks_that_disagree_and_time_out_all_find_out() {
    holds(Budget { differ: 1, timeouts: 1, calls: 2, ..NOTHING });
}

#[test]
fn a_rank_that_dies_ends_every_wait() {
    holds(Budget { deaths: 1, timeouts: 1, calls: 1, ..NOTHING });
}

#[test]
fn a_rank_that_stops_for_good_is_the_one_that_is_blamed() {
    holds(Budget { stops: 1, timeouts: 1, calls: 1, ..NOTHING });
}

#[test]
fn a_rank_that_resynchronises_of_its_own_accord_brings_the_others_along() {
    holds(Budget { resyncs: 1, calls: 2, ..NOTHING });
    holds(Budget { resyncs: 1, timeouts: 1, calls: 1, ..NOTHING });
}

#[test]
#[ignore = "long: minutes and gigabytes"]
fn larger_models_hold_too() {
    holds(Budget { timeouts: 2, calls: 2, ..NOTHING });
    holds(Budget { stops: 1, timeouts: 2, calls: 1, ..NOTHING });
    holds(Budget { resyncs: 1, timeouts: 1, calls: 2, ..NOTHING });
    holds(Budget { timeouts: 2, differ: 1, calls: 2, ..NOTHING });
    holds(Budget { timeouts: 1, differ: 2, calls: 3, ..NOTHING });
    holds(Budget { deaths: 1, timeouts: 1, calls: 2, ..NOTHING });
    holds(Budget { stops: 1, timeouts: 2, calls: 2, ..NOTHING });
}

#[test]
fn without_a_second_count_a_rank_resets_to_a_number_that_another_has_moved() {
    let rules = Rules { second_count: false, ..Rules::ALL };
    finds("in step", rules, Budget { timeouts: 1, calls: 2, ..NOTHING });
}

#[test]
fn without_its_number_a_call_pairs_with_one_two_later() {
    let rules = Rules { numbered_words: false, ..Rules::ALL };
    finds("ok means the same call", rules, Budget { differ: 2, calls: 3, ..NOTHING });
}

#[test]
fn without_asking_first_who_abandoned_the_call_a_refused_rank_is_blamed() {
    let rules = Rules { ask_before_blame: false, ..Rules::ALL };
    finds("blame", rules, Budget { timeouts: 2, calls: 1, ..NOTHING });
}

#[test]
fn without_a_last_look_a_timeout_names_nobody() {
    let rules = Rules { last_look: false, ..Rules::ALL };
    finds("blame", rules, Budget { timeouts: 1, calls: 1, ..NOTHING });
}

#[test]
fn without_passing_it_on_a_stopped_rank_keeps_the_news_to_itself() {
    let rules = Rules { pass_it_on: false, ..Rules::ALL };
    finds("prompt", rules, Budget { timeouts: 1, stops: 1, calls: 1, ..NOTHING });
}

#[test]
fn without_going_on_with_the_same_resynchronisation_ranks_wait_for_different_ones() {
    let rules = Rules { resume_resync: false, ..Rules::ALL };
    finds("progress", rules, Budget { timeouts: 2, calls: 1, ..NOTHING });
}

#[test]
fn without_telling_them_a_resynchronisation_waits_for_ranks_that_wait_for_it() {
    let rules = Rules { resync_tells: false, ..Rules::ALL };
    finds("progress", rules, Budget { resyncs: 1, calls: 1, ..NOTHING });
}
