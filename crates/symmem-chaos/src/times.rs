//! Spans of time, in nanoseconds.

/// A millisecond.
pub(crate) const MS: u64 = 1_000_000;

/// In milliseconds, for people.
pub(crate) fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / MS as f64
}

/// The same times, in order and apart.
pub(crate) fn union(mut times: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    times.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (begin, end) in times {
        match apart.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => apart.push((begin, end)),
        }
    }
    apart
}
