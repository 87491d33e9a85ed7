//! For `fuzz/`: what a peer writes into its ring or sends from another host, and what threads ask for meanwhile.

use super::incoming::{Incoming, KEPT, Outcome, Post};
use super::scripted::{Scripted, VALUE};
use super::{Fragment, Kind};
use crate::dtype::DType;

/// Reads a script of fragments and calls. What a thread gets is whole, and what is kept is bounded.
pub fn messages(mut script: &[u8]) {
    let (mut incoming, mut source) = (Incoming::default(), Scripted::default());
    while let Some(step) = take::<1>(&mut script) {
        let ended = match step[0] % 6 {
            0 => {
                let Some(header) = take::<32>(&mut script) else { return };
                let word =
                    |i: usize| u32::from_le_bytes(std::array::from_fn(|j| header[4 * i + j]));
                source.fragments.push_back(std::array::from_fn(word));
                Ok(())
            }
            1 => {
                let Some([tag, total, bytes]) = take(&mut script) else { return };
                let [total, bytes] = [total, bytes].map(usize::from);
                let kind = Kind::First { tag: tag.into(), dtype: DType::U8, total };
                source.fragments.push_back(Fragment { kind, bytes }.encode());
                Ok(())
            }
            2 => {
                let Some([bytes]) = take(&mut script) else { return };
                source
                    .fragments
                    .push_back(Fragment { kind: Kind::Next, bytes: bytes.into() }.encode());
                Ok(())
            }
            3 => {
                let Some([number]) = take(&mut script) else { return };
                source.withdrawn = number.into();
                Ok(())
            }
            4 => incoming.advance(&mut source, None).map(drop),
            _ => {
                let Some([tag, len, looks]) = take(&mut script) else { return };
                receive(&mut incoming, &mut source, (tag.into(), len.into()), looks % 4)
            }
        };
        if ended.is_err() {
            return; // nothing of this peer is looked at any more
        }
        assert!(!incoming.is_claimed() && incoming.kept_bytes() <= KEPT + (1 << 20));
    }
}

/// A thread that looks so often and then gives up.
fn receive(
    incoming: &mut Incoming,
    source: &mut Scripted,
    (tag, len): (u64, usize),
    looks: u8,
) -> Result<(), String> {
    let mut out = vec![0; len];
    let mut post = Post { tag, dtype: DType::U8, out: &mut out };
    for _ in 0..looks {
        match incoming.advance(source, Some(&mut post))? {
            Some(Outcome::Taken) => {
                assert!(out.iter().all(|byte| *byte == VALUE));
                return Ok(());
            }
            Some(Outcome::Differs { dtype, total }) => {
                assert!(dtype != DType::U8 || total != len);
                return Ok(());
            }
            None => {}
        }
    }
    incoming.leave(&post);
    Ok(())
}

fn take<const N: usize>(script: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = script.split_first_chunk()?;
    *script = rest;
    Some(*first)
}
