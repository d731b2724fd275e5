//! Converts vLLM's `kv_transfer_params` to KV handles and back. An engine that receives incomplete parameters crashes, so each conversion
//! checks them.

use crate::api::EngineFailure;
use serde_json::Value;

type Field = (&'static str, fn(&Value) -> bool);

/// The parameters that NIXL's connector needs to pull KV.
const FIELDS: [Field; 8] = [
    ("do_remote_prefill", |value| value == &Value::Bool(true)),
    ("do_remote_decode", |value| value == &Value::Bool(false)),
    ("remote_block_ids", Value::is_array),
    ("remote_engine_id", is_name),
    ("remote_request_id", is_name),
    ("remote_host", is_name),
    ("remote_port", |value| value.as_u64().is_some_and(|port| (1..=65_535).contains(&port))),
    ("tp_size", |value| value.as_u64().is_some_and(|size| size > 0)),
];

fn is_name(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

fn check(params: &Value) -> Result<(), EngineFailure> {
    match FIELDS.iter().find(|(field, holds)| !params.get(field).is_some_and(holds)) {
        None => Ok(()),
        Some((field, _)) => Err(EngineFailure::Protocol(format!(
            "kv_transfer_params has no valid {field}; start the engine with --kv-transfer-config and NixlConnector"
        ))),
    }
}

/// Returns the handle for the parameters that an engine returned.
///
/// # Errors
/// Fails if a parameter is missing or invalid.
pub(super) fn to_bytes(params: Option<Value>) -> Result<Vec<u8>, EngineFailure> {
    let params = params.unwrap_or_default();
    check(&params)?;
    Ok(params.to_string().into_bytes())
}

/// Returns the parameters in a handle.
///
/// # Errors
/// Fails if the bytes are not JSON, or if a parameter is missing or invalid.
pub(super) fn from_bytes(bytes: &[u8]) -> Result<Value, EngineFailure> {
    let invalid =
        |error: serde_json::Error| EngineFailure::Protocol(format!("the KV handle from the prefill worker is not JSON: {error}"));
    let params = serde_json::from_slice(bytes).map_err(invalid)?;
    check(&params)?;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns `kv_transfer_params` that were recorded from vLLM 0.32.
    fn recorded() -> Value {
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[9, 14]],
            "remote_engine_id": "eaaa58fc-8375-4e62-9be3-834d10cc4536",
            "remote_request_id": "generate-tokens-89deb18716bd20b4-9d3087c1", "remote_host": "127.0.0.1", "remote_port": 28559,
            "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 33, "remote_blocks_expiry_time": null,
            "transfer_mode": "pull", "remote_prefill_cached_tokens": 32,
        })
    }

    #[test]
    fn complete_kv_transfer_params_round_trip_and_incomplete_params_are_refused() {
        let bytes = to_bytes(Some(recorded())).expect("the recorded parameters are complete");
        assert_eq!(from_bytes(&bytes).expect("the recorded parameters are complete"), recorded());
        for (field, _) in FIELDS {
            let mut params = recorded();
            params.as_object_mut().expect("the recorded parameters are an object").remove(field);
            let error = to_bytes(Some(params.clone())).expect_err("parameters without a required field are refused").to_string();
            assert!(error.contains(field), "{error}");
            assert!(from_bytes(params.to_string().as_bytes()).is_err());
        }
        assert!(to_bytes(None).is_err() && from_bytes(b"{").is_err());
    }
}
