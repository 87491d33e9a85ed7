//! The reduce loop: element i of every destination becomes the reduction of element i of all sources, in their order.
//!
//! One body for all types and operators, compiled for several instruction sets; the best that the processor has is
//! chosen once. All give the same bits, because no operation in the body depends on how wide the vectors are.
#![allow(unsafe_code)] // S2, S3: callers hand over ranges that they may touch, checked by them

#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

use super::copy::{self, Stores, VECTOR};
use crate::dtype::number::PORTABLE;
#[cfg(target_arch = "x86_64")]
use crate::dtype::number::{AVX2, AVX512, AVX512_BF16};
use crate::dtype::{Number, ReduceOp};

/// Elements that are worked on at once: a few registers full, whatever the registers.
const LANES: usize = 64;

/// Whether the loop is for processors too old for any other: then it goes in small steps alone, and two ranks have no loops of
/// their own, which would be a good deal of code that hardly any processor runs.
const fn is_last_resort(v: u8) -> bool {
    cfg!(target_arch = "x86_64") && v == PORTABLE
}

/// Those left over go so many at once, and the last of them four, two and one.
const FEW: usize = 8;

/// An operator as a type, so that the loop is made for it.
trait Operator {
    fn apply<N: Number>(a: N::Wide, b: N::Wide) -> N::Wide;
    /// What is done to the last result.
    #[inline(always)]
    fn finish<N: Number>(a: N::Wide, _ranks: usize) -> N::Wide {
        a
    }
}

macro_rules! operators {
    ($($name:ident => $method:ident),*) => {$(
        struct $name;
        impl Operator for $name {
            #[inline(always)]
            fn apply<N: Number>(a: N::Wide, b: N::Wide) -> N::Wide { N::$method(a, b) }
        }
    )*};
}

operators!(Sum => add, Product => multiply, Min => min, Max => max, And => and, Or => or, Xor => xor);

struct Average;

impl Operator for Average {
    #[inline(always)]
    fn apply<N: Number>(a: N::Wide, b: N::Wide) -> N::Wide {
        N::add(a, b)
    }

    #[inline(always)]
    fn finish<N: Number>(a: N::Wide, ranks: usize) -> N::Wide {
        N::divide(a, ranks)
    }
}

/// A reduce loop for one type and operator: sources, destinations, number of elements, and how the results are stored. The
/// caller has entered the default floating-point environment.
///
/// # Safety
/// Every source may be read and every destination written for that many elements, by nobody else meanwhile.
/// A destination may be one of the sources, at the same element; otherwise they do not overlap.
pub(crate) type Reduce = unsafe fn(&[*const u8], &[*mut u8], usize, Stores);

/// The loop for an operator; `None` where it does not apply to the type, for which no loop is made then.
#[inline]
pub(crate) fn reduce_loop<N: Number>(op: ReduceOp) -> Option<Reduce> {
    macro_rules! applies {
        ($op:ident) => {
            const { ReduceOp::$op.applies_to(N::DTYPE.kind()) }
        };
    }
    Some(match op {
        ReduceOp::Sum if applies!(Sum) => best::<N, Sum>(),
        ReduceOp::Average if applies!(Average) => best::<N, Average>(),
        ReduceOp::Product if applies!(Product) => best::<N, Product>(),
        ReduceOp::Min if applies!(Min) => best::<N, Min>(),
        ReduceOp::Max if applies!(Max) => best::<N, Max>(),
        ReduceOp::And if applies!(And) => best::<N, And>(),
        ReduceOp::Or if applies!(Or) => best::<N, Or>(),
        ReduceOp::Xor if applies!(Xor) => best::<N, Xor>(),
        _ => return None,
    })
}

/// Each set is asked for first whether the type has a use for it, so that no other loops are made.
#[inline]
fn best<N: Number, O: Operator>() -> Reduce {
    #[cfg(target_arch = "x86_64")]
    {
        let has = instructions();
        if N::FASTEST >= AVX512_BF16 && has >= AVX512_BF16 {
            return avx512_bf16::<N, O>;
        }
        if N::FASTEST >= AVX512 && has >= AVX512 {
            return avx512::<N, O>;
        }
        if has >= AVX2 {
            return avx2::<N, O>;
        }
    }
    portable::<N, O>
}

