//! What the names of calls say, and which barrier a call was for.

use std::collections::{BTreeMap, HashMap};

use symmem_chaos::record::{Kind, Outcome, Record};

/// Lane, call and part.
pub type Key = (usize, usize, usize);

/// On a channel of its own: that of the group's sequence is a call like any other.
pub fn is_barrier(name: &str) -> bool {
    name.starts_with("barrier#")
}

/// Numbers the barriers of each rank on each channel: a call that ended at its deadline was for the same one as the next.
pub fn count_barriers(calls: &BTreeMap<Key, Vec<&Record>>) -> HashMap<(usize, usize, u64), usize> {
    let mut records: Vec<&Record> = calls.values().flatten().copied().collect();
    records.sort_by_key(|r| r.enter);
    let mut generations: HashMap<(usize, usize), usize> = HashMap::new();
    let mut counts: HashMap<(usize, usize, usize, &str, &[usize]), usize> = HashMap::new();
    let mut numbers = HashMap::new();
    for record in records {
        let generation = generations.entry((record.rank, record.lane)).or_default();
        if ["resync", "shrink"].contains(&record.name.as_str()) && record.outcome == Outcome::Ok {
            *generation += 1; // what was not finished is forgotten
        }
        if is_barrier(&record.name) {
            let Record { rank, lane, name, members, .. } = record;
            let count = counts.entry((*rank, *lane, *generation, name, members)).or_default();
            numbers.insert((*rank, *lane, record.enter), 1000 * *generation + *count);
            let goes_on = matches!(
                &record.outcome,
                Outcome::Err { kind: Kind::Timeout | Kind::Interrupted, .. } | Outcome::Open
            );
            *count += usize::from(!goes_on);
        }
    }
    numbers
}

pub fn is_collective(name: &str) -> bool {
    !["put_signal", "wait_signal", "shrink", "behind", "resync", "shared"]
        .iter()
        .any(|w| name.starts_with(w))
}

/// A call of its group's sequence that carries no data: one that gave up is resumed by the same call.
pub fn is_resumable(name: &str) -> bool {
    ["barrier", "rendezvous", "share", "release", "open", "close"].contains(&short(name))
}

/// The operation alone.
pub fn short(name: &str) -> &str {
    match name.starts_with("behind") {
        true => name,
        false => name.split(['[', '(', '@', '#', '<', '>']).next().unwrap_or(name),
    }
}

/// For a wait for a signal: who puts it.
pub fn signal_of(record: &Record) -> Option<usize> {
    record.name.strip_prefix("wait_signal<")?.parse().ok()
}
