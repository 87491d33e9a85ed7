//! Conversions of many 16-bit floats by instructions of x86. They agree with the code for one in every bit.
#![allow(unsafe_code)] // instructions that the processor was asked for before; no S-invariant

/// Of f16, eight at once. The instructions agree with the code for one in all but NaNs, which are made
/// the one NaN first.
pub(super) mod f16c {
    use std::arch::x86_64::*;

    use half::f16;

    /// # Safety
    /// The processor has F16C.
    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(in super::super) unsafe fn widen<const L: usize>(narrow: [f16; L]) -> [f32; L] {
        let mut wide = [0.0; L];
        for (narrow, wide) in narrow.chunks_exact(8).zip(wide.chunks_exact_mut(8)) {
            // SAFETY: eight elements are there.
            let eight = unsafe { _mm_loadu_si128(narrow.as_ptr().cast()) };
            let eight = _mm256_cvtph_ps(eight);
            // SAFETY: likewise.
            unsafe { _mm256_storeu_ps(wide.as_mut_ptr(), eight) };
        }
        wide
    }

    /// # Safety
    /// As `widen`; and `L` is a multiple of eight.
    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(in super::super) unsafe fn narrow<const L: usize>(wide: [f32; L]) -> [f16; L] {
        let mut narrow = [f16::ZERO; L];
        for (wide, narrow) in wide.chunks(16).zip(narrow.chunks_mut(16)) {
            // SAFETY: at least eight elements are there, of both.
            let low = unsafe { rounded(wide) };
            if let (Some(high), 16) = (wide.get(8..), narrow.len()) {
                // Stores are what a core has few of under way. SAFETY: eight more elements are there.
                let both = _mm256_set_m128i(unsafe { rounded(high) }, low);
                // SAFETY: sixteen elements are there.
                unsafe { _mm256_storeu_si256(narrow.as_mut_ptr().cast(), both) };
            } else {
                // SAFETY: eight elements are there.
                unsafe { _mm_storeu_si128(narrow.as_mut_ptr().cast(), low) };
            }
        }
        narrow
    }

    /// # Safety
    /// As `widen`; and there are eight.
    #[inline]
    #[target_feature(enable = "avx,f16c")]
    unsafe fn rounded(wide: &[f32]) -> __m128i {
        // SAFETY: as the caller promises.
        let eight = unsafe { _mm256_loadu_ps(wide.as_ptr()) };
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(eight, eight);
        let eight = _mm256_blendv_ps(eight, _mm256_set1_ps(f32::NAN), nan);
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight)
    }
}

/// Conversions to bf16 by the processor's own instruction.
pub(super) mod avx512 {
    use std::arch::x86_64::*;

    use half::bf16;

    /// As `interleaved`. The instruction takes denormals for zeros and keeps what a NaN carries, so those go the other way.
    ///
    /// # Safety
    /// The processor has F, BW, VL, DQ and BF16 of AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(in super::super) unsafe fn narrow<const L: usize>(wide: [f32; L]) -> [bf16; L] {
        const NAN_OR_DENORMAL: i32 = 0xa1;
        const IN_TURN: [u16; 32] = {
            let (mut order, mut i) = ([0; 32], 0);
            while i < 32 {
                order[i as usize] = i / 2 + i % 2 * 16;
                i += 1;
            }
            order
        };
        // SAFETY: thirty-two numbers of 16 bits.
        let in_turn = unsafe { _mm512_loadu_si512(IN_TURN.as_ptr().cast()) };
        let mut narrow = [bf16::ZERO; L];
        let (even, odd) = wide.split_at(L / 2);
        let halves = even.chunks_exact(16).zip(odd.chunks_exact(16));
        for (line, (even, odd)) in narrow.chunks_exact_mut(32).zip(halves) {
            // SAFETY: sixteen elements are there.
            let even = unsafe { _mm512_loadu_ps(even.as_ptr()) };
            // SAFETY: likewise.
            let odd = unsafe { _mm512_loadu_ps(odd.as_ptr()) };
            let unusual = _mm512_fpclass_ps_mask::<NAN_OR_DENORMAL>(even)
                | _mm512_fpclass_ps_mask::<NAN_OR_DENORMAL>(odd);
            let rounded = if unusual == 0 {
                let rounded = _mm512_cvtne2ps_pbh(odd, even);
                // SAFETY: vectors of the same size.
                let rounded = unsafe { std::mem::transmute::<__m512bh, __m512i>(rounded) };
                _mm512_permutexvar_epi16(in_turn, rounded)
            } else {
                // SAFETY: the processor can.
                unsafe { seldom(even, odd) }
            };
            // SAFETY: thirty-two elements are there.
            unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), rounded) };
        }
        narrow
    }

    /// Takes vectors and no arrays: what a call can see has to lie in memory, whether it is made or not.
    ///
    /// # Safety
    /// As `narrow`.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn seldom(even: __m512, odd: __m512) -> __m512i {
        // SAFETY: vectors of the same size.
        let wide: [f32; 32] = unsafe { std::mem::transmute([even, odd]) };
        // SAFETY: likewise.
        unsafe { std::mem::transmute(super::super::number::interleaved(wide)) }
    }
}
