//! Steps on symmetric memory: what a rank has there, in which phase, and whether only it changed it.

use std::any::Any;
use std::time::Duration;

use symmem::{Deadline, Error, Group, Open, Paused, Shared, Symmetric, with_element};

use crate::api;
use crate::element::{Plain, Source};
use crate::lane::Runner;
use crate::program::{Slot, Work};
use crate::slices::difference;

/// Memory of any type that a lane holds between its steps.
pub trait Held {
    /// What is not as this rank left it.
    fn changed(&self) -> Option<String>;
    fn any(self: Box<Self>) -> Box<dyn Any>;
}

struct Mem<T: Plain> {
    memory: Symmetric<T>,
    /// What is in our part: nobody else may write there.
    contents: Vec<T>,
}

impl<T: Plain> Held for Mem<T> {
    fn changed(&self) -> Option<String> {
        let local = self.memory.local();
        if local.is_empty() && !self.contents.is_empty() {
            return None; // suspended after a failure of which we know
        }
        difference(local, self.contents.iter().copied())
    }

    fn any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Does the work of a step, with memory that is allocated if it is not there.
pub fn work(runner: &mut Runner<'_>, slot: Slot, work: Work) {
    with_element!(slot.dtype, T => on::<T>(runner, slot, work));
}

fn take<T: Plain>(runner: &mut Runner<'_>, slot: Slot) -> Option<Mem<T>> {
    match runner.slots.remove(&slot.number) {
        Some(held) => held.any().downcast::<Mem<T>>().ok().map(|mem| *mem),
        None => allocate(runner, slot),
    }
}

fn keep<T: Plain>(runner: &mut Runner<'_>, slot: Slot, memory: Symmetric<T>) {
    let contents = memory.local().to_vec();
    runner.slots.insert(slot.number, Box::new(Mem { memory, contents }));
}

fn allocate<T: Plain>(runner: &mut Runner<'_>, slot: Slot) -> Option<Mem<T>> {
    let group = runner.group.clone();
    let buffer =
        if slot.pool { runner.pool.alloc::<T>(slot.len) } else { group.alloc::<T>(slot.len) };
    let mut buffer = match buffer {
        Ok(buffer) => buffer,
        Err(e) => {
            runner.fault(format!("alloc: {e}"));
            return None;
        }
    };
    let contents = runner.source().elements::<T>(runner.own.rank, slot.len);
    buffer.local_mut().copy_from_slice(&contents);
    let name = format!("rendezvous[{},{}]", T::DTYPE, slot.len);
    let bring = || buffer.rendezvous(&group).map_err(Error::from);
    let check = |memory: &Symmetric<T>| difference(memory.local(), contents.iter().copied());
    let memory = runner.timed(&group, name, bring, check)?;
    Some(Mem { memory, contents })
}

fn on<T: Plain>(runner: &mut Runner<'_>, slot: Slot, work: Work) {
    let Some(Mem { mut memory, .. }) = take::<T>(runner, slot) else { return };
    let input = runner.source().elements::<T>(runner.own.rank, slot.len);
    if memory.local().len() == input.len() {
        memory.local_mut().copy_from_slice(&input);
    }
    match work {
        Work::Share => share(runner, slot, memory),
        Work::Open { channel } => open(runner, slot, memory, channel),
        Work::Apart { other, channel } => apart(runner, slot, memory, other, channel),
        _ => {
            collective(runner, slot, &mut memory, work, &input);
            keep(runner, slot, memory);
        }
    }
}

/// The world ranks of a group, and what its ranks have in this call.
struct Expected<'a> {
    source: Source,
    ranks: &'a [usize],
    own: usize,
    len: usize,
}

impl Expected<'_> {
    fn of<T: Plain>(&self, rank: usize) -> Vec<T> {
        self.source.elements(self.ranks[rank], self.len)
    }

    /// What a collective leaves: in place, or in an output of this rank.
    fn result<T: Plain>(&self, work: Work) -> Vec<T> {
        let n = self.ranks.len();
        let (source, ranks, block) = (self.source, self.ranks, self.len / n);
        let first = self.own * block;
        let is_root = |root: usize| root % n == self.own;
        let reduced = |op, range: std::ops::Range<usize>| -> Vec<T> {
            range.map(|i| source.reduced(ranks, op, i)).collect()
        };
        match work {
            Work::AllReduce { op, .. } | Work::AllReduceInto { op } => reduced(op, 0..self.len),
            Work::ReduceScatter { op } => reduced(op, first..first + block),
            Work::Reduce { op, root } if is_root(root) => reduced(op, 0..self.len),
            Work::Broadcast { root } => self.of(root % n),
            Work::AllGather => (0..n).flat_map(|r| self.of::<T>(r)).collect(),
            Work::Gather { root } if is_root(root) => {
                (0..n).flat_map(|r| self.of::<T>(r)).collect()
            }
            Work::AllToAll => {
                (0..n).flat_map(|r| self.of::<T>(r)[first..first + block].to_vec()).collect()
            }
            Work::Scatter { root } => self.of::<T>(root % n)[first..first + block].to_vec(),
            _ => Vec::new(),
        }
    }
}

