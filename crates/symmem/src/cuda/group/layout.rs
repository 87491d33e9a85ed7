//! The parameters that kernels get by value, with the layout of `kernels/symmem.cuh`, and the offsets within a group's pad.

use crate::sync::SharedWord;

/// The most ranks that a kernel can address.
pub(crate) const MAX_RANKS: usize = 72;
/// The most blocks of a kernel that synchronises others.
pub(crate) const MAX_BLOCKS: u32 = 256;
/// The most blocks, and threads of one, that send data with flags.
pub(crate) const FLAGGED: (u32, u32) = (64, 256);

/// `SymmemPointers`: an address for each rank.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Pointers(pub(crate) [u64; MAX_RANKS]);

impl Pointers {
    pub(crate) fn new(addresses: &[usize]) -> Self {
        let at = |rank: usize| addresses.get(rank).map_or(0, |&address| address as u64);
        Self(std::array::from_fn(at))
    }
}

/// `SymmemGroup`: a group's pads, and what a kernel's blocks say when they synchronise.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GroupParameter {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    /// 1: all ranks on one device, whose scope is enough; 0: the system's.
    pub(crate) scope: u32,
    pub(crate) op: u32,
    pub(crate) call: u32,
    pub(crate) reserved: u32,
    /// Nanoseconds; 0 for ever.
    pub(crate) timeout: u64,
    pub(crate) mailbox: u64,
    pub(crate) pads: Pointers,
}

/// `SymmemHandle`: an allocation, for its own signals and for users' kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceHandle {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) scope: u32,
    pub(crate) channels: u32,
    pub(crate) op: u32,
    pub(crate) reserved: u32,
    pub(crate) timeout: u64,
    pub(crate) mailbox: u64,
    pub(crate) buffers: Pointers,
    pub(crate) pads: Pointers,
    pub(crate) multicast: u64,
    pub(crate) group_pads: Pointers,
}

/// `SymmemMailbox`, in pinned memory of the host: where kernels note the first failure.
///
/// | word | written by | values |
/// |---|---|---|
/// | `poison` | the host | 0: fine; n+1: rank n is lost, and waits end |
/// | `state` | kernels 0 → 1 → 2 (release), the host 2 → 0 | 0 empty, 1 being written, 2 written |
/// | `left` | the host | a bit for each rank that has left in order: waits for it end |
/// | others | the kernel that moved `state` to 1 | read by the host when `state` is 2 |
#[repr(C)]
pub(crate) struct MailboxWords {
    pub(crate) poison: SharedWord,
    pub(crate) state: SharedWord,
    pub(crate) kind: SharedWord,
    pub(crate) op: SharedWord,
    pub(crate) channel: SharedWord,
    pub(crate) rank: SharedWord,
    pub(crate) ours: SharedWord,
    pub(crate) theirs: SharedWord,
    pub(crate) left: [SharedWord; 4],
}

impl MailboxWords {
    /// Those of a note, from its kind on.
    pub(crate) fn note(&self) -> [&SharedWord; 6] {
        [&self.kind, &self.op, &self.channel, &self.rank, &self.ours, &self.theirs]
    }
}

/// Bytes of the pad of a rank in a group of `size`.
pub(crate) const fn pad_bytes(size: usize) -> usize {
    (4096 + 2048 * size).next_multiple_of(4096) + 524_288 * size
}

debug_of!([] DeviceHandle, "DeviceHandle":
    |this| rank = this.rank, size = this.size, channels = this.channels);

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The numbers of `symmem_layout` in `move.ptx`.
    #[test]
    fn structures_are_laid_out_as_the_kernels_say() {
        let ours = [
            size_of::<MailboxWords>(),
            size_of::<GroupParameter>(),
            size_of::<DeviceHandle>(),
            offset_of!(MailboxWords, state),
            offset_of!(MailboxWords, rank),
            offset_of!(GroupParameter, call),
            offset_of!(GroupParameter, timeout),
            offset_of!(GroupParameter, mailbox),
            offset_of!(GroupParameter, pads),
            offset_of!(DeviceHandle, op),
            offset_of!(DeviceHandle, timeout),
            offset_of!(DeviceHandle, mailbox),
            offset_of!(DeviceHandle, buffers),
            offset_of!(DeviceHandle, pads),
            offset_of!(DeviceHandle, multicast),
            offset_of!(DeviceHandle, group_pads),
        ];
        let files = crate::cuda::ptx_files().unwrap();
        let (_, ptx) = files.iter().find(|(name, _)| name == "move").unwrap();
        let (_, rest) = ptx.split_once("symmem_layout").unwrap();
        let (list, _) = rest.split_once('{').unwrap().1.split_once('}').unwrap();
        let mut bytes: Vec<usize> = list.split(',').map(|n| n.trim().parse().unwrap()).collect();
        bytes.resize(ours.len() * 4, 0); // zeros at the end are left out
        let theirs: Vec<usize> =
            bytes.chunks(4).map(|b| b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24).collect();
        assert_eq!(theirs, ours);
    }
}
