//! Messages that have arrived and peers that have gone: what a rank knows of the others.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::group_messages::{Listener, Listeners};
use super::landing::Landing;
use super::{PeerObserver, Phase, Scope, Subject};
use crate::memory::Exported;
use crate::sync::{Deadline, Expiry};

/// What a peer sent, with the memory that came along.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) body: Vec<u8>,
    pub(crate) memory: Option<Exported>,
}

impl Message {
    pub(crate) fn new(body: Vec<u8>, memory: Option<Exported>) -> Self {
        Self { body, memory }
    }
}

/// How a peer went away.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Gone {
    /// It said goodbye; otherwise it was lost, and every group it belonged to is broken.
    pub(crate) left: bool,
    pub(crate) how: String,
    /// The lost rank because of which it went. That one is to blame, even if we have not noticed its loss yet.
    pub(crate) because_of: Option<usize>,
}

impl Gone {
    pub(crate) fn lost(how: impl Into<String>) -> Self {
        Self { left: false, how: how.into(), because_of: None }
    }
}

/// Why not all messages could be collected.
#[derive(Debug)]
pub(crate) enum Shortfall {
    Lost {
        world_rank: usize,
        gone: Gone,
    },
    GivenUp {
        world_ranks: Vec<usize>,
        why: Expiry,
        after: Duration,
    },
    /// The caller has ended the conversation.
    Over,
    /// A peer forms a group of the same name with other members.
    Elsewhere {
        world_rank: usize,
        members: Vec<usize>,
    },
}

/// How many closed groups are remembered. A message to a forgotten one would be kept for ever, but only a peer that is this
/// many groups behind can send one.
const REMEMBERED: usize = 4096;

#[derive(Default)]
struct State {
    /// The rank whose inbox it is.
    own: usize,
    messages: HashMap<Subject, HashMap<(Phase, usize), Message>>,
    /// How many messages a thread waits for. Waking it is expensive, so only the last one does.
    awaited: HashMap<(Subject, Phase), usize>,
    /// How many conversations of each scope this rank has begun.
    begun: HashMap<Scope, u64>,
    /// The groups that were closed last, the latest at the end.
    closed: VecDeque<u128>,
    /// Conversations that were begun and are not over: messages to the others are dropped.
    open: HashSet<Subject>,
    /// Conversations in which a rank said that it cannot take part, and in which order that was.
    declined: HashMap<Subject, (usize, Gone)>,
    declined_last: VecDeque<Subject>,
    /// In the order in which this rank learnt of it: the first is the cause of the others.
    gone: Vec<(usize, Gone)>,
    observers: Vec<Weak<dyn PeerObserver>>,
}

#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    listeners: Mutex<Listeners>,
    changed: Condvar,
}

impl Inbox {
    pub(crate) fn new(own: usize) -> Self {
        Self { state: Mutex::new(State { own, ..State::default() }), ..Self::default() }
    }

    /// Delivers a message of rank `from`, on another host, to a group. An error says what is wrong with the message.
    pub(crate) fn deliver_to_group(
        &self,
        from: usize,
        group: u128,
        bytes: &[u8],
    ) -> Result<(), String> {
        let found = self.listeners().find(from, group, bytes)?;
        found.map_or(Ok(()), |listener| listener.receive(from, bytes))
    }

    /// Where the rest of a message of rank `from` to a group is to be received: see [`Listener::land`].
    pub(super) fn land(
        &self,
        from: usize,
        group: u128,
        beginning: &[u8],
        rest: usize,
    ) -> Option<Landing> {
        let listener = self.listeners().formed(group)?;
        listener.land(from, beginning, rest)
    }

    /// From here on, `listener` gets the messages that ranks of other hosts send to the group.
    pub(crate) fn listen(&self, group: u128, listener: &Arc<dyn Listener>) {
        let mut listeners = self.listeners(); // held until all earlier messages are delivered
        for (from, why) in listeners.listen(group, listener) {
            self.mark_gone(from, Gone::lost(format!("it sent an invalid message: {why}")));
        }
    }