fn name_of(work: Work, slot: Slot, n: usize) -> String {
    let arguments = match work {
        Work::AllReduce { op, algorithm } => format!("all_reduce({op},{algorithm:?})"),
        Work::AllReduceInto { op } => format!("all_reduce_into({op})"),
        Work::AllGather => "all_gather".into(),
        Work::ReduceScatter { op } => format!("reduce_scatter({op})"),
        Work::Broadcast { root } => format!("broadcast({})", root % n),
        Work::AllToAll => "all_to_all".into(),
        Work::Reduce { op, root } => format!("reduce({op},{})", root % n),
        Work::Gather { root } => format!("gather({})", root % n),
        Work::Scatter { root } => format!("scatter({})", root % n),
        Work::Share => "share".into(),
        Work::Open { .. } | Work::Apart { .. } => "open".into(),
    };
    format!("{arguments}@{}", slot.number)
}

fn collective<T: Plain>(
    runner: &mut Runner<'_>,
    slot: Slot,
    memory: &mut Symmetric<T>,
    work: Work,
    input: &[T],
) {
    let group = runner.group.clone();
    let n = group.size();
    let expected = Expected {
        source: runner.source(),
        ranks: group.world_ranks(),
        own: group.rank(),
        len: slot.len,
    };
    let in_place = matches!(work, Work::AllReduce { .. } | Work::Broadcast { .. });
    let wanted: Vec<T> = expected.result(work);
    let mut out = expected.source.elements::<T>(99, if in_place { 0 } else { wanted.len() });
    let name = name_of(work, slot, n);
    let mut different = false;
    let call = || {
        let done = match work {
            Work::AllReduce { op, algorithm } => memory.all_reduce_with(op, algorithm),
            Work::AllReduceInto { op } => memory.all_reduce_into(op, &mut out),
            Work::AllGather => memory.all_gather(&mut out),
            Work::ReduceScatter { op } => memory.reduce_scatter(op, &mut out),
            Work::Broadcast { root } => memory.broadcast(root % n),
            Work::AllToAll => memory.all_to_all(&mut out),
            Work::Reduce { op, root } => memory.reduce(op, root % n, &mut out),
            Work::Gather { root } => memory.gather(root % n, &mut out),
            _ => match work {
                Work::Scatter { root } => memory.scatter(root % n, &mut out),
                _ => Ok(()),
            },
        };
        different = matches!(done, Err(Error::Mismatch { .. }));
        let got = if in_place { memory.local().to_vec() } else { out };
        done.map(|()| got)
    };
    runner.timed(&group, name, call, |got| difference(got, wanted.into_iter()));
    if !in_place || different {
        let left = memory.local();
        if left.len() == input.len()
            && let Some(text) = difference(left, input.iter().copied())
        {
            let call = runner.call;
            runner.fault(format!("memory that call {call} only reads has changed: {text}"));
        }
    }
}

