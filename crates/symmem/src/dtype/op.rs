//! Reduction operators, and what each means for each kind of number.

use super::Kind;

/// The operator of a reduction: ((x₀ ⊕ x₁) ⊕ x₂) …, in rank order, with the same result on every rank.
///
/// | operator | integers | floats | complex numbers | [`Bool`](crate::Bool) |
/// |---|---|---|---|---|
/// | `Sum` | wraps around | 8- and 16-bit types compute in f32 and round once, at the end | by component | or |
/// | `Product` | wraps around | likewise | each product and sum is rounded | and |
/// | `Average` | the sum, divided by the number of ranks, towards zero | likewise | by component | refused |
/// | `Min`, `Max` | | −0 is below +0; a NaN anywhere gives NaN | refused | and, or |
/// | `And`, `Or`, `Xor` | bit by bit | refused | refused | of truth values |
///
/// A float result that is not a number is always the same quiet NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the table says it")]
pub enum ReduceOp {
    Sum,
    Average,
    Product,
    Min,
    Max,
    And,
    Or,
    Xor,
}

/// The order in which a reduction combines the elements of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Order {
    /// By rank, so that every algorithm gives the same bits.
    #[default]
    Ranked,
    /// Any, so that a switch may sum on the way: the bits may depend on the algorithm, and differ between outputs.
    Any,
}

impl ReduceOp {
    /// All operators.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Average,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::And,
        Self::Or,
        Self::Xor,
    ];

    /// The name used in messages and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Average => "avg",
            Self::Product => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
        }
    }

    /// Whether it applies to elements of this kind.
    pub const fn applies_to(self, kind: Kind) -> bool {
        match (kind, self) {
            (Kind::Signed | Kind::Unsigned, _) => true,
            (Kind::Float, op) => !matches!(op, Self::And | Self::Or | Self::Xor),
            (Kind::Complex, op) => matches!(op, Self::Sum | Self::Average | Self::Product),
            (Kind::Bool, op) => !matches!(op, Self::Average),
            (Kind::Struct, _) => false,
        }
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
