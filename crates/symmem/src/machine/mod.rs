//! What this machine is like: as its kernel tells it, and as it was measured.

mod costs;
mod floats;
mod measure;

pub use costs::{Costs, InUse, Origin, path as costs_path};
pub use measure::{Measured, measure};

pub(crate) use costs::Rates;
pub(crate) use floats::DefaultFloats;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Cores of the machine, not of this process: launchers like to bind each rank to one.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let cores = counted(online.trim());
        cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    })
}

/// How many numbers a list such as `0-3,8` has.
fn counted(list: &str) -> Option<usize> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.split(',').map(count).sum()
}

/// Whether a list such as `0-3,8` has `number`.
fn lists(list: &str, number: usize) -> bool {
    list.trim().split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let within = |first: usize, last: usize| (first..=last).contains(&number);
        first.parse().is_ok_and(|first| last.parse().is_ok_and(|last| within(first, last)))
    })
}

/// How many spin-loop hints take about 25 ns: between one and ten, for they take 4 to 60 ns by the processor.
///
/// A rank that polls a flag more often than that takes its line away from the rank that is about to write there.
pub(crate) fn hints_between_looks() -> u32 {
    const GAP: Duration = Duration::from_nanos(25);
    const HINTS: u32 = 64;
    static COUNT: OnceLock<u32> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let took = |_| {
            let begin = Instant::now();
            (0..HINTS).for_each(|_| std::hint::spin_loop());
            begin.elapsed()
        };
        // The least of some, in case another thread came in between.
        let least = (0..8).map(took).min().unwrap_or_default().max(Duration::from_nanos(1));
        let count = (GAP * HINTS).as_nanos() as f64 / least.as_nanos() as f64;
        (count.round() as u32).clamp(1, 10)
    })
}

/// Bytes of the last cache; where the kernel does not tell, a usual one.
pub(crate) fn last_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
        let size = size.unwrap_or_default();
        let kibibytes = size.trim().strip_suffix('K').and_then(|k| k.parse::<usize>().ok());
        kibibytes.map_or(32 << 20, |k| k << 10)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_counted_from_ranges() {
        assert_eq!(counted("0"), Some(1));
        assert_eq!(counted("0-3,8,10-11"), Some(7));
        assert_eq!(counted(""), None);
        assert_eq!(counted("3-0"), None);
        assert!(cores() >= 1 && last_cache() > 0);
        assert!(["8", "0-3,8", "0-3,7-9\n"].iter().all(|list| lists(list, 8)));
        assert!(["", "0", "0-7,9", "x-8"].iter().all(|list| !lists(list, 8)));
    }
}
