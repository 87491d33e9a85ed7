//! Windows: symmetric memory that NCCL knows, so that its own collectives take their short ways and its signals reach it.
//!
//! A rendezvous registers the memory on the group's communicator: one that was made elsewhere and registered for the group, or
//! one of our own. Windows go with the memory, and before it.
#![allow(unsafe_code)] // S4, S5

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use symmem_sys::nccl as sys;

use super::Nccl;
use super::communicator::Communicator;
use super::elements::moved;
use super::registered::Window;
use crate::cuda::{Gpu, InUse, Stream, Symmetric, View, debug_of};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::memory::Attachment;
use crate::memory::region::Region;
use crate::symmetric::Handle;
use crate::sync::lock;

/// What a group has of it, on one device.
#[derive(Default)]
struct OfGroup(Mutex<State>);

#[derive(Default)]
struct State {
    communicator: Option<Communicator>,
    /// By the segment that was registered.
    windows: HashMap<u128, Weak<Registered>>,
}

impl OfGroup {
    fn of(group: &Group, gpu: &Gpu) -> Result<Arc<Self>> {
        group.attached(u64::from(gpu.number()), || Ok(Arc::default()))
    }

    /// The group's communicator; made when first asked for, which is collective.
    fn communicator(&self, nccl: &Nccl, group: &Group, gpu: &Gpu) -> Result<Communicator> {
        if let Some(known) = &lock(&self.0).communicator {
            return Ok(known.clone());
        }
        let made = nccl.of_group(group, gpu)?;
        Ok(lock(&self.0).communicator.get_or_insert(made).clone())
    }
}

/// A window onto all ranks' segments. The fields go in this order.
struct Registered {
    communicator: Communicator,
    /// None where NCCL makes none.
    window: Option<InUse<Window>>,
    _memory: Region,
}

impl Attachment for Registered {}

/// Registers the segments of `handle`'s memory, unless all ranks have done so for other parts of them. Those of which parts lie
/// at different offsets have no window: an offset would mean different things. Collective.
pub(crate) fn register_windows(nccl: &Nccl, gpu: &Gpu, handle: &Handle) -> Result<()> {
    const OP: &str = "rendezvous";
    let (mapping, group) = (handle.mapping(), handle.group());
    if mapping.attached.get::<Registered>().is_some() || !mapping.is_level() {
        return Ok(());
    }
    let of_group = OfGroup::of(group, gpu)?;
    let segment = handle.block().segment().id;
    let known = lock(&of_group.0).windows.get(&segment).and_then(Weak::upgrade);
    let all = group.gather_and(OP, known.is_some(), |all| Ok(!all.contains(&false)))?;
    let registered = match known.filter(|_| all) {
        Some(known) => known,
        None => {
            let communicator = of_group.communicator(nccl, group, gpu)?;
            Arc::new(Registered::new(handle, communicator, gpu)?)
        }
    };
    let mut state = lock(&of_group.0);
    state.windows.retain(|_, window| window.strong_count() > 0);
    state.windows.insert(segment, Arc::downgrade(&registered));
    drop(state);
    mapping.attached.get_or_add(|| registered);
    Ok(())
}

impl Registered {
    fn new(handle: &Handle, communicator: Communicator, gpu: &Gpu) -> Result<Self> {
        let block = handle.block();
        let (bytes, memory) = (block.segment().bytes(), block.region().clone());
        let start = (memory.address() - block.offset()) as u64;
        // SAFETY: S1: all of a segment, which the region next to it keeps.
        let window = unsafe { communicator.window(start, bytes) }?;
        if window.is_none() {
            tracing::warn!("NCCL makes no window for memory of {:?}", handle.group());
        }
        let window = window.map(|window| gpu.in_use(window));
        Ok(Self { communicator, window, _memory: memory })
    }
}

/// Symmetric memory of NCCL, with what only NCCL does with it.
pub struct Windowed<'a, T> {
    x: &'a Symmetric<T>,
    registered: Arc<Registered>,
}

impl<T: Element> Symmetric<T> {
    /// What NCCL does with this memory; [`Error::Unavailable`] if it is not from NCCL.
    pub fn nccl(&self) -> Result<Windowed<'_, T>> {
        let registered = self.handle().mapping().attached.get::<Registered>();
        let registered = registered.ok_or_else(|| {
            let why = match self.handle().backend_name() {
                "nccl" => "its parts lie at different offsets of what was registered".to_owned(),
                other => format!("its backend is {other}: only available on memory of NCCL"),
            };
            Error::unavailable("NCCL for this memory", why)
        })?;
        Ok(Windowed { x: self, registered })
    }
}

