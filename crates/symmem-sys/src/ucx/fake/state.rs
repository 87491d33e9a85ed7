//! What processes of a network have, and what happens between them.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Script;
use crate::ucx::engine::{Body, Endpoint, Posted, ReceiveBuffer};
use crate::ucx::{Failure, Result};

/// A network.
pub(super) struct State {
    pub script: Script,
    /// Pairs whose messages stay on their way.
    pub held: HashSet<(usize, usize)>,
    /// How many of the next messages of a pair get lost.
    pub losing: HashMap<(usize, usize), u32>,
    processes: Vec<Process>,
    /// Numbers everything that happens, in order.
    last: u64,
    chance: u64,
}

/// A process.
pub(super) struct Process {
    bell: Arc<OwnedFd>,
    /// Why it can do nothing more.
    ended: Option<&'static str>,
    /// Calls of `progress`.
    step: u64,
    links: Vec<Link>,
    inbox: Vec<Parcel>,
    outcomes: Vec<Outcome>,
    /// Posted messages that are pending, by their numbers.
    sending: HashMap<u64, Sending>,
    receiving: Vec<Receiving>,
}

/// An endpoint.
struct Link {
    peer: usize,
    /// Why it cannot be used any more.
    ended: Option<Failure>,
}

struct Sending {
    link: usize,
    token: u64,
    body: Arc<Body>,
}

/// A message on its way.
pub(super) struct Parcel {
    pub number: u64,
    pub from: usize,
    due: u64,
    pub header: Vec<u8>,
    pub content: Content,
}

/// The body of a message on its way.
pub(super) enum Content {
    /// A copy.
    Inline(Vec<u8>),
    /// The sender's.
    Rendezvous(Arc<Body>),
}

/// What is to be told to whom it concerns.
struct Outcome {
    number: u64,
    due: u64,
    event: Event,
}

/// A body that is being received.
pub(super) struct Receiving {
    number: u64,
    /// The number of its message.
    parcel: u64,
    from: usize,
    due: u64,
    pub token: u64,
    pub buffer: ReceiveBuffer,
    body: Arc<Body>,
}

/// What an engine is to tell.
pub(super) enum Event {
    Message(Parcel),
    Sent { token: u64, result: Result<()>, body: Arc<Body> },
    Received { token: u64, buffer: ReceiveBuffer, result: Result<()> },
    Failed { endpoint: Endpoint, failure: Failure },
}

impl Process {
    pub(super) fn new(bell: Arc<OwnedFd>) -> Self {
        Self {
            bell,
            ended: None,
            step: 0,
            links: Vec::new(),
            inbox: Vec::new(),
            outcomes: Vec::new(),
            sending: HashMap::new(),
            receiving: Vec::new(),
        }
    }
}

