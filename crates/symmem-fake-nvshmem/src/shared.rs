//! The job: one file in memory that all PEs map. First the words by which they synchronise, then everyone's heap.
#![allow(unsafe_code)] // S1, S3

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::{PATIENCE, RUBBISH};

/// The most PEs.
pub const PES: usize = 16;
/// Where PE 0's heap begins; that of PE n lies n times [`HEAP`] further on, and after all of them what multicast
/// addresses lead to.
pub const BASE: u64 = 0x2e00_0000_0000;
/// The room of one heap.
pub const HEAP: u64 = 64 << 20;
/// The most teams, those that there are from the beginning included.
const TEAMS: usize = 32;
/// Those that there are from the beginning.
const GIVEN: usize = 6;
/// Where the heaps begin in the file.
const HEADER: u64 = 64 << 10;
/// Where the header is mapped.
const WORDS: u64 = BASE - HEADER;

/// Some PEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Team {
    pub(crate) start: usize,
    pub(crate) stride: usize,
    pub(crate) size: usize,
}

impl Team {
    pub(crate) fn pes(self) -> impl Iterator<Item = usize> {
        (0..self.size).map(move |index| self.start + index * self.stride)
    }

    pub(crate) fn position(self, pe: usize) -> Option<usize> {
        self.pes().position(|member| member == pe)
    }
}

/// One PE's view of the job.
pub(crate) struct Job {
    pub(crate) me: usize,
    pub(crate) pes: usize,
    bytes: u64,
    unreachable: Vec<usize>,
    state: Mutex<State>,
}

struct State {
    /// Offset and bytes of what is allocated, in order. The same on all PEs, if they do the same.
    living: Vec<(u64, u64)>,
    teams: Vec<Option<Team>>,
}

/// A file for a job, kept open by this process, and how others find it.
pub(crate) fn found() -> String {
    let file = memfd_create("symmem-fake-nvshmem", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, HEADER + (PES as u64 + 1) * HEAP).unwrap();
    let name = format!("{} {}", std::process::id(), file.as_raw_fd());
    std::mem::forget(file); // for as long as the process lives
    name
}

fn open(name: &str) -> OwnedFd {
    let (process, file) = name.split_once(' ').expect("not an id of this library");
    let path = format!("/proc/{process}/fd/{file}");
    let file: File = OpenOptions::new().read(true).write(true).open(path).unwrap();
    file.into()
}

impl Job {
    pub(crate) fn join(name: &str, me: usize, pes: usize) -> Self {
        assert!(me < pes && pes <= PES, "PE {me} of {pes}");
        let pointer: *mut c_void = with_exposed_provenance_mut(WORDS as usize);
        let length = (HEADER + (PES as u64 + 1) * HEAP) as usize;
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE);
        // SAFETY: nothing else is at these addresses, or the call fails.
        let mapped = unsafe { mmap(pointer, length, access, flags, open(name), 0) };
        mapped.expect("the addresses of the heaps are taken").expose_provenance();
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let bytes = variable("NVSHMEM_SYMMETRIC_SIZE").parse().unwrap_or(16 << 20);
        let unreachable = variable("SYMMEM_FAKE_NVSHMEM_UNREACHABLE");
        let unreachable = unreachable.split(',').filter_map(|pe| pe.parse().ok()).collect();
        let world = Team { start: 0, stride: 1, size: pes };
        let mut teams = vec![Some(world); GIVEN];
        teams.resize(TEAMS, None);
        let state = Mutex::new(State { living: Vec::new(), teams });
        let job = Self { me, pes, bytes: HEAP.min(bytes), unreachable, state };
        job.used(me).store((1 << GIVEN) - 1, Ordering::SeqCst);
        job.barrier(0);
        job
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn live(&self) -> usize {
        let state = self.state();
        state.living.len() + state.teams.iter().skip(GIVEN).flatten().count()
    }

