//! Addresses as engines hand them out: UCX's own, in a frame.
//!
//! UCX reads an address without being told its length, and believes what it reads. So the frame has the length and a hash:
//! what was cut or damaged on its way is refused before UCX sees it. Against somebody who makes up an address with the
//! right hash only the authentication of whoever carried it helps.

use super::{Failure, Result, Version};

const MAGIC: [u8; 4] = *b"smX1";
/// Magic, version, length, hash.
const FRAME: usize = 4 + 2 + 2 + 8;
/// More than any address of one network device has.
const LONGEST: usize = 4096;
/// Zeros behind an address, for a reader that goes too far.
const MARGIN: usize = 64;

/// An address in its frame.
pub(super) fn wrap(version: Version, address: &[u8]) -> Result<Vec<u8>> {
    let bytes = u16::try_from(address.len()).ok().filter(|bytes| usize::from(*bytes) <= LONGEST);
    let Some(bytes) = bytes else {
        let text = format!("an address of {} bytes: restrict the devices", address.len());
        return Err(Failure::refused("address", text));
    };
    let mut framed = Vec::with_capacity(FRAME + address.len());
    framed.extend(MAGIC);
    framed.extend([version.major, version.minor]);
    framed.extend(bytes.to_le_bytes());
    framed.extend(hash(&framed, address).to_le_bytes());
    framed.extend(address);
    Ok(framed)
}

/// The version and the address in a frame, with zeros behind it.
pub(super) fn unwrap(framed: &[u8]) -> Result<(Version, Vec<u8>)> {
    let refuse = |why: &str| Failure::refused("connect", format!("no address of UCX: {why}"));
    let Some((frame, address)) = framed.split_first_chunk::<FRAME>() else {
        return Err(refuse("too short"));
    };
    let [m0, m1, m2, m3, major, minor, l0, l1, said @ ..] = *frame;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(refuse("another magic number"));
    }
    let bytes = usize::from(u16::from_le_bytes([l0, l1]));
    if bytes != address.len() || bytes > LONGEST {
        return Err(refuse("another length than it says"));
    }
    let (begin, _) = frame.split_at(FRAME - 8);
    if hash(begin, address) != u64::from_le_bytes(said) {
        return Err(refuse("damaged on its way"));
    }
    let mut padded = address.to_vec();
    padded.resize(bytes + MARGIN, 0);
    Ok((Version { major, minor, release: 0 }, padded))
}

/// FNV-1a over both.
fn hash(begin: &[u8], address: &[u8]) -> u64 {
    begin.iter().chain(address).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: Version = Version::new(1, 13, 1);

    #[test]
    fn an_address_comes_out_as_it_went_in() {
        let framed = wrap(VERSION, b"somewhere").unwrap();
        let (version, address) = unwrap(&framed).unwrap();
        assert_eq!((version.major, version.minor), (1, 13));
        assert_eq!(address.strip_prefix(b"somewhere"), Some(&[0; MARGIN][..]));
    }

    #[test]
    fn every_damage_is_noticed() {
        let framed = wrap(VERSION, b"somewhere").unwrap();
        for length in 0..framed.len() {
            assert!(unwrap(&framed[..length]).is_err(), "{length} bytes");
        }
        for bit in 0..framed.len() * 8 {
            let mut damaged = framed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(unwrap(&damaged).is_err(), "bit {bit}");
        }
        let mut longer = framed;
        longer.push(0);
        assert!(unwrap(&longer).is_err());
    }

    #[test]
    fn an_address_of_too_many_devices_is_refused() {
        assert!(wrap(VERSION, &[1; LONGEST]).is_ok());
        let failure = wrap(VERSION, &[1; LONGEST + 1]).unwrap_err();
        assert!(failure.to_string().contains("restrict the devices"), "{failure}");
    }
}
