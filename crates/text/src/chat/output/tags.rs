//! Tags that arrive in parts.

/// While a text without a result has at most this many bytes, it is parsed again with every chunk.
const EAGER_BYTES_MAX: usize = 4096;

/// Returns the length at which a text without a result is parsed again. A long text must grow by an eighth, so that the work stays proportional to
/// its length.
pub(super) fn next_try(len: usize) -> usize {
    if len > EAGER_BYTES_MAX { len + len / 8 } else { 0 }
}

/// Returns the length of the longest suffix of the text that is the beginning of one of `tags`, but not a whole tag.
pub(super) fn partial_suffix(text: &str, tags: &[&str]) -> usize {
    let longest = |tag: &&str| {
        let lengths = tag.char_indices().map(|(at, _)| at).skip(1);
        lengths.filter(|length| text.ends_with(&tag[..*length])).max().unwrap_or_default()
    };
    tags.iter().map(longest).max().unwrap_or_default()
}
