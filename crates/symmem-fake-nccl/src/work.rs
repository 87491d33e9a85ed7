//! What ranks bring to a call, and doing it once all have.
#![allow(unsafe_code)] // memory of the ranks, for which the callers vouch, as to NCCL itself

use std::collections::BTreeMap;

use crate::arithmetic;
use crate::code::{Code, INVALID_USAGE, SUCCESS};
use crate::state::{Comm, State, Window};

/// What a call is about, and in which all ranks must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    AllReduce { op: i32 },
    Reduce { op: i32, root: usize },
    Broadcast { root: usize },
    AllGather,
    ReduceScatter { op: i32 },
    Send { peer: usize },
    Recv { peer: usize },
    WaitSignal { peer: usize, signals: i64 },
    Split,
    Shrink,
    Window { bytes: usize },
}

/// One rank's part in it.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) comm: usize,
    pub(crate) rank: usize,
    pub(crate) what: What,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: usize,
    pub(crate) kind: i32,
    /// Where a handle is to be written.
    pub(crate) slot: usize,
    /// Of a split: color and key. Of what is made: whether it blocks.
    pub(crate) color: i32,
    pub(crate) key: i32,
    pub(crate) blocking: bool,
    /// The factor of a sum.
    pub(crate) factor: Option<f64>,
    /// Of a shrink: who is left out.
    pub(crate) excluded: Vec<usize>,
}

impl Part {
    pub(crate) fn new(comm: usize, rank: usize, what: What) -> Self {
        Self {
            comm,
            rank,
            what,
            from: 0,
            to: 0,
            count: 0,
            kind: 0,
            slot: 0,
            color: 0,
            key: 0,
            blocking: true,
            factor: None,
            excluded: Vec::new(),
        }
    }

    fn bytes(&self) -> usize {
        self.count * arithmetic::size(self.kind)
    }

    fn input(&self, elements: usize) -> Vec<u8> {
        read(self.from, elements * arithmetic::size(self.kind))
    }
}

/// The bytes at an address of a rank's.
pub(crate) fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0_u8; bytes];
    let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the rank has promised so many bytes there until its stream has passed, which it has not.
    unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), bytes) };
    data
}

/// Puts bytes to an address of a rank's.
pub(crate) fn write(address: u64, data: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: as in `read`, for writing.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
}

impl State {
    /// Takes a part in, and does what is complete then.
    pub(crate) fn bring(&mut self, part: Part) {
        let Some(comm) = self.comms.get_mut(&part.comm) else { return };
        comm.pending += 1;
        let id = comm.clique;
        match part.what {
            What::Send { peer } => self.pair(id, part.rank, peer, part, true),
            What::Recv { peer } => self.pair(id, peer, part.rank, part, false),
            What::WaitSignal { .. } => {
                if let Some(clique) = self.cliques.get_mut(&id) {
                    clique.waits.push(part);
                }
                self.hear(id);
            }
            What::Shrink => self.survive(id, part),
            _ => self.take_part(id, part),
        }
        crate::state::changed();
    }

    /// The next collective of a rank.
    fn take_part(&mut self, id: u64, part: Part) {
        let Some(comm) = self.comms.get_mut(&part.comm) else { return };
        let number = comm.number;
        comm.number += 1;
        let Some(clique) = self.cliques.get_mut(&id) else { return };
        let parts = clique.barriers.entry(number).or_default();
        parts.insert(part.rank, part);
        if parts.len() < clique.size {
            return;
        }
        let parts = clique.barriers.remove(&number).unwrap_or_default();
        let parts: Vec<Part> = parts.into_values().collect();
        let code = if agree(&parts) { self.perform(&parts) } else { INVALID_USAGE };
        for part in &parts {
            self.settle(part.comm, code);
        }
    }

    fn perform(&mut self, parts: &[Part]) -> Code {
        let Some(first) = parts.first() else { return SUCCESS };
        match first.what {
            What::Split => {
                let mut colors: BTreeMap<i32, Vec<&Part>> = BTreeMap::new();
                for part in parts.iter().filter(|part| part.color >= 0) {
                    colors.entry(part.color).or_default().push(part);
                }
                for mut members in colors.into_values() {
                    members.sort_by_key(|part| (part.key, part.rank));
                    self.child(&members);
                }
                SUCCESS
            }
            What::Window { .. } => self.open_windows(parts),
            _ => move_data(parts),
        }
    }

    fn open_windows(&mut self, parts: &[Part]) -> Code {
        let all: Vec<_> = parts.iter().map(|part| (part.from, part.count)).collect();
        for part in parts {
            let handle = self.fresh();
            let window = Window { comm: part.comm, rank: part.rank, parts: all.clone() };
            self.windows.insert(handle, window);
            fill(part.slot, handle);
        }
        SUCCESS
    }

    /// A communicator of these, in this order.
    fn child(&mut self, members: &[&Part]) {
        let id = self.fresh() as u64;
        let clique = self.cliques.entry(id).or_default();
        clique.size = members.len();
        for (rank, part) in members.iter().enumerate() {
            let handle = self.fresh();
            let device = self.comms.get(&part.comm).map_or(0, |parent| parent.device);
            let blocking = part.blocking;
            let comm = Comm { clique: id, rank, device, blocking, ..Comm::default() };
            self.comms.insert(handle, comm);
            if let Some(clique) = self.cliques.get_mut(&id) {
                clique.members.insert(rank, handle);
            }
            fill(part.slot, handle);
        }
    }

