//! What every store does.

use std::thread;
use std::time::Duration;

use symmem::store::{MAX_KEY_LEN, MAX_KEYS, MAX_VALUE_LEN, SharedStore};
use symmem::{Deadline, Error};

use super::site::{LONG, SHORT, Site, heard, on_threads};

/// One test per check and store.
macro_rules! suite {
    ($store:ident, $site:expr) => {
        $crate::conformance::suite!(@each $store, $site,
            a_value_is_read_by_every_client
            empty_and_binary_values_are_values
            the_empty_key_is_a_key
            get_waits_until_the_key_is_set
            add_counts_in_decimal_text
            add_to_what_is_no_number_is_an_error_and_the_store_goes_on
            compare_set_follows_pytorch
            check_is_true_when_all_keys_exist
            delete_says_whether_there_was_a_key
            append_creates_and_extends
            many_keys_are_set_and_read_in_order
            multi_get_waits_for_the_last_key
            the_number_of_keys_follows_sets_and_deletes
            a_wait_ends_when_each_key_has_come
            a_wait_for_nothing_ends_at_once
            a_deadline_in_the_past_still_finds_what_is_there
            a_client_works_after_a_wait_that_timed_out
            a_wait_holds_up_nobody_else_on_the_same_handle
            what_is_set_is_seen_by_all_at_once
            five_thousand_keys_fit
            three_hundred_clients_meet
            limits_are_named_in_the_error
        );
    };
    (@each $store:ident, $site:expr, $($check:ident)*) => {
        mod $store {
            $(#[test] fn $check() { $crate::conformance::$check(&{ use $crate::site; $site }) })*
        }
    };
}
pub(crate) use suite;

fn timeout_op(error: Error) -> &'static str {
    match error {
        Error::Timeout { op, channel: None, waiting_for, .. } if waiting_for.is_empty() => op,
        other => panic!("expected a timeout of the store, got {other}"),
    }
}

pub fn a_value_is_read_by_every_client(site: &Site) {
    let (a, b) = (site.open(), site.open());
    a.set("key", b"value").unwrap();
    assert_eq!(b.get("key", LONG).unwrap(), b"value");
    b.set("key", b"other").unwrap();
    assert_eq!(a.get("key", LONG).unwrap(), b"other");
}

pub fn empty_and_binary_values_are_values(site: &Site) {
    let store = site.open();
    let all: Vec<u8> = (0..=255).collect();
    store.set("empty", b"").unwrap();
    store.set("binary", &all).unwrap();
    assert_eq!(store.get("empty", LONG).unwrap(), b"");
    assert_eq!(store.get("binary", LONG).unwrap(), all);
    assert_eq!(store.multi_get(&["binary", "empty"], LONG).unwrap(), [all, vec![]]);
}

pub fn the_empty_key_is_a_key(site: &Site) {
    let store = site.open();
    assert!(!store.check(&[""]).unwrap());
    store.set("", b"x").unwrap();
    assert_eq!(store.get("", LONG).unwrap(), b"x");
    assert!(store.delete("").unwrap());
}

pub fn get_waits_until_the_key_is_set(site: &Site) {
    let (a, b) = (site.open(), site.open());
    thread::scope(|scope| {
        let reader = scope.spawn(|| a.get("later", LONG).unwrap());
        thread::sleep(Duration::from_millis(20));
        b.set("later", b"now").unwrap();
        assert_eq!(reader.join().unwrap(), b"now");
    });
}

pub fn add_counts_in_decimal_text(site: &Site) {
    let store = site.open();
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -12).unwrap(), -7);
    assert_eq!(store.get("n", LONG).unwrap(), b"-7");
    store.set("n", b"40").unwrap();
    assert_eq!(store.add("n", 2).unwrap(), 42);
    assert_eq!(store.add("n", 0).unwrap(), 42);
    assert_eq!(store.add("zero", 0).unwrap(), 0);
    assert!(store.check(&["zero"]).unwrap());
}

pub fn add_to_what_is_no_number_is_an_error_and_the_store_goes_on(site: &Site) {
    let store = site.open();
    for text in ["", "abc", "12x", "99999999999999999999"] {
        store.set("text", text.as_bytes()).unwrap();
        let error = store.add("text", 1).unwrap_err();
        assert!(matches!(error, Error::Usage { .. } | Error::Protocol { .. }), "{error}");
        assert_eq!(store.get("text", LONG).unwrap(), text.as_bytes());
    }
    store.set("text", i64::MAX.to_string().as_bytes()).unwrap();
    store.add("text", 1).unwrap_err();
    assert_eq!(store.add("text", -1).unwrap(), i64::MAX - 1);
}

