//! Hosts, their links, and the threads of their ranks, moved on by events in the order of their times.
//!
//! A message passes four things, each of which has one at a time: the sender's thread, the link out of its host, the link into
//! the other host, and the receiver's thread. A long message passes them in packets, one thing while another has the next.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::costs::{Costs, HEADER, PACKET};

/// What ranks do: called when something has happened to one of them.
pub(super) trait Program {
    fn start(&mut self, net: &mut Network);
    /// `rank` has taken in a message.
    fn received(&mut self, net: &mut Network, rank: usize, message: Message);
    /// The work of `rank` with this tag is done, or all ranks of its host have reached the barrier with this tag.
    fn done(&mut self, net: &mut Network, rank: usize, tag: u64);
}

/// `count` messages of the same sender to the same receiver, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) from: usize,
    pub(super) to: usize,
    /// Data of all of them.
    pub(super) bytes: u64,
    pub(super) count: u64,
    pub(super) tag: u64,
}

/// What a thread has to do.
enum Job {
    Send(Message),
    Work(u64, u64),
}

#[derive(Clone, Copy)]
enum Event {
    /// A thread is done with what it did, or has something to do.
    Step(usize),
    /// The first of a message has come to the link out of its host; when the last does.
    Out(Message, u64),
    /// To the link into the other host.
    In(Message, u64),
    /// It is there.
    There(Message),
    /// All ranks of a host have arrived.
    HostBarrier(usize, u64),
}

/// One thread of a rank.
#[derive(Default)]
struct Thread {
    jobs: VecDeque<Job>,
    inbox: VecDeque<Message>,
    doing: Option<Doing>,
    /// An event for its next step is queued.
    is_up: bool,
    /// Messages that it found at its last look and has not taken in.
    found: usize,
}

enum Doing {
    Receive(Message),
    Work(u64),
    Other,
}

pub(super) struct Network {
    pub(super) costs: Costs,
    pub(super) hosts: usize,
    /// Simulated ranks of a host, and how many real ones each stands for, which all do the same.
    pub(super) lanes: usize,
    pub(super) weight: usize,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Events by their place; free places are used again.
    slots: Vec<Event>,
    free: Vec<usize>,
    sequence: u64,
    /// Until when each link is in use, out of and into each host.
    out: Vec<u64>,
    into: Vec<u64>,
    /// One for each rank.
    threads: Vec<Thread>,
    /// By host: the barriers that its ranks have reached, by tag, and how many ranks have.
    arrived: Vec<Vec<(u64, usize)>>,
    pub(super) messages: u64,
}

impl Network {
    pub(super) fn new(costs: Costs, hosts: usize, lanes: usize, weight: usize) -> Self {
        let threads = (0..hosts * lanes).map(|_| Thread::default()).collect();
        Self {
            costs,
            hosts,
            lanes,
            weight,
            now: 0,
            events: BinaryHeap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            sequence: 0,
            out: vec![0; hosts],
            into: vec![0; hosts],
            threads,
            arrived: vec![Vec::new(); hosts],
            messages: 0,
        }
    }

    /// Runs a program to its end. The time of its last event.
    pub(super) fn run(&mut self, program: &mut impl Program) -> u64 {
        program.start(self);
        while let Some(Reverse((time, _, slot))) = self.events.pop() {
            self.now = time;
            let event = self.slots[slot];
            self.free.push(slot);
            match event {
                Event::Step(thread) => self.step(program, thread),
                Event::Out(message, last) => self.pass_out(message, last),
                Event::In(message, last) => self.pass_in(message, last),
                Event::There(message) => self.arrive(message),
                Event::HostBarrier(rank, tag) => program.done(self, rank, tag),
            }
        }
        self.now
    }

    pub(super) fn ranks(&self) -> usize {
        self.hosts * self.lanes
    }

    /// How many ranks there are of those that the simulated ones stand for.
    pub(super) fn real_ranks(&self) -> u64 {
        (self.ranks() * self.weight) as u64
    }

    pub(super) fn real_lanes(&self) -> u64 {
        (self.lanes * self.weight) as u64
    }

    pub(super) fn host(&self, rank: usize) -> usize {
        rank / self.lanes
    }

    pub(super) fn lane(&self, rank: usize) -> usize {
        rank % self.lanes
    }

    pub(super) fn rank(&self, host: usize, lane: usize) -> usize {
        host * self.lanes + lane
    }

    /// Has a rank send, when it is done with what it was told before.
    pub(super) fn send(&mut self, from: usize, to: usize, bytes: u64, tag: u64) {
        self.send_some(Message { from, to, bytes, count: 1, tag });
    }

    pub(super) fn send_some(&mut self, message: Message) {
        self.messages += message.count * self.weight as u64;
        self.threads[message.from].jobs.push_back(Job::Send(message));
        self.call(message.from);
    }

