//! Fences between a rank's store and its next load, where another rank does the same the other way round.
//!
//! One side of each pair runs in every small message, the other only before a rank sleeps or gives up. So the rare side pays
//! for both: its [`heavy`] fence has the kernel run a fence on every core that runs a process of the world, and the
//! [`light`] fence of the frequent side costs nothing.
//!
//! That needs a process that has registered with the kernel, as those do that join their first world before they start
//! threads. In others, and wherever a rank of the group cannot make the system call, light fences are full ones.

use super::Ordering;
#[cfg(any(loom, not(target_arch = "x86_64")))]
use super::atomic;

#[cfg(all(test, not(loom)))]
use kernel::register_now;
#[cfg(not(loom))]
pub(crate) use kernel::{can_be_heavy, heavy, light, prepare};
#[cfg(loom)]
pub(crate) use model::{can_be_heavy, heavy, light, prepare};

#[cfg(not(loom))]
mod kernel {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, compiler_fence, fence};

    use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

    /// Whether the kernel runs the heavy fences of all processes on the cores of this one.
    static REGISTERED: AtomicBool = AtomicBool::new(false);

    /// Whether this process can make heavy fences for others.
    pub(crate) fn can_be_heavy() -> bool {
        membarrier_query().contains_command(MembarrierCommand::GlobalExpedited)
    }

    /// Makes the light fences of this process free, if it has one thread: with more, the kernel takes 10 ms to seconds to
    /// register, in which not even a kill ends the process.
    pub(crate) fn prepare() {
        /// A child registers for itself.
        static PROCESS: AtomicU32 = AtomicU32::new(0);
        let process = std::process::id();
        if PROCESS.swap(process, Ordering::AcqRel) == process {
            return;
        }
        let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        REGISTERED.store(threads == 1 && register(), Ordering::Release);
    }

    fn register() -> bool {
        membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
    }

    /// Registers whatever it takes.
    #[cfg(test)]
    pub(super) fn register_now() {
        REGISTERED.store(register(), Ordering::Release);
    }

    /// Orders stores before it and loads after it against the [`heavy`] fences of others, if all of them `can_be_heavy`.
    #[inline(always)]
    pub(crate) fn light(all_can_be_heavy: bool) {
        if all_can_be_heavy && REGISTERED.load(Ordering::Relaxed) {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// A full fence here, and one in every process that has registered. Whether the kernel ran those.
    #[cold]
    pub(crate) fn heavy() -> bool {
        fence(Ordering::SeqCst);
        membarrier(MembarrierCommand::GlobalExpedited).is_ok()
    }
}

/// For the models a light fence is what it stands for.
#[cfg(loom)]
mod model {
    use super::{Ordering, atomic};

    pub(crate) fn can_be_heavy() -> bool {
        true
    }

    pub(crate) fn prepare() {}

    pub(crate) fn light(_: bool) {
        atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy() -> bool {
        atomic::fence(Ordering::SeqCst);
        true
    }
}

/// The fence between a successful `replace` (`SeqCst`) and `ring_if_asleep`. Where an exchange is a full fence by
/// itself and a `SeqCst` load plain, as on x86, the two are in order without it.
#[inline(always)]
pub(crate) fn after_replace() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    atomic::fence(Ordering::SeqCst);
}

/// The fence between two loads, which pairs with one between a store and a load elsewhere. Where loads are in order, and what
/// one core sees all cores see, as on x86, the two are in order without it.
#[inline(always)]
pub(crate) fn between_looks() {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    atomic::fence(Ordering::SeqCst);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    const ROUNDS: usize = 20_000;

    /// Each of two threads stores its own word and then loads the other's, with a fence between. How often both
    /// loaded the old value, which fences rule out.
    fn both_missed(first: impl Fn() + Sync, second: impl Fn() + Sync) -> usize {
        let words = [const { AtomicU32::new(0) }; 2];
        let seen = [const { AtomicU32::new(0) }; 2];
        let (together, missed) = (Barrier::new(2), AtomicU32::new(0));
        let go = [const { AtomicBool::new(false) }; 2];
        let run = |own: usize, fence: &dyn Fn()| {
            for round in 1..=ROUNDS as u32 {
                together.wait();
                // Both leave at the same moment, not when the barrier lets them.
                go[own].store(true, Ordering::Release);
                while !go[1 - own].load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                words[own].store(round, Ordering::Relaxed);
                fence();
                seen[own].store(words[1 - own].load(Ordering::Relaxed), Ordering::Relaxed);
                if together.wait().is_leader() {
                    let old = |word: &AtomicU32| word.load(Ordering::Relaxed) != round;
                    missed.fetch_add(seen.iter().all(old).into(), Ordering::Relaxed);
                    go.iter().for_each(|go| go.store(false, Ordering::Relaxed));
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(0, &first));
            scope.spawn(|| run(1, &second));
        });
        missed.into_inner() as usize
    }

    #[test]
    fn a_light_and_a_heavy_fence_order_what_two_full_ones_do() {
        register_now();
        let able = can_be_heavy();
        assert_eq!(both_missed(|| light(able), || assert_eq!(heavy(), able)), 0);
        assert_eq!(both_missed(|| light(false), || light(false)), 0);
    }
}
