//! What all groups and buffers of one rank share: its connections, and tables of names and memory.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::SystemTime;

use super::form::Formed;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::block::{Block, Imports};
use crate::memory::{Backend, Host, Process, Table};
use crate::mesh::{Gone, Mesh, PeerObserver, Subject};
use crate::signal::Layout;
use crate::store::{SharedStore, TcpServer};
use crate::sync::atomic::AtomicBool;
use crate::sync::shared::AtomicU64;
use crate::sync::{Ordering, lock};
use crate::wire::Choice;

pub(crate) struct Context {
    pub(crate) mesh: Mesh,
    /// How its ranks reach those of other hosts.
    pub(crate) choice: Choice,
    pub(crate) store: SharedStore,
    /// For users' memory.
    pub(crate) backend: Arc<dyn Backend>,
    /// For the groups' pads.
    pub(crate) pad_backend: Arc<dyn Backend>,
    /// Of this world, if it differs from the process's setting.
    pub(crate) pad_size: Option<usize>,
    pub(crate) devices: DeviceRules,
    names: Mutex<HashSet<String>>,
    pub(crate) imports: Imports,
    /// Finds allocations by address.
    pub(crate) table: Table,
    /// Allocations that outlive their users, by the users' ids.
    persistent: Mutex<HashMap<u64, (DType, Arc<Block>)>>,
    pub(super) world: Arc<WorldPads>,
    /// Which of this rank's notes are in use.
    notes: [AtomicBool; Layout::THREADS],
    /// By rank: how many messages it has been sent that arrivals must not overtake. Of ranks of other hosts.
    pub(super) sent: Arc<[AtomicU64]>,
    /// The job's store, where this rank hosts it; declared last, it goes last.
    _server: Option<TcpServer>,
}

/// The world's settings about devices.
pub(crate) struct DeviceRules {
    /// Ranks of a group may not share one.
    pub(crate) strict: bool,
    /// How many ranks use one at once.
    pub(crate) ranks: Option<usize>,
    /// How many ranks this machine has, of this world or of the job that it is a part of.
    pub(crate) ranks_here: usize,
}

impl Context {
    pub(super) fn new(
        mesh: Mesh,
        store: SharedStore,
        backend: Arc<dyn Backend>,
        pad_size: Option<usize>,
        devices: DeviceRules,
        server: Option<TcpServer>,
    ) -> Result<Self> {
        let pad_backend: Arc<dyn Backend> =
            if mesh.in_one_process() { Arc::new(Process) } else { Arc::new(Host) };
        let choice = Choice::prepare(&mesh)?;
        let sent = (0..mesh.size()).map(|_| AtomicU64::new(0)).collect();
        let world: Arc<WorldPads> = Arc::default();
        // The first observer of losses, so that every group finds them in the order that all ranks see.
        let observer: Weak<WorldPads> = Arc::downgrade(&world);
        mesh.watch(observer);
        Ok(Self {
            pad_backend,
            mesh,
            choice,
            store,
            backend,
            pad_size,
            devices,
            names: Mutex::default(),
            imports: Imports::default(),
            table: Table::default(),
            persistent: Mutex::default(),
            world,
            notes: Default::default(),
            sent,
            _server: server,
        })
    }

    /// The pad size of new groups and allocations.
    pub(crate) fn pad_size(&self) -> usize {
        self.pad_size.unwrap_or_else(super::signal_pad_size)
    }

    /// Claims a group name for as long as the claim lives.
    pub(super) fn claim_name(self: &Arc<Self>, given: String) -> Result<Name> {
        let free = !given.is_empty() && lock(&self.names).insert(given.clone());
        if !free {
            return Err(Error::Usage {
                op: "subgroup",
                rank: Some(self.mesh.rank()),
                expected: "a group name that no living group of this rank has".into(),
                got: format!("{given:?}"),
            });
        }
        Ok(Name { context: Arc::clone(self), given })
    }

