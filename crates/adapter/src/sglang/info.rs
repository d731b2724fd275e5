//! What a SGLang server reports about itself at `/server_info`.

use crate::{
    adapter::EngineExchange,
    api::{EngineFailure, Instance},
    calls, failure,
    http::EngineHttp,
    kv_events::EventSource,
    server::ConnectError,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The largest number of data-parallel ranks that is used.
const RANKS_MAX: u32 = 1_024;

/// The fields of `/server_info` that the adapter uses: settings of the server, and the state of its ranks.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ServerInfo {
    pub version: Option<String>,
    model_path: Option<String>,
    tokenizer_path: Option<String>,
    /// The number of tokens in a block.
    page_size: Option<u32>,
    /// The number of tokens that fit into the KV memory of a rank.
    max_total_num_tokens: Option<u64>,
    /// Prompts must be shorter than this, in tokens.
    pub max_req_input_len: Option<u32>,
    kv_events: Option<EventPublisher>,
    disaggregation_mode: Option<String>,
    disaggregation_transfer_backend: Option<String>,
    /// The port of the host at which the decode server meets a prefill server.
    disaggregation_bootstrap_port: Option<u16>,
    dtype: Option<String>,
    kv_cache_dtype: Option<String>,
    tp_size: Option<u32>,
    grammar_backend: Option<String>,
    dp_size: Option<u32>,
    attn_dp_size: Option<u32>,
    pub disable_radix_cache: bool,
    pub enable_deterministic_inference: bool,
    /// Whether each event of a streamed answer has only new tokens. If not, it has all tokens of the answer so far.
    pub incremental_streaming_output: bool,
    pub reasoning_parser: Option<String>,
    internal_states: Vec<RankState>,
    /// How long the parts of the server's start took. In practice no two starts are equal.
    startup_time: Value,
}

#[derive(Debug, Deserialize)]
struct RankState {
    effective_max_running_requests_per_dp: Option<usize>,
}

/// The ZMQ addresses of rank 0's KV events. The server adds the rank to the ports.
#[derive(Debug, Deserialize)]
struct EventPublisher {
    endpoint_host: String,
    endpoint_port_base: u16,
    replay_endpoint_port_base: Option<u16>,
    #[serde(default)]
    topic: String,
    block_size: Option<u32>,
}

/// The sizes of a rank's KV memory, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvSizes {
    pub block: u32,
    pub capacity: u64,
}

impl ServerInfo {
    /// Reads the server's description.
    ///
    /// # Errors
    /// Fails if the server does not answer, or answers with an error.
    pub async fn read(http: &EngineHttp) -> Result<Self, EngineFailure> {
        calls::get_json(http, "/server_info").await
    }

    /// Returns how the server exchanges KV with others. `model` is its model, and `host` the host of its address.
    ///
    /// # Errors
    /// Fails if the server computes one half of its requests in a way that the adapter does not know.
    pub fn exchange(&self, model: &str, host: &str) -> Result<EngineExchange, ConnectError> {
        let mode = self.disaggregation_mode.as_deref().unwrap_or("null");
        let wrong = |why: String| Err(ConnectError::Disaggregated(why));
        let address = match (mode, self.disaggregation_bootstrap_port) {
            ("null", _) => return Ok(EngineExchange::None),
            ("prefill", Some(port)) => Some(format!("{host}:{port}").into()),
            ("decode", _) => None,
            ("prefill", None) => {
                return wrong(
                    "the engine's /server_info has no disaggregation_bootstrap_port; use SGLang 0.5.23 or later".to_owned(),
                );
            }
            (other, _) => {
                return wrong(format!("the engine runs with an unknown --disaggregation-mode {:?}", failure::shortened(other)));
            }
        };
        if self.ranks() > 1 {
            return wrong(format!(
                "the engine runs with --disaggregation-mode {mode} and several data-parallel ranks; start a server for each rank"
            ));
        }
        let part = |part: &Option<String>| part.as_deref().map_or_else(|| "unknown".to_owned(), failure::shortened);
        let Self { version, dtype, kv_cache_dtype, disaggregation_transfer_backend: back_end, page_size, tp_size, .. } = self;
        let family = format!(
            "room/sglang-{}/{}/{model}/{}/{}/page-{}/tp-{}/{}/{}/seeds-{}",
            part(version),
            part(back_end),
            part(dtype),
            part(kv_cache_dtype),
            page_size.unwrap_or(0),
            tp_size.unwrap_or(1),
            part(&self.grammar_backend),
            part(&self.reasoning_parser),
            self.enable_deterministic_inference
        );
        Ok(EngineExchange::Rooms { family: family.into(), address })
    }