    /// A word of the header: how far a PE is with a team's barriers, and which teams it is in.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < HEADER as usize / 8);
        // SAFETY: within the header, which is mapped for as long as the process lives.
        unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(WORDS as usize + 8 * index)) }
    }

    fn arrived(&self, team: usize, pe: usize) -> &AtomicU64 {
        self.word(team * PES + pe)
    }

    fn used(&self, pe: usize) -> &AtomicU64 {
        self.word(TEAMS * PES + pe)
    }

    pub(crate) fn team(&self, team: i32) -> Team {
        let found = usize::try_from(team).ok().and_then(|team| *self.state().teams.get(team)?);
        found.unwrap_or_else(|| panic!("{team} is no team of this PE"))
    }

    /// All PEs of a team synchronise.
    pub(crate) fn barrier(&self, team: i32) {
        let (index, members) = (team as usize, self.team(team));
        let own = self.arrived(index, self.me).fetch_add(1, Ordering::SeqCst) + 1;
        let start = Instant::now();
        for pe in members.pes() {
            while self.arrived(index, pe).load(Ordering::SeqCst) < own {
                assert!(start.elapsed() < PATIENCE, "PE {pe} does not come to a barrier");
                std::thread::yield_now();
            }
        }
    }

    /// Makes a team; `Err` if there are too many, nothing for a PE that is not of it.
    pub(crate) fn split(&self, parent: i32, wanted: Team) -> Result<Option<i32>, ()> {
        let within = self.team(parent);
        let start = within.start + wanted.start * within.stride;
        let team = Team { start, stride: wanted.stride * within.stride, ..wanted };
        if team.size == 0 || team.pes().any(|pe| within.position(pe).is_none()) {
            return Err(());
        }
        self.barrier(parent);
        let taken = within.pes().fold(0, |all, pe| all | self.used(pe).load(Ordering::SeqCst));
        let index = taken.trailing_ones() as usize;
        self.barrier(parent); // all have looked
        if index >= TEAMS {
            return Err(());
        }
        let member = team.position(self.me).is_some();
        if member {
            self.used(self.me).fetch_or(1 << index, Ordering::SeqCst);
            self.arrived(index, self.me).store(0, Ordering::SeqCst);
            self.state().teams[index] = Some(team);
        }
        self.barrier(parent);
        Ok(member.then_some(index as i32))
    }

    pub(crate) fn destroy(&self, team: i32) {
        assert!(team as usize >= GIVEN, "team {team} is not to be destroyed");
        self.barrier(team);
        self.state().teams[team as usize] = None;
        self.used(self.me).fetch_and(!(1 << team), Ordering::SeqCst);
    }

    /// Memory of the heap, the first that is free; all PEs synchronise.
    pub(crate) fn allocate(&self, alignment: u64, bytes: u64) -> Option<u64> {
        self.barrier(0);
        let mut state = self.state();
        let bytes = bytes.next_multiple_of(512);
        let (mut at, mut place) = (0_u64, state.living.len());
        for (index, &(offset, length)) in state.living.iter().enumerate() {
            if at.next_multiple_of(alignment) + bytes <= offset {
                place = index;
                break;
            }
            at = offset + length;
        }
        let at = at.next_multiple_of(alignment);
        if at.checked_add(bytes)? > self.bytes {
            return None;
        }
        state.living.insert(place, (at, bytes));
        let address = BASE + self.me as u64 * HEAP + at;
        let memory: *mut u8 = with_exposed_provenance_mut(address as usize);
        // SAFETY: within our heap, and nobody has it yet.
        unsafe { memory.write_bytes(RUBBISH, bytes as usize) };
        Some(address)
    }

    pub(crate) fn free(&self, address: u64) {
        self.barrier(0);
        let offset = self.offset(address);
        let mut state = self.state();
        let known = state.living.iter().position(|(at, _)| *at == offset);
        state.living.remove(known.expect("that is no allocation"));
    }

    fn offset(&self, address: u64) -> u64 {
        let own = BASE + self.me as u64 * HEAP;
        assert!((own..own + self.bytes).contains(&address), "{address:#x} is not in our heap");
        address - own
    }

    /// The counterpart of an address of ours, whether or not it can be reached.
    pub(crate) fn counterpart(&self, address: u64, pe: usize) -> u64 {
        assert!(pe < self.pes, "there is no PE {pe}");
        BASE + pe as u64 * HEAP + self.offset(address)
    }

    pub(crate) fn reaches(&self, pe: usize) -> bool {
        let apart = |pe: usize| self.unreachable.contains(&pe);
        pe == self.me || (!apart(pe) && !apart(self.me))
    }

    pub(crate) fn multicast(&self, team: Team, address: u64) -> Option<u64> {
        let there = std::env::var_os("SYMMEM_FAKE_NVSHMEM_MULTICAST").is_some();
        let reached = team.pes().all(|pe| self.reaches(pe));
        (there && reached).then(|| BASE + PES as u64 * HEAP + self.offset(address))
    }
}
