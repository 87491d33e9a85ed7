//! Main memory shared between processes: a sealed memfd, passed to peers as a descriptor and mapped by each.

mod cgroup;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};

use super::region::Region;
use super::{Allocation, Backend, Device, Exported};
use crate::error::{Error, Result};

/// Processes on one machine.
#[derive(Debug)]
pub struct Host;

const HUGE_PAGE: usize = 2 << 20;
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

impl Backend for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn probe(&self) -> Result<()> {
        memfd(4096, MemfdFlags::empty()).map(drop)
    }

    fn allocate(&self, bytes: usize) -> Result<Allocation> {
        if let Some((fd, region)) = huge(bytes) {
            return Ok(shared(fd, region));
        }
        check_available(bytes)?;
        let fd = memfd(bytes, MemfdFlags::empty())?;
        let region = Region::map(fd.as_fd(), bytes)?;
        if bytes >= HUGE_PAGE {
            region.advise_huge();
        }
        Ok(shared(fd, region))
    }

    fn import(&self, exported: Exported, bytes: usize) -> Result<Region> {
        match exported {
            Exported::Descriptor(fd) => {
                // All of it: memory on huge pages can only be mapped, and unmapped, by whole ones.
                let whole = check_foreign(fd.as_fd(), bytes)?;
                Region::map(fd.as_fd(), whole)?.part(0, bytes)
            }
            Exported::Mapping(region) => region.part(0, bytes),
            Exported::Bytes(_) => Err(Error::unavailable(
                "the host backend",
                "the peer sent a handle to memory of a device",
            )),
        }
    }
}

/// What is mapped, and handed on as a descriptor.
fn shared(fd: OwnedFd, region: Region) -> Allocation {
    Allocation::of_host(region, move || {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, 3);
        Ok(Exported::Descriptor(fd.map_err(Error::system("dup of a memory descriptor"))?))
    })
}

/// A memory object of fixed size whose pages are all reserved, so that running out is an error here
/// and not a signal at some later store.
fn memfd(bytes: usize, flags: MemfdFlags) -> Result<OwnedFd> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = fs::memfd_create("symmem", flags).map_err(Error::system("memfd_create"))?;
    let size = bytes as u64;
    fs::ftruncate(&fd, size)
        .map_err(Error::system(format!("ftruncate of a memfd to {bytes} bytes")))?;
    fs::fallocate(&fd, FallocateFlags::empty(), 0, size)
        .map_err(Error::system(format!("fallocate of {bytes} bytes of shared memory")))?;
    fs::fcntl_add_seals(&fd, SIZE_SEALS).map_err(Error::system("sealing a memfd"))?;
    Ok(fd)
}

/// Reserved huge pages, if at least one would be filled and there are enough of them.
fn huge(bytes: usize) -> Option<(OwnedFd, Region)> {
    let pages = bytes.div_ceil(HUGE_PAGE);
    if bytes < HUGE_PAGE || pages > free_huge_pages() {
        return None;
    }
    let bytes = pages * HUGE_PAGE;
    let fd = memfd(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
    let mapped = fd.and_then(|fd| Region::map(fd.as_fd(), bytes).map(|region| (fd, region)));
    mapped.inspect_err(|e| tracing::debug!("falling back to ordinary pages: {e}")).ok()
}

fn free_huge_pages() -> usize {
    std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

/// A peer's descriptor is mapped only if no one can shrink the memory under our feet.
/// Returns its size.
fn check_foreign(fd: BorrowedFd<'_>, bytes: usize) -> Result<usize> {
    let seals = fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    let size = fs::fstat(fd).map_err(Error::system("fstat of a peer's memory"))?.st_size;
    if seals.contains(SIZE_SEALS) && size >= bytes as i64 {
        return Ok(size as usize);
    }
    Err(Error::protocol(
        "a peer's memory",
        format!("a memfd of at least {bytes} bytes, sealed against shrinking and growing"),
        format!("{size} bytes with seals {seals:?}"),
    ))
}

/// Refuses what the machine, or a limit of this process's control groups, cannot hold: without this the kernel would end
/// some process instead.
pub(super) fn check_available(bytes: usize) -> Result<()> {
    let machine = available_memory().map(|left| (left, "on this machine".to_owned()));
    let group = cgroup::memory_left().map(|(left, group)| {
        (left, format!("within the memory limit of the control group {}", group.display()))
    });
    match machine.into_iter().chain(group).min() {
        Some((available, place)) if bytes > available => Err(Error::unavailable(
            format!("{} MiB of host memory", bytes >> 20),
            format!("{} MiB are available {place}", available >> 20),
        )),
        _ => Ok(()),
    }
}

fn available_memory() -> Option<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn memory_is_zeroed_sealed_and_shared() {
        let a = Host.allocate(10_000).unwrap();
        let b = Host.import(a.export(false).unwrap(), 10_000).unwrap();
        assert_ne!(a.region.address(), b.address());
        assert_eq!(b.words(8000, 1).unwrap()[0].load(Ordering::Relaxed), 0);
        a.region.words(8000, 1).unwrap()[0].store(42, Ordering::Relaxed);
        assert_eq!(b.words(8000, 1).unwrap()[0].load(Ordering::Relaxed), 42);
    }

    #[test]
    fn a_mapping_outlives_its_owner() {
        let a = Host.allocate(4096).unwrap();
        let b = Host.import(a.export(false).unwrap(), 4096).unwrap();
        a.region.words(0, 1).unwrap()[0].store(7, Ordering::Relaxed);
        drop(a);
        assert_eq!(b.words(0, 1).unwrap()[0].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fs::ftruncate(&fd, 4096).unwrap();
        let e = Host.import(Exported::Descriptor(fd), 4096).unwrap_err().to_string();
        assert!(e.contains("sealed against shrinking"), "{e}");
    }

    #[test]
    fn memory_shorter_than_agreed_is_refused() {
        let a = Host.allocate(4096).unwrap();
        let e = Host.import(a.export(false).unwrap(), 8192).unwrap_err().to_string();
        assert!(e.contains("at least 8192 bytes"), "{e}");
    }

    #[test]
    fn large_memory_is_the_same_on_huge_pages_and_on_ordinary_ones() {
        // On a machine with reserved huge pages this takes them: `sysctl vm.nr_hugepages=8`.
        let bytes = 2 * HUGE_PAGE + 4096;
        let a = Host.allocate(bytes).unwrap();
        assert!(a.region.bytes() >= bytes);
        let b = Host.import(a.export(false).unwrap(), a.region.bytes()).unwrap();
        a.region.words(bytes - 4, 1).unwrap()[0].store(9, Ordering::Relaxed);
        assert_eq!(b.words(bytes - 4, 1).unwrap()[0].load(Ordering::Relaxed), 9);
        assert_eq!(b.words(0, 1).unwrap()[0].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_by_name() {
        let e = Host.allocate(1 << 50).err().unwrap().to_string();
        assert!(e.contains("MiB are available"), "{e}");
    }
}
