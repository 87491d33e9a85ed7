//! UCX, Unified Communication X, from 1.12 on: active messages between processes, of one machine or of several.
//!
//! [`Engine`] is what is used of it. [`load`] gives the library, [`Ucx::start`] an engine over it, and `fake::Network`
//! (feature `fake`) engines that need no library and misbehave on demand. All endpoints are in the mode in which UCX reports
//! a peer that fails. Put, get, atomics and fences are not used: over TCP the target would believe every address, and a
//! fence can wait for a dead peer.
#![allow(unsafe_code)] // S4

mod address;
mod engine;
mod failure;
mod raw;
mod real;
mod types;

#[cfg(feature = "fake")]
pub mod fake;

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use engine::{
    Answer, Body, Data, Endpoint, Engine, Events, MAX_HEADER, Posted, ReceiveBuffer, Settings,
};
pub use failure::Failure;
pub use real::Worker;

use self::raw::Functions;
use self::types::Status;
use crate::{Library, Loaded, Missing};

/// What a call answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// A version of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Changes what programs call.
    pub major: u8,
    /// Changes what peers send.
    pub minor: u8,
    /// Mends.
    pub release: u8,
}

impl Version {
    /// `major.minor.release`
    pub const fn new(major: u8, minor: u8, release: u8) -> Self {
        Self { major, minor, release }
    }

    /// Whether engines of both versions understand each other for certain.
    pub const fn understands(self, other: Self) -> bool {
        self.major == other.major && self.minor == other.minor
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// The oldest version that is used: the first that is meant to talk with later ones. Nothing newer than its header is used.
pub const OLDEST: Version = Version::new(1, 12, 0);

/// UCX's protocol layer.
pub struct Ucx {
    /// C's side.
    c: Functions,
    version: Version,
    library: Loaded,
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ucx").field("version", &self.version).finish_non_exhaustive()
    }
}

/// The library of this machine, or of `SYMMEM_UCX`; looked for once in a process.
pub fn load() -> std::result::Result<Arc<Ucx>, Missing> {
    static LOADED: OnceLock<std::result::Result<Arc<Ucx>, Missing>> = OnceLock::new();
    LOADED.get_or_init(|| Ucx::new(crate::load(Library::Ucx)?).map(Arc::new)).clone()
}

impl Ucx {
    /// The library in this file.
    pub fn open(file: &Path) -> std::result::Result<Self, Missing> {
        Self::new(crate::load_file(Library::Ucx, file)?)
    }

    fn new(library: Loaded) -> std::result::Result<Self, Missing> {
        let missing =
            |why| Missing { library: Library::Ucx, looked_for: Library::Ucx.sonames(), why };
        let c = Functions::new(&library)
            .map_err(|symbol| missing(format!("this UCX has no {symbol}")))?;
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: it only writes the three numbers.
        unsafe { (c.ucp_get_version)(&mut major, &mut minor, &mut release) };
        let [major, minor, release] =
            [major, minor, release].map(|number| u8::try_from(number).unwrap_or(u8::MAX));
        let version = Version { major, minor, release };
        recent_enough(version).map_err(missing)?;
        Ok(Self { c, version, library })
    }

    /// `ucp_get_version`
    pub fn version(&self) -> Version {
        self.version
    }

    /// The library's file.
    pub fn path(&self) -> Option<PathBuf> {
        self.library.path()
    }

    /// A new engine, which tells `events` what happens.
    pub fn start(self: &Arc<Self>, settings: &Settings, events: Arc<dyn Events>) -> Result<Worker> {
        Worker::new(Arc::clone(self), settings, events)
    }

    /// `ucs_status_string`: a failure in the library's words.
    fn failure(&self, call: &'static str, status: Status) -> Failure {
        // SAFETY: it takes any status.
        let words = unsafe { (self.c.ucs_status_string)(status) };
        if words.is_null() {
            return Failure::of(call, status);
        }
        // SAFETY: the library's texts end with a zero and stay, at least until the thread asks again.
        let text = unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned();
        Failure { call, status: Some(status), text }
    }

    /// Success, or a failure in the library's words.
    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == types::OK { Ok(()) } else { Err(self.failure(call, status)) }
    }
}

fn recent_enough(version: Version) -> std::result::Result<(), String> {
    if version.major == OLDEST.major && version >= OLDEST {
        return Ok(());
    }
    let Version { major, minor, .. } = OLDEST;
    Err(format!("{version} is loaded, but {major}.{minor} or a later {major}.x is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_is_told_so() {
        match load() {
            Ok(ucx) => assert!(ucx.version() >= OLDEST),
            Err(missing) => {
                assert!(missing.to_string().contains("UCX could not be loaded"), "{missing}");
            }
        }
    }

    #[test]
    fn a_library_that_is_something_else_is_missing() {
        let missing = Ucx::new(Loaded::without_functions()).unwrap_err();
        assert!(missing.why.contains("this UCX has no ucp_get_version"), "{missing}");
    }

    #[test]
    fn an_old_library_is_told_what_is_needed() {
        assert_eq!(recent_enough(OLDEST), Ok(()));
        assert_eq!(recent_enough(Version::new(1, 23, 0)), Ok(()));
        let why = recent_enough(Version::new(1, 11, 2)).unwrap_err();
        assert_eq!(why, "1.11.2 is loaded, but 1.12 or a later 1.x is needed");
        assert!(recent_enough(Version::new(2, 0, 0)).is_err());
    }

    #[test]
    fn releases_of_one_version_understand_each_other() {
        assert!(Version::new(1, 13, 0).understands(Version::new(1, 13, 1)));
        assert!(!Version::new(1, 13, 0).understands(Version::new(1, 14, 0)));
    }
}
