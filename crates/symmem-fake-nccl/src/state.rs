//! All there is: communicators, what their ranks have called, memory, and the script.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::CString;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::code::{Code, INVALID_ARGUMENT, SUCCESS};
use crate::work::Part;

static STATE: Mutex<State> = Mutex::new(State::new());
static CHANGED: Condvar = Condvar::new();

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells who waits that something was done.
pub(crate) fn changed() {
    CHANGED.notify_all();
}

/// Gives the lock up until something was done.
pub(crate) fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// A set of ranks that were brought together: by an id, a split or a shrink.
#[derive(Default)]
pub(crate) struct Clique {
    pub(crate) size: usize,
    /// Communicators by rank, as they come.
    pub(crate) members: BTreeMap<usize, usize>,
    /// What ranks have brought to the collective of each number.
    pub(crate) barriers: HashMap<u64, BTreeMap<usize, Part>>,
    /// Sends and receives that wait for their other half, by (from, to).
    pub(crate) sends: HashMap<(usize, usize), VecDeque<Part>>,
    pub(crate) receives: HashMap<(usize, usize), VecDeque<Part>>,
    /// Signals that have come and that are waited for, by (from, to).
    pub(crate) signals: HashMap<(usize, usize), i64>,
    pub(crate) waits: Vec<Part>,
    /// What survivors have brought to a shrink, by who is left out.
    pub(crate) shrinks: HashMap<Vec<usize>, BTreeMap<usize, Part>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Comm {
    pub(crate) clique: u64,
    pub(crate) rank: usize,
    pub(crate) device: i32,
    pub(crate) blocking: bool,
    /// Calls that are not over.
    pub(crate) pending: usize,
    /// Collectives so far.
    pub(crate) number: u64,
    /// What `ncclCommGetAsyncError` says, besides that something goes on.
    pub(crate) error: Code,
    pub(crate) finalized: bool,
    /// Factors of sums, by operator.
    pub(crate) factors: BTreeMap<i32, f64>,
}

/// Memory of all ranks, as one of them sees it.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) comm: usize,
    pub(crate) rank: usize,
    /// Address and bytes, by rank.
    pub(crate) parts: Vec<(u64, usize)>,
}

/// How memory is had, where not from the heap.
#[derive(Clone, Copy)]
pub(crate) struct Allocator {
    pub(crate) allocate: unsafe extern "C" fn(usize) -> u64,
    pub(crate) free: unsafe extern "C" fn(u64),
}

pub(crate) struct State {
    pub(crate) version: Code,
    /// Ranks that loads and stores reach from one another, counted from 0; all where none.
    pub(crate) reach: Option<usize>,
    pub(crate) multicast: bool,
    pub(crate) windows_supported: bool,
    pub(crate) allocator: Option<Allocator>,
    /// What calls answer instead of being done, and how often.
    pub(crate) failures: BTreeMap<String, (Code, usize)>,
    pub(crate) counts: BTreeMap<String, usize>,
    /// What was said last; kept, for the caller looks at it later.
    pub(crate) said: Option<&'static std::ffi::CStr>,
    pub(crate) cliques: BTreeMap<u64, Clique>,
    pub(crate) comms: BTreeMap<usize, Comm>,
    pub(crate) windows: BTreeMap<usize, Window>,
    pub(crate) registrations: BTreeMap<usize, usize>,
    pub(crate) allocations: BTreeMap<u64, usize>,
    next: usize,
}

pub(crate) const NEWEST: Code = 23203;

impl State {
    const fn new() -> Self {
        Self {
            version: NEWEST,
            reach: None,
            multicast: false,
            windows_supported: true,
            allocator: None,
            failures: BTreeMap::new(),
            counts: BTreeMap::new(),
            said: None,
            cliques: BTreeMap::new(),
            comms: BTreeMap::new(),
            windows: BTreeMap::new(),
            registrations: BTreeMap::new(),
            allocations: BTreeMap::new(),
            next: 0,
        }
    }

    /// A number that was not given before, and that looks like a pointer.
    pub(crate) fn fresh(&mut self) -> usize {
        self.next += 1;
        0x1000 + self.next * 16
    }

    /// Forgets everything but what is live, which stays so.
    pub(crate) fn reset(&mut self) {
        self.version = NEWEST;
        (self.reach, self.multicast, self.windows_supported) = (None, false, true);
        self.allocator = None;
        self.failures.clear();
        self.counts.clear();
        self.said = None;
    }

    /// Counts a call; the code that the script has for it.
    pub(crate) fn enter(&mut self, call: &str) -> Result<(), Code> {
        *self.counts.entry(call.to_owned()).or_default() += 1;
        match self.failures.get_mut(call) {
            Some((code, times)) if *times > 0 => {
                *times -= 1;
                let code = *code;
                Err(self.say(code, &format!("{call} fails because the test wants it")))
            }
            _ => Ok(()),
        }
    }

    /// Notes what is wrong, for `ncclGetLastError`.
    pub(crate) fn say(&mut self, code: Code, words: &str) -> Code {
        if let Ok(words) = CString::new(words) {
            self.said = Some(Box::leak(words.into_boxed_c_str()));
        }
        code
    }

    /// A communicator that is live.
    pub(crate) fn comm(&mut self, handle: usize) -> Result<&mut Comm, Code> {
        if !self.comms.contains_key(&handle) {
            return Err(self.say(INVALID_ARGUMENT, "that is no live communicator"));
        }
        self.comms.get_mut(&handle).ok_or(INVALID_ARGUMENT)
    }

    /// A communicator of which nothing goes on, and that has not failed.
    pub(crate) fn ready(&mut self, handle: usize) -> Result<Comm, Code> {
        let comm = self.comm(handle)?.clone();
        if comm.error != SUCCESS {
            return Err(comm.error);
        }
        if comm.pending > 0 && !comm.blocking || comm.finalized {
            let words = "the communicator is used before its last call is over, or after the end";
            return Err(self.say(INVALID_ARGUMENT, words));
        }
        Ok(comm)
    }

    /// The rest of a call is over, well or not.
    pub(crate) fn settle(&mut self, handle: usize, code: Code) {
        if let Some(comm) = self.comms.get_mut(&handle) {
            comm.pending = comm.pending.saturating_sub(1);
            if code != SUCCESS {
                comm.error = code;
            }
        }
    }

    /// Takes a communicator out, and what it has brought to calls that others have not.
    pub(crate) fn forget(&mut self, handle: usize) -> Result<(), Code> {
        self.comm(handle)?;
        let Some(comm) = self.comms.remove(&handle) else { return Err(INVALID_ARGUMENT) };
        self.windows.retain(|_, window| window.comm != handle);
        self.registrations.retain(|_, owner| *owner != handle);
        let Some(clique) = self.cliques.get_mut(&comm.clique) else { return Ok(()) };
        let not_ours = |part: &Part| part.comm != handle;
        for parts in clique.barriers.values_mut().chain(clique.shrinks.values_mut()) {
            parts.retain(|_, part| not_ours(part));
        }
        for queue in clique.sends.values_mut().chain(clique.receives.values_mut()) {
            queue.retain(not_ours);
        }
        clique.waits.retain(not_ours);
        clique.members.remove(&comm.rank);
        if clique.members.is_empty() {
            self.cliques.remove(&comm.clique);
        }
        Ok(())
    }
}
