use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// What `message` would have sent for `query`, without the slash before keys.
fn encode(query: &Query) -> Vec<u8> {
    fn keyed(mut out: Vec<u8>, parts: &[&Vec<u8>]) -> Vec<u8> {
        parts.iter().for_each(|part| put_value(&mut out, part));
        out
    }
    fn counted(kind: Kind, keys: &[Vec<u8>]) -> Vec<u8> {
        keyed(Message::new(kind).count(keys.len()).0, &keys.iter().collect::<Vec<_>>())
    }
    let start = |kind| Message::new(kind).0;
    match query {
        Query::Validate(word) => Message::new(Kind::Validate).word(*word).0,
        Query::Ping(word) => Message::new(Kind::Ping).word(*word).0,
        Query::Set { key, value } => keyed(start(Kind::Set), &[key, value]),
        Query::Append { key, value } => keyed(start(Kind::Append), &[key, value]),
        Query::CompareSet { key, expected, new } => {
            keyed(start(Kind::CompareSet), &[key, expected, new])
        }
        Query::Get(key) => keyed(start(Kind::Get), &[key]),
        Query::Delete(key) => keyed(start(Kind::Delete), &[key]),
        Query::Add { key, amount } => Message(keyed(start(Kind::Add), &[key])).amount(*amount).0,
        Query::Check(keys) => counted(Kind::Check, keys),
        Query::Wait(keys) => counted(Kind::Wait, keys),
        Query::MultiGet(keys) => counted(Kind::MultiGet, keys),
        Query::MultiSet(entries) => {
            let parts: Vec<_> = entries.iter().flat_map(|(k, v)| [k, v]).collect();
            keyed(Message::new(Kind::MultiSet).count(entries.len()).0, &parts)
        }
        Query::NumKeys => start(Kind::NumKeys),
        Query::CancelWait => start(Kind::CancelWait),
    }
}

fn any_query() -> impl Strategy<Value = Query> {
    let key = || vec(any::<u8>(), 0..20);
    let value = || vec(any::<u8>(), 0..60);
    let keys = || vec(key(), 0..6);
    prop_oneof![
        any::<u32>().prop_map(Query::Validate),
        any::<u32>().prop_map(Query::Ping),
        (key(), value()).prop_map(|(key, value)| Query::Set { key, value }),
        (key(), value()).prop_map(|(key, value)| Query::Append { key, value }),
        (key(), value(), value()).prop_map(|(key, expected, new)| Query::CompareSet {
            key,
            expected,
            new
        }),
        key().prop_map(Query::Get),
        key().prop_map(Query::Delete),
        (key(), any::<i64>()).prop_map(|(key, amount)| Query::Add { key, amount }),
        keys().prop_map(Query::Check),
        keys().prop_map(Query::Wait),
        keys().prop_map(Query::MultiGet),
        vec((key(), value()), 0..6).prop_map(Query::MultiSet),
        Just(Query::NumKeys),
        Just(Query::CancelWait),
    ]
}

fn decode(pieces: &[&[u8]]) -> Result<Vec<Query>, Refusal> {
    let mut decoder = Decoder::default();
    let mut queries = vec![];
    for piece in pieces {
        decoder.feed(piece);
        while let Some(query) = decoder.next()? {
            queries.push(query);
        }
    }
    Ok(queries)
}

proptest! {
    #[test]
    fn queries_survive_any_cut_into_pieces(
        queries in vec(any_query(), 0..12),
        pieces in vec(1usize..40, 1..50),
    ) {
        let bytes: Vec<u8> = queries.iter().flat_map(encode).collect();
        let mut rest = bytes.as_slice();
        let mut cut = vec![];
        for len in pieces.iter().cycle() {
            let (piece, tail) = rest.split_at((*len).min(rest.len()));
            cut.push(piece);
            rest = tail;
            if rest.is_empty() { break }
        }
        prop_assert_eq!(decode(&cut), Ok(queries.clone()));
        prop_assert_eq!(decode(&[&bytes]), Ok(queries));
    }

    #[test]
    fn noise_gives_the_same_verdict_whole_and_in_pieces(bytes in vec(any::<u8>(), 0..300)) {
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        prop_assert_eq!(decode(&single), decode(&[&bytes]));
    }
}

#[test]
fn lengths_beyond_the_limits_are_refused_before_their_bytes_come() {
    let huge = [u64::MAX, i64::MAX as u64, MESSAGE_LEN as u64];
    for len in huge {
        for kind in [Kind::Set, Kind::Get, Kind::Check, Kind::Wait, Kind::MultiGet, Kind::MultiSet]
        {
            let mut bytes = vec![kind as u8];
            bytes.extend_from_slice(&len.to_ne_bytes());
            assert!(decode(&[&bytes]).is_err(), "{kind:?} {len}");
        }
        let mut bytes = Message::new(Kind::Set).key("k").0;
        bytes.extend_from_slice(&len.to_ne_bytes());
        assert!(decode(&[&bytes]).is_err(), "value of {len}");
    }
}

#[test]
fn many_values_that_together_are_too_long_are_refused() {
    let mut decoder = Decoder::default();
    decoder.feed(Message::new(Kind::MultiSet).count(100).bytes());
    let entry = Message::default().key("k").value(&vec![0; MAX_VALUE_LEN]).0;
    let verdict = (0..100).find_map(|_| {
        decoder.feed(&entry);
        decoder.next().err()
    });
    assert!(verdict.is_some());
    assert!(decoder.input.len() <= 2 * MAX_VALUE_LEN);
}

#[test]
fn a_large_value_does_not_keep_its_memory() {
    let mut decoder = Decoder::default();
    decoder.feed(Message::new(Kind::Set).key("k").value(&vec![1; MAX_VALUE_LEN]).bytes());
    assert!(matches!(decoder.next(), Ok(Some(Query::Set { .. }))));
    assert_eq!(decoder.input.capacity(), 0);
}

#[test]
fn a_promised_length_costs_no_memory_until_its_bytes_come() {
    let mut decoder = Decoder::default();
    decoder
        .feed(Message::new(Kind::MultiSet).count(MAX_KEYS).key("k").count(MAX_VALUE_LEN).bytes());
    assert_eq!(decoder.next(), Ok(None));
    assert!(decoder.input.capacity() < 1024);
    assert!(decoder.partial.is_some_and(|partial| partial.keys.capacity() < 1024));
}
