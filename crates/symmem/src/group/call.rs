//! What ranks tell each other of a call, so that those that make different ones find out, and can say how they differ.

use crate::dtype::{DType, ReduceOp};

/// One collective call, in all in which ranks must agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) dtype: Option<DType>,
    pub(crate) operator: Option<ReduceOp>,
    pub(crate) way: Way,
    pub(crate) root: Option<usize>,
    pub(crate) memory: Memory,
    /// Elements.
    pub(crate) len: usize,
    /// Numbers that some operations have besides: see [`details`].
    pub(crate) more: [usize; 3],
}

/// How data move. Part of the call: ranks that move them differently must not go on together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Way {
    #[default]
    Any,
    Staged,
    OneShot,
    TwoShot,
    Direct,
    /// Between hosts, as the next ones.
    Raw,
    RawRelayed,
    TwoHops,
    TwoHopsRelayed,
    Chain,
}

/// Whose memory a call is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Memory {
    #[default]
    None,
    /// Ordinary memory of each rank.
    Slices,
    /// Of the n-th rendezvous of the group, from a byte on.
    Rendezvous(u64, usize),
}

/// The call that is a barrier and nothing else.
pub(super) const PLAIN: Op = Op::of("barrier");
/// The call at which ranks come together before they exchange memory.
pub(super) const RENDEZVOUS: Op = Op::of("rendezvous");
/// The call of a rank that refuses to make another.
pub(super) const REFUSAL: &str = "refuse";

/// A call as it is compared and told to peers.
pub(super) type Words = [u64; 8];

impl Call {
    const WAYS: [Way; 10] = [
        Way::Any,
        Way::Staged,
        Way::OneShot,
        Way::TwoShot,
        Way::Direct,
        Way::Raw,
        Way::RawRelayed,
        Way::TwoHops,
        Way::TwoHopsRelayed,
        Way::Chain,
    ];

    /// What a rank gives up when a job of its queue fails: nobody knows which calls it leaves out. Not a call that is made.
    pub(super) const JOB: Self = Self { more: [1, 0, 0], ..Self::plain(Op::of(REFUSAL)) };

    /// A call without data.
    pub(crate) const fn plain(op: Op) -> Self {
        let (dtype, operator, way, root) = (None, None, Way::Any, None);
        Self { op, dtype, operator, way, root, memory: Memory::None, len: 0, more: [0; 3] }
    }

