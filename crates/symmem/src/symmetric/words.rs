//! Filling and writing 32-bit words, checked as PyTorch checks it and with its words in the messages.
//!
//! The numbers are signed and wide, as they come from there: what does not fit is refused here and not cut off before.

use std::ops::Range;

use crate::error::{Error, Result};

const FILL: &str = "memset32";
const WRITE: &str = "write_value32";

/// The words to fill and their value.
pub(crate) fn fill_range(
    len: usize,
    offset: i64,
    value: i64,
    count: i64,
) -> Result<(Range<usize>, u32)> {
    let begin = whole(FILL, offset)?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0);
    let count =
        count.ok_or_else(|| refused(FILL, "count must be a positive integer", "none".into()))?;
    let value = word(FILL, value)?;
    let end = begin.saturating_add(count);
    if end > len {
        let what = format!("offset + count ({end}) exceeded the numel of the input ({len})");
        return Err(refused(FILL, &what, format!("{count} words at {begin}")));
    }
    Ok((begin..end, value))
}

/// The word to write and its value.
pub(crate) fn write_place(len: usize, offset: i64, value: i64) -> Result<(usize, u32)> {
    let at = whole(WRITE, offset)?;
    let value = word(WRITE, value)?;
    if at >= len {
        let what = format!("offset ({at}) exceeded the numel of the input ({len})");
        return Err(refused(WRITE, &what, at.to_string()));
    }
    Ok((at, value))
}

fn whole(op: &'static str, offset: i64) -> Result<usize> {
    let what = "offset must be greater than or equal to 0";
    usize::try_from(offset).map_err(|_| refused(op, what, offset.to_string()))
}

fn word(op: &'static str, value: i64) -> Result<u32> {
    let what = "val must be in the range of [0, 4294967295] (uint32_t)";
    u32::try_from(value).map_err(|_| refused(op, what, value.to_string()))
}

fn refused(op: &'static str, what: &str, got: String) -> Error {
    Error::Usage { op, rank: None, expected: format!("words that exist: {what}"), got }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_up_to_the_bounds() {
        assert_eq!(fill_range(64, 32, 42, 16).unwrap(), (32..48, 42));
        assert_eq!(fill_range(64, 0, 1, 64).unwrap(), (0..64, 1));
        assert_eq!(fill_range(64, 63, i64::from(u32::MAX), 1).unwrap(), (63..64, u32::MAX));
        assert_eq!(write_place(64, 62, 7).unwrap(), (62, 7));
    }

    #[test]
    fn bad_fills_are_refused_with_the_known_words() {
        let fill =
            |offset, value, count| fill_range(64, offset, value, count).unwrap_err().to_string();
        assert!(fill(-1, 1, 1).contains("offset must be greater than or equal to 0"));
        assert!(fill(0, 1, 0).contains("count must be a positive integer"));
        assert!(fill(0, 1, -5).contains("count must be a positive integer"));
        assert!(fill(0, -1, 1).contains("val must be in the range of [0, 4294967295] (uint32_t)"));
        assert!(fill(0, 1 << 32, 1).contains("(uint32_t)"));
        assert!(
            fill(64, 1, 1).contains("offset + count (65) exceeded the numel of the input (64)")
        );
        assert!(fill(i64::MAX, 1, i64::MAX).contains("exceeded the numel"));
        let write = |offset, value| write_place(64, offset, value).unwrap_err().to_string();
        assert!(write(-1, 1).contains("offset must be"));
        assert!(write(64, 1).contains("exceeded the numel of the input (64)"));
        assert!(write(0, 1 << 32).contains("(uint32_t)"));
    }
}