impl<T: Element> Windowed<'_, T> {
    /// The communicator that the memory is registered on, for collectives of NCCL's own.
    pub fn communicator(&self) -> &Communicator {
        &self.registered.communicator
    }

    /// The window; [`Error::Unavailable`] where NCCL has made none.
    pub fn window(&self) -> Result<&Window> {
        let why = "it does not support them between these devices";
        self.registered.window.as_deref().ok_or_else(|| Error::unavailable("a window of NCCL", why))
    }

    /// Copies `data` to rank `peer`'s part, from its element `at` on, and then signals to it, in `stream`: the signal is seen
    /// after the data. Since 2.29.
    pub fn put_signal(
        &self,
        peer: usize,
        at: usize,
        data: View<'_, T>,
        stream: &Stream,
    ) -> Result<()> {
        const OP: &str = "nccl_put_signal";
        let communicator = self.communicator();
        communicator.check_root(OP, peer)?;
        if at.checked_add(data.len).is_none_or(|end| end > self.x.len()) {
            let expected = format!("elements within the {} of rank {peer}", self.x.len());
            return Err(communicator.usage(OP, expected, format!("{} at {at}", data.len)));
        }
        let offset = self.offset() + at * size_of::<T>();
        let (window, span) = (self.window()?.handle(), moved(data.len, T::DTYPE));
        communicator.call(OP, stream, |nccl, comm| {
            // SAFETY: S3: within the peer's part, which the window covers; `data` has as many elements.
            unsafe { nccl.put_signal(comm, data.address, span, peer, window, offset, stream.raw()) }
        })
    }

    /// Has `stream` wait for one such signal of rank `peer`: what came with it is there for whatever comes after in the
    /// stream. Since 2.29.
    pub fn wait_signal(&self, peer: usize, stream: &Stream) -> Result<()> {
        const OP: &str = "nccl_wait_signal";
        let communicator = self.communicator();
        communicator.check_root(OP, peer)?;
        self.window()?;
        communicator.call(OP, stream, |nccl, comm| {
            let one = sys::WaitSignal { count: 1, peer: peer as i32, signal: 0, context: 0 };
            // SAFETY: S4: a live communicator and stream.
            unsafe { nccl.wait_signal(comm, &[one], stream.raw()) }
        })
    }

    /// The endpoint by which kernels of NCCL's reach rank `peer`'s part, and the offset there. Since 2.31.2, on devices that
    /// have such.
    pub fn cft_handle(&self, peer: usize) -> Result<(u32, usize)> {
        const OP: &str = "cft_handle";
        self.communicator().check_root(OP, peer)?;
        let (window, offset) = (self.window()?.handle(), self.offset());
        // SAFETY: S4: the window is live.
        self.communicator().ask(OP, |nccl, _| unsafe { nccl.peer_endpoint(window, offset, peer) })
    }

    /// Likewise, of all ranks at once.
    pub fn multicast_cft_handle(&self) -> Result<(u32, usize)> {
        let (window, offset) = (self.window()?.handle(), self.offset());
        let op = "multicast_cft_handle";
        // SAFETY: S4: the window is live.
        self.communicator().ask(op, |nccl, _| unsafe { nccl.multimem_endpoint(window, offset) })
    }

    /// Where this memory begins in the window.
    fn offset(&self) -> usize {
        self.x.handle().block().offset() + self.x.handle().offset()
    }
}

/// A communicator that was made elsewhere, as the one of a group; until this is dropped or unregistered.
#[must_use = "dropping it unregisters the communicator"]
pub struct External {
    of_group: Arc<OfGroup>,
    communicator: Communicator,
}

impl Nccl {
    /// Has rendezvous of `group` register memory on `gpu` on this communicator (`ncclComm_t`), which has as many ranks, in
    /// the same order. Each rank registers its own; not collective. Windows stay on the communicator that they are of.
    ///
    /// # Safety
    /// It is live until this is unregistered and all windows on it are gone, and nobody else makes calls with it at the same
    /// time as a rendezvous.
    pub unsafe fn register_external(
        &self,
        group: &Group,
        gpu: &Gpu,
        communicator: usize,
    ) -> Result<External> {
        const OP: &str = "register_external";
        // SAFETY: as the caller promises.
        let communicator = unsafe { self.adopt(gpu, communicator, group.deadline()) }?;
        let (ours, theirs) =
            ((group.rank(), group.size()), (communicator.rank(), communicator.size()));
        if ours != theirs {
            let expected = format!("a communicator of rank {} of {}", ours.0, ours.1);
            return Err(group.usage(OP, expected, format!("{} of {}", theirs.0, theirs.1)));
        }
        let of_group = OfGroup::of(group, gpu)?;
        lock(&of_group.0).communicator = Some(communicator.clone());
        Ok(External { of_group, communicator })
    }
}

impl External {
    /// Has later rendezvous of the group use another. Again, it does nothing.
    pub fn unregister(&self) {
        let mut state = lock(&self.of_group.0);
        if state.communicator.as_ref() == Some(&self.communicator) {
            state.communicator = None;
        }
    }
}

impl Drop for External {
    fn drop(&mut self) {
        self.unregister();
    }
}

debug_of!([T] Windowed<'_, T>, "Windowed": |this| memory = this.x);

debug_of!([] External, "External": |this| communicator = this.communicator);
