//! The suite over the fake engine, and what only that can be told to do.

use std::collections::HashSet;
use std::sync::Arc;

use symmem_sys::ucx::fake::{Fake, Network, Script};
use symmem_sys::ucx::{Endpoint, Engine, Events, Posted};

use super::recorder::{Log, Recorder, Side, Start, drive, pattern};
use super::suite;

fn over_all_scripts(check: fn(Start<'_>)) {
    let calm = Script::default();
    let wild = Script { delay: 9, reorder: true, pending: 400, ..calm };
    for (seed, script) in [(1, calm), (2, wild), (3, wild), (4, Script { inline: 100, ..wild })] {
        let network = Network::new(seed);
        network.set(script);
        let make = |events| Arc::new(network.start(events).unwrap()) as Arc<dyn Engine>;
        check(Start { make: &make, rendezvous: true });
    }
}

macro_rules! suite {
    ($($check:ident)*) => {$(
        #[test]
        fn $check() {
            over_all_scripts(suite::$check);
        }
    )*};
}

suite! {
    bodies_of_all_sizes_arrive_intact
    messages_go_both_ways_at_once
    several_threads_use_one_engine
    closing_ends_what_is_pending
    a_message_that_is_refused_is_a_failure_of_its_sender
    what_is_no_address_is_refused
    calls_that_make_no_sense_are_refused
    the_descriptor_wakes_a_sleeper
    bodies_go_straight_to_their_places
    a_body_belongs_to_the_engine_until_it_is_sent
    events_cannot_call_and_may_panic
    an_engine_ends_once_and_with_all_that_is_pending
}

/// Two engines whose own commands the test needs.
struct Two {
    network: Network,
    a: Arc<Fake>,
    b: Arc<Fake>,
    sides: [Side; 2],
    a_to_b: Endpoint,
    b_to_a: Endpoint,
}

impl Two {
    fn new(seed: u64, script: Script) -> Self {
        let network = Network::new(seed);
        network.set(script);
        let start = || {
            let events = Arc::new(Recorder::default());
            let engine = Arc::new(network.start(events.clone() as Arc<dyn Events>).unwrap());
            (engine.clone(), Side { engine, events })
        };
        let ((a, first), (b, second)) = (start(), start());
        let a_to_b = a.connect(b.address()).unwrap();
        let b_to_a = b.connect(a.address()).unwrap();
        Self { network, a, b, sides: [first, second], a_to_b, b_to_a }
    }

    fn post(&self, number: u8, bytes: usize) -> Posted {
        let body = pattern(number.into(), bytes);
        self.sides[0].post(self.a_to_b, &[number], body, number.into()).unwrap()
    }

    /// Progresses both for a while.
    fn steps(&self, count: usize) {
        for _ in 0..count {
            for side in &self.sides {
                let _ = side.engine.progress();
            }
        }
    }

    /// The headers that have come.
    fn order(&self) -> Vec<u8> {
        self.log(1).messages.iter().map(|(header, _)| header[0]).collect()
    }

    fn log(&self, side: usize) -> std::sync::MutexGuard<'_, Log> {
        self.sides[side].events.log()
    }
}

#[test]
fn messages_overtake_each_other_as_the_seed_says() {
    let order = |seed| {
        let two = Two::new(seed, Script { delay: 20, reorder: true, ..Script::default() });
        for number in 0..30 {
            two.post(number, 10);
        }
        two.steps(100);
        two.order()
    };
    let in_order: Vec<u8> = (0..30).collect();
    assert_eq!(order(5), order(5));
    let orders: HashSet<_> = (0..10).map(order).collect();
    assert!(orders.len() > 5 && !orders.contains(&in_order));
    for mut order in orders {
        order.sort_unstable();
        assert_eq!(order, in_order);
    }
}