    /// Writes a note on what a thread of this rank waits for, until it is dropped. `None` if all notes are in use.
    #[cold]
    pub(super) fn note(&self, text: &str) -> Option<Note<'_>> {
        let world = self.world.formed.get()?;
        let thread = self.notes.iter().position(|used| !used.swap(true, Ordering::Acquire))?;
        let first = Layout::note(thread);
        let most = text.len().min(4 * (Layout::NOTE - 2));
        let len = (0..=most).rev().find(|&len| text.is_char_boundary(len)).unwrap_or(0);
        let mut words = [0; Layout::NOTE - 2];
        for (word, bytes) in words.iter_mut().zip(text.as_bytes()[..len].chunks(4)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        }
        world.signals.store_words(first + 2, &words);
        world.signals.store_words(first + 1, &[milliseconds()]);
        world.signals.store_words(first, &[len as u32]);
        Some(Note { context: self, thread })
    }

    /// What the threads of a rank of the world wait for, by its notes. Only for people: a note may change while it is read.
    #[cold]
    pub(super) fn doing(&self, world_rank: usize) -> Vec<String> {
        let Some(world) = self.world.formed.get() else { return Vec::new() };
        let read = |thread: usize| {
            let words: [u32; Layout::NOTE] =
                world.signals.load_words(world_rank, Layout::note(thread));
            let [len, since, text @ ..] = words;
            let bytes: Vec<u8> = text.iter().flat_map(|word| word.to_le_bytes()).collect();
            let text = String::from_utf8_lossy(bytes.get(..len as usize)?).into_owned();
            let seconds = f64::from(milliseconds().wrapping_sub(since)) / 1000.0;
            (len != 0).then(|| format!("{text} for {seconds:.1} s"))
        };
        (0..Layout::THREADS).filter_map(read).collect()
    }

    /// Says goodbye to all ranks, after all other messages. The goodbye blames `blamed`, or else the first loss that any rank of
    /// this host has noted in the pads.
    pub(super) fn leave(&self, how: &str, blamed: Option<usize>) {
        let blamed = blamed.or_else(|| self.world.first_lost(|_| true));
        self.mesh.inbox().leaving();
        self.choice.finish();
        self.mesh.leave(how, blamed);
        self.choice.end();
    }

    pub(crate) fn persistent(&self) -> MutexGuard<'_, HashMap<u64, (DType, Arc<Block>)>> {
        lock(&self.persistent)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let farewell = Farewell::now();
        self.world.say(farewell);
        self.leave(farewell.text(), None);
    }
}

/// How a rank leaves the world of its own accord.
#[derive(Clone, Copy)]
enum Farewell {
    Left = 1,
    Panicked = 2,
}

impl Farewell {
    fn now() -> Self {
        if std::thread::panicking() { Self::Panicked } else { Self::Left }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Left => "it left",
            Self::Panicked => "it panicked",
        }
    }
}

/// The pads of the world, in which ranks note what they wait for and which ranks they have lost.
#[derive(Default)]
pub(super) struct WorldPads {
    formed: OnceLock<Arc<Formed>>,
    /// Lost before there were pads.
    early: Mutex<Vec<usize>>,
}

impl WorldPads {
    pub(super) fn set(&self, formed: &Arc<Formed>) {
        let formed = self.formed.get_or_init(|| Arc::clone(formed));
        lock(&self.early).drain(..).for_each(|rank| formed.signals.note_loss(rank));
    }

    /// Writes to shared memory how this rank leaves. Peers notice the departure later, one after the other, and the first one
    /// informs the others.
    fn say(&self, farewell: Farewell) {
        if let Some(formed) = self.formed.get() {
            formed.signals.store_words(Layout::FAREWELL, &[farewell as u32]);
        }
    }

    /// How the rank leaves, by its own account.
    pub(super) fn farewell(&self, world_rank: usize) -> Option<&'static str> {
        let [word] = self.formed.get()?.signals.load_words(world_rank, Layout::FAREWELL);
        let said = [Farewell::Left, Farewell::Panicked].into_iter().find(|&f| f as u32 == word);
        said.map(Farewell::text)
    }

    /// The first of these ranks of the world to be lost: the same for all who ask.
    pub(super) fn first_lost(&self, among: impl Fn(usize) -> bool) -> Option<usize> {
        self.formed.get()?.signals.losses().find(|rank| among(*rank))
    }
}

impl PeerObserver for WorldPads {
    fn gone(&self, world_rank: usize, gone: &Gone, subject: Option<&Subject>) {
        if gone.left || subject.is_some() {
            return;
        }
        let mut early = lock(&self.early);
        match self.formed.get() {
            Some(formed) => formed.signals.note_loss(world_rank),
            None => early.push(world_rank),
        }
    }
}

/// The note on what a thread of this rank waits for.
pub(super) struct Note<'a> {
    context: &'a Context,
    thread: usize,
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        if let Some(world) = self.context.world.formed.get() {
            world.signals.store_words(Layout::note(self.thread), &[0]);
        }
        if let Some(used) = self.context.notes.get(self.thread) {
            used.store(false, Ordering::Release); // pairs with the acquire in `note`
        }
    }
}

/// The machine's clock, which is the same for all its processes. Wraps around after weeks.
fn milliseconds() -> u32 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u32
}

/// A group's name, free again when dropped.
pub(super) struct Name {
    context: Arc<Context>,
    given: String,
}

impl Drop for Name {
    fn drop(&mut self) {
        lock(&self.context.names).remove(&self.given);
    }
}
