//! The store: one conformance suite over every implementation, the bytes on the wire, hostile clients, failures.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests, and what they share"
)]

#[path = "store/bytes.rs"]
mod bytes;
#[path = "store/conformance.rs"]
mod conformance;
#[cfg(target_endian = "little")]
#[path = "store/conversation.rs"]
mod conversation;
#[path = "store/failure.rs"]
mod failure;
#[path = "store/hostile.rs"]
mod hostile;
#[path = "store/model.rs"]
mod model;
#[path = "store/site.rs"]
mod site;

conformance::suite!(memory, site::memory());
conformance::suite!(memory_prefixed, site::prefixed(site::memory()));
conformance::suite!(tcp, site::tcp());
conformance::suite!(unix, site::unix());
conformance::suite!(tcp_prefixed, site::prefixed(site::tcp()));
