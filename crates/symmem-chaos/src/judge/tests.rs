use super::*;
use crate::generate::generate;
use symmem_chaos::program::{Lane, LaneGroup, Mode, Policy, Spec};

/// Two ranks, one call, and nothing that goes wrong by plan.
fn program(faulty: bool) -> Program {
    let spec = Spec { mode: Mode::Threads, ranks: 2, seed: 1, without: Vec::new() };
    let steps = vec![Step { call: 0, op: Op::Barrier, variants: Vec::new() }];
    let round = Round { policy: Policy::Stop, limit: 50, steps, faulty };
    let lanes = vec![Lane { number: 0, place: LaneGroup::World, rounds: vec![round] }];
    Program { lanes, faults: Vec::new(), ..generate(&spec) }
}

fn call(rank: usize, enter: u64, leave: u64, outcome: Outcome) -> Event {
    Event::Call(Record {
        rank,
        lane: 0,
        call: 0,
        part: 0,
        name: "barrier".into(),
        enter: enter * MS,
        leave: leave * MS,
        starved: 0,
        limit: 50 * MS,
        members: vec![0, 1],
        outcome,
    })
}

fn timeout(rank: usize, after: u64) -> Outcome {
    let (kind, text) = (Kind::Timeout, String::new());
    Outcome::Err { kind, ranks: vec![rank], after: Some(after * MS), text }
}

fn classes(faulty: bool, events: &[Event]) -> Vec<String> {
    let report = judge(&program(faulty), events);
    report.violations.into_iter().map(|v| v.class).collect()
}

#[test]
fn ranks_that_all_come_may_succeed() {
    let events = [call(0, 10, 30, Outcome::Ok), call(1, 20, 30, Outcome::Ok)];
    assert_eq!(classes(false, &events), Vec::<String>::new());
}

#[test]
fn success_without_a_rank_is_a_lie() {
    assert_eq!(classes(true, &[call(0, 10, 30, Outcome::Ok)]), ["ok without a rank"]);
    let events = [call(0, 10, 30, Outcome::Ok), call(1, 40, 50, Outcome::Ok)];
    assert_eq!(classes(true, &events), ["ok without a rank"]);
}

#[test]
fn a_rank_that_is_late_may_be_blamed_and_one_that_had_come_may_not() {
    let late = [call(0, 10, 60, timeout(1, 50)), call(1, 100, 150, timeout(0, 50))];
    assert_eq!(classes(true, &late), Vec::<String>::new());
    let there = [call(0, 10, 60, timeout(1, 50)), call(1, 12, 62, timeout(0, 50))];
    assert_eq!(classes(true, &there), ["a timeout blames a rank that had come to barrier"]);
}

/// Ranks 1 and 2 have come to a call, and rank 2 came last.
#[test]
fn a_later_step_begins_when_the_last_rank_has_come() {
    let blamed = |name: &str, last: u64| {
        let three = |event: Event| match named(event, name) {
            Event::Call(record) => Event::Call(Record { members: vec![0, 1, 2], ..record }),
            other => other,
        };
        let calls = [
            call(0, 100, 200, timeout(1, 100)),
            call(1, 102, 202, timeout(2, 100)),
            call(2, last, last + 100, timeout(1, 100)),
        ];
        let found = classes(true, &calls.map(three));
        found.iter().any(|class| class.contains("had come"))
    };
    assert!(!blamed("rendezvous[u8,1]", 150));
    assert!(blamed("rendezvous[u8,1]", 130), "there was time");
    assert!(blamed("rendezvous[u8,1]", 210), "rank 2 was missing, and not rank 1");
    assert!(!blamed("all_gather[u8,1]", 190));
    assert!(blamed("all_gather[u8,1]", 150), "there was time");
    assert!(blamed("share@1", 190), "it has one step");
}

fn named(event: Event, name: &str) -> Event {
    match event {
        Event::Call(record) => Event::Call(Record { name: name.into(), ..record }),
        other => other,
    }
}

