//! The hashes of a prompt's blocks.

use tandem_kv::{HashKey, ImageStart, Namespace, SequenceHash, TokenId, child_hashes};

/// Returns the hashes of the blocks that a worker may reuse. These are all full blocks, except a block that ends with the prompt's last
/// token, because that token is always computed.
pub(crate) fn reusable_hashes(
    key: &HashKey,
    namespace: &Namespace,
    block_size: u32,
    tokens: &[TokenId],
    images: &[ImageStart],
) -> Vec<SequenceHash> {
    let reusable = &tokens[..tokens.len().saturating_sub(1)];
    child_hashes(key, namespace.root(key), block_size.max(1) as usize, reusable, images)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_token_is_never_part_of_a_reusable_block() {
        let namespace = Namespace::new("m", "r", "", "");
        for (tokens, hashes) in [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)] {
            let prompt: Vec<TokenId> = (0..tokens).collect();
            assert_eq!(reusable_hashes(&HashKey::NONE, &namespace, 16, &prompt, &[]).len(), hashes, "{tokens} tokens");
        }
    }
}
