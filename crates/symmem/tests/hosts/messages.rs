//! Messages between ranks of two hosts, and of one of them.

use std::time::Duration;

use symmem::World;
use symmem_testing::{Random, Ranks, messages, test_name};

use super::join;

/// The middle rank is on the host of the first one, or of the last one.
fn on_two_hosts(test: &str, dying: &[usize], body: impl Fn(World)) {
    for first in [1, 2] {
        let ranks = Ranks::new(3).dying(dying).env("FIRST", first);
        ranks.start(test, || body(join(std::env::var("FIRST").unwrap().parse().unwrap()).unwrap()));
    }
}

#[test]
fn a_death_is_told_to_those_who_wait_for_messages() {
    on_two_hosts(test_name!(), &[1], messages::a_death_is_told_to_those_who_wait);
}

#[test]
fn a_death_at_any_moment_of_messages_is_told() {
    for _ in 0..4 {
        on_two_hosts(test_name!(), &[1], |world| {
            let delay = Random::unseeded().below(60_000) as u64;
            messages::a_death_at_any_moment_is_told(world, Duration::from_micros(delay));
        });
    }
}

#[test]
fn messages_of_a_rank_that_left_arrive() {
    on_two_hosts(test_name!(), &[], messages::messages_of_a_rank_that_left_arrive);
}

#[test]
fn when_all_have_left_no_message_can_come() {
    on_two_hosts(test_name!(), &[], messages::when_all_have_left_no_message_can_come);
}

#[test]
fn a_stopped_rank_is_named_and_its_messages_go_on() {
    on_two_hosts(test_name!(), &[], messages::a_stopped_rank_is_named_and_goes_on);
}

#[test]
fn waits_for_messages_are_interrupted() {
    on_two_hosts(test_name!(), &[], messages::waits_for_messages_are_interrupted);
}

/// All that may be under way to a rank of another host, which has created the group and not used it yet.
#[test]
fn messages_to_a_rank_that_has_not_used_the_group_yet_arrive() {
    const MESSAGES: u32 = 20_000;
    Ranks::new(2).start(test_name!(), || {
        let world = join(1).unwrap();
        let group = world.subgroup(&[0, 1]).unwrap();
        if world.rank() == 0 {
            for number in 0..MESSAGES {
                group.send(&[number], 1, 0).unwrap();
            }
        }
        world.barrier().unwrap();
        if world.rank() == 1 {
            for number in 0..MESSAGES {
                let mut got = [0];
                group.recv(&mut got, 0, 0).unwrap();
                assert_eq!(got, [number]);
            }
        }
        group.barrier().unwrap();
    });
}
