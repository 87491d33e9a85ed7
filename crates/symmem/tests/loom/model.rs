//! Ranks whose pads and data are loom's.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use symmem::Deadline;
pub use symmem::model::LATE_STORES;
use symmem::model::{Layout, Ordering, Pads, Signals, Stop, Word};

pub const NEVER: Deadline = Deadline::NEVER;

thread_local! {
    /// Whether any thread of the model has slept: all of them run on one thread of the system.
    static SLEPT: Cell<bool> = const { Cell::new(false) };
}

/// A word with a futex: looking and falling asleep are one step for the waker.
pub struct ModelWord {
    value: AtomicU32,
    /// Changed after every exchange, in no order: loom switches threads only at accesses to the same place, and would
    /// otherwise take an exchange and the fence behind it for one step.
    after: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl ModelWord {
    pub fn new() -> Self {
        let [value, after] = [0, 0].map(AtomicU32::new);
        Self { value, after, queue: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Word for ModelWord {
    fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, order);
    }

    fn replace(&self, current: u32, new: u32, order: Ordering) -> bool {
        let replaced = self.value.compare_exchange(current, new, order, Ordering::Relaxed).is_ok();
        self.after.fetch_add(1, Ordering::Relaxed);
        replaced
    }

    fn increment(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
    }

    fn decrement(&self) {
        self.value.fetch_sub(1, Ordering::SeqCst);
    }

    fn sleep(&self, seen: u32, _limit: Duration) {
        let queue = self.queue.lock().unwrap();
        if self.value.load(Ordering::Relaxed) == seen {
            SLEPT.set(true);
            drop(self.woken.wait(queue).unwrap());
        }
    }

    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
}

#[derive(Clone)]
pub struct ModelPads(Arc<Vec<BTreeMap<usize, ModelWord>>>);

impl ModelPads {
    pub fn new(ranks: usize, layout: Layout) -> Self {
        let pad = || layout.used().into_iter().map(|index| (index, ModelWord::new())).collect();
        Self(Arc::new((0..ranks).map(|_| pad()).collect()))
    }
}

impl Pads for ModelPads {
    type Word = ModelWord;

    fn word(&self, owner: usize, index: usize) -> &ModelWord {
        &self.0[owner][&index]
    }
}

/// Plain memory: loom reports every access that no ordering keeps apart from a write.
pub struct Data(Vec<UnsafeCell<u32>>);

// SAFETY: whether the accesses are ordered is what loom checks.
unsafe impl Sync for Data {}
// SAFETY: as above.
unsafe impl Send for Data {}

impl Data {
    pub fn new(len: usize) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(0)).collect())
    }

    pub fn write(&self, index: usize, value: u32) {
        // SAFETY: loom checks it.
        self.0[index].with_mut(|place| unsafe { *place = value });
    }

    pub fn read(&self, index: usize) -> u32 {
        // SAFETY: loom checks it.
        self.0[index].with(|place| unsafe { *place })
    }
}

/// One rank, as its thread sees it.
pub struct Rank {
    pub rank: usize,
    pub signals: Signals<ModelPads>,
    /// As many as a model needs.
    pub data: Arc<Data>,
}

impl Rank {
    pub fn barrier(&self) {
        assert_eq!(self.barrier_by(NEVER), Ok(()));
    }

    pub fn barrier_by(&self, mut deadline: Deadline) -> Result<(), Stop> {
        self.signals.barrier(0, &mut deadline, |_| false)
    }

    /// A barrier that ends when a loss is noted.
    pub fn watchful_barrier(&self) -> Result<(), Stop> {
        self.signals.barrier(0, &mut NEVER.clone(), |_| self.signals.poisoned().is_some())
    }

    /// A call without data.
    pub fn call(&self, call: u32, mut deadline: Deadline) -> Result<(), Stop> {
        let guard = self.signals.lock_channel(0, NEVER)?;
        guard.exchange(call, None, &mut deadline, |_| false).map(drop)
    }

