//! Tags that arrive in parts.

/// Returns the length of the longest suffix of the text that is the beginning of one of `tags`, but not a whole tag.
pub(super) fn partial_suffix(text: &str, tags: &[&str]) -> usize {
    let longest = |tag: &&str| {
        let lengths = tag.char_indices().map(|(at, _)| at).skip(1);
        lengths.filter(|length| text.ends_with(&tag[..*length])).max().unwrap_or_default()
    };
    tags.iter().map(longest).max().unwrap_or_default()
}