    /// Lets all groups send their last messages.
    pub(crate) fn leaving(&self) {
        let all = self.listeners().all();
        all.iter().for_each(|listener| listener.leaving());
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is done under the lock that could leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deliver(&self, from: usize, subject: Subject, phase: Phase, message: Message) {
        if phase == Phase::Notice {
            let garbled = || Gone::lost("it cannot take part, and could not say why");
            let gone = postcard::from_bytes(&message.body).unwrap_or_else(|_| garbled());
            return self.decline(from, subject, gone);
        }
        let mut state = self.lock();
        if state.is_over(&subject) || state.declined.contains_key(&subject) {
            return;
        }
        if state.take_in(from, subject, phase, message) {
            self.changed.notify_all();
        }
    }

    fn decline(&self, from: usize, subject: Subject, gone: Gone) {
        let mut state = self.lock();
        state.mark_cause(from, &gone);
        if !state.is_over(&subject) {
            state.decline(&subject, from, gone.clone());
        }
        state.tell(from, &gone, Some(&subject));
        self.changed.notify_all();
    }

    pub(crate) fn mark_gone(&self, rank: usize, gone: Gone) {
        self.lock().mark_gone(rank, gone);
        self.changed.notify_all();
    }

    pub(super) fn watch(&self, observer: Weak<dyn PeerObserver>) {
        let mut state = self.lock();
        if let Some(observer) = observer.upgrade() {
            state.gone.iter().for_each(|(rank, gone)| observer.gone(*rank, gone, None));
            let declined = state.declined.iter();
            declined.for_each(|(subject, (rank, gone))| observer.gone(*rank, gone, Some(subject)));
        }
        state.observers.retain(|observer| observer.strong_count() > 0);
        state.observers.push(observer);
    }

    /// How the peer went, if it did.
    pub(crate) fn gone(&self, rank: usize) -> Option<Gone> {
        self.lock().how_gone(rank).cloned()
    }

    /// The first of these ranks that was lost rather than left in order.
    pub(crate) fn first_lost(&self, among: impl Fn(usize) -> bool) -> Option<usize> {
        let state = self.lock();
        let lost = state.gone.iter().find(|(rank, gone)| !gone.left && among(*rank));
        lost.map(|(rank, _)| *rank)
    }

    /// Begins the next conversation of a scope.
    pub(crate) fn begin(&self, scope: Scope) -> Subject {
        let next = self.lock().begun.get(&scope).copied().unwrap_or(0).saturating_add(1);
        self.begin_at(scope, next)
    }

    /// Begins a conversation of a scope by its number, which is higher than those before.
    pub(crate) fn begin_at(&self, scope: Scope, number: u64) -> Subject {
        let mut state = self.lock();
        state.begun.insert(scope.clone(), number);
        let subject = Subject { number, scope };
        state.open.insert(subject.clone());
        subject
    }

    /// Ends a conversation. Drops its messages, also those that arrive later.
    pub(crate) fn close(&self, subject: &Subject) {
        let mut state = self.lock();
        state.messages.remove(subject);
        state.open.remove(subject);
        state.declined.remove(subject);
    }

    /// No conversation of a scope will begin any more. Drops messages for such conversations, also those that arrive later.
    pub(crate) fn begin_no_more(&self, scope: &Scope) {
        let mut state = self.lock();
        let State { messages, open, begun, .. } = &mut *state;
        messages.retain(|subject, _| subject.scope != *scope || open.contains(subject));
        begun.insert(scope.clone(), u64::MAX);
    }

    /// Drops all messages of a group, now and later.
    pub(crate) fn close_group(&self, group: u128) {
        let scope = Scope::Group(group);
        let mut state = self.lock();
        state.messages.retain(|subject, _| subject.scope != scope);
        state.open.retain(|subject| subject.scope != scope);
        state.begun.insert(scope, u64::MAX);
        state.closed.push_back(group);
        let oldest = if state.closed.len() > REMEMBERED { state.closed.pop_front() } else { None };
        if let Some(oldest) = oldest {
            state.begun.remove(&Scope::Group(oldest));
        }
        drop(state);
        let mut listeners = self.listeners();
        listeners.close(group);
        oldest.iter().for_each(|&oldest| listeners.forget(oldest));
    }

    /// Takes a message that has arrived.
    pub(super) fn take(&self, subject: &Subject, phase: Phase, from: usize) -> Option<Message> {
        self.lock().messages.get_mut(subject)?.remove(&(phase, from))
    }

    /// Waits for a message from each of `from`, and takes them in that order.
    ///
    /// A lost peer ends the wait, unless all messages have arrived. So does `is_over`, which is polled ten times a second.
    pub(crate) fn collect(
        &self,
        subject: &Subject,
        phase: Phase,
        from: &[usize],
        deadline: Deadline,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Message>, Shortfall> {
        let deadline = deadline.start();
        loop {
            // Without the lock: what is asked whether to end the wait may use the mesh itself.
            let expired = deadline.expiry();
            let mut state = self.lock();
            let here = |state: &State, rank: usize| {
                state.messages.get(subject).is_some_and(|l| l.contains_key(&(phase, rank)))
            };
            let missing: Vec<usize> =
                from.iter().copied().filter(|&rank| !here(&state, rank)).collect();
            if missing.is_empty() {
                let messages = state.messages.entry(subject.clone()).or_default();
                return Ok(from
                    .iter()
                    .map(|&rank| messages.remove(&(phase, rank)).unwrap_or_default())
                    .collect());
            }
            if let Some(short) = state.first_loss(from, &missing) {
                return Err(short);
            }
            if let Some((world_rank, gone)) = state.declined.get(subject).cloned() {
                return Err(Shortfall::Lost { world_rank, gone });
            }
            if let Some(short) = state.told_of_conflict(subject) {
                return Err(short);
            }
            if let Some(short) = state.conflict(subject, &missing) {
                return Err(short);
            }
            if is_over() {
                return Err(Shortfall::Over);
            }
            if let Some(why) = expired {
                let after = deadline.elapsed();
                return Err(Shortfall::GivenUp { world_ranks: missing, why, after });
            }
            state.awaited.insert((subject.clone(), phase), missing.len());
            let nap = deadline.nap(Duration::from_millis(100));
            let woken = self.changed.wait_timeout(state, nap);
            let mut state = woken.unwrap_or_else(PoisonError::into_inner).0;
            state.awaited.remove(&(subject.clone(), phase));
        }
    }
}

impl State {
    /// Whether this rank has begun the conversation and ended it.
    fn is_over(&self, subject: &Subject) -> bool {
        let begun = self.begun.get(&subject.scope).is_some_and(|&last| subject.number <= last);
        begun && !self.open.contains(subject)
    }

    /// Notes that a conversation will never take place. Drops its messages and their memory, since this rank may never ask for them.
    fn decline(&mut self, subject: &Subject, from: usize, gone: Gone) {
        self.messages.remove(subject);
        self.declined.insert(subject.clone(), (from, gone));
        self.declined_last.push_back(subject.clone());
        if self.declined_last.len() > REMEMBERED
            && let Some(oldest) = self.declined_last.pop_front()
        {
            self.declined.remove(&oldest);
        }
    }

    /// Stores a message. Returns whether to wake the waiting thread.
    fn take_in(&mut self, from: usize, subject: Subject, phase: Phase, message: Message) -> bool {
        // It may show that a group of the same name has other members. No thread waits for that subject.
        let forming = matches!(subject.scope, Scope::Forming { .. });
        let left = self.awaited.get_mut(&(subject.clone(), phase));
        let again =
            self.messages.entry(subject).or_default().insert((phase, from), message).is_some();
        let last = left.is_some_and(|left| {
            *left = left.saturating_sub(usize::from(!again));
            *left == 0
        });
        last || again || forming
    }

    fn mark_gone(&mut self, rank: usize, gone: Gone) {
        self.mark_cause(rank, &gone);
        if self.how_gone(rank).is_some() {
            return;
        }
        tracing::debug!(rank, how = gone.how, "peer gone");
        if !gone.left {
            // No group with it can form any more. This rank may never ask for a group that it has not begun to form.
            let open = &self.open;
            self.messages.retain(|subject, _| match &subject.scope {
                Scope::Forming { members, .. } => {
                    !members.contains(&rank) || open.contains(subject)
                }
                Scope::Group(_) => true,
            });
        }
        self.tell(rank, &gone, None);
        self.gone.push((rank, gone));
    }

    /// The goodbye of a rank that goes because of another's loss may arrive before that loss is noticed here. If a rank went because
    /// it waited too long for us, it is itself the missing one.
    fn mark_cause(&mut self, rank: usize, gone: &Gone) {
        if let Some(lost) = gone.because_of.filter(|lost| ![rank, self.own].contains(lost)) {
            self.mark_gone(lost, Gone::lost(format!("noticed by rank {rank}")));
        }
    }

    /// Notifies the observers, under the lock, so that all of them see all losses in the same order.
    fn tell(&mut self, rank: usize, gone: &Gone, subject: Option<&Subject>) {
        self.observers.retain(|observer| {
            let living = observer.upgrade();
            living.inspect(|observer| observer.gone(rank, gone, subject)).is_some()
        });
    }

    fn how_gone(&self, rank: usize) -> Option<&Gone> {
        self.gone.iter().find(|(gone, _)| *gone == rank).map(|(_, how)| how)
    }

    /// A member that was lost breaks the conversation; one that left does so only if it still owes a message.
    fn first_loss(&self, members: &[usize], missing: &[usize]) -> Option<Shortfall> {
        let lost = self.gone.iter().find(|(rank, gone)| !gone.left && members.contains(rank));
        let absent = || self.gone.iter().find(|(rank, _)| missing.contains(rank));
        let (world_rank, gone) = lost.or_else(absent)?.clone();
        Some(Shortfall::Lost { world_rank, gone })
    }
}

impl State {
    /// A peer has reported that another one forms a group of this name with other members.
    fn told_of_conflict(&self, ours: &Subject) -> Option<Shortfall> {
        let messages = self.messages.get(ours)?.iter();
        let (_, told) = messages.into_iter().find(|((phase, _), _)| *phase == Phase::Conflict)?;
        let (world_rank, members) = postcard::from_bytes(&told.body).ok()?;
        Some(Shortfall::Elsewhere { world_rank, members })
    }

    /// A peer we wait for forms a group of our group's name with other members: neither can ever be complete.
    fn conflict(&mut self, ours: &Subject, missing: &[usize]) -> Option<Shortfall> {
        let Scope::Forming { name: our_name, members: our_members } = &ours.scope else {
            return None;
        };
        let (theirs, world_rank, members) =
            self.messages.iter().find_map(|(theirs, messages)| {
                let Scope::Forming { name, members } = &theirs.scope else { return None };
                let (_, from) = messages.keys().find(|(_, from)| missing.contains(from))?;
                let conflict = !name.is_empty() && name == our_name && members != our_members;
                conflict.then(|| (theirs.clone(), *from, members.clone()))
            })?;
        // Their attempt fails as well, so it is over for us too; the next one is number two on both sides.
        self.messages.remove(&theirs);
        self.begun.insert(theirs.scope, theirs.number);
        Some(Shortfall::Elsewhere { world_rank, members })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(number: u64) -> Subject {
        Subject { scope: Scope::Group(7), number }
    }

    #[test]
    fn messages_wait_until_asked_for_in_any_order() {
        let inbox = Inbox::default();
        inbox.deliver(2, subject(2), Phase::Proposal, Message::new(vec![22], None));
        inbox.deliver(1, subject(1), Phase::Proposal, Message::new(vec![11], None));
        let one =
            inbox.collect(&subject(1), Phase::Proposal, &[1], Deadline::NEVER, &|| false).unwrap();
        let two =
            inbox.collect(&subject(2), Phase::Proposal, &[2], Deadline::NEVER, &|| false).unwrap();
        assert_eq!((one[0].body[0], two[0].body[0]), (11, 22));
    }

    #[test]
    fn what_arrived_before_a_loss_still_counts() {
        let inbox = Inbox::default();
        inbox.deliver(1, subject(1), Phase::Proposal, Message::default());
        inbox.mark_gone(1, Gone::lost("killed"));
        assert!(
            inbox.collect(&subject(1), Phase::Proposal, &[1], Deadline::NEVER, &|| false).is_ok()
        );
        let e = inbox
            .collect(&subject(2), Phase::Proposal, &[1], Deadline::NEVER, &|| false)
            .unwrap_err();
        assert!(matches!(e, Shortfall::Lost { world_rank: 1, .. }));
    }

    #[test]
    fn the_cause_is_named_before_those_who_went_because_of_it() {
        let blamed = |gone: Gone| {
            let inbox = Inbox::default();
            inbox.mark_gone(1, gone);
            let e =
                inbox.collect(&subject(1), Phase::Proposal, &[1, 2, 3], Deadline::NEVER, &|| false);
            let Err(Shortfall::Lost { world_rank, .. }) = e else { panic!("not lost") };
            (world_rank, inbox.first_lost(|_| true))
        };
        let left = Gone { left: true, how: "it left".into(), because_of: Some(3) };
        assert_eq!(blamed(left.clone()), (3, Some(3)));
        assert_eq!(blamed(Gone { left: false, ..left.clone() }), (3, Some(3)));
        assert_eq!(
            blamed(Gone { because_of: Some(0), ..left.clone() }),
            (1, None),
            "it waited for us"
        );
        assert_eq!(blamed(Gone { because_of: None, ..left }), (1, None));
    }

    #[test]
    fn messages_to_a_closed_conversation_are_dropped() {
        let inbox = Inbox::default();
        let first = inbox.begin(Scope::Group(7));
        let second = inbox.begin(Scope::Group(7));
        assert_eq!((first.number, second.number), (1, 2));
        inbox.close(&second);
        inbox.deliver(1, second, Phase::Proposal, Message::default());
        assert!(inbox.lock().messages.is_empty());
        inbox.deliver(1, first, Phase::Proposal, Message::default());
        inbox.deliver(1, subject(3), Phase::Proposal, Message::default());
        assert_eq!(inbox.lock().messages.len(), 2, "those that go on, and those to come, are kept");
    }

    #[test]
    fn where_nothing_begins_any_more_only_what_goes_on_is_kept() {
        let inbox = Inbox::default();
        let open = inbox.begin(Scope::Group(7));
        let deliver =
            |number| inbox.deliver(1, subject(number), Phase::Proposal, Message::default());
        (1..3).for_each(deliver);
        inbox.begin_no_more(&Scope::Group(7));
        (1..4).for_each(deliver);
        assert!(inbox.lock().messages.keys().eq([&open]));
    }

    #[test]
    fn groups_that_are_gone_are_remembered_for_a_while() {
        let inbox = Inbox::default();
        let scope = |id: usize| Scope::Group(id as u128);
        for id in 0..3 * REMEMBERED {
            inbox.begin(scope(id));
            inbox.close_group(id as u128);
        }
        let late = |id| {
            inbox.deliver(
                1,
                Subject { scope: scope(id), number: 2 },
                Phase::Proposal,
                Message::default(),
            )
        };
        (2 * REMEMBERED..3 * REMEMBERED).for_each(late);
        let state = inbox.lock();
        assert_eq!((state.begun.len(), state.closed.len()), (REMEMBERED, REMEMBERED));
        assert!(state.messages.is_empty() && state.open.is_empty());
    }

    #[test]
    fn what_came_for_a_group_that_will_never_be_is_dropped() {
        let inbox = Inbox::default();
        let forming = |name: &str| Subject {
            scope: Scope::Forming { name: name.into(), members: vec![0, 1] },
            number: 1,
        };
        let notice = |gone: &Gone| Message::new(postcard::to_stdvec(gone).unwrap(), None);
        for name in ["dropped", "lost", "living"] {
            inbox.deliver(1, forming(name), Phase::Proposal, Message::default());
        }
        let dropped = Gone::lost("it dropped the group");
        inbox.deliver(1, forming("dropped"), Phase::Notice, notice(&dropped));
        assert_eq!(inbox.lock().messages.len(), 2);
        inbox.deliver(1, forming("dropped"), Phase::Proposal, Message::default());
        assert_eq!(inbox.lock().messages.len(), 2, "it came late");
        let subject = inbox.begin(forming("dropped").scope);
        let e =
            inbox.collect(&subject, Phase::Proposal, &[1], Deadline::NEVER, &|| false).unwrap_err();
        assert!(matches!(e, Shortfall::Lost { world_rank: 1, .. }));
        inbox.begin(forming("living").scope);
        inbox.mark_gone(1, Gone::lost("killed"));
        assert_eq!(inbox.lock().messages.len(), 1, "only what this rank may ask for is kept");
    }

    #[test]
    fn a_missing_message_is_named_at_the_deadline() {
        let inbox = Inbox::default();
        inbox.deliver(1, subject(1), Phase::Proposal, Message::default());
        let limit = Deadline::within(Duration::from_millis(10));
        let e =
            inbox.collect(&subject(1), Phase::Proposal, &[1, 2, 3], limit, &|| false).unwrap_err();
        assert!(matches!(e, Shortfall::GivenUp { world_ranks, .. } if world_ranks == [2, 3]));
    }
}