    /// A call in which each rank writes a value into its own place for the epoch, and reads those of all others. The
    /// epoch, and whether each was that rank's value for it.
    pub fn carry(&self, call: u32, mut deadline: Deadline) -> Result<u32, Stop> {
        let place = |of: usize, epoch: u32| 2 * of + (epoch & 1) as usize;
        let value = |of: usize, epoch: u32| 10 * epoch + of as u32;
        let guard = self.signals.lock_channel(0, NEVER)?;
        if !guard.is_unfinished() {
            let epoch = guard.next_epoch();
            self.data.write(place(self.rank, epoch), value(self.rank, epoch));
        }
        let epoch = guard.exchange(call, None, &mut deadline, |_| false)?;
        let other = 1 - self.rank;
        assert_eq!(self.data.read(place(other, epoch)), value(other, epoch));
        Ok(epoch)
    }

    pub fn put(&self, to: usize) {
        assert_eq!(self.signals.put(&self.signals.slot_on(to, 0), to, NEVER, || false), Ok(()));
    }

    pub fn wait(&self, from: usize) {
        assert_eq!(
            self.signals.take(&self.signals.slot_of(from, 0), from, NEVER, || false),
            Ok(())
        );
    }

    pub fn decide(&self, taking_part: &[usize]) -> Vec<usize> {
        self.signals.decide(0, |rank| taking_part.contains(&rank))
    }
}

#[derive(Clone, Copy)]
pub struct Model {
    pub ranks: usize,
    /// Users' channels.
    pub channels: usize,
    /// Barriers held before.
    pub epoch: u32,
    /// Looks before a wait sleeps.
    pub looks: u32,
    /// At most so many, whatever the environment allows.
    pub preemptions: usize,
}

pub const TWO: Model = Model { ranks: 2, channels: 0, epoch: 0, looks: 0, preemptions: usize::MAX };
pub const THREE: Model = Model { ranks: 3, ..TWO };

impl Model {
    pub fn group(self) -> Vec<Arc<Rank>> {
        let layout = Layout::new(self.ranks, self.channels);
        let pads = ModelPads::new(self.ranks, layout);
        let data = Arc::new(Data::new(4));
        let rank = |rank| {
            let signals = Signals::modelled(pads.clone(), rank, layout, self.epoch, self.looks);
            Arc::new(Rank { rank, signals, data: Arc::clone(&data) })
        };
        (0..self.ranks).map(rank).collect()
    }

    /// Explores `body` on every rank; says whether anyone ever slept.
    pub fn explore(self, body: impl Fn(&Rank) + Send + Sync + 'static) -> bool {
        let body = Arc::new(body);
        self.explore_threads(move |group| {
            let thread = |rank: Arc<Rank>| {
                let body = Arc::clone(&body);
                Box::new(move || body(&rank)) as Thread
            };
            group.into_iter().map(thread).collect()
        })
    }

    /// Explores the threads that `threads` makes of a fresh group.
    pub fn explore_threads(
        self,
        threads: impl Fn(Vec<Arc<Rank>>) -> Vec<Thread> + Send + Sync + 'static,
    ) -> bool {
        SLEPT.set(false);
        let mut builder = loom::model::Builder::new();
        let bound = builder.preemption_bound.unwrap_or(3);
        builder.preemption_bound = Some(bound.min(self.preemptions));
        builder.check(move || {
            let mut threads = threads(self.group()).into_iter();
            let first = threads.next();
            let others: Vec<_> = threads.map(thread::spawn).collect();
            first.into_iter().for_each(|first| first());
            others.into_iter().for_each(|other| other.join().unwrap());
        });
        SLEPT.get()
    }
}

pub type Thread = Box<dyn FnOnce() + Send>;

/// A deadline that passed before the model began, so that it passes alike in every execution.
pub fn passed() -> Deadline {
    let deadline = Deadline::after(Duration::from_nanos(1));
    while !deadline.expired() {}
    deadline
}