pub fn compare_set_follows_pytorch(site: &Site) {
    let store = site.open();
    // Absent, but expected to hold something: nothing happens, and the expectation comes back.
    assert_eq!(store.compare_set("k", b"old", b"new").unwrap(), b"old");
    assert!(!store.check(&["k"]).unwrap());
    // Absent as expected.
    assert_eq!(store.compare_set("k", b"", b"first").unwrap(), b"first");
    // Present, but different.
    assert_eq!(store.compare_set("k", b"", b"second").unwrap(), b"first");
    assert_eq!(store.compare_set("k", b"wrong", b"second").unwrap(), b"first");
    // Present as expected.
    assert_eq!(store.compare_set("k", b"first", b"second").unwrap(), b"second");
    assert_eq!(store.get("k", LONG).unwrap(), b"second");
    // An empty value is equal to an empty expectation.
    store.set("e", b"").unwrap();
    assert_eq!(store.compare_set("e", b"", b"full").unwrap(), b"full");
}

pub fn check_is_true_when_all_keys_exist(site: &Site) {
    let store = site.open();
    assert!(store.check(&[]).unwrap());
    store.set("a", b"1").unwrap();
    assert!(store.check(&["a", "a"]).unwrap());
    assert!(!store.check(&["a", "b"]).unwrap());
    store.set("b", b"").unwrap();
    assert!(store.check(&["a", "b"]).unwrap());
}

pub fn delete_says_whether_there_was_a_key(site: &Site) {
    let store = site.open();
    assert!(!store.delete("k").unwrap());
    store.set("k", b"v").unwrap();
    assert!(store.delete("k").unwrap());
    assert!(!store.delete("k").unwrap());
    assert!(!store.check(&["k"]).unwrap());
    assert_eq!(timeout_op(heard(|| store.get("k", SHORT)).unwrap_err()), "get");
}

pub fn append_creates_and_extends(site: &Site) {
    let store = site.open();
    store.append("log", b"one").unwrap();
    store.append("log", b"").unwrap();
    store.append("log", b", two").unwrap();
    assert_eq!(store.get("log", LONG).unwrap(), b"one, two");
    store.append("empty", b"").unwrap();
    assert!(store.check(&["empty"]).unwrap());
}

pub fn many_keys_are_set_and_read_in_order(site: &Site) {
    let store = site.open();
    store.multi_set(&[]).unwrap();
    assert!(store.multi_get(&[], LONG).unwrap().is_empty());
    store.multi_set(&[("a", b"1"), ("b", b"22"), ("a", b"333")]).unwrap();
    assert_eq!(store.multi_get(&["b", "a", "b"], LONG).unwrap(), [&b"22"[..], b"333", b"22"]);
}

pub fn multi_get_waits_for_the_last_key(site: &Site) {
    let (a, b) = (site.open(), site.open());
    a.set("x", b"1").unwrap();
    assert_eq!(timeout_op(heard(|| a.multi_get(&["x", "y"], SHORT)).unwrap_err()), "multi_get");
    thread::scope(|scope| {
        let reader = scope.spawn(|| a.multi_get(&["x", "y"], LONG).unwrap());
        b.multi_set(&[("z", b"3"), ("y", b"2")]).unwrap();
        assert_eq!(reader.join().unwrap(), [b"1", b"2"]);
    });
}

pub fn the_number_of_keys_follows_sets_and_deletes(site: &Site) {
    let store = site.open();
    assert_eq!(store.num_keys().unwrap(), 0);
    store.multi_set(&[("a", b""), ("b", b""), ("a", b"")]).unwrap();
    store.add("c", 1).unwrap();
    assert_eq!(store.num_keys().unwrap(), 3);
    store.delete("a").unwrap();
    assert_eq!(store.num_keys().unwrap(), 2);
}

pub fn a_wait_ends_when_each_key_has_come(site: &Site) {
    let stores: Vec<SharedStore> = (0..6).map(|_| site.open()).collect();
    on_threads(&stores, |rank, store| match rank {
        0 => store.set("by set", b"").unwrap(),
        1 => store.add("by add", 1).map(drop).unwrap(),
        2 => store.append("by append", b"x").unwrap(),
        3 => store.compare_set("by compare", b"", b"x").map(drop).unwrap(),
        4 => store.multi_set(&[("by many", b"x")]).unwrap(),
        _ => {
            let keys = ["by set", "by add", "by append", "by compare", "by many", "by set"];
            store.wait(&keys, LONG).unwrap();
            assert!(store.check(&keys).unwrap());
        }
    });
}

pub fn a_wait_for_nothing_ends_at_once(site: &Site) {
    site.open().wait(&[], LONG).unwrap();
}

pub fn a_deadline_in_the_past_still_finds_what_is_there(site: &Site) {
    let store = site.open();
    let past = Deadline::after(Duration::from_nanos(1));
    while !past.expired() {}
    store.set("k", b"v").unwrap();
    heard(|| store.wait(&["k"], past)).unwrap();
    assert_eq!(heard(|| store.get("k", past)).unwrap(), b"v");
    assert_eq!(timeout_op(heard(|| store.get("absent", past)).unwrap_err()), "get");
}

