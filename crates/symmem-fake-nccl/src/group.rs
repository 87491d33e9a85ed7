//! Calls that are begun together, and the end of every call: waiting, where the communicator blocks.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::sync::MutexGuard;

use crate::code::{Code, IN_PROGRESS, INVALID_USAGE, SUCCESS};
use crate::state::{self, State};
use crate::work::{Part, What};

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static DEFERRED: RefCell<Vec<Job>> = const { RefCell::new(Vec::new()) };
}

/// A call that was checked and is to be done.
pub(crate) enum Job {
    /// This communicator is a new member of its clique.
    Arrive(usize),
    Bring(Part),
}

impl Job {
    fn comm(&self) -> usize {
        match self {
            Self::Arrive(comm) => *comm,
            Self::Bring(part) => part.comm,
        }
    }

    /// Whether a communicator that blocks waits for the end.
    fn waits(&self) -> bool {
        match self {
            Self::Arrive(_) => true,
            Self::Bring(part) => {
                matches!(part.what, What::Split | What::Shrink | What::Window { .. })
            }
        }
    }

    /// Whether the answer is success even if the call goes on, as NCCL's is for what is made of another.
    fn keeps_quiet(&self) -> bool {
        matches!(self, Self::Bring(_)) && self.waits()
    }

    fn begin(self, state: &mut State) {
        match self {
            Self::Arrive(comm) => arrive(state, comm),
            Self::Bring(part) => state.bring(part),
        }
    }
}

/// The clique is complete when all its communicators are there.
fn arrive(state: &mut State, handle: usize) {
    let Some(comm) = state.comms.get(&handle) else { return };
    let (id, rank) = (comm.clique, comm.rank);
    let Some(clique) = state.cliques.get_mut(&id) else { return };
    clique.members.insert(rank, handle);
    if clique.members.len() == clique.size {
        let all: Vec<usize> = clique.members.values().copied().collect();
        all.into_iter().for_each(|comm| state.settle(comm, SUCCESS));
    }
    state::changed();
}

/// Does a call, now or at the end of the group.
pub(crate) fn submit(mut state: MutexGuard<'static, State>, job: Job) -> Code {
    if DEPTH.get() > 0 {
        DEFERRED.with_borrow_mut(|deferred| deferred.push(job));
        return SUCCESS;
    }
    let (comm, waits, quiet) = (job.comm(), job.waits(), job.keeps_quiet());
    job.begin(&mut state);
    match conclude(state, comm, waits).1 {
        IN_PROGRESS if quiet => SUCCESS,
        code => code,
    }
}

/// What a call answers after it was begun.
fn conclude(
    mut state: MutexGuard<'static, State>,
    handle: usize,
    waits: bool,
) -> (MutexGuard<'static, State>, Code) {
    loop {
        let Some(comm) = state.comms.get(&handle) else { return (state, SUCCESS) };
        if comm.error != SUCCESS || comm.pending == 0 {
            let error = comm.error;
            return (state, error);
        }
        if !comm.blocking {
            return (state, IN_PROGRESS);
        }
        if !waits {
            return (state, SUCCESS);
        }
        state = state::wait(state);
    }
}

#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "only the name")]
pub extern "C" fn ncclGroupStart() -> c_int {
    if let Err(code) = state::lock().enter("ncclGroupStart") {
        return code;
    }
    DEPTH.set(DEPTH.get() + 1);
    SUCCESS
}

#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "only the name")]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let mut state = state::lock();
    let scripted = state.enter("ncclGroupEnd");
    if DEPTH.get() == 0 {
        return state.say(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    }
    DEPTH.set(DEPTH.get() - 1);
    if DEPTH.get() > 0 {
        return scripted.err().unwrap_or(SUCCESS);
    }
    let jobs = DEFERRED.take();
    if let Err(code) = scripted {
        return code;
    }
    let begun: Vec<(usize, bool)> = jobs.iter().map(|job| (job.comm(), job.waits())).collect();
    jobs.into_iter().for_each(|job| job.begin(&mut state));
    let mut answer = SUCCESS;
    for (comm, waits) in begun {
        let (held, code) = conclude(state, comm, waits);
        state = held;
        answer = match (answer, code) {
            (SUCCESS | IN_PROGRESS, code) if code != SUCCESS => code,
            (answer, _) => answer,
        };
    }
    answer
}
