//! Filling and writing 32-bit words: the bounds, with PyTorch's words in the messages.

use std::ops::Range;

use crate::error::Result;
use crate::group::Group;

/// The words to fill.
pub(crate) fn fill_range(
    group: &Group,
    len: usize,
    offset: usize,
    count: usize,
) -> Result<Range<usize>> {
    const NAME: &str = "memset32";
    if count == 0 {
        let expected = "words that exist: count must be a positive integer".to_owned();
        return Err(group.usage(NAME, expected, "0".to_owned()));
    }
    let end = offset.saturating_add(count);
    if end > len {
        let expected = format!(
            "words that exist: offset + count ({end}) exceeded the numel of the input ({len})"
        );
        return Err(group.usage(NAME, expected, format!("{count} words at {offset}")));
    }
    Ok(offset..end)
}

/// Refuses a word to write that does not exist.
pub(crate) fn check_place(group: &Group, len: usize, offset: usize) -> Result<()> {
    if offset < len {
        return Ok(());
    }
    let expected =
        format!("words that exist: offset ({offset}) exceeded the numel of the input ({len})");
    Err(group.usage("write_value32", expected, offset.to_string()))
}
