//! UCX between hosts: who has it, and what happens to those who use it.

use symmem::{Error, ErrorKind};
use symmem_testing::{Random, Ranks, die, has_ucx, test_name};

use super::{join, ms, rank, set, store_barrier, works};

const NOWHERE: &str = "/nowhere/libucp.so.0";

#[test]
fn a_rank_without_ucx_is_named_to_all_who_asked_for_it() {
    let named = if has_ucx(test_name!()) { 1 } else { 0 };
    let ranks = Ranks::new(3).env("UCX_MEM_EVENTS", "n").env("NAMED", named);
    ranks.env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        set("SYMMEM_WIRE", "ucx");
        if rank() == 1 {
            set("SYMMEM_UCX", NOWHERE);
        }
        let e = join(1).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
        let text = e.to_string();
        let named = std::env::var("NAMED").unwrap();
        assert!(text.contains(&format!("UCX on rank {named}")), "{text}");
        assert!(named == "0" || text.contains(NOWHERE), "{text}");
    });
}

#[test]
fn ranks_that_need_not_have_ucx_do_without() {
    let ranks = Ranks::new(3).env("UCX_MEM_EVENTS", "n").env("SYMMEM_TIMEOUT", 20);
    ranks.start(test_name!(), || {
        if rank() == 1 {
            set("SYMMEM_UCX", NOWHERE);
        }
        let world = join(1).unwrap();
        works(&world);
    });
}

#[test]
fn ranks_that_ask_for_different_wires_are_told() {
    Ranks::new(2).env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        set("SYMMEM_WIRE", if rank() == 0 { "mesh" } else { "" });
        let e = join(1).unwrap_err();
        let Error::Mismatch { what: "SYMMEM_WIRE", rank: other, .. } = e else { panic!("{e}") };
        assert_eq!(other, 1 - rank());
    });
}

#[test]
fn a_wire_that_is_none_is_told() {
    Ranks::new(2).env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        set("SYMMEM_WIRE", "string");
        let e = join(1).unwrap_err().to_string();
        assert!(e.contains("SYMMEM_WIRE") || e.contains("is gone"), "{e}");
    });
}

/// Also where none of its ranks sends to it.
#[test]
fn a_rank_that_dies_while_bulk_is_sent_is_named_over_ucx() {
    if !has_ucx(test_name!()) {
        return;
    }
    for victim in [0, 3] {
        let delay = Random::unseeded().below(40_000);
        println!("rank {victim} dies after {delay} µs");
        let ranks = Ranks::new(4).dying(&[victim]).may_leave_files().env("VICTIM", victim);
        let ranks = ranks.env("DELAY", delay).env("SYMMEM_WIRE", "ucx").env("UCX_MEM_EVENTS", "n");
        ranks.env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
            let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
            let victim = number("VICTIM") as usize;
            let world = join(2).unwrap();
            works(&world);
            let x = world.alloc::<u64>(1 << 18).unwrap().rendezvous(&world).unwrap();
            let x = x.open().unwrap();
            store_barrier(&world, "open");
            if rank() == victim {
                std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_micros(number("DELAY")));
                    die();
                });
            }
            let data = vec![rank() as u64; 1 << 18];
            let (next, last) = ((rank() + 1) % 4, (rank() + 3) % 4);
            let e = loop {
                let round = x
                    .put_signal(next, 0, &data, 1, ms(20_000))
                    .and_then(|()| x.wait_signal(last, 1, ms(20_000)));
                if let Err(e) = round {
                    break e;
                }
            };
            let Error::PeerLost { rank: lost, .. } = e else { panic!("{e}") };
            assert_eq!(lost, victim, "{e}");
        });
    }
}

#[test]
fn what_was_told_last_arrives_though_its_rank_leaves_at_once() {
    if !has_ucx(test_name!()) {
        return;
    }
    let ranks = Ranks::new(2).env("SYMMEM_WIRE", "ucx").env("UCX_MEM_EVENTS", "n");
    ranks.env("SYMMEM_TIMEOUT", 20).start(test_name!(), || {
        for round in 0..10_u64 {
            let world = join(1).unwrap();
            let x = world.alloc::<u64>(1 << 16).unwrap().rendezvous(&world).unwrap();
            let x = x.open().unwrap();
            if rank() == 0 {
                x.put_signal(1, 0, &vec![round; 1 << 16], 1, ms(20_000)).unwrap();
                continue;
            }
            std::thread::sleep(ms(5));
            x.wait_signal(0, 1, ms(20_000)).unwrap();
            let mut got = vec![0; 1 << 16];
            x.get(1, 0, &mut got).unwrap();
            assert!(got.iter().all(|value| *value == round));
        }
    });
}