    /// Bytes of each rank's elements.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.map_or(0, DType::size)
    }

    /// Whether a call that gave up can be resumed: it carries no data, so the same call again is the same in all.
    pub(super) fn is_resumable(&self) -> bool {
        let op = self.op.name();
        ["barrier", "share", "release", "open", "close", "rendezvous"].contains(&op)
    }

    #[inline]
    pub(super) fn words(&self) -> Words {
        let plus_one = |number: Option<u64>| number.map_or(0, |number| number + 1);
        let kind = u64::from(self.op.0)
            | plus_one(self.dtype.map(|dtype| dtype.code().0.into())) << 8
            | plus_one(self.operator.map(|operator| operator as u64)) << 16
            | (self.way as u64) << 24
            | plus_one(self.root.map(|root| root as u64)) << 32;
        let (memory, offset) = match self.memory {
            Memory::None => (0, 0),
            Memory::Slices => (1, 0),
            Memory::Rendezvous(number, offset) => (number + 2, offset),
        };
        let [a, b, c] = self.more.map(|number| number as u64);
        let struct_bytes = self.dtype.map_or(0, |dtype| dtype.code().1);
        [kind, memory, offset as u64, self.len as u64, a, b, c, struct_bytes.into()]
    }

    pub(super) fn from_words(words: &Words) -> Self {
        let [kind, memory, offset, len, a, b, c, struct_bytes] = *words;
        let part = |shift: u32| (kind >> shift & 0xff) as usize;
        let known = |part: usize| part.checked_sub(1);
        Self {
            op: Op(part(0) as u8),
            dtype: known(part(8)).map(|code| DType::from_code(code as u8, struct_bytes as u32)),
            operator: known(part(16)).and_then(|i| ReduceOp::ALL.get(i).copied()),
            way: Self::WAYS.get(part(24)).copied().unwrap_or_default(),
            root: ((kind >> 32) as usize).checked_sub(1),
            memory: match memory {
                0 => Memory::None,
                1 => Memory::Slices,
                number => Memory::Rendezvous(number - 2, offset as usize),
            },
            len: len as usize,
            more: [a, b, c].map(|number| number as usize),
        }
    }

    /// The first thing in which two calls differ: what it is, and both values.
    pub(super) fn difference(&self, other: &Self) -> (&'static str, String, String) {
        fn both<T: Copy>(a: T, b: T, show: impl Fn(T) -> String) -> (String, String) {
            (show(a), show(b))
        }
        let of = |what, (ours, theirs): (String, String)| (what, ours, theirs);
        if self.op != other.op {
            return of("operation", both(self, other, |call| call.to_string()));
        }
        if self.dtype != other.dtype {
            let name = |dtype: Option<DType>| dtype.map_or("none".into(), |d| d.to_string());
            return of("element type", both(self.dtype, other.dtype, name));
        }
        if self.len != other.len {
            return of("length", both(self.len, other.len, |len| format!("{len} elements")));
        }
        if self.operator != other.operator {
            let name = |op: Option<ReduceOp>| op.map_or("none".into(), |op| op.to_string());
            return of("operator", both(self.operator, other.operator, name));
        }
        if self.root != other.root {
            let name = |root: Option<usize>| root.map_or("none".into(), |r| format!("rank {r}"));
            return of("root", both(self.root, other.root, name));
        }
        let mut details =
            details(self.op.name()).into_iter().zip(self.more.iter().zip(&other.more));
        if let Some((what, (a, b))) = details.find(|(_, (a, b))| a != b) {
            return of(what, (a.to_string(), b.to_string()));
        }
        if self.memory != other.memory {
            return of("memory", both(self.memory, other.memory, |memory| memory.to_string()));
        }
        of("algorithm", both(self.way, other.way, |way| format!("{way:?}").to_lowercase()))
    }
}

/// What the further numbers of an operation's calls mean.
fn details(op: &str) -> [&'static str; 3] {
    match op {
        "all_reduce" => {
            ["place of the result (0: the memory itself, 1: an output)", "detail", "detail"]
        }
        "scan" => ["kind of scan (0: inclusive, 1: exclusive)", "detail", "detail"],
        "reduce_scatter" => ["number of rows", "number of columns", "detail"],
        "all_to_all_v" | "all_to_all_v_2d" | "all_to_all_v_2d_offset" => {
            ["row length", "alignment", "rows of the output"]
        }
        _ => ["detail"; 3],
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Slices => f.write_str("slices"),
            Self::Rendezvous(number, 0) => write!(f, "that of rendezvous {number}"),
            Self::Rendezvous(number, offset) => {
                write!(f, "that of rendezvous {number} from byte {offset}")
            }
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.op.name())?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.len)?;
        }
        if let Some(operator) = self.operator {
            write!(f, ", {operator}")?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        match self.memory {
            Memory::None => Ok(()),
            memory => write!(f, ", memory: {memory}"),
        }
    }
}

/// The operations that ranks call together, the most frequent first: they are looked for in this order. At most 32.
const OPS: [&str; 32] = [
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
    "scan",
    "all_gather_v",
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
    "share",
    "release",
    "rendezvous",
    "resync",
    REFUSAL,
    "a kernel of the caller's",
];

/// An operation by the number by which it is told, to ranks and by kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Op(u8);

impl Op {
    /// The operation of a name. Called in constants by whatever is quick: it compares texts.
    pub(crate) const fn of(name: &str) -> Self {
        let mut code = 0;
        while code < OPS.len() - 1 && !is_same(OPS[code], name) {
            code += 1;
        }
        Self(code as u8)
    }

    pub(crate) fn name(self) -> &'static str {
        op_of(self.0.into()).unwrap_or("an operation of another version")
    }
}

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// The number of an operation.
#[inline]
pub(crate) fn op_code(op: &str) -> u32 {
    OPS.iter().position(|known| *known == op).unwrap_or(OPS.len() - 1) as u32
}

/// The operation of a number.
pub(crate) fn op_of(code: u32) -> Option<&'static str> {
    OPS.get(code as usize).copied()
}

