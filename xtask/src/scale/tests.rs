//! The network against closed forms, and the tables against each other.

use super::costs::{HEADER, NEAR, PACKET};
use super::network::Message;
use super::*;

/// Sends messages as it is told, and notes when the last was taken in.
struct Script(Vec<Message>);

impl Program for Script {
    fn start(&mut self, net: &mut Network) {
        self.0.iter().for_each(|message| net.send_some(*message));
    }

    fn received(&mut self, _: &mut Network, _: usize, _: Message) {}

    fn done(&mut self, _: &mut Network, _: usize, _: u64) {}
}

fn message(from: usize, to: usize, bytes: u64) -> Message {
    Message { from, to, bytes, count: 1, tag: 0 }
}

fn run(costs: Costs, (hosts, lanes): (usize, usize), messages: Vec<Message>) -> u64 {
    Network::new(costs, hosts, lanes, 1).run(&mut Script(messages))
}

/// One message of at most a packet.
fn alone(costs: Costs, bytes: u64) -> u64 {
    let wire = costs.hop + (bytes + HEADER) * costs.link;
    costs.send + costs.bytes(bytes) + wire + costs.receive + costs.bytes(bytes)
}

#[test]
fn one_message_takes_each_thing_once() {
    for bytes in [0, 8, 1000, PACKET] {
        for costs in [RDMA, TCP] {
            assert_eq!(run(costs, (2, 1), vec![message(0, 1, bytes)]), alone(costs, bytes));
        }
    }
}

#[test]
fn a_thread_looks_at_all_its_connections() {
    let looks = 2 * (MESH.look + 2 * MESH.search);
    assert_eq!(run(MESH, (2, 2), vec![message(0, 3, 8)]), alone(TCP, 8) + looks);
    // What comes while it takes in another one needs another look.
    let both = vec![message(0, 3, 8), message(1, 3, 8)];
    assert_eq!(run(MESH, (2, 2), both), alone(TCP, 8) + 2 * looks + TCP.receive + TCP.bytes(8));
}

#[test]
fn a_sender_sends_one_after_the_other() {
    let messages = (1..9).map(|to| message(0, to, 8)).collect();
    let time = run(RDMA, (9, 1), messages);
    assert_eq!(time, 7 * RDMA.send + alone(RDMA, 8));
}

#[test]
fn a_receiver_takes_in_one_after_the_other() {
    let messages = (1..9).map(|from| message(from, 0, 8)).collect();
    let time = run(RDMA, (9, 1), messages);
    assert_eq!(time, 7 * RDMA.receive + alone(RDMA, 8));
}

#[test]
fn a_link_carries_one_after_the_other() {
    let costs = Costs { send: 0, receive: 0, ..RDMA };
    let wire = (PACKET + HEADER) * costs.link;
    let into = (1..9).map(|from| message(from, 0, PACKET)).collect();
    assert_eq!(run(costs, (9, 1), into), 8 * wire + costs.hop);
    // Out of a host, whichever ranks send; both ways at once.
    let out = (0..4).map(|from| message(from, 4 + from, PACKET));
    let both = out.chain((0..4).map(|to| message(4 + to, to, PACKET))).collect();
    assert_eq!(run(costs, (2, 4), both), 4 * wire + costs.hop);
}

#[test]
fn a_long_message_is_as_fast_as_the_slowest_thing() {
    let bytes = 64 << 20;
    let rate = |costs: Costs| run(costs, (2, 1), vec![message(0, 1, bytes)]) as f64 / bytes as f64;
    assert!((80.0..81.0).contains(&rate(RDMA)));
    let slow = TCP.bytes(bytes) as f64 / bytes as f64;
    assert!((slow..1.05 * slow).contains(&rate(TCP)) && NEAR < bytes);
}

#[test]
fn leaders_beat_everybody_telling_everybody() {
    for costs in [RDMA, TCP] {
        let shape = Shape { hosts: 64, lanes: LANES };
        assert!(flat_barrier(costs, shape) > 10 * leaders_barrier(costs, shape));
    }
}

#[test]
fn every_way_takes_longer_for_more_bytes_and_no_less_than_the_link_needs() {
    for (name, run) in WAYS {
        let times =
            [8, 1 << 20, 4 << 20].map(|bytes| run(RDMA, Shape { hosts: 8, lanes: 8 }, bytes));
        assert!(times.is_sorted(), "{name}: {times:?}");
        // At least (H − 1) / H of the data comes into each host.
        assert!(times[2] > (4 << 20) * 7 / 8 * RDMA.link, "{name}: {times:?}");
    }
}

#[test]
fn figures_have_three_digits_and_a_unit() {
    assert_eq!(time_of(4_180_000), "4.18 µs");
    assert_eq!(time_of(25_000_000_000), "25.0 ms");
    assert_eq!(time_of(44_000_000_000_000), "44.0 s");
    assert_eq!(time_of(9_999_000), "10.0 µs");
    assert_eq!([8, 16 << 10, 64 << 20].map(bytes_of), ["8 B", "16 KiB", "64 MiB"]);
    assert_eq!(bytes_of(3 << 29), "1.5 GiB");
}
