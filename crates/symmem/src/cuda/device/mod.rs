//! One device: its context, the kernels for it, and the ranks that share it.

pub(in crate::cuda) mod gpu;
pub(in crate::cuda) mod kernels;
pub(in crate::cuda) mod module;
pub(in crate::cuda) mod occupancy;
pub(in crate::cuda) mod placement;