    /// A shrink is done when all have come that are not left out.
    fn survive(&mut self, id: u64, part: Part) {
        let Some(clique) = self.cliques.get_mut(&id) else { return };
        let excluded = part.excluded.clone();
        let expected = clique.size - excluded.len();
        let parts = clique.shrinks.entry(excluded.clone()).or_default();
        parts.insert(part.rank, part);
        if parts.len() < expected {
            return;
        }
        let parts = clique.shrinks.remove(&excluded).unwrap_or_default();
        let members: Vec<&Part> = parts.values().collect();
        self.child(&members);
        for part in parts.values() {
            self.settle(part.comm, SUCCESS);
        }
    }

    /// A send and its receive, in the order of the calls.
    fn pair(&mut self, id: u64, from: usize, to: usize, part: Part, is_send: bool) {
        let Some(clique) = self.cliques.get_mut(&id) else { return };
        let (ours, theirs) = if is_send {
            (&mut clique.sends, &mut clique.receives)
        } else {
            (&mut clique.receives, &mut clique.sends)
        };
        let Some(other) = theirs.get_mut(&(from, to)).and_then(|queue| queue.pop_front()) else {
            ours.entry((from, to)).or_default().push_back(part);
            return;
        };
        let (send, receive) = if is_send { (&part, &other) } else { (&other, &part) };
        let fits = send.bytes() == receive.bytes();
        if fits {
            write(receive.to, &read(send.from, send.bytes()));
        }
        let code = if fits { SUCCESS } else { INVALID_USAGE };
        self.settle(part.comm, code);
        self.settle(other.comm, code);
    }

    /// Ends the waits whose signals have come.
    pub(crate) fn hear(&mut self, id: u64) {
        let Some(clique) = self.cliques.get_mut(&id) else { return };
        let mut heard = Vec::new();
        let signals = &mut clique.signals;
        clique.waits.retain(|part| {
            let What::WaitSignal { peer, signals: wanted } = part.what else { return false };
            let come = signals.entry((peer, part.rank)).or_default();
            let enough = *come >= wanted;
            if enough {
                *come -= wanted;
                heard.push(part.comm);
            }
            !enough
        });
        for comm in heard {
            self.settle(comm, SUCCESS);
        }
    }
}

fn agree(parts: &[Part]) -> bool {
    parts.windows(2).all(|two| {
        let [a, b] = two else { return true };
        // Operators that ranks have made have numbers of their own.
        let same_op = match (a.what, b.what) {
            (What::AllReduce { op: a }, What::AllReduce { op: b })
            | (What::ReduceScatter { op: a }, What::ReduceScatter { op: b }) => {
                a == b || (a >= 5 && b >= 5)
            }
            (a, b) => a == b,
        };
        same_op && (a.count, a.kind) == (b.count, b.kind)
    })
}

fn move_data(parts: &[Part]) -> Code {
    let Some(first) = parts.first() else { return SUCCESS };
    let (ranks, count, kind) = (parts.len(), first.count, first.kind);
    let reduced = |elements: usize, op: i32| {
        let inputs: Vec<Vec<u8>> = parts.iter().map(|part| part.input(elements)).collect();
        let factors: Vec<Option<f64>> = parts.iter().map(|part| part.factor).collect();
        arithmetic::reduce(kind, op, &inputs, &factors)
    };
    match first.what {
        What::AllReduce { op } => {
            let Some(sum) = reduced(count, op) else { return INVALID_USAGE };
            parts.iter().for_each(|part| write(part.to, &sum));
        }
        What::Reduce { op, root } => {
            let Some(sum) = reduced(count, op) else { return INVALID_USAGE };
            parts.iter().filter(|part| part.rank == root).for_each(|part| write(part.to, &sum));
        }
        What::Broadcast { root } => {
            let from = parts.iter().find(|part| part.rank == root);
            let data = from.map(|part| part.input(count)).unwrap_or_default();
            parts.iter().for_each(|part| write(part.to, &data));
        }
        What::AllGather => {
            let data: Vec<u8> = parts.iter().flat_map(|part| part.input(count)).collect();
            parts.iter().for_each(|part| write(part.to, &data));
        }
        What::ReduceScatter { op } => {
            let Some(sum) = reduced(count * ranks, op) else { return INVALID_USAGE };
            let bytes = first.bytes();
            for part in parts {
                write(part.to, &sum[part.rank * bytes..][..bytes]);
            }
        }
        _ => return INVALID_USAGE,
    }
    SUCCESS
}

/// Writes a handle where the caller wants it.
pub(crate) fn fill(slot: usize, handle: usize) {
    let slot = std::ptr::with_exposed_provenance_mut::<usize>(slot);
    if !slot.is_null() {
        // SAFETY: the caller keeps it until the call is over, as NCCL asks; other threads may be looking at it.
        let slot = unsafe { std::sync::atomic::AtomicUsize::from_ptr(slot) };
        slot.store(handle, std::sync::atomic::Ordering::Release);
    }
}
