//! Structures of `cuda.h`, as CUDA 12.4 and 13.4 lay them out alike.

use std::ffi::{c_int, c_uint, c_void};

use super::types::{Compare, Device, MemOp, MemoryProperties, MulticastProperties};

pub(super) const ALLOCATION_PINNED: c_int = 1;
pub(super) const LOCATION_DEVICE: c_int = 1;
pub(super) const HOST_PORTABLE: c_uint = 1;
pub(super) const HOST_MAPPED: c_uint = 2;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DEFAULT: c_uint = 0;
pub(super) const EVENT_NO_TIMING: c_uint = 2;
pub(super) const LAUNCH_COOPERATIVE: c_int = 2;
pub(super) const LAUNCH_PROGRAMMATIC: c_int = 6;
pub(super) const JIT_ERROR_LOG: c_int = 5;
pub(super) const JIT_ERROR_LOG_BYTES: c_int = 6;
pub(super) const POINTER_CONTEXT: c_int = 1;
pub(super) const POINTER_MEMORY_TYPE: c_int = 2;
pub(super) const POINTER_DEVICE: c_int = 9;
pub(super) const POINTER_RANGE_START: c_int = 11;
pub(super) const POINTER_RANGE_SIZE: c_int = 12;
pub(super) const MEMORY_TYPE_HOST: c_uint = 1;

/// `CUmemLocation`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

impl From<Device> for Location {
    fn from(device: Device) -> Self {
        Self { kind: LOCATION_DEVICE, id: device.0 }
    }
}

/// `CUmemAllocationProp`
#[repr(C)]
pub(super) struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl From<&MemoryProperties> for AllocationProp {
    fn from(properties: &MemoryProperties) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: properties.handle as c_int,
            location: properties.device.into(),
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: properties.rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
pub(super) struct AccessDesc {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// `CUmulticastObjectProp`
#[repr(C)]
pub(super) struct MulticastProp {
    devices: c_uint,
    bytes: usize,
    handle_types: u64,
    flags: u64,
}

impl From<&MulticastProperties> for MulticastProp {
    fn from(properties: &MulticastProperties) -> Self {
        let &MulticastProperties { devices, bytes, handle } = properties;
        let handle_types = (handle as c_int).cast_unsigned().into();
        Self { devices, bytes, handle_types, flags: 0 }
    }
}

/// `CUlaunchAttribute`, whose value is a union of 64 bytes; those that we set are an `int`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LaunchAttribute {
    id: c_int,
    pad: [u8; 4],
    value: [u64; 8],
}

impl LaunchAttribute {
    /// The attribute switched on.
    pub(super) const fn on(id: c_int) -> Self {
        // The first four bytes hold the int on every machine that CUDA runs on: all are little-endian.
        Self { id, pad: [0; 4], value: [1, 0, 0, 0, 0, 0, 0, 0] }
    }
}

/// `CUlaunchConfig`
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: usize,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) count: c_uint,
}

/// `CUstreamBatchMemOpParams`, in the member for waiting and writing.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct BatchMemOp {
    operation: c_int,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    pad: u64,
}

impl From<&MemOp> for BatchMemOp {
    fn from(operation: &MemOp) -> Self {
        let wait = |compare: Compare| compare as c_uint;
        let (operation, address, value, flags) = match *operation {
            MemOp::Wait32 { address, value, compare } => (1, address, value.into(), wait(compare)),
            MemOp::Write32 { address, value } => (2, address, value.into(), 0),
            MemOp::Wait64 { address, value, compare } => (4, address, value, wait(compare)),
            MemOp::Write64 { address, value } => (5, address, value, 0),
        };
        Self { operation, address, value, flags, alias: 0, pad: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    // The numbers were printed by a C program with sizeof and offsetof from cuda.h of CUDA 12.4 and of 13.4.
    #[test]
    fn structures_are_as_large_as_in_the_header() {
        assert_eq!(size_of::<Location>(), 8);
        assert_eq!(size_of::<AllocationProp>(), 32);
        assert_eq!(size_of::<AccessDesc>(), 12);
        assert_eq!(size_of::<MulticastProp>(), 32);
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(size_of::<BatchMemOp>(), 48);
    }

    #[test]
    fn members_are_where_the_header_has_them() {
        assert_eq!(offset_of!(AllocationProp, handle_types), 4);
        assert_eq!(offset_of!(AllocationProp, location), 8);
        assert_eq!(offset_of!(AllocationProp, win32), 16);
        assert_eq!(offset_of!(AllocationProp, compression), 24);
        assert_eq!(offset_of!(AllocationProp, rdma), 25);
        assert_eq!(offset_of!(AllocationProp, usage), 26);
        assert_eq!(offset_of!(AccessDesc, flags), 8);
        assert_eq!(offset_of!(MulticastProp, bytes), 8);
        assert_eq!(offset_of!(MulticastProp, handle_types), 16);
        assert_eq!(offset_of!(MulticastProp, flags), 24);
        assert_eq!(offset_of!(LaunchAttribute, value), 8);
        assert_eq!(offset_of!(LaunchConfig, block), 12);
        assert_eq!(offset_of!(LaunchConfig, shared), 24);
        assert_eq!(offset_of!(LaunchConfig, stream), 32);
        assert_eq!(offset_of!(LaunchConfig, attributes), 40);
        assert_eq!(offset_of!(LaunchConfig, count), 48);
        assert_eq!(offset_of!(BatchMemOp, address), 8);
        assert_eq!(offset_of!(BatchMemOp, value), 16);
        assert_eq!(offset_of!(BatchMemOp, flags), 24);
        assert_eq!(offset_of!(BatchMemOp, alias), 32);
    }
}
