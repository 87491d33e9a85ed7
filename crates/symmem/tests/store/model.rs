//! Any sequence of operations gives what a plain map would give.

use std::collections::HashMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use symmem::{Deadline, Error};

use super::site::{self, LONG, Site, heard};

#[derive(Clone, Debug)]
enum Op {
    Set(usize, Vec<u8>),
    Get(usize),
    Add(usize, i64),
    CompareSet(usize, Vec<u8>, Vec<u8>),
    Check(Vec<usize>),
    Wait(Vec<usize>),
    Delete(usize),
    Append(usize, Vec<u8>),
    MultiGet(Vec<usize>),
    MultiSet(Vec<(usize, Vec<u8>)>),
    NumKeys,
}

const KEYS: [&str; 4] = ["", "a", "b/c", "ключ"];
const AT_ONCE: Deadline = Deadline::within(Duration::from_millis(1));

fn any_op() -> impl Strategy<Value = Op> {
    let key = || 0..KEYS.len();
    let keys = || vec(key(), 0..4);
    let value = || prop_oneof![Just(b"".to_vec()), Just(b"12".to_vec()), vec(any::<u8>(), 0..40)];
    prop_oneof![
        (key(), value()).prop_map(|(k, v)| Op::Set(k, v)),
        key().prop_map(Op::Get),
        (key(), -20i64..20).prop_map(|(k, n)| Op::Add(k, n)),
        (key(), value(), value()).prop_map(|(k, e, n)| Op::CompareSet(k, e, n)),
        keys().prop_map(Op::Check),
        keys().prop_map(Op::Wait),
        key().prop_map(Op::Delete),
        (key(), value()).prop_map(|(k, v)| Op::Append(k, v)),
        keys().prop_map(Op::MultiGet),
        vec((key(), value()), 0..4).prop_map(Op::MultiSet),
        Just(Op::NumKeys),
    ]
}

/// What an operation gives: a list of values, or no answer within the deadline, or a refusal.
#[derive(Debug, PartialEq)]
enum Outcome {
    Values(Vec<Vec<u8>>),
    TimedOut,
    Refused,
}

fn number(n: i64) -> Outcome {
    Outcome::Values(vec![n.to_string().into_bytes()])
}

fn truth(b: bool) -> Outcome {
    number(i64::from(b))
}

fn by_store(store: &dyn symmem::store::Store, op: &Op) -> Outcome {
    let names = |keys: &[usize]| keys.iter().map(|k| KEYS[*k]).collect::<Vec<_>>();
    let nothing = |()| Outcome::Values(vec![]);
    let one = |value| Outcome::Values(vec![value]);
    let result = match op {
        Op::Set(k, v) => store.set(KEYS[*k], v).map(nothing),
        Op::Get(k) => heard(|| store.get(KEYS[*k], AT_ONCE)).map(one),
        Op::Add(k, n) => store.add(KEYS[*k], *n).map(number),
        Op::CompareSet(k, e, n) => store.compare_set(KEYS[*k], e, n).map(one),
        Op::Check(ks) => store.check(&names(ks)).map(truth),
        Op::Wait(ks) => heard(|| store.wait(&names(ks), AT_ONCE)).map(nothing),
        Op::Delete(k) => store.delete(KEYS[*k]).map(truth),
        Op::Append(k, v) => store.append(KEYS[*k], v).map(nothing),
        Op::MultiGet(ks) => heard(|| store.multi_get(&names(ks), AT_ONCE)).map(Outcome::Values),
        Op::MultiSet(es) => {
            let es: Vec<(&str, &[u8])> = es.iter().map(|(k, v)| (KEYS[*k], &v[..])).collect();
            store.multi_set(&es).map(nothing)
        }
        Op::NumKeys => store.num_keys().map(number),
    };
    result.unwrap_or_else(|error| match error {
        Error::Timeout { .. } => Outcome::TimedOut,
        Error::Usage { .. } | Error::Protocol { .. } => Outcome::Refused,
        other => panic!("{op:?}: {other}"),
    })
}

fn by_map(map: &mut HashMap<usize, Vec<u8>>, op: &Op) -> Outcome {
    let values = |keys: &[usize], map: &HashMap<usize, Vec<u8>>| {
        keys.iter().map(|k| map.get(k).cloned()).collect::<Option<Vec<_>>>()
    };
    match op.clone() {
        Op::Set(k, v) => drop(map.insert(k, v)),
        Op::Get(k) => return values(&[k], map).map_or(Outcome::TimedOut, Outcome::Values),
        Op::Add(k, n) => {
            let old = map.get(&k).map_or("0".into(), |v| String::from_utf8_lossy(v).into_owned());
            let Ok(old) = old.trim().parse::<i64>() else { return Outcome::Refused };
            map.insert(k, (old + n).to_string().into_bytes());
            return number(old + n);
        }
        Op::CompareSet(k, expected, new) => {
            if map.get(&k).map_or(expected.is_empty(), |current| *current == expected) {
                map.insert(k, new);
            }
            return Outcome::Values(vec![map.get(&k).cloned().unwrap_or(expected)]);
        }
        Op::Check(ks) => return truth(values(&ks, map).is_some()),
        Op::Wait(ks) if values(&ks, map).is_none() => return Outcome::TimedOut,
        Op::Wait(_) => {}
        Op::Delete(k) => return truth(map.remove(&k).is_some()),
        Op::Append(k, v) => map.entry(k).or_default().extend(v),
        Op::MultiGet(ks) => return values(&ks, map).map_or(Outcome::TimedOut, Outcome::Values),
        Op::MultiSet(es) => map.extend(es),
        Op::NumKeys => return number(map.len() as i64),
    }
    Outcome::Values(vec![])
}

fn agree(site: &Site, ops: &[Op]) -> Result<(), TestCaseError> {
    let clients = [site.open(), site.open()];
    let mut map = HashMap::new();
    for (i, op) in ops.iter().enumerate() {
        prop_assert_eq!(by_store(&*clients[i % 2], op), by_map(&mut map, op), "{}: {:?}", i, op);
    }
    for (k, value) in &map {
        prop_assert_eq!(&clients[0].get(KEYS[*k], LONG).unwrap(), value);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_memory_store_is_a_map(ops in vec(any_op(), 0..40)) {
        agree(&site::memory(), &ops)?;
    }

    #[test]
    fn a_tcp_store_is_a_map(ops in vec(any_op(), 0..40)) {
        agree(&site::tcp(), &ops)?;
    }

    #[test]
    fn a_part_of_a_tcp_store_is_a_map(ops in vec(any_op(), 0..40)) {
        agree(&site::prefixed(site::tcp()), &ops)?;
    }
}
