//! The bounds of one-sided access to a rank's part; those of 32-bit words have PyTorch's words in the messages.

use std::ops::Range;

use crate::error::Result;
use crate::group::Group;

/// Refuses elements from `at` on that are not all among the `len` of rank `rank`.
pub(crate) fn check_elements(
    group: &Group,
    op: &'static str,
    (rank, len): (usize, usize),
    at: usize,
    count: usize,
) -> Result<()> {
    group.check_rank(op, rank)?;
    if at.checked_add(count).is_some_and(|end| end <= len) {
        return Ok(());
    }
    let expected = format!("elements within the {len} of rank {rank}");
    Err(group.usage(op, expected, format!("{count} at {at}")))
}

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
pub(crate) fn check_word_exists(group: &Group, len: usize, offset: usize) -> Result<()> {
    if offset < len {
        return Ok(());
    }
    let expected =
        format!("words that exist: offset ({offset}) exceeded the numel of the input ({len})");
    Err(group.usage("write_value32", expected, offset.to_string()))
}
