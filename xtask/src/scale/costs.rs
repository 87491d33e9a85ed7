//! What things cost in the simulation, in picoseconds. `docs/scale.md` says where each figure is from.

/// Costs of messages, links and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Costs {
    /// A thread sends a message, and takes one in.
    pub(super) send: u64,
    pub(super) receive: u64,
    /// Each byte of a message, at either end, up to [`NEAR`] of them; and of those beyond.
    pub(super) byte: u64,
    pub(super) far_byte: u64,
    /// From the link of one host to that of another.
    pub(super) hop: u64,
    /// A byte on the link of a host, which is one each way.
    pub(super) link: u64,
    /// A thread that waits looks at a connection, and passes one in the list in which it finds it.
    pub(super) look: u64,
    pub(super) search: u64,
    /// A barrier of two ranks of a host; and more for each further rank.
    pub(super) exchange: u64,
    pub(super) flag: u64,
    /// A byte is read, reduced and written where it is wanted; and only written.
    pub(super) fold: u64,
    pub(super) store: u64,
}

/// What a socket's buffers and the cache take without slowing down.
pub(super) const NEAR: u64 = 128 << 10;
/// The longest part of a message that must be there whole before it goes on.
pub(super) const PACKET: u64 = 16 << 10;
/// What is sent besides the data of a message.
pub(super) const HEADER: u64 = 100;

/// TCP, with threads that spin while they wait, and are told of what has come.
pub(super) const TCP: Costs = Costs {
    send: 1_550_000,
    receive: 1_550_000,
    byte: 100,
    far_byte: 450,
    hop: 600_000,
    link: 80,
    look: 0,
    search: 0,
    exchange: 198_000,
    flag: 61_000,
    fold: 47,
    store: 24,
};

/// TCP over the connections of the library's mesh: who waits looks at one connection after the other.
pub(super) const MESH: Costs = Costs { look: 208_000, search: 1_000, ..TCP };

/// RDMA over 100 Gbit/s.
pub(super) const RDMA: Costs =
    Costs { send: 530_000, receive: 530_000, byte: 0, far_byte: 0, ..TCP };

impl Costs {
    /// A thread looks at all its connections, of so many ranks in the group.
    pub(super) fn looks(&self, connections: u64, ranks: u64) -> u64 {
        connections * (self.look + ranks / 2 * self.search)
    }

    /// Time of a thread for the bytes of a message.
    pub(super) fn bytes(&self, bytes: u64) -> u64 {
        bytes.min(NEAR) * self.byte + bytes.saturating_sub(NEAR) * self.far_byte
    }

    /// A barrier of `ranks` ranks of a host.
    pub(super) fn host_barrier(&self, ranks: u64) -> u64 {
        match ranks {
            0 | 1 => 0,
            _ => self.exchange + (ranks - 2) * self.flag,
        }
    }
}
