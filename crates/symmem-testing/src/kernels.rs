//! The library's kernels as functions of Rust, for the fake driver: one thread does what all blocks do.
//!
//! They keep to the layouts and to the order of `kernels/symmem.cuh`: ranks synchronise by the words of the group's pads, note a
//! failure in the mailbox, and tell all ranks. Their arithmetic is the plain definition. So with them a test checks what the host
//! does: addresses, lengths, operators, the numbers of calls, what becomes of a failure. It does not check the kernels themselves.
#![allow(unsafe_code)] // memory at the addresses that kernels get

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use symmem::{DType, ReduceOp, with_element};
use symmem_chaos::element::Plain;
use symmem_sys::cuda::fake::{Fake, Launched, Ptx};

/// Reasons to give up, as `symmem.cuh` numbers them.
const TIMEOUT: u32 = 1;
const POISONED: u32 = 2;
const OTHER_CALL: u32 = 3;
const TOLD: u32 = 4;
const LEFT: u32 = 6;

/// Its name and what it does.
type Kernel = (&'static str, fn(&Launched));

/// Bytes of a pad for the data of one rank.
const SLOTS: usize = 512 << 10;

static FILES: LazyLock<Vec<(String, String)>> =
    LazyLock::new(|| symmem::cuda::ptx_files().unwrap());

/// The bytes of each parameter of a kernel, as the PTX file `file` declares them.
pub fn declared(file: &str, kernel: &str) -> Vec<usize> {
    let (_, ptx) = FILES.iter().find(|(name, _)| name == file).unwrap();
    let (_, rest) = ptx.split_once(&format!(".entry {kernel}(")).unwrap();
    let list = rest.split_once(')').unwrap().0.split(',');
    let bytes = |declared: &str| match declared.split_once('[') {
        Some((_, length)) => length.trim_end().trim_end_matches(']').parse().unwrap(),
        None if declared.contains(".u64") || declared.contains(".b64") => 8,
        None => 4,
    };
    list.map(bytes).collect()
}

/// Has launches of signals, barriers, and all collectives of a fixed size do their work. Not those with splits, tiles, values
/// and multicast.
pub fn install(driver: &Fake) {
    let moves: [Kernel; 9] = [
        ("barrier", |l| between(l, |_| {})),
        ("all_gather", |l| between(l, |group| gather(l, group))),
        ("gather", |l| {
            between(l, |group| {
                if number(l, 5) == group.rank() {
                    gather(l, group)
                }
            })
        }),
        ("broadcast", |l| between(l, |_| block(l, 0))),
        ("scatter", |l| between(l, |group| block(l, group.rank()))),
        ("all_to_all", |l| between(l, |group| all_to_all(l, group))),
        ("put_signal", |l| {
            Context::handle(l).put_signal(number(l, 1), number(l, 2));
        }),
        ("wait_signal", |l| {
            Context::handle(l).wait_signal(number(l, 1), number(l, 2));
        }),
        ("barrier_on_channel", |l| Context::handle(l).barrier_on_channel(number(l, 1))),
    ];
    for (name, run) in moves {
        driver.kernel(name, &declared("move", name), run);
    }
    let reductions: [Kernel; 6] = [
        ("all_reduce_flagged", |l| flagged(l, false)),
        ("reduce_scatter_flagged", |l| flagged(l, true)),
        ("all_reduce_one_shot_in_place", in_place),
        ("all_reduce_two_shot", in_place),
        ("all_reduce_two_shot_alternating", in_place),
        ("reduce_pull", reduce_pull),
    ];
    for (name, run) in reductions {
        driver.kernel(name, &declared("reduce_f32", name), run);
    }
}

fn word<'a>(address: u64) -> &'a AtomicU32 {
    // SAFETY: an aligned word of a pad or mailbox, which is mapped while the kernel runs.
    unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(address as usize)) }
}

fn wide<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: as above.
    unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(address as usize)) }
}

