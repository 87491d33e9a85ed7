//! The floating-point environment: a rank that runs with flush-to-zero or another rounding gets the same bits all the same.
#![allow(unsafe_code)] // reads and writes one control register of this thread; relies on none of the S-invariants

/// Default rounding, no flushing of denormals, no traps, once entered; what was before is restored when dropped.
#[derive(Default)]
pub(crate) struct DefaultFloats(Option<Control>);

impl DefaultFloats {
    #[inline(always)]
    pub(crate) fn enter(&mut self) {
        let now = read();
        if now & MASK != DEFAULT & MASK {
            write(DEFAULT);
            self.0 = Some(now);
        }
    }

    /// Restores what was before.
    #[inline(always)]
    pub(crate) fn leave(&mut self) {
        if let Some(before) = self.0.take() {
            write(before);
        }
    }
}

impl Drop for DefaultFloats {
    #[inline(always)]
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(target_arch = "x86_64")]
type Control = u32;
/// All exceptions masked.
#[cfg(target_arch = "x86_64")]
const DEFAULT: Control = 0x1f80;
/// All but the flags of exceptions that were raised.
#[cfg(target_arch = "x86_64")]
const MASK: Control = !0x3f;

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn read() -> Control {
    let mut now = 0;
    // SAFETY: stores the control register into `now`. Every x86-64 processor has it.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags));
    }
    now
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn write(control: Control) {
    // SAFETY: `control` is the default, or what the register held before: no reserved bit is set.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, preserves_flags));
    }
}

#[cfg(target_arch = "aarch64")]
type Control = u64;
#[cfg(target_arch = "aarch64")]
const DEFAULT: Control = 0;
#[cfg(target_arch = "aarch64")]
const MASK: Control = !0;

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn read() -> Control {
    let now;
    // SAFETY: reads a register of this thread.
    unsafe {
        std::arch::asm!("mrs {}, fpcr", out(reg) now, options(nomem, nostack, preserves_flags))
    };
    now
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn write(control: Control) {
    // SAFETY: the default, or what the register held before.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
type Control = u32;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const DEFAULT: Control = 0;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const MASK: Control = 0;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read() -> Control {
    0
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn write(_: Control) {}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::*;

    /// Flush to zero, and denormals are zero.
    const FLUSHING: Control = DEFAULT | 0x8040;

    #[test]
    fn the_environment_is_the_default_inside_and_what_it_was_after() {
        write(FLUSHING);
        {
            let mut floats = DefaultFloats::default();
            floats.enter();
            floats.enter(); // changes nothing
            assert_eq!(read() & MASK, DEFAULT & MASK);
        }
        assert_eq!(read() & MASK, FLUSHING & MASK);
        write(DEFAULT);
        let mut floats = DefaultFloats::default();
        floats.enter();
        assert!(floats.0.is_none());
    }
}