/// The last instruction set that this processor has. Asked for before every small message, so the answer is kept.
#[cfg(target_arch = "x86_64")]
#[inline]
fn instructions() -> u8 {
    static FOUND: OnceLock<u8> = OnceLock::new();
    *FOUND.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
#[cold]
fn detect() -> u8 {
    if !is_x86_feature_detected!("f16c") || !is_x86_feature_detected!("avx2") {
        return PORTABLE;
    }
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq");
    match avx512 {
        true if is_x86_feature_detected!("avx512bf16") => AVX512_BF16,
        true => AVX512,
        false => AVX2,
    }
}

/// # Safety
/// See [`Reduce`].
unsafe fn portable<N: Number, O: Operator>(
    from: &[*const u8],
    to: &[*mut u8],
    len: usize,
    stores: Stores,
) {
    // SAFETY: as the caller promises.
    unsafe { body::<N, O, PORTABLE>(from, to, len, stores) }
}

/// # Safety
/// See [`Reduce`]; and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<N: Number, O: Operator>(
    from: &[*const u8],
    to: &[*mut u8],
    len: usize,
    stores: Stores,
) {
    // SAFETY: as the caller promises.
    unsafe { body::<N, O, AVX2>(from, to, len, stores) }
}

/// # Safety
/// See [`Reduce`]; and the processor has these parts of AVX-512, and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn avx512<N: Number, O: Operator>(
    from: &[*const u8],
    to: &[*mut u8],
    len: usize,
    stores: Stores,
) {
    // SAFETY: as the caller promises.
    unsafe { body::<N, O, AVX512>(from, to, len, stores) }
}

/// # Safety
/// As `avx512`; and the processor has BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
unsafe fn avx512_bf16<N: Number, O: Operator>(
    from: &[*const u8],
    to: &[*mut u8],
    len: usize,
    stores: Stores,
) {
    // SAFETY: as the caller promises.
    unsafe { body::<N, O, AVX512_BF16>(from, to, len, stores) }
}

/// # Safety
/// See [`Reduce`]; and the processor has what `V` says.
#[inline(always)]
unsafe fn body<N: Number, O: Operator, const V: u8>(
    from: &[*const u8],
    to: &[*mut u8],
    len: usize,
    stores: Stores,
) {
    // SAFETY: pointers are alike, whatever they point to.
    let from = unsafe { std::slice::from_raw_parts(from.as_ptr().cast::<*const N>(), from.len()) };
    // SAFETY: as above.
    let to = unsafe { std::slice::from_raw_parts(to.as_ptr().cast::<*mut N>(), to.len()) };
    let stream = V != PORTABLE
        && stores == Stores::Streaming
        && to.iter().all(|to| to.cast::<u8>().align_offset(VECTOR) == 0);
    if const { is_last_resort(V) } {
        // SAFETY: as the caller promises.
        return unsafe { run::<N, O, V>(from, to, 0, len) };
    }
    // Two ranks are worth loops of their own, without loops in them.
    let mut done = 0;
    if stream {
        // What is left is little, and goes as if nothing had been streamed.
        done = match (from, to) {
            // SAFETY: as the caller promises.
            (&[a, b], &[c, d]) => unsafe { blocks::<N, O, V, true>(&[a, b], &[c, d], 0, len) },
            // SAFETY: as the caller promises.
            _ => unsafe { blocks::<N, O, V, true>(from, to, 0, len) },
        };
        copy::settle();
    }
    match (from, to) {
        // SAFETY: as the caller promises.
        (&[a, b], &[c, d]) => unsafe { run::<N, O, V>(&[a, b], &[c, d], done, len) },
        // SAFETY: as the caller promises.
        (&[a, b], &[c]) => unsafe { run::<N, O, V>(&[a, b], &[c], done, len) },
        // SAFETY: as the caller promises.
        _ => unsafe { run::<N, O, V>(from, to, done, len) },
    }
}

