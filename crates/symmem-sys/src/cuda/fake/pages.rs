//! The memory behind the fake driver: files in memory, and mappings of them.
#![allow(unsafe_code)] // S1, S3

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::cuda::{Access, Device, FabricHandle, HandleType};

const NAME: &str = "symmem-fake";

/// A stretch of this process's addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Span {
    fn pointer(self) -> *mut c_void {
        // The provenance of every mapping is exposed when it is made.
        with_exposed_provenance_mut(self.address as usize)
    }

    /// Inaccessible addresses that nobody else has.
    pub(super) fn reserve(bytes: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the system chooses the place.
        let pointer = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) }?;
        Ok(Self { address: pointer.expose_provenance() as u64, bytes })
    }

    /// Zeroed memory.
    pub(super) fn allocate(bytes: usize) -> io::Result<(Self, Option<NonNull<u8>>)> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses the place.
        let pointer = unsafe { mmap_anonymous(null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        let span = Self { address: pointer.expose_provenance() as u64, bytes };
        Ok((span, NonNull::new(pointer.cast())))
    }

    /// Puts a file there, inaccessible yet.
    ///
    /// # Safety
    ///
    /// It lies in a reservation, and nobody uses it.
    pub(super) unsafe fn put(self, file: BorrowedFd<'_>, offset: usize) -> io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let (pointer, none) = (self.pointer(), ProtFlags::empty());
        // SAFETY: the caller has the addresses.
        unsafe { mmap(pointer, self.bytes, none, flags, file, offset as u64) }.map(|_| ())
    }

    /// Makes it a mere reservation again.
    ///
    /// # Safety
    ///
    /// It lies in a reservation, and nobody uses it.
    pub(super) unsafe fn clear(self) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let (pointer, none) = (self.pointer(), ProtFlags::empty());
        // SAFETY: the caller has the addresses.
        unsafe { mmap_anonymous(pointer, self.bytes, none, flags) }.map(|_| ())
    }

    /// Lets this process do there what any device may.
    ///
    /// # Safety
    ///
    /// It is mapped, and nobody uses what is taken away.
    pub(super) unsafe fn allow(self, access: Access) -> io::Result<()> {
        let flags = match access {
            Access::None => MprotectFlags::empty(),
            Access::Read => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: the caller has the addresses.
        unsafe { mprotect(self.pointer(), self.bytes, flags) }
    }

    /// Gives the addresses back.
    ///
    /// # Safety
    ///
    /// They are from `reserve` or `allocate`, and nobody uses them.
    pub(super) unsafe fn free(self) -> io::Result<()> {
        // SAFETY: the caller has the addresses.
        unsafe { munmap(self.pointer(), self.bytes) }
    }
}

/// What the name of a file says about the memory in it, for importers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) device: Device,
    pub(super) handle: HandleType,
    pub(super) multicast: bool,
}

/// A file of so many zeros.
pub(super) fn file(bytes: usize, label: Label) -> io::Result<OwnedFd> {
    let kind = if label.multicast { "multicast" } else { "memory" };
    let name = format!("{NAME}:{}:{}:{kind}", label.device.0, label.handle as i32);
    let file = memfd_create(name, MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes as u64)?;
    Ok(file)
}

/// What memory a descriptor is, and how long, if it is any.
pub(super) fn recognise(file: BorrowedFd<'_>) -> Option<(Label, usize)> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?.to_owned();
    let mut parts = name.strip_prefix(NAME)?.strip_prefix(':')?.split(':');
    let device = Device(parts.next()?.parse().ok()?);
    let handle = match parts.next()? {
        "1" => HandleType::Fd,
        "8" => HandleType::Fabric,
        "9" => HandleType::FdOrFabric,
        _ => HandleType::None,
    };
    let multicast = parts.next()? == "multicast";
    let bytes = usize::try_from(fstat(file).ok()?.st_size).ok()?;
    Some((Label { device, handle, multicast }, bytes))
}

/// The handle by which other processes of this machine find a file that this one keeps open.
pub(super) fn fabric_handle(file: BorrowedFd<'_>) -> FabricHandle {
    let mut handle = [0; 64];
    let text = format!("{NAME} {} {}", std::process::id(), file.as_raw_fd());
    let length = text.len().min(handle.len());
    handle[..length].copy_from_slice(&text.as_bytes()[..length]);
    handle
}

/// The file that a handle leads to.
pub(super) fn follow(handle: &FabricHandle) -> Option<OwnedFd> {
    let text = std::str::from_utf8(handle).ok()?.trim_end_matches('\0');
    let mut words = text.strip_prefix(NAME)?.split_whitespace();
    let process: u32 = words.next()?.parse().ok()?;
    let file: i32 = words.next()?.parse().ok()?;
    let path = format!("/proc/{process}/fd/{file}");
    let file: File = OpenOptions::new().read(true).write(true).open(path).ok()?;
    recognise(file.as_fd()).map(|_| file.into())
}
