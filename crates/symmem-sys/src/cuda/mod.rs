//! The CUDA driver: a trait with everything that the library needs of it, and who implements it.
//!
//! [`load`] gives the real one. The fake one, `fake::Fake` (feature `fake`), keeps "device" memory in files in
//! memory, so that everything but kernels runs on a machine without CUDA.

mod driver;
mod failure;
mod raw;
mod real;
mod types;

#[cfg(feature = "fake")]
pub mod fake;

use std::sync::{Arc, OnceLock};

pub use driver::{Devices, Driver, Kernels, Streams, VirtualMemory};
pub use failure::{Failure, code};
pub use real::Cuda;
pub use types::*;

use crate::{Library, Missing};

/// What a call of the driver answers.
pub type Result<T> = std::result::Result<T, Failure>;

/// The oldest CUDA version that a driver must support, as [`Devices::version`] writes it: 12.3, the first with both
/// multicast and fabric handles.
pub const OLDEST: i32 = 12030;

/// The driver of this machine; looked for once in a process.
///
/// It is not initialised: call [`init`](Devices::init). A machine without a driver, or with one that is older than
/// [`OLDEST`], is a [`Missing`] that says so.
pub fn load() -> std::result::Result<Arc<dyn Driver>, Missing> {
    static LOADED: OnceLock<std::result::Result<Arc<Cuda>, Missing>> = OnceLock::new();
    LOADED.get_or_init(|| open().map(Arc::new)).clone().map(|cuda| cuda as Arc<dyn Driver>)
}

fn open() -> std::result::Result<Cuda, Missing> {
    let missing = |why| Library::Cuda.missing(why);
    let cuda = Cuda::open()?;
    let version = cuda.version().map_err(|failure| missing(failure.to_string()))?;
    recent_enough(version).map_err(missing)?;
    Ok(cuda)
}

fn recent_enough(version: i32) -> std::result::Result<(), String> {
    let spell = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    if version >= OLDEST {
        return Ok(());
    }
    let (has, needs) = (spell(version), spell(OLDEST));
    Err(format!("the driver supports CUDA {has}, but {needs} is needed: update the driver"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        match load() {
            Ok(driver) => assert!(driver.version().unwrap() >= OLDEST),
            Err(missing) => {
                assert_eq!(missing.library, Library::Cuda);
                assert!(missing.to_string().contains("CUDA driver could not be loaded"));
                assert!(missing.why.contains("libcuda.so"), "{missing}");
            }
        }
    }

    #[test]
    fn an_old_driver_is_told_what_is_needed() {
        assert_eq!(recent_enough(12030), Ok(()));
        let why = recent_enough(11080).unwrap_err();
        assert!(why.contains("CUDA 11.8, but 12.3 is needed"), "{why}");
    }

    #[test]
    fn a_failure_names_the_call_and_the_code() {
        let failure = Failure::new("cuMemCreate", code::NOT_PERMITTED, "operation not permitted");
        let text = "cuMemCreate failed: CUDA_ERROR_NOT_PERMITTED (800): operation not permitted";
        assert_eq!(failure.to_string(), text);
        let missing = Failure::missing_symbol("cuLaunchKernelEx", "cuLaunchKernelEx");
        assert_eq!(missing.name, "missing symbol");
        assert!(missing.is_unsupported());
    }
}
