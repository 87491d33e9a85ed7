//! What the names of calls say, and which barrier a call was for.

use std::collections::{BTreeMap, HashMap};

use symmem_chaos::record::{Kind, Outcome, Record};

/// Lane, call and part.
pub type Key = (usize, usize, usize);

/// On a channel of its own: that of the group's sequence is a call like any other.
pub fn is_barrier(name: &str) -> bool {
    name.starts_with("barrier#")
}

/// How often the group of a call had been brought back in step before, by rank, lane and the time when the call began. A group
/// is known by its members: ranks may come to a smaller one in one step or in several.
pub fn count_generations(
    calls: &BTreeMap<Key, Vec<&Record>>,
) -> HashMap<(usize, usize, u64), usize> {
    let mut counts: HashMap<(usize, usize, &[usize]), usize> = HashMap::new();
    let mut generations = HashMap::new();
    for Record { rank, lane, enter, name, members, outcome, .. } in in_order(calls) {
        let count = counts.entry((*rank, *lane, members)).or_default();
        generations.insert((*rank, *lane, *enter), *count);
        // One that is shrunk without having lost anybody is another, too.
        let anew = ["resync", "shrink"].contains(&name.as_str());
        *count += usize::from(anew && *outcome == Outcome::Ok);
    }
    generations
}

fn in_order<'a>(calls: &BTreeMap<Key, Vec<&'a Record>>) -> Vec<&'a Record> {
    let mut records: Vec<&Record> = calls.values().flatten().copied().collect();
    records.sort_by_key(|r| r.enter);
    records
}

/// Numbers the barriers of each rank on each channel: a call that ended at its deadline was for the same one as the next.
pub fn count_barriers(
    calls: &BTreeMap<Key, Vec<&Record>>,
    generations: &HashMap<(usize, usize, u64), usize>,
) -> HashMap<(usize, usize, u64), usize> {
    let mut counts: HashMap<(usize, usize, usize, &str, &[usize]), usize> = HashMap::new();
    let mut numbers = HashMap::new();
    for record in in_order(calls).into_iter().filter(|r| is_barrier(&r.name)) {
        let Record { rank, lane, name, members, enter, .. } = record;
        // What was not finished before is forgotten.
        let generation = generations.get(&(*rank, *lane, *enter)).copied().unwrap_or_default();
        let count = counts.entry((*rank, *lane, generation, name, members)).or_default();
        numbers.insert((*rank, *lane, *enter), 1000 * generation + *count);
        let goes_on = matches!(
            &record.outcome,
            Outcome::Err { kind: Kind::Timeout | Kind::Interrupted, .. } | Outcome::Open
        );
        *count += usize::from(!goes_on);
    }
    numbers
}

pub fn is_collective(name: &str) -> bool {
    !["put_signal", "wait_signal", "send", "recv", "shrink", "behind", "resync", "shared"]
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

/// For a wait for a message: who sends it in this step.
pub fn sender_of(record: &Record) -> Option<usize> {
    let name = &record.name;
    name.strip_prefix("recv<").or_else(|| name.strip_prefix("recv_any<"))?.parse().ok()
}