    /// Returns the sizes of the KV memory.
    ///
    /// # Errors
    /// Fails if the server does not report them.
    pub fn kv_sizes(&self) -> Result<KvSizes, ConnectError> {
        let block = self.kv_events.as_ref().and_then(|publisher| publisher.block_size).or(self.page_size);
        match (block, self.max_total_num_tokens) {
            (Some(block @ 1..), Some(capacity)) => Ok(KvSizes { block, capacity }),
            _ => Err(ConnectError::NoKvSizes),
        }
    }

    /// Returns the name or path from which the server loaded its tokenizer: that of its model, unless it has another.
    pub fn root(&self) -> Option<String> {
        self.tokenizer_path.clone().or_else(|| self.model_path.clone())
    }

    /// Returns the number of data-parallel ranks: replicas, or groups of attention.
    pub fn ranks(&self) -> u32 {
        let size = |size: Option<u32>| size.unwrap_or(1).max(1);
        size(self.dp_size).saturating_mul(size(self.attn_dp_size)).min(RANKS_MAX)
    }

    /// Returns how many requests a rank runs at a time; `None` if the server does not report it.
    pub fn running_max(&self, rank: u32) -> Option<usize> {
        self.internal_states.get(rank as usize)?.effective_max_running_requests_per_dp
    }

    /// Returns where a rank publishes its KV events; `None` if it publishes none.
    pub fn event_source(&self, rank: u32) -> Option<EventSource> {
        let EventPublisher { endpoint_host: host, endpoint_port_base, replay_endpoint_port_base, topic, .. } =
            self.kv_events.as_ref()?;
        let at = |port: u16| format!("tcp://{host}:{}", u32::from(port) + rank);
        let replay_endpoint = replay_endpoint_port_base.map(at);
        Some(EventSource { endpoint: at(*endpoint_port_base), replay_endpoint, topic: topic.clone() })
    }

    /// Returns a value that differs between two runs of the server at one address.
    pub fn instance(&self) -> Instance {
        (!self.startup_time.is_null()).then(|| self.startup_time.to_string())
    }
}

/// Returns the number of tokens in the server's vocabulary; `None` if the server does not say it. The server names it only when it refuses a token
/// beyond its vocabulary in a place where it checks tokens. It does not check those of a prompt: one beyond the vocabulary ends the server.
///
/// # Errors
/// Fails if the server does not answer, or refuses the request for another reason.
pub(super) async fn vocab_size(http: &EngineHttp) -> Result<Option<usize>, EngineFailure> {
    let params = json!({ "max_new_tokens": 0, "logit_bias": { u32::MAX.to_string(): 0.0 } });
    match calls::post(http, "/generate", &json!({ "input_ids": [0], "sampling_params": params })).await {
        Err(EngineFailure::Invalid(message)) => Ok(last_token(&message).map(|last| last + 1)),
        answer => answer.map(|_| None),
    }
}