#[test]
fn a_sum_that_was_given_up_ends_all_calls() {
    let named = |event| named(event, "all_reduce[u8,1,sum]");
    let told =
        Outcome::Err { kind: Kind::OutOfStep, ranks: vec![0], after: None, text: String::new() };
    let first = named(call(0, 10, 60, timeout(1, 50)));
    let events = [first.clone(), named(call(1, 100, 101, told.clone()))];
    assert_eq!(classes(true, &events), Vec::<String>::new());
    let events = [first, named(call(1, 100, 150, timeout(0, 50)))];
    assert_eq!(classes(true, &events), ["not told that the group is out of step"]);
    let events = [call(0, 100, 150, timeout(1, 50)), named(call(1, 10, 11, told))];
    assert_eq!(classes(true, &events), ["out of step by nobody"]);
}

#[test]
fn an_error_needs_a_reason_and_its_time() {
    let early = [call(0, 10, 30, timeout(1, 20)), call(1, 100, 110, timeout(0, 50))];
    assert_eq!(classes(true, &early), ["a timeout before its time"]);
    let quiet = [call(0, 10, 60, timeout(1, 50)), call(1, 100, 150, timeout(0, 50))];
    assert_eq!(classes(false, &quiet), ["Timeout where nothing went wrong"]);
    let slow = [call(0, 10, 400, timeout(1, 390)), call(1, 500, 550, timeout(0, 50))];
    assert_eq!(classes(true, &slow), ["deadline missed in barrier"]);
}

#[test]
fn a_rank_that_lives_is_not_lost() {
    let lost =
        Outcome::Err { kind: Kind::PeerLost, ranks: vec![1], after: None, text: String::new() };
    let events = [call(0, 10, 20, lost.clone()), call(1, 30, 80, timeout(0, 50))];
    assert_eq!(classes(true, &events), ["a living rank is said to be lost"]);
    let events = [call(0, 10, 20, lost), Event::Killed { rank: 1, at: 5 * MS }];
    assert_eq!(classes(true, &events), Vec::<String>::new());
}

#[test]
fn what_peers_offer_is_no_leak_while_they_wait() {
    let text = "left over: 1 descriptors of memory, although all is dropped but the world";
    let left_over = Event::Fault { rank: 0, text: text.into() };
    let shrink = |event| named(event, "shrink");
    let never_formed = Outcome::Err {
        kind: Kind::PeerLost,
        ranks: vec![2],
        after: None,
        text: "subgroup: rank 2 is gone".into(),
    };
    let killed = Event::Killed { rank: 2, at: MS };
    let refused = shrink(call(0, 10, 11, never_formed));
    let left = Event::Left { rank: 0, at: 30 * MS };
    let awaited = |until| {
        let waits = shrink(call(1, 10, until, Outcome::Ok));
        classes(true, &[killed.clone(), refused.clone(), waits, left.clone(), left_over.clone()])
    };
    assert_eq!(awaited(31), Vec::<String>::new());
    assert_eq!(awaited(29), ["left over"]);
}

/// Rank 1 is through with a thread whose group it has never formed.
#[test]
fn a_group_that_was_dropped_before_it_was_formed_is_lost_to_the_others() {
    let lost = |text: &str| Outcome::Err {
        kind: Kind::PeerLost,
        ranks: vec![1],
        after: None,
        text: text.into(),
    };
    let gave_up = |text: &str| Outcome::Err {
        kind: Kind::Timeout,
        ranks: vec![0],
        after: Some(50 * MS),
        text: text.into(),
    };
    let told = |theirs: Outcome, end: u64| {
        let dropped = lost("barrier: rank 1 is gone: it dropped the group before using it");
        let events = [call(0, 55, end, dropped), call(1, 10, 60, theirs)];
        classes(true, &events)
    };
    let class = ["a living rank is said to be lost"];
    assert_eq!(told(gave_up("subgroup: no answer from rank 0"), 61), Vec::<String>::new());
    assert_eq!(told(gave_up("subgroup: no answer from rank 0"), 59), class, "it was in it");
    assert_eq!(told(gave_up("barrier: no answer from rank 0"), 61), class, "it had formed it");
}

