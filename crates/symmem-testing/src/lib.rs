//! For tests with several ranks: runs them as threads or as processes, and holds the conformance suite that every
//! backend passes, with kernels for the fake driver.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "only tests use this crate"
)]

pub mod conformance;
pub mod kernels;
pub mod messages;
mod nccl;
mod processes;
mod ucx;

pub use nccl::{FakeNccl, Live};
pub use processes::{
    Ended, Job, Ranks, assert_nothing_is_held, die, die_after, gpu_ranks, latencies, mark,
    stop_until,
};
pub use symmem_chaos::random::Random;
pub use ucx::has_ucx;

/// The path of the test function that it stands in, as the test harness names it.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::strip(std::any::type_name_of_val(&here))
    }};
}

/// Takes the crate and the marker function off a type name.
#[doc(hidden)]
pub fn strip(name: &'static str) -> &'static str {
    let name = name.strip_suffix("::here").unwrap_or(name);
    let name = name.strip_suffix("::{{closure}}").unwrap_or(name);
    name.split_once("::").map_or(name, |(_, path)| path)
}