/// Returns the last token of the range `[0, LAST]` in a message.
fn last_token(message: &str) -> Option<usize> {
    message.split_once("[0, ")?.1.split_once(']')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields recorded from SGLang 0.5.23, with two ranks.
    const INFO: &str = r#"{"model_path":"/m","tokenizer_path":"/m","page_size":16,"max_total_num_tokens":8192,"max_req_input_len":4090,"disaggregation_mode":"null","dp_size":2,"attn_dp_size":1,"disable_radix_cache":false,"enable_deterministic_inference":false,"incremental_streaming_output":false,"reasoning_parser":null,"max_running_requests":null,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":16,"dp_size":2,"replay_endpoint_port_base":5657},"internal_states":[{"effective_max_running_requests_per_dp":48},{"effective_max_running_requests_per_dp":47}],"startup_time":{"load_weight":1.25,"tokenizer_e2e":35.5},"version":"0.5.23","frontend":"python"}"#;

    fn info(change: &[(&str, Value)]) -> ServerInfo {
        let mut info: serde_json::Map<String, Value> = serde_json::from_str(INFO).expect("the description is JSON");
        info.extend(change.iter().map(|(field, value)| ((*field).to_owned(), value.clone())));
        serde_json::from_value(info.into()).expect("the description is valid")
    }

    #[test]
    fn ranks_sizes_and_addresses_are_read() {
        let server = info(&[]);
        assert_eq!(server.kv_sizes().expect("the sizes are reported"), KvSizes { block: 16, capacity: 8_192 });
        assert_eq!((server.ranks(), server.running_max(1), server.running_max(2)), (2, Some(47), None));
        assert_eq!(server.root().as_deref(), Some("/m"));
        let source = server.event_source(1).expect("the server publishes events");
        assert_eq!(
            (&*source.endpoint, source.replay_endpoint.as_deref(), &*source.topic),
            ("tcp://*:5558", Some("tcp://*:5658"), "kv")
        );
        assert!(info(&[("kv_events", Value::Null)]).event_source(0).is_none());
        assert_eq!(info(&[("dp_size", u32::MAX.into()), ("attn_dp_size", 9.into())]).ranks(), RANKS_MAX);
    }

    /// The first message was recorded from SGLang 0.5.23.
    #[test]
    fn size_of_the_vocabulary_is_read_from_the_message() {
        assert_eq!(last_token("logit_bias must has keys in [0, 49151], got 4294967295."), Some(49_151));
        for other in ["", "keys in [0, ", "keys in [0, x]", "keys in [0, -1]"] {
            assert_eq!(last_token(other), None, "{other}");
        }
    }

    #[test]
    fn each_start_is_another_instance() {
        let of = |startup_time: Value| info(&[("startup_time", startup_time)]).instance();
        assert_ne!(of(serde_json::json!({ "tokenizer_e2e": 35.5 })), of(serde_json::json!({ "tokenizer_e2e": 35.25 })));
        assert_eq!(of(Value::Null), None);
    }

    #[test]
    fn prefill_and_decode_servers_meet_only_within_their_family() {
        let of = |mode: &str, change: (&str, Value)| {
            let port = ("disaggregation_bootstrap_port", 8_998.into());
            info(&[("dp_size", 1.into()), ("disaggregation_mode", mode.into()), port, change]).exchange("m", "10.0.0.1")
        };
        let same = || ("dtype", "float32".into());
        let family = |exchange| match exchange {
            Ok(EngineExchange::Rooms { family, address }) => (family, address),
            other => panic!("{other:?}"),
        };
        let ((prefill, address), (decode, none)) = (family(of("prefill", same())), family(of("decode", same())));
        assert_eq!((&prefill, address.as_deref(), none), (&decode, Some("10.0.0.1:8998"), None));
        for other in [
            ("dtype", "bfloat16".into()),
            ("version", "0.5.24".into()),
            ("page_size", 32.into()),
            ("kv_cache_dtype", "fp8".into()),
            ("disaggregation_transfer_backend", "nixl".into()),
            ("tp_size", 2.into()),
            ("grammar_backend", "outlines".into()),
            ("reasoning_parser", "qwen3".into()),
            ("enable_deterministic_inference", true.into()),
        ] {
            assert_ne!(family(of("prefill", other.clone())).0, prefill, "{other:?}");
        }
        assert!(matches!(info(&[]).exchange("m", "h"), Ok(EngineExchange::None)));
        for (mode, change, problem) in [
            ("decode", ("dp_size", 2.into()), "several data-parallel ranks"),
            ("prefill", ("disaggregation_bootstrap_port", Value::Null), "no disaggregation_bootstrap_port"),
            ("encode", same(), "unknown --disaggregation-mode \"encode\""),
        ] {
            let refused = of(mode, change).expect_err(mode).to_string();
            assert!(refused.contains(problem), "{refused}");
        }
    }

    #[test]
    fn server_without_sizes_is_refused() {
        for field in ["max_total_num_tokens", "page_size"] {
            let server = info(&[("kv_events", Value::Null), (field, Value::Null)]);
            assert!(matches!(server.kv_sizes(), Err(ConnectError::NoKvSizes)), "{field}");
        }
        assert!(matches!(info(&[("kv_events", Value::Null), ("page_size", 0.into())]).kv_sizes(), Err(ConnectError::NoKvSizes)));
    }
}
