//! Structures of `nvshmem_host.h`, as 3.4 and 3.8 have them alike.

use std::ffi::{c_int, c_uint};

/// `NVSHMEMX_INIT_WITH_UNIQUEID`
pub(super) const INIT_WITH_UNIQUE_ID: c_uint = 1 << 3;
/// `NVSHMEM_CMP_EQ`
pub(super) const COMPARE_EQUAL: c_int = 0;
/// `NVSHMEM_TEAM_INVALID`
pub(super) const TEAM_INVALID: c_int = -1;

/// What the first word of every structure says: the first version of it, and its size.
const fn version<T>() -> c_int {
    (1 << 16) + size_of::<T>() as c_int
}

/// `nvshmemx_uniqueid_v1`
#[repr(C)]
pub(super) struct RawUniqueId {
    version: c_int,
    internal: [u8; 124],
}

impl RawUniqueId {
    pub(super) const EMPTY: Self = Self { version: version::<Self>(), internal: [0; 124] };

    pub(super) fn from_bytes(bytes: &[u8; 128]) -> Self {
        let mut internal = [0; 124];
        internal.copy_from_slice(&bytes[4..]);
        let version = c_int::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Self { version, internal }
    }

    pub(super) fn to_bytes(&self) -> [u8; 128] {
        let mut bytes = [0; 128];
        bytes[..4].copy_from_slice(&self.version.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.internal);
        bytes
    }
}

/// `nvshmemx_uniqueid_args_v1`
#[repr(C)]
struct UniqueIdArgs {
    version: c_int,
    id: *const RawUniqueId,
    rank: c_int,
    ranks: c_int,
}

/// `nvshmemx_init_args_v1`
#[repr(C)]
struct InitArgs {
    version: c_int,
    unique_id: UniqueIdArgs,
    content: [u8; 96],
}

/// `nvshmemx_init_attr_v1`. Newer versions have a second one, which says the device too, and take this as well.
#[repr(C)]
pub(super) struct InitAttr {
    version: c_int,
    mpi_comm: usize,
    args: InitArgs,
}

impl InitAttr {
    /// For rank `rank` of `ranks`; `id` has to outlive the call that gets this.
    pub(super) const fn new(id: *const RawUniqueId, rank: c_int, ranks: c_int) -> Self {
        let unique_id = UniqueIdArgs { version: version::<UniqueIdArgs>(), id, rank, ranks };
        let args = InitArgs { version: version::<InitArgs>(), unique_id, content: [0; 96] };
        Self { version: version::<Self>(), mpi_comm: 0, args }
    }
}

/// `nvshmemx_<type>_<op>_reduce_on_stream`
pub(super) type Reduce = unsafe extern "C" fn(c_int, u64, u64, usize, usize) -> c_int;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    // The headers of 3.4 and 3.8 assert these sizes; the offsets follow from the members.
    #[test]
    fn structures_are_as_large_as_the_headers_assert() {
        assert_eq!(size_of::<RawUniqueId>(), 128);
        assert_eq!(size_of::<UniqueIdArgs>(), 24);
        assert_eq!(size_of::<InitArgs>(), 128);
        assert_eq!(size_of::<InitAttr>(), 144);
        assert_eq!(offset_of!(UniqueIdArgs, id), 8);
        assert_eq!(offset_of!(UniqueIdArgs, rank), 16);
        assert_eq!(offset_of!(InitArgs, unique_id), 8);
        assert_eq!(offset_of!(InitAttr, args), 16);
    }

    #[test]
    fn structures_say_their_version_and_size() {
        let attributes = InitAttr::new(&RawUniqueId::EMPTY, 1, 2);
        assert_eq!(attributes.version, 0x1_0090);
        assert_eq!(attributes.args.version, 0x1_0080);
        assert_eq!(attributes.args.unique_id.version, 0x1_0018);
        assert_eq!(RawUniqueId::EMPTY.version, 0x1_0080);
    }

    #[test]
    fn a_unique_id_survives_its_way_as_bytes() {
        let mut bytes = RawUniqueId::EMPTY.to_bytes();
        bytes[127] = 7;
        assert_eq!(RawUniqueId::from_bytes(&bytes).to_bytes(), bytes);
    }
}