/// Whole blocks from element `at` on, and where they end.
///
/// # Safety
/// See [`body`]; where `S` says so, all destinations are aligned to vectors.
#[inline(always)]
unsafe fn blocks<N: Number, O: Operator, const V: u8, const S: bool>(
    from: &[*const N],
    to: &[*mut N],
    mut at: usize,
    len: usize,
) -> usize {
    let whole = if const { is_last_resort(V) } { 0 } else { len / LANES * LANES };
    while at < whole {
        if size_of::<N>() < size_of::<N::Wide>() {
            from.iter().for_each(|source| fetch(source.wrapping_add(at), LANES));
        }
        // SAFETY: as the caller promises; `at + LANES` is within `len`.
        unsafe { block::<N, O, V, S, LANES>(from, to, at) };
        at += LANES;
    }
    at
}

/// All elements from `at` on, which is a multiple of [`LANES`].
///
/// # Safety
/// See [`body`].
#[inline(always)]
unsafe fn run<N: Number, O: Operator, const V: u8>(
    from: &[*const N],
    to: &[*mut N],
    at: usize,
    len: usize,
) {
    // SAFETY: as the caller promises.
    let mut at = unsafe { blocks::<N, O, V, false>(from, to, at, len) };
    let most = len / FEW * FEW;
    while at < most {
        // SAFETY: as above, with fewer elements.
        unsafe { block::<N, O, V, false, FEW>(from, to, at) };
        at += FEW;
    }
    // In one store where they are a power of two: who reads a small result at once, in one load, need not wait for more.
    let rest = len - most;
    if rest & 4 != 0 {
        // SAFETY: as above, with four elements.
        unsafe { block::<N, O, PORTABLE, false, 4>(from, to, at) };
        at += 4;
    }
    if rest & 2 != 0 {
        // SAFETY: as above, with two elements.
        unsafe { block::<N, O, PORTABLE, false, 2>(from, to, at) };
        at += 2;
    }
    if rest & 1 != 0 {
        // SAFETY: as above, with one element.
        unsafe { block::<N, O, PORTABLE, false, 1>(from, to, at) };
    }
}

/// Asks for the lines that a loop comes to after some more: converting takes so many instructions for each line that the
/// processor does not look far enough ahead by itself.
#[inline(always)]
fn fetch<N>(source: *const N, elements: usize) {
    const AHEAD: usize = 2048;
    for at in (0..elements * size_of::<N>()).step_by(64) {
        crate::sync::fetch_to_read(source.wrapping_byte_add(AHEAD + at).cast());
    }
}