fn share<T: Plain>(runner: &mut Runner<'_>, slot: Slot, memory: Symmetric<T>) {
    let group = runner.group.clone();
    let mut paused: Option<Paused<Shared<T>>> = None;
    let mut first = Some(memory);
    let shared = runner.resumed(&group, format!("share@{}", slot.number), |_| {
        let result = match (first.take(), paused.take()) {
            (Some(memory), _) => memory.share(),
            (None, Some(kept)) => kept.resume(),
            (None, None) => return None,
        };
        Some(result.map_err(|failed| {
            paused = Some(failed.kept);
            failed.error
        }))
    });
    let Some(shared) = shared else {
        if let Some(Ok(memory)) = paused.map(Paused::<Shared<T>>::give_up) {
            keep(runner, slot, memory);
        }
        return;
    };
    let source = runner.source();
    let (len, ranks) = (slot.len, group.world_ranks());
    for pass in 0..2 {
        for (rank, &world) in ranks.iter().enumerate() {
            let expected = source.elements::<T>(world, len);
            let wrong = shared.peer(rank).map(|part| difference(part, expected.into_iter()));
            if let Ok(Some(text)) = wrong {
                let call = runner.call;
                runner.fault(format!(
                    "call {call}: shared part of rank {world}, look {pass}: {text}"
                ));
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    release(runner, slot, &group, shared);
}

fn release<T: Plain>(runner: &mut Runner<'_>, slot: Slot, group: &Group, shared: Shared<T>) {
    let mut paused: Option<Paused<Symmetric<T>>> = None;
    let mut first = Some(shared);
    let own = runner.resumed(group, format!("release@{}", slot.number), |_| {
        let result = match (first.take(), paused.take()) {
            (Some(shared), _) => shared.release(),
            (None, Some(kept)) => kept.resume(),
            (None, None) => return None,
        };
        Some(result.map_err(|failed| {
            paused = Some(failed.kept);
            failed.error
        }))
    });
    if let Some(memory) = own {
        keep(runner, slot, memory);
    }
}

fn opened<T: Plain>(
    runner: &mut Runner<'_>,
    slot: Slot,
    group: &Group,
    memory: Symmetric<T>,
) -> Option<Open<T>> {
    let mut left = None;
    let open = || {
        memory.open().map_err(|failed| {
            let (error, memory) = api::not_opened(failed);
            left = memory;
            error
        })
    };
    let opened = runner.timed(group, format!("open@{}", slot.number), open, |_| None);
    if let Some(memory) = left {
        keep(runner, slot, memory);
    }
    opened
}

fn close<T: Plain>(
    runner: &mut Runner<'_>,
    slot: Slot,
    group: &Group,
    open: Open<T>,
    check: impl FnOnce(&Symmetric<T>) -> Option<String>,
) {
    let mut left = None;
    let call = || {
        open.close().map_err(|failed| {
            let (error, memory) = api::not_closed(failed);
            left = memory;
            error
        })
    };
    let closed = runner.timed(group, format!("close@{}", slot.number), call, check);
    if let Some(memory) = closed.or(left) {
        keep(runner, slot, memory);
    }
}

fn open<T: Plain>(runner: &mut Runner<'_>, slot: Slot, memory: Symmetric<T>, channel: usize) {
    let group = runner.group.clone();
    let Some(open) = opened(runner, slot, &group, memory) else { return };
    let (n, own) = (group.size(), group.rank());
    let (to, from) = ((own + 1) % n, (own + n - 1) % n);
    let (source, half) = (runner.source(), slot.len / 2);
    let channel = runner.channel(channel);
    // Another call's number: the parts have this one's already.
    let other = Source { call: source.call | 1 << 20, ..source };
    let data = other.elements::<T>(runner.own.rank, half);
    let deadline = Deadline::within(runner.limit);
    let put = || open.put_signal(to, 0, &data, channel, deadline);
    if runner
        .timed(&group, format!("put_signal>{}", group.world_ranks()[to]), put, |()| None)
        .is_none()
    {
        return;
    }
    let theirs = || other.elements::<T>(group.world_ranks()[from], half);
    let mut got = source.elements::<T>(99, half);
    let wait = || {
        open.wait_signal(from, channel, deadline)?;
        open.get(own, 0, &mut got).map(|()| got)
    };
    let name = format!("wait_signal<{}", group.world_ranks()[from]);
    if runner.timed(&group, name, wait, |got| difference(got, theirs().into_iter())).is_none() {
        return;
    }
    let rest = source.elements::<T>(runner.own.rank, slot.len).into_iter().skip(half);
    let whole = theirs().into_iter().chain(rest);
    close(runner, slot, &group, open, |memory| difference(memory.local(), whole));
}

/// A signal that is put through one memory must not be taken through another.
fn apart<T: Plain>(
    runner: &mut Runner<'_>,
    slot: Slot,
    memory: Symmetric<T>,
    other: Slot,
    channel: usize,
) {
    let group = runner.group.clone();
    let Some(Mem { memory: second, .. }) = take::<T>(runner, other) else { return };
    let Some(x) = opened(runner, slot, &group, memory) else { return };
    let Some(y) = opened(runner, other, &group, second) else { return };
    let (n, own) = (group.size(), group.rank());
    let (to, from) = ((own + 1) % n, (own + n - 1) % n);
    let channel = runner.channel(channel);
    let deadline = Deadline::within(runner.limit);
    let put = || x.put_signal(to, 0, &[], channel, deadline);
    if runner
        .timed(&group, format!("put_signal>{}", group.world_ranks()[to]), put, |()| None)
        .is_none()
    {
        return;
    }
    if y.wait_signal(from, channel, Duration::from_millis(3)).is_ok() {
        let call = runner.call;
        runner.fault(format!(
            "call {call}: a signal put through memory {} was taken through {}",
            slot.number, other.number
        ));
    } else {
        let name = format!("wait_signal<{}", group.world_ranks()[from]);
        let wait = || x.wait_signal(from, channel, deadline);
        if runner.timed(&group, name, wait, |()| None).is_none() {
            return;
        }
    }
    close(runner, slot, &group, x, |_| None);
    close(runner, other, &group, y, |_| None);
}