/// All in which ranks' calls on a device must agree, in 30 bits: from above, 5 for the operation, 5 for the type of the elements, and a
/// hash of the memory's number, the length, the size of a struct and what else is `agreed`.
#[inline]
pub(crate) fn digest(op: &str, dtype: DType, number: usize, len: usize, agreed: &[usize]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    debug_assert!(OPS.contains(&op), "{op} is not among the operations");
    // Products that do not wait for each other: this is part of every small message.
    let (code, struct_bytes) = dtype.code();
    let words = [number, len, struct_bytes as usize].into_iter().chain(agreed.iter().copied());
    let sum = words.fold(0_u64, |sum, word| {
        sum.rotate_left(23).wrapping_add((word as u64 ^ FACTOR).wrapping_mul(FACTOR))
    });
    let mixed = (sum ^ (sum >> 29)).wrapping_mul(FACTOR);
    op_code(op) << 25 | u32::from(code) << 20 | (mixed >> 44) as u32
}

/// The call of a digest in words, which tell it from that of `other`.
pub(crate) fn describe(digest: u32, other: u32) -> String {
    let words = |digest: u32| {
        let op = op_of(digest >> 25).unwrap_or("another operation");
        let dtype = DType::ALL.get((digest >> 20 & 31) as usize);
        format!("{op} of {}", dtype.map_or("a struct", |dtype| dtype.name()))
    };
    let more = " with another length, operator, algorithm, root or memory";
    let alike = digest != other && words(digest) == words(other);
    words(digest) + if alike { more } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduction() -> Call {
        Call {
            dtype: Some(DType::F32),
            operator: Some(ReduceOp::Sum),
            way: Way::TwoShot,
            memory: Memory::Rendezvous(3, 128),
            len: 100,
            ..Call::plain(Op::of("all_reduce"))
        }
    }

    #[test]
    fn a_call_survives_its_way_to_a_peer() {
        let rooted = Call { root: Some(5), more: [1, 2, 3], ..reduction() };
        let structs = Call { dtype: Some(DType::Struct(24)), ..reduction() };
        for call in [Call::plain(Op::of("barrier")), reduction(), rooted, structs] {
            assert_eq!(Call::from_words(&call.words()), call);
        }
        assert_eq!(Call::plain(Op::of("barrier")).words(), [0; 8]);
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let differs = |other: Call| reduction().difference(&other);
        let text =
            |(what, ours, theirs): (&str, String, String)| format!("{what}: {ours}, {theirs}");
        let longer = text(differs(Call { len: 101, ..reduction() }));
        assert_eq!(longer, "length: 100 elements, 101 elements");
        let elsewhere = Call { memory: Memory::Rendezvous(4, 0), ..reduction() };
        let elsewhere = text(differs(elsewhere));
        assert_eq!(elsewhere, "memory: that of rendezvous 3 from byte 128, that of rendezvous 4");
        let maximum = text(differs(Call { operator: Some(ReduceOp::Max), ..reduction() }));
        assert_eq!(maximum, "operator: sum, max");
        let barrier = text(differs(Call::plain(Op::of("barrier"))));
        assert_eq!(
            barrier,
            "operation: all_reduce of 100 f32, sum, memory: that of rendezvous 3 from byte 128, barrier"
        );
        let rows = Call { more: [1, 2, 0], ..Call::plain(Op::of("reduce_scatter")) };
        let columns = Call { more: [1, 3, 0], ..rows };
        assert_eq!(text(rows.difference(&columns)), "number of columns: 2, 3");
    }

    #[test]
    fn every_difference_shows_in_the_digest() {
        let call = digest("all_reduce", DType::F32, 3, 100, &[1, 2]);
        assert!(call < 1 << 30);
        assert_eq!(call, digest("all_reduce", DType::F32, 3, 100, &[1, 2]));
        for other in [
            digest("broadcast", DType::F32, 3, 100, &[1, 2]),
            digest("all_reduce", DType::BF16, 3, 100, &[1, 2]),
            digest("all_reduce", DType::Struct(4), 3, 100, &[1, 2]),
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
        assert!(OPS.len() <= 32 && DType::ALL.len() < 32);
        for (code, op) in OPS.iter().enumerate() {
            assert_eq!(
                (op_code(op), Op::of(op), op_of(code as u32)),
                (code as u32, Op(code as u8), Some(*op))
            );
        }
    }
}