pub fn a_client_works_after_a_wait_that_timed_out(site: &Site) {
    let (a, b) = (site.open(), site.open());
    for round in 0..5 {
        let key = format!("late {round}");
        assert_eq!(timeout_op(heard(|| a.wait(&["there", &key], SHORT)).unwrap_err()), "wait");
        assert_eq!(timeout_op(heard(|| a.get(&key, SHORT)).unwrap_err()), "get");
        // What comes after the time-out must not be taken for the answer to something else.
        b.set(&key, b"v").unwrap();
        assert_eq!(a.add("n", 1).unwrap(), round + 1);
        assert_eq!(a.get(&key, LONG).unwrap(), b"v");
        assert!(!a.check(&["there"]).unwrap());
    }
}

pub fn a_wait_holds_up_nobody_else_on_the_same_handle(site: &Site) {
    let store = site.open();
    thread::scope(|scope| {
        for waiter in 0..8 {
            let store = &store;
            scope.spawn(move || store.get(&format!("go {}", waiter % 2), LONG).unwrap());
        }
        thread::sleep(Duration::from_millis(20));
        assert_eq!(store.add("n", 1).unwrap(), 1);
        store.set("go 0", b"").unwrap();
        store.set("go 1", b"").unwrap();
    });
}

pub fn what_is_set_is_seen_by_all_at_once(site: &Site) {
    let (a, b) = (site.open(), site.open());
    for i in 0..300 {
        let key = format!("k{i}");
        match i % 3 {
            0 => a.set(&key, b"v").unwrap(),
            1 => a.append(&key, b"v").unwrap(),
            _ => a.multi_set(&[(&key, b"v")]).unwrap(),
        }
        assert!(b.check(&[&key]).unwrap());
    }
}

pub fn five_thousand_keys_fit(site: &Site) {
    let store = site.open();
    let keys: Vec<String> = (0..5000).map(|i| format!("key {i}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let (first, second) = keys.split_at(2500);
    first.iter().for_each(|key| store.set(key, key.as_bytes()).unwrap());
    let entries: Vec<(&str, &[u8])> = second.iter().map(|key| (*key, key.as_bytes())).collect();
    store.multi_set(&entries).unwrap();
    assert_eq!(store.num_keys().unwrap(), 5000);
    store.wait(&keys, LONG).unwrap();
    assert!(store.check(&keys).unwrap());
    let values = store.multi_get(&keys, LONG).unwrap();
    assert!(values.iter().zip(&keys).all(|(value, key)| value == key.as_bytes()));
}

pub fn three_hundred_clients_meet(site: &Site) {
    const CLIENTS: usize = 300;
    raise_file_limit();
    let stores: Vec<SharedStore> = (0..CLIENTS).map(|_| site.open()).collect();
    on_threads(&stores, |rank, store| {
        store.set(&format!("rank {rank}"), &rank.to_ne_bytes()).unwrap();
        if store.add("arrived", 1).unwrap() == CLIENTS as i64 {
            store.set("all", b"here").unwrap();
        }
        store.wait(&["all"], LONG).unwrap();
        let next = (rank + 1) % CLIENTS;
        let value = store.get(&format!("rank {next}"), LONG).unwrap();
        assert_eq!(value, next.to_ne_bytes());
    });
    assert_eq!(stores[0].num_keys().unwrap(), CLIENTS as i64 + 2);
}

pub fn limits_are_named_in_the_error(site: &Site) {
    let store = site.open();
    let key = "k".repeat(MAX_KEY_LEN - "some/prefix/".len());
    let value = vec![7; MAX_VALUE_LEN];
    store.set(&key, &value).unwrap();
    assert!(store.get(&key, LONG).unwrap() == value);
    let (long_key, long_value) = ("k".repeat(MAX_KEY_LEN + 1), vec![7; MAX_VALUE_LEN + 1]);
    let usage = |error: Error| match error {
        Error::Usage { op, expected, got, .. } => format!("{op}: {expected}: {got}"),
        other => panic!("expected a usage error, got {other}"),
    };
    let got = usage(store.set("k", &long_value).unwrap_err());
    assert_eq!(got, "set: a value length of at most 8388608: 8388609");
    usage(store.get(&long_key, LONG).unwrap_err());
    usage(store.append(&long_key, b"").unwrap_err());
    usage(store.compare_set("k", &long_value, b"").unwrap_err());
    let got = usage(store.check(&vec!["k"; MAX_KEYS + 1]).unwrap_err());
    assert_eq!(got, "check: a number of keys of at most 131072: 131073");
    usage(store.multi_set(&vec![("k", &b""[..]); MAX_KEYS + 1]).unwrap_err());
    assert_eq!(store.num_keys().unwrap(), 1);
}

/// Both ends of 300 connections, in several tests at once, are more than the usual 1024.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
