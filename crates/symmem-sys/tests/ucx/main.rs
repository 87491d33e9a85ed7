//! One suite for both engines of messages, what only the fake one can do, and what needs processes.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod fake;
mod peer;
mod real;
mod recorder;
mod suite;