impl State {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            script: Script::default(),
            held: HashSet::new(),
            losing: HashMap::new(),
            processes: Vec::new(),
            last: 0,
            chance: seed,
        }
    }

    pub(super) fn add(&mut self, process: Process) -> usize {
        self.processes.push(process);
        self.processes.len() - 1
    }

    pub(super) fn exists(&self, process: usize) -> bool {
        process < self.processes.len()
    }

    pub(super) fn usable(&self, process: usize, call: &'static str) -> Result<()> {
        match self.processes[process].ended {
            Some(why) => Err(Failure::refused(call, why)),
            None => Ok(()),
        }
    }

    pub(super) fn connect(&mut self, from: usize, peer: usize) -> Endpoint {
        let endpoint = Endpoint(self.processes[from].links.len());
        self.processes[from].links.push(Link { peer, ended: None });
        if self.processes[peer].ended.is_some() {
            self.disconnect(from, peer, Failure::UNREACHABLE);
        }
        endpoint
    }

    pub(super) fn post(
        &mut self,
        from: usize,
        to: Endpoint,
        header: &[u8],
        body: &Arc<Body>,
        token: u64,
    ) -> Result<Posted> {
        let link = self.processes[from].links.get(to.0).ok_or_else(unknown)?;
        if let Some(failure) = &link.ended {
            return Err(Failure { call: "post", ..failure.clone() });
        }
        let peer = link.peer;
        let number = self.number();
        let inline = body.len() <= self.script.inline;
        let slow = self.happens(self.script.pending);
        if !self.gets_lost(from, peer) {
            let content = if inline {
                Content::Inline(body.to_vec())
            } else {
                Content::Rendezvous(Arc::clone(body))
            };
            let due = self.processes[peer].step + self.up_to(self.script.delay);
            let header = header.to_vec();
            self.processes[peer].inbox.push(Parcel { number, from, due, header, content });
            self.ring(peer);
        }
        if inline && !slow {
            return Ok(Posted::Sent);
        }
        let sending = Sending { link: to.0, token, body: Arc::clone(body) };
        self.processes[from].sending.insert(number, sending);
        if inline {
            self.finish(from, number, Ok(()));
        }
        Ok(Posted::Pending)
    }

    /// A pending message is sent, or will not be; whether it was still pending.
    pub(super) fn finish(&mut self, process: usize, number: u64, result: Result<()>) -> bool {
        let Some(sending) = self.processes[process].sending.remove(&number) else { return false };
        let Sending { token, body, .. } = sending;
        self.later(process, Event::Sent { token, result, body });
        true
    }

    /// Begins to receive a body.
    pub(super) fn receive(
        &mut self,
        process: usize,
        parcel: Parcel,
        token: u64,
        buffer: ReceiveBuffer,
    ) {
        let Content::Rendezvous(body) = parcel.content else { return };
        let due = self.processes[process].step + 1 + self.up_to(self.script.delay);
        let number = self.number();
        let (from, parcel) = (parcel.from, parcel.number);
        let receiving = Receiving { number, parcel, from, due, token, buffer, body };
        self.processes[process].receiving.push(receiving);
        self.ring(process);
    }

    pub(super) fn close(&mut self, process: usize, endpoint: Endpoint) -> Result<()> {
        let link = self.processes[process].links.get_mut(endpoint.0).ok_or_else(unknown)?;
        if link.ended.is_none() {
            let text = "the endpoint is closed".to_owned();
            link.ended = Some(Failure { call: "post", status: Some(Failure::CANCELED), text });
            self.give_up(process, endpoint.0, Failure::CANCELED);
        }
        Ok(())
    }

    pub(super) fn close_all(&mut self, process: usize) {
        for link in 0..self.processes[process].links.len() {
            // Each of them is there.
            let _ = self.close(process, Endpoint(link));
        }
    }

    /// The connection fails, on the side of `process`.
    pub(super) fn disconnect(&mut self, process: usize, peer: usize, status: i8) {
        for link in 0..self.processes[process].links.len() {
            let failure = Failure::of("connection", status);
            let slot = &mut self.processes[process].links[link];
            if slot.peer == peer && slot.ended.is_none() {
                slot.ended = Some(failure.clone());
                self.later(process, Event::Failed { endpoint: Endpoint(link), failure });
                self.give_up(process, link, status);
            }
        }
    }

    /// The process is no more, and all that it has is forgotten.
    pub(super) fn kill(&mut self, process: usize, why: &'static str) {
        self.end(process, why);
        let own = &mut self.processes[process];
        own.sending.clear();
        own.receiving.clear();
        own.outcomes.clear();
        own.inbox.clear();
        for peer in 0..self.processes.len() {
            self.forget(peer, process);
            self.disconnect(peer, process, Failure::CONNECTION_RESET);
        }
    }

    /// Calls of this process's engine are failures from now on.
    pub(super) fn end(&mut self, process: usize, why: &'static str) {
        self.processes[process].ended.get_or_insert(why);
    }

    pub(super) fn tick(&mut self, process: usize) {
        self.processes[process].step += 1;
    }

    pub(super) fn pending(&self, process: usize) -> usize {
        let own = &self.processes[process];
        let sent = |outcome: &&Outcome| matches!(outcome.event, Event::Sent { .. });
        own.sending.len() + own.receiving.len() + own.outcomes.iter().filter(sent).count()
    }

    /// Whether `progress` finds anything, at once or after some calls.
    pub(super) fn has_work(&self, process: usize) -> bool {
        let own = &self.processes[process];
        let moves = |parcel: &Parcel| !self.held.contains(&(parcel.from, process));
        !own.outcomes.is_empty() || !own.receiving.is_empty() || own.inbox.iter().any(moves)
    }

    /// Makes the descriptor readable.
    pub(super) fn ring(&self, process: usize) {
        // A counter that is full is readable as well.
        let _ = rustix::io::write(&self.processes[process].bell, &1_u64.to_ne_bytes());
    }

    /// What the process is to tell next.
    pub(super) fn next(&mut self, process: usize) -> Option<Event> {
        let own = &self.processes[process];
        let due = |due: u64| due <= own.step;
        let outcomes = own.outcomes.iter().filter(|o| due(o.due)).map(|o| o.number);
        let receiving = own.receiving.iter().filter(|r| due(r.due)).map(|r| r.number);
        // Without reordering, one waits for those that the same process has sent before.
        let first = |parcel: &Parcel| {
            let mut others = own.inbox.iter().filter(|other| other.from == parcel.from);
            self.script.reorder || others.all(|other| other.number >= parcel.number)
        };
        let moves = |parcel: &&Parcel| {
            due(parcel.due) && first(parcel) && !self.held.contains(&(parcel.from, process))
        };
        let inbox = own.inbox.iter().filter(moves).map(|parcel| parcel.number);
        let mut ready: Vec<u64> = outcomes.chain(receiving).chain(inbox).collect();
        ready.sort_unstable();
        let most = u32::try_from(ready.len()).ok()?.checked_sub(1)?;
        let which = if self.script.reorder { self.up_to(most) } else { 0 };
        let number = *ready.get(usize::try_from(which).ok()?)?;
        self.take(process, number)
    }

    fn take(&mut self, process: usize, number: u64) -> Option<Event> {
        let own = &mut self.processes[process];
        if let Some(at) = own.outcomes.iter().position(|outcome| outcome.number == number) {
            return Some(own.outcomes.remove(at).event);
        }
        if let Some(at) = own.inbox.iter().position(|parcel| parcel.number == number) {
            return Some(Event::Message(own.inbox.remove(at)));
        }
        let at = own.receiving.iter().position(|receiving| receiving.number == number)?;
        let Receiving { parcel, from, token, mut buffer, body, .. } = own.receiving.remove(at);
        // In one hold of the lock: a sender that gives up is told so before or after, and its body is read only before.
        let there = self.processes[from].sending.contains_key(&parcel);
        let result = if there && buffer.take(&body.to_vec()) {
            self.finish(from, parcel, Ok(()));
            Ok(())
        } else {
            Err(Failure::of("receive", Failure::CONNECTION_RESET))
        };
        Some(Event::Received { token, buffer, result })
    }

    /// What is pending on a link ends, and some of what is on its way gets lost.
    fn give_up(&mut self, process: usize, link: usize, status: i8) {
        let own = &self.processes[process];
        let peer = own.links[link].peer;
        let of_link = own.sending.iter().filter(|(_, sending)| sending.link == link);
        let mut numbers: Vec<u64> = of_link.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        for number in numbers {
            self.processes[peer].inbox.retain(|parcel| parcel.number != number);
            self.finish(process, number, Err(Failure::of("post", status)));
        }
        self.ring(peer);
    }

    /// What a dead process has sent: bodies that it still had are lost, and some of the rest.
    fn forget(&mut self, process: usize, dead: usize) {
        let inbox = std::mem::take(&mut self.processes[process].inbox);
        let kept = inbox.into_iter().filter(|parcel| {
            parcel.from != dead || matches!(parcel.content, Content::Inline(_)) && self.happens(500)
        });
        let kept = kept.collect();
        self.processes[process].inbox = kept;
        self.ring(process);
    }

    fn later(&mut self, process: usize, event: Event) {
        let number = self.number();
        let due = self.processes[process].step + 1 + self.up_to(self.script.delay);
        self.processes[process].outcomes.push(Outcome { number, due, event });
        self.ring(process);
    }

    fn gets_lost(&mut self, from: usize, to: usize) -> bool {
        match self.losing.get_mut(&(from, to)) {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => self.happens(self.script.lost),
        }
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn happens(&mut self, of_a_thousand: u32) -> bool {
        of_a_thousand > 0 && self.up_to(999) < u64::from(of_a_thousand)
    }

    /// A number from 0 to `most`, by splitmix64.
    fn up_to(&mut self, most: u32) -> u64 {
        if most == 0 {
            return 0;
        }
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.chance ^ (self.chance >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % (u64::from(most) + 1)
    }
}

fn unknown() -> Failure {
    Failure::refused("endpoint", "not an endpoint of this engine")
}
