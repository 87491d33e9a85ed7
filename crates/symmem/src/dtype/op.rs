//! Reduction operators, and what each means for each kind of number.

/// How elements of all ranks become one: ((x₀ ⊕ x₁) ⊕ x₂) …, in rank order, on every rank alike.
///
/// | operator | integers | floats |
/// |---|---|---|
/// | `Sum`, `Product` | wrap around | 8- and 16-bit types compute in f32 and round once, at the end |
/// | `Average` | the sum, divided by the number of ranks, towards zero | likewise |
/// | `Min`, `Max` | | −0 is below +0; a NaN anywhere gives NaN |
/// | `And`, `Or`, `Xor` | bit by bit | refused |
///
/// A float result that is no number is always the same quiet NaN.
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

/// In which order the elements of all ranks are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// By rank, so that every algorithm gives the same bits.
    #[default]
    Ranked,
    /// Any, so that a switch may add up on the way: the bits may depend on the algorithm, and differ between outputs.
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

    /// Whether it works on bits rather than on numbers.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
