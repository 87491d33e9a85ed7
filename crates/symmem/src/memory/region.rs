//! Mappings and the pointers into them: the only place where one becomes the other.
//!
//! Bounds and alignment are checked here, once, in [`Region::at`].
#![allow(unsafe_code)] // S1 (the mapping lives as long as any `Region` of it), S2, S3

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Weak};

use rustix::mm::{self, MapFlags, ProtFlags};

use super::Reach;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::sync::SharedWord;

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
/// Shared, with all pages there.
const PRESENT: MapFlags = MapFlags::SHARED.union(MapFlags::POPULATE);

/// One mapping, unmapped when its last [`Region`] goes.
struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
    kind: Kind,
}

/// What lies behind the addresses.
enum Kind {
    /// The host's memory, from `mmap`.
    Host,
    /// A device's memory, which the host does not reach; unmapped by dropping this.
    Device { _mapping: Box<dyn Send + Sync> },
    /// Memory of a peer that only a wire leads to: nothing here, and no address.
    Elsewhere,
}

// SAFETY: an address range; what is done through it is governed by S2.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !matches!(self.kind, Kind::Host) {
            return;
        }
        // SAFETY: S1: this is the last owner of a mapping that we made with exactly this base and length.
        if let Err(e) = unsafe { mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            tracing::warn!("munmap of {} bytes: {e}", self.bytes);
        }
    }
}

/// A range of mapped memory. Cloning shares the mapping; it stays mapped until the last clone is gone.
#[derive(Clone)]
pub(crate) struct Region {
    mapped: Arc<Mapped>,
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Maps the first `bytes` of a shared memory object, with all pages present.
    pub(crate) fn map(memory: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { mm::mmap(null_mut(), bytes, ACCESS, PRESENT, memory, 0) };
        Self::from_mmap(base, bytes)
    }

    /// Zeroed memory of this process alone, with all pages present.
    pub(crate) fn anonymous(bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { mm::mmap_anonymous(null_mut(), bytes, ACCESS, PRESENT) };
        Self::from_mmap(base, bytes)
    }

    /// Zeroed memory of this process alone, of which pages come when they are first touched.
    pub(crate) fn reserved(bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { mm::mmap_anonymous(null_mut(), bytes, ACCESS, MapFlags::PRIVATE) };
        Self::from_mmap(base, bytes)
    }

    fn from_mmap(base: rustix::io::Result<*mut std::ffi::c_void>, bytes: usize) -> Result<Self> {
        let base = base.map_err(Error::system(format!("mmap of {bytes} bytes")))?;
        let what = || format!("a mapping of {bytes} bytes");
        let none = || Error::unavailable(what(), "the kernel put it at address 0");
        let base = NonNull::new(base.cast()).ok_or_else(none)?;
        Ok(Self::whole(base, bytes, Kind::Host))
    }

    fn whole(base: NonNull<u8>, bytes: usize, kind: Kind) -> Self {
        Self { mapped: Arc::new(Mapped { base, bytes, kind }), offset: 0, bytes }
    }

    /// Addresses of a device's memory, mapped for as long as `mapping` lives.
    pub(crate) fn of_device(
        address: u64,
        bytes: usize,
        mapping: impl Send + Sync + 'static,
    ) -> Result<Self> {
        let what = || format!("a mapping of {bytes} bytes of a device");
        let none = || Error::unavailable(what(), "the driver put it at address 0");
        let base = NonNull::new(address as *mut u8).ok_or_else(none)?;
        Ok(Self::whole(base, bytes, Kind::Device { _mapping: Box::new(mapping) }))
    }

    /// Memory of a peer that only a wire leads to, and of which this process knows the length alone.
    pub(crate) fn elsewhere(bytes: usize) -> Self {
        Self::whole(NonNull::dangling(), bytes, Kind::Elsewhere)
    }

    /// How it is reached.
    pub(crate) fn reach(&self) -> Reach {
        match self.mapped.kind {
            Kind::Host => Reach::Host,
            Kind::Device { .. } => Reach::Device,
            Kind::Elsewhere => Reach::Wire,
        }
    }

    /// Asks for huge pages behind the range; a hint, which the kernel may not follow.
    pub(crate) fn advise_huge(&self) {
        // SAFETY: S3: exactly our own range; the advice does not change its contents.
        let advised = unsafe {
            mm::madvise(self.base().as_ptr().cast(), self.bytes, mm::Advice::LinuxHugepage)
        };
        if let Err(e) = advised {
            tracing::debug!("no huge pages for {} bytes: {e}", self.bytes);
        }
    }

