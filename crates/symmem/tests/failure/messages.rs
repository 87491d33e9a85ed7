//! Messages between ranks of one host.

use std::time::Duration;

use symmem_testing::{Random, Ranks, messages, test_name};

#[test]
fn a_death_is_told_to_those_who_wait_for_messages() {
    let ranks = Ranks::new(3).dying(&[1]);
    ranks.run(test_name!(), messages::a_death_is_told_to_those_who_wait);
}

#[test]
fn a_death_at_any_moment_of_messages_is_told() {
    let mut random = Random::unseeded();
    for round in 0..10 {
        let delay = random.below(60_000);
        println!("round {round}: after {delay} µs");
        Ranks::new(3).dying(&[1]).env("DEATH", delay).run(test_name!(), |world| {
            let delay = std::env::var("DEATH").unwrap().parse().unwrap();
            messages::a_death_at_any_moment_is_told(world, Duration::from_micros(delay));
        });
    }
}

#[test]
fn messages_of_a_rank_that_left_arrive() {
    Ranks::new(3).run(test_name!(), messages::messages_of_a_rank_that_left_arrive);
}

#[test]
fn when_all_have_left_no_message_can_come() {
    Ranks::new(3).run(test_name!(), messages::when_all_have_left_no_message_can_come);
}

#[test]
fn a_stopped_rank_is_named_and_its_messages_go_on() {
    Ranks::new(3).run(test_name!(), messages::a_stopped_rank_is_named_and_goes_on);
}

#[test]
fn waits_for_messages_are_interrupted() {
    Ranks::new(3).run(test_name!(), messages::waits_for_messages_are_interrupted);
}

/// Rank 1 has created the group, so rank 0 can send it a message, and with the first one the memory for all.
#[test]
fn messages_to_a_group_that_is_never_used_are_not_kept() {
    Ranks::new(2).run(test_name!(), |world| {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        for first in [0, 1].repeat(30) {
            let group = world.subgroup(&[0, 1]).unwrap();
            if world.rank() == first {
                group.send(&[1_u8; 100], 1 - first, 0).unwrap();
            }
            world.barrier().unwrap();
            drop(group);
            world.barrier().unwrap();
        }
        let kept = descriptors().saturating_sub(before);
        assert!(kept < 20, "{kept} descriptors are left");
    });
}
