//! Memory for tensors that peers read in place, allocated by each rank on its own and used again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use symmem::internals::Registered;
use symmem::{Buffer, Group, Result};

/// The least that is allocated: a tensor of less is staged in one piece anyway.
const LEAST: usize = 4 << 10;

/// The allocations of one process group on this rank.
pub(super) struct Arena {
    group: Group,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Free ones by their size, the last that was used last.
    free: HashMap<usize, Vec<Piece>>,
    is_closed: bool,
}

/// One allocation.
struct Piece {
    buffer: Buffer<u8>,
    /// By which calls find it.
    _mark: Arc<Registered>,
}

/// An allocation in use. The arena has it back when this is dropped, or if there is no arena any more, the system.
pub(super) struct Lease {
    piece: Option<Piece>,
    arena: Weak<Arena>,
}

/// The size of the allocation for so many bytes: one of four in every power of two, so that few sizes are kept.
fn rounded(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(LEAST);
    let step = (bytes.checked_next_power_of_two()? / 8).max(LEAST);
    bytes.checked_next_multiple_of(step)
}

impl Arena {
    pub(super) fn new(group: &Group) -> Arc<Self> {
        Arc::new(Self { group: group.clone(), state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is done under the lock that could leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for so many bytes, not zeroed; `None` if the group has ended. No other rank takes part.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Option<Lease>> {
        let Some(size) = rounded(bytes) else { return Ok(None) };
        let free = {
            let mut state = self.lock();
            if state.is_closed {
                return Ok(None);
            }
            state.free.get_mut(&size).and_then(Vec::pop)
        };
        let piece = match free {
            Some(piece) => piece,
            None => {
                let buffer = self.group.alloc::<u8>(size)?;
                Piece { _mark: Registered::mark(&buffer), buffer }
            }
        };
        Ok(Some(Lease { piece: Some(piece), arena: Arc::downgrade(self) }))
    }

    /// Frees what is not in use, and what is when it is dropped.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let free = std::mem::take(&mut state.free);
        drop(state);
        drop(free); // not under the lock: it unmaps memory
    }

    /// Bytes that are free.
    pub(super) fn free_bytes(&self) -> usize {
        self.lock().free.iter().map(|(size, pieces)| size * pieces.len()).sum()
    }
}

impl Lease {
    pub(super) fn address(&self) -> usize {
        self.piece.as_ref().map_or(0, |piece| piece.buffer.local().as_ptr() as usize)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(piece) = self.piece.take() else { return };
        let Some(arena) = self.arena.upgrade() else { return };
        let mut state = arena.lock();
        if !state.is_closed {
            state.free.entry(piece.buffer.len()).or_default().push(piece);
        }
    }
}