    fn base(&self) -> NonNull<u8> {
        // SAFETY: S3: `offset` was checked against the mapping when this region was made.
        unsafe { self.mapped.base.add(self.offset) }
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of the first byte in this process; 0 for memory that it does not reach.
    pub(crate) fn address(&self) -> usize {
        if self.reach() == Reach::Wire { 0 } else { self.base().as_ptr() as usize }
    }

    /// A part of the region, sharing its mapping.
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Result<Self> {
        self.check(offset, bytes)?;
        Ok(Self { mapped: Arc::clone(&self.mapped), offset: self.offset + offset, bytes })
    }

    /// A pointer to `count` elements at byte `offset`, valid as long as the region lives.
    pub(crate) fn at<T: Element>(&self, offset: usize, count: usize) -> Result<NonNull<T>> {
        self.place(offset, (count, size_of::<T>()), align_of::<T>()).map(NonNull::cast)
    }

    /// The same of `count` elements of `size` bytes, which lie at multiples of `align`.
    pub(crate) fn place(
        &self,
        offset: usize,
        (count, size): (usize, usize),
        align: usize,
    ) -> Result<NonNull<u8>> {
        self.check(offset, count.saturating_mul(size))?;
        if self.reach() == Reach::Wire {
            let why = "only the network connects the two ranks";
            return Err(Error::unavailable("a pointer into a peer's memory", why));
        }
        // SAFETY: S3: checked above.
        let first = unsafe { self.base().add(offset) };
        if !first.addr().get().is_multiple_of(align) {
            let expected = format!("a byte offset at a multiple of {align}");
            return Err(Error::usage("view", expected, offset.to_string()));
        }
        Ok(first)
    }

    /// The `count` words at byte `offset`. Atomics may be shared with anyone, so a slice of them is sound.
    pub(crate) fn words(&self, offset: usize, count: usize) -> Result<&[SharedWord]> {
        self.check_host()?;
        let first = self.at::<u32>(offset, count)?.cast::<SharedWord>();
        // SAFETY: S1 by the borrow of self, S3 by `at`; atomics are S2's permitted way to share memory.
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), count) })
    }

    pub(crate) fn downgrade(&self) -> WeakRegion {
        let mapped = Arc::downgrade(&self.mapped);
        WeakRegion { mapped, offset: self.offset, bytes: self.bytes }
    }

    /// Refuses memory that the host does not reach.
    pub(crate) fn check_host(&self) -> Result<()> {
        if self.reach() == Reach::Host {
            return Ok(());
        }
        Err(Error::usage("view", "memory of the host", "memory of a device"))
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => {
                let expected = format!("a range within {} bytes", self.bytes);
                Err(Error::usage("view", expected, format!("{bytes} bytes at offset {offset}")))
            }
        }
    }
}

/// All words of a region, found once: for those who look at them often.
pub(crate) struct Words {
    first: NonNull<SharedWord>,
    count: usize,
    _region: Region,
}

// SAFETY: atomics may be shared with anyone.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    pub(crate) fn new(region: Region) -> Result<Self> {
        region.check_host()?;
        let count = region.bytes() / size_of::<u32>();
        let first = region.at::<u32>(0, count)?.cast();
        Ok(Self { first, count, _region: region })
    }
}

impl std::ops::Deref for Words {
    type Target = [SharedWord];

    fn deref(&self) -> &[SharedWord] {
        // SAFETY: S1 by the region held here, S3 by `at`; atomics are S2's permitted way to share memory.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Remembers a region without keeping it mapped.
pub(crate) struct WeakRegion {
    mapped: Weak<Mapped>,
    offset: usize,
    bytes: usize,
}

impl WeakRegion {
    /// The region, if it is still mapped.
    pub(crate) fn upgrade(&self) -> Option<Region> {
        let mapped = self.mapped.upgrade()?;
        Some(Region { mapped, offset: self.offset, bytes: self.bytes })
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({:#x}, {} bytes)", self.address(), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_once_and_cannot_wrap() {
        let r = Region::anonymous(4096).unwrap();
        assert!(r.at::<u8>(4095, 1).is_ok());
        assert!(r.at::<u8>(4096, 0).is_ok());
        assert!(r.at::<u8>(4096, 1).is_err());
        assert!(r.at::<u64>(usize::MAX - 7, 1).is_err());
        assert!(r.at::<u64>(0, usize::MAX).is_err());
        assert!(r.part(8, 4088).is_ok());
        assert!(r.part(8, 4089).is_err());
        let e = r.part(100, 5000).unwrap_err().to_string();
        assert_eq!(e, "view: expected a range within 4096 bytes, got 5000 bytes at offset 100");
    }

    #[test]
    fn a_misaligned_view_is_refused() {
        let r = Region::anonymous(4096).unwrap();
        assert!(r.at::<f64>(4, 1).is_err());
        assert!(r.at::<f32>(4, 1).is_ok());
    }

    #[test]
    fn memory_of_a_device_is_an_address_and_nothing_more() {
        let mapping = Arc::new(());
        let region = Region::of_device(0x1000, 64, Arc::clone(&mapping)).unwrap();
        let part = region.part(16, 8).unwrap();
        drop(region);
        assert_eq!((part.address(), Arc::strong_count(&mapping)), (0x1010, 2));
        let e = part.words(0, 1).unwrap_err().to_string();
        assert_eq!(e, "view: expected memory of the host, got memory of a device");
        assert!(Words::new(part.clone()).is_err());
        drop(part);
        assert_eq!(Arc::strong_count(&mapping), 1);
    }

    #[test]
    fn memory_that_only_the_network_reaches_has_a_length_and_no_address() {
        let region = Region::elsewhere(64);
        let part = region.part(16, 8).unwrap();
        assert_eq!((part.address(), part.bytes(), part.reach()), (0, 8, Reach::Wire));
        assert!(region.part(60, 8).is_err());
        let e = part.at::<u8>(0, 1).unwrap_err().to_string();
        assert!(e.contains("only the network connects the two ranks"), "{e}");
        assert!(part.words(0, 1).is_err());
    }

    #[test]
    fn a_part_keeps_the_mapping_alive() {
        let part = Region::anonymous(8192).unwrap().part(4096, 4096).unwrap();
        part.words(0, 1).unwrap()[0].store(7, crate::sync::Ordering::Relaxed);
        assert_eq!(part.words(0, 1).unwrap()[0].load(crate::sync::Ordering::Relaxed), 7);
    }
}