fn copy(from: u64, to: u64, bytes: usize) {
    let (from, to) = (from as usize, to as usize);
    if from != to && bytes > 0 {
        let (from, to) = (with_exposed_provenance::<u8>(from), with_exposed_provenance_mut(to));
        // SAFETY: the host checked the lengths, and barriers keep ranks apart.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}

/// A copy of `len` elements.
fn load<T: Plain>(from: u64, len: usize) -> Vec<T> {
    let mut values = vec![T::random(0); len];
    copy(from, values.as_mut_ptr().expose_provenance() as u64, size_of_val(&values[..]));
    values
}

fn store<T: Plain>(values: &[T], to: u64) {
    copy(values.as_ptr().expose_provenance() as u64, to, size_of_val(values));
}

/// A parameter of 4 or 8 bytes.
fn number(launched: &Launched, index: usize) -> usize {
    let narrow = || launched.u32(index).unwrap().into();
    launched.u64(index).unwrap_or_else(narrow) as usize
}

/// The part of a rank, from the first byte on.
fn part(launched: &Launched, rank: usize) -> u64 {
    u64::from_ne_bytes(launched.parameters[1][8 * rank..][..8].try_into().unwrap())
}

/// What a kernel gets first: a group, or an allocation and its group.
struct Context<'a> {
    bytes: &'a [u8],
    op: u32,
    /// Where the addresses of the group's pads begin.
    group_pads: usize,
}

impl<'a> Context<'a> {
    fn group(launched: &'a Launched) -> Self {
        let context = Self { bytes: &launched.parameters[0], op: 0, group_pads: 40 };
        Self { op: context.u32(12), ..context }
    }

    fn handle(launched: &'a Launched) -> Self {
        let context = Self { bytes: &launched.parameters[0], op: 0, group_pads: 1200 };
        Self { op: context.u32(16), ..context }
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes[at..][..4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes[at..][..8].try_into().unwrap())
    }

    fn rank(&self) -> usize {
        self.u32(0) as usize
    }

    fn size(&self) -> usize {
        self.u32(4) as usize
    }

    fn pad(&self, rank: usize) -> u64 {
        self.u64(self.group_pads + 8 * rank)
    }

    /// Waits for a peer until `ready`; false once that was given up, noted and told.
    fn wait(&self, peer: usize, channel: usize, mut ready: impl FnMut() -> bool) -> bool {
        let since = Instant::now();
        loop {
            if ready() {
                return true;
            }
            if let Some((why, by)) = self.consider(since, peer) {
                // What a rank does before it leaves is there before its host says so.
                return ready() || self.give_up(why, by, channel, peer);
            }
            std::thread::yield_now();
        }
    }

    /// The reason to give up waiting, and who told.
    fn consider(&self, since: Instant, peer: usize) -> Option<(u32, u32)> {
        let (broken, mailbox) = (word(self.pad(self.rank())).load(Ordering::Acquire), self.u64(32));
        let poison = word(mailbox).load(Ordering::Relaxed);
        let left = word(mailbox + 32 + peer as u64 / 32 * 4).load(Ordering::Acquire);
        let limit = Duration::from_nanos(self.u64(24));
        match (broken, poison) {
            (1.., _) => Some((TOLD, broken)),
            (_, 1..) => Some((POISONED, poison)),
            _ if left >> (peer % 32) & 1 == 1 => Some((LEFT, peer as u32 + 1)),
            _ if !limit.is_zero() && since.elapsed() >= limit => Some((TIMEOUT, 0)),
            _ => None,
        }
    }

    fn give_up(&self, why: u32, by: u32, channel: usize, peer: usize) -> bool {
        match why {
            TIMEOUT => self.fail(why, channel, peer as u32, (self.u64(24) >> 32) as u32),
            TOLD => self.fail(why, channel, (by & 255) - 1, by >> 8),
            _ => self.fail(why, channel, by.wrapping_sub(1), 0),
        }
    }

    /// Tells all ranks, then notes the failure unless one is noted. Gives false.
    fn fail(&self, why: u32, channel: usize, blamed: u32, theirs: u32) -> bool {
        let blames = matches!(why, TIMEOUT | LEFT | OTHER_CALL);
        let told = match why {
            TOLD => (blamed + 1) | theirs << 8,
            _ => (self.rank() as u32 + 1) | if blames { (blamed + 1) << 8 } else { 0 },
        };
        for rank in 0..self.size() {
            word(self.pad(rank)).store(told, Ordering::Release);
        }
        let ours = if why == OTHER_CALL { self.u32(16) } else { self.u64(24) as u32 };
        let (mailbox, free) = (self.u64(32), (0, 1));
        let state = word(mailbox + 4);
        if state.compare_exchange(free.0, free.1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let note = [why, self.op, channel as u32, blamed, ours, theirs];
            for (field, value) in note.into_iter().enumerate() {
                word(mailbox + 8 + 4 * field as u64).store(value, Ordering::Relaxed);
            }
            state.store(2, Ordering::Release);
        }
        false
    }

    /// A barrier of the group, as block 0 of all ranks makes it; false if it failed.
    fn sync(&self) -> bool {
        let (own, call) = (self.pad(self.rank()), self.u32(16));
        let broken = word(own).load(Ordering::Acquire);
        if broken != 0 {
            return self.give_up(TOLD, broken, 0, 0);
        }
        let epoch = word(own + 128).fetch_add(1, Ordering::Relaxed) + 1;
        let flag = |pad: u64, source: usize| wide(pad + 4096 + 8 * source as u64);
        let peers = (0..self.size()).filter(|peer| *peer != self.rank());
        for peer in peers.clone() {
            let reached = u64::from(epoch) | u64::from(call) << 32;
            flag(self.pad(peer), self.rank()).store(reached, Ordering::Release);
        }
        for peer in peers {
            let mut seen = 0;
            let come = self.wait(peer, 0, || {
                seen = flag(own, peer).load(Ordering::Acquire);
                (seen as u32).wrapping_sub(epoch).cast_signed() >= 0
            });
            if come && seen as u32 == epoch && (seen >> 32) as u32 != call {
                return self.fail(OTHER_CALL, 0, peer as u32, (seen >> 32) as u32);
            }
            if !come {
                return false;
            }
        }
        true
    }

    /// The word by which `source` signals to `to`.
    fn signal(&self, to: usize, source: usize, channel: usize) -> &AtomicU32 {
        word(self.u64(616 + 8 * to) + 4 * (self.size() * channel + source) as u64)
    }

    fn swap(&self, at: &AtomicU32, from: u32, peer: usize, channel: usize) -> bool {
        let (order, failed) = (Ordering::AcqRel, Ordering::Relaxed);
        self.wait(peer, channel, || at.compare_exchange(from, 1 - from, order, failed).is_ok())
    }

    fn put_signal(&self, to: usize, channel: usize) -> bool {
        self.swap(self.signal(to, self.rank(), channel), 0, to, channel)
    }

    fn wait_signal(&self, from: usize, channel: usize) -> bool {
        self.swap(self.signal(self.rank(), from, channel), 1, from, channel)
    }

    fn barrier_on_channel(&self, channel: usize) {
        let mut peers = (0..self.size()).filter(|peer| *peer != self.rank());
        let _ = peers.clone().all(|peer| self.put_signal(peer, channel))
            && peers.all(|peer| self.wait_signal(peer, channel));
    }
}

/// Reads peers' parts between two barriers.
fn between(launched: &Launched, work: impl FnOnce(&Context<'_>)) {
    let group = Context::group(launched);
    if group.sync() {
        work(&group);
        group.sync();
    }
}

/// Parameters of what moves blocks: parts, output, first byte, bytes, root.
fn gather(launched: &Launched, group: &Context<'_>) {
    let [out, first, bytes] = [2, 3, 4].map(|index| launched.u64(index).unwrap());
    for rank in 0..group.size() {
        copy(part(launched, rank) + first, out + rank as u64 * bytes, bytes as usize);
    }
}

/// The root's block of this number.
fn block(launched: &Launched, number_of: usize) {
    let [out, first, bytes] = [2, 3, 4].map(|index| launched.u64(index).unwrap());
    let from = part(launched, number(launched, 5)) + first + number_of as u64 * bytes;
    copy(from, out, bytes as usize);
}

fn all_to_all(launched: &Launched, group: &Context<'_>) {
    let [out, first, bytes] = [2, 3, 4].map(|index| launched.u64(index).unwrap());
    for rank in 0..group.size() {
        let from = part(launched, rank) + first + group.rank() as u64 * bytes;
        copy(from, out + rank as u64 * bytes, bytes as usize);
    }
}

/// The element type whose kernels a module has.
fn dtype(module: &Ptx) -> DType {
    let (name, _) = FILES.iter().find(|(_, text)| **text == *module.0).unwrap();
    let name = name.strip_prefix("reduce_").unwrap();
    DType::by_name(name.strip_suffix("_90").unwrap_or(name)).unwrap()
}

/// Element by element, in rank order.
fn reduce<T: Plain>(inputs: &[Vec<T>], op: usize) -> Vec<T> {
    let op = ReduceOp::ALL.into_iter().find(|known| *known as usize == op).unwrap();
    let one = |i: usize| {
        let values = inputs.iter().map(|input| input[i].wide());
        let sum = values.reduce(|a, b| T::combine(op, a, b)).unwrap();
        let average = op == ReduceOp::Average;
        T::rounded(if average { T::parted(sum, inputs.len()) } else { sum })
    };
    (0..inputs[0].len()).map(one).collect()
}

/// Parameters: parts, first element, length, operator.
fn in_place(launched: &Launched) {
    fn run<T: Plain>(launched: &Launched) {
        let group = Context::group(launched);
        let (first, length) = (number(launched, 2) * size_of::<T>(), number(launched, 3));
        let at = |rank: usize| part(launched, rank) + first as u64;
        if !group.sync() {
            return;
        }
        let inputs: Vec<Vec<T>> = (0..group.size()).map(|rank| load(at(rank), length)).collect();
        let reduced = reduce(&inputs, number(launched, 4));
        if group.sync() {
            store(&reduced, at(group.rank()));
        }
    }
    with_element!(dtype(&launched.module), T => run::<T>(launched)).unwrap();
}

/// Parameters: parts, output, first element, rows, columns, pitch, whether this rank has an output, operator.
fn reduce_pull(launched: &Launched) {
    fn run<T: Plain>(launched: &Launched) {
        let [out, first, rows, columns, pitch, active, op] =
            [2, 3, 4, 5, 6, 7, 8].map(|index| number(launched, index));
        between(launched, |group| {
            for row in (0..rows).filter(|_| active != 0) {
                let from = ((first + row * pitch) * size_of::<T>()) as u64;
                let input = |rank: usize| load::<T>(part(launched, rank) + from, columns);
                let inputs: Vec<Vec<T>> = (0..group.size()).map(input).collect();
                store(&reduce(&inputs, op), (out + row * columns * size_of::<T>()) as u64);
            }
        });
    }
    with_element!(dtype(&launched.module), T => run::<T>(launched)).unwrap();
}

/// Parameters: input, output, length of the output, operator. Each rank sends its data through the pads.
fn flagged(launched: &Launched, scatters: bool) {
    fn run<T: Plain>(launched: &Launched, scatters: bool) {
        let group = Context::group(launched);
        let [from, to, length, op] = [1, 2, 3, 4].map(|index| number(launched, index));
        let slots = (4096 + 2048 * group.size()).next_multiple_of(4096) as u64;
        let slot = |pad: u64, source: usize| pad + slots + (source * SLOTS) as u64;
        let step = SLOTS / size_of::<T>();
        for begin in (0..length.max(1)).step_by(step) {
            let len = (length - begin).min(step);
            for rank in 0..group.size() {
                let first = begin + if scatters { rank * length } else { 0 };
                let from = (from + first * size_of::<T>()) as u64;
                copy(from, slot(group.pad(rank), group.rank()), len * size_of::<T>());
            }
            if !group.sync() {
                return;
            }
            let own = group.pad(group.rank());
            let input = |source: usize| load::<T>(slot(own, source), len);
            let inputs: Vec<Vec<T>> = (0..group.size()).map(input).collect();
            store(&reduce(&inputs, op), (to + begin * size_of::<T>()) as u64);
            if !group.sync() {
                return;
            }
        }
    }
    with_element!(dtype(&launched.module), T => run::<T>(launched, scatters)).unwrap();
}
