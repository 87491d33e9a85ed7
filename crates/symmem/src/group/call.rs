//! What ranks tell each other of a call, so that those that make different ones find out, and can say how they differ.

use crate::dtype::DType;

/// The call that a plain barrier stands for; others are made by [`Call`].
pub(super) const BARRIER: u32 = 0;

/// What the library's own channel is used for: told to peers, so that ranks that call different things find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Of the memory of the n-th rendezvous of the group.
    Share(u64),
    /// Likewise.
    Release(u64),
    /// A collective, and a digest of all in which its calls must agree.
    Collective(&'static str, u32),
}

impl Call {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Share(number) => (number as u32) << 2 | 1,
            Self::Release(number) => (number as u32) << 2 | 2,
            Self::Collective(_, digest) => digest << 2 | 3,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Share(_) => "share",
            Self::Release(_) => "release",
            Self::Collective(name, _) => name,
        }
    }

    /// The call of a code in words, which tell it from that of `other`.
    pub(super) fn describe(code: u32, other: u32) -> String {
        let number = code >> 2;
        match code & 3 {
            1 => format!("share of the memory of rendezvous {number}"),
            2 => format!("release of the memory of rendezvous {number}"),
            3 => describe(number, if other & 3 == 3 { other >> 2 } else { number }),
            _ => "barrier".to_owned(),
        }
    }
}

/// The operations that ranks call together, the most frequent first: they are looked for in this order. At most 32.
const OPS: [&str; 25] = [
    "barrier",
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "broadcast",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "put_signal",
    "wait_signal",
    "barrier_on_channel",
    "all_to_all_v_2d",
    "all_to_all_v_2d_offset",
    "tile_reduce",
    "multi_root_tile_reduce",
    "reduce_scatter_offset",
    "all_to_all_nd",
    "put_value",
    "wait_value",
    "open",
    "close",
    "copy_to_multicast",
    "a kernel of the caller's",
];

/// The number by which an operation is told, to ranks and by kernels.
#[inline]
pub(crate) fn op_code(op: &str) -> u32 {
    OPS.iter().position(|known| *known == op).unwrap_or(OPS.len() - 1) as u32
}

/// The operation of a number.
pub(crate) fn op_of(code: u32) -> Option<&'static str> {
    OPS.get(code as usize).copied()
}

/// All in which ranks' calls must agree, in 30 bits: from above, 5 for the operation, 4 for the type of the elements, and a
/// hash of the memory's number, the length and what else is `agreed`.
#[inline]
pub(crate) fn digest(op: &str, dtype: DType, number: usize, len: usize, agreed: &[usize]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    debug_assert!(OPS.contains(&op), "{op} is not among the operations");
    // Products that do not wait for each other: this is part of every small message.
    let words = [number, len].into_iter().chain(agreed.iter().copied());
    let sum = words.fold(0_u64, |sum, word| {
        sum.rotate_left(23).wrapping_add((word as u64 ^ FACTOR).wrapping_mul(FACTOR))
    });
    let mixed = (sum ^ (sum >> 29)).wrapping_mul(FACTOR);
    op_code(op) << 25 | (dtype as u32) << 21 | (mixed >> 43) as u32
}

/// The call of a digest in words, which tell it from that of `other`.
pub(crate) fn describe(digest: u32, other: u32) -> String {
    let words = |digest: u32| {
        let op = op_of(digest >> 25).unwrap_or("another operation");
        let dtype = DType::ALL.get((digest >> 21 & 15) as usize);
        dtype.map_or_else(|| op.to_owned(), |dtype| format!("{op} of {dtype}"))
    };
    let more = " with another length, operator, algorithm, root or memory";
    let alike = digest != other && words(digest) == words(other);
    words(digest) + if alike { more } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_shows_in_the_digest() {
        let call = digest("all_reduce", DType::F32, 3, 100, &[1, 2]);
        assert!(call < 1 << 30);
        assert_eq!(call, digest("all_reduce", DType::F32, 3, 100, &[1, 2]));
        for other in [
            digest("broadcast", DType::F32, 3, 100, &[1, 2]),
            digest("all_reduce", DType::BF16, 3, 100, &[1, 2]),
            digest("all_reduce", DType::F32, 4, 100, &[1, 2]),
            digest("all_reduce", DType::F32, 3, 101, &[1, 2]),
            digest("all_reduce", DType::F32, 3, 100, &[2, 1]),
        ] {
            assert_ne!(call, other);
        }
    }

    #[test]
    fn calls_are_told_apart_in_words() {
        let of = |op, dtype, len| digest(op, dtype, 0, len, &[]);
        let ours = of("all_reduce", DType::F32, 10);
        assert_eq!(describe(ours, ours), "all_reduce of f32");
        assert_eq!(describe(of("all_to_all_nd", DType::U8, 10), ours), "all_to_all_nd of u8");
        let longer = describe(of("all_reduce", DType::F32, 11), ours);
        assert_eq!(
            longer,
            "all_reduce of f32 with another length, operator, algorithm, root or memory"
        );
    }

    #[test]
    fn every_operation_and_type_has_its_bits() {
        assert!(OPS.len() <= 32 && DType::ALL.len() <= 16);
        for (code, op) in OPS.iter().enumerate() {
            assert_eq!((op_code(op), op_of(code as u32)), (code as u32, Some(*op)));
        }
        for (code, dtype) in DType::ALL.iter().enumerate() {
            assert_eq!(*dtype as usize, code);
        }
    }
}
