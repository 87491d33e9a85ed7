//! Filling and writing 32-bit words, checked as PyTorch checks it and with its words in the messages.
//!
//! The numbers are signed and wide, as they come from there: what does not fit is refused here and not cut off before.

use std::ops::Range;

use crate::error::{Error, Result};

const FILL: &str = "memset32";
const WRITE: &str = "write_value32";

/// Program order: sets `count` words from word `offset` on to `value`. For memory of this rank, symmetric or not; see
/// [`Open::memset32`](super::Open::memset32) for a peer's.
pub fn memset32(words: &mut [u32], offset: i64, value: i64, count: i64) -> Result<()> {
    let (range, value) = fill_range(words.len(), offset, value, count)?;
    words.get_mut(range).unwrap_or_default().fill(value);
    Ok(())
}

/// Program order: sets word `offset` to `value`. See [`Open::write_value32`](super::Open::write_value32) for a write
/// that others see after all that was written before it.
pub fn write_value32(words: &mut [u32], offset: i64, value: i64) -> Result<()> {
    let (at, value) = write_place(words.len(), offset, value)?;
    words.get_mut(at).into_iter().for_each(|word| *word = value);
    Ok(())
}

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
    fn words_are_filled_up_to_the_bounds() {
        let mut words = [0; 64];
        memset32(&mut words, 32, 42, 16).unwrap();
        assert!(words.iter().enumerate().all(|(i, w)| *w == if i / 16 == 2 { 42 } else { 0 }));
        memset32(&mut words, 0, 1, 64).unwrap();
        memset32(&mut words, 63, i64::from(u32::MAX), 1).unwrap();
        write_value32(&mut words, 62, 7).unwrap();
        assert_eq!(words[61..], [1, 7, u32::MAX]);
    }

    #[test]
    fn bad_fills_are_refused_with_the_known_words() {
        let fill = |offset, value, count| {
            memset32(&mut [0; 64], offset, value, count).unwrap_err().to_string()
        };
        assert!(fill(-1, 1, 1).contains("offset must be greater than or equal to 0"));
        assert!(fill(0, 1, 0).contains("count must be a positive integer"));
        assert!(fill(0, 1, -5).contains("count must be a positive integer"));
        assert!(fill(0, -1, 1).contains("val must be in the range of [0, 4294967295] (uint32_t)"));
        assert!(fill(0, 1 << 32, 1).contains("(uint32_t)"));
        assert!(
            fill(64, 1, 1).contains("offset + count (65) exceeded the numel of the input (64)")
        );
        assert!(fill(i64::MAX, 1, i64::MAX).contains("exceeded the numel"));
        let write =
            |offset, value| write_value32(&mut [0; 64], offset, value).unwrap_err().to_string();
        assert!(write(-1, 1).contains("offset must be"));
        assert!(write(64, 1).contains("exceeded the numel of the input (64)"));
        assert!(write(0, 1 << 32).contains("(uint32_t)"));
    }
}