    /// Has a rank work for a while, and tells it when that is done.
    pub(super) fn work(&mut self, rank: usize, time: u64, tag: u64) {
        self.threads[rank].jobs.push_back(Job::Work(time, tag));
        self.call(rank);
    }

    /// A rank reaches a barrier of its host. Each rank is told when all have reached it.
    pub(super) fn host_barrier(&mut self, rank: usize, tag: u64) {
        let (host, lanes) = (self.host(rank), self.lanes);
        let arrived = &mut self.arrived[host];
        let place = arrived.iter().position(|(of, _)| *of == tag).unwrap_or_else(|| {
            arrived.push((tag, 0));
            arrived.len() - 1
        });
        arrived[place].1 += 1;
        if arrived[place].1 == lanes {
            arrived.swap_remove(place);
            let then = self.now + self.costs.host_barrier(self.real_lanes());
            (0..lanes)
                .for_each(|lane| self.push(then, Event::HostBarrier(host * lanes + lane, tag)));
        }
    }

    fn push(&mut self, time: u64, event: Event) {
        let slot = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(slot) {
            Some(place) => *place = event,
            None => self.slots.push(event),
        }
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, slot)));
    }

    /// Queues a thread's next step, unless one is queued.
    fn call(&mut self, thread: usize) {
        if !self.threads[thread].is_up {
            self.threads[thread].is_up = true;
            self.push(self.now, Event::Step(thread));
        }
    }

    /// A thread is done with what it did, and does the next.
    fn step(&mut self, program: &mut impl Program, rank: usize) {
        match self.threads[rank].doing.take() {
            Some(Doing::Receive(message)) => program.received(self, rank, message),
            Some(Doing::Work(tag)) => program.done(self, rank, tag),
            Some(Doing::Other) | None => {}
        }
        let costs = self.costs;
        let thread = &mut self.threads[rank];
        if let Some(job) = thread.jobs.pop_front() {
            let (time, doing) = match job {
                Job::Work(time, tag) => (time, Doing::Work(tag)),
                Job::Send(message) => (self.launch(message), Doing::Other),
            };
            self.threads[rank].doing = Some(doing);
            return self.push(self.now + time, Event::Step(rank));
        }
        if thread.found == 0 && !thread.inbox.is_empty() {
            thread.found = thread.inbox.len();
            if costs.look > 0 {
                // It looks at all connections, and then takes in what it has found.
                thread.doing = Some(Doing::Other);
                let ranks = self.real_ranks();
                let time = costs.looks(ranks - self.real_lanes(), ranks);
                return self.push(self.now + time, Event::Step(rank));
            }
        }
        if let Some(message) = thread.inbox.pop_front() {
            thread.found = thread.found.saturating_sub(1);
            thread.doing = Some(Doing::Receive(message));
            let time = message.count * costs.receive + costs.bytes(message.bytes);
            return self.push(self.now + time, Event::Step(rank));
        }
        thread.is_up = false;
    }

    /// A thread sends: how long that takes it.
    fn launch(&mut self, message: Message) -> u64 {
        let costs = self.costs;
        let first = costs.send + costs.bytes(message.bytes.min(PACKET));
        let all = message.count * costs.send + costs.bytes(message.bytes);
        self.push(self.now + first, Event::Out(message, self.now + all));
        all
    }

    /// Bytes of a message on a link, with those of the ranks that do the same.
    fn on_link(&self, message: &Message) -> u64 {
        (message.bytes + message.count * HEADER) * self.weight as u64 * self.costs.link
    }

    /// Time of the last packet on a link.
    fn last_packet(&self, message: &Message) -> u64 {
        (message.bytes.min(PACKET) + HEADER) * self.costs.link
    }

    fn pass_out(&mut self, message: Message, last: u64) {
        let host = self.host(message.from);
        let begin = self.now.max(self.out[host]);
        let end = (begin + self.on_link(&message)).max(last + self.last_packet(&message));
        self.out[host] = end;
        self.push(begin + self.costs.hop, Event::In(message, end + self.costs.hop));
    }

    fn pass_in(&mut self, message: Message, last: u64) {
        let host = self.host(message.to);
        let begin = self.now.max(self.into[host]);
        let end = (begin + self.on_link(&message)).max(last);
        self.into[host] = end;
        // The receiver takes in what has come while the rest comes; it is done with all of it some time after the last.
        let ahead = self.costs.bytes(message.bytes) - self.costs.bytes(message.bytes.min(PACKET));
        let first = begin + self.last_packet(&message);
        self.push(end.saturating_sub(ahead).max(first), Event::There(message));
    }

    fn arrive(&mut self, message: Message) {
        self.threads[message.to].inbox.push_back(message);
        self.call(message.to);
    }
}
