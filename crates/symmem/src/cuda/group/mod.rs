//! What a group has on a device: its pads, its mailbox, and what has failed there.

pub(in crate::cuda) mod comm;
pub(in crate::cuda) mod failures;
pub(in crate::cuda) mod layout;
pub(in crate::cuda) mod mailbox;