#[test]
fn whoever_is_killed_in_a_call_may_have_given_it_up() {
    let told = |killed_at: u64| {
        let out = Outcome::Err {
            kind: Kind::OutOfStep,
            ranks: vec![1],
            after: None,
            text: String::new(),
        };
        let open = Event::Killed { rank: 1, at: killed_at * MS };
        let events = [call(0, 10, killed_at, out), call(1, 12, 0, Outcome::Open), open];
        classes(true, &events.map(|event| named(event, "all_reduce[u8,1,sum]")))
    };
    assert_eq!(told(63), Vec::<String>::new());
    assert_eq!(told(40), ["out of step by nobody"]);
}

/// Rank 0 comes to the smaller group in one step, rank 1 in two.
#[test]
fn calls_after_a_loss_are_known_by_the_members_of_their_group() {
    let part = |event: Event, part: usize, members: &[usize]| match event {
        Event::Call(r) => Event::Call(Record { part, members: members.to_vec(), ..r }),
        other => other,
    };
    let ok = |rank, at, members: &[usize]| part(call(rank, 20, 30, Outcome::Ok), at, members);
    let events = [ok(0, 92, &[0, 1]), ok(1, 94, &[0, 1])];
    assert_eq!(classes(true, &events), Vec::<String>::new());
    let events = [ok(0, 92, &[0, 1, 2]), ok(1, 94, &[0, 1])];
    assert_eq!(classes(true, &events), ["ok without a rank"]);
}

/// Rank 0 has shrunk its group twice to come to the one of both, rank 1 once.
#[test]
fn who_gave_up_is_found_whatever_way_it_came_to_the_group() {
    let shrunk = |rank, enter, members: &[usize]| match call(rank, enter, enter + 1, Outcome::Ok) {
        Event::Call(r) => {
            let (name, members) = ("shrink".into(), members.to_vec());
            Event::Call(Record { part: 91, name, members, ..r })
        }
        other => other,
    };
    let told = |blamed| {
        let kind = Kind::OutOfStep;
        let out = Outcome::Err { kind, ranks: vec![blamed], after: None, text: String::new() };
        let events = [
            shrunk(0, 1, &[0, 1, 2, 3]),
            shrunk(0, 3, &[0, 1, 2]),
            shrunk(1, 1, &[0, 1, 2, 3]),
            named(call(1, 10, 60, timeout(0, 50)), "all_reduce[u8,1,sum]"),
            named(call(0, 100, 101, out), "all_reduce[u8,1,sum]"),
        ];
        classes(true, &events)
    };
    assert_eq!(told(1), Vec::<String>::new());
    assert_eq!(told(2), ["out of step by nobody"]);
}

#[test]
fn a_message_needs_a_sender_and_counts_once_it_is_sent() {
    let sent = |outcome| named(call(1, 10, 20, outcome), "send>0");
    let received = |until, outcome| named(call(0, 10, until, outcome), "recv<1");
    assert_eq!(classes(true, &[received(30, Outcome::Ok)]), ["a message that nobody has sent"]);
    assert_eq!(
        classes(true, &[sent(Outcome::Ok), received(30, Outcome::Ok)]),
        Vec::<String>::new()
    );
    let late = [sent(Outcome::Ok), received(110, timeout(1, 50))];
    assert_eq!(classes(true, &late), ["a timeout blames a rank that had sent"]);
    let never = [sent(timeout(0, 10)), received(110, timeout(1, 50))];
    assert_eq!(classes(true, &never), ["a timeout before its time"]); // of the sender
}

#[test]
fn a_ring_is_no_leak_until_its_rank_has_looked() {
    let text = "left over: 1 descriptors of memory, although all is dropped but the world";
    let left_over = Event::Fault { rank: 0, text: text.into() };
    let sent = named(call(1, 10, 20, Outcome::Ok), "send>0");
    assert_eq!(classes(true, &[sent.clone(), left_over.clone()]), Vec::<String>::new());
    let looked = named(call(0, 30, 40, Outcome::Ok), "recv<1");
    assert_eq!(classes(true, &[sent, looked, left_over]), ["left over"]);
}