/// # Safety
/// See [`body`], for the `L` elements from `at` on.
#[inline(always)]
unsafe fn block<N: Number, O: Operator, const V: u8, const S: bool, const L: usize>(
    from: &[*const N],
    to: &[*mut N],
    at: usize,
) {
    let load = |source: *const N| {
        // SAFETY: the caller may read it; numbers may lie at any address.
        let narrow = unsafe { source.wrapping_add(at).cast::<[N; L]>().read_unaligned() };
        // SAFETY: as `V` says.
        unsafe { N::widen_fast::<L, V>(narrow) }
    };
    let Some((&first, rest)) = from.split_first() else { return };
    let mut sum: [N::Wide; L] = load(first);
    for &source in rest {
        for (sum, next) in sum.iter_mut().zip(load(source)) {
            *sum = O::apply::<N>(*sum, next);
        }
    }
    let sum = sum.map(|sum| O::finish::<N>(sum, from.len()));
    // SAFETY: as `V` says.
    let result = unsafe { N::narrow_fast::<L, V>(sum) };
    for &destination in to {
        let destination = destination.wrapping_add(at).cast::<[N; L]>();
        if S {
            // SAFETY: the caller may write it; aligned, and whole vectors, as `S` says.
            unsafe { copy::stream(&result, destination) };
        } else {
            // SAFETY: the caller may write it.
            unsafe { destination.write_unaligned(result) };
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn run<N: Number>(reduce: Reduce, sources: &[Vec<N>], offset: usize) -> Vec<N> {
        let len = sources[0].len() - offset;
        let mut out = vec![sources[0][0]; len];
        let from: Vec<*const u8> = sources.iter().map(|s| s[offset..].as_ptr().cast()).collect();
        // SAFETY: all have `len` elements from there on, and nobody else has `out`.
        unsafe { reduce(&from, &[out.as_mut_ptr().cast()], len, Stores::Cached) };
        out
    }

    /// Numbers that tell every mistake: large, small, negative, special.
    fn values(seed: u32, len: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            match state % 97 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => -0.0,
                3 => f32::from_bits(state & 0x807f_ffff),
                _ => f32::from_bits(state & 0x83ff_ffff | 0x3c00_0000),
            }
        })
        .take(len)
        .collect()
    }

    /// The loops of all instruction sets that this processor has.
    fn loops<N: Number, O: Operator>() -> Vec<Reduce> {
        let mut loops: Vec<Reduce> = vec![portable::<N, O>];
        #[cfg(target_arch = "x86_64")]
        {
            let all: [Reduce; 3] = [avx2::<N, O>, avx512::<N, O>, avx512_bf16::<N, O>];
            loops.extend(all.into_iter().take(instructions().into()));
        }
        loops
    }

    fn all_agree<N: Number>(make: impl Fn(f32) -> N, bytes: impl Fn(&[N]) -> Vec<u8>) {
        for ranks in [2, 3, 8] {
            for len in [1, 5, 63, 64, 65, 1000] {
                let sources: Vec<Vec<N>> = (0..ranks)
                    .map(|r| values(r + 1, len).into_iter().map(&make).collect())
                    .collect();
                for op in ReduceOp::ALL {
                    let Some(chosen) = reduce_loop::<N>(op) else { continue };
                    let loops = match op {
                        ReduceOp::Sum => loops::<N, Sum>(),
                        ReduceOp::Average => loops::<N, Average>(),
                        ReduceOp::Product => loops::<N, Product>(),
                        ReduceOp::Min => loops::<N, Min>(),
                        ReduceOp::Max => loops::<N, Max>(),
                        ReduceOp::And => loops::<N, And>(),
                        ReduceOp::Or => loops::<N, Or>(),
                        ReduceOp::Xor => loops::<N, Xor>(),
                    };
                    let a = run(chosen, &sources, 0);
                    for (i, other) in loops.into_iter().enumerate() {
                        let b = run(other, &sources, 0);
                        assert_eq!(bytes(&a), bytes(&b), "{op} of {ranks} × {len}, loop {i}");
                    }
                    if len > 3 {
                        let shifted = run(chosen, &sources, 3);
                        assert_eq!(bytes(&shifted), bytes(&a[3..]), "{op} from element 3");
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_and_alignment_gives_the_same_bits() {
        all_agree::<f32>(|x| x, |v| v.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect());
        all_agree::<f64>(f64::from, |v| v.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect());
        all_agree::<bf16>(bf16::from_f32, |v| {
            v.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        });
        all_agree::<half::f16>(half::f16::from_f32, |v| {
            v.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        });
        all_agree::<u8>(|x| x.to_bits() as u8, <[u8]>::to_vec);
        all_agree::<i64>(
            |x| i64::from(x.to_bits()) << 7,
            |v| v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        );
    }

    #[test]
    fn bf16_is_rounded_once_at_the_end() {
        let one = vec![bf16::from_f32(1.0)];
        let tiny = vec![bf16::from_f32(1.0 / 512.0)];
        let sources = [one, tiny.clone(), tiny.clone(), tiny.clone(), tiny];
        let sum = run(reduce_loop::<bf16>(ReduceOp::Sum).unwrap(), &sources, 0);
        assert_eq!(sum[0].to_f32(), 1.0078125, "each alone would have been rounded away");
    }

    #[test]
    fn a_result_that_is_no_number_is_one_and_the_same() {
        let odd = f32::from_bits(0xffa1_2345);
        let sum = run(reduce_loop::<f32>(ReduceOp::Sum).unwrap(), &[vec![odd], vec![1.0]], 0);
        assert_eq!(sum[0].to_bits(), f32::NAN.to_bits());
    }

    #[test]
    fn bits_of_floats_are_not_combined() {
        assert!(reduce_loop::<f32>(ReduceOp::And).is_none());
        assert!(reduce_loop::<u32>(ReduceOp::Xor).is_some());
    }
}
