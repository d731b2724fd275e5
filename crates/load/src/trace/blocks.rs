//! Rows of traces in Mooncake's format.

use super::Problem;
use serde::Deserialize;
use serde_json::Value;

/// A request that is described by its lengths and by the ids of its prompt's blocks. Two prompts have the same text in blocks with the same
/// id.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TraceBlocks {
    /// The number of tokens in the prompt.
    pub input_length: u64,
    /// The number of tokens in the answer.
    pub output_length: u64,
    /// The ids of the prompt's blocks, in order. The last block may be incomplete.
    pub hash_ids: Vec<u64>,
}

impl TraceBlocks {
    pub(super) fn parse(value: Value, block_tokens: u64) -> Result<Self, Problem> {
        for field in ["input_length", "output_length", "hash_ids"] {
            if value.get(field).is_none() {
                return Err(Problem::Missing(field));
            }
        }
        let row: Self = serde_json::from_value(value).map_err(|error| Problem::Json(error.to_string()))?;
        if row.input_length == 0 {
            return Err(Problem::Zero("input_length"));
        }
        if row.output_length == 0 {
            return Err(Problem::Zero("output_length"));
        }
        // Some traces name only complete blocks; others also name the incomplete block at a prompt's end.
        let (ids, complete) = (row.hash_ids.len() as u64, row.input_length / block_tokens);
        if ids < complete || ids > row.input_length.div_ceil(block_tokens) {
            return Err(Problem::Blocks { ids, block_tokens, input_length: row.input_length });
        }
        Ok(row)
    }
}
