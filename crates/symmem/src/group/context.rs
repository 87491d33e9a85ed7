//! What all groups and buffers of one rank share: its connections, and tables of names and memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::backend::Backend;
use crate::block::{Block, Imports};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::store::{SharedStore, TcpServer};

pub(crate) struct Context {
    pub(crate) mesh: Mesh,
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
    /// Living allocations by address.
    blocks: Mutex<BTreeMap<usize, Weak<Block>>>,
    /// Allocations that outlive their users, by the users' ids.
    persistent: Mutex<HashMap<u64, (DType, Arc<Block>)>>,
    /// The job's store, where this rank hosts it; declared last, it goes last.
    _server: Option<TcpServer>,
}

/// What a world was told about its ranks' devices.
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
        let pads = if mesh.in_one_process() { "process" } else { "host" };
        Ok(Self {
            pad_backend: crate::backend::by_name(pads)?,
            mesh,
            store,
            backend,
            pad_size,
            devices,
            names: Mutex::default(),
            imports: Imports::default(),
            blocks: Mutex::default(),
            persistent: Mutex::default(),
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

    pub(crate) fn register(&self, block: &Arc<Block>) {
        let mut blocks = lock(&self.blocks);
        blocks.retain(|_, b| b.strong_count() > 0);
        blocks.insert(block.region().address(), Arc::downgrade(block));
    }

    /// Forgets an allocation that its owner has parted from for good.
    pub(crate) fn unregister(&self, block: &Block) {
        lock(&self.blocks).remove(&block.region().address());
    }

    /// The living allocation whose data cover `address`, and how far into them it lies.
    pub(crate) fn find(&self, address: usize) -> Option<(Arc<Block>, usize)> {
        let blocks = lock(&self.blocks);
        let (&start, block) = blocks.range(..=address).next_back()?;
        let block = block.upgrade()?;
        let offset = address - start;
        (offset < block.shape().bytes.max(1)).then_some((block, offset))
    }

    /// Whether a living allocation of ours, other than `besides`, took part in that rendezvous.
    pub(crate) fn holds(&self, group: u128, number: u64, besides: Option<&Arc<Block>>) -> bool {
        let blocks = lock(&self.blocks);
        let other = |b: &Arc<Block>| !besides.is_some_and(|besides| Arc::ptr_eq(b, besides));
        let mut others = blocks.values().filter_map(Weak::upgrade).filter(other);
        others.any(|b| b.mapping(group).is_some_and(|m| m.number == number))
    }

    pub(crate) fn persistent(&self) -> MutexGuard<'_, HashMap<u64, (DType, Arc<Block>)>> {
        lock(&self.persistent)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.mesh.leave("it left", None);
    }
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is done under these locks that could leave a table half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