#[test]
fn without_reordering_late_messages_hold_up_the_others() {
    let two = Two::new(6, Script { delay: 20, ..Script::default() });
    for number in 0..30 {
        two.post(number, 10);
    }
    two.steps(3);
    assert!(two.order().len() < 30);
    two.steps(100);
    assert!(two.order().into_iter().eq(0..30));
}

#[test]
fn messages_that_are_held_come_when_they_are_released() {
    let two = Two::new(7, Script::default());
    two.network.hold(&two.a, &two.b);
    two.post(1, 10);
    two.post(2, 100_000);
    two.steps(50);
    assert!(two.order().is_empty() && two.b.arm().unwrap());
    two.network.release(&two.a, &two.b);
    assert!(!two.b.arm().unwrap());
    two.steps(10);
    assert_eq!((two.order().len(), two.a.pending()), (2, 0));
}

#[test]
fn messages_get_lost_on_demand_and_by_chance() {
    let two = Two::new(8, Script::default());
    two.network.lose(&two.a, &two.b, 2);
    assert_eq!(two.post(1, 10), Posted::Sent);
    assert_eq!(two.post(2, 100_000), Posted::Pending);
    two.post(3, 10);
    two.steps(50);
    assert_eq!((two.order(), two.a.pending()), (vec![3], 1));
    two.a.close(two.a_to_b).unwrap();
    two.steps(10);
    assert_eq!(two.a.pending(), 0);

    let two = Two::new(9, Script { lost: 500, ..Script::default() });
    for number in 0..200 {
        two.post(number, 10);
    }
    two.steps(50);
    assert!((50..150).contains(&two.order().len()), "{} of 200", two.order().len());
}

#[test]
fn a_connection_fails_on_both_sides() {
    let two = Two::new(10, Script::default());
    two.network.hold(&two.a, &two.b);
    two.post(1, 100_000);
    two.network.cut(&two.a, &two.b);
    two.steps(10);
    assert_eq!(two.a.pending(), 0);
    let (token, result) = two.log(0).sent.pop().unwrap();
    assert!(token == 1 && result.unwrap_err().is_disconnected());
    for (side, endpoint) in [(0, two.a_to_b), (1, two.b_to_a)] {
        assert_eq!(two.log(side).failed.first().unwrap().0, endpoint);
        assert!(two.sides[side].post(endpoint, b"", vec![], 0).unwrap_err().is_disconnected());
    }
    two.network.release(&two.a, &two.b);
    let again = two.a.connect(two.b.address()).unwrap();
    two.sides[0].post(again, &[9], vec![], 0).unwrap();
    two.steps(10);
    assert_eq!(two.order(), [9]);
}

#[test]
fn a_process_that_dies_ends_all_that_is_pending() {
    for seed in 0..50 {
        let script = Script { delay: 5, reorder: true, pending: 300, ..Script::default() };
        let two = Two::new(seed, script);
        for number in 0..20 {
            two.post(number, if number % 3 == 0 { 100_000 } else { 10 });
            two.sides[1].post(two.b_to_a, &[number], pattern(1, 100_000), 0).unwrap();
        }
        two.steps(seed as usize % 8);
        two.network.kill(&two.b);
        assert!(two.b.progress().unwrap_err().to_string().contains("dead"));
        let [a, _] = &two.sides;
        drive("the endpoint has failed", &[a], |log| log.failed.len() == 1);
        drive("nothing is pending", &[a], |_| two.a.pending() == 0);
        let log = two.log(0);
        assert!(log.sent.iter().any(|(_, result)| result.is_err()), "seed {seed}");
        assert!(log.messages.iter().all(|(_, body)| *body == pattern(1, 100_000)));
        drop(log);
        // To be found out later, as with the real one.
        let again = two.a.connect(two.b.address()).unwrap();
        drive("that one has failed as well", &[a], |log| log.failed.len() == 2);
        assert!(a.post(again, b"", vec![], 0).unwrap_err().is_disconnected());
    }
}
