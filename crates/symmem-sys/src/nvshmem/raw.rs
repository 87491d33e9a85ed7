//! Structures and functions of `nvshmem_host.h`, as 3.4 and 3.8 have them alike.

use std::ffi::{c_int, c_long, c_uint};

use super::{Failure, Result};

/// `NVSHMEMX_INIT_WITH_UNIQUEID`
pub(super) const INIT_WITH_UNIQUE_ID: c_uint = 1 << 3;
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

/// A struct with one pointer for each function, and a method for each that calls it: as `table::functions`, for functions
/// that return other things than a status.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) -> $answer:ty;)*) => {
        /// The library's functions, from `nvshmem_host.h`. Addresses are of device memory, so numbers.
        pub(super) struct Functions {
            $($name: Option<unsafe extern "C" fn($($type),*) -> $answer>,)*
        }

        #[allow(unsafe_code)] // S4
        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Functions {
            /// Looks up every function; calls of a missing one fail.
            pub(super) fn new(library: &crate::Loaded) -> Self {
                Self {
                    $(
                        // SAFETY: the line of the table was copied from the library's public header.
                        $name: unsafe { library.function(stringify!($name)) },
                    )*
                }
            }

            /// The functions that are not there.
            pub(super) fn missing(&self) -> Vec<&'static str> {
                let all = [$((stringify!($name), self.$name.is_some()),)*];
                all.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
            }

            $(
                pub(super) unsafe fn $name(&self $(, $argument: $type)*) -> Result<$answer> {
                    let Some(function) = self.$name else {
                        return Err(Failure::missing_symbol(stringify!($name)));
                    };
                    // SAFETY: the signature is the header's, and the caller keeps what the documentation of the
                    // function asks for.
                    Ok(unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

functions! {
    nvshmemx_vendor_get_version_info(major: *mut c_int, minor: *mut c_int, patch: *mut c_int) -> ();
    nvshmemx_init_status() -> c_int;
    nvshmemx_get_uniqueid(id: *mut RawUniqueId) -> c_int;
    nvshmemx_hostlib_init_attr(flags: c_uint, attributes: *mut InitAttr) -> c_int;
    nvshmemx_hostlib_finalize() -> ();
    nvshmem_malloc(bytes: usize) -> u64;
    nvshmem_align(alignment: usize, bytes: usize) -> u64;
    nvshmem_free(address: u64) -> ();
    nvshmem_ptr(address: u64, pe: c_int) -> u64;
    nvshmemx_mc_ptr(team: c_int, address: u64) -> u64;
    nvshmem_team_split_strided(
        parent: c_int, start: c_int, stride: c_int, size: c_int, config: *const u8,
        mask: c_long, team: *mut c_int) -> c_int;
    nvshmem_team_destroy(team: c_int) -> ();
    nvshmem_team_my_pe(team: c_int) -> c_int;
    nvshmem_team_n_pes(team: c_int) -> c_int;
    nvshmem_team_translate_pe(from: c_int, pe: c_int, to: c_int) -> c_int;
    nvshmemx_cumodule_init(module: usize) -> c_int;
    nvshmemx_cumodule_finalize(module: usize) -> c_int;
    nvshmemx_putmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, stream: usize) -> ();
    nvshmemx_getmem_on_stream(to: u64, from: u64, bytes: usize, pe: c_int, stream: usize) -> ();
    nvshmemx_putmem_signal_on_stream(
        to: u64, from: u64, bytes: usize, signal: u64, value: u64, op: c_int, pe: c_int,
        stream: usize) -> ();
    nvshmemx_signal_op_on_stream(
        signal: u64, value: u64, op: c_int, pe: c_int, stream: usize) -> ();
    nvshmemx_signal_wait_until_on_stream(
        signal: u64, compare: c_int, value: u64, stream: usize) -> ();
    nvshmemx_quiet_on_stream(stream: usize) -> ();
    nvshmemx_barrier_on_stream(team: c_int, stream: usize) -> c_int;
    nvshmemx_team_sync_on_stream(team: c_int, stream: usize) -> c_int;
    nvshmemx_broadcastmem_on_stream(
        team: c_int, to: u64, from: u64, bytes: usize, root: c_int, stream: usize) -> c_int;
    nvshmemx_alltoallmem_on_stream(
        team: c_int, to: u64, from: u64, bytes: usize, stream: usize) -> c_int;
    nvshmemx_fcollectmem_on_stream(
        team: c_int, to: u64, from: u64, bytes: usize, stream: usize) -> c_int;
}

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
