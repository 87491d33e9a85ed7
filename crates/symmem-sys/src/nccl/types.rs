//! Versions, handles, element types and structures of NCCL, in Rust's types.
#![allow(unsafe_code)] // S4

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::mem::offset_of;
use std::ptr;

use crate::table::handles;

/// A version of the library, such as 2.28.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 2.
    pub major: i32,
    /// 28.
    pub minor: i32,
    /// 9.
    pub patch: i32,
}

impl Version {
    /// The version of these numbers.
    pub const fn new(major: i32, minor: i32, patch: i32) -> Self {
        Self { major, minor, patch }
    }

    /// From `NCCL_VERSION_CODE`, which was 2805 for 2.8.5 and has had one more digit since 2.9.
    pub const fn from_code(code: c_int) -> Self {
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Self::new(code / unit, code % unit / 100, code % 100)
    }

    /// `NCCL_VERSION_CODE`
    pub const fn code(self) -> c_int {
        let unit = if self.major <= 2 && self.minor <= 8 { 1000 } else { 10_000 };
        self.major * unit + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

mod sealed {
    /// Only the library's handles are handles.
    pub trait Sealed {}
}
use sealed::Sealed;

/// A handle of the library.
pub trait Handle: Sealed + Copy {
    /// What the library has given; none where it has given none.
    #[doc(hidden)]
    fn given(raw: usize) -> Option<Self>;
}

handles! {
    "library":
    /// `ncclComm_t`: this rank's end of a communicator.
    Comm(usize);
    /// `ncclWindow_t`: memory of all ranks that was registered together.
    Window(usize);
    /// What `ncclCommRegister` gives: memory of this rank that was registered.
    Registration(usize);
}

macro_rules! given {
    ($($name:ident),*) => {$(
        impl Sealed for $name {}

        impl Handle for $name {
            fn given(raw: usize) -> Option<Self> {
                (raw != 0).then_some(Self::new(raw))
            }
        }
    )*};
}

given!(Comm, Window, Registration);

/// `ncclUniqueId`: what the ranks of a communicator find each other by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

/// `ncclDataType_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs)] // the names say it
pub enum DataType {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    /// Since 2.24.
    F8E4M3 = 10,
    /// Since 2.24.
    F8E5M2 = 11,
}

impl DataType {
    /// The first version that knows it: an earlier one would take it for nonsense.
    pub(super) const fn since(self) -> Version {
        match self {
            Self::F8E4M3 | Self::F8E5M2 => super::FLOAT8,
            _ => super::OLDEST,
        }
    }

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// `ncclRedOp_t`: one that is built in, or one that a communicator has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RedOp(pub c_int);

impl RedOp {
    /// `ncclSum`
    pub const SUM: Self = Self(0);
    /// `ncclProd`
    pub const PROD: Self = Self(1);
    /// `ncclMax`
    pub const MAX: Self = Self(2);
    /// `ncclMin`
    pub const MIN: Self = Self(3);
    /// `ncclAvg`
    pub const AVG: Self = Self(4);
}

/// `NCCL_WIN_DEFAULT` and `NCCL_WIN_COLL_SYMMETRIC`: how a window is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum WindowFlags {
    /// Anyhow.
    Default = 0,
    /// All ranks give the same offset of their window in every collective call.
    CollSymmetric = 1,
}

/// What a shrink does first: `NCCL_SHRINK_DEFAULT` and `NCCL_SHRINK_ABORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ShrinkFlags {
    /// Nothing: the communicator is in order.
    Default = 0,
    /// It ends what is going on, for a rank is gone.
    Abort = 1,
}

/// `ncclWaitSignalDesc_t`: signals that are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WaitSignal {
    /// How many.
    pub count: c_int,
    /// From which rank.
    pub peer: c_int,
    /// On which signal; only 0 as of 2.29.
    pub signal: c_int,
    /// In which context; only 0 as of 2.29.
    pub context: c_int,
}

/// How a communicator is to work; what is not said is the library's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Config {
    /// Whether calls wait for the other ranks; where not, they answer [`Failure::IN_PROGRESS`](super::Failure).
    pub blocking: Option<bool>,
}

/// `ncclConfig_t` as of 2.27, to which later versions append. Its first fields are those of 2.19.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl RawConfig {
    const MAGIC: c_uint = 0xcafe_beef;
    const UNDEFINED: c_int = c_int::MIN;
    /// The structure up to 2.26, of which libraries before 2.27 know no more.
    const OLD_BYTES: usize = offset_of!(RawConfig, traffic_class).next_multiple_of(8);

    /// The structure for a library of `version`: never more than that knows, and never newer than what this is written for.
    pub(super) fn new(config: &Config, version: Version) -> Self {
        let new = version >= super::WINDOWS;
        let (size, written_for) = if new {
            (size_of::<Self>(), super::WINDOWS)
        } else {
            (Self::OLD_BYTES, super::OLDEST)
        };
        Self {
            size,
            magic: Self::MAGIC,
            version: written_for.code().unsigned_abs(),
            blocking: config.blocking.map_or(Self::UNDEFINED, c_int::from),
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: ptr::null(),
            split_share: Self::UNDEFINED,
            traffic_class: Self::UNDEFINED,
            comm_name: ptr::null(),
            collnet_enable: Self::UNDEFINED,
            cta_policy: Self::UNDEFINED,
            shrink_share: Self::UNDEFINED,
            nvls_ctas: Self::UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The numbers were printed by a C program with sizeof and offsetof from nccl.h of 2.19.3, 2.27.3 and 2.32.3.
    #[test]
    fn structures_are_laid_out_as_in_the_header() {
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
        assert_eq!(size_of::<WaitSignal>(), 16);
        assert_eq!(size_of::<RawConfig>(), 72);
        assert_eq!(RawConfig::OLD_BYTES, 48);
        assert_eq!(offset_of!(RawConfig, version), 12);
        assert_eq!(offset_of!(RawConfig, blocking), 16);
        assert_eq!(offset_of!(RawConfig, net_name), 32);
        assert_eq!(offset_of!(RawConfig, split_share), 40);
        assert_eq!(offset_of!(RawConfig, comm_name), 48);
        assert_eq!(offset_of!(RawConfig, cta_policy), 60);
        assert_eq!(offset_of!(RawConfig, nvls_ctas), 68);
    }

    #[test]
    fn an_old_library_gets_the_structure_that_it_knows() {
        let config = Config { blocking: Some(false) };
        let old = RawConfig::new(&config, Version::new(2, 21, 5));
        assert_eq!((old.size, old.version, old.blocking), (48, 21900, 0));
        let new = RawConfig::new(&config, Version::new(2, 32, 3));
        assert_eq!((new.size, new.version, new.magic), (72, 22700, 0xcafe_beef));
        assert_eq!((new.split_share, new.cta_policy), (c_int::MIN, c_int::MIN));
    }

    #[test]
    fn versions_are_read_as_they_were_written_before_2_9_and_since() {
        assert_eq!(Version::from_code(2805), Version::new(2, 8, 5));
        assert_eq!(Version::from_code(22809), Version::new(2, 28, 9));
        assert_eq!(Version::from_code(22809).to_string(), "2.28.9");
        for code in [2805, 21903, 23203] {
            assert_eq!(Version::from_code(code).code(), code);
        }
    }
}
